"""Several evaluation sets: their names, their paths, and the calls that are made on each."""

from pathlib import Path
from typing import Any

import pytest

from realhf.api import Examples, Policy
from realhf.api.script.held_out import held_out_sets
from realhf.base.errors import UserError
from tests.unit.api.script.scripts import some_loss


@pytest.mark.parametrize(
    ("given", "sets"),
    [
        ([], {}),
        (["test.jsonl"], {"": "test.jsonl"}),
        (["easy=test.jsonl"], {"easy": "test.jsonl"}),
        (["easy=a.jsonl", "math-500=b/*.jsonl"], {"easy": "a.jsonl", "math-500": "b/*.jsonl"}),
        (["data/a.jsonl", "hard=a.jsonl"], {"a": "data/a.jsonl", "hard": "a.jsonl"}),
        (["reasoning-gym:gcd:size=9", "human-eval"], {"gcd": "reasoning-gym:gcd:size=9", "human-eval": "human-eval"}),
        (["sums=reasoning-gym:chain_sum:seed=1"], {"sums": "reasoning-gym:chain_sum:seed=1"}),
        (["reasoning-gym:chain_sum:seed=1"], {"": "reasoning-gym:chain_sum:seed=1"}),
        (["./a=b.jsonl"], {"": "./a=b.jsonl"}),
        (["a=./b=c.jsonl", "data/x=1/d.jsonl"], {"a": "./b=c.jsonl", "d": "data/x=1/d.jsonl"}),
    ],
)
def test_names_and_paths(given: list[str], sets: dict[str, str]) -> None:
    assert held_out_sets(given) == sets


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["easy="], "--eval-data 'easy=' names no file; give FILE, or NAME=FILE"),
        ([""], "--eval-data '' names no file"),
        (["a/test.parquet", "b/test.parquet"], "two sets are called 'test', a/test.parquet and b/test.parquet; name"),
        (["a=x.jsonl", "a=y.jsonl"], "two sets are called 'a', x.jsonl and y.jsonl; name each of them: .*NAME=y.jsonl"),
        (
            ["a.jsonl", "b/*.jsonl"],
            r"b/\*.jsonl: of several sets each has a name of letters.*'\*' is none; name it: --e",
        ),
        (["a.jsonl", "test v2.jsonl"], "'test v2' is none; name it: --eval-data NAME=test v2.jsonl"),
    ],
)
def test_names_that_are_none(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        held_out_sets(given)


def test_a_file_of_the_whole_name_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b.jsonl").touch()
    with pytest.raises(UserError, match=r"the set 'a' of b.jsonl, and there is a file of the whole name; give ./a=b"):
        held_out_sets(["a=b.jsonl"])
    assert held_out_sets(["c=a=b.jsonl"]) == {"c": "a=b.jsonl"}


def test_each_set_has_its_own_rows_and_calls(experiment: Any, data: Path) -> None:
    def sft(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss)

    files = {name: str(data / f"{name}.jsonl") for name in ("easy", "hard")}
    found = experiment(sft, eval_data=(files["easy"], f"h={files['hard']}"), eval_every_steps=5, eval_batch_size=3)
    assert {name: one.dataset.path for name, one in found.evaluation.items()} == {
        "easy": files["easy"],
        "h": files["hard"],
    }
    for one in found.evaluation.values():
        assert ([call.name for call in one.rpcs], one.batch_size, one.every_steps) == (["policy_inference"], 3, 5)
    assert experiment(sft, eval_data=(f"h={files['hard']}",)).evaluation.keys() == {"h"}
    assert experiment(sft).evaluation is None
