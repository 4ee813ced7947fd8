"""Values as text between a program of unknown origin and the process that runs its tests.

Data crosses as a copy: numbers, texts, bytes, None, the containers of Python and `collections`, dates, decimals,
fractions, arrays of NumPy. Containers that can change are cells of a table, so that both sides know which is which:
shared and cyclic ones stay so, and changes that a function makes in its arguments reach its caller. Everything else
stays where it is, and the other side gets a number for it.

A text from the other side is not trusted: nothing in it is executed, and unknown content raises WireError.
"""

import base64
import builtins
import collections
import datetime
import importlib
import json
import sys
import types
from collections.abc import Callable
from typing import Any

_LONGEST_INT = 2**63
_KINDS: dict[type, str] = {
    list: "list",
    dict: "dict",
    set: "set",
    bytearray: "bytes",
    collections.deque: "deque",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    collections.defaultdict: "default",
}
_TYPES = {kind: cls for cls, kind in _KINDS.items()}
# These are the same on both sides, and go by their names.
NAMED_TYPES = {name: one for name, one in vars(builtins).items() if isinstance(one, type)}
_FUNCTIONS = "abs all any ascii bin chr divmod hex len max min oct ord pow repr round sorted sum"
_NAMED_FUNCTIONS = {name: getattr(builtins, name) for name in _FUNCTIONS.split()}
_NAMED = {**NAMED_TYPES, **_NAMED_FUNCTIONS}
_NAME_OF = {id(one): name for name, one in _NAMED.items()}


class WireError(BaseException):
    """The other side sent something else than a message. It is no Exception, so that no test takes it for one of the
    program."""


class Table:
    """The containers that both sides of a call know, by their places, and the texts of their contents."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.known: list[str] = []
        self._places: dict[int, int] = {}

    def place(self, value: Any) -> int:
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self.objects)
            self.objects.append(value)
        return place


class Codec:
    """Values to texts and back.

    Args:
        export: the node of an object that stays on this side, see `peer.Peer`.
        find: the object of such a node of the other side.
    """

    def __init__(self, export: Callable[[Any], Any], find: Callable[[Any], Any]):
        self._export, self._find = export, find

    # --- to the wire

    def pack(self, table: Table, value: Any) -> list[Any]:
        """`[node, contents of the table's containers]`; null for contents that the other side has as they are."""
        node = self._node(value, table)
        contents: list[Any] = []
        while len(contents) < len(table.objects):
            place = len(contents)
            content = self._content(table.objects[place], table)
            text = json.dumps(content)
            if place < len(table.known):
                contents.append(None if table.known[place] == text else content)
                table.known[place] = text
            else:
                contents.append(content)
                table.known.append(text)
        return [node, contents]

    def _node(self, value: Any, table: Table) -> Any:
        cls = type(value)
        if value is None or cls in (bool, str, float) or (cls is int and -_LONGEST_INT < value < _LONGEST_INT):
            return value
        if cls in _KINDS or _is_array(value):
            return ["cell", table.place(value)]
        if cls is int:
            return ["int", hex(value)]
        if cls is tuple or cls is frozenset:
            return [cls.__name__, [self._node(one, table) for one in value]]
        if cls is range or cls is slice:
            return [cls.__name__, [self._node(one, table) for one in (value.start, value.stop, value.step)]]
        if (node := _plain_node(value, cls)) is not None:
            return node
        return self._export(value)

    def _content(self, value: Any, table: Table) -> Any:
        kind = _KINDS.get(type(value))
        if kind is None:
            return ["array", *_array_node(value)]
        if kind == "bytes":
            return [kind, value.decode("latin-1")]
        if isinstance(value, dict):
            pairs = [[self._node(k, table), self._node(v, table)] for k, v in value.items()]
            return [kind, pairs, self._node(getattr(value, "default_factory", None), table)]
        return [kind, [self._node(one, table) for one in value], getattr(value, "maxlen", None)]

    # --- from the wire

    def unpack(self, table: Table, message: Any) -> Any:
        """The value of `pack`; the table's containers have the content of the other side. Raises WireError."""
        try:
            node, contents = message
            known = len(table.objects)
            for place in range(known, len(contents)):
                table.place(_empty(contents[place]))
                table.known.append("")
            for place, content in enumerate(contents):
                if content is not None:
                    self._fill(table.objects[place], content, table)
                    table.known[place] = json.dumps(content)
            return self._value(node, table)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise WireError(f"no message: {type(error).__name__}") from None

    def _value(self, node: Any, table: Table) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise WireError("no value")
            return node
        match node:
            case ["cell", int(place)] if place >= 0:
                return table.objects[place]
            case ["int", str(text)]:
                return int(text, 16)
            case [("tuple" | "frozenset") as name, list(nodes)]:
                return NAMED_TYPES[name]([self._value(one, table) for one in nodes])
            case [("range" | "slice") as name, list(nodes)]:
                return NAMED_TYPES[name](*(self._value(one, table) for one in nodes))
            case ["plain", str(kind), *parts]:
                return _plain_value(kind, parts)
        return self._find(node)

    def _fill(self, value: Any, content: Any, table: Table) -> None:
        kind, what, *rest = content
        if kind == "array":
            value[...] = _array(*content[1:])
            return
        if _KINDS.get(type(value)) != kind:
            raise WireError("a container of another kind")
        if kind == "bytes":
            value[:] = what.encode("latin-1")
        elif isinstance(value, dict):
            pairs = [(self._value(k, table), self._value(v, table)) for k, v in what]
            value.clear()
            for key, one in pairs:  # a counter's own `update` would add
                value[key] = one
            if isinstance(value, collections.defaultdict):
                value.default_factory = self._value(rest[0], table)
        elif isinstance(value, list):
            value[:] = [self._value(one, table) for one in what]
        else:
            values = [self._value(one, table) for one in what]
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(values)


def _empty(content: Any) -> Any:
    kind = content[0]
    if kind == "array":
        return _array(*content[1:])
    return collections.deque(maxlen=content[2]) if kind == "deque" else _TYPES[kind]()


# --- data without parts


def _plain_node(value: Any, cls: type) -> Any:
    """None for other data."""
    if (name := _NAME_OF.get(id(value))) is not None:
        return ["plain", "named", name]
    if cls is bytes:
        return ["plain", "bytes", value.decode("latin-1")]
    if cls is complex:
        return ["plain", "complex", value.real, value.imag]
    if value is Ellipsis or value is NotImplemented:
        return ["plain", "singleton", repr(value)]
    if _is_of(cls, "decimal", "Decimal"):
        return ["plain", "decimal", str(value)]
    if _is_of(cls, "fractions", "Fraction"):
        return ["plain", "fraction", hex(value.numerator), hex(value.denominator)]
    if cls in (datetime.datetime, datetime.date, datetime.time):
        return ["plain", cls.__name__, value.isoformat(), getattr(value, "fold", 0)]
    if cls is datetime.timedelta:
        return ["plain", "timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, types.ModuleType):
        is_installed = sys.modules.get(value.__name__) is value and value.__name__ != "__main__"
        return ["plain", "module", value.__name__] if is_installed else None
    if isinstance(value, type) and issubclass(value, BaseException) and _is_importable(value):
        return ["plain", "class", value.__module__, value.__name__]
    scalar: Any = getattr(sys.modules.get("numpy"), "generic", None)
    if scalar is not None and isinstance(value, scalar):
        return ["plain", "scalar", *_array_node(value)] if value.dtype.kind in _ARRAY_KINDS else None
    return None


def _is_importable(cls: type) -> bool:
    found = getattr(sys.modules.get(cls.__module__), cls.__name__, None)
    return found is cls and cls.__module__ != "__main__"


def _is_of(cls: type, module: str, name: str) -> bool:
    """Whether it is this class of a module that need not be imported."""
    return cls.__name__ == name and getattr(sys.modules.get(module), name, None) is cls


def _plain_value(kind: str, parts: list[Any]) -> Any:
    match kind, parts:
        case "named", [str(name)]:
            return _NAMED[name]
        case "bytes", [str(text)]:
            return text.encode("latin-1")
        case "complex", [float(real), float(imag)]:
            return complex(real, imag)
        case "singleton", [str(name)]:
            return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[name]
        case "decimal", [str(text)]:
            return importlib.import_module("decimal").Decimal(text)
        case "fraction", [str(top), str(bottom)]:
            return importlib.import_module("fractions").Fraction(int(top, 16), int(bottom, 16))
        case "date", [str(text), 0]:
            return datetime.date.fromisoformat(text)
        case (("datetime" | "time"), [str(text), int(fold)]):
            return getattr(datetime, kind).fromisoformat(text).replace(fold=fold)
        case "timedelta", [int(days), int(seconds), int(micros)]:
            return datetime.timedelta(days, seconds, micros)
        case "module", [str(name)]:
            return _module(name)
        case "class", [str(module), str(name)]:
            return _class(module, name)
        case "scalar", _:
            return _array(*parts)[()]
    raise WireError(f"no data: {kind}")


def _module(name: str) -> Any:
    """An installed module: it has none of the other side's code."""
    if name.partition(".")[0] in ("__main__", "realhf", "antigravity"):
        raise WireError("no module of Python or of a library")
    return importlib.import_module(name)


def _class(module: str, name: str) -> Any:
    """An exception's class in an installed module."""
    found = getattr(_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise WireError("no exception")
    return found


# --- arrays

_ARRAY_KINDS = "biufcSUmM?"


def _is_array(value: Any) -> bool:
    return _is_of(type(value), "numpy", "ndarray") and value.dtype.kind in _ARRAY_KINDS


def _array_node(value: Any) -> list[Any]:
    return [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode("ascii")]


def _array(dtype: str, shape: list[int], content: str) -> Any:
    numpy = importlib.import_module("numpy")
    found = numpy.dtype(dtype)
    if found.kind not in _ARRAY_KINDS:
        raise WireError("no array of numbers")
    return numpy.frombuffer(base64.b64decode(content), found).reshape(shape).copy()
