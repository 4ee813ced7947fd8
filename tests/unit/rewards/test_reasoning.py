"""The tasks of reasoning-gym: where a response has its answer, the scores, and the tasks that are refused."""

import json
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from realhf.base.errors import UserError
from realhf.rewards import reasoning
from realhf.rewards.reasoning import Find, answer_in, made
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
