"""The algorithm of docs/contributing.md, put into a folder as the page says, has passing tests and trains."""

import importlib
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Document
from tests.docs.test_recipes import write_files
from tests.docs.tiny_models import write_tiny_model
from tests.e2e.forked import quickly_finished


@pytest.mark.distributed
def test_the_algorithm_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in Document(ROOT / "docs/contributing.md").blocks("python"):
        first, _, code = block.partition("\n")
        (tmp_path / first.removeprefix("# file: ")).write_text(code)
    assert {path.name for path in tmp_path.glob("*.py")} == {
        "best.py", "best_config.py", "best_functions.py", "test_best.py",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tests = importlib.import_module("test_best")
    [test] = [value for name, value in vars(tests).items() if name.startswith("test_")]
    test()

    write_files(tmp_path)
    (tmp_path / "rewards.py").write_text("def length(prompt, response): return len(response)\n")
    write_tiny_model(tmp_path / "Qwen2.5-1.5B")
    words = "--model Qwen2.5-1.5B --data train.jsonl --reward rewards.py:length --steps 2 --batch-size 8"
    small = "--best.max-new-tokens 8 --best.min-new-tokens 1 --num-workers 2 --evaluations 100"
    run = quickly_finished(tmp_path / "run", Path("best.py"), *words.split(), *small.split())
    assert [line["actor_grad_norm"] > 0 for line in run.metrics] == [True, True]
