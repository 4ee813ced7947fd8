"""Why a job cannot run: the settings that a cluster does not offer, by name, and its alternatives."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from realhf.launch.process import Job
from realhf.launch.slurm.offer import Nodes, Offer, seconds_of
from realhf.launch.slurm.script import SlurmOptions

_MB = {"K": 2**-10, "": 1, "M": 1, "G": 2**10, "T": 2**20}


def refusal(said: str, options: SlurmOptions, job: Job, offer: Offer) -> str:
    """The text for the user, from SLURM's message `said`."""
    wrong = list(unmet(options, job, offer))
    text = f"SLURM refused the job: {said}"
    if wrong:
        return f"{text}\n" + "\n".join(wrong)
    if not offer.nodes:
        return f"{text}; check partition, account, nodes and limits (sinfo does not tell what the cluster has)"
    has = "".join(f"\n  {_partition(name, offer.nodes_of(name))}" for name in offer.partitions)
    names = _of_user(offer)
    return f"{text}; the job asks for {job_size(options, job)}. The cluster has{has}{names}"


def job_size(options: SlurmOptions, job: Job) -> str:
    """The size of a job in words."""
    cpus = job.workers_per_node * (options.cpus_per_worker or 1) + 1
    gpus = (
        ""
        if options.cpu_only
        else f", {job.workers_per_node} GPUs{(options.gpu_type and f' of type {options.gpu_type}') or ''}"
    )
    nodes = len(job.workers) // job.workers_per_node
    return (
        f"{nodes} node{'s' * (nodes != 1)} with {cpus} CPUs{(options.mem and f', {options.mem} of memory') or ''}{gpus}"
    )


def unmet(options: SlurmOptions, job: Job, offer: Offer) -> Iterator[str]:
    """A sentence for each setting that the cluster does not have, the most general first."""
    yield from unknown_names(options, offer)
    nodes = offer.nodes_of(options.partition)
    if not nodes:
        if options.partition is None and offer.nodes:
            yield f"no partition is the default one: give --partition, one of {', '.join(offer.partitions)}"
        return
    where = f"partition {', '.join(dict.fromkeys(one.partition for one in nodes))}"
    has = f"{where} has {_kinds(nodes)}"
    features = {feature for one in nodes for feature in one.features}
    for feature in _constraint(options.sbatch):
        if feature not in features:
            yield f"--sbatch=--constraint={feature}: {where} has {', '.join(sorted(features)) or 'no features'}"
    yield from _too_large(options, job, nodes, has)
    limits = sorted((seconds_of(one.time_limit) or math.inf, one.time_limit) for one in nodes)
    if _is_longer(options.time_limit, limits[-1][0]):
        yield f"--time-limit {options.time_limit}: {where} allows {limits[-1][1]}"


def unknown_names(options: SlurmOptions, offer: Offer) -> Iterator[str]:
    """As `unmet`, for settings that can be checked without a job."""
    for partition in (options.partition or "").split(","):
        if partition and offer.partitions and partition not in offer.partitions:
            yield f"--partition {partition}: the cluster has {', '.join(offer.partitions)}"
    if options.account and offer.accounts is not None and options.account not in offer.accounts:
        yield f"--account {options.account}: yours are {', '.join(offer.accounts)}"
    qos = value_of(options.sbatch, "--qos", "-q")
    if qos and offer.qos is not None and qos not in offer.qos:
        yield f"--sbatch=--qos={qos}: yours are {', '.join(offer.qos)}"
    allowed = (offer.qos or {}).get(qos or "", "")
    if _is_longer(options.time_limit, seconds_of(allowed) or math.inf):
        yield f"--time-limit {options.time_limit}: QOS {qos} allows {allowed}"


def _too_large(options: SlurmOptions, job: Job, nodes: Sequence[Nodes], has: str) -> Iterator[str]:
    """Judged setting by setting: a partition may still have no node that has all of it."""
    number, gpus = len(job.workers) // job.workers_per_node, job.workers_per_node
    if number > (total := sum(one.count for one in nodes)):
        yield f"--nodes {number}: {has}, {total} in all"
    if not options.cpu_only:
        kinds = sorted({kind for one in nodes for kind in one.gpus if kind})
        if options.gpu_type and options.gpu_type not in kinds:
            yield f"--gpu-type {options.gpu_type}: {has}; its types are {', '.join(kinds) or 'not named: leave it out'}"
        elif gpus > max(_gpus(one, options.gpu_type) for one in nodes):
            yield f"--gpus-per-node {gpus}: {has}" + ("" if any(one.gpus for one in nodes) else "; give --cpu-only")
            return  # the CPUs of its workers may be the share of fewer GPUs
    cpus = options.cpus_per_worker or 1
    if gpus * cpus + 1 > (most := max(one.cpus for one in nodes)):
        yield (
            f"--cpus-per-worker {cpus}: {gpus} workers a node and the master need {gpus * cpus + 1} CPUs of a node; "
            f"{has}; give --cpus-per-worker {(most - 1) // gpus}"
            if most > gpus
            else f"{gpus} workers a node and the master need a CPU each; {has}; give --gpus-per-node {max(most - 1, 1)}"
        )
    if options.mem and _memory_mb(options.mem) > max(one.memory_mb for one in nodes):
        yield f"--mem {options.mem}: {has}"


def value_of(words: Iterable[str], long: str, short: str) -> str | None:
    """The value of sbatch's last option of this name; None without one."""
    values = re.findall(rf"(?:^|\s)(?:{long}(?:=|\s+)|{short}\s*)(\S+)", "\n".join(words))
    return values[-1] if values else None


def _constraint(words: Iterable[str]) -> list[str]:
    """The features that are named: of `[a|b]&c*2` a, b and c."""
    text = value_of(words, "--constraint", "-C") or ""
    return [word for word in re.split(r"[^\w.:+-]+", text.strip("'\"")) if word and not word.isdecimal()]


def _gpus(one: Nodes, gpu_type: str | None) -> int:
    return sum(number for kind, number in one.gpus.items() if gpu_type in (None, kind))


def _is_longer(time_limit: str | None, allowed_s: float) -> bool:
    limit_s = seconds_of(time_limit or "")
    return limit_s is not None and limit_s > allowed_s


def _memory_mb(size: str) -> float:
    return int(size.rstrip("KMGT")) * _MB[size.lstrip("0123456789")]


def _kinds(nodes: Iterable[Nodes]) -> str:
    return "; ".join(dict.fromkeys(map(str, nodes)))


def _partition(name: str, nodes: Sequence[Nodes]) -> str:
    limit = f"; at most {nodes[0].time_limit}" if nodes[0].time_limit else ""
    of = [" (default)" * nodes[0].is_default, " (down)" * (not nodes[0].is_up)]
    return f"{name}{''.join(of)}: {_kinds(nodes)}{limit}"


def _of_user(offer: Offer) -> str:
    accounts = f"; your accounts: {', '.join(offer.accounts)}" if offer.accounts else ""
    return f"{accounts}; your QOS: {', '.join(offer.qos)}" if offer.qos else accounts
