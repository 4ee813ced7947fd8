"""A small job, in which one fault may happen to the weights of a model: for `test_weights.py`."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from realhf.algorithms.sft.config import sft_loss
from realhf.api import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    Generate,
    GenerationOptions,
    Logprobs,
    ModelFunctionCallDef,
    ModelSetup,
    OptimizerConfig,
    Update,
    auto,
)
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset

TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4)
Fault = Literal["", "bit in a copy", "move left out", "bit of one rank", "bit of the reference"]
AT_STEP = 1  # counted from 0


@dataclass(frozen=True, kw_only=True)
class FaultySFT(Update):
    """Supervised fine-tuning, with a fault in step `AT_STEP`."""

    implementation: ClassVar[str] = "weights_job_interface:FaultySFTInterface"

    fault: Fault


@dataclass(frozen=True, kw_only=True)
class FaultyLogprobs(Logprobs):
    implementation: ClassVar[str] = "weights_job_interface:FaultyLogprobsInterface"

    fault: Fault


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class WeightsJob:
    fault: Fault = ""
    seed: int = 0
    steps: int = 4
    dtype: Literal["float32", "float64"] = "float32"
    data_dir: str = "runs/data"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type=TINY,
                interface_type=GENERATE,
                interface_impl=Generate.by(GenerationOptions(max_new_tokens=6, eos_token=-1)),
                input_data=["prompt"],
                output_data=["seq", "logprob"],
            ),
            ModelFunctionCallDef(
                model_name="reference",
                model_type=TINY,
                interface_type=INFERENCE,
                interface_impl=FaultyLogprobs(fault=self.fault),
                input_data=["prompt", "seq"],
                output_data=["ref_logprob"],
            ),
            ModelFunctionCallDef(
                model_name="actor",
                model_type=TINY,
                interface_type=TRAIN_STEP,
                interface_impl=FaultySFT(sft_loss(), rows="rollout", fault=self.fault),
                input_data=["prompt", "seq"],
            ),
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        actor = ModelSetup(optimizer=OptimizerConfig(lr=1e-2), dtype=self.dtype)
        return {"actor": actor, "reference": ModelSetup(dtype=self.dtype)}

    @property
    def dataset(self) -> PromptDataset:
        data = sort_task.ensure(self.data_dir)
        return PromptDataset(
            path=str(data / "prompts.jsonl"),
            tokenizer=str(data / "tokenizer.json"),
            max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
        )
