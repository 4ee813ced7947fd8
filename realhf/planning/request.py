"""What somebody asks of the planner: for which devices, with which budget, and what is fixed beforehand."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DevicesRequest:
    """The devices that a plan is for. What is None is taken from a given plan, a saved run, or this machine.

    `place`: "here" where all workers run on this machine and share its cores and memory, "nodes" where they run on
    nodes that this machine may be unlike, None where nothing is started. `cpu_only`: the nodes have no GPUs.
    """

    num_workers: int | None = None
    nodes: int = 1
    gpus_per_node: int | None = None
    hardware: str | None = None
    memory_gb: float | None = None
    place: Literal["here", "nodes"] | None = None
    cpu_only: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    """How long a search goes on: a number of plans, or seconds; neither: the experiment's own, or one that grows with
    the problem."""

    evaluations: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A plan to be found, or the one in the file `plan` to be predicted.

    `offload`: models that wait in host memory while nothing needs them. `saves`: the run writes checkpoints on the way.
    """

    devices: DevicesRequest = field(default_factory=DevicesRequest)
    plan: Path | None = None
    budget: SearchBudget = field(default_factory=SearchBudget)
    offload: tuple[str, ...] = ()
    saves: bool = False
