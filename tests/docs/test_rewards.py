"""The examples of docs/rewards.md score what the page says."""

import contextlib
import importlib
from pathlib import Path

import pytest

from realhf.rewards.pool import FunctionOptions, RewardPool
from realhf.rewards.ready import READY
from realhf.rewards.signature import Sample
from realhf.rewards.sources import load_rewards
from tests.docs.blocks import ROOT, Document

PAGE = Document(ROOT / "docs/rewards.md")
COLUMNS = ["prompt", "answer", "level"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for block in PAGE.blocks("python"):
        first, _, code = block.partition("\n")
        (tmp_path / first.removeprefix("# file: ")).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_functions_of_the_page(folder: Path) -> None:
    row = {"prompt": "2 + 2?", "answer": "4", "level": 3, "data_source": "sums", "ground_truth": "4"}
    names = [
        *(f"rewards.py:{name}" for name in ("correct", "hard", "judged")),
        *(f"others.py:{name}" for name in ("in_batches", "of_trl", "of_verl")),
    ]
    load_rewards(names, row)
    samples = [
        Sample(id=i, step=0, prompt="2 + 2?", response=response, row={**row, "level": 3 - i})
        for i, response in enumerate(["Well,\n4", "no idea at all, not the least"])
    ]
    with contextlib.closing(RewardPool(names, FunctionOptions(timeout_s=600))) as pool:
        right, wrong = pool.score(samples)
    assert list(right.values.values()) == [1] * 6
    assert list(wrong.values.values()) == [0, None, 0, 0, 0, 0]


def test_the_rewards_of_tokens(folder: Path) -> None:
    given = {"step": 0, "prompt": "2 + 2?", "row": {"answer": "42"}, "tokens": (5, 4, 2, 1)}
    texts = (("So ", "4", "2", ""), ("no", "", " idea", ""))
    samples = [Sample(id=i, response="".join(each), token_texts=each, **given) for i, each in enumerate(texts)]
    names = ["token_rewards.py:where", "token_rewards.py:costs=2", "rewards.py:correct=0"]
    with contextlib.closing(RewardPool(names, FunctionOptions(timeout_s=600))) as pool:
        assert pool.wants_tokens
        assert pool.wants_token_texts
        right, wrong = pool.score(samples)
    assert right.of_tokens == pytest.approx((-0.02, -0.02, 0.98, -0.02))
    assert wrong.of_tokens == pytest.approx((-0.02,) * 4)


def test_what_a_function_logs(folder: Path) -> None:
    row = {"answer": "4"}
    texts = enumerate(["4", "no idea"])
    samples = [Sample(id=i, step=5, steps=10, prompt="2 + 2?", response=text, row=row) for i, text in texts]
    with contextlib.closing(RewardPool(["logging_reward.py:brief"], FunctionOptions(timeout_s=600))) as pool:
        right, wrong = pool.score(samples)
    assert (right.reward, wrong.reward) == pytest.approx((1 - 0.0005, -0.0035))
    assert right.metrics == wrong.metrics == {"share right": (0.5, 1)}
    assert (right.extra, wrong.extra) == ({"letters": 1}, {"letters": 7})


def test_the_call_of_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("text_reward")
    module.rewards.check_columns(COLUMNS)
    assert module.call.output_data == ("reward", "valid")
    assert module.rewards.pool_options(2).on_error == "drop"


def test_every_ready_function_is_on_the_page() -> None:
    words = " ".join(PAGE.code_words)
    assert not [
        name for name in READY if f"ready:{name}(" not in words and f"ready:{name}" not in PAGE.path.read_text()
    ]
