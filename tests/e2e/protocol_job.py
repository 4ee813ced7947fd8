"""An actor that answers, and a rule that scores the answers under several protocols: for `test_protocols.py`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from realhf.api import (
    ALL_TO_ALL,
    GENERATE,
    INFERENCE,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D_PP_AS_DP,
    THREE_D_PROTO,
    Division,
    Generate,
    InterfaceConfig,
    Layout,
    ModelFunctionCallDef,
    ModelSetup,
    TransferProtocol,
    auto,
)
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset

TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4)


def ends(layout: Layout) -> tuple[int, ...]:
    return layout.mesh.devices[-1], layout.mesh.devices[0]


ENDS = TransferProtocol(
    name="ENDS", distribute=lambda layout: Division(2, dict(zip(ends(layout), (0, 1), strict=True))), collect=ends
)
"""The first half of a batch for the last device, the second half for the first one, nothing for the others."""

SCORING = {"usual": THREE_D_PROTO, "stages": THREE_D_PP_AS_DP, "all": ALL_TO_ALL, "first": RANK_ZERO, "ends": ENDS}


@dataclass(frozen=True, kw_only=True)
class TokenScore(InterfaceConfig):
    """INFERENCE: `output` [1] of `seq`, the mean of its tokens' sines, less the mean sum of the tokens of a sample.

    Statistics: `OUTPUT_tokens`, that mean.
    """

    implementation: ClassVar[str] = "protocol_job_interface:TokenScoreInterface"
    uses_model: ClassVar[bool] = False

    output: str


@dataclass(frozen=True, kw_only=True)
class Agreement(InterfaceConfig):
    """INFERENCE. Statistics: `disagreements`, of samples whose scores are not all the same."""

    implementation: ClassVar[str] = "protocol_job_interface:AgreementInterface"
    uses_model: ClassVar[bool] = False


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class ProtocolJob:
    seed: int = 0
    steps: int = 1
    data_dir: str = "runs/data"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        judge = {"model_name": "judge", "model_type": TINY, "interface_type": INFERENCE}
        rollout = Generate(max_new_tokens=6, eos_token=sort_task.EOS_TOKEN)
        scores = [f"score_{name}" for name in SCORING]
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type=TINY,
                interface_type=GENERATE,
                interface_impl=rollout,
                input_data=["prompt"],
                output_data=["seq"],
            ),
            *(
                ModelFunctionCallDef(
                    **judge,
                    name=name,
                    interface_impl=TokenScore(output=f"score_{name}"),
                    input_data=["seq"],
                    output_data=[f"score_{name}"],
                    protocol=protocol,
                )
                for name, protocol in SCORING.items()
            ),
            # Everybody looks at everything: there is no one value of an output, but statistics are means.
            ModelFunctionCallDef(
                **judge, name="everybody", interface_impl=Agreement(), input_data=scores, protocol=ONE_TO_ALL
            ),
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        return {"actor": ModelSetup(), "judge": ModelSetup()}

    @property
    def dataset(self) -> PromptDataset:
        data = sort_task.ensure(self.data_dir)
        return PromptDataset(
            path=str(data / "prompts.jsonl"),
            tokenizer=str(data / "tokenizer.json"),
            max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
        )
