"""From the calls of a script, as it runs once with symbols, to model function calls."""

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from realhf.api.generation import GenerationOptions
from realhf.api.script.columns import Symbolic
from realhf.api.script.config import Measure, Score, ScriptCall
from realhf.api.script.functions import TensorFunction, check_in_script, describe_function
from realhf.api.script.lines import ScriptError, script_error, script_line
from realhf.api.script.symbols import Origin, SymbolicColumn, SymbolicColumns
from realhf.api.script.views import Application, ColumnOf, View
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.dataflow.graph import TRAIN_STEP, ModelFunctionCallDef, ModelInterfaceType, first_name
from realhf.dataflow.protocols import THREE_D_PROTO, TransferProtocol


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end a response, by the model's tokenizer: the first, and further ones."""

    first: int
    others: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a method of a model asks for.

    method: its name in the script, for messages and for the name of a second call.
    outputs: the names of its columns.
    name: what tells this call from others of the model.
    """

    model: str
    method: str
    kind: ModelInterfaceType
    outputs: Sequence[str] = ()
    name: str = ""
    mini_batches: int = 1
    protocol: TransferProtocol = THREE_D_PROTO


@dataclass
class Trace:
    """The calls of a script so far.

    architectures: of every model, by the name of its parameter.
    mini_batches: of an update that names no number.
    tokenizer: a tokenizer.json, or the directory of one.
    end_tokens: of rollouts whose options name none.
    is_evaluation: what trains is to measure instead, and each prompt gets one response, drawn at `temperature`.
    makers: by key the call that makes it, or the parameter of its data.
    """

    architectures: Mapping[str, DecoderConfig]
    mini_batches: int
    tokenizer: str
    end_tokens: EndTokens
    is_evaluation: bool = False
    temperature: float = 0.0
    calls: list[ModelFunctionCallDef] = field(default_factory=list)
    makers: dict[str, str] = field(default_factory=dict)
    _lines: dict[str, str] = field(default_factory=dict)  # of each call, by its name
    _numbers: Iterator[int] = field(default_factory=count)  # of tensor functions
    _unread: dict[int, tuple[str, str]] = field(default_factory=dict)  # name and line of those that no call reads yet
    _looked_at: set[int] = field(default_factory=set)  # by calls with statistics of their own

    @property
    def has_rollout_statistics(self) -> bool:
        """Whether an update so far gives the statistics of the rollouts."""
        return any("rollout" in (getattr(call.interface_impl, "reports", None) or ()) for call in self.calls)

    def maker(self, key: str) -> ModelFunctionCallDef:
        """The call that makes a key."""
        return next(call for call in self.calls if call.name == self.makers[key])

    def dataset(self, name: str, keys: Sequence[str]) -> SymbolicColumns:
        """The columns of a data set."""
        self.makers |= dict.fromkeys(keys, name)
        view = View(tuple((key, key) for key in keys))
        return self.columns(view, Origin(f"the data {name!r}", "the parameters"))

    def columns(self, view: View, origin: Origin) -> SymbolicColumns:
        """What stands in the script for the columns of a view."""
        return SymbolicColumns(self, view, origin)

    def check_columns(self, columns: SymbolicColumns) -> None:
        """Raises UserError where a call cannot read these columns any more."""

    def named(self, request: Request) -> Request:
        """The request under the name that its call will have."""
        return request

    def apply(
        self, function: TensorFunction, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> SymbolicColumns:
        """The columns that a tensor function makes of its arguments, with those of the arguments."""
        check_in_script(function.function)
        given = [value for value in (*arguments, *keywords.values()) if isinstance(value, Symbolic)]
        sources = [value._columns if isinstance(value, SymbolicColumn) else value for value in given]
        columns: dict[str, str] = {}
        temperature: float | None = None
        for source in sources:
            assert isinstance(source, SymbolicColumns)
            view, made = source._view, source._origin
            columns |= {name if made.is_open else self._seen_as(name, key, columns): key for name, key in view.columns}
            temperature = made.temperature if temperature is None else temperature
        application = Application(
            next(self._numbers),
            function.function,
            tuple(self._argument(value) for value in arguments),
            tuple((name, self._argument(value)) for name, value in keywords.items()),
        )
        what, line = self._unread[application.number] = describe_function(function.function), script_line()
        origin = Origin(what, line, temperature=temperature, is_open=True)
        return self.columns(View(tuple(columns.items()), application), origin)

    def _seen_as(self, name: str, key: str, columns: Collection[str]) -> str:
        """The name of a column of a call in the result of a tensor function, beside those that it has already."""
        return key

    def _argument(self, value: Any) -> Any:
        """The form in which workers get an argument of a tensor function."""
        match value:
            case SymbolicColumns():
                return value._view
            case SymbolicColumn():
                return ColumnOf(value._columns._view, value._name)
        return self.with_end(value)

    def read(self, view: View) -> tuple[int, ...]:
        """Notes that a call reads a view; returns the numbers of its tensor functions that no call has read before."""
        numbers = dict.fromkeys(application.number for application in view.applications)
        return tuple(number for number in numbers if self._unread.pop(number, None))

    def look(self, view: View) -> None:
        """Notes that a call reads a view whose statistics it gives under names of its own: another call that reads it
        gives them too."""
        self._looked_at.update(application.number for application in view.applications)

    def check_read(self) -> None:
        """Raises UserError where nothing reads the result of a tensor function."""
        for what, line in (place for number, place in self._unread.items() if number not in self._looked_at):
            raise ScriptError(
                f"{line}: nothing reads the result of {what}, and a tensor function runs within the call that reads "
                "it; give it to a call, such as update, or leave it out"
            )

    def with_end(self, value: Any) -> Any:
        """Options of rollouts that name no end token with those of the tokenizer; anything else as it is."""
        if not isinstance(value, GenerationOptions) or value.eos_token is not None:
            return value
        others = tuple((token,) for token in self.end_tokens.others)
        return dataclasses.replace(
            value, eos_token=self.end_tokens.first, stop_sequences=(*value.stop_sequences, *others)
        )

    def keys(self, request: Request) -> dict[str, str]:
        """By column of a call its key: it has the call's name in front, or, where another call has made the key
        already, the model's."""
        keys = {column: f"{request.name}_{column}" if request.name else column for column in request.outputs}
        return {column: f"{request.model}_{key}" if key in self.makers else key for column, key in keys.items()}

    def add(self, request: Request, config: ScriptCall, reads: Sequence[str]) -> None:
        """Adds a call. Raises UserError where its name is taken, or it comes after the training of its model."""
        name = self._name(request)
        self._check(request, config)
        self.makers |= dict.fromkeys(config.output_data, name)
        self._lines[name] = script_line()
        has_model = not config.runs_beside
        model = request.model
        place: dict[str, Any] = {"model_name": model, "model_type": self.architectures[model]} if has_model else {}
        self._append(
            ModelFunctionCallDef(
                name=name,
                **place,
                interface_type=request.kind,
                interface_impl=config,
                input_data=list(dict.fromkeys(reads)),
                output_data=config.output_data,
                mini_batches=request.mini_batches,
                protocol=request.protocol,
            )
        )

    def _check(self, request: Request, config: ScriptCall) -> None:
        model = request.model
        if request.kind is not TRAIN_STEP:
            for call in self.calls:
                if call.trains and call.model_name == model:
                    raise script_error(
                        f"{model}.{request.method} comes after {model}.update (of {self._lines[call.name]}), and in a "
                        "step all calls use the weights from before its training; move it up, before the update"
                    )
        for key in config.output_data:
            if key in self.makers:
                raise script_error(
                    f"{model}.{request.method} makes the key {key!r}, which {self.makers[key]} makes already; give one "
                    "of the calls a name, such as name='second'"
                )

    def _append(self, call: ModelFunctionCallDef) -> None:
        self.calls.append(call)

    def save(self, model: str, path: str) -> None:
        raise script_error(f"{model}.save is for live programs (realhf.start); a run writes checkpoints by itself")

    def report(self) -> Any:
        """What stands for the statistics of the last call: in a script nothing, since they are of no use there."""
        return None

    def measured(self, keys: Collection[str]) -> list[ModelFunctionCallDef]:
        """The calls of an evaluation that give statistics, with those whose results they read, as far as all of it
        comes from the data set's `keys`."""
        known = set(keys)
        possible = []
        for call in self.calls:
            if set(call.input_data) <= known:
                possible.append(call)
                known |= set(call.output_data)
        kept: list[ModelFunctionCallDef] = []
        needed: set[str] = set()
        for call in reversed(possible):
            gives_statistics = call.runs_beside or isinstance(call.interface_impl, Score | Measure)
            if gives_statistics or needed & set(call.output_data):
                kept.insert(0, call)
                needed |= set(call.input_data)
        return kept

    def result(self, request: Request, keys: Mapping[str, str], kept: View | None = None) -> SymbolicColumns:
        """The columns that a call makes, behind those of `kept`."""
        columns = (*(kept.columns if kept else ()), *keys.items())
        origin = Origin(f"{request.model}.{request.method}", self._lines[self.calls[-1].name], suffix=request.name)
        return self.columns(View(columns), origin)

    def _name(self, request: Request) -> str:
        """MODEL_TYPE, where that is taken MODEL_METHOD; with the name of the call, if it has one, behind it."""
        taken = {first_name(call.name) for call in self.calls}
        behind = f"_{request.name}" if request.name else ""
        usual, other = (f"{request.model}_{what}{behind}" for what in (request.kind.value, request.method))
        if usual not in taken:
            return usual
        if other not in taken:
            return other
        raise script_error(
            f"{request.model}.{request.method} is called a second time (first at {self._lines[usual]}), and both calls "
            "would have one name; give one of them another, such as name='second'"
        )


class ScriptParameter:
    """A parameter of a script whose methods are calls: a copy of it, which knows the trace and its own name there."""

    def in_trace(self, trace: Trace | Callable[[], Trace], name: str) -> Self:
        """This object as the parameter `name` of a script that is traced, or as a model of a live program, whose trace
        is made when it is first needed."""
        found = copy.copy(self)
        object.__setattr__(found, "_place", (trace, name))
        return found

    @property
    def _trace(self) -> Trace:
        return self._in_script[0]

    @property
    def _name(self) -> str:
        return self._in_script[1]

    @property
    def _in_script(self) -> tuple[Trace, str]:
        place: tuple[Any, str] | None = vars(self).get("_place")
        if place is None:
            raise UserError(
                f"a {type(self).__name__} has its methods in a script, a function under @auto, and in a live program, "
                "where cluster.policy and the like give one"
            )
        trace, name = place
        return (trace if isinstance(trace, Trace) else trace()), name
