"""An actor that learns what a copy of it, some steps old, answers: for `test_staleness.py`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from realhf.algorithms.sft.config import sft_loss
from realhf.api import (
    GENERATE,
    TRAIN_STEP,
    Follow,
    InterfaceConfig,
    ModelFunctionCallDef,
    ModelSetup,
    OptimizerConfig,
    Update,
    auto,
)
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset

TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4)
LR, NEW_TOKENS = 1e-2, 6


@dataclass(frozen=True, kw_only=True)
class Answers(InterfaceConfig):
    """`prompt` -> the most likely `tokens` behind it, and `prompt_length`; says in `meeting` that it has begun."""

    implementation: ClassVar[str] = "stale_job_interface:AnswersInterface"

    max_new_tokens: int = NEW_TOKENS
    meeting: str = ""


@dataclass(frozen=True, kw_only=True)
class MeetingSFT(Update):
    """Supervised fine-tuning; with a `meeting`, a folder, a step only ends when answers for that of `ahead` steps later
    have begun."""

    implementation: ClassVar[str] = "stale_job_interface:MeetingSFTInterface"

    meeting: str = ""
    ahead: int
    steps: int


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class StaleJob:
    seed: int = 0
    steps: int = 5
    staleness: int = 2
    meeting: str = ""
    data_dir: str = "runs/data"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return [
            ModelFunctionCallDef(
                model_name="rollout",
                model_type=TINY,
                interface_type=GENERATE,
                interface_impl=Answers(meeting=self.meeting),
                input_data=["prompt"],
                output_data=["tokens", "prompt_length", "weights_version"],
            ),
            ModelFunctionCallDef(
                model_name="actor",
                model_type=TINY,
                interface_type=TRAIN_STEP,
                interface_impl=MeetingSFT(
                    sft_loss(), rows="examples", meeting=self.meeting, ahead=self.staleness, steps=self.steps
                ),
                input_data=["tokens", "prompt_length"],
            ),
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        follows = Follow("actor", eta=1.0, staleness=self.staleness)
        optimizer = OptimizerConfig(lr=LR, schedule="constant")
        return {
            "rollout": ModelSetup(dtype="float64", follows=follows),
            "actor": ModelSetup(dtype="float64", optimizer=optimizer),
        }

    @property
    def dataset(self) -> PromptDataset:
        data = sort_task.ensure(self.data_dir)
        return PromptDataset(
            path=str(data / "prompts.jsonl"),
            tokenizer=str(data / "tokenizer.json"),
            max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
        )
