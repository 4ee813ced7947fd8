"""The calls of a live program, round by round: named, written for the workers, and handed to the master."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from realhf.api.script.columns import Symbolic
from realhf.api.script.config import Fetch, Generate, Given, ScriptCall
from realhf.api.script.data import Prompts
from realhf.api.script.functions import TensorFunction
from realhf.api.script.lines import script_error
from realhf.api.script.program import Program
from realhf.api.script.symbols import Origin, SymbolicColumn, SymbolicColumns
from realhf.api.script.trace import Request, Trace
from realhf.api.script.views import View
from realhf.base.files import write_atomically
from realhf.data.recorded import read_recorded, step_folder
from realhf.data.rows import DatasetRows
from realhf.data.tokenizer import TextTokenizer
from realhf.dataflow.graph import INFERENCE, ModelFunctionCallDef, first_name, other_name
from realhf.live.columns import LiveColumns, Report, Values
from realhf.rundir.calls_file import call_digest, call_line

GIVEN = "given"  # names the calls by which workers get what a program gives
IN_FLIGHT = 2  # rounds that a program may be ahead of the workers
_REWARD = "reward"  # the column that numbers become which a program gives to a tensor function


Statistics = Callable[[], dict[str, dict[str, float]]]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the rounds of a program are executed.

    values: the folder of fetched and given values.
    publish: writes a call that workers do not know yet.
    save: writes a model, as it is in a round, to a path, when all calls so far have ended.
    carry_out: executes the last calls of a round, for which there are digests by name, and ends the round if it is told
        to. Returns a function that waits, and gives the statistics by call.
    """

    values: Path
    publish: Callable[[ModelFunctionCallDef], None]
    known: Mapping[str, ModelFunctionCallDef]
    save: Callable[[str, str, int], None]
    carry_out: Callable[[int, Sequence[ModelFunctionCallDef], dict[str, str], bool], Statistics]


class Rounds(Trace):
    """The trace of the present round. `place`: makes the place where calls are executed, when the first ones are."""

    def __init__(self, program: Program, place: Callable[[], Place], module_of: Callable[[str], str]):
        super().__init__(program.architectures, program.mini_batches, program._tokenizer, program._end_tokens)
        self.program, self._make_place, self._module_of = program, place, module_of
        self._place_made: Place | None = None
        self.round = -1
        self._issued = 0  # calls of the round
        self._statistics: dict[str, Statistics] = {}
        self._given: dict[str, bytes] = {}  # by title what the program has given in the round
        self._ends: list[Statistics] = []  # of rounds that may not have ended
        self._rows: DatasetRows | None = None

    @property
    def _place(self) -> Place:
        if self._place_made is None:
            self._place_made = self._make_place()
        return self._place_made

    # Rounds.

    def begin(self) -> None:
        """Ends the present round, and begins the next one."""
        self.end()
        self.round += 1
        self.calls, self.makers, self._lines, self._unread = [], {}, {}, {}
        self._numbers = iter(range(10**9))
        self._issued, self._statistics, self._given = 0, {}, {}
        if len(self._ends) > IN_FLIGHT:
            self._ends.pop(0)()

    def batch(self, name: str) -> Any:
        """The round's rows of the data `name`."""
        return self.dataset(name, self.program._datasets[name].keys)

    def end(self) -> None:
        """Executes the calls of the round that wait, and ends it."""
        if self.round >= 0 and self.calls:
            self._issue(ends=True)

    def flush(self) -> None:
        """Begins to execute the calls so far; does not wait."""
        if self._issued < len(self.calls):
            self._issue(ends=False)

    def _issue(self, *, ends: bool) -> None:
        digests: dict[str, str] = {}
        for call in self.calls[self._issued :]:
            given = self._given.get(getattr(call.interface_impl, "title", ""), b"")
            digests[call.name] = call_digest(call_line(call, self._module_of), given)
            if call.name not in self._place.known:
                self._place.publish(call)
        wait = self._place.carry_out(self.round, tuple(self.calls), digests, ends)
        self._statistics |= dict.fromkeys(digests, wait)
        self._issued = len(self.calls)
        if ends:
            self._ends.append(wait)

    # The names and results of calls, which methods of models ask for.

    def named(self, request: Request) -> Request:
        """A further call of one name in a round gets a number."""
        number, given = 1, request.name
        while self._is_taken(request):
            number += 1
            request = dataclasses.replace(request, name="_".join(filter(None, (given, str(number)))))
        return request

    def _is_taken(self, request: Request) -> bool:
        taken = {first_name(call.name) for call in self.calls}
        behind = f"_{request.name}" if request.name else ""
        names = {f"{request.model}_{what}{behind}" for what in (request.kind.value, request.method)}
        return names <= taken or bool({*self._plain_keys(request)} & self.makers.keys() and request.outputs)

    def _plain_keys(self, request: Request) -> list[str]:
        """The longest keys that its columns may get."""
        keys = [f"{request.name}_{column}" if request.name else column for column in request.outputs]
        return [f"{request.model}_{key}" if key in self.makers else key for key in keys]

    def _check(self, request: Request, config: ScriptCall) -> None:
        """Any order is allowed: the calls before an update of a model end before those behind it begin."""
        waiting = self.calls[self._issued :]
        if any(call.trains and call.model_name == request.model for call in waiting):
            self.flush()

    def _append(self, call: ModelFunctionCallDef) -> None:
        """A call whose settings are others than those of the call of this name in an earlier round gets another."""
        name, number = call.name, 1
        known: Mapping[str, ModelFunctionCallDef] = self._place_made.known if self._place_made else {}
        while (other := known.get(call.name)) and _settings(other) != _settings(call):
            number += 1
            call = dataclasses.replace(call, name=other_name(name, number))
        call_line(call, self._module_of)  # raises what the workers could not read
        self._lines[call.name] = self._lines[name]
        self.makers |= dict.fromkeys(call.output_data, call.name)
        self.calls.append(call)

    def report(self) -> Report:
        name, statistics = self.calls[-1].name, self._statistics

        def ask() -> dict[str, float]:
            if name not in statistics:
                self.flush()
            return statistics[name]()[name]

        return Report(ask)

    def save(self, model: str, path: str) -> None:
        if not self.round and not self.calls:
            raise script_error(f"{model}.save comes before any call: the model is as it was, and no worker has begun")
        self.flush()
        self._place.save(model, path, self.round + bool(self.calls))

    def check_columns(self, columns: SymbolicColumns) -> None:
        tracing = columns._tracing
        assert isinstance(tracing, _OfRound)
        tracing.check(columns)

    def columns(self, view: View, origin: Origin) -> SymbolicColumns:
        return LiveColumns(_OfRound(self, self.round), view, origin)

    def apply(
        self, function: TensorFunction, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> SymbolicColumns:
        """Numbers of the program, one a sample, become the column `reward`."""
        given = tuple(self._as_columns(value) for value in arguments)
        return super().apply(function, given, {name: self._as_columns(value) for name, value in keywords.items()})

    def _seen_as(self, name: str, key: str, columns: Collection[str]) -> str:
        """Its own, unless another column has that: keys may have numbers and names of models before them."""
        return key if name in columns else name

    def _as_columns(self, value: Any) -> Any:
        if isinstance(value, SymbolicColumn):
            self.check_columns(value._columns)
        if isinstance(value, SymbolicColumns):
            self.check_columns(value)
        if isinstance(value, Symbolic) or not _is_numbers(value):
            return value
        numbers = np.asarray(value)
        if numbers.ndim != 1 or len(numbers) != self.size():
            raise script_error(
                f"a tensor function was given {numbers.size} numbers of shape {list(numbers.shape)}, and the batch has "
                f"{self.size()} samples; give one number a sample"
            )
        return self.given(_REWARD, [np.asarray([number]) for number in numbers])

    # Values.

    def size(self) -> int:
        """Samples of a round."""
        return self.program.batch_size

    def given(self, column: str, values: Values) -> SymbolicColumns:
        """A column that the program makes: one array [length, ...] a sample. Numbers are float32, as rewards are."""
        request = self.named(Request(model=GIVEN, method="inference", kind=INFERENCE, outputs=(column,)))
        keys = self.keys(request)
        title = f"{GIVEN}-{request.name or 1}"
        folder = step_folder(self._place.values, self.round)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = [value.astype(np.float32) if value.dtype.kind == "f" else value for value in values]
        content = save({str(sample): array for sample, array in enumerate(arrays)})
        write_atomically(folder / f"{title}.safetensors", content)
        self._given[title] = content
        made = [key for call in self.calls for key in call.output_data]
        view = View(((column, (made or list(self.makers))[0]),))
        config = Given(batch=view, outputs=tuple(keys.values()), folder=str(self._place.values), title=title)
        self.add(request, config, view.keys)
        return self.result(request, keys)

    def fetch(self, columns: LiveColumns, names: tuple[str, ...]) -> dict[str, Values]:
        """Their values, one array a sample."""
        request = self.named(Request(model="fetch", method="inference", kind=INFERENCE))
        view = columns._view
        if view.function is None:
            view = View(tuple(pair for pair in view.columns if pair[0] in names))
        title = f"fetch-{request.name or 1}"
        self.add(request, Fetch(batch=view, folder=str(self._place.values), title=title), view.keys)
        name = self.calls[-1].name
        self.flush()
        self._statistics[name]()
        found = {column: read_recorded(self._place.values, self.round, title, column) for column in names}
        return {column: [of[sample].value for sample in range(self.size())] for column, of in found.items()}

    @property
    def rows(self) -> DatasetRows:
        """The rows of the data. Raises UserError until it is known how many samples share a row."""
        if self._rows is None:
            known = [*self.calls, *(self._place_made.known.values() if self._place_made else ())]
            together = [call.interface_impl.samples_per_prompt for call in known if call.generates]
            if not together and isinstance(self.program._first_data, Prompts):
                raise script_error("how many responses share a row is not known before the first generate; ask later")
            together = together or [1]
            self._rows = DatasetRows(self.program.dataset, self.program.seed, self.size(), together[0])
        return self._rows

    def response(self, tokens: Sequence[int], made: Generate | None) -> str:
        """The text of tokens, without special ones; of a response of `made` also without what ended it."""
        if made is not None and len(tokens) and tokens[-1] == made.end_token:
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens)
        ends = [text.find(stop) for stop in made.stop_strings if stop in text] if made is not None else []
        return text[: min(ends, default=len(text))]

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.tokenizer)

    def line_of(self, text: str) -> str:
        """The line of the program that made the call which a message names; "" if none."""
        names = [name for name in self._lines if name in text]
        return self._lines[max(names, key=len)] if names else ""


class _OfRound:
    """A round as its columns know it: later ones do not have its rows any more."""

    def __init__(self, rounds: Rounds, number: int):
        self._rounds, self._number = rounds, number

    def check(self, columns: object) -> None:
        """Raises UserError where its rows are gone."""
        if self._rounds.round != self._number:
            raise script_error(
                f"{columns!r} is of batch {self._number + 1}, and the program is at batch {self._rounds.round + 1}: "
                "rows are kept until the next batch begins; ask for the values before"
            )

    def apply(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self._rounds.apply(function, arguments, keywords)

    def fetch(self, columns: LiveColumns, names: tuple[str, ...]) -> dict[str, Values]:
        self.check(columns)
        return self._rounds.fetch(columns, names)

    def size(self) -> int:
        return self._rounds.size()

    def is_in_data(self, name: str) -> bool:
        return name in self._rounds.rows.records(self._number, [0])[0]

    def rows(self, name: str) -> list[Any]:
        return [row[name] for row in self._rounds.rows.records(self._number, range(self.size()))]

    def prompts(self) -> list[str]:
        rows = self._rounds.rows.tokens(self._number, range(self.size()))
        return [self._rounds.response(row["prompt"] if "prompt" in row else row["tokens"], None) for row in rows]

    def responses(self, columns: LiveColumns) -> list[str]:
        found, made = self.fetch(columns, ("prompt", "seq")), columns._origin.generated_by
        pairs = zip(found["prompt"], found["seq"], strict=True)
        return [self._rounds.response(seq[len(prompt) :].tolist(), made) for prompt, seq in pairs]


def _settings(call: ModelFunctionCallDef) -> tuple[Any, ...]:
    return call.interface_impl, tuple(call.input_data), tuple(call.output_data), call.mini_batches, call.protocol.name


def _is_numbers(value: Any) -> bool:
    """Whether a program's value is one number a sample; tuples are hyperparameters."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, Real) for each in value)
    if isinstance(value, tuple):
        return False
    return hasattr(value, "__array__") and np.asarray(value).dtype.kind in "biuf" and np.asarray(value).ndim > 0
