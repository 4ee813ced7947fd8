"""The ready experiments: valid graphs, the recipe's defaults, no torch on the launcher."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.experiment import SETTINGS_ATTRIBUTE
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.dataflow.graph import DataflowGraph
from realhf.geometry.parameters import parameter_count

EXPERIMENTS = Path(__file__).parents[3] / "experiments"


def load(name: str) -> type:
    """The class under `@auto` in an experiment file."""
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", EXPERIMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return next(c for c in vars(module).values() if isinstance(c, type) and hasattr(c, SETTINGS_ATTRIBUTE))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    return str(sort_task.ensure(tmp_path_factory.mktemp("experiments") / "data"))


@pytest.mark.parametrize(("name", "steps", "batch_size"), [("sft", 400, 128), ("reward", 150, 64), ("ppo", 80, 128)])
def test_the_graph_is_valid_and_the_defaults_are_the_recipes(data_dir, name, steps, batch_size):
    experiment = ResolvedExperiment(load(name)(data_dir=data_dir))
    assert (experiment.steps, experiment.settings.batch_size) == (steps, batch_size)
    graph = experiment.graph
    assert set(experiment.setups) == set(graph.models)
    evaluation = experiment.evaluations["evaluation"]
    evaluated = DataflowGraph(evaluation.rpcs, evaluation.dataset.keys)
    for model, config in evaluated.models.items():
        assert graph.models[model] == config
    # Every batch of the evaluation is full, and data parallelism over 4 divides it.
    assert evaluation.dataset.check().rows % evaluation.batch_size == 0
    assert evaluation.batch_size % 4 == 0


def test_ppo_has_four_models_and_six_calls(data_dir):
    experiment = load("ppo")(data_dir=data_dir)
    graph = DataflowGraph(experiment.rpcs, experiment.dataset.keys)
    assert list(graph.calls) == [
        "actor_generate",
        "reward_inference",
        "reference_inference",
        "critic_inference",
        "actor_train_step",
        "critic_train_step",
    ]
    assert {name: config.head for name, config in graph.models.items()} == {
        "actor": "lm",
        "reward": "scalar",
        "reference": "lm",
        "critic": "scalar",
    }
    assert parameter_count(graph.models["actor"]) == 1_783_488


def test_every_implementation_exists(data_dir):
    for name in ("sft", "reward", "ppo"):
        experiment = load(name)(data_dir=data_dir)
        for call in [*experiment.rpcs, *experiment.evaluation.rpcs]:
            module, _, cls = call.interface_impl.implementation.partition(":")
            implementation = getattr(importlib.import_module(module), cls)
            assert hasattr(implementation(call.interface_impl), call.interface_type.value), call.name


def test_a_wrong_checkpoint_is_refused(data_dir):
    experiment = load("ppo")(data_dir=data_dir, model="runs/nowhere")
    with pytest.raises(UserError, match=r"'runs/nowhere': no such directory; give a Hugging"):
        _ = experiment.models


def test_loading_and_checking_an_experiment_needs_no_torch(data_dir):
    code = (
        "import runpy, sys\n"
        f"for name in ('sft', 'reward', 'ppo'):\n    runpy.run_path({str(EXPERIMENTS)!r} + f'/{{name}}.py')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
