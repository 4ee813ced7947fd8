"""What is asked of a run: which experiment, with which plan, launched how, and what to do about failures and drift."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tyro

from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.base.numbers import check_ranges
from realhf.base.options import Options, option
from realhf.dataflow.plan import ExecutionPlan, load_plan
from realhf.launch.launcher import Launcher, NoOptions
from realhf.launch.local import LocalLauncher
from realhf.planning.request import Measured, PlannedHardware, PlanRequest
from realhf.rundir.run import MAX_DEVICES, RANGES, YEAR_S, RunSpec, load_experiment_class, saved_experiment

Mode = Literal["off", "suggest", "switch"]


class _SpecOptions(Options):
    """Options of which some are fields of the run's specification, and have the ranges of these."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(vars(self), RANGES)


@dataclass(frozen=True, kw_only=True)
class RunOptions(_SpecOptions):
    """Fields of the run's specification. None: the field keeps its default, in a resumed run the value that it had."""

    record: tuple[str, ...] | None = option(None, "write these keys' data to rollouts/", metavar="KEY")
    replay: Path | None = option(None, "a rollouts/ folder whose responses are taken, none drawn", metavar="FOLDER")
    verify_reallocations_every: int | None = option(
        None,
        "compare checksums of reallocated parameters every so many steps, beside the first time (default 100; "
        "1: always, 0: never)",
        metavar="STEPS",
    )
    call_timeout_s: float | None = option(None, "how long every call may take, whatever was predicted (default 600)")
    deadline_factor: float | None = option(
        None, "how many times its predicted time a longer call may take (default 20)"
    )
    setup_timeout_s: float | None = option(None, "longest the start may take (default 300)")
    master_timeout_s: float | None = option(
        None, "how long the master may be silent until a worker ends by itself (default 90)"
    )
    network_interface: str | None = option(
        None, "interface of the master, gloo and NCCL (default: loopback on one machine)"
    )
    master_address: str | None = option(None, "where the master listens (default: on that interface)")
    samples: int | None = option(
        None, "write N completions of each step to samples.jsonl, with their rewards (default 3; 0: none)", metavar="N"
    )
    tensorboard: bool | None = option(None, "also write TensorBoard's files to tensorboard/")
    wandb_project: str | None = option(
        None, "also send metrics to a project of Weights & Biases", flag="--wandb", metavar="PROJECT"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(_SpecOptions):
    """When checkpoints are written and which are kept: fields of the run's specification, as in `RunOptions`."""

    checkpoint_every_steps: int | None = option(
        None, "save every so many steps, beside the end", flag="--checkpoint-every", metavar="STEPS"
    )
    checkpoint_every_minutes: float | None = option(None, "save about every so many minutes", metavar="MINUTES")
    keep_checkpoints: int | None = option(None, "keep the newest N (default: all)", metavar="N")
    keep_best: str | None = option(
        None, "keep the checkpoint with its highest value too (min:STATISTIC: the lowest)", metavar="STATISTIC"
    )
    checkpoint_failures: int | None = option(
        None, "go on when a checkpoint cannot be written, but not after more than N in a row (default 0)", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class RecoveryRequest(Options):
    """What to do when processes of the run fail. Raises UserError if `recover` is "never" and fewer workers or fallback
    plans are given."""

    recover: Literal["auto", "never"] = option(
        "never", "auto: when a process dies or hangs, restart all from the newest good checkpoint (default never)"
    )
    max_restarts: int = option(3, "of --recover auto, in all (default 3)", metavar="K", bounds=(1, 10**6))
    min_workers: int | None = option(
        None,
        "--recover auto goes on with fewer workers, N at least, where devices or nodes are lost (default: with "
        "--fallback-plan those of its smallest, else no fewer)",
        metavar="N",
        bounds=(1, MAX_DEVICES),
    )
    fallback_plans: tuple[Path, ...] = option(
        (),
        "take this plan.json where workers are lost and it fits, rather than search for one; may be repeated, the "
        "largest that fits is taken",
        flag="--fallback-plan",
        metavar="PLAN",
    )

    accept_changed_inputs: bool = option(
        False,
        "--resume goes on although data, tokenizer or other files that the run reads have changed",
    )

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
class ReplanRequest(_SpecOptions):
    """What to do when calls take other times than the plan predicts."""

    mode: Mode = option(
        "off",
        "suggest: search the plan again in the background, with the measured times, and say what it would gain; "
        "switch: also change to it at a checkpoint where that pays (default off: only say that times have drifted)",
        flag="--replan",
    )
    drift_threshold: float | None = option(
        None,
        "say so when a call takes more than X times what was predicted, or less than 1/X of it (default 1.5)",
        metavar="X",
    )
    switch_cost_s: float | None = option(
        None,
        "what a change of plan costs, in seconds (default: as long as the start took)",
        metavar="S",
        bounds=(0, YEAR_S),
        unit="seconds",
    )


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run of the experiment in the file `experiment`: a new one, or one to be resumed from `run_dir`.

    `fields` are words (`--steps 10`) that set fields of the experiment. `run_dir` is by default runs/NAME-TIME.
    `words` is the command line, from which the advice on how to go on is made. `detached`: this process only starts
    the run's job, and leaves it to the cluster.
    """

    experiment: str
    fields: tuple[str, ...] = ()
    run_dir: Path | None = None
    plan: PlanRequest = field(default_factory=PlanRequest)
    launcher: type[Launcher] = LocalLauncher
    launcher_options: Any = field(default_factory=NoOptions)
    options: RunOptions = field(default_factory=RunOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    recovery: RecoveryRequest = field(default_factory=RecoveryRequest)
    replan: ReplanRequest = field(default_factory=ReplanRequest)
    words: tuple[str, ...] = ()
    detached: bool = False

    @property
    def cpu_only(self) -> bool:
        """Whether nodes without GPUs are asked for: an option of SLURM's launcher and of others that have one."""
        return bool(getattr(self.launcher_options, "cpu_only", False))

    @property
    def spec_fields(self) -> dict[str, Any]:
        """The fields of the run's specification that the request sets."""
        given = vars(self.options) | vars(self.checkpoints) | {"drift_threshold": self.replan.drift_threshold}
        given["ignores_runs"] = self.plan.measured.ignores_runs or None
        if self.options.replay:
            given["replay"] = str(self.options.replay.resolve())
        given["network_interface"] = self.options.network_interface or (None if self.launcher.is_remote else "lo")
        return {name: value for name, value in given.items() if value is not None or name == "network_interface"}

    @property
    def names_devices(self) -> bool:
        """Whether the request says how many devices there are."""
        devices = self.plan.devices
        return devices.nodes != 1 or devices.num_workers is not None or devices.gpus_per_node is not None

    def plan_request(self, saved: RunSpec | None = None) -> PlanRequest:
        """What the planner is asked: for a `saved` run with its hardware and the measured factors of its calls."""
        planned = PlannedHardware(saved.hardware, saved.num_workers) if saved and saved.hardware else None
        place: Literal["nodes", "here"] = "nodes" if self.launcher.is_remote else "here"
        devices = replace(self.plan.devices, place=place, cpu_only=self.cpu_only, planned=planned)
        every = self.checkpoints.checkpoint_every_steps or self.checkpoints.checkpoint_every_minutes
        saves = bool(every) or (saved is not None and saved.saves)
        request = replace(self.plan, devices=devices, saves=saves)
        if saved is None:
            return request
        return replace(request, measured=Measured(call_factors=saved.call_factors, ignores_runs=saved.ignores_runs))


def experiment_of(path: str, words: Sequence[str] = (), saved: RunSpec | None = None) -> ResolvedExperiment:
    """The experiment of a file, its fields set from `--field value` words, else as in a `saved` run or by default.

    Raises:
        UserError: the file has no such class, or `saved` is of another one.
        SystemExit: a word is wrong, which is explained on stderr (code 2); `--fields` has listed all fields (0).
    """
    cls = load_experiment_class(path)
    prog = f"realhf COMMAND {path}"
    if "--fields" in words:
        tyro.cli(cls, args=["--help"], prog=prog, config=(tyro.conf.AvoidSubcommands,))
    if saved is not None and cls.__name__ != saved.experiment_class:
        raise UserError(
            f"{path} has the experiment {cls.__name__}, the run is one of {saved.experiment_class} in "
            f"{saved.experiment_file}; give that file"
        )
    start = {} if saved is None else {"default": saved_experiment(saved, cls, path)}
    config = (tyro.conf.AvoidSubcommands,)
    return ResolvedExperiment(tyro.cli(cls, args=list(words), prog=prog, config=config, add_help=False, **start))
