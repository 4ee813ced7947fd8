"""The tasks of the library reasoning-gym: their options, questions, and the scores of answers.

Options are texts and lists of texts, as a command line and the rows of a data set have them.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import Enum, EnumType
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from realhf.base.errors import UserError
from realhf.rewards.numbers_in_text import answer_text, is_number
from realhf.rewards.signature import Function, asking_for

VERSION = "0.1.25"  # the list below is of this one
INSTALL = 'pip install "realhf[tasks]"'

Options = Mapping[str, Any]
Entry = dict[str, Any]
Find = Literal["found", "marked", "number", "all"]

_NO_ANSWER = "its questions come without an answer, which its own scorer gives 0"
_EVALUATED = "its scorer evaluates the response as Python code"
_JSON = "its scorer does not know its own answer again once the question has been in a file"
_UNORDERED = "the same seed makes other questions in every process"
REFUSED: Mapping[str, str] = {
    "arc_agi": _JSON,
    "binary_matrix": _EVALUATED,
    "boxnet": _NO_ANSWER,
    "codeio": "it executes programs from a file of data, some of which need further libraries",
    "coin_flip": "its scorer gives the full score to the first digit of the answer",
    "composite": "it is made of other tasks; name these, with commas between them",
    "countdown": _EVALUATED,
    "game_of_life_halting": "its scorer gives the full score to any text",
    "graph_color": _NO_ANSWER,
    "intermediate_integration": _EVALUATED,
    "isomorphic_strings": _UNORDERED,
    "knight_swap": _UNORDERED,
    "list_functions": _UNORDERED,
    "n_queens": _EVALUATED,
    "polynomial_multiplication": _EVALUATED,
    "prime_factorization": "its scorer fails on texts",
    "propositional_logic": _NO_ANSWER,
    "puzzle24": "its scorer gives the full score to the answer of any other question",
    "ransom_note": _UNORDERED,
    "rearc": _JSON,
    "rubiks_cube": _NO_ANSWER,
    "rush_hour": _NO_ANSWER,
    "simple_integration": _EVALUATED,
    "spiral_matrix": _EVALUATED,
    "string_insertion": _EVALUATED,
    "word_ladder": _UNORDERED,
}

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARK = re.compile(r"\banswer\**\s*:", re.IGNORECASE)
_AROUND = " \t\r\n*`"


def tasks() -> Mapping[str, tuple[type[Any], type[Any]]]:
    """By name the classes of every task and of its options. Raises UserError where the library is not there."""
    try:
        found = version("reasoning-gym")
    except PackageNotFoundError:
        raise UserError(f"tasks of reasoning-gym need that library; install it: {INSTALL}") from None
    if found != VERSION:
        raise UserError(
            f"reasoning-gym {found} is installed, and its tasks are known as {VERSION} makes and scores them; install "
            f"that one: {INSTALL}"
        )
    from reasoning_gym.factory import DATASETS  # an optional dependency, which takes a second to import

    known: Mapping[str, tuple[type[Any], type[Any]]] = DATASETS
    return known


def check_task(task: str) -> None:
    """Raises UserError for a name that is no task, or one whose scores are wrong."""
    if task not in tasks():
        near = get_close_matches(task, tasks(), 3)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"reasoning-gym has no task {task!r}; {meant}`realhf data --list` shows all")
    if task in REFUSED:
        raise UserError(
            f"the task {task!r} of reasoning-gym cannot be trained on: {REFUSED[task]}; choose another (`realhf data "
            "--list`)"
        )


def category(task: str) -> str:
    """The kind of a task, such as "arithmetic"."""
    return str(tasks()[task][0].__module__.split(".")[1])


def defaults(task: str) -> dict[str, Any]:
    """The options of a task with the library's defaults, without `size` and `seed`, which are not a task's own."""
    config = tasks()[task][1]()
    names = (one.name for one in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in ("size", "seed")}


def made(task: str, options: Options, size: int = 1, seed: int = 0) -> Any:
    """The library's data set of a task, of `size` entries.

    Raises UserError for an unknown task or option, and for a value that the task refuses.
    """
    check_task(task)
    kind, config = tasks()[task]
    hints = get_type_hints(config)
    values = {name: _value(task, name, value, hints) for name, value in options.items()}
    with _refusals(task, options):
        return kind(config(**values, size=size, seed=seed))


def entries(task: str, options: Options, size: int = 1, seed: int = 0) -> Iterator[Entry]:
    """`size` entries of a task: question, answer and metadata. Raises UserError as `made`."""
    found = made(task, options, size, seed)
    for place in range(size):
        with _refusals(task, options):
            entry = found[place]
        yield entry


@contextlib.contextmanager
def _refusals(task: str, options: Options) -> Iterator[None]:
    """Inside, what the library raises for options that it cannot use (assertions, mostly) becomes a UserError."""
    try:
        yield
    except Exception as error:
        given = ", ".join(f"{name}={shown(value)}" for name, value in options.items()) or "its defaults"
        raise UserError(f"the task {task!r} cannot be made with {given}: {error}; correct its options") from error


def shown(value: Any) -> str:
    """An option's value as the name of a data set has it: [a,b] for a list, true or false."""
    match value:
        case list() | tuple():
            return f"[{','.join(map(shown, value))}]"
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
    return str(value)


def _value(task: str, name: str, value: Any, hints: Mapping[str, Any]) -> Any:
    """An option's value of its type. Raises UserError."""
    known = defaults(task)
    if name not in known:
        raise UserError(f"the task {task!r} has no option {name!r}; it has size, seed, {', '.join(known)}")
    try:
        return msgspec.convert(value, hints[name], strict=False)
    except msgspec.ValidationError:
        kind = hints[name]
        choices = tuple(kind) if isinstance(kind, EnumType) else get_args(kind) if get_origin(kind) is Literal else ()
        rule = f"choose one of {', '.join(map(shown, choices))}" if choices else f"its default is {shown(known[name])}"
        raise UserError(f"the task {task!r}: {name}={shown(value)} is of the wrong kind; {rule}") from None


def reasoning_gym(answer: Find = "found", *, partial: bool = True) -> Function:
    """The score of the answer in the response, from 0 to 1, as the task of the row scores it.

    answer: where the response has its answer, see `answer_in`.
    partial: scores between 0 and 1 count as they are, or as 0.
    """
    if answer not in get_args(Find):
        raise ValueError(f"answer={answer!r} is not known; choose one of {', '.join(get_args(Find))}")

    def reward(response: str, **row: Any) -> float:
        entry = {"answer": row["answer"], "metadata": row["metadata"]}
        found = answer_in(response, entry["answer"], answer)
        score = _score(row["task"], msgspec.json.encode(row["options"]), found, entry)
        return score if partial or score >= 1 else 0.0

    return asking_for(reward, "response", "answer", "task", "options", "metadata")


def answer_in(response: str, right: str, where: Find) -> str | None:
    """The answer that a response gives; None for none.

    where: "marked": in the last <answer></answer>, else behind the last `Answer:`, in its line or, where the right
        answer has several lines, to the end. "number": the last number (see `answer_text`). "all": the whole response.
        "found": as "marked", or else as "all"; of this the last number if the right answer is a number.
    """
    if where == "number":
        return answer_text(response)
    marked = None if where == "all" else _marked(response, several_lines="\n" in right.strip())
    if marked is None and where == "marked":
        return None
    part = response.strip() if marked is None else marked
    return (answer_text(part) or part) if where == "found" and is_number(right) else part


def _marked(response: str, *, several_lines: bool) -> str | None:
    if tagged := _TAGGED.findall(response):
        return str(tagged[-1]).strip()
    *before, behind = _MARK.split(response)
    if not before:
        return None
    return (behind if several_lines else behind.strip(_AROUND).partition("\n")[0]).strip(_AROUND)


def _score(task: str, options: bytes, answer: str | None, entry: Entry) -> float:
    """From 0 to 1. An answer on which the task's scorer fails is none that anybody could have meant: 0."""
    try:
        score = float(_scorer(task, options).score_answer(answer, entry))
    except UserError:
        raise
    except Exception:
        return 0.0
    return score if math.isfinite(score) else 0.0


@cache  # some read lists of words
def _scorer(task: str, options: bytes) -> Any:
    return made(task, msgspec.json.decode(options))
