"""What `benchmarks/real_tasks.py` makes of its runs, and which of them it makes again; its quick form."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.real_rewards import last_name

from realhf.data.tasks import records_of
from realhf.rewards.sources import load_rewards
from tests.e2e.runs import ROOT, benchmark
from tests.unit.data.tokenizers_of_families import write_qwen
from tests.unit.gguf.files import random_model, tokenizer_fields, write_model
from tests.unit.rewards.samples import sample

real_tasks = importlib.import_module("real_tasks")


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        ("Roger", True),
        ("Roger.<|im_end|>", True),
        ("Roger likes nachos.", True),
        ("Not Jon-Paul, but Roger", True),
        ("Roger and Jon-Paul", False),
        ("roger", False),
        ("Rogers", False),
        ("Derek", False),
        ("", False),
    ],
)
def test_the_last_name_of_an_answer_counts(response: str, is_right: bool) -> None:
    prompt = (
        "<|im_start|>user\nJon-Paul likes nachos. Roger mocks cows. \nWho mocks cows? Reply only with a name.<|im_end|>"
    )
    assert last_name(response, prompt, "Roger") == is_right
    assert last_name("Jon-Paul", prompt, "Jon-Paul") == 1


@pytest.mark.parametrize("name", real_tasks.TASKS)
def test_a_sentence_with_the_answer_is_right_and_one_with_another_is_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    task = real_tasks.TASKS[name]
    [reward] = load_rewards([task.reward])
    records = list(records_of(f"{task.questions},size=30"))
    answers = {record["answer"] for record in records}
    for record in records:
        row = {"prompt": record["prompt"], "answer": record["answer"]}
        asked = {text: sample(prompt=row["prompt"], response=f"It is {text}.", row=row) for text in answers}
        scores = {text: reward.function(**reward.signature.arguments([one])) for text, one in asked.items()}
        assert [text for text, score in scores.items() if score] == [record["answer"]]


class Commands:
    """In place of `realhf`: keeps the commands, and every model answers as many questions right as `shares` say."""

    def __init__(self, *shares: float):
        self.done: list[str] = []
        self.most_tokens: list[str] = []  # of the answers in each evaluation
        self.shares = iter(shares)

    def __call__(self, *words: str) -> None:
        self.done.append(words[0] if words[0] != "run" else words[1])
        if words[0] == "evaluate":
            self.most_tokens.append(words[len(words) - words[::-1].index("--generation.max-new-tokens")])
            models = [{"estimates": {"reward": {"mean": next(self.shares)}}} for _ in range(words.count("--model"))]
            Path(words[words.index("--json") + 1]).write_text(json.dumps({"models": models}))
        else:
            target = Path(words[2] if words[0] == "convert" else words[words.index("--run-dir") + 1])
            target.mkdir()  # where it is there already, it was not removed
            (target / "weights").write_text(" ".join(words))


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, Commands]]:
    """Campaigns in one folder, and the commands of each; code is what `code` says."""
    (tmp_path / "model.gguf").touch()

    def made(*shares: float, code: str = "a", quick: bool = False) -> tuple[Any, Commands]:
        commands = Commands(*shares)
        monkeypatch.setattr(real_tasks, "realhf", commands)
        monkeypatch.setattr(real_tasks, "code_digest", lambda paths: code if paths == real_tasks.MEASURES else None)
        return real_tasks.Campaign(tmp_path / "root", tmp_path / "model.gguf", quick), commands

    return made


def test_a_case_that_is_done_is_not_made_again(campaign: Any, tmp_path: Path) -> None:
    first, commands = campaign(0.125, 0.5)
    learned = first.learned("aiw", 0)
    assert (learned.before, learned.after) == (12.5, 50.0)
    assert commands.done == ["grpo", "evaluate", "convert"]
    assert (tmp_path / "root/aiw-0/model/weights").is_file()

    again, commands = campaign()
    assert again.learned("aiw", 0) == learned
    assert commands.done == []


def test_the_models_are_asked_once_with_room_for_longer_answers(campaign: Any) -> None:
    first, commands = campaign(0.125, 0.5, 0.25, 0.375)
    asked = first.with_room("aiw", 0)
    assert (asked.before, asked.after) == (25.0, 37.5)
    assert commands.done == ["grpo", "evaluate", "convert", "evaluate"]
    assert commands.most_tokens == ["16", "64"]

    again, commands = campaign()
    assert again.with_room("aiw", 0) == asked
    assert commands.done == []

    anew, commands = campaign(0.125, 0.5, 0.25, 0.75, code="b")
    assert anew.with_room("aiw", 0).after == 75.0
    _, _, _, row, _ = real_tasks.rows_of("aiw", [learned(20, 40)] * 2, [35, 35], asked)
    assert (row["case"], row["value"], row["baseline"]) == ("aiw, seed 0, up to 64 tokens", 37.5, 25)
    assert (row["target"], row["holds"]) == (40, False)


@pytest.mark.parametrize("changed", [{"code": "b"}, {"quick": True}])
def test_a_case_of_other_code_or_settings_is_made_anew(changed: dict[str, Any], campaign: Any) -> None:
    first, _ = campaign(0.125, 0.5)
    first.learned("aiw", 0)
    again, commands = campaign(0.25, 0.75, **changed)
    assert again.learned("aiw", 0).after == 75.0
    assert commands.done == ["grpo", "evaluate", "convert"]


def test_another_seed_or_model_is_another_case_and_what_was_cut_off_is_made_anew(campaign: Any, tmp_path: Path) -> None:
    first, commands = campaign(0.125, 0.5, 0.125, 0.25, 0.5, 0.5)
    first.learned("aiw", 0)
    assert first.learned("aiw", 1).after == 25.0
    (tmp_path / "root/aiw-0/learned.json").unlink()
    assert first.learned("aiw", 0).after == 50.0
    (tmp_path / "model.gguf").write_text("another")
    again, commands = campaign(0.0, 1.0)
    assert again.learned("aiw", 1).after == 100.0
    assert commands.done == ["grpo", "evaluate", "convert"]


def test_a_student_is_made_after_its_teacher_and_anew_for_another_recipe(
    campaign: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, commands = campaign(0.125, 0.5, 0.125, 0.48)
    assert first.distilled(0).after == 48.0
    assert commands.done == ["grpo", "evaluate", "convert", "distill", "evaluate", "convert"]
    words = (tmp_path / "root/distillation-0/run/weights").read_text().split()
    assert words[words.index("--teacher") + 1] == str(tmp_path / "root/chain_sum-0/model")
    assert words[words.index("--model") + 1] == str(tmp_path / "model.gguf")
    assert int(words[words.index("--steps") + 1]) <= real_tasks.STEPS / 3

    monkeypatch.setattr(real_tasks, "DISTILL", "--distill.beta 1")
    again, commands = campaign(0.125, 0.49)
    assert again.distilled(0).after == 49.0
    assert commands.done == ["distill", "evaluate", "convert"]


def test_a_model_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["real_tasks.py", "--model", "none.gguf"])
    with pytest.raises(SystemExit):
        real_tasks.main()
    assert "--model none.gguf is no file; name a GGUF file" in capsys.readouterr().err


def learned(before: float, after: float, minutes: float = 5.0) -> Any:
    return real_tasks.Learned(depends_on="", before=before, after=after, minutes=minutes)


def test_rows_have_each_seed_their_mean_and_the_longest_run() -> None:
    rows = list(real_tasks.rows_of("aiw", [learned(20, 40, 5), learned(20, 30, 21)], [35, 35]))
    assert [row["case"].removeprefix("aiw, ") for row in rows] == ["seed 0", "seed 1", "mean", "longest run (at most)"]
    assert [row["value"] for row in rows] == [40, 30, 35, 21]
    assert [row["baseline"] for row in rows] == [20, 20, 20, None]
    assert [row["ratio"] for row in rows] == [2, 1.5, 1.75, None]
    assert [row["holds"] for row in rows] == [True, False, True, False]
    assert len(list(real_tasks.rows_of("aiw", [learned(20, 40)], [35]))) == 2


def test_a_task_counts_as_raised_where_every_seed_is_far_enough_and_fast_enough() -> None:
    good, low, slow = learned(20, 35), learned(20, 34.9), learned(20, 60, 20.1)
    row = real_tasks.raised([[good, good], [good, low], [good, slow], [good]], [good] * 4)
    assert (row["value"], row["target"], row["holds"]) == (2, 3, False)
    assert real_tasks.raised([[good], [good], [good], [low]], [good] * 4)["holds"]
    one_by_cut_answers = [good, low, good, good]
    assert real_tasks.raised([[good]] * 4, one_by_cut_answers)["value"] == 3


@pytest.mark.slow
@pytest.mark.distributed
def test_the_quick_form_and_what_it_keeps(tmp_path: Path) -> None:
    """On a random model of two layers; a second time nothing is run."""
    fields = tokenizer_fields(write_qwen(tmp_path / "tokenizer"), "smollm")
    model = random_model("llama", tmp_path / "original", tie_word_embeddings=True)
    file = write_model(tmp_path / "tiny.Q4_1.gguf", model, "Q4_1", **fields)
    words = ("--quick", "--case", "distillation", "--model", str(file), "--root", str(tmp_path / "root"))
    first = json.loads(benchmark("real_tasks", *words).splitlines()[-1])
    assert [row["case"] for row in first["results"]] == [
        "chain_sum, seed 0",
        "chain_sum, seed 0, up to 64 tokens",
        "chain_sum, longest run (at most)",
        "distillation, seed 0",
        "distillation, longest run (at most)",
    ]
    records = sorted(tmp_path.glob("root/*/learned.json"))
    assert [record.parent.name for record in records] == ["chain_sum-0", "distillation-0"]
    written = [record.stat().st_mtime_ns for record in records]
    again = json.loads(benchmark("real_tasks", *words).splitlines()[-1])
    assert again["results"] == first["results"]
    assert [record.stat().st_mtime_ns for record in records] == written
