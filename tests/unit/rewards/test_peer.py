"""Two processes that use each other's objects: questions, answers, errors, and the proxies of objects."""

import asyncio
import inspect
import math
import os
import types
from collections.abc import Iterator
from typing import Any

import pytest

from realhf.rewards.peer import SPECIALS, Peer, Proxy, Reference, _Raised, call_special, data_of, reference
from realhf.rewards.wire import WireError
from tests.unit.rewards.sides import Side, values


class Performer(Peer):
    """Answers with what it is asked; some questions fail."""

    def __init__(self, reader: int, writer: int):
        super().__init__(reader, writer)
        self.asked: list[Any] = []

    def perform(self, what: str, subject: Any, args: Any, kwargs: Any) -> Any:
        self.asked.append((what, subject, args, kwargs))
        if what == "fail":
            raise subject if isinstance(subject, BaseException) else FAILURES[subject]
        return [*args, *kwargs.items()]

    def export(self, value: Any) -> list[Any]:
        if value is UNSENDABLE:
            raise TypeError("not for the other side")
        return super().export(value)


UNSENDABLE = object()
FAILURES: dict[str, BaseException] = {
    "plain": ValueError("no", 1),
    "ends": SystemExit(3),
    "unsendable": LookupError(UNSENDABLE),
    "wire": WireError("broken"),
}


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side(Performer)
    yield made
    made.close()


def mine(number: int, *specials: str, base: str = "", kind: str = "object", name: str = "", parent: Any = None) -> Any:
    """The node of an object of the other side."""
    return ["mine", number, kind, name, list(specials), base, parent]


def proxy(side: Side, number: int, *specials: str, base: str = "") -> Any:
    return side.peer._find(mine(number, *specials, base=base))


# --- questions and answers


def test_a_question_and_its_answer(side: Side) -> None:
    side.give(["value", [7, []]])
    assert side.peer.ask("get", 3, "size", more=True) == 7
    args = ["tuple", [["tuple", ["size"]], ["tuple", [["tuple", ["more", True]]]]]]
    assert side.said() == [["ask", "get", 3, [args, []]]]


def test_questions_back_are_answered_first(side: Side) -> None:
    side.give(["ask", "one", 4, values(5)], ["ask", "other", None, values()], ["value", [7, []]])
    assert side.peer.ask("get", 3) == 7
    assert side.peer.asked == [("one", 4, (5,), {}), ("other", None, (), {})]
    assert side.said()[1:] == [
        ["value", [["cell", 0], [["list", [5], None]]]],
        ["value", [["cell", 0], [["list", [], None]]]],
    ]


def test_an_answer_changes_the_arguments(side: Side) -> None:
    given = [1]
    side.give(["value", [None, [["list", [2, 3], None]]]])
    assert side.peer.ask("call", 0, given) is None
    assert given == [2, 3]


def test_an_answer_must_not_change_the_arguments_of_an_operator(side: Side) -> None:
    given: list[Any] = [1, [2]]
    side.give(["value", [None, [None, ["list", [3], None]]]])
    with pytest.raises(TypeError, match=r"^an operator of the program changes its operand$"):
        side.peer.ask_unchanged("special", 0, given)
    assert given == [1, [2]]
    side.give(["value", [["cell", 2], [None, None, ["list", [3], None]]]])  # a container of its own
    assert side.peer.ask_unchanged("special", 0, given) == [3]
    args = ["tuple", [["tuple", [["cell", 0]]], ["tuple", []]]]
    contents = [["list", [1, ["cell", 1]], None], ["list", [2], None]]
    assert side.said() == [["ask", "special", 0, [args, contents]]] * 2


@pytest.mark.parametrize(
    "answer", [["values", [1, []]], ["value", [1]], ["value", [1, 2]], ["ask", 1, 2, 3], [], ["ask", "x"]]
)
def test_what_is_no_answer(side: Side, answer: Any) -> None:
    side.give(answer)
    with pytest.raises(WireError, match=r"^no answer$"):
        side.peer.ask("get", 0)


def test_questions_are_answered_until_the_other_side_ends(side: Side) -> None:
    kwargs = [["tuple", [["tuple", [1]], ["tuple", [["tuple", ["a", 2]]]]]], []]
    side.give(["ask", "x", 5, kwargs])
    side.end()
    with pytest.raises(WireError, match=r"^the other side has ended$"):
        side.peer.serve()
    assert side.peer.asked == [("x", 5, (1,), {"a": 2})]
    assert side.said() == [["value", [["cell", 0], [["list", [1, ["tuple", ["a", 2]]], None]]]]]


@pytest.mark.parametrize("question", [["value", [1, []]], ["ask", 1, 2, values()], ["ask", "x", 1], []])
def test_what_is_no_question(side: Side, question: Any) -> None:
    side.give(question)
    with pytest.raises(WireError, match=r"^no question$"):
        side.peer.serve()


def answered(side: Side, subject: str) -> list[Any]:
    side.peer._answer("fail", subject, values())
    [[kind, [node, contents]]] = side.said()
    assert (kind, contents) == ("error", [])
    assert node[0] == "tuple"
    return list(node[1])


def test_an_error_is_an_answer(side: Side) -> None:
    """Its class, its arguments, its text, and itself, of which attributes may be asked."""
    cls, args, text, at = answered(side, "plain")
    assert (cls, args, text) == (["plain", "named", "ValueError"], ["tuple", ["no", 1]], "('no', 1)")
    assert at[:4] == ["mine", 0, "object", ""]
    assert side.peer.own(0) is FAILURES["plain"]
    assert answered(side, "ends")[:3] == [["plain", "named", "SystemExit"], ["tuple", [3]], "3"]


def test_an_error_that_cannot_cross_is_told_by_its_name(side: Side) -> None:
    assert answered(side, "unsendable") == [
        ["plain", "named", "RuntimeError"],
        ["tuple", ["LookupError"]],
        "",
        None,
    ]


def test_an_error_of_the_wire_is_no_answer(side: Side) -> None:
    with pytest.raises(WireError, match="broken"):
        side.peer._answer("fail", "wire", values())
    with pytest.raises(WireError):
        side.peer._answer("x", 0, [["cell", 3], []])
    assert side.said() == []


def test_an_error_whose_text_raises(side: Side) -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    side.peer._answer("fail", BadError(), values())
    [[kind, [node, _]]] = side.said()
    assert (kind, node[1][2]) == ("error", "")


def raised(side: Side, *parts: Any) -> BaseException:
    side.give(["error", [["tuple", list(parts)], []]])
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (of any class)
        side.peer.ask("call", 0)
    return caught.value


def test_errors_of_classes_that_both_sides_know(side: Side) -> None:
    error = raised(side, ["plain", "named", "ValueError"], ["tuple", ["no", 1]], "('no', 1)", None)
    assert (type(error), error.args) == (ValueError, ("no", 1))
    # Its class takes other arguments than these.
    error = raised(side, ["plain", "named", "UnicodeDecodeError"], ["tuple", ["no"]], "no", None)
    assert (type(error), error.args) == (UnicodeDecodeError, ("no",))


def test_errors_of_the_other_side_s_classes(side: Side) -> None:
    cls = mine(5, kind="error", name="TooLarge", parent=["plain", "named", "ValueError"])
    error: Any = raised(side, cls, ["tuple", ["too", 9]], "size 9", mine(6))
    assert isinstance(error, ValueError)
    assert (type(error).__name__, error.args, str(error)) == ("TooLarge", ("too", 9), "size 9")
    assert side.said()[-1][:3] == ["ask", "call", 0]
    side.give(["value", [9, []]])
    assert error.size == 9
    assert side.said() == [["ask", "get", 6, values("size")]]
    with pytest.raises(AttributeError, match="_realhf_of"):
        _ = error._realhf_of
    assert str(type(error)("a")) == ""  # one that a test makes
    # The class is the same the next time, and goes back as what it is.
    assert type(raised(side, cls, ["tuple", []], "", None)) is type(error)
    assert side.peer.export(type(error)) == ["yours", 5]


@pytest.mark.parametrize(
    "parts",
    [
        (["plain", "named", "int"], ["tuple", []], "", None),
        (1, ["tuple", []], "", None),
        (["plain", "named", "ValueError"], 1, "", None),
        (["plain", "named", "ValueError"], ["tuple", []], 1, None),
        (["plain", "named", "ValueError"], ["tuple", []], ""),
    ],
)
def test_what_is_no_error(side: Side, parts: Any) -> None:
    error = raised(side, *parts)
    assert (type(error), str(error)) == (WireError, "no error")


@pytest.mark.parametrize("parent", [["plain", "named", "int"], 3])
def test_an_error_has_an_exception_for_its_parent(side: Side, parent: Any) -> None:
    with pytest.raises(WireError, match=r"^no exception$"):
        side.peer._find(mine(5, kind="error", name="TooLarge", parent=parent))


# --- the pipes


@pytest.mark.parametrize("message", [b"{", b"\xff", b"[" * 10**5])
def test_what_is_no_message(side: Side, message: bytes) -> None:
    side.peer._read = {8: len(message).to_bytes(8, "big"), len(message): message}.__getitem__
    with pytest.raises(WireError, match=r"^no message$"):
        side.peer._receive()


def test_how_long_a_message_may_be(side: Side) -> None:
    side.write(b"", 2**30 + 1)
    with pytest.raises(WireError, match=r"^too long$"):
        side.peer._receive()
    side.write(b"[1", 2**30)
    side.end()
    with pytest.raises(WireError, match=r"^the other side has ended$"):
        side.peer._receive()


def test_messages_are_read_and_written_however_little_a_pipe_takes(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.read, os.write
    monkeypatch.setattr(os, "read", lambda file, size: read(file, min(size, 3)))
    side.give(["value", [7, []]], ["value", [8, []]])
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, content: write(file, bytes(content[:3])))
        assert side.peer.ask("get", 1) == 7
    assert side.peer.ask("get", 2) == 8
    monkeypatch.undo()
    assert [message[2] for message in side.said()] == [1, 2]


def test_a_side_that_does_not_listen_any_more(side: Side) -> None:
    side.stop_listening()
    with pytest.raises(WireError, match=r"^the other side has ended$"):
        side.peer.ask("get", 1)


# --- objects


class Plain:
    pass


class Rich:
    def __len__(self) -> int:
        return 1

    def __add__(self, other: Any) -> Any: ...
    def __lt__(self, other: Any) -> bool: ...

    __iter__ = None


class Whole(int):
    pass


async def later() -> int:
    return 1


def test_an_object_stays_on_its_side_and_has_a_number(side: Side) -> None:
    plain, rich, whole = Plain(), Rich(), Whole(3)
    assert side.peer.export(plain) == mine(0)
    assert side.peer.export(rich) == mine(1, "__len__", "__add__", "__lt__")
    node = side.peer.export(whole)
    assert node[:4] == ["mine", 2, "object", ""]
    assert node[5:] == ["int", None]
    assert {"__add__", "__int__", "__abs__", "__lt__"} <= set(node[4])
    assert "__len__" not in node[4]
    assert side.peer.export(plain) == mine(0)
    assert [side.peer.own(number) for number in range(3)] == [plain, rich, whole]
    error = KeyError("k")
    assert side.peer.export(_Raised(error))[:4] == ["mine", 3, "object", ""]
    assert side.peer.own(3) is error


def test_an_object_of_the_other_side_goes_back_as_theirs(side: Side) -> None:
    assert side.peer.export(proxy(side, 8)) == ["yours", 8]
    own = Plain()
    side.peer.export(own)
    assert side.peer._find(["yours", 0]) is own


class OuterError(KeyError):
    pass


OuterError.__module__ = "__main__"


class InnerError(OuterError):
    pass


InnerError.__module__ = "__main__"


def test_the_class_of_an_error_goes_with_its_parents(side: Side) -> None:
    node = side.peer.export(InnerError)
    assert (node[0], *node[2:4]) == ("mine", "error", "InnerError")
    assert side.peer.own(node[1]) is InnerError
    parent = node[6]
    assert (parent[0], *parent[2:4]) == ("mine", "error", "OuterError")
    assert side.peer.own(parent[1]) is OuterError
    assert parent[6] == ["plain", "named", "KeyError"]


def test_a_coroutine_is_awaited_by_its_side(side: Side) -> None:
    one = later()
    assert side.peer.export(one)[:4] == ["mine", 0, "coroutine", ""]
    one.close()
    found = side.peer._find(mine(4, kind="coroutine"))
    assert inspect.iscoroutine(found)
    side.give(["value", [7, []]])
    assert asyncio.run(found) == 7
    assert side.said() == [["ask", "await", 4, values()]]


@pytest.mark.parametrize("number", [-1, 1, True, 0.0, "0", None])
def test_there_is_no_object_of_such_a_number(side: Side, number: Any) -> None:
    side.peer.export(Plain())
    with pytest.raises(WireError, match=r"^no object$"):
        side.peer.own(number)


@pytest.mark.parametrize("node", [["theirs", 0], ["mine", "0", "object", "", [], "", None], ["yours"], ["mine", 0], []])
def test_what_is_no_object(side: Side, node: Any) -> None:
    with pytest.raises(WireError, match=r"^no value$"):
        side.peer._find(node)


@pytest.mark.parametrize("base", ["bool", "object", "x"])
def test_data_is_of_a_plain_type(side: Side, base: str) -> None:
    with pytest.raises(WireError, match=r"^no data$"):
        proxy(side, 0, base=base)


def test_a_proxy_is_one_for_each_object_and_its_class_for_its_methods(side: Side) -> None:
    one, other, further = (
        proxy(side, 0, "__len__"),
        proxy(side, 1, "__len__"),
        proxy(side, 2, "__iter__", "__nothing__"),
    )
    assert proxy(side, 0, "__len__") is one
    assert type(other) is type(one)
    assert type(further) is not type(one)
    assert side.peer.proxy_classes == {type(one), type(further)}
    assert side.peer.open_classes == {_Raised, type(one), type(further)}
    assert reference(one).specials == ("__len__",)  # type: ignore[union-attr]
    assert reference(further).specials == ("__iter__",)  # type: ignore[union-attr]
    assert not hasattr(type(further), "__nothing__")
    assert type(further).__iter__.__name__ == "__iter__"


def test_what_a_proxy_refers_to(side: Side) -> None:
    found = reference(proxy(side, 5, base="int"))
    assert isinstance(found, Reference)
    assert (found.peer, found.number, found.base) == (side.peer, 5, "int")
    assert reference(5) is None


def asked(side: Side) -> list[Any]:
    [[kind, what, number, [node, _]]] = side.said()
    assert kind == "ask"
    return [what, number, *node[1][0][1]]


def test_what_is_done_with_a_proxy_is_asked_for(side: Side) -> None:
    one = proxy(side, 5, "__len__", "__call__", "__getitem__", "__bool__")

    def given(value: Any) -> None:
        side.give(["value", [value, []]])

    given(7)
    assert one.size == 7
    assert asked(side) == ["get", 5, "size"]
    given(None)
    one.size = 8
    assert asked(side) == ["set", 5, "size", 8]
    given(None)
    del one.size
    assert asked(side) == ["delete", 5, "size"]
    given(2)
    assert len(one) == 2
    assert asked(side) == ["special", 5, "__len__"]
    given(3)
    assert one(1, "a") == 3
    assert asked(side) == ["special", 5, "__call__", 1, "a"]
    given("text")
    assert str(one) == "text"
    assert asked(side) == ["special", 5, "__str__"]
    given(0)
    assert one(a=1) == 0
    [[_, _, _, [node, _]]] = side.said()
    assert node[1] == [["tuple", ["__call__"]], ["tuple", [["tuple", ["a", 1]]]]]
    assert hash(one) == object.__hash__(one)
    assert side.said() == []


def test_the_class_of_a_proxy_is_that_of_its_data(side: Side) -> None:
    assert isinstance(proxy(side, 1, base="int"), int)
    assert proxy(side, 2).__class__ is Proxy


@pytest.mark.parametrize(
    ("answer", "equal", "unequal"),
    [(True, True, False), (False, False, True), (["plain", "singleton", "NotImplemented"],) + (NotImplemented,) * 2],
)
def test_whether_proxies_are_equal_is_asked_for(side: Side, answer: Any, equal: Any, unequal: Any) -> None:
    one = proxy(side, 5)
    side.give(["value", [answer, []]], ["value", [answer, []]])
    assert one.__eq__(3) is equal
    assert one.__ne__(3) is unequal
    assert [message[2:] for message in side.said()] == [[5, values("__eq__", 3)]] * 2
    assert one == one
    assert side.said() == []


def test_a_class_of_the_other_side_knows_its_objects(side: Side) -> None:
    cls, one = proxy(side, 1), proxy(side, 2)
    side.give(["value", [1, []]])
    assert isinstance(one, cls)
    assert asked(side) == ["isinstance", 1, ["yours", 2]]
    assert not isinstance(3, cls)  # no object of theirs
    assert side.said() == []
    side.give(["value", [0, []]])
    assert not isinstance(one, cls)
    side.said()
    side.give(["value", [1, []]])
    assert issubclass(int, cls)
    assert asked(side) == ["issubclass", 1, ["plain", "named", "int"]]


# --- data and special methods


class Spoiled:
    """Methods that would answer wrongly."""

    def __getitem__(self, item: Any) -> Any:
        return "wrong"

    def __iter__(self) -> Iterator[Any]:
        return iter("wrong")

    def items(self) -> Any:
        return [("wrong", 1)]


@pytest.mark.parametrize(
    "data",
    [3, 2.5, 1j, "a", b"a", (1, 2), [1, 2], {"a": 1}, {1, 2}, frozenset({1})],
    ids=lambda one: type(one).__name__,
)
def test_the_data_of_a_subclass_is_read_without_its_methods(side: Side, data: Any) -> None:
    base = type(data)
    value = type("Own", (Spoiled, base), {})(data)
    assert side.peer.export(value)[5] == base.__name__
    found = data_of(value, base.__name__)
    assert (type(found), found) == (base, data)


def test_what_cannot_be_called_is_not() -> None:
    """Classes can be, and have `|`; their objects have neither from them."""
    with pytest.raises(AttributeError, match="__call__"):
        call_special(Plain(), "__call__", (), {})
    with pytest.raises(AttributeError, match="__or__"):
        call_special(Plain(), "__or__", (int,), {})
    assert isinstance(call_special(Plain, "__call__", (), {}), Plain)


def test_a_special_method_is_that_of_the_class() -> None:
    value = types.SimpleNamespace(__len__=lambda: 5)
    with pytest.raises(AttributeError):
        call_special(value, "__len__", (), {})
    assert call_special([1, 2], "__len__", (), {}) == 2
    assert call_special(int, "__call__", ("12",), {}) == 12
    assert call_special(dict, "__call__", ((),), {"a": 1}) == {"a": 1}
    assert call_special(1, "__eq__", (1,), {}) is True
    assert call_special(1, "__repr__", (), {}) == "1"


@pytest.mark.parametrize("name", ["__class__", "__init_subclass__", "x" * 30])
def test_other_methods_are_not_called(name: str) -> None:
    with pytest.raises(WireError) as caught:
        call_special(1, name, (), {})
    assert str(caught.value) == f"no special method: {name[:20]}"


def test_the_special_methods() -> None:
    """Each operator in its three forms, and no method that every object has."""
    assert {"__add__", "__radd__", "__iadd__", "__rpow__", "__ior__", "__call__", "__next__", "__lt__"} <= set(SPECIALS)
    assert len(set(SPECIALS)) == len(SPECIALS) == 26 + 14 * 3 + 4
    assert not {"__eq__", "__str__", "__getattribute__", "__init__"} & set(SPECIALS)
    assert math.prod(name.startswith("__") and name.endswith("__") for name in SPECIALS)


@pytest.mark.parametrize("name", ["__iter__", "__lt__"])  # objects have the second by themselves
def test_a_method_that_a_class_says_it_lacks_is_not_there(name: str) -> None:
    value = type("Lacking", (), {name: None})()
    with pytest.raises(AttributeError, match=name):
        call_special(value, name, (1,), {})
