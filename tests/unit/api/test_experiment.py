"""@auto tells what an experiment lacks; the settings of models are complete or refused."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from realhf.api.decorator import auto
from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.base.options import options_in
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import INFERENCE, TRAIN_STEP, ModelFunctionCallDef
from tests.unit.api.calls import call


@auto(batch_size=8, nodelist="node[01-02]", max_steps_in_flight=3, search_evaluations=10)
@dataclass(frozen=True, kw_only=True)
class Small:
    """Trains `student`, asks `teacher`."""

    seed: int = 0
    steps: int = 1
    models: dict[str, ModelSetup] = field(default_factory=lambda: {"student": ModelSetup(optimizer=OptimizerConfig())})

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return [call("teacher", INFERENCE, ["x"], ["y"]), call("student", TRAIN_STEP, ["y"])]

    @property
    def dataset(self) -> Any:
        raise AssertionError("not read by these tests")


def test_settings_of_the_decorator() -> None:
    settings = ResolvedExperiment(Small()).settings
    assert (settings.batch_size, settings.nodelist) == (8, "node[01-02]")
    assert (settings.max_steps_in_flight, settings.search_evaluations) == (3, 10)


def test_a_field_overrides_the_decorators_batch_size() -> None:
    @auto(batch_size=8)
    @dataclass(frozen=True, kw_only=True)
    class Batched(Small):
        batch_size: int = 32

    assert ResolvedExperiment(Batched()).settings.batch_size == 32
    with pytest.raises(UserError, match="batch_size=-1 must be at least 1"):
        _ = ResolvedExperiment(Batched(batch_size=-1)).settings
    with pytest.raises(UserError, match="batch_size=0 must be at least 1"):
        _ = ResolvedExperiment(Batched(batch_size=0)).settings


def test_auto_refuses_a_plain_class() -> None:
    with pytest.raises(UserError, match="@auto on Plain: write @dataclass below @auto"):

        @auto(batch_size=8)
        class Plain:
            pass


def test_auto_names_all_that_is_missing() -> None:
    with pytest.raises(UserError, match=r"@auto on Lacking: seed, rpcs, dataset missing; an experiment has the fields"):

        @auto(batch_size=8)
        @dataclass
        class Lacking:
            steps: int = 1


@pytest.mark.parametrize("batch_size", [0, -3])
def test_auto_refuses_a_batch_without_samples(batch_size: int) -> None:
    with pytest.raises(UserError, match=f"batch_size={batch_size} must be at least 1"):
        auto(batch_size=batch_size)


def test_models_have_defaults() -> None:
    assert ResolvedExperiment(Small()).setups == {
        "student": ModelSetup(optimizer=OptimizerConfig()),
        "teacher": ModelSetup(),
    }


def test_models_that_no_call_uses() -> None:
    wrong = dataclasses.replace(Small(), models={"studnt": ModelSetup()})
    with pytest.raises(UserError, match="models: 'studnt' is used by no call; the calls use student, teacher"):
        _ = ResolvedExperiment(wrong).setups


def test_a_trained_model_needs_an_optimizer() -> None:
    message = "student_train_step trains 'student', which has no optimizer; give one in models"
    with pytest.raises(UserError, match=re.escape(message)):
        _ = ResolvedExperiment(dataclasses.replace(Small(), models={"student": ModelSetup()})).setups
    found = ResolvedExperiment(dataclasses.replace(Small(), models={})).setups
    assert found == {"student": ModelSetup(optimizer=OptimizerConfig()), "teacher": ModelSetup()}


OPTIMIZER_NUMBERS = [name for name, one in options_in(OptimizerConfig).items() if one.type in (int, float)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "optimizer: lr 0.0 is not from 1e-20 to "),
        ({"max_grad_norm": -1.0}, "optimizer: max_grad_norm -1.0 is not from "),
        ({"beta1": 1.0}, "optimizer: beta1 1.0 is not from 0 to 0.999999999;"),
        ({"beta2": -0.1}, "optimizer: beta2 -0.1 is not from 0 to 0.999999999;"),
        *(({name: math.nan}, f"optimizer: {name} nan is not from ") for name in OPTIMIZER_NUMBERS),
        *(({name: math.inf}, f"optimizer: {name} inf is not from ") for name in OPTIMIZER_NUMBERS),
    ],
)
def test_bad_optimizers(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        OptimizerConfig(**changes)  # type: ignore[arg-type]


def test_a_checkpoint_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"nowhere: neither index.json nor config.json there; give the directory of",
    ):
        ModelSetup(checkpoint=str(tmp_path / "nowhere"))
    (tmp_path / "index.json").write_text("{}")
    ModelSetup(checkpoint=str(tmp_path))


def test_optimizer_states_come_from_a_checkpoint_of_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")
    whole = {"checkpoint": str(tmp_path), "optimizer": OptimizerConfig(), "with_optimizer": True}
    ModelSetup(**whole)
    for changes in ({"checkpoint": None}, {"optimizer": None}, {"new_head": True}):
        with pytest.raises(UserError, match="with_optimizer=True takes the optimizer's states from a checkpoint"):
            ModelSetup(**{**whole, **changes})


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        ({"dtype": "float64"}, {}, "model 'teacher' follows 'student' but has dtype float64, not float32"),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, "with eta=0.001 in bfloat16, where changes below 1/256"),
    ],
)
def test_a_model_that_follows_has_a_dtype_in_which_it_can(
    teacher: dict[str, Any], student: dict[str, Any], message: str
) -> None:
    follows = Follow("student", eta=0.001)
    models = {
        "student": ModelSetup(optimizer=OptimizerConfig(), **student),
        "teacher": ModelSetup(follows=follows, **teacher),
    }
    with pytest.raises(UserError, match=re.escape(message)):
        _ = ResolvedExperiment(dataclasses.replace(Small(), models=models)).setups
