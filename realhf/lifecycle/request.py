"""The request for a run: its experiment, plan and launcher, and its reactions to failures and drift."""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from realhf.api.fields import named_as_typed
from realhf.api.resolved import ResolvedExperiment
from realhf.api.script.reward import Reward
from realhf.base.durations import YEAR_S
from realhf.base.errors import UserError
from realhf.base.options import Common, Option, Options, check_options
from realhf.dataflow.plan import ExecutionPlan, load_plan
from realhf.launch.launcher import Launcher, NoOptions
from realhf.launch.local import LocalLauncher
from realhf.lifecycle.other_names import check_names
from realhf.planning.request import Measured, PlannedHardware, PlanRequest
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import (
    CHECKPOINTS,
    DRIFT,
    MAX_DEVICES,
    RunSpec,
    load_experiment_class,
    saved_experiment,
)

Mode = Literal["off", "suggest", "switch"]


@dataclass(frozen=True, kw_only=True)
class RecoveryRequest(Options):
    """Reactions to failed processes of the run. Raises UserError if `recover` is "never" and fewer workers or fallback
    plans are given."""

    HEADING = CHECKPOINTS

    recover: Annotated[
        Literal["auto", "never"], Common("auto: restart from the newest good checkpoint when a process dies or hangs")
    ] = "never"
    max_restarts: Annotated[int, Option("most restarts of --recover auto, in all", range=(1, 10**6))] = 3
    min_workers: Annotated[
        int | None,
        Option(
            "--recover auto goes on with fewer workers, N at least (default: those of the smallest --fallback-plan)",
            range=(1, MAX_DEVICES),
        ),
    ] = None
    fallback_plans: Annotated[
        tuple[Path, ...],
        Option(
            "take this plan.json where workers are lost; may be repeated, the largest that fits is taken",
            flag="--fallback-plan",
            metavar="PLAN",
        ),
    ] = ()
    accept_changed_inputs: Annotated[
        bool, Option("--resume goes on although data, tokenizer or other files that the run reads have changed")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
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
class ReplanRequest(Options):
    """Reactions to calls whose times differ from the plan's predictions."""

    HEADING = DRIFT

    mode: Annotated[
        Mode,
        Option(
            "suggest: search again with the measured times and say what it gains; "
            "switch: also change to that plan at a checkpoint (default off: only say that times have drifted)",
            flag="--replan",
        ),
    ] = "off"
    switch_cost_s: Annotated[
        float | None,
        Option(
            "cost of a change of plan in seconds (default: as long as the start took)",
            metavar="S",
            range=(0, YEAR_S),
            unit="seconds",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run of the experiment in the file `experiment`: a new one, or one to be resumed from `run_dir`.

    `fields` are words (`--steps 10`) that set fields of the experiment. `run_dir` is by default runs/NAME-TIME. `spec`
    has the fields of the run's specification that are asked for. `words` is the command line, from which the advice on
    how to go on is made. `detached`: this process only starts the run's job, and leaves it to the cluster.

    Raises:
        UserError: at construction of any of its parts, a number is out of its range.
    """

    experiment: str
    fields: tuple[str, ...] = ()
    run_dir: Path | None = None
    plan: PlanRequest = field(default_factory=PlanRequest)
    launcher: type[Launcher] = LocalLauncher
    launcher_options: Any = field(default_factory=NoOptions)
    spec: Mapping[str, Any] = field(default_factory=dict)
    recovery: RecoveryRequest = field(default_factory=RecoveryRequest)
    replan: ReplanRequest = field(default_factory=ReplanRequest)
    words: tuple[str, ...] = ()
    detached: bool = False

    def __post_init__(self) -> None:
        check_options(RunSpec, self.spec)

    @property
    def cpu_only(self) -> bool:
        """Whether nodes without GPUs are asked for: an option of SLURM's launcher and of others that have one."""
        return bool(getattr(self.launcher_options, "cpu_only", False))

    @cached_property
    def directory(self) -> RunDirectory:
        """The directory of a new run: `run_dir`, or one named after the experiment and the time."""
        return RunDirectory(self.run_dir or default_run_directory(self.experiment))

    @property
    def names_devices(self) -> bool:
        """Whether the request says how many devices there are."""
        devices = self.plan.devices
        return devices.nodes != 1 or devices.num_workers is not None or devices.gpus_per_node is not None

    def plan_request(self, saved: RunSpec | None = None) -> PlanRequest:
        """The request to the planner: for a `saved` run with its hardware and the measured factors of its calls."""
        planned = PlannedHardware(saved.hardware, saved.num_workers) if saved and saved.hardware else None
        place: Literal["nodes", "here"] = "nodes" if self.launcher.is_remote else "here"
        devices = replace(self.plan.devices, place=place, cpu_only=self.cpu_only, planned=planned)
        every = {"checkpoint_every_steps", "checkpoint_every_minutes"} & self.spec.keys()
        saves = bool(every) or (saved is not None and saved.saves)
        request = replace(self.plan, devices=devices, saves=saves)
        if saved is None:
            return request
        shares, ignores_runs = saved.changed_shares, saved.ignores_runs
        measured = Measured(call_factors=saved.call_factors, changed_shares=shares, ignores_runs=ignores_runs)
        return replace(request, measured=measured)


def default_run_directory(experiment: str) -> Path:
    return Path("runs") / f"{Path(experiment).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def experiment_of(path: str, words: Sequence[str] = (), saved: RunSpec | None = None) -> ResolvedExperiment:
    """The experiment of a file, its fields set from `--field value` words, else as in a `saved` run or by default.

    Raises:
        UserError: the file has no such class, `saved` is of another one, data is given twice, or a word is an option of
            another library.
        SystemExit: a word is wrong, which is explained on stderr (code 2), with the command that lists the fields.
    """
    cls = load_experiment_class(path)
    _check_data_given_once(words)
    prog = f"realhf COMMAND {path}"
    check_names(cls, words)
    if saved is not None and cls.__name__ != saved.experiment_class:
        raise UserError(
            f"{path} has the experiment {cls.__name__}, the run is one of {saved.experiment_class} in "
            f"{saved.experiment_file}; give that file"
        )
    before = None if saved is None else saved_experiment(saved, cls, path)
    start = {} if before is None else {"default": _default(before, words)}
    config = (tyro.conf.AvoidSubcommands,)
    try:
        with named_as_typed(cls, words):
            made = tyro.cli(cls, args=list(words), prog=prog, config=config, add_help=False, **start)
    except SystemExit:
        print(f"the fields: realhf run {path} --help-all", file=sys.stderr)
        raise
    return ResolvedExperiment(made)


def _names(words: Sequence[str]) -> Counter[str]:
    """How often each option is given."""
    return Counter(word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))


def _check_data_given_once(words: Sequence[str]) -> None:
    for name, times in _names(words).items():
        if times > 1 and name.lstrip("-").rpartition(".")[2] == "data":
            raise UserError(
                f"{name} is given {times} times, and takes one value; give a folder, or a pattern of files in quotes, "
                "such as 'data/*.jsonl'"
            )


def _default(before: Any, words: Sequence[str]) -> Any:
    """The fields of a saved run, as defaults of those that words give anew. tyro adds the values of an option that may
    be repeated to its default, so that these fields begin empty where they are given."""
    default, given = copy(before), _names(words)
    for name, value in vars(before).items():
        if f"--{name.replace('_', '-')}" in given and isinstance(value, Reward | tuple):
            # No experiment is made of it: as one it might be refused, without what is to come.
            object.__setattr__(default, name, replace(value, functions=()) if isinstance(value, Reward) else ())
    return default
