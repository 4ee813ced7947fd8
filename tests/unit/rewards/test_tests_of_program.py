"""The side of the tests: which names a test finds, and what is decided here and not by the program."""

import builtins
import io
import json
import math
import string
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from realhf.rewards.peer import Proxy
from realhf.rewards.tests_of_program import Unlike, _Names, _outcome, _TestsPeer, outcomes
from realhf.rewards.wire import WireError
from tests.unit.rewards.sides import Side, values
from tests.unit.rewards.test_peer import mine, proxy

NOT_IMPLEMENTED = ["plain", "singleton", "NotImplemented"]


def answer(value: Any) -> list[Any]:
    return ["value", [value, []]]


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side(_TestsPeer, ("",))
    yield made
    made.close()


def asked(side: Side) -> list[Any]:
    """By question what, of which object, with which arguments."""
    return [[what, number, *node[1][0][1]] for _, what, number, [node, _] in side.said()]


# --- names


class Program:
    """Has objects of every name, and notes which are asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, *words: Any) -> Any:
        self.asked.append(words)
        return f"theirs: {words[1]}"


def names() -> tuple[_Names, Program]:
    program = Program()
    return _Names(program), program  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("test", "has_builtins"),
    [
        ("assert f(1) == 2", True),
        ("assert sum(2, 3) == 6", False),  # nothing else can be the program's
        ("assert sum(f) == 6", True),
        ("x = 1\nassert sum(x) == 6", False),
        ("def g(): pass\nassert sum(g) == 6", False),
        ("async def g(): pass\nassert sum(g) == 6", False),
        ("class G: pass\nassert sum(G) == 6", False),
        ("assert sum(map(lambda y: y, [1]))", False),
        ("try: sum(1)\nexcept TypeError as error: str(error)", False),
        ("try: sum(1)\nexcept TypeError: str(error)", True),
        ("import os\nassert sum(os)", False),
        ("import os.path\nassert sum(os)", False),
        ("import os.path as p\nassert sum(p)", False),
        ("import os.path as p\nassert sum(os)", True),
        ("from os import path\nassert sum(path)", False),
        ("for i in [1]: sum(i)", False),
        ("assert sum(earlier)", False),  # a test before has defined it
        ("x = f", True),
        ("x = 1", False),
    ],
)
def test_a_test_that_uses_no_other_name_means_the_program_s_functions(test: str, has_builtins: bool) -> None:
    found, program = names()
    found["earlier"] = 1
    found.begin(test)
    if has_builtins:
        with pytest.raises(KeyError):
            found["sum"]
        assert program.asked == []
    else:
        assert found["sum"] == "theirs: sum"
        assert program.asked == [("name", "sum")]


def test_other_names_are_the_program_s() -> None:
    found, program = names()
    assert found["__name__"] == "__main__"
    found.begin("f")
    assert found["add"] == "theirs: add"
    assert program.asked == [("name", "add")]
    with pytest.raises(KeyError, match="__builtins__"):
        found["__builtins__"]
    found.begin("sum")
    with pytest.raises(KeyError, match="__file__"):
        found["__file__"]


def test_before_the_first_test_python_s_names_are_its_own() -> None:
    with pytest.raises(KeyError):
        names()[0]["sum"]


@pytest.mark.parametrize(
    ("test", "is_module"),
    [
        ("assert string.digits == string.ascii_letters", True),
        ("assert string.digits == string.push(1)", False),  # a module has no such thing
        ("assert string == 1", False),
        ("assert other.string.digits", False),
        ("string.push = 1", False),
    ],
)
def test_a_module_is_meant_where_it_has_what_the_test_takes_from_it(test: str, is_module: bool) -> None:
    found, program = names()
    found.begin(test)
    assert found["string"] == (string if is_module else "theirs: string")
    assert bool(program.asked) != is_module
    found.begin("f")
    assert found["string"] == "theirs: string"  # of this test alone


def test_an_installed_library_is_not_meant() -> None:
    found, _ = names()
    found.begin("assert numpy.pi")
    assert found["numpy"] == "theirs: numpy"


# --- outcomes


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("x = 1", ""),
        ("assert False, 'no'", "AssertionError: no"),
        ("f\nraise KeyboardInterrupt", "KeyboardInterrupt"),
        ("f\nraise SystemExit(0)", "SystemExit: 0"),
        ("f\nraise ValueError('x' * 1000)", "ValueError: " + "x" * 288),
        ("(", "SyntaxError: '(' was never closed"),
        ("sum(2, 3)", "TypeError: 'str' object is not callable"),  # the program's
    ],
)
def test_the_outcome_of_a_test(test: str, outcome: str) -> None:
    found = _outcome(test, names()[0])
    assert found.splitlines()[-1:] == outcome.splitlines()
    assert len(found) <= 300


def test_the_outcome_of_an_error_without_text() -> None:
    class NamelessError(Exception):
        pass

    NamelessError.__name__ = NamelessError.__qualname__ = "\n"
    NamelessError.__module__ = "builtins"
    found, _ = names()
    found["error"] = NamelessError
    assert _outcome("raise error()", found) == "\n"  # failed, whatever its text

    class BadError(Exception):
        @property
        def __class__(self) -> Any:
            raise RuntimeError

        def __str__(self) -> str:
            raise RuntimeError

    found["error"] = BadError
    assert _outcome("raise error()", found) != ""


def test_an_end_of_the_program_is_no_outcome() -> None:
    class Ended:
        def ask(self, *words: Any) -> Any:
            raise WireError("the other side has ended")

    with pytest.raises(WireError):
        _outcome("f()", _Names(Ended()))  # type: ignore[arg-type]


@pytest.fixture
def pipes() -> Iterator[Callable[..., Any]]:
    """Runs tests against a program that answers as given; the outcomes, and what was said to it."""
    made: list[Side] = []

    def run(tests: list[str], *messages: Any) -> tuple[Any, list[Any]]:
        found: list[Any] = []

        def make(reader: int, writer: int) -> Any:
            found.extend((reader, writer))

        side = Side(make, ("",))
        made.append(side)
        side.give(*messages)
        return outcomes(tests, *found), side.said()

    yield run
    for side in made:
        side.close()


def test_the_tests_of_a_program_that_is_loaded(pipes: Any) -> None:
    load = ["ask", "load", None, values()]
    found, said = pipes(["x = 1", "assert x == 2, 'no'", "f", "assert x == 1"], answer(None), answer(3))
    assert found == ["", "AssertionError: no", "", ""]
    assert said == [load, ["ask", "name", "f", values()]]


@pytest.mark.parametrize("name", ["ValueError", "SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_a_program_that_cannot_be_loaded_has_no_outcomes(pipes: Any, name: str) -> None:
    error = ["error", [["tuple", [["plain", "named", name], ["tuple", []], "", None]], []]]
    assert pipes(["x = 1"], error)[0] is None


# --- what a program prints


def test_what_a_program_prints_is_printed_here(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=writes.append))
    side.give(answer(1))
    assert side.peer.ask("get", 0) == 1
    assert writes == []
    content = json.dumps([*answer(2), "printed\n"]).encode()
    side.write(content)
    assert side.peer.ask("get", 0) == 2
    assert writes == ["printed\n"]


@pytest.mark.parametrize("message", [["value", [1, []]], [], {"a": 1}, 3])
def test_a_message_without_what_was_printed_is_none(side: Side, message: Any) -> None:
    side.write(json.dumps(message).encode())
    with pytest.raises(WireError, match=r"^no message$"):
        side.peer._receive()


# --- comparisons


def test_data_of_the_program_is_compared_here(side: Side) -> None:
    """A program says which number it is, and nothing else."""
    one = proxy(side, 1, "__lt__", "__ge__", base="int")
    side.give(*[answer(5)] * 4)
    assert one == 5
    assert one != 6
    assert not one < 5
    assert one >= 5
    assert asked(side) == [["data", 1, "int"]] * 4


def test_data_of_the_program_is_compared_with_data_of_it(side: Side) -> None:
    one, other = proxy(side, 1, "__lt__", base="int"), proxy(side, 2, "__lt__", base="int")
    side.give(answer(5), answer(5), answer(5), answer(6))
    assert one == other
    assert one < other
    assert asked(side) == [["data", number, "int"] for number in (1, 2, 1, 2)]


def test_data_is_not_an_object_without_data(side: Side) -> None:
    one, other = proxy(side, 1, "__lt__", base="int"), proxy(side, 2, "__lt__")
    side.give(answer(5))
    assert one.__eq__(other) is False
    assert other.__eq__(one) is NotImplemented
    assert asked(side) == [["data", 1, "int"]]
    side.give(answer(5))
    with pytest.raises(TypeError, match=r"cannot be compared|not supported"):
        _ = one < other


def test_an_object_equals_itself_and_no_value_of_the_tests(side: Side) -> None:
    one = proxy(side, 1)
    assert one.__eq__(one) is True
    assert one.__eq__(3) is NotImplemented
    assert asked(side) == []


@pytest.mark.parametrize(
    ("said", "equal"), [(True, True), (False, False), (1, False), (NOT_IMPLEMENTED, NotImplemented)]
)
def test_objects_are_equal_where_the_program_says_so(side: Side, said: Any, equal: Any) -> None:
    """It is asked first for an object that equals nothing."""
    one, other = proxy(side, 1), proxy(side, 2)
    side.give(answer(False), answer(said))
    assert one.__eq__(other) is equal
    first, second = asked(side)
    assert first[:3] == ["special", 1, "__eq__"]
    assert type(side.peer.own(first[3][1])) is Unlike
    assert second == ["special", 1, "__eq__", ["yours", 2]]


def test_an_object_that_equals_everything_equals_nothing(side: Side) -> None:
    side.give(answer(True))
    with pytest.raises(TypeError, match=r"^an object of the program that equals everything$"):
        proxy(side, 1).__eq__(proxy(side, 2))


def test_a_method_that_looks_at_its_argument_does_not_hold_for_everything(side: Side) -> None:
    error = ["error", [["tuple", [["plain", "named", "AttributeError"], ["tuple", []], "", None]], []]]
    side.give(error, answer(True))
    assert proxy(side, 1) == proxy(side, 2)


def test_objects_are_ordered_by_the_program_among_themselves_alone(side: Side) -> None:
    one, other = proxy(side, 1, "__lt__"), proxy(side, 2)
    side.give(answer(True))
    assert one < other
    assert asked(side) == [["special", 1, "__lt__", ["yours", 2]]]
    with pytest.raises(TypeError, match=r"^an object of the program cannot be compared with a value of the tests$"):
        _ = one < 3
    assert asked(side) == []


@pytest.mark.parametrize("data", [True, 5.0, "5", None])
def test_data_is_of_the_type_that_the_program_has_named(side: Side, data: Any) -> None:
    side.give(answer(data))
    with pytest.raises(WireError, match=r"^no data of the type$"):
        _ = proxy(side, 1, base="int") == 5


# --- operators


def test_operators_of_data_are_done_here(side: Side) -> None:
    one = proxy(side, 1, "__sub__", "__rsub__", "__matmul__", base="int")
    side.give(answer(5), answer(5))
    assert one - 2 == 3
    assert 2 - one == -3
    assert asked(side) == [["data", 1, "int"]] * 2
    assert one.__matmul__(2) is NotImplemented
    assert asked(side) == []


def test_operators_of_two_objects_are_the_program_s(side: Side) -> None:
    for base in ("", "int"):
        one, other = proxy(side, 3 if base else 1, "__add__", base=base), proxy(side, 2)
        side.give(answer(7))
        assert one + other == 7
        assert asked(side) == [["special", 3 if base else 1, "__add__", ["yours", 2]]]


def test_an_operator_makes_no_data_of_a_value_of_the_tests(side: Side) -> None:
    one = proxy(side, 1, "__sub__", "__neg__")
    side.give(answer(7))
    with pytest.raises(TypeError, match=r"^an operator of the program makes data of a value of the tests$"):
        _ = one - 3
    side.give(answer(mine(4)))
    assert isinstance(one - 3, Proxy)
    side.give(answer(NOT_IMPLEMENTED))
    assert one.__sub__(3) is NotImplemented
    side.said()
    side.give(answer(7))
    assert -one == 7  # of none
    assert asked(side) == [["special", 1, "__neg__"]]


def test_an_operator_does_not_change_its_operand(side: Side) -> None:
    side.give(["value", [mine(4), [["list", [], None]]]])
    with pytest.raises(TypeError, match="changes its operand"):
        _ = proxy(side, 1, "__sub__") - [1]


def test_a_method_without_arguments_of_an_operator_s_name_is_the_program_s(side: Side) -> None:
    side.give(answer(7))
    assert proxy(side, 1, "__add__", base="int").__add__() == 7
    assert asked(side) == [["special", 1, "__add__"]]


# --- containers


def test_data_says_what_it_contains_by_itself(side: Side) -> None:
    one = proxy(side, 1, "__contains__", base="list")
    side.give(["value", [["cell", 0], [["list", [7], None]]]])
    assert 7 in one
    side.give(["value", [["cell", 0], [["list", [7], None]]]])
    assert 8 not in one
    assert asked(side) == [["data", 1, "list"]] * 2


def test_what_can_be_gone_through_is(side: Side) -> None:
    one = proxy(side, 1, "__contains__", "__iter__", "__len__")
    iterator = ["value", [["tuple", [7, 9]], []]]
    side.give(iterator, iterator)
    assert 9 in one
    assert 8 not in one
    assert asked(side) == [["special", 1, "__iter__"]] * 2
    nan = math.nan
    side.peer.ask = lambda *words: [nan]
    assert nan in one  # the same object, although it equals nothing


@pytest.mark.parametrize("specials", [("__contains__",), ("__contains__", "__iter__"), ("__contains__", "__len__")])
def test_other_containers_are_asked(side: Side, specials: tuple[str, ...]) -> None:
    one = proxy(side, 1, *specials)
    side.give(answer(False), answer(True), answer(False), answer(1))
    assert one.__contains__(7) is True
    assert one.__contains__(7) is False  # nothing but True is yes
    first, second, *_ = asked(side)
    assert first[:3] == ["special", 1, "__contains__"]
    assert second == ["special", 1, "__contains__", 7]
    side.give(answer(True))
    with pytest.raises(TypeError, match=r"^an object of the program that contains everything$"):
        one.__contains__(7)


def test_a_container_of_the_program_knows_the_program_s_objects(side: Side) -> None:
    one = proxy(side, 1, "__contains__", "__iter__", "__len__")
    side.give(answer(True))
    assert proxy(side, 2) in one
    assert asked(side) == [["special", 1, "__contains__", ["yours", 2]]]


def test_the_end_of_a_block_shows_no_frames(side: Side) -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        parts = type(error), error, error.__traceback__
    one = proxy(side, 1, "__exit__", "__call__")
    side.give(answer(True))
    assert one.__exit__(*parts) is True
    [[*_, kind, _, trace]] = asked(side)
    assert kind == ["plain", "named", "ValueError"]
    assert trace is None
    with pytest.raises(TypeError, match=r"^traceback: not for the program$"):
        one(parts[2])


# --- what a program may do with objects of the tests


class Own:
    """Of the tests."""

    def __init__(self) -> None:
        self.name, self._hidden = "old", 1

    def __len__(self) -> int:
        return 5

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [*args, kwargs]


def performed(side: Side, what: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return side.peer.perform(what, side.peer.export(value)[1], args, kwargs)


def test_a_program_may_use_the_objects_that_it_is_given(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Own()
    assert performed(side, "special", own, "__len__") == 5
    assert performed(side, "special", own, "__call__", 1, 2, a=3) == [1, 2, {"a": 3}]
    assert performed(side, "get", own, "name") == "old"
    assert performed(side, "isinstance", Own, own) is True
    assert performed(side, "isinstance", Own, 3) is False
    monkeypatch.setattr(Own, "__module__", "__main__")
    performed(side, "set", own, "name", "new")
    assert own.name == "new"


@pytest.mark.parametrize("what", ["get", "set"])
@pytest.mark.parametrize("name", ["_hidden", "__dict__", 3, None])
def test_hidden_names_are_not_for_the_program(
    side: Side, what: str, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "__module__", "__main__")
    with pytest.raises(AttributeError, match=f"^{name}: not for the program$"):
        performed(side, what, Own(), *[name, 1][: 1 if what == "get" else 2])


@pytest.mark.parametrize("what", ["set", "delete", "load", "name", "data", "await", "issubclass"])
def test_a_program_may_do_nothing_else(side: Side, what: str) -> None:
    """Attributes are set in objects of the tests' own classes alone."""
    with pytest.raises(TypeError, match=f"^{what}: not with an object of the tests$"):
        performed(side, what, Own(), "name", 1)


def test_a_program_reads_the_input_of_the_tests(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo"))
    assert [side.peer.perform("readline", None, (), {}) for _ in range(3)] == ["one\n", "two", ""]
    monkeypatch.setattr(builtins, "input", lambda prompt: f"{prompt}python's")
    assert side.peer.perform("input", None, ("n? ",), {}) == "n? python's"
    side.peer.names["input"] = lambda prompt: f"{prompt}the test's"
    assert side.peer.perform("input", None, ("n? ",), {}) == "n? the test's"


@pytest.mark.parametrize("what", ["a frame", "code", "a module", "names", "a peer"])
def test_what_leads_to_the_tests_does_not_cross(side: Side, what: str) -> None:
    value: Any = {
        "a frame": sys._getframe(),
        "code": performed.__code__,
        "a module": types.ModuleType("own"),
        "names": side.peer.names,
        "a peer": side.peer,
    }[what]
    with pytest.raises(TypeError, match=f"^{type(value).__name__}: not for the program$"):
        side.peer.export(value)


def test_other_objects_cross(side: Side) -> None:
    """Of this package those that nothing is behind: proxies, exceptions, and what equals nothing."""
    assert side.peer.export(Own())[:2] == ["mine", 0]
    assert side.peer.export(Unlike())[:2] == ["mine", 1]
    assert side.peer.export(proxy(side, 7)) == ["yours", 7]
