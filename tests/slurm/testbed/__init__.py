"""A private SLURM cluster of virtual nodes on one machine, for tests; root or not.

Real `slurmctld`, one `slurmd` a node and an own `munged` (with accounting also `slurmdbd` and
`mariadbd`), all in one directory, on ports of their own. It needs the Debian packages munge,
slurmctld, slurmd, slurm-client; for accounting also slurmdbd, mariadb-server-core and
mariadb-client-core. GPUs are links to /dev/null: requests for them and a distinct
CUDA_VISIBLE_DEVICES a task are real, nothing computes on them.

Each daemon runs below a keeper (`keeper.py`), so that whatever a daemon and its jobs fork can be
found and ended, and no process of anybody else is ever signalled. From a shell, in tests/slurm:

    python -m testbed up --nodes 2 --gpus 2
    eval "$(python -m testbed env)"; sinfo
    python -m testbed fail node2; python -m testbed heal node2
    python -m testbed down
"""
