"""Training of any torch module with operator-sharded data parallelism, on the processes of torchrun, without the rest
of this project: `realhf.osdp`."""
