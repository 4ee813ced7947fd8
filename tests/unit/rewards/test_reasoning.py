"""The tasks of reasoning-gym: where a response has its answer, the scores, and the tasks that are refused."""

import builtins
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from realhf.base.errors import UserError
from realhf.rewards import reasoning
from realhf.rewards.numbers_in_text import is_number
from realhf.rewards.reasoning import _UNORDERED, REFUSED, Find, answer_in, made
from realhf.rewards.sources import load_rewards
from tests.unit.rewards.test_ready import reward


@pytest.mark.parametrize(
    ("response", "right", "where", "answer"),
    [
        ("3 + 4 = 7", "7", "found", "7"),
        ("3 + 4 = 7.", "7", "found", "7"),
        ("It is 1,234.50 euros", "9", "found", "1234.50"),
        ("<answer> 12 </answer> and 13", "7", "found", "12"),
        ("<answer>1</answer> no: <answer>it is 2</answer>", "7", "found", "2"),
        ("Answer: 5\nwhich is 6", "7", "found", "5"),
        ("**Answer:** `5`\n6", "7", "found", "5"),
        ("**Answer**: 5 apples", "7", "found", "5"),
        ("answer : 4. ANSWER:5", "7", "found", "5"),
        ("Answer: none", "7", "found", "none"),
        ("nothing", "7", "found", "nothing"),
        ("  cat\n", "cat", "found", "cat"),
        ("I say\nAnswer: cat\nof course", "cat", "found", "cat"),
        ("Answer:\n1 2\n3 4\n", "5 6\n7 8", "found", "1 2\n3 4"),
        ("Answer:\n1 2\n3 4\n", "12", "marked", "1 2"),
        ("it is 7", "7", "marked", None),
        ("Answer: it is 7", "7", "marked", "it is 7"),
        ("it is 7", "cat", "number", "7"),
        (r"\boxed{8}, not 9", "7", "number", "8"),
        ("none", "7", "number", None),
        (" Answer: 7 ", "7", "all", "Answer: 7"),
    ],
)
def test_where_a_response_has_its_answer(response: str, right: str, where: Find, answer: str | None) -> None:
    assert answer_in(response, right, where) == answer


def row(task: str, place: int = 0, **options: Any) -> dict[str, Any]:
    entry = made(task, options, size=place + 1)[place]
    columns = {"answer": entry["answer"], "task": task, "options": options, "metadata": entry["metadata"]}
    return json.loads(json.dumps(columns))


def test_the_score_is_that_of_the_task() -> None:
    sums = row("chain_sum", min_terms="1", max_terms="1", max_digits="1")
    right, wrong = int(sums["answer"]), int(sums["answer"]) + 1
    assert reward("reasoning_gym", f"It is {right}.", **sums) == 1
    assert reward("reasoning_gym", f"It is {wrong}.", **sums) == 0
    assert reward("reasoning_gym", f"It is {right}.0", **sums) == 1  # the task's own comparison of numbers
    assert reward("reasoning_gym", "", **sums) == 0
    # The task scores an answer that has the right one in it by its share of the characters.
    assert reward("reasoning_gym", f"It is 1{right}.", **sums) == 0.5
    assert reward("reasoning_gym(partial=False)", f"It is 1{right}.", **sums) == 0
    assert reward("reasoning_gym(partial=False)", f"It is {right}.", **sums) == 1
    assert reward("reasoning_gym(answer='marked')", f"It is {right}.", **sums) == 0
    assert reward("reasoning_gym(answer='all')", str(right), **sums) == 1


def test_the_options_of_the_row_are_those_of_the_scorer() -> None:
    """decimal_arithmetic compares as many digits as the option says."""
    few = row("decimal_arithmetic", min_num_decimal_places="1", max_num_decimal_places="1")
    many = {**few, "options": {"min_num_decimal_places": "1", "max_num_decimal_places": "9"}}
    near = f"{float(few['answer']) + 0.001}"
    kind, config = DATASETS["decimal_arithmetic"]
    for columns, places in ((few, 1), (many, 9)):
        scorer = kind(config(min_num_decimal_places=1, max_num_decimal_places=places, seed=0))
        entry = {"answer": few["answer"], "metadata": few["metadata"]}
        assert reward("reasoning_gym", near, **columns) == scorer.score_answer(near, entry)
    assert reward("reasoning_gym", near, **few) != reward("reasoning_gym", near, **many)


def test_an_answer_on_which_the_scorer_fails_has_the_score_0() -> None:
    interval = next(one for place in range(20) if "day" in (one := row("time_intervals", place))["answer"])
    with pytest.raises(OverflowError):
        DATASETS["time_intervals"][0](DATASETS["time_intervals"][1]()).score_answer("9" * 500, interval)
    assert reward("reasoning_gym", "9" * 500, **interval) == 0


def test_wrong_options_of_the_function_are_told() -> None:
    with pytest.raises(UserError, match="answer='last' is not known; choose one of found, marked, number, all"):
        load_rewards(["ready:reasoning_gym(answer='last')"])
    with pytest.raises(UserError, match="asks for 'answer', 'task', 'options', 'metadata'"):
        load_rewards(["ready:reasoning_gym"], columns=["prompt"])


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "version", lambda name: "0.1.26")
    with pytest.raises(UserError, match=r'0\.1\.26 is installed.*0\.1\.25.*pip install "realhf\[tasks\]"'):
        made("gcd", {})


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise reasoning.PackageNotFoundError(name)

    monkeypatch.setattr(reasoning, "version", missing)
    with pytest.raises(UserError, match=r'need that library; install it: pip install "realhf\[tasks\]"'):
        made("gcd", {})


# --- all tasks of the library

NONSENSE = ("xyzzy plugh", "I do not know.", "[['xyzzy', 'plugh']]", "['xyzzy']", "[[98765, 43210]]", "98765 + 43210")
QUESTIONS = 20
FULL = 0.999


def faults_of(task: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The reasons of `REFUSED` that hold for a task, but for the order of sets, which takes two processes."""
    kind, config = DATASETS[task]
    try:
        scorer = kind(config(size=QUESTIONS, seed=0))
    except AssertionError:
        return {REFUSED["composite"]}
    if "exec(" in inspect.getsource(sys.modules[kind.__module__]):
        return {REFUSED["codeio"]}
    made = [scorer[place] for place in range(QUESTIONS)]
    # As a row of the file has them.
    entries = json.loads(
        json.dumps([{name: entry[name] for name in ("answer", "metadata")} for entry in made], default=str)
    )
    if any(entry["answer"] is None for entry in entries):
        return {REFUSED["boxnet"]} if all(scorer.score_answer(e["answer"], e) == 0 for e in entries) else set()
    found: set[str] = set()
    if any(scorer.score_answer(entry["answer"], entry) < FULL for entry in entries):
        found.add(REFUSED["arc_agi"])
    others = zip(entries, [*entries[1:], entries[0]], strict=True)
    if all(scorer.score_answer(other["answer"], entry) >= FULL for entry, other in others):
        found.add(REFUSED["puzzle24"])
    long = [entry for entry in entries if len(entry["answer"]) > 3 and is_number(entry["answer"])]
    if any(scorer.score_answer(entry["answer"][:1], entry) >= FULL for entry in long):
        found.add(REFUSED["coin_flip"])
    evaluated: list[str] = []
    real = builtins.eval
    monkeypatch.setattr(builtins, "eval", lambda text, *more: (evaluated.append(str(text)), real(text, *more))[1])
    for answer in NONSENSE:
        for entry in entries:
            try:
                score = scorer.score_answer(answer, entry)
            except Exception:
                found.add(REFUSED["prime_factorization"])
            else:
                assert 0 <= score <= 1
                if score >= FULL:
                    found.add(REFUSED["game_of_life_halting"])
    monkeypatch.undo()
    if any("xyzzy" in text or "98765" in text for text in evaluated):
        found.add(REFUSED["countdown"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in sorted(DATASETS) if REFUSED.get(task) != _UNORDERED])
def test_the_refused_tasks_are_those_with_a_fault(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults_of(task, monkeypatch)
    assert REFUSED[task] in found if task in REFUSED else not found


QUESTIONS_OF_ALL = """
import hashlib, json
from reasoning_gym.factory import DATASETS
from realhf.rewards.reasoning import REFUSED, _UNORDERED
for task in sorted(DATASETS):
    if REFUSED.get(task, _UNORDERED) == _UNORDERED:
        made = DATASETS[task][0](DATASETS[task][1](size=20, seed=3_000_000))
        entries = [made[place] for place in range(20)]
        print()  # a task writes dots
        print(task, hashlib.sha256(json.dumps(entries, default=str).encode()).hexdigest())
"""


@pytest.mark.slow
def test_other_processes_make_other_questions_of_the_refused_tasks_alone() -> None:
    digests = []
    for seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", QUESTIONS_OF_ALL]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        digests.append([line.split() for line in done.stdout.splitlines() if line.count(" ") == 1])
    first, second = map(dict, digests)
    assert first.keys() == second.keys() >= DATASETS.keys() - REFUSED.keys()
    unordered = {task for task, reason in REFUSED.items() if reason == _UNORDERED}
    assert {task for task in first if first[task] != second[task]} == unordered
