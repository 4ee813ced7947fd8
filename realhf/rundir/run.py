"""A run, resolved: the launcher writes it into the run directory, and master and workers read it back."""

import os
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from realhf.api.computation import computation_of
from realhf.api.experiment import SETTINGS_ATTRIBUTE
from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.compute import Computation
from realhf.architecture.model import DTYPE_BYTES
from realhf.base.code_files import load_code_file
from realhf.base.durations import WEEK_S, YEAR_S
from realhf.base.errors import UserError
from realhf.base.files import BadContentError, OtherVersionError, decode_versioned, read_bytes
from realhf.base.numbers import check_range
from realhf.base.options import EVALUATION, Common, Option, check_options
from realhf.dataflow.graph import WEIGHTS_VERSION, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import check_implementation
from realhf.dataflow.plan import CallPlan, ExecutionPlan, beside_plan, load_plan
from realhf.dataflow.splits import Split, set_name
from realhf.geometry.layout import Layout
from realhf.geometry.parameters import parameter_count
from realhf.geometry.shards import Placement
from realhf.models.checkpoint_index import initial_optimizer_steps, optimizer_kinds
from realhf.planning.model.hardware import Hardware
from realhf.rundir.live import LiveExperiment, load_live
from realhf.rundir.paths import RunDirectory

T = TypeVar("T")

# The format of all files of the run directory that name no format of their own. The first version had none.
FORMAT = "run/2"
MAX_STEPS = 10**9
MAX_DEVICES = 65_536
MAX_SAMPLES = 64
# Headings of options in the help.
CHECKPOINTS = "checkpoints and recovery"
RECORDS = "records"
DRIFT = "measured times that leave the plan's predictions"
_checkpoint = partial(Option, group=CHECKPOINTS)
_evaluation = partial(Option, group=EVALUATION)
_record = partial(Option, group=RECORDS)
_limit = partial(Option, group="deadlines and network")
_seconds = partial(_limit, metavar="S", range=(0.001, YEAR_S), unit="seconds")


@dataclass(frozen=True)
class Deadlines:
    """How long a request to a worker may take: `factor` times its predicted time, never less than `floor_s`.

    A prediction is off by some ten per cent, or by a few times where the machine was not profiled or responses have
    grown: `factor` allows for that. Calls of seconds have the floor, since a machine may be busy with other things.
    `longest_predicted_s` is the longest prediction of the run's plan.
    """

    floor_s: float = 600.0
    factor: float = 20.0
    longest_predicted_s: float = 0.0

    def of(self, predicted_s: float | None) -> float:
        """Seconds for a call, from when all its workers have come to it."""
        return max(self.floor_s, self.factor * (predicted_s or 0.0))

    @property
    def longest_s(self) -> float:
        """Seconds for work without a prediction of its own, such as moves of parameters and checkpoints. Workers wait
        for each other as long, since one may have come to a call when another still has a longer one to end."""
        return self.of(self.longest_predicted_s)


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the behaviour of a run besides its plan: `experiment.json`.

    A field with an `Option` is an option of `realhf run`. A resumed run keeps the value that it had, unless the option
    is given again.

    The best checkpoint by `keep_best` is kept as `checkpoints.retain` says. The run goes on from the checkpoint after
    `resume_step` steps. `avoided` are devices of this machine or nodes of a cluster that the run does without, after
    failures there. `call_factors` are the measured over the predicted times of calls, where the plan was made with
    them, and `changed_shares` by model the measured part of the bytes of copies that get only what changed;
    `ignores_runs`: it was made without the measurements of finished runs. Deadlines: see `Deadlines`. The master
    listens on `master_address`, else on that of `network_interface`, else of its host's name. `hardware` is that of the
    plan; planning again is for the same, and workers check that they are on it. `declared`: of a live program, by name
    the classes of what it has declared (`realhf.rundir.live`); then `experiment_file` is the program, "" for none, and
    `words` are those of its command line.

    Raises:
        UserError: at construction, a number is out of its range.
    """

    experiment_file: str
    experiment_class: str
    values: dict[str, Any]
    working_directory: str
    num_workers: int
    devices_per_node: int
    declared: dict[str, str] = {}
    words: tuple[str, ...] = ()
    record: Annotated[
        tuple[str, ...], _record("write the data of these keys in every step to rollouts/", metavar="KEY", is_list=True)
    ] = ()
    replay: Annotated[
        str | None, _record("take the responses of this rollouts/ folder, draw none", metavar="FOLDER")
    ] = None
    checkpoint_every_steps: Annotated[
        int | None,
        Common(
            "save every N steps too, not at the end alone",
            flag="--checkpoint-every",
            range=(1, MAX_STEPS),
            unit="steps",
            group=CHECKPOINTS,
        ),
    ] = None
    checkpoint_every_minutes: Annotated[
        float | None,
        _checkpoint("save about every MINUTES too", metavar="MINUTES", range=(0.001, YEAR_S / 60), unit="minutes"),
    ] = None
    keep_checkpoints: Annotated[int | None, _checkpoint("keep the newest N (default: all)", range=(1, MAX_STEPS))] = (
        None
    )
    keep_best: Annotated[
        str | None,
        _checkpoint("keep the checkpoint with its highest value too (min:STATISTIC: the lowest)", metavar="STATISTIC"),
    ] = None
    stop_early: Annotated[
        str | None,
        _evaluation("end once evaluations no longer raise this one (min:STATISTIC: lower it)", metavar="STATISTIC"),
    ] = None
    stop_early_patience: Annotated[
        int, _evaluation("--stop-early: evaluations without a gain until the end", range=(1, MAX_STEPS))
    ] = 3
    stop_early_gain: Annotated[
        float, _evaluation("--stop-early: a value has to be better by more than this", range=(0, 1e9))
    ] = 0.0
    checkpoint_failures: Annotated[
        int,
        _checkpoint(
            "go on when a checkpoint cannot be written, but not after more than N in a row", range=(0, MAX_STEPS)
        ),
    ] = 0
    resume_step: int = 0
    avoided: tuple[str, ...] = ()
    call_factors: dict[str, float] = {}
    changed_shares: dict[str, float] = {}
    ignores_runs: bool = False
    drift_threshold: Annotated[
        float,
        Option(
            "say so when a call takes more than X times its prediction, or less than 1/X of it",
            range=(1.001, 10**6),
            unit="times the prediction",
            group=DRIFT,
        ),
    ] = 1.5
    verify_reallocations_every: Annotated[
        int,
        _record(
            "compare checksums of reallocated parameters the first time, and then every N steps; sum up unchanged ones "
            "again as often (1: always, 0: never)",
            range=(0, MAX_STEPS),
            unit="steps",
        ),
    ] = 100
    call_timeout_s: Annotated[float, _seconds("how long every call may take, whatever was predicted")] = (
        Deadlines.floor_s
    )
    deadline_factor: Annotated[
        float,
        _limit(
            "how many times its predicted time a longer call may take",
            range=(1, 10**4),
            unit="times the prediction",
        ),
    ] = Deadlines.factor
    setup_timeout_s: Annotated[float, _seconds("longest the start may take")] = 300.0
    master_timeout_s: Annotated[
        float, _seconds("how long the master may be silent until a worker ends by itself", range=(1, YEAR_S))
    ] = 90.0
    network_interface: Annotated[
        str | None, _limit("interface of the master, gloo and NCCL (default: loopback on one machine)", metavar="NAME")
    ] = None
    master_address: Annotated[
        str | None, _limit("where the master listens (default: on that interface)", metavar="ADDRESS")
    ] = None
    hardware: Hardware | None = None
    samples: Annotated[
        int,
        Common(
            "write N completions of each step, with rewards, to samples.jsonl (0: none)",
            range=(0, MAX_SAMPLES),
            unit="samples",
            group=RECORDS,
        ),
    ] = 3
    tensorboard: Annotated[bool, Common("write TensorBoard's files to tensorboard/ too", group=RECORDS)] = False
    wandb_project: Annotated[
        str | None,
        Common(
            "send metrics to this project of Weights & Biases too", flag="--wandb", metavar="PROJECT", group=RECORDS
        ),
    ] = None
    trackio_project: Annotated[
        str | None,
        Common(
            "write metrics to this project of trackio on this machine too",
            flag="--trackio",
            metavar="PROJECT",
            group=RECORDS,
        ),
    ] = None
    format: str = FORMAT

    def __post_init__(self) -> None:
        check_options(RunSpec, msgspec.structs.asdict(self))
        check_range("--num-workers", self.num_workers, 1, MAX_DEVICES)
        check_range("--gpus-per-node", self.devices_per_node, 1, MAX_DEVICES)
        check_range("resume_step", self.resume_step, 0, MAX_STEPS)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written before the end too."""
        return self.checkpoint_every_steps is not None or self.checkpoint_every_minutes is not None


@dataclass(frozen=True)
class Run:
    """A validated experiment, of the plan's staleness, with its plan.

    Raises:
        UserError: at construction of any of its parts, before a process starts.
    """

    spec: RunSpec
    experiment: ResolvedExperiment
    plan: ExecutionPlan

    def batch_size(self, split: Split) -> int:
        """Samples of a step, or of a batch of an evaluation."""
        return (self.experiment.settings if split == "train" else self.experiment.evaluations[split]).batch_size

    @cached_property
    def homes(self) -> dict[str, Layout]:
        """The layout in which each model's parameters live between calls."""
        graph = self.experiment.graph
        return {model: self.plan.layout(self.plan.home(graph, model)) for model in graph.models}

    @cached_property
    def computations(self) -> dict[str, Computation]:
        """By name how each model is computed in its home. Raises UserError where plan and experiment contradict."""
        graph, plan = self.experiment.graph, self.plan
        setups = self.experiment.setups.items()
        return {name: computation_of(name, setup, plan.calls[plan.home(graph, name)].compute) for name, setup in setups}

    def placement(self, model: str) -> Placement:
        """Where a model's parameters lie between calls."""
        return Placement(self.homes[model], self.computations[model].data_parallel)

    @cached_property
    def initial_steps(self) -> dict[str, int]:
        """By model the optimizer steps that it starts with. Reads checkpoints once; they may go after that. Raises
        UserError if one has no optimizer states."""
        return {name: initial_optimizer_steps(setup) for name, setup in self.experiment.setups.items()}

    def optimizer_steps(self, model: str) -> int:
        """Optimizer steps of a model in each step of the run; 0: it is not trained."""
        return sum(call.optimizer_steps for call in self.experiment.graph.calls_of(model))

    @cached_property
    def deadlines(self) -> Deadlines:
        predicted = [self.plan.predicted_step_s, *(call.predicted_s for call in self.plan.calls.values())]
        longest_s = max(seconds or 0.0 for seconds in predicted)
        return Deadlines(self.spec.call_timeout_s, self.spec.deadline_factor, longest_s)

    @property
    def planned_steps(self) -> int:
        """How many steps it is to make; 0: nobody knows."""
        return 0 if self.spec.declared else self.experiment.steps

    def changed(self, plan: ExecutionPlan | None = None, **fields: Any) -> "Run":
        """This run with other fields of its specification; under `plan`, if one is given."""
        return Run(msgspec.structs.replace(self.spec, **fields), self.experiment, plan or self.plan)

    def without_deadlines(self) -> "Run":
        """The run under a debugger: no request is late within a week."""
        return self.changed(call_timeout_s=WEEK_S, setup_timeout_s=WEEK_S, master_timeout_s=WEEK_S)

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: parameters in all versions that are kept, and optimizer states."""
        total, graph = 0, self.experiment.graph
        for name in self.changing_models:
            dtype, model = self.experiment.setups[name].dtype, graph.models[name]
            states = optimizer_kinds(dtype) if self.optimizer_steps(name) else ()
            each = DTYPE_BYTES[dtype] * graph.versions_kept(name) + max(4, DTYPE_BYTES[dtype]) * len(states)
            total += parameter_count(model) * each
        return total

    @property
    def changing_models(self) -> list[str]:
        """The models whose parameters change: those that are trained, and those that follow one."""
        graph, setups = self.experiment.graph, self.experiment.setups
        return [name for name in graph.models if self.optimizer_steps(name) or setups[name].follows]

    def call_plan(self, split: Split, call: ModelFunctionCallDef) -> CallPlan:
        """How a call runs, one beside the devices too. In evaluation, and in a live program, it runs as its twin in the
        planned graph: generation without chunks, and in the micro-batches of a twin that generates. Anything else is in
        one micro-batch, unless a program calls what its twin is."""
        if split == "train" and call.name in self.experiment.graph.calls:
            return self.plan.of_call(self.experiment.graph, call.name, self.batch_size(split))
        if call.runs_beside:
            place = self.experiment.graphs[split].calls[self.experiment.graphs[split].place_of(call.name)]
            return beside_plan(self.call_plan(split, place), self.batch_size(split))
        name = evaluation_twin(self.experiment.graph, call)
        twin = self.plan.calls[name]
        is_alike = self.experiment.graph.calls[name].interface_type is call.interface_type
        as_twin = is_alike and (call.generates or split == "train")
        chunks, micro_batches = 1 if call.generates else twin.chunks, twin.micro_batches if as_twin else 1
        return msgspec.structs.replace(twin, micro_batches=micro_batches, chunks=chunks, copy_from=None)

    def calls_with_layouts(self) -> list[tuple[ModelFunctionCallDef, Layout]]:
        """All calls of training and evaluation, and where they run."""
        graphs = self.experiment.graphs | {"train": self.experiment.graph}
        calls = ((split, call) for split, graph in graphs.items() for call in graph.calls.values())
        return [(call, self.call_plan(split, call).layout) for split, call in calls]

    def check(self) -> None:
        """Raises UserError if evaluation, `record` and the plan's layouts do not fit each other, or an interface has no
        implementation. The plan itself is checked where it enters."""
        for graph in self.experiment.graphs.values():
            for call in graph.calls.values():
                check_implementation(call.name, call.interface_impl, call.interface_type.value)
        self._check_record()
        self._check_early_stop()
        for split, evaluation in self.experiment.evaluations.items():
            graph, batch_size = self.experiment.graphs[split], evaluation.batch_size
            most, rows = graph.rows_per_step(batch_size, f"the {split}'s batch_size"), evaluation.dataset.check().rows
            least = rows // -(-rows // most) * graph.samples_per_prompt
            for call in graph.calls.values():
                layout = self.call_plan(split, call).layout
                call.check_protocol(layout)
                parts = call.parts(layout)
                if least < parts:
                    what = "dp" if parts == layout.strategy.dp else f"parts of {call.protocol.name}"
                    raise UserError(
                        f"{call.name}: {what}={parts} is more than the samples of the {split}'s smallest batch, "
                        f"{least} ({rows} rows in batches of {batch_size}); evaluate more rows, in larger batches "
                        "(--eval-batch-size), or give a plan with other layouts"
                    )

    def _check_early_stop(self) -> None:
        asked, evaluations = self.spec.stop_early, self.experiment.evaluations
        if asked is None:
            return
        if not any(one.every_steps for one in evaluations.values()):
            raise UserError(
                f"--stop-early {asked} compares the evaluations of a run, and this one makes none while it trains; "
                "give --eval-data and --eval-every-steps, or leave it out"
            )
        statistic, names = asked.removeprefix("min:"), [set_name(split) for split in evaluations]
        if any(names) and statistic.partition("/")[0] not in names:
            known = ", ".join(f"{name}/{statistic}" for name in names)
            raise UserError(
                f"--stop-early {asked}: {statistic!r} names none of the evaluation sets before the statistic; with "
                f"sets that have names, choose from {known}"
            )

    def _check_record(self) -> None:
        calls = self.experiment.graph.calls.values()
        made = {key for call in calls for key in (*call.output_data, *call.interface_impl.recordable)}
        known = sorted({*made, WEIGHTS_VERSION})
        for key in self.spec.record:
            if key not in known:
                raise UserError(
                    f"--record {key}: no call makes {key!r}; choose from {', '.join(known)}, or list it in a call's "
                    "output_data, or in `recordable` of the configuration of its interface"
                )


def evaluation_twin(graph: DataflowGraph, call: ModelFunctionCallDef) -> str:
    """The training call whose layout an evaluation call takes: same model, same interface type if possible."""
    same_model = graph.calls_of(call.model_name)
    if not same_model:
        raise UserError(
            f"evaluation call {call.name} uses model {call.model_name!r}, which the experiment's rpcs do not have"
        )
    same_type = [c.name for c in same_model if c.interface_type is call.interface_type]
    return same_type[0] if same_type else same_model[0].name


# What experiments of before have imported, as errors of imports name it, and what they write now.
_FORMER_CALLS = {
    "'PPOActor'": "Generate.by(ppo), and Update(ppo_policy(ppo), batch=ppo_advantages(...))",
    "'PPOReference'": "Logprobs(temperature=ppo.temperature)",
    "'PPOCritic'": "Values(), and Update(ppo_value(ppo), batch=ppo_advantages(...))",
    "'SFT'": 'Update(sft_loss(), rows="examples")',
    "'PairwiseReward'": 'Update(pairwise_loss(PairLoss()), rows="pairs")',
    "'SequenceReward'": "Score()",
    "'realhf.algorithms.rollout": "Generate(...)",
    "'realhf.algorithms.evaluation": "SampledAccuracy(..., statistic=NAME)",
}


def _in_its_place(error: str) -> str:
    """The end of a message about an import that failed, where its name is one of before."""
    found = next((now for former, now in _FORMER_CALLS.items() if former in error), None)
    return f"; write {found}, from realhf.api (docs/experiments.md, Kinds of calls)" if found else ""


def load_experiment_class(path: str | Path, name: str | None = None) -> type[Any]:
    """The class under `@auto` in a Python file (`name` where there are several); modules beside it can be imported.

    Raises UserError for no such file, an error while importing it, or not exactly one such class.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give the path of an experiment, such as experiments/ppo.py")
    try:
        module = load_code_file(path)
    except UserError as error:
        raise UserError(f"{error}{_in_its_place(str(error.__cause__))}") from error
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and SETTINGS_ATTRIBUTE in vars(value) and value.__module__ == module.__name__
    }
    if name in classes:
        return classes[name]
    if len(classes) != 1:
        found = ", ".join(classes) or "none"
        raise UserError(f"{path}: an experiment file has one class under @auto; found {found}")
    return next(iter(classes.values()))


def refuse_program(spec: RunSpec, command: str) -> None:
    """Raises UserError where a command needs the graph of a declared experiment, and the run is a live program's."""
    if spec.declared:
        raise UserError(
            f"{command} is for runs of declared experiments, and this one is of the live program "
            f"{spec.experiment_file or 'of a notebook'}, which decides as it goes on; start the program again with "
            "another run_dir, from what `save` has written"
        )


class OtherRunVersionError(UserError):
    """Another version of realhf has written a run directory."""


def read_spec(path: Path, expected: type[T]) -> T:
    """`experiment.json`, checked against `expected`: `RunSpec`, or less.

    Raises OtherRunVersionError if another version of realhf has written it, UserError if it is missing or damaged.
    """
    try:
        return decode_versioned(read_bytes(path), expected, FORMAT)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): no run was started here") from None
    except OtherVersionError as error:
        raise OtherRunVersionError(
            f"another version of realhf has written the run directory {path.parent}: of {path.name}, {error}; use the "
            "version that wrote it, or start a new run"
        ) from None
    except BadContentError as error:
        raise UserError(f"{path} is damaged ({error}); start a new run") from None


def saved_experiment(spec: RunSpec, cls: type[Any], path: str | Path) -> Any:
    """The experiment of a run, of the class `cls` in the file `path`. Raises UserError if its fields have changed."""
    try:
        return msgspec.convert(spec.values, type=cls)
    except Exception as error:  # the class is the user's, and so are its checks
        raise UserError(
            f"the fields of {cls.__name__} in {path} are not those that the run was started with ({error}); resume it "
            "with the file as it was, or start a new run"
        ) from None


def load_run(directory: RunDirectory) -> Run:
    """Reads a run back. Raises UserError if a file is missing or damaged, or the experiment has changed."""
    spec = read_spec(directory.experiment, RunSpec)
    try:
        os.chdir(spec.working_directory)  # relative paths of the experiment mean what they meant to the user
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory.experiment} names the working directory {spec.working_directory}, which cannot be entered: "
            f"{error}"
        ) from None
    if spec.declared:
        program = load_live(spec.experiment_file, spec.words, spec.declared, spec.values)
        return Run(spec, LiveExperiment(program, calls_file=directory.calls), load_plan(directory.plan))
    cls, plan = load_experiment_class(spec.experiment_file, spec.experiment_class), load_plan(directory.plan)
    experiment = ResolvedExperiment(saved_experiment(spec, cls, spec.experiment_file), plan.staleness)
    return Run(spec, experiment, plan)
