"""Hosts of their own on one machine, with a SLURM cluster over them, for tests; needs root.

Each host has its own network, host name, /etc/hosts, processes, boot id and /dev/shm; files are shared. host0 has
SLURM's controller and stands for a login node, host1, host2, ... are its nodes. All hang on a bridge in a network of
its own, with addresses 10.77.0.10, 10.77.0.11, ... on the interface fab0; a decoy interface, dec0, leads nowhere. The
machine's own network is not touched. Nothing of a host outlives its first process: when that is killed the kernel ends
all processes of the host and takes its network apart.

It needs the Debian packages iproute2, util-linux, nftables and faketime, and those of `testbed`. From a shell, in
tests/slurm:

    python -m hosts up --hosts 3
    python -m hosts exec host0 sinfo
    python -m hosts silence host2; python -m hosts unsilence host2
    python -m hosts down
"""
