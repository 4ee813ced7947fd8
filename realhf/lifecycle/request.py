"""What is asked of a run: which experiment, with which plan, launched how, and what to do about failures and drift."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_ranges
from realhf.dataflow.plan import ExecutionPlan, load_plan
from realhf.launch.launcher import Launcher, NoOptions
from realhf.launch.local import LocalLauncher
from realhf.planning.request import PlannedHardware, PlanRequest
from realhf.rundir.run import MAX_DEVICES, RANGES, YEAR_S, RunSpec

Mode = Literal["off", "suggest", "switch"]

# Fields of the run's specification that a request may set. The others are worked out.
SPEC_OPTIONS = (
    "record",
    "replay",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_checkpoints",
    "keep_best",
    "checkpoint_failures",
    "verify_reallocations_every",
    "call_timeout_s",
    "deadline_factor",
    "setup_timeout_s",
    "tensorboard",
    "wandb_project",
    "drift_threshold",
)
# Of the numbers that are no fields of the specification.
OPTION_RANGES = {
    "max_restarts": Range("--max-restarts", 1, 10**6),
    "min_workers": Range("--min-workers", 1, MAX_DEVICES),
    "switch_cost_s": Range("--switch-cost-s", 0, YEAR_S, "seconds"),
}


@dataclass(frozen=True, kw_only=True)
class RecoveryRequest:
    """What to do when processes of the run fail.

    `recover`: "auto" restarts all from the newest good checkpoint, `max_restarts` times in all. It goes on with fewer
    workers where devices or nodes are lost: `min_workers` at least, by default those of the smallest of
    `fallback_plans`, without these no fewer. The largest fallback plan that fits is taken, else one is searched for.

    Raises:
        UserError: a number is out of its range, or it says something of recovery and `recover` is "never".
    """

    recover: Literal["auto", "never"] = "never"
    max_restarts: int = 3
    min_workers: int | None = None
    fallback_plans: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(vars(self), OPTION_RANGES)
        if self.recover == "never" and (self.min_workers or self.fallback_plans):
            raise UserError("--min-workers and --fallback-plan are for --recover auto; give it, or leave them out")

    @property
    def restarts(self) -> int:
        """How often a run may be restarted after a failure."""
        return self.max_restarts if self.recover == "auto" else 0

    @cached_property
    def plans(self) -> dict[Path, ExecutionPlan]:
        """The fallback plans by file, read once. Raises UserError if one cannot be read."""
        return {path: load_plan(path) for path in self.fallback_plans}

    @property
    def least_workers(self) -> int | None:
        """How few workers the run may go on with; None: as many as it has."""
        return self.min_workers or min((plan.num_devices for plan in self.plans.values()), default=None)


@dataclass(frozen=True, kw_only=True)
class ReplanRequest:
    """What to do when calls take other times than the plan predicts.

    `mode`: "off" only says it; "suggest" searches the plan again and says what a change would gain; "switch" also makes
    the change at a checkpoint, where it pays. `switch_cost_s`: seconds that a change is taken to cost, None: as long
    as the last start took.

    Raises:
        UserError: the cost is out of its range.
    """

    mode: Mode = "off"
    switch_cost_s: float | None = None

    def __post_init__(self) -> None:
        check_ranges(vars(self), OPTION_RANGES)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run of the experiment in the file `experiment`: a new one, or one to be resumed from `run_dir`.

    `fields` are words (`--steps 10`) that set fields of the experiment. `run_dir` is by default runs/NAME-TIME.
    `spec_options` are fields of `RunSpec`, of those in `SPEC_OPTIONS`; a field that is not there or None keeps its
    default, in a resumed run the value that it had.
    `launcher_options` are of `launcher.options_type`. `words` is the command line, without the command's name, for the
    advice on how to go on.

    Raises:
        UserError: a number is out of its range. Parts of the request raise what is wrong with them.
    """

    experiment: str
    fields: tuple[str, ...] = ()
    run_dir: Path | None = None
    plan: PlanRequest = field(default_factory=PlanRequest)
    launcher: type[Launcher] = LocalLauncher
    launcher_options: Any = field(default_factory=NoOptions)
    network_interface: str | None = None
    spec_options: Mapping[str, Any] = field(default_factory=dict)
    recovery: RecoveryRequest = field(default_factory=RecoveryRequest)
    replan: ReplanRequest = field(default_factory=ReplanRequest)
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.spec_options) - set(SPEC_OPTIONS)
        assert not unknown, f"no options of a run: {unknown}"
        check_ranges(self.spec_options, RANGES)

    @property
    def cpu_only(self) -> bool:
        """Whether nodes without GPUs are asked for: an option of SLURM's launcher and of others that have one."""
        return bool(getattr(self.launcher_options, "cpu_only", False))

    @property
    def given_options(self) -> dict[str, Any]:
        """The fields of the run's specification that the request sets."""
        return {name: value for name, value in self.spec_options.items() if value is not None}

    @property
    def names_devices(self) -> bool:
        """Whether the request says how many devices there are."""
        devices = self.plan.devices
        return devices.nodes != 1 or devices.num_workers is not None or devices.gpus_per_node is not None

    def plan_request(self, saved: RunSpec | None = None) -> PlanRequest:
        """What the planner is asked: for a `saved` run with its hardware and the measured factors of its calls."""
        planned = PlannedHardware(saved.hardware, saved.num_workers) if saved and saved.hardware else None
        devices = replace(
            self.plan.devices,
            place="nodes" if self.launcher.is_remote else "here",
            cpu_only=self.cpu_only,
            planned=planned,
        )
        saves = self.given_options.keys() & {"checkpoint_every_steps", "checkpoint_every_minutes"}
        return replace(
            self.plan,
            devices=devices,
            saves=bool(saves) or (saved is not None and saved.saves),
            call_factors=saved.call_factors if saved else {},
        )
