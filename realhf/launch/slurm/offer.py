"""The resources of a cluster, as SLURM reports them with and without accounting. Submitting needs none of this."""

import getpass
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from realhf.base.durations import DAY_S, HOUR_S, MINUTE_S
from realhf.base.errors import UserError
from realhf.launch.slurm.commands import slurm_command

_TIMEOUT_S = 3.0  # for each question, so that a refusal comes within ten seconds
_PARTITIONS = "--format=%P|%a|%l|%D|%c|%m|%G|%f"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Nodes of one kind in a partition. `gpus`: how many of each type a node has; "" is for GPUs without a type.
    `time_limit`: "" for none."""

    partition: str
    is_default: bool = False
    is_up: bool = True
    time_limit: str = ""
    count: int
    cpus: int
    memory_mb: int
    gpus: dict[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        number = f"{self.count} node{'s' * (self.count != 1)}"
        gpus = "".join(f", {many} GPUs{kind and f' of type {kind}'}" for kind, many in self.gpus.items())
        return f"{number} with {self.cpus} CPUs, {self.memory_mb / 1024:.4g} GiB{gpus or ', no GPU'}"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """`accounts` and `qos` are those that this user may name, with the time limit of each QOS ("" for none); None where
    SLURM does not tell, as without accounting."""

    nodes: tuple[Nodes, ...] = ()
    accounts: tuple[str, ...] | None = None
    qos: dict[str, str] | None = None

    @property
    def partitions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.partition for one in self.nodes))

    def nodes_of(self, partition: str | None) -> tuple[Nodes, ...]:
        """Those of some partitions, as sbatch names them; None: of the default one."""
        names = partition.split(",") if partition else [one.partition for one in self.nodes if one.is_default]
        return tuple(one for one in self.nodes if one.partition in names)

    def cpus_per_gpu(self, partition: str | None, gpu_type: str | None) -> int:
        """A GPU's share of its node's CPUs, one being kept for the master; 1 where it is not known."""
        shares = [
            (one.cpus - 1) // sum(one.gpus.values())
            for one in self.nodes_of(partition)
            if one.gpus and (gpu_type is None or gpu_type in one.gpus)
        ]
        return min((max(1, share) for share in shares), default=1)

    def gpus_per_node(self, partition: str | None, gpu_type: str | None) -> int | None:
        """How many GPUs the nodes of a partition have, if all that have any have as many; None where that is not
        known."""
        numbers = {
            sum(one.gpus.values()) if gpu_type is None else one.gpus[gpu_type]
            for one in self.nodes_of(partition)
            if one.gpus and (gpu_type is None or gpu_type in one.gpus)
        }
        return numbers.pop() if len(numbers) == 1 else None


def ask() -> Offer:
    """Asks SLURM. Facts that it does not report are missing."""
    accounts, qos = read_accounting(
        _lines("sacctmgr", "-nP", "show", "associations", f"user={getpass.getuser()}", "format=account,qos"),
        _lines("sacctmgr", "-nP", "show", "qos", "format=name,maxwall"),
    )
    return Offer(nodes=read_nodes(_lines("sinfo", "--noheader", _PARTITIONS)), accounts=accounts, qos=qos)


def read_accounting(
    associations: Iterable[str], qos: Iterable[str]
) -> tuple[tuple[str, ...] | None, dict[str, str] | None]:
    """The accounts of a user, and the QOS that they allow with their time limits, from the output of `sacctmgr`."""
    allowed = [line.strip().split("|") for line in associations if line.count("|") == 1]
    limits = dict(line.strip().split("|") for line in qos if line.count("|") == 1)
    names = {name for _, of_one in allowed for name in of_one.split(",") if name}
    return (
        tuple(dict.fromkeys(account for account, _ in allowed)) or None,
        {name: limit for name, limit in limits.items() if name in names or not names} or None,
    )


def read_nodes(lines: Iterable[str]) -> tuple[Nodes, ...]:
    """The nodes in the output of `sinfo`; unknown lines are passed over."""
    found = []
    for line in lines:
        columns = line.strip().split("|")
        if len(columns) < 8 or not all(re.match(r"\d", column) for column in columns[3:6]):
            continue
        partition, up, limit, *numbers, gres, features = columns[:8]
        count, cpus, memory_mb = (int(re.match(r"\d+", number)[0]) for number in numbers)  # type: ignore[index]
        found.append(
            Nodes(
                partition=partition.rstrip("*"),
                is_default=partition.endswith("*"),
                is_up=up == "up",
                time_limit="" if limit in ("infinite", "n/a") else limit,
                count=count,
                cpus=cpus,  # "8+": at least
                memory_mb=memory_mb,
                gpus=read_gpus(gres),
                features=frozenset(features.split(",")) - {"(null)", ""},
            )
        )
    return tuple(found)


def read_gpus(gres: str) -> dict[str, int]:
    """`gpu:a100:8(S:0-1),nvme:1` -> {"a100": 8}."""
    gpus: dict[str, int] = {}
    for kind, number in re.findall(r"\bgpu(?::([A-Za-z_][\w.-]*))?:(\d+)", gres):
        gpus[kind] = gpus.get(kind, 0) + int(number)
    return gpus


def seconds_of(limit: str) -> float | None:
    """The seconds of a time limit as sbatch takes it, such as 90 (minutes), 1:30:00 or 2-12; None for another text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    # Minutes, minutes:seconds or hours:minutes:seconds; behind days hours, hours:minutes or all three.
    units_s = (HOUR_S, MINUTE_S, 1) if days is not None or len(numbers) == 3 else (MINUTE_S, 1)
    return int(days or 0) * DAY_S + sum(number * unit_s for number, unit_s in zip(numbers, units_s, strict=False))


def _lines(*command: str) -> list[str]:
    try:
        shown = slurm_command(*command, timeout_s=_TIMEOUT_S)
    except UserError:  # no such command
        return []
    return shown.stdout.splitlines() if shown.returncode == 0 else []
