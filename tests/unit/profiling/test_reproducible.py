"""What is measured for an experiment under `reproducible="layout"`."""

from pathlib import Path

import pytest

from realhf.architecture.compute import Reproducible
from realhf.data import sort_task
from realhf.experiments import ready_file
from realhf.lifecycle.request import experiment_of
from realhf.planning.model.profile import profile_path
from realhf.profiling.measure import targets_of


@pytest.mark.parametrize("option", ["plan", "layout"])
def test_an_experiment_is_measured_as_it_computes(tmp_path: Path, option: Reproducible) -> None:
    data = sort_task.ensure(tmp_path / "data")
    words = ("--data", str(data / "prompts.jsonl"), "--tokenizer", str(data / "tokenizer.json"))
    experiment = experiment_of(ready_file("grpo"), (*words, "--reward", "x.py:f", "--reproducible", option))
    [target] = targets_of(experiment)
    assert target.reproducible == option
    assert target.path("cpu", tmp_path) == profile_path(target.model, "float32", "cpu", tmp_path, option)
    assert target.file == target.path("cpu", tmp_path).name
