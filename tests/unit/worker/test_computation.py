"""A worker builds each model as the plan says that it is computed, where the experiment leaves it open."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.compute import Computation
from realhf.base.errors import UserError
from realhf.dataflow.plan import load_plan
from realhf.engine.backend import ModelSpec
from realhf.models.checkpoint_index import STEPS_KEY
from realhf.rundir.run import Run, RunSpec, load_experiment_class
from realhf.worker import model_worker
from realhf.worker.model_worker import ModelWorker
from tests.unit.checkpoints import save_model
from tests.unit.models.test_checkpoint import MODEL, random_state

ROOT = Path(__file__).resolve().parents[3]


def run_of(**fields: Any) -> Run:
    experiment = load_experiment_class(ROOT / "experiments/ppo.py")(**fields)
    spec = RunSpec(
        experiment_file="experiments/ppo.py", experiment_class="PPOExperiment", values={}, working_directory=str(ROOT),
        num_workers=2, devices_per_node=2,
    )  # fmt: skip
    return Run(spec, ResolvedExperiment(experiment), load_plan(ROOT / "tests/plans/computed.json"))


def test_the_specification_of_a_model_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, ModelSpec] = {}
    monkeypatch.setattr(model_worker, "build_model", lambda backend, spec: spec)
    monkeypatch.setattr(model_worker, "fill", lambda spec, run, name, folder: built.update({name: spec}))
    run = run_of()
    worker = SimpleNamespace(
        _run=run, _groups=SimpleNamespace(groups=lambda home: home), _device="cpu", _timeout_s=1.0,
        _directory=SimpleNamespace(checkpoints=Path()),
    )  # fmt: skip
    for name, home in run.homes.items():
        ModelWorker._build_home(cast(ModelWorker, worker), name, home)
    full = Computation(recomputation="full", sequence_parallel=True, offload_states=True)
    assert built["actor"].compute == full
    assert built["actor"].optimizer is not None
    assert built["actor"].optimizer.offload_states is True
    assert built["critic"].compute == Computation(recomputation="selective", data_parallel="fsdp")
    assert built["critic"].optimizer is not None
    assert built["critic"].optimizer.offload_states is False
    assert built["reward"].compute == Computation(data_parallel="fsdp")
    assert built["reference"].compute == Computation()
    divided = {name: run.placement(name).divided for name in run.experiment.graph.models}
    assert divided == {"actor": 1, "critic": 2, "reward": 2, "reference": 1}


def test_the_checkpoint_that_a_model_starts_from_is_read_at_the_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of 2 optimizer steps each, behind the 7 of the checkpoint: also when it has been tidied away."""
    save_model(tmp_path / "first", MODEL, random_state(MODEL), {STEPS_KEY: 7})
    run = run_of(steps=6)
    actor = replace(run.experiment.setups["actor"], checkpoint=str(tmp_path / "first"), with_optimizer=True)
    run.experiment.__dict__["setups"] = {**run.experiment.setups, "actor": actor}
    built: list[ModelSpec] = []
    monkeypatch.setattr(model_worker, "build_model", lambda backend, spec: built.append(spec))
    monkeypatch.setattr(model_worker, "fill", lambda *_: None)
    worker = SimpleNamespace(
        _run=run, _groups=SimpleNamespace(groups=lambda home: home), _device="cpu", _timeout_s=1.0,
        _directory=SimpleNamespace(checkpoints=Path()),
    )  # fmt: skip
    ModelWorker._build_home(cast(ModelWorker, worker), "actor", run.homes["actor"])
    shutil.rmtree(tmp_path / "first")
    assert [spec.total_optimizer_steps for spec in built] == [7 + 6 * 2]


def test_a_plan_that_contradicts_the_experiment_is_refused() -> None:
    compute = load_experiment_class(ROOT / "experiments/ppo.py")().compute
    run = run_of(compute=type(compute)(recomputation="off"))
    with pytest.raises(UserError, match="model 'actor': the plan says recomputation='full', and the experiment fixes"):
        _ = run.computations
