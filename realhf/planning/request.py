"""What somebody asks of the planner: for which devices, with which budget, and what is fixed beforehand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES
from realhf.base.options import Options, option
from realhf.dataflow.plan import ExecutionPlan, load_plan
from realhf.planning.model.hardware import Hardware

# Limits of a budget. Every search looks at its starts: one evaluation gives the best of them.
EVALUATIONS = (1, 10**12)
SECONDS = (0.01, 10**7)
SEEDS = (0, 2**63 - 1)  # of a search: the least, the most

# What planning says while it goes on: the phase that has begun, or goes on, and what is known of it by now ("" if
# nothing).
Watch = Callable[[str, str], None]


def unwatched(phase: str, detail: str) -> None:
    """Nobody looks."""


@dataclass(frozen=True)
class PlannedHardware:
    """The hardware that a run was planned for, as each of its `num_workers` workers has it."""

    hardware: Hardware
    num_workers: int


@dataclass(frozen=True, kw_only=True)
class DevicesRequest(Options):
    """The devices that a plan is for. What is None is taken from a given plan, from `planned`, or from this machine.

    `hardware`: the name of a description or the path of its file. `memory_gb`: GiB a device. `place`: "here" where all
    workers run on this machine and share its cores and memory, "nodes" where they run on nodes that this machine may
    be unlike, None where nothing is started. `cpu_only`: the nodes have no GPUs. `planned`: of a run that is planned
    again.

    Raises:
        UserError: a number of devices or nodes is out of its range.
    """

    num_workers: int | None = option(
        None, "devices to use (default: the GPUs here, else the CPU cores)", bounds=DEVICES
    )
    nodes: int = option(1, "number of nodes (default 1)", bounds=DEVICES)
    gpus_per_node: int | None = option(None, "devices a node (default: --num-workers / --nodes)", bounds=DEVICES)
    hardware: str | None = option(None, "a hardware description, such as h100 or cpu (default: this machine)")
    memory_gb: float | None = option(
        None, "memory of a device in GiB (default: a GPU's, or the share of this machine's)"
    )
    place: Literal["here", "nodes"] | None = None
    cpu_only: bool = False
    planned: PlannedHardware | None = None


@dataclass(frozen=True, kw_only=True)
class SearchBudget(Options):
    """How long a search goes on: a number of plans, or seconds; neither: the experiment's own, or one that grows with
    the problem.

    Raises:
        UserError: a number is out of its range.
    """

    evaluations: int | None = option(
        None,
        "budget of the plan search, a number of plans; reproducible",
        metavar="N",
        bounds=EVALUATIONS,
        unit="plans",
    )
    seconds: float | None = option(
        None,
        "budget of the plan search in seconds, on all cores of this machine",
        metavar="S",
        bounds=SECONDS,
        unit="seconds",
    )


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A plan to be found, or the one in the file `plan` to be predicted.

    `offload`: models that wait in host memory while nothing needs them. `saves`: the run writes checkpoints on the way,
    and not at its end alone. `call_factors`: measured over predicted seconds of calls, which scale all predictions.

    Raises:
        UserError: models to offload beside a plan, which has its own.
    """

    devices: DevicesRequest = field(default_factory=DevicesRequest)
    plan: Path | None = None
    budget: SearchBudget = field(default_factory=SearchBudget)
    offload: tuple[str, ...] = ()
    saves: bool = False
    call_factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.offload and self.plan:
            raise UserError("--offload is for the search of a plan; write the models into the file of --plan instead")

    @cached_property
    def given(self) -> ExecutionPlan | None:
        """The plan in the file, read once. Raises UserError if it cannot be read."""
        return load_plan(self.plan) if self.plan else None
