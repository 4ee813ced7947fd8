"""Experiment files are loaded by path; what is wrong in one is told with its line. A run is checked as a whole."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings, Evaluation
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, RunSpec, evaluation_twin, load_experiment_class, load_run
from tests.unit.api.calls import Nothing, call, ppo_graph

HEADER = """from dataclasses import dataclass

from realhf.api.decorator import auto

"""
EXPERIMENT = """
@auto(batch_size=4)
@dataclass(frozen=True, kw_only=True)
class {name}:
    seed: int = 0
    steps: int = 1
    path: str = "data.jsonl"

    @property
    def rpcs(self):
        return []

    @property
    def dataset(self):
        return None
"""


@pytest.fixture(autouse=True)
def _nothing_stays_imported() -> Any:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, *parts: str) -> Path:
    path.write_text(HEADER + "".join(parts))
    return path


def test_the_class_under_auto_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", EXPERIMENT.format(name="Mine"), "\nclass Other:\n    pass\n")
    cls = load_experiment_class(path)
    assert cls.__name__ == "Mine"
    assert ResolvedExperiment(cls()).settings.batch_size == 4


def test_an_experiment_that_was_imported_from_another_file_is_not_this_files(tmp_path: Path) -> None:
    base = write(tmp_path / "base_of_mine.py", EXPERIMENT.format(name="Base"))
    load_experiment_class(base)
    child = (
        "from base_of_mine import Base\n\n\n@auto(batch_size=2)\n@dataclass(frozen=True)\nclass Mine(Base):\n    pass\n"
    )
    assert load_experiment_class(write(tmp_path / "mine.py", child)).__name__ == "Mine"


def test_a_name_chooses_among_several(tmp_path: Path) -> None:
    path = write(tmp_path / "two.py", EXPERIMENT.format(name="First"), EXPERIMENT.format(name="Second"))
    assert load_experiment_class(path, "Second").__name__ == "Second"
    with pytest.raises(UserError, match=r"two.py: an experiment file has one class under @auto; found First, Second"):
        load_experiment_class(path)


BAD_FILES = {
    "a syntax error": ("x = (\n", "bad.py:5: cannot be imported: SyntaxError: '(' was never closed"),
    "an error in the middle": ("x = 1\ny = undefined\n", "bad.py:6: cannot be imported: NameError: name 'undefined'"),
    "an error below a function": (
        "def f():\n    return 1 / 0\n\n\nf()\n",
        "bad.py:6: cannot be imported: ZeroDivisionError: division by zero",
    ),
    "a module that is not there": (
        "import no_such_module\n",
        "bad.py:5: cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "a call of before": (
        "from realhf.algorithms.ppo.config import PPOActor\n",
        "; write Generate.by(ppo), and Update(ppo_policy(ppo), batch=ppo_advantages(...)), from realhf.api (docs/exp",
    ),
    "a module of before": (
        "from realhf.algorithms.rollout.config import Rollout\n",
        "bad.py:5: cannot be imported: ModuleNotFoundError: No module named 'realhf.algorithms.rollout",
    ),
    "no experiment": ("x = 1\n", "bad.py: an experiment file has one class under @auto; found none"),
    "a class that auto refuses": (
        "@auto(batch_size=4)\nclass Bad:\n    pass\n",
        "bad.py:5: @auto on Bad: write @dataclass below",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_experiment_files(name: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    path = write(tmp_path / "bad.py", text)
    with pytest.raises(UserError, match=re.escape(message)):
        load_experiment_class(path)


def test_a_file_that_is_missing_or_no_python(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.py: no such file; give the path of an experiment"):
        load_experiment_class(tmp_path / "nowhere.py")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"plan.json: not a Python file"):
        load_experiment_class(tmp_path / "plan.json")


def test_modules_beside_the_experiment_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "rules_beside_it.py").write_text("ANSWER = 42\n")
    path = write(tmp_path / "mine.py", "from rules_beside_it import ANSWER\n", EXPERIMENT.format(name="Mine"))
    load_experiment_class(path)
    assert sys.modules["rules_beside_it"].ANSWER == 42
    load_experiment_class(path)
    assert sys.path.count(str(tmp_path)) == 1


def test_a_run_is_read_back_from_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiment_file = write(tmp_path / "mine.py", EXPERIMENT.format(name="Mine"), EXPERIMENT.format(name="Other"))
    spec = RunSpec(
        experiment_file=str(experiment_file),
        experiment_class="Mine",
        values={"seed": 5, "path": "else.jsonl"},
        working_directory=str(tmp_path),
        num_workers=1,
        devices_per_node=1,
    )
    (tmp_path / "experiment.json").write_bytes(msgspec.json.encode(spec))
    save_plan(ExecutionPlan(num_devices=1, calls={}), tmp_path / "plan.json")
    run = load_run(RunDirectory(tmp_path))
    assert run.spec == spec
    assert (run.experiment.seed, run.experiment.steps, run.experiment.source.path) == (5, 1, "else.jsonl")
    assert type(run.experiment.source).__name__ == "Mine"


def test_a_negative_number_of_steps_between_verifications_is_refused() -> None:
    plan = ExecutionPlan(num_devices=1, calls={})
    with pytest.raises(UserError, match=r"--verify-reallocations-every -1 is not from 0 to 1,000,000,000 steps"):
        msgspec.structs.replace(run_of(plan, 1).spec, verify_reallocations_every=-1)


def test_an_evaluation_call_takes_the_layout_of_the_call_most_like_it() -> None:
    graph = ppo_graph()
    assert evaluation_twin(graph, call("actor", GENERATE, ["prompt"], name="accuracy")) == "actor_generate"
    assert evaluation_twin(graph, call("critic", INFERENCE, ["seq"], name="error")) == "critic_inference"
    assert evaluation_twin(graph, call("reward", GENERATE, ["prompt"], name="odd")) == "reward_inference"
    with pytest.raises(UserError, match=r"evaluation call accuracy uses model 'judge', which the experiment's rpcs"):
        evaluation_twin(graph, call("judge", GENERATE, ["prompt"], name="accuracy"))


def run_of(plan: ExecutionPlan, num_workers: int, evaluation_batch_size: int = 4, names: Sequence[str] = ()) -> Run:
    """A run of one training call, evaluated by one generation of seven rows, or for each of `names` by one of as many
    rows as the name has letters; only what `Run.check` reads."""

    def rows_of(rows: int) -> Any:
        return SimpleNamespace(keys=("x",), check=lambda: SimpleNamespace(rows=rows))

    dataset = rows_of(7)
    evaluation = Evaluation(
        rpcs=[call("m", GENERATE, ["x"], name="accuracy")],
        dataset=dataset,
        batch_size=evaluation_batch_size,
        every_steps=1,  # type: ignore[arg-type]
    )
    sets = {name: replace(evaluation, dataset=rows_of(len(name))) for name in names}
    spec = RunSpec(
        experiment_file="",
        experiment_class="",
        values={},
        working_directory="",
        num_workers=num_workers,
        devices_per_node=4,
    )
    experiment = SimpleNamespace(rpcs=[call("m", TRAIN_STEP, ["x"])], dataset=dataset, evaluation=sets or evaluation)
    setattr(experiment, SETTINGS_ATTRIBUTE, AutoSettings(batch_size=8))
    return Run(spec, ResolvedExperiment(experiment), plan)


def test_an_evaluation_never_generates_in_chunks() -> None:
    home = CallPlan(devices=(0, 4), dp=2, pp=2, chunks=2, micro_batches=4)
    run = run_of(ExecutionPlan(num_devices=4, calls={"m_train_step": home}), num_workers=4)
    run.check()
    assert run.call_plan("evaluation", run.experiment.graphs["evaluation"].calls["accuracy"]) == CallPlan(
        devices=(0, 4), dp=2, pp=2
    )
    inference = call("m", INFERENCE, ["x"], name="loss")
    assert run.call_plan("evaluation", inference) == CallPlan(devices=(0, 4), dp=2, pp=2, chunks=2)


TWO = ExecutionPlan(num_devices=2, calls={"m_train_step": CallPlan(devices=(0, 2), dp=2)})


def test_a_run_that_fits() -> None:
    run = run_of(TWO, num_workers=2)
    run.check()
    assert run.homes == {"m": TWO.layout("m_train_step")}


def test_an_evaluation_batch_that_leaves_a_rank_without_samples() -> None:
    run_of(TWO, num_workers=2, evaluation_batch_size=5).check()  # batches of 3 and 4 rows
    with pytest.raises(
        UserError,
        match=r"accuracy: dp=2 is more than the samples of the evaluation's smallest batch, 1 \(7 rows in batches of",
    ):
        run_of(TWO, num_workers=2, evaluation_batch_size=1).check()


def test_each_evaluation_set_is_checked_under_its_name() -> None:
    run_of(TWO, num_workers=2, names=["easy", "hard"]).check()
    with pytest.raises(UserError, match=r"more than the samples of the evaluation/h's smallest batch, 1 \(1 rows in"):
        run_of(TWO, num_workers=2, names=["easy", "h"]).check()


def test_early_stopping_names_the_set_whose_statistic_it_takes() -> None:
    def check(statistic: str, *names: str) -> None:
        run_of(TWO, num_workers=2, names=names).changed(stop_early=statistic).check()

    check("reward")
    check("share of a/b")
    check("hard/reward", "easy", "hard")
    check("min:easy/loss", "easy")
    for statistic in ("reward", "harder/reward"):
        with pytest.raises(
            UserError, match=rf"'{statistic}' names none of the .*from easy/{statistic}, hard/{statistic}$"
        ):
            check(f"min:{statistic}", "easy", "hard")


def test_an_evaluation_batch_of_broken_groups() -> None:
    class Several(Nothing):
        samples_per_prompt = 4

    run = run_of(TWO, num_workers=2, evaluation_batch_size=6)
    run.experiment.evaluations["evaluation"].rpcs[0] = call(
        "m", GENERATE, ["x"], name="accuracy", interface_impl=Several()
    )
    with pytest.raises(UserError, match="samples_per_prompt=4 does not divide the evaluation's batch_size=6"):
        run.check()


def test_an_interface_without_an_implementation() -> None:
    class Absent(InterfaceConfig):
        implementation = "no_such_module:Absent"

    run = run_of(TWO, num_workers=2)
    run.experiment.evaluations["evaluation"].rpcs[0] = call(
        "m", GENERATE, ["x"], name="accuracy", interface_impl=Absent()
    )
    with pytest.raises(UserError, match="accuracy: Absent is implemented in a module 'no_such_module', which is not"):
        run.check()


def recording(*keys: str) -> Run:
    class Scored(InterfaceConfig):
        implementation = "tests.unit.api.calls:NothingInterface"
        recordable = ("margin",)

    run = run_of(TWO, num_workers=2)
    run.experiment.calls[0] = call("m", TRAIN_STEP, ["x"], ["reward"], interface_impl=Scored())
    return Run(msgspec.structs.replace(run.spec, record=keys), run.experiment, run.plan)


def test_what_can_be_recorded() -> None:
    recording("reward", "margin", "weights_version").check()


@pytest.mark.parametrize("key", ["rewrd", "x"])
def test_recording_what_no_call_makes(key: str) -> None:
    message = (
        f"--record {key}: no call makes {key!r}; choose from margin, reward, weights_version, or list it in a call's "
        "output_data, or in `recordable` of the configuration of its interface"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        recording("reward", key).check()
