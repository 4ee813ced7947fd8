"""The ready experiments by name: what `--list` says of them, and what a wrong name is told."""

from pathlib import Path

import pytest

from realhf.cli import main
from realhf.cli.command import Command
from realhf.cli.options import add_experiment
from realhf.data.sort_task import make_tokenizer
from realhf.experiments import ready_experiments, ready_file

NAMES = ["distill", "dpo", "grpo", "ppo", "ppo-ptx", "reinforce++", "remax", "reward", "rloo", "safe-rlhf", "sft"]


def test_every_algorithm_has_a_file_that_says_what_it_needs() -> None:
    found = ready_experiments()
    assert sorted(one.name for one in found) == NAMES
    for one in found:
        assert ready_file(one.name) == one.path
        assert one.summary.endswith(".")
        assert "--model" in one.needs
        assert "--data" in one.needs


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--list"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text for name in NAMES)
    assert "needs --model; --data with prompts" in text
    assert "realhf/experiments/NAME.py" in text


def test_a_name_is_a_ready_experiment_and_a_path_is_a_file(tmp_path: Path) -> None:
    parser = Command("run")
    add_experiment(parser)
    assert Path(parser.parse_args(["reinforce++"]).experiment).name == "reinforce_plus_plus.py"
    own = tmp_path / "grpo.py"
    assert parser.parse_args([str(own)]).experiment == str(own)


def test_a_name_that_is_none_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gpro", "--steps", "1"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(
        "error: 'gpro' is neither a ready experiment nor a Python file; the ready ones are distill, "
    )
    assert text.endswith("; did you mean grpo?\n")


@pytest.mark.parametrize("name", ["__init__", "", "../ppo", "."])
def test_no_other_file_is_a_ready_experiment(name: str) -> None:
    assert ready_file(name) is None


def test_grpo_without_a_divergence_has_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 16)
    (tmp_path / "rewards.py").write_text("def one(prompt, response): return 1.0\n")
    words = f"plan grpo --data {tmp_path}/rows.jsonl --tokenizer {tmp_path} --reward {tmp_path}/rewards.py:one"
    small = "--batch-size 8 --num-workers 1 --evaluations 100"
    for options, has_reference in (("", True), ("--grpo.beta 0", False)):
        assert main(f"{words} {small} {options}".split()) == 0
        assert ("reference_inference" in capsys.readouterr().out) == has_reference
