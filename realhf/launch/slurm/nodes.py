"""What SLURM says of nodes: those of a job, and those that can be used."""

import re
from collections.abc import Sequence

from realhf.launch.slurm.job import slurm_command

# States of a node that takes jobs, now or when the ones before have ended. Whatever else is shown counts as lost.
_USABLE = frozenset({"idle", "mixed", "allocated", "completing", "planned", "reserved"})
# What sinfo writes behind a state: powered down, powering up, ... But "*" is for a node that does not answer.
_SUFFIXES = "~#!%$@^-+"


def usable_nodes(partition: str | None, nodelist: str | None) -> list[str] | None:
    """The nodes of a partition (None: the default one) or of a list that take jobs; None if SLURM does not answer."""
    words = ["--noheader", "--Node", "--Format=NodeList:200,StateLong:60,Partition:200"]
    words += [f"--partition={partition}"] if partition else []
    words += [f"--nodes={nodelist}"] if nodelist else []
    shown = slurm_command("sinfo", *words)
    if shown.returncode != 0:
        return None
    rows = [line.split() for line in shown.stdout.splitlines() if line.strip()]
    defaults = [row for row in rows if row[2].endswith("*")]
    return read_nodes(rows if partition or nodelist or not defaults else defaults)


def read_nodes(rows: Sequence[Sequence[str]]) -> list[str]:
    """The names of the usable nodes among rows of sinfo: (name, state, ...)."""
    return list(dict.fromkeys(name for name, state, *_ in rows if state.rstrip(_SUFFIXES) in _USABLE))


def job_nodes(job_id: str) -> list[str]:
    """The nodes of a job in the order of its tasks; [] where SLURM has forgotten it."""
    shown = slurm_command("scontrol", "show", "job", "--oneliner", job_id)
    found = re.search(r"\bNodeList=(\S+)", shown.stdout) if shown.returncode == 0 else None
    return expand(found[1]) if found and found[1] != "(null)" else []


def expand(nodelist: str) -> list[str]:
    """node[1-2] -> node1, node2."""
    return slurm_command("scontrol", "show", "hostnames", nodelist).stdout.split()


def without_nodes(nodelist: str | None, avoided: Sequence[str]) -> tuple[str | None, str | None]:
    """(nodelist, exclude) to ask SLURM for, such that the nodes to avoid are not among those of a job."""
    if not avoided or nodelist is None:
        return nodelist, ",".join(avoided) or None
    return ",".join(name for name in expand(nodelist) if name not in avoided), None
