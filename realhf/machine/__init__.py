"""The machine that this process runs on: its GPUs, cores and memory."""
