"""A request to the planner: its devices, its budget, and the decisions that are made already."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES, STALENESS
from realhf.base.options import Common, Option, Options
from realhf.dataflow.plan import ExecutionPlan, load_plan
from realhf.planning.model.hardware import Hardware

# Limits of a budget. Every search looks at its starts: one evaluation gives the best of them.
EVALUATIONS = (1, 10**12)
SECONDS = (0.01, 10**7)
MoveChoice = Literal["auto", "chains", "broadcasts"]
ChangesChoice = Literal["auto", "on", "off"]
SEEDS = (0, 2**63 - 1)  # least and largest seed of a search

# What planning says while it goes on: the phase that has begun, or goes on, and what is known of it by now ("" if
# nothing).
Watch = Callable[[str, str], None]


def unwatched(phase: str, detail: str) -> None:
    """A watch that shows nothing."""


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
    be unlike, None where nothing is started. `cpu_only`: the nodes have no GPUs. `threads`: of a worker without a GPU
    (None: its part of the cores). `planned`: of a run that is planned again.

    Raises:
        UserError: a number of devices or nodes is out of its range.
    """

    HEADING = "devices"

    num_workers: Annotated[
        int | None, Common("devices to use (default: the GPUs here, else the CPU cores)", range=DEVICES)
    ] = None
    nodes: Annotated[int, Common("number of nodes", range=DEVICES)] = 1
    gpus_per_node: Annotated[
        int | None, Common("devices of each node (default: --num-workers / --nodes)", range=DEVICES)
    ] = None
    hardware: Annotated[
        str | None, Common("a hardware description, such as h100 or cpu (default: this machine)", metavar="NAME")
    ] = None
    memory_gb: Annotated[
        float | None, Common("memory of a device in GiB (default: a GPU's, or the share of this machine's)")
    ] = None
    place: Literal["here", "nodes"] | None = None
    cpu_only: bool = False
    threads: int | None = None
    planned: PlannedHardware | None = None


@dataclass(frozen=True, kw_only=True)
class SearchBudget(Options):
    """How long a search goes on: a number of plans, or seconds; neither: the experiment's own, or one that grows with
    the problem.

    Raises:
        UserError: a number is out of its range.
    """

    HEADING = "plan"

    evaluations: Annotated[
        int | None, Option("search this number of plans; reproducible", range=EVALUATIONS, unit="plans")
    ] = None
    seconds: Annotated[
        float | None,
        Common("time of the search, proof included, on all cores", metavar="S", range=SECONDS, unit="seconds"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured costs of this machine.

    profiles: the folder of profiles (None: that of all of them). call_factors: by name what a run's calls took over
    what was predicted; they scale all predictions. changed_shares: by model, see `Costs`. ignores_runs: what finished
    runs have left beside the profiles is not read.
    """

    profiles: Path | None = None
    call_factors: Mapping[str, float] = field(default_factory=dict)
    changed_shares: Mapping[str, float] = field(default_factory=dict)
    HEADING = "plan"

    ignores_runs: Annotated[
        bool, Option("predict without the times that finished runs have left", flag="--ignore-runs")
    ] = False


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Options):
    """A plan to be found, or the one in the file `plan` to be predicted, or that of the rule `rule`
    (`realhf.planning.presets`).

    `offload`: models that wait in host memory while nothing needs them; None: the search decides. `saves`: the run
    writes checkpoints on the way, and not at its end alone. `staleness`: that of a run that goes on; None: the search
    chooses one up to `staleness_up_to`.

    Raises:
        UserError: models to offload, a staleness to choose or a way to move parameters beside a plan, which has its
            own; a rule beside a plan, or beside a staleness or a way to choose; a number out of its range.
    """

    devices: DevicesRequest = field(default_factory=DevicesRequest)
    HEADING = "plan"

    plan: Annotated[Path | None, Common("take this plan.json instead of searching for one")] = None
    rule: str | None = None
    budget: SearchBudget = field(default_factory=SearchBudget)
    offload: tuple[str, ...] | None = None
    saves: bool = False
    staleness_up_to: Annotated[
        int,
        Option(
            "allow rollouts by weights up to K updates old where that makes a step shorter",
            metavar="K",
            range=STALENESS,
        ),
    ] = 0
    staleness: int | None = None
    moved_by: Annotated[
        MoveChoice,
        Option("move parameters by chains of messages or by broadcasts in process groups (auto: as is faster)"),
    ] = "auto"
    send_changes: Annotated[
        ChangesChoice,
        Option("keep copies of parameters, and send only what changed (auto: between nodes of CPUs with slow links)"),
    ] = "auto"
    measured: Measured = field(default_factory=Measured)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staleness_up_to and (self.plan or self.rule):
            raise UserError(
                f"--staleness-up-to {self.staleness_up_to} is for the search of a plan; leave it out beside "
                + (f"--plan, whose file says staleness={self.given.staleness}" if self.given else "--rule")
            )
        if self.offload and self.plan:
            raise UserError("--offload is for the search of a plan; write the models into the file of --plan instead")
        if self.moved_by != "auto" and (self.plan or self.rule):
            remedy = "write the calls into `broadcasts` of its file" if self.plan else "leave it out"
            raise UserError(f"--moved-by {self.moved_by} is for the search of a plan; {remedy}")
        if self.send_changes != "auto" and (self.plan or self.rule):
            remedy = "write the calls into `changes` of its file" if self.plan else "leave it out"
            raise UserError(f"--send-changes {self.send_changes} is for the search of a plan; {remedy}")
        if self.rule and self.plan:
            raise UserError(f"--rule {self.rule} and --plan {self.plan} are both plans: give one of them")

    @cached_property
    def given(self) -> ExecutionPlan | None:
        """The plan in the file, read once. Raises UserError if it cannot be read."""
        return load_plan(self.plan) if self.plan else None

    @property
    def stalenesses(self) -> tuple[int, ...]:
        """Those that the plan may have, in ascending order."""
        if self.given:
            return (self.given.staleness,)
        return tuple(range(self.staleness_up_to + 1)) if self.staleness is None else (self.staleness,)
