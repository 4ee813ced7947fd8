"""Two processes that use each other's objects: the program of unknown origin, and the process that runs its tests.

Each has proxies of the other's objects. Each operation on a proxy is a question over two pipes, one at a time. A
question may lead to questions back: a test gives a function to the program, which calls it.
"""

import json
import os
import struct
import sys
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from realhf.rewards.wire import NAMED_TYPES, Codec, Table, WireError

_LENGTH = struct.Struct(">Q")
_LONGEST = 2**30
_READ_BYTES = 2**20

COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__")
_ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
OPERATORS = tuple(f"__{prefix}{name}__" for name in _ARITHMETIC.split() for prefix in ("", "r", "i"))
_OTHERS = (
    "call len iter next getitem setitem delitem contains enter exit bool hash int float index complex abs neg pos "
    "invert round trunc floor ceil reversed length_hint"
)
SPECIALS = (*(f"__{name}__" for name in _OTHERS.split()), *OPERATORS, *COMPARISONS)
"""The methods of an object's class that its proxy has where the object has them."""
_ALWAYS = ("__str__", "__repr__", "__format__")
# The data of subclasses of these types can be read. The class's own methods are not called.
_DATA: Mapping[str, Callable[[Any], Any]] = {
    "int": int.__int__,
    "float": float.__float__,
    "complex": complex.__complex__,
    "str": str.__str__,
    "bytes": lambda value: bytes.__getitem__(value, slice(None)),
    "tuple": lambda value: tuple.__getitem__(value, slice(None)),
    "list": lambda value: list.__getitem__(value, slice(None)),
    "dict": lambda value: dict(dict.items(value)),
    "set": lambda value: set(set.__iter__(value)),
    "frozenset": lambda value: frozenset(frozenset.__iter__(value)),
}


class Proxy:
    """An object of the other side. Its attributes and methods are asked for."""

    __slots__ = ("__weakref__", "_realhf")
    _realhf: "Reference"

    def __getattr__(self, name: str) -> Any:
        own = object.__getattribute__(self, "_realhf")
        return own.peer.ask("get", own.number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = object.__getattribute__(self, "_realhf")
        own.peer.ask("set", own.number, name, value)

    def __delattr__(self, name: str) -> None:
        own = object.__getattribute__(self, "_realhf")
        own.peer.ask("delete", own.number, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        base = object.__getattribute__(self, "_realhf").base
        return NAMED_TYPES[base] if base else Proxy

    def __eq__(self, other: object) -> bool:
        own = object.__getattribute__(self, "_realhf")
        result: bool = own.peer.equals(self, own, other)
        return result

    def __ne__(self, other: object) -> bool:
        result = self.__eq__(other)
        return result if result is NotImplemented else not result

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __instancecheck__(self, instance: object) -> bool:
        own = object.__getattribute__(self, "_realhf")
        return type(instance) in own.peer.proxy_classes and bool(own.peer.ask("isinstance", own.number, instance))

    def __subclasscheck__(self, subclass: object) -> bool:
        own = object.__getattribute__(self, "_realhf")
        return bool(own.peer.ask("issubclass", own.number, subclass))


class Reference:
    """The target of a proxy: its peer, the object's number there, and the plain type of its data, if any."""

    __slots__ = ("base", "number", "peer", "specials")

    def __init__(self, peer: "Peer", number: int, base: str, specials: tuple[str, ...]):
        self.peer, self.number, self.base, self.specials = peer, number, base, specials


def reference(value: Any) -> Reference | None:
    """The reference of a proxy; None for another value."""
    return object.__getattribute__(value, "_realhf") if issubclass(type(value), Proxy) else None


def _method(name: str) -> Callable[..., Any]:
    def method(self: Proxy, *args: Any, **kwargs: Any) -> Any:
        own = object.__getattribute__(self, "_realhf")
        return own.peer.special(own, name, args, kwargs)

    method.__name__ = name
    return method


class Peer(ABC):
    """One of the two sides; `perform` carries out the requests that the other may make.

    Args:
        reader, writer: file descriptors of the pipes.
    """

    def __init__(self, reader: int, writer: int):
        self._reader, self._writer = reader, writer
        self._lock, self._sends = threading.RLock(), threading.Lock()
        self._codec = Codec(self.export, self._find)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._proxies: weakref.WeakValueDictionary[int, Proxy] = weakref.WeakValueDictionary()
        self._errors: dict[int, type[BaseException]] = {}
        self._error_numbers: dict[int, int] = {}
        self._classes: dict[tuple[str, ...], type[Proxy]] = {}
        self.proxy_classes: set[type] = set()
        # Classes of this package whose objects may cross.
        self.open_classes: set[type] = {_Raised}

    # --- asking

    def ask(self, what: str, subject: Any, *args: Any, **kwargs: Any) -> Any:
        """The other side's answer; raises the exception that it raises there. Raises WireError: it has ended, or
        answers nothing."""
        return self._ask(what, subject, args, kwargs, may_change=True)

    def ask_unchanged(self, what: str, subject: Any, *args: Any) -> Any:
        """As `ask`; an answer that changes the arguments is an error."""
        return self._ask(what, subject, args, {}, may_change=False)

    def _ask(self, what: str, subject: Any, args: Any, kwargs: Any, *, may_change: bool) -> Any:
        with self._lock:
            table = Table()
            message = self._codec.pack(table, (args, tuple(kwargs.items())))
            self._send(["ask", what, subject, message])
            while True:
                match self._receive():
                    case ["ask", str(asked), about, content]:
                        self._answer(asked, about, content)
                    case [("value" | "error") as kind, [_, list(contents)] as content]:
                        if not may_change and any(one is not None for one in contents[: len(table.objects)]):
                            raise TypeError("an operator of the program changes its operand")
                        value = self._codec.unpack(table, content)
                        if kind == "error":
                            raise self._error(value)
                        return value
                    case _:
                        raise WireError("no answer")

    def special(self, of: Reference, name: str, args: Any, kwargs: Any) -> Any:
        """Calls a special method of a proxy's object."""
        return self.ask("special", of.number, name, *args, **kwargs)

    def equals(self, proxy: Proxy, of: Reference, other: object) -> Any:
        """Whether a proxy's object equals another, by its class."""
        return proxy is other or self.ask("special", of.number, "__eq__", other)

    # --- answering

    def serve(self) -> None:
        """Answers until the other side ends."""
        while True:
            match self._receive():
                case ["ask", str(what), subject, content]:
                    self._answer(what, subject, content)
                case _:
                    raise WireError("no question")

    @abstractmethod
    def perform(self, what: str, subject: Any, args: Any, kwargs: Any) -> Any:
        """The answer to a question of the other side."""

    def own(self, number: Any) -> Any:
        """The object that the other side has under a number."""
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise WireError("no object")
        return self._objects[number]

    def _answer(self, what: str, subject: Any, content: Any) -> None:
        table = Table()
        try:
            args, kwargs = self._codec.unpack(table, content)
            reply = ["value", self._codec.pack(table, self.perform(what, subject, args, dict(kwargs)))]
        except WireError:
            raise
        except BaseException as error:
            try:
                reply = ["error", self._codec.pack(table, (type(error), error.args, _text_of(error), _Raised(error)))]
            except Exception:
                reply = ["error", self._codec.pack(Table(), (RuntimeError, (type(error).__name__,), "", None))]
        self._send(reply)

    def _error(self, value: Any) -> BaseException:
        match value:
            case (type() as cls, tuple(args), str(text), at) if issubclass(cls, BaseException):
                pass
            case _:
                raise WireError("no error")
        if cls in self._errors.values():
            error = cls.__new__(cls, *args)  # which sets `args`; its own `__init__` is the other side's
            vars(error).update(_realhf_text=text, _realhf_at=at)
            return error
        try:
            return cls(*args)
        except Exception:
            return cls.__new__(cls, *args)

    # --- objects

    def export(self, value: Any) -> list[Any]:
        """The node of an object that stays here, or of one of the other side."""
        if (found := reference(value)) is not None:
            return ["yours", found.number]
        if (number := self._error_numbers.get(id(value))) is not None:
            return ["yours", number]
        if isinstance(value, _Raised):
            value = value.error
        kind, name, parent = "object", "", None
        if isinstance(value, type) and issubclass(value, BaseException):
            kind, name = "error", value.__name__
            parent = self._codec._node(
                next(base for base in value.__mro__[1:] if issubclass(base, BaseException)), Table()
            )
        elif isinstance(value, types.CoroutineType):
            kind = "coroutine"
        cls = type(value)
        specials = [name for name in SPECIALS if _has(cls, name)]
        base = next((name for name in _DATA if issubclass(cls, NAMED_TYPES[name])), "")
        return ["mine", self._number(value), kind, name, specials, base, parent]

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def _find(self, node: Any) -> Any:
        match node:
            case ["yours", number]:
                return self.own(number)
            case ["mine", int(number), str(kind), str(name), list(specials), str(base), parent]:
                if kind == "error":
                    return self._error_class(number, name, parent)
                found = self._proxies.get(number)
                if found is None:
                    found = self._proxies[number] = self._proxy(number, specials, base)
                return self._coroutine(number) if kind == "coroutine" else found
        raise WireError("no value")

    def _proxy(self, number: int, specials: list[Any], base: str) -> Proxy:
        names = tuple(name for name in SPECIALS if name in specials)
        if base and base not in _DATA:
            raise WireError("no data")
        if (cls := self._classes.get(names)) is None:
            methods: dict[str, Any] = {name: _method(name) for name in (*_ALWAYS, *names)}
            cls = self._classes[names] = type("Proxy", (Proxy,), {"__slots__": (), **methods})
            self.proxy_classes.add(cls)
            self.open_classes.add(cls)
        proxy = object.__new__(cls)
        object.__setattr__(proxy, "_realhf", Reference(self, number, base, names))
        return proxy

    def _error_class(self, number: int, name: str, parent: Any) -> type[BaseException]:
        """A class that stands for one of the other side's exceptions, so that it can be raised and caught."""
        if number not in self._errors:
            base = self._codec._value(parent, Table())
            if not (isinstance(base, type) and issubclass(base, BaseException)):
                raise WireError("no exception")

            def attribute(error: Any, name: str) -> Any:
                if name.startswith("_realhf"):
                    raise AttributeError(name)
                return getattr(error._realhf_at, name)

            methods = {"__getattr__": attribute, "__str__": lambda error: vars(error).get("_realhf_text", "")}
            found = type(name, (base,), methods)
            self._errors[number], self._error_numbers[id(found)] = found, number
        return self._errors[number]

    async def _coroutine(self, number: int) -> Any:
        return self.ask("await", number)

    # --- the pipes

    def _send(self, message: list[Any]) -> None:
        content = json.dumps(message).encode("ascii")
        data = memoryview(_LENGTH.pack(len(content)) + content)
        with self._sends:
            while data:
                try:
                    data = data[os.write(self._writer, data) :]
                except BrokenPipeError:
                    raise WireError("the other side has ended") from None

    def _receive(self) -> Any:
        [length] = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _LONGEST:
            raise WireError("too long")
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError):
            raise WireError("no message") from None

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            part = os.read(self._reader, min(_READ_BYTES, size - len(content)))
            if not part:
                raise WireError("the other side has ended")
            content += part
        return bytes(content)


class _Raised:
    """Has an exception cross as an object."""

    def __init__(self, error: BaseException):
        self.error = error


def _has(cls: type, name: str) -> bool:
    """Whether objects of a class have a special method: not one of the class's own class, nor that of every object."""
    if not any(name in vars(base) for base in cls.__mro__):
        return False
    method = getattr(cls, name)
    return callable(method) and method is not getattr(object, name, None)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def data_of(value: Any, base: str) -> Any:
    """The data of an object whose class is derived from a plain type."""
    return _DATA[base](value)


def call_special(value: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Calls a special method as Python does: that of the class."""
    if name not in (*SPECIALS, *_ALWAYS, "__eq__"):
        raise WireError(f"no special method: {sys.intern(name)[:20]}")
    if name in SPECIALS and not _has(type(value), name):
        raise AttributeError(name)
    return getattr(type(value), name)(value, *args, **kwargs)
