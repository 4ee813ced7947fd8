"""What a newcomer gets wrong with a ready experiment: one paragraph, and nothing is left behind."""

import json
import re
import shutil
from pathlib import Path

import pytest

from realhf import cli
from tests.docs.tiny_models import write_tiny_model

REWARDS = """\
def correct(prompt, response, answer): return 1.0
def asks(question, response): return 1.0
def takes_nothing(): return 1.0
def raises(response, answer): return float(response == answer["text"])
def says(response): return "right"
"""
GOOD = {
    "--model": "model",
    "--data": "train.jsonl",
    "--reward": "rewards.py:correct",
    "--batch-size": "8",
    "--num-workers": "1",
    "--run-dir": "run",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and rewards that are right, and with several that are wrong."""
    folder = tmp_path_factory.mktemp("newcomer")
    write_tiny_model(folder / "Qwen2.5-1.5B").rename(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "syntax.py").write_text("import os\ndef correct(prompt, response)\n    return 1.0\n")
    (folder / "imports.py").write_text("import not_installed\ndef correct(prompt, response): return 1.0\n")
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(16)]
    write(folder / "train.jsonl", rows)
    write(folder / "odd.jsonl", [{"asked": row["prompt"], "answer": row["answer"]} for row in rows])
    write(folder / "bare.jsonl", [{"prompt": row["prompt"]} for row in rows])
    write(folder / "long.jsonl", [*rows[:5], {"prompt": "word " * 3000, "answer": ""}, *rows[6:]])
    write(folder / "chats.jsonl", [{"messages": [{"role": "user", "content": "Hello"}], "answer": ""}] * 16)
    (folder / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "nothing").mkdir()
    shutil.copytree(folder / "model", folder / "base")
    (folder / "base" / "chat_template.jinja").unlink()
    shutil.copytree(folder / "model", folder / "mute", ignore=shutil.ignore_patterns("tokenizer.json"))
    shutil.copytree(folder / "model", folder / "small")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "small" / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    return folder


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def refusal(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """What a command says that ends with code 2. The parsers of options end the process themselves."""
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def grpo(changed: dict[str, str | None], command: str = "run") -> list[str]:
    """The command with other options; None: without this one."""
    words = {name: value for name, value in (GOOD | changed).items() if value is not None}
    return [command, "grpo", *(word for pair in words.items() for word in pair)]


MISTAKES: dict[str, tuple[dict[str, str | None], str]] = {
    "no such column": ({"--prompt-field": "question"}, "'question' is none of its columns, which are prompt, answer"),
    "unknown columns": ({"--data": "odd.jsonl"}, r"none of its columns \(asked, answer\) is known as the prompt"),
    "no data": ({"--data": None}, "name its file: --data FILE"),
    "no such data": (
        {"--data": "nowhere.jsonl"},
        r"nowhere.jsonl: no such .*\(the folder has bare.jsonl, broken.jsonl, ",
    ),
    "data with a typo": ({"--data": "trian.jsonl"}, "trian.jsonl: no such file .*; did you mean train.jsonl\\?"),
    "data in no folder": ({"--data": "data/train.jsonl"}, "there is no folder data; correct the path"),
    "data of a hub": (
        {"--data": "openai/gsm8k"},
        r"nothing is downloaded.*load_dataset\('openai/gsm8k', split='train'\)",
    ),
    "empty data": ({"--data": "empty.jsonl"}, "empty.jsonl: the file is empty"),
    "broken data": ({"--data": "broken.jsonl"}, "broken.jsonl, line 2: broken JSON"),
    "few rows": ({"--batch-size": "256"}, "16 rows.*fewer than --batch-size=256 / --grpo.samples-per-prompt=8; add"),
    "a long row": ({"--data": "long.jsonl"}, "long.jsonl, line 6: 'prompt' has 15000 tokens.*positions for 2048"),
    "no template": ({"--data": "chats.jsonl", "--model": "base"}, "no chat template .*give one with --chat-template"),
    "no such evaluation data": ({"--eval-data": "nowhere.jsonl"}, "nowhere.jsonl: no such file or directory"),
    "an evaluation without data": ({"--eval-every-steps": "5"}, "--eval-every-steps 5 evaluates held-out rows.* none"),
    "data given twice": ({"--data=a.jsonl": "--grpo.mask-truncated"}, "--data is given 2 times.*folder"),
    "evaluation sets of one name": (
        {"--eval_data": "train.jsonl", "--eval-data": "other/train.jsonl"},
        "two sets are called 'train', train.jsonl and other/train.jsonl; name each of them: --eval-data NAME=other",
    ),
    "an evaluation set without a column": (
        {"--eval_data": "easy=train.jsonl", "--eval-data": "bare=bare.jsonl"},
        "data set bare.jsonl: reward correct .*asks for 'answer', and the data have no such column: they have prompt",
    ),
    "no such second evaluation set": (
        {"--eval_data": "easy=train.jsonl", "--eval-data": "hard=nowhere.jsonl"},
        "nowhere.jsonl: no such file or directory",
    ),
    "no such task": (
        {"--data": "reasoning-gym:chain_sun", "--reward": None},
        "no task 'chain_sun'; did you mean",
    ),
    "a name like a task's": ({"--data": "reasoning_gym:gcd"}, "no such file.*; did you mean reasoning-gym:gcd\\?"),
    "the same questions": ({"--data": "reasoning-gym:gcd", "--eval-data": "reasoning-gym:gcd"}, "has seed=0 in --data"),
    "no reward": ({"--reward": None}, "there is no reward; give --reward FILE.py:FUNCTION"),
    "a reward without a function": ({"--reward": "rewards.py"}, "names no function; give FILE.py:FUNCTION"),
    "no such reward": ({"--reward": "rewards.py:corect"}, "no function 'corect'; it has the functions .*correct"),
    "no such file of rewards": ({"--reward": "nowhere.py:correct"}, "there is no file .*nowhere.py"),
    "a reward with an error": ({"--reward": "syntax.py:correct"}, "syntax.py:2: .*SyntaxError.*correct the file"),
    "a reward's import": ({"--reward": "imports.py:correct"}, "imports.py:1: .*No module named 'not_installed'"),
    "a reward's column": ({"--reward": "rewards.py:asks"}, r"asks \(rewards.py:2\) asks for 'question'.*rename"),
    "a reward's signature": ({"--reward": "rewards.py:takes_nothing"}, r"does not take the response; write it as"),
    "a reward that raises": (
        {"--reward": "rewards.py:raises", "--system": "Be brief."},
        r"raises \(rewards.py:4\).*before the start.*prompt 'What is 0 \+ 0\?'.*TypeError.*rewards.py:4 in raises",
    ),
    "a reward of another type": (
        {"--reward": "rewards.py:says"},
        r"says \(rewards.py:5\).*it returned 'right' \(str\)",
    ),
    "no model": ({"--model": None}, "no model came with one; give --model DIR"),
    "no such model": ({"--model": "nowhere"}, "model 'nowhere': no such directory; give a Hugging Face directory"),
    "a model of a hub": ({"--model": "Qwen/Qwen2.5-1.5B"}, "`hf download Qwen/Qwen2.5-1.5B --local-dir Qwen2.5-1.5B`"),
    "a model without a tokenizer": (
        {"--model": "mute"},
        r"the model mute came without a tokenizer.json; give --tokenizer DIR, .*from_pretrained\('mute'\)",
    ),
    "a folder without a model": ({"--model": "nothing"}, "no checkpoint of a model is there; give a Hugging Face"),
    "another tokenizer": ({"--model": "small"}, "token id .* has vocab_size=64.*use the tokenizer that"),
    "a number out of range": ({"--actor.lr": "-1"}, "lr -1.0 is not from .* give a number in that range"),
    "a batch of no whole groups": ({"--batch-size": "7"}, "--grpo.samples-per-prompt=8 does not divide --batch-size=7"),
}


@pytest.mark.parametrize(("changed", "said"), MISTAKES.values(), ids=MISTAKES)
def test_one_paragraph_says_what_to_do(
    changed: dict[str, str | None],
    said: str,
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`realhf plan` refuses what `realhf run` does, in the same words."""
    monkeypatch.chdir(made)
    printed = refusal(capsys, grpo(changed))
    [error] = re.findall(r"^error: .*\Z", printed, re.DOTALL | re.MULTILINE)
    assert re.search(said, error, re.DOTALL)
    assert "\n\n" not in error
    assert not (made / "run").exists()
    assert refusal(capsys, grpo({**changed, "--run-dir": None}, "plan")) == printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grpo.clip-hgih", "0.3"], "Perhaps you meant.*--grpo.clip-high"),
        (["--samples-per-prompt", "4"], "Perhaps you meant.*--grpo.samples-per-prompt"),
        (["--steps", "many"], "--steps.*'many'"),
        (
            [
                "--learning-rate",
                "1e-6",
                "--num_generations=4",
                "--gradient-accumulation-steps",
                "2",
                "--lora-rank",
                "8",
            ],
            "--learning-rate: give --actor.lr; --num_generations: give --grpo.samples-per-prompt; "
            "--gradient-accumulation-steps: the plan chooses .* --mini-batches .*; --lora-rank: there are no adapters",
        ),
        (["actor_rollout_ref.rollout.n=4"], "actor_rollout_ref.rollout.n: give --grpo.samples-per-prompt"),
        (["--dtype", "fp16"], "'fp16'.*'bfloat16'"),
    ],
)
def test_options_with_a_typo(
    words: list[str], said: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    assert re.search(said, refusal(capsys, [*grpo({}), *words]), re.DOTALL)
    assert not (made / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "grppo", "--model", "model"], "'grppo' is neither a ready experiment.*did you mean grpo\\?"),
        (["run", "--model", "model", "--data", "train.jsonl"], "model is a directory.*realhf run grpo --model model"),
        (["plan", "sorting"], "the ready ones are distill, dpo, grpo,"),
    ],
)
def test_experiments_with_a_typo(
    words: list[str], said: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    printed = refusal(capsys, words)
    assert re.search(said, printed)
    assert len(printed.splitlines()) == 1
