"""An interface of the user's own: found when a worker starts, checked when it is run, and told of in few frames."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy
from realhf.algorithms.script.update import UpdateInterface
from realhf.api import Update, inputs
from realhf.base.errors import UserError
from realhf.dataflow.graph import TRAIN_STEP, WEIGHTS_VERSION
from realhf.dataflow.interface import InterfaceConfig
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult
from realhf.engine.returned import InterfaceError, check_columns
from realhf.models.checkpoint import CheckpointReader
from realhf.worker.call_context import BatchShare, CallContext
from realhf.worker.interfaces import complete_schedule, explain, load_interface, run_interface
from tests.unit.api.calls import call

MINI_BATCHES = [Batch((3,), {"prompt": [torch.ones(2)]}), Batch((8,), {"prompt": [torch.ones(1)]})]


def judge(implementation: str = "", uses_model: bool = True, **fields: Any) -> Any:
    place, uses = implementation, uses_model

    class Judge(InterfaceConfig):
        implementation: ClassVar[str] = place
        uses_model: ClassVar[bool] = uses

    return call("judge", interface_impl=Judge(), **{"outputs": ["reward"], **fields})


def context(holds_outputs: bool = True) -> CallContext:
    return CallContext(seed=0, step=0, share=BatchShare(holds_outputs, True, None), batch_size=2)


def run(interface: Any, of: Any = None, holds_outputs: bool = True) -> CallResult:
    model: Any = "the model"
    return run_interface(interface, of or judge(), model, MINI_BATCHES, context(holds_outputs))


class Judge:
    """Notes what it is called with, and returns what it is made with."""

    def __init__(self, result: Any):
        self.result, self.given = result, ()

    def inference(self, *given: Any) -> Any:
        self.given = given
        return self.result

    train_step = inference


PLACE = f"judge_inference: Judge.inference ({__file__}, line {Judge.inference.__code__.co_firstlineno}): "


def test_steps_that_a_training_left_out_count_in_the_schedule() -> None:
    class Twice(InterfaceConfig):
        epochs = 2

    train = call("actor", TRAIN_STEP, mini_batches=3, interface_impl=Twice())
    model: Any = SimpleNamespace(optimizer_steps=16)
    complete_schedule(train, model, 18)
    assert model.optimizer_steps == 18
    complete_schedule(train, model, 18)
    model.optimizer_steps = 20
    message = r"actor_train_step: its train_step made 8 optimizer steps, more than mini_batches=3 x epochs=2; .* Twice"
    with pytest.raises(InterfaceError, match=message):
        complete_schedule(train, model, 18)


def test_an_inference_gets_one_batch_and_a_train_step_its_mini_batches() -> None:
    interface = Judge(CallResult(outputs={"reward": [torch.ones(1)] * 2}))
    result = run(interface, judge(outputs=["reward", WEIGHTS_VERSION]))
    assert list(result.outputs) == ["reward"], "the version of the weights is the worker's to add"
    model, batch, _ = interface.given
    assert (model, batch.ids) == ("the model", (3, 8))
    run(interface, judge(interface_type=TRAIN_STEP, outputs=[]))
    assert interface.given[1] is MINI_BATCHES


def test_a_value_that_is_not_a_number_is_found_at_the_call_that_made_it() -> None:
    interface = Judge(CallResult(outputs={"reward": [torch.ones(1), torch.tensor([float("nan")])]}))
    with pytest.raises(InterfaceError) as error:
        run(interface)
    assert str(error.value) == (
        f"{PLACE}output 'reward', sample 8, has nan at [0], must be finite; look at the weights it comes from (and the "
        "learning rate that made them), at divisions and logarithms"
    )


@pytest.mark.parametrize("holds_outputs", [True, False])
def test_a_forgotten_return_is_found_on_every_rank(holds_outputs: bool) -> None:
    with pytest.raises(InterfaceError, match=re.escape(f"{PLACE}the result is None, must be a CallResult; return")):
        run(Judge(None), holds_outputs=holds_outputs)


def test_a_callback_is_told_of_with_the_call() -> None:
    class Scorer:
        def inference(self, model: Any, batch: Batch, context: CallContext) -> Any:
            return check_columns({"reward": []}, batch.ids, finite=True)  # as `model.forward` does

    with pytest.raises(InterfaceError) as error:
        run(Scorer())
    text = explain(error.value)
    assert re.search(
        r"judge_inference: test_a_callback.*Scorer\.inference \(.*\): column 'reward' of the function given to model\."
        r"forward has 0 tensors for 2 samples",
        text,
    )
    assert "return check_columns(" in text, "the user's own line"
    assert "raise InterfaceError" not in text, "the package's"


SOURCE = """
class Mine:
    def __init__(self, config):
        self.config = config

    def inference(self, model, batch, context):
        try:
            return model.forward()
        except RuntimeError as error:
            raise ValueError("no score") from error
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's, `mine_of_the_user`."""
    path = tmp_path / "mine_of_the_user.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)  # that of another test
    return path


def test_an_exception_is_told_with_the_users_frames_alone(module: Path) -> None:
    of = judge("mine_of_the_user:Mine", uses_model=False)
    interface = load_interface(of)
    with pytest.raises(ValueError, match="no score") as error:
        run(interface, of)
    lines = explain(error.value).splitlines()
    assert [line for line in lines if line.startswith('  File "') and __file__ not in line] == [
        f'  File "{module}", line 8, in inference',
        f'  File "{module}", line 10, in inference',
    ]
    assert lines[-1] == "ValueError: no score"
    assert any(line.startswith("RuntimeError: judge_inference: the interface has uses_model=False") for line in lines)


def test_a_reward_of_another_shape_is_told_with_call_key_shape_and_remedy() -> None:
    """What a call of another's made as `reward`, where an algorithm reads it."""
    tokens = [torch.zeros(2), torch.zeros(1)]
    given = dict.fromkeys(("logprob", "ref_logprob", "value"), tokens)
    batch = Batch((0, 1), {**given, "reward": [torch.zeros(3), torch.zeros(1)]})
    step, ppo = inputs(), PPOHyperparameters()
    update = Update(ppo_policy(ppo), batch=ppo_advantages(step, step, step, step, ppo))
    train = call("actor", interface_type=TRAIN_STEP, interface_impl=update, outputs=[])
    model: Any = "the model"
    with pytest.raises(InterfaceError) as error:
        run_interface(UpdateInterface(update), train, model, [batch], context())
    assert re.fullmatch(
        r"actor_train_step: UpdateInterface.train_step \(.*\): 'reward' of sample 0 has the shape \[3\], and its "
        r"response 2 tokens; give \[1\], the reward of the whole response, or \[2\], one for each of its tokens .*",
        str(error.value),
    )


def test_an_exception_without_a_frame_of_the_users_is_told_whole() -> None:
    with pytest.raises(AttributeError) as error:
        run_interface(None, judge(), None, MINI_BATCHES, context())  # type: ignore[arg-type]
    error.value.__traceback__ = error.tb.tb_next  # without this test's frame
    assert re.search(
        r'^  File ".*realhf/worker/interfaces.py", line \d+, in run_interface$', explain(error.value), re.M
    )


def test_a_bad_checkpoint_is_told_by_its_text_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        CheckpointReader(tmp_path / "nowhere")
    error.value.__traceback__ = error.tb.tb_next  # without this test's frame
    assert explain(error.value) == str(error.value)


def test_a_class_or_method_that_the_launcher_could_not_look_for(module: Path) -> None:
    with pytest.raises(InterfaceError) as error:
        load_interface(judge("mine_of_the_user:Min"))
    assert str(error.value) == (
        f"judge_inference: Judge is implemented by 'Min' in {module}, which has no such class; it has Mine; "
        "correct Judge.implementation"
    )
    with pytest.raises(InterfaceError) as error:
        load_interface(judge("mine_of_the_user:Mine", interface_type=TRAIN_STEP, outputs=[]))
    assert str(error.value) == (
        f"judge_train_step: Mine in {module} has no method train_step, which the call's interface_type needs; define it"
    )
    error.value.__traceback__ = error.tb.tb_next
    assert explain(error.value) == str(error.value), "which says where: frames of the package tell no more"
