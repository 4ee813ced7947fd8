"""What is printed of a data set before a run."""

import json
from pathlib import Path

import pytest

from realhf.data import kept_rows, sort_task
from realhf.data.look import main
from tests.unit.data.tokenizers_of_families import write_qwen


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "user_cache_path", lambda name: tmp_path / "cache")


CHAT = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
TEXT = (
    "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n<|im_start|>user\\na<|im_end|>\\n"
    "<|im_start|>assistant\\n{}<|im_end|>{}\\n<|im_start|>user\\nc<|im_end|>\\n<|im_start|>assistant\\n[[d<|im_end|>]]"
)


def test_rows_with_what_is_in_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qwen(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    words = ["examples", "--path", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path), "--rows", "5"]
    for options, before, behind in ([], "b", ""), (["--loss-on", "all"], "[[b", "]]"):
        assert main([*words, *options]) == 0
        description, _, place, row = capsys.readouterr().out.splitlines()
        says = "1 row; columns messages; tokens: 74.0 tokens on average, at most 74; chats by the tokenizer's template"
        assert description == f"data set {tmp_path}/rows.jsonl: {says}"
        assert place == f"{tmp_path}/rows.jsonl, line 1"
        assert row == f"  tokens (74 tokens): {TEXT.format(before, behind)}"


def test_pairs_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qwen(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c\n"}) + "\n")
    words = ["--path", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path)]
    assert main(["pairs", *words]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "  prompt (1 tokens): a",
        "  chosen (3 tokens): a[[b<|im_end|>]]",
        "  rejected (4 tokens): a[[c\\n<|im_end|>]]",
    ]
    assert main(["examples", *words]) == 2
    assert "is known as the answer" in capsys.readouterr().err
    assert main(["prompt", *words]) == 2
    assert "KIND is `prompts`, `examples` or `pairs`" in capsys.readouterr().out


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    """The words of a data set of four prompts, of which the second is long."""
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": prompt} for prompt in ("a>", "abcdef>", "b>", "c>")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["prompts", "--path", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], ["a", "abcdef"]),
        (["--rows", "1"], ["a"]),
        (["--rows", "9"], ["a", "abcdef", "b", "c"]),
        (["--max-prompt-tokens", "4", "--too-long", "drop"], ["a", "b"]),
        (["--max-prompt-tokens", "4", "--too-long", "drop", "--rows", "9"], ["a", "b", "c"]),
    ],
)
def test_the_first_rows_that_are_not_left_out(
    options: list[str], shown: list[str], prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a prompt nothing is in the loss."""
    assert main([*prompts, *options]) == 0
    lines = {"a": 1, "abcdef": 2, "b": 3, "c": 4}
    assert capsys.readouterr().out.splitlines()[1:] == [
        line
        for prompt in shown
        for line in (
            "",
            f"{tmp_path}/rows.jsonl, line {lines[prompt]}",
            f"  prompt ({len(prompt) + 2} tokens): <bos>{prompt}>",
        )
    ]


def test_what_is_in_the_loss_of_a_text_and_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a>", "answer": "b"}\n')
    words = ["examples", "--path", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path)]
    for options in ([], ["--loss-on", "all"]):
        assert main([*words, *options]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "  tokens (5 tokens): <bos>a>[[b<eos>]]"


def test_help_says_what_there_is(
    prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["--help"], ["-h"], []):
        assert main(words) == 0
        says = capsys.readouterr().out
        assert says.startswith("Shows a file as a model will see it")
        assert says.endswith("For the options: python -m realhf.data.look prompts --help\n")
    with pytest.raises(SystemExit) as ended:
        main([*prompts, "-h"])
    assert ended.value.code == 0
    says = capsys.readouterr().out
    assert "usage: python -m realhf.data.look prompts" in says
    assert "--max-prompt-tokens" in says
    monkeypatch.setattr("sys.argv", ["look", *prompts])
    assert main() == 0
    assert "4 rows; columns prompt" in capsys.readouterr().out
