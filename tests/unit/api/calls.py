"""Small calls and graphs for tests of the contracts."""

from collections.abc import Sequence
from typing import Any

from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig

TINY = DecoderConfig(hidden_size=32, intermediate_size=96, num_layers=4, num_heads=8, num_kv_heads=4, vocab_size=64)


class Nothing(InterfaceConfig):
    """An interface that no test here loads."""

    implementation = "tests.unit.api.calls:NothingInterface"


class Rule(InterfaceConfig):
    """One beside the devices."""

    implementation = "tests.unit.api.calls:NothingInterface"
    uses_model = False
    runs_beside = True


class NothingInterface:
    """What the launcher looks for."""

    def generate(self, model: Any, batch: Any, context: Any) -> None: ...

    inference = train_step = generate


def call(
    model_name: str,
    interface_type: Any = INFERENCE,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    **more: Any,
) -> ModelFunctionCallDef:
    given: dict[str, Any] = {"model_type": TINY, "interface_impl": Nothing(), **more}
    return ModelFunctionCallDef(
        model_name=model_name, interface_type=interface_type, input_data=inputs, output_data=outputs, **given
    )


def rule(name: str, inputs: Sequence[str] = (), outputs: Sequence[str] = (), **more: Any) -> ModelFunctionCallDef:
    given: dict[str, Any] = {"interface_type": INFERENCE, "interface_impl": Rule(), **more}
    return ModelFunctionCallDef(name=name, input_data=inputs, output_data=outputs, **given)


PPO_CALLS = (
    call("actor", TRAIN_STEP, ["seq", "logprob", "reward", "value"]),
    call("critic", TRAIN_STEP, ["seq", "reward", "value"]),
    call("critic", INFERENCE, ["seq"], ["value"]),
    call("reward", INFERENCE, ["seq"], ["reward"]),
    call("actor", GENERATE, ["prompt"], ["seq", "logprob"]),
)
"""PPO without a reference, the calls listed backwards."""


def ppo_graph() -> DataflowGraph:
    return DataflowGraph(PPO_CALLS, ["prompt"])


def ruled_graph() -> DataflowGraph:
    """The rewards are a rule's."""
    calls = [call for call in PPO_CALLS if call.model_name != "reward"]
    return DataflowGraph([*calls, rule("judge", ["seq"], ["reward"])], ["prompt"])
