"""The side of the tests: runs them in a process that never executes code of the program.

A test finds the program's names as proxies. They give it data, or proxies of the program's objects, and comparisons
with data are made here: a program says what its functions return, never whether that is right.
"""

import ast
import builtins
import importlib
import operator
import sys
import traceback
import types
from typing import Any

from realhf.rewards.peer import COMPARISONS, OPERATORS, Peer, Proxy, Reference, call_special, reference
from realhf.rewards.wire import NAMED_TYPES, WireError

_LONGEST_TEXT = 300
_COMPARE = {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
# Objects of these types lead to the tests' own frames and code.
_KEPT_TYPES = (types.FrameType, types.CodeType, types.TracebackType, types.ModuleType)


def outcomes(tests: list[str], reader: int, writer: int) -> list[str] | None:
    """By test "" if it passed, else its exception; None if the program cannot be loaded.

    Args:
        reader, writer: the pipes of the program's process.

    Raises:
        WireError: the program's process has ended, or sends something else than a message.
    """
    peer = _TestsPeer(reader, writer)
    try:
        peer.ask("load", None)
    except Exception:
        return None
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        return None
    return [_outcome(test, peer.names) for test in tests]


def _outcome(test: str, names: "_Names") -> str:
    try:
        names.begin(test)
        exec(compile(test, "test", "exec"), names)
    except WireError:
        raise
    except BaseException as error:
        try:
            text = "".join(traceback.format_exception_only(error)).strip()
        except Exception:
            text = ""
        return text[:_LONGEST_TEXT] or type(error).__name__
    return ""


class _Names(dict[str, Any]):
    """Global names of the tests: their own, then the program's; Python's own names are not the program's to define,
    except in a test that uses none of its other names."""

    def __init__(self, peer: Peer):
        super().__init__(__name__="__main__")
        self._peer = peer
        self._has_builtins = True
        self._attributes: dict[str, set[str]] = {}

    def begin(self, test: str) -> None:
        """Looks at the names that a test uses. Raises SyntaxError."""
        nodes = list(ast.walk(ast.parse(test)))
        used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        bound |= {
            node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        bound |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
        self._has_builtins = any(not hasattr(builtins, name) for name in used - bound - self.keys())
        self._attributes = {}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self._attributes.setdefault(node.value.id, set()).add(node.attr)

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (self._has_builtins and hasattr(builtins, name)):
            raise KeyError(name)
        return self._module(name) or self._peer.ask("name", name)

    def _module(self, name: str) -> types.ModuleType | None:
        """A module of Python that a test takes for imported by the program: an object of the program that has its name
        must not judge."""
        attributes = self._attributes.get(name, ())
        if not attributes or name not in sys.stdlib_module_names:
            return None
        module = importlib.import_module(name)
        return module if all(hasattr(module, attribute) for attribute in attributes) else None


class _TestsPeer(Peer):
    def __init__(self, reader: int, writer: int):
        super().__init__(reader, writer)
        self.names = _Names(self)
        self.open_classes.add(Unlike)

    # --- operations of tests on the program's objects

    def special(self, of: Reference, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__exit__":
            args = tuple(None if isinstance(one, types.TracebackType) else one for one in args)
        other = reference(*args) if len(args) == 1 else None
        if name in COMPARISONS:
            [value] = args
            return self._compare(of, name, value, other)
        if name in OPERATORS and args:
            return self._operate(of, name, args, other)
        if name == "__contains__" and other is None:
            return self._contains(of, *args)
        return super().special(of, name, args, kwargs)

    def equals(self, proxy: Proxy, of: Reference, other: object) -> Any:
        """Data is compared here. The program is asked about two objects of its own alone, and has to know an object
        that equals neither."""
        theirs = reference(other)
        if proxy is other:
            return True
        if of.base:
            return self._data(of) == (self._data(theirs) if theirs is not None and theirs.base else other)
        if theirs is None or theirs.base:
            return NotImplemented
        if self._holds_for_anything(of, "__eq__"):
            raise TypeError("an object of the program that equals everything")
        answer = self.ask("special", of.number, "__eq__", other)
        return answer if answer is NotImplemented else answer is True

    def _compare(self, of: Reference, name: str, value: Any, other: Reference | None) -> Any:
        if of.base:
            return _COMPARE[name](self._data(of), self._data(other) if other is not None and other.base else value)
        if other is None:
            raise TypeError("an object of the program cannot be compared with a value of the tests")
        return self.ask("special", of.number, name, value)

    def _operate(self, of: Reference, name: str, args: Any, other: Reference | None) -> Any:
        """An operand of the tests may be the expected result: the program must not make data of it."""
        if of.base and other is None:
            method = getattr(NAMED_TYPES[of.base], name, None)
            return NotImplemented if method is None else method(self._data(of), *args)
        result = self.ask_unchanged("special", of.number, name, *args)
        if other is None and result is not NotImplemented and reference(result) is None:
            raise TypeError("an operator of the program makes data of a value of the tests")
        return result

    def _contains(self, of: Reference, item: Any) -> bool:
        if of.base:
            return item in self._data(of)
        if "__iter__" in of.specials and "__len__" in of.specials:
            return any(one is item or one == item for one in self.ask("special", of.number, "__iter__"))
        if self._holds_for_anything(of, "__contains__"):
            raise TypeError("an object of the program that contains everything")
        return self.ask("special", of.number, "__contains__", item) is True

    def _holds_for_anything(self, of: Reference, name: str) -> bool:
        try:
            return self.ask("special", of.number, name, Unlike()) is True
        except Exception:  # a method that looks at its argument's attributes
            return False

    def _data(self, of: Reference) -> Any:
        data = self.ask("data", of.number, of.base)
        if type(data) is not NAMED_TYPES[of.base]:
            raise WireError("no data of the type")
        return data

    # --- operations of the program on the tests' objects

    def perform(self, what: str, subject: Any, args: Any, kwargs: Any) -> Any:
        match what:
            case "input":
                return self.names.get("input", builtins.input)(*args)
            case "readline":
                return sys.stdin.readline()
            case "special":
                return call_special(self.own(subject), args[0], args[1:], kwargs)
            case "get":
                return getattr(self.own(subject), _open_name(*args))
            case "set" if type(self.own(subject)).__module__ == "__main__":  # an object of the tests' own classes
                return setattr(self.own(subject), _open_name(args[0]), args[1])
            case "isinstance":
                [one] = args
                return isinstance(one, self.own(subject))
        raise TypeError(f"{what}: not with an object of the tests")

    def export(self, value: Any) -> list[Any]:
        is_own = type(value).__module__.startswith("realhf.") and type(value) not in self.open_classes
        if isinstance(value, _KEPT_TYPES) or is_own:
            raise TypeError(f"{type(value).__name__}: not for the program")
        return super().export(value)

    def _receive(self) -> Any:
        match super()._receive():
            case [*message, str(printed)]:
                if printed:
                    sys.stdout.write(printed)
                return message
        raise WireError("no message")


class Unlike:
    """Equal to nothing, and in no container."""


def _open_name(name: Any) -> str:
    if not isinstance(name, str) or name.startswith("_"):
        raise AttributeError(f"{name}: not for the program")
    return name
