"""The text of the testbed's configuration files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GPU_TYPE = "toy"


@dataclass(frozen=True, kw_only=True)
class TestbedShape:
    """How many virtual nodes, and what each of them claims to have."""

    __test__ = False  # not a test, whatever pytest makes of the name

    nodes: int = 4
    cpus: int = 8
    gpus: int = 8
    memory_mb: int = 16_000
    with_accounting: bool = False
    node_prefix: str = "node"
    tells_of_preemption: bool = True  # by the signal of --signal; else by SIGTERM to the steps
    slurmd_timeout_s: int = 600  # on a busy machine daemons answer late, and are not lost

    def __post_init__(self) -> None:
        if not (1 <= self.nodes <= 200 and self.cpus >= 1 and self.gpus >= 0):
            raise ValueError(f"need 1 to 200 nodes, 1 or more cpus, 0 or more gpus: {self}")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"{self.node_prefix}{i}" for i in range(1, self.nodes + 1))

    @property
    def all_nodes(self) -> str:
        """As SLURM writes them."""
        return f"{self.node_prefix}[1-{self.nodes}]"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a testbed lives: its directory, this machine, and `shape.nodes + 3` free ports from `port` on."""

    directory: Path
    host: str
    user: str
    port: int
    controller_address: str = "127.0.0.1"

    @property
    def accounting_port(self) -> int:
        return self.port + 1

    @property
    def database_port(self) -> int:
        return self.port + 2

    def node_port(self, number: int) -> int:
        return self.port + 2 + number

    def node_address(self, number: int) -> str:
        """The loopback address of node `number`, which counts from 1."""
        return f"127.0.1.{number}"


def slurm_conf(shape: TestbedShape, place: Place) -> str:
    d = place.directory
    lines = [
        "ClusterName=testbed",
        f"SlurmctldHost={place.host}({place.controller_address})",
        f"SlurmctldPort={place.port}",
        f"SlurmUser={place.user}",
        f"SlurmdUser={place.user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={d}/run/munge.sock",
        f"StateSaveLocation={d}/state",
        f"SlurmdSpoolDir={d}/spool/%n",
        f"SlurmctldPidFile={d}/run/slurmctld.slurm",
        f"SlurmdPidFile={d}/run/%n.slurm",
        f"SlurmctldLogFile={d}/log/slurmctld.log",
        f"SlurmdLogFile={d}/log/%n.log",
        f"JobCompLoc={d}/log/jobcomp.txt",
        "JobCompType=jobcomp/filetxt",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=sched_min_interval=0,sched_interval=5,bf_interval=5,batch_sched_delay=0",
        "PropagateResourceLimits=NONE",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        f"SlurmdTimeout={shape.slurmd_timeout_s}",
        "BatchStartTimeout=600",
        "MessageTimeout=30",
        "UnkillableStepTimeout=600",
        "KillWait=10",
        "MinJobAge=86400",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
    ]
    if shape.tells_of_preemption:
        lines.append("SlurmctldParameters=preempt_send_user_signal")
    if shape.gpus:
        lines.append("GresTypes=gpu")
    if shape.with_accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={place.accounting_port}",
            f"AccountingStoragePass={d}/run/munge.sock",
            "AccountingStorageTRES=gres/gpu",
            "AccountingStorageEnforce=associations,qos,limits",
        ]
    gres = f" Gres=gpu:{GPU_TYPE}:{shape.gpus}" if shape.gpus else ""
    lines += [
        f"NodeName={name} NodeAddr={place.node_address(i)} Port={place.node_port(i)} CPUs={shape.cpus} Boards=1 "
        f"SocketsPerBoard=1 CoresPerSocket={shape.cpus} ThreadsPerCore=1 RealMemory={shape.memory_mb}{gres}"
        for i, name in enumerate(shape.node_names, 1)
    ]
    nodes = f"Nodes={shape.all_nodes} DefaultTime=60"
    lines += [
        f"PartitionName=main {nodes} Default=YES PriorityTier=1 GraceTime=10",
        f"PartitionName=urgent {nodes} Default=NO PriorityTier=10 GraceTime=0",
    ]
    return _text(lines)


def gres_conf(shape: TestbedShape, place: Place) -> str:
    if not shape.gpus:
        return ""
    files = f"{place.directory}/dev/gpu[0-{shape.gpus - 1}]"
    return _text([f"NodeName={shape.all_nodes} Name=gpu Type={GPU_TYPE} File={files}"])


def slurmdbd_conf(place: Place) -> str:
    d = place.directory
    return _text(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={d}/run/munge.sock",
            f"DbdHost={place.host}",
            "DbdAddr=127.0.0.1",
            f"DbdPort={place.accounting_port}",
            f"SlurmUser={place.user}",
            f"LogFile={d}/log/slurmdbd.log",
            f"PidFile={d}/run/slurmdbd.slurm",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            f"StoragePort={place.database_port}",
            "StorageUser=root",
        ]
    )


def hosts_file(shape: TestbedShape, place: Place, machine_hosts: str) -> str:
    """The machine's /etc/hosts with the nodes added."""
    return _text(
        [machine_hosts.rstrip("\n"), *(f"{place.node_address(i)} {name}" for i, name in enumerate(shape.node_names, 1))]
    )


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
