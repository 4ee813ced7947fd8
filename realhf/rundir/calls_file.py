"""`program/calls.jsonl`: the calls that a live program has made, for the workers; `rounds.jsonl`: its rounds;
`saved.jsonl`: the models that it has saved.

A call is data. Functions and classes stand in it by their names, as MODULE:NAME, whose modules workers import as they
do those of a declared experiment; only dataclasses and enumerations are made of it.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.script.functions import load
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import RunError, UserError
from realhf.base.files import decode_json, read_bytes
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef, ModelInterfaceType
from realhf.dataflow.protocols import ALL_TO_ALL, THREE_D_PROTO

_PLAIN = (bool, int, str, type(None))


class CallLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the file: a call, with the settings of its interface in the form that `encoded` gives."""

    name: str
    model: str
    type: str
    settings: Any
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    mini_batches: int


def encoded(value: Any, module_of: Callable[[str], str]) -> Any:
    """A value as JSON has it. `module_of` gives the name by which workers know a module.

    Raises:
        UserError: a function or class that is not at the top level of a module, or a value that is no data.
    """
    match value:
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case Enum():
            return {"enum": _named(type(value), module_of), "name": value.name}
        case _ if isinstance(value, _PLAIN):
            return value
        case list() | tuple():
            return {type(value).__name__: [encoded(each, module_of) for each in value]}
        case dict():
            return {"dict": [[encoded(each, module_of) for each in pair] for pair in value.items()]}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
            of_fields = {name: encoded(each, module_of) for name, each in fields.items()}
            return {"class": _named(type(value), module_of), "fields": of_fields}
        case _ if callable(value):
            return _named(value, module_of)
    raise UserError(
        f"a call was given {value!r}, a {type(value).__name__}, which workers cannot get; give numbers, texts, lists, "
        "dataclasses, or functions at the top level of a file"
    )


def _named(what: Any, module_of: Callable[[str], str]) -> str:
    """MODULE:NAME. Raises UserError where that name means something else."""
    module, name = getattr(what, "__module__", ""), getattr(what, "__qualname__", "")
    if not (module and name.isidentifier()):
        raise UserError(
            f"{name or what!r} has no name that workers could find it by; define it at the top level of a file"
        )
    return f"{module_of(module)}:{name}"


def decoded(value: Any) -> Any:
    """The value that was `encoded`; names of functions stay names. Raises UserError where a class is not there."""
    match value:
        case {"float": text}:
            return float(text)
        case {"enum": named, "name": name}:
            return _found(named)[name]
        case {"list": parts}:
            return [decoded(each) for each in parts]
        case {"tuple": parts}:
            return tuple(decoded(each) for each in parts)
        case {"dict": pairs}:
            return {decoded(key): decoded(each) for key, each in pairs}
        case {"class": named, "fields": fields}:
            cls: Any = _found(named)
            if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
                raise UserError(f"{named!r} is no dataclass; start the program again with the files as they were")
            return cls(**{name: decoded(each) for name, each in fields.items()})
    return value


def _found(named: str) -> Any:
    try:
        return load(named)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"workers do not find {named!r} ({error}); define it above `realhf.start`, at the top level of the "
            "program or of a file beside it"
        ) from None


def call_line(call: ModelFunctionCallDef, module_of: Callable[[str], str]) -> CallLine:
    """The line of a call. Raises UserError as `encoded` does, or for a transfer protocol of the user's."""
    if call.protocol not in (THREE_D_PROTO, ALL_TO_ALL):
        raise UserError(
            f"{call.name}: protocol {call.protocol.name} is for declared experiments; leave it out in a live program"
        )
    return CallLine(
        name=call.name,
        model=call.model_name,
        type=call.interface_type.value,
        settings=encoded(call.interface_impl, module_of),
        reads=tuple(call.input_data),
        makes=tuple(call.output_data),
        mini_batches=call.mini_batches,
    )


class RoundLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of `program/rounds.jsonl`: a round that has ended.

    calls: name and digest of each, in the order in which the program made them; statistics: by call.
    versions: by model, its updates so far.
    """

    round: int
    calls: tuple[tuple[str, str], ...]
    statistics: dict[str, dict[str, float]]
    versions: dict[str, int]


def round_line(line: bytes) -> RoundLine:
    """Raises BadContentError."""
    return decode_json(line, RoundLine)


class SavedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of `program/saved.jsonl`: a model that the program has saved, as it was in round `step`."""

    model: str
    path: str
    step: int


def saved_line(line: bytes) -> SavedModel:
    """Raises BadContentError."""
    return decode_json(line, SavedModel)


def call_digest(line: CallLine, given: bytes = b"") -> str:
    """The digest of a call, and of the values that the program gives with it: 16 hexadecimal digits."""
    return hashlib.blake2b(msgspec.json.encode(line) + given, digest_size=8).hexdigest()


class GrowingCalls(dict[str, ModelFunctionCallDef]):
    """By name the calls of a program so far. One that is not known yet is looked for in the file."""

    def __init__(self, path: Path, models: Mapping[str, DecoderConfig], added: Callable[[ModelFunctionCallDef], None]):
        super().__init__()
        self._path, self._models, self._added = path, models, added
        self._read = 0  # lines

    def __missing__(self, name: str) -> ModelFunctionCallDef:
        self.read()
        if name in self:
            return self[name]
        raise KeyError(name)

    def read(self) -> None:
        """Takes in what has come to the file."""
        lines = read_bytes(self._path).splitlines(keepends=True) if self._path.exists() else []
        for text in lines[self._read :]:
            if not text.endswith(b"\n"):
                break  # it is being written
            self._read += 1
            line = decode_json(text, CallLine)
            if line.name not in self:
                self.add(self._call(line))

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def add(self, call: ModelFunctionCallDef) -> None:
        self[call.name] = call
        self._added(call)

    def _call(self, line: CallLine) -> ModelFunctionCallDef:
        has_model: dict[str, Any] = {}
        if line.model:
            if line.model not in self._models:
                raise RunError(f"{self._path}: the call {line.name} is of a model {line.model!r} that there is not")
            has_model = {"model_name": line.model, "model_type": self._models[line.model]}
        return ModelFunctionCallDef(
            name=line.name,
            **has_model,
            interface_type=ModelInterfaceType(line.type),
            interface_impl=decoded(line.settings),
            input_data=line.reads,
            output_data=line.makes,
            mini_batches=line.mini_batches,
        )


class ProgramGraph(DataflowGraph):
    """The calls that a live program has made so far, of all of its rounds. The `outline` fixes
    the models and the data set's keys."""

    def __init__(self, outline: DataflowGraph, path: Path, *, reproducible: bool):
        self.dataset_keys, self.follows, self.pools = outline.dataset_keys, {}, {}
        self.producers: dict[str, str] = {}
        self.model_calls: dict[str, ModelFunctionCallDef] = {}
        self.beside: dict[str, ModelFunctionCallDef] = {}
        self.edges, self.order, self.samples_per_prompt = [], [], 1
        self._reproducible = reproducible
        self.calls: GrowingCalls = GrowingCalls(path, outline.models, self._note)

    def makes(self, key: str) -> bool:
        if key not in self.producers:
            self.calls.read()
        return key in self.producers

    def _note(self, call: ModelFunctionCallDef) -> None:
        if call.reproducible != self._reproducible:
            self.calls[call.name] = call = dataclasses.replace(call, name=call.name, reproducible=self._reproducible)
        (self.beside if call.runs_beside else self.model_calls)[call.name] = call
        self.producers |= dict.fromkeys(call.output_data, call.name)
        if call.generates:
            self.samples_per_prompt = call.interface_impl.samples_per_prompt
