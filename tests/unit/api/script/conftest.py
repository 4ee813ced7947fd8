"""The experiment of a script, and its data."""

from pathlib import Path
from typing import Any

import pytest

from realhf.api import (
    auto,
)
from realhf.data import sort_task


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    sort_task.make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def experiment(data: Path) -> Any:
    """Makes the experiment of a script, with a tokenizer, and any file for each of its data."""

    def make(script: Any, **fields: Any) -> Any:
        made = auto(batch_size=8)(script)
        kinds = {name: value for name, value in vars(made()).items() if hasattr(value, "DATASET")}
        files = {name: type(value)(data=str(data / "rows.jsonl")) for name, value in kinds.items()}
        return made(tokenizer=str(data / "tokenizer.json"), **files, **fields)

    return make
