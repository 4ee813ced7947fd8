"""The experiment that a script becomes: a dataclass whose fields are the options of its parameters."""

import ast
import dataclasses
import dis
import inspect
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from realhf.api.experiment import Dataset, Evaluation, ModelSetup
from realhf.api.model_source import ModelSource, model_source
from realhf.api.script.config import Distributions
from realhf.api.script.data import ScriptData
from realhf.api.script.functions import load
from realhf.api.script.held_out import held_out_sets
from realhf.api.script.lines import ScriptError
from realhf.api.script.models import READING, ScriptModel
from realhf.api.script.reward import Reward, models_of_rewards
from realhf.api.script.trace import EndTokens, ScriptParameter, Trace
from realhf.architecture.compute import Reproducible
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.base.options import DATA, EVALUATION, NEEDED, TRAINING, Common, Option, check_options
from realhf.dataflow.graph import ModelFunctionCallDef

# By their names: they lie above the API.
_TOKENIZER = "realhf.data.tokenizer:TextTokenizer"
_MERGED = "realhf.data.merged:MergedDataset"
_REWARDS = "realhf.data.tasks:rewards_of"
_CHECK_HELD_OUT = "realhf.data.tasks:check_held_out"

# 1.8 million parameters; eight heads, so that tensor parallelism over 2, 4 and 8 divides them.
SMALL = DecoderConfig(hidden_size=192, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=8, vocab_size=32)


@dataclass(frozen=True, kw_only=True)
class ScriptExperiment:
    """The fields that the experiments of all scripts have.

    An evaluation is made before the first step, every `eval_every_steps` and at the end. Its statistics are the rewards
    of one response to each prompt of `eval_data`, or the losses of examples and pairs. A script of no steps trains
    nothing: its calls are an evaluation of all of its data, which is made once.
    """

    SCRIPT: ClassVar[Callable[..., None]]
    HEADING = TRAINING

    seed: Annotated[int, Common("seed of all random numbers")] = 0
    steps: Annotated[int, Common("steps of training")] = 100
    batch_size: Annotated[int, Common("responses, examples or pairs of a step")] = 0
    mini_batches: Annotated[int, Common("optimizer steps of each update, on equal parts of the batch")] = 1
    dtype: Annotated[DType, Common("dtype of all models")] = "float32"
    reproducible: Annotated[
        Reproducible, Option("what has the same bits: runs of one plan, or those under every layout (slower)")
    ] = "plan"
    model: Annotated[
        str,
        Common(
            "run directory, Hugging Face checkpoint or GGUF file of models that name none (default: random weights)",
            metavar="DIR",
            group=NEEDED,
        ),
    ] = ""
    architecture: DecoderConfig = field(default_factory=lambda: SMALL)
    tokenizer: Annotated[
        str, Common("tokenizer.json or its directory (default: that of the model)", metavar="DIR", group=DATA)
    ] = ""
    eval_data: Annotated[
        tuple[str, ...],
        Common(
            "held-out rows, whose rewards or losses are measured before the first step and at the end; may be repeated",
            metavar="[NAME=]FILE",
            group=EVALUATION,
        ),
        tyro.conf.UseAppendAction,
    ] = ()
    eval_every_steps: Annotated[
        int | None, Common("evaluate every N steps too", group=EVALUATION, range=(1, 10**9), unit="steps")
    ] = None
    eval_batch_size: Annotated[
        int,
        Option(
            "most rows of an evaluation's batch; all rows are evaluated (0: --batch-size)",
            group=EVALUATION,
            range=(0, 2**31),
            unit="rows",
        ),
    ] = 0
    eval_temperature: Annotated[
        float, Option("temperature of evaluations (0: the most likely token)", group=EVALUATION)
    ] = 0.0

    def __post_init__(self) -> None:
        check_options(ScriptExperiment, vars(self))
        if self.evaluates_only() and (self.steps or self.eval_data):
            raise UserError(
                f"{type(self).__name__} trains nothing and evaluates --data; leave --steps and --eval-data out"
            )
        for path in self._held_out.values():
            load(_CHECK_HELD_OUT)(self._first_data.data, path)
        if self.eval_every_steps is not None and not self.eval_data:
            raise UserError(
                f"--eval-every-steps {self.eval_every_steps} evaluates held-out rows, and there are none; give "
                "--eval-data FILE too, or leave it out"
            )

    @cached_property
    def _models(self) -> dict[str, ScriptModel]:
        """By parameter the models, of rewards too."""
        return {**self._of_kind(ScriptModel), **models_of_rewards(self._rewards(self._first_data.data))}

    @cached_property
    def architectures(self) -> dict[str, DecoderConfig]:
        """Of every model, by its name."""
        heads = {name: model.HEAD for name, model in self._models.items()}
        return {name: self._sources[name].architecture.with_head(head) for name, head in heads.items()}

    @cached_property
    def rpcs(self) -> Sequence[ModelFunctionCallDef]:
        trace = self._trace()
        _check(type(self), trace, list(self._models), list(self._of_kind(ScriptData)))
        for call in trace.calls:
            if isinstance(call.interface_impl, Distributions):
                drawn_by = trace.maker(dict(call.interface_impl.batch.columns)["seq"])
                self._check_vocabulary(call.model_name, drawn_by.model_name)
        return trace.calls

    @cached_property
    def models(self) -> Mapping[str, ModelSetup]:
        trained = {call.model_name for call in self.rpcs if call.trains}
        return {
            name: model.setup(name, self._sources[name], self.dtype, trains=name in trained)
            for name, model in self._models.items()
            if any(call.model_name == name for call in self.rpcs)
        }

    @cached_property
    def dataset(self) -> Dataset:
        parts = tuple(self._datasets.values())
        merged: Dataset = parts[0] if len(parts) == 1 else load(_MERGED)(parts=parts)
        return merged

    @cached_property
    def evaluation(self) -> Evaluation | Mapping[str, Evaluation] | None:
        if self.evaluates_only():
            return Evaluation(rpcs=self.rpcs, dataset=self.dataset, batch_size=self.batch_size)
        made = {name: self._evaluation_on(path) for name, path in self._held_out.items()}
        return made.get("", made or None)

    def _evaluation_on(self, path: str) -> Evaluation:
        name, *_ = self._of_kind(ScriptData)
        dataset = dataclasses.replace(self._first_data, data=path).dataset(name, self._tokenizer)
        calls = self._trace(held_out=path).measured(dataset.keys)
        if not calls:
            raise UserError(
                f"--eval-data: no call of {type(self).__name__} can be measured on {name!r} alone; leave it out"
            )
        size = self.eval_batch_size or self.batch_size
        return Evaluation(rpcs=calls, dataset=dataset, batch_size=size, every_steps=self.eval_every_steps)

    @classmethod
    def evaluates_only(cls) -> bool:
        """Whether the script trains nothing: `@auto(steps=0)`."""
        return cls.steps == 0

    @classmethod
    def untrained(cls) -> frozenset[str]:
        """The parameters that the script's text mentions only to call a method that trains no model."""
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls.SCRIPT)))))
        mentions = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        attributes = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr in READING)
        reads = Counter(node.value.id for node in attributes if isinstance(node.value, ast.Name))
        return frozenset(name for name, number in reads.items() if number == mentions[name])

    def _of_kind(self, kind: type[Any]) -> dict[str, Any]:
        """The parameters of the script that are of a kind."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self).SCRIPT).parameters}
        return {name: value for name, value in values.items() if isinstance(value, kind)}

    @property
    def _first_data(self) -> ScriptData:
        first, *_ = self._of_kind(ScriptData).values()
        assert isinstance(first, ScriptData)
        return first

    def _rewards(self, data: str) -> dict[str, Reward]:
        """By parameter the rewards; one without functions and a model has those of the task that `data` names."""
        return {name: reward.with_default(load(_REWARDS)(data)) for name, reward in self._of_kind(Reward).items()}

    @cached_property
    def _held_out(self) -> dict[str, str]:
        """By name the paths of held-out rows; "" is the name of an only set without one."""
        return held_out_sets(self.eval_data)

    @cached_property
    def _sources(self) -> dict[str, ModelSource]:
        return {
            name: model_source(model.model or self.model, self.architecture, head=model.HEAD, backend=model.backend)
            for name, model in self._models.items()
        }

    @cached_property
    def _tokenizer(self) -> str:
        """A tokenizer.json, or the directory of one."""
        found = self.tokenizer or next((s.tokenizer for s in self._sources.values() if s.tokenizer), "")
        without = next((source.checkpoint for source in self._sources.values() if source.checkpoint), None)
        if not found and without:
            raise UserError(
                f"the model {without} came without a tokenizer.json; give --tokenizer DIR, the directory of one, or "
                "write it there from a tokenizer of another form, with transformers: "
                f"AutoTokenizer.from_pretrained({without!r}).save_pretrained({without!r})"
            )
        if not found:
            raise UserError(
                "there is no tokenizer: no model came with one; give --model DIR, or, for a model of random weights, "
                "--tokenizer DIR or --tokenizer FILE.json"
            )
        return found

    def _check_vocabulary(self, teacher: str, student: str) -> None:
        """Raises UserError unless the tokens of two models are the same, as far as their files say."""
        source, other = self._sources[teacher], self._sources[student]
        sizes = source.architecture.vocab_size, other.architecture.vocab_size
        differs = "" if sizes[0] == sizes[1] else f"vocab_size is {sizes[0]} against {sizes[1]}"
        if not differs and source.tokenizer:
            ids, others = (load(_TOKENIZER)(file).vocabulary for file in (source.tokenizer, self._tokenizer))
            token = next((text for text in ids | others if ids.get(text) != others.get(text)), None)
            if token is not None:
                differs = f"the id of the token {token!r} is {ids.get(token)} against {others.get(token)}"
        if differs:
            raise UserError(
                f"{teacher} ({source.checkpoint}) and {student} ({other.checkpoint or 'random weights'}) have "
                f"different vocabularies: {differs}. Their distributions are compared token by token; choose models "
                "with one tokenizer, such as two sizes of one family"
            )

    @cached_property
    def _datasets(self) -> dict[str, Dataset]:
        found = self._tokenizer
        file = str(Path(found) / "tokenizer.json") if Path(found).is_dir() else found
        return {name: data.dataset(name, file) for name, data in self._of_kind(ScriptData).items()}

    @cached_property
    def _end_tokens(self) -> EndTokens:
        tokenizer = load(_TOKENIZER)(self._tokenizer)
        named = (tokenizer.token(data.end_token) for data in self._of_kind(ScriptData).values() if data.end_token)
        given = [token for token in named if token is not None]  # a data set says so of one that is not there
        first, *others = dict.fromkeys([*given, *tokenizer.end_tokens]) or [-1]
        return EndTokens(first, tuple(others))

    def _trace(self, *, held_out: str = "") -> Trace:
        """The calls of training, or of an evaluation on `held_out`."""
        trace = Trace(
            self.architectures,
            self.mini_batches,
            self._tokenizer,
            self._end_tokens,
            bool(held_out),
            self.eval_temperature,
        )
        script = type(self).SCRIPT
        rewards = self._rewards(held_out or self._first_data.data)
        arguments: dict[str, Any] = {}
        for name in inspect.signature(script).parameters:
            match value := self._models.get(name, rewards.get(name, getattr(self, name))):
                case ScriptData():
                    arguments[name] = trace.dataset(name, self._datasets[name].keys)
                case ScriptParameter():
                    arguments[name] = value.in_trace(trace, name)
                case _:
                    arguments[name] = value
        _run(script, arguments)
        return trace


def _run(script: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Raises UserError with the line of whatever the script raises."""
    try:
        script(**arguments)
    except ScriptError:
        raise
    except Exception as error:
        file = script.__code__.co_filename
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f"{file}:{lines[-1]}" if lines else file
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise ScriptError(f"{where}: {what}") from error


def _check(cls: type[ScriptExperiment], trace: Trace, models: Sequence[str], data: Sequence[str]) -> None:
    """Raises UserError for a script that leaves something unused, or trains nothing in its steps."""
    script = cls.SCRIPT
    place = f"{script.__code__.co_filename}:{script.__code__.co_firstlineno}: {script.__name__}"
    trace.check_read()
    used = {call.model_name for call in trace.calls}
    read = {key for call in trace.calls for key in call.input_data}
    for name in models:
        if name not in used and not _mentions(script, name):
            raise ScriptError(f"{place}: the model {name!r} is in no call; call one of its methods, or leave it out")
    for name in data:
        if not any(maker == name and key in read for key, maker in trace.makers.items()):
            raise ScriptError(f"{place}: nothing reads the data {name!r}; give it to a call, or leave it out")
    trains = any(call.trains for call in trace.calls)
    if trains and cls.evaluates_only():
        raise ScriptError(f"{place} trains a model in no steps; give @auto other steps, or leave the update out")
    if not trains and not cls.evaluates_only():
        raise ScriptError(f"{place} trains no model; call update on one of them, or write @auto(steps=0)")


def _mentions(script: Callable[..., None], name: str) -> bool:
    """Whether the script's code reads a parameter; options may then choose that no call uses it."""
    read = (step.argval for step in dis.get_instructions(script) if step.opname.startswith("LOAD_"))
    return any(name == value or (isinstance(value, tuple) and name in value) for value in read)


def experiment_class(
    script: Callable[..., None], *, batch_size: int, steps: int | None, mini_batches: int | None
) -> type[ScriptExperiment]:
    """The class of a script's experiments. It stands under the name of the function in its module.

    Raises:
        UserError: a parameter has no annotation, or one that a script does not know.
    """
    defaults = {"batch_size": batch_size, "steps": steps, "mini_batches": mini_batches}
    fields: list[Any] = [(name, int, value) for name, value in defaults.items() if value is not None]
    own = {one.name for one in dataclasses.fields(ScriptExperiment)}
    has_data = False
    for name, parameter in _parameters(script).items():
        if name in own or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _error(script, f"parameter {name!r} has the name of a field that every script has; choose another")
        kind: Any = parameter.annotation
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)) or kind in (ScriptData, ScriptModel):
            shown = "no annotation" if kind is parameter.empty else f"the annotation {kind!r}"
            raise _error(
                script,
                f"parameter {name!r} has {shown}; annotate it with Prompts, Examples, Pairs (data), Policy, "
                "ValueModel, RewardModel (models), Reward, or a frozen dataclass of hyperparameters",
            )
        default = kind if parameter.default is parameter.empty else _constant(parameter.default)
        if issubclass(kind, ScriptData) and not has_data:
            kind, has_data = Annotated[kind, tyro.conf.arg(name="")], True
        fields.append((name, kind, field(default_factory=default)))
    if not has_data:
        raise _error(script, "no parameter is data; annotate one with Prompts, Examples or Pairs")
    made = dataclasses.make_dataclass(
        script.__name__,
        fields,
        bases=(ScriptExperiment,),
        namespace={"SCRIPT": staticmethod(script), "__doc__": script.__doc__, "__module__": script.__module__},
        frozen=True,
        kw_only=True,
    )
    return made


def _parameters(script: Callable[..., None]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(script, eval_str=True).parameters
    except NameError as error:
        raise _error(script, f"an annotation cannot be read: {error}") from None


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _error(script: Callable[..., None], text: str) -> UserError:
    return ScriptError(f"{script.__code__.co_filename}:{script.__code__.co_firstlineno}: {script.__name__}: {text}")
