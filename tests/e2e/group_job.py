"""Several responses to each prompt, scored against each other: for `test_groups.py`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from realhf.api import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    DType,
    Evaluation,
    Generate,
    GenerationOptions,
    InterfaceConfig,
    ModelFunctionCallDef,
    ModelSetup,
    OptimizerConfig,
    auto,
)
from realhf.architecture.model import DecoderConfig
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset

SAMPLES = GenerationOptions(max_new_tokens=8, eos_token=sort_task.EOS_TOKEN, samples_per_prompt=4)
TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=4)


@dataclass(frozen=True, kw_only=True)
class Judge(InterfaceConfig):
    """INFERENCE: `prompt`, `seq` -> `reward` [1], the share of even tokens, and `advantage` [1], what a reward is above
    the mean of its group, over the group's standard deviation.

    Statistics: `deviation`, the mean of the groups' standard deviations, `prompts`, how many groups there are.
    """

    implementation: ClassVar[str] = "group_job_interface:JudgeInterface"
    uses_model: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Learner(InterfaceConfig):
    """TRAIN_STEP on `prompt`, `seq`, `logprob`, `advantage`: clipped policy loss, `epochs` times; it ends
    `early`, so many optimizer steps before the last."""

    implementation: ClassVar[str] = "group_job_interface:LearnerInterface"

    epochs: int = 1
    early: int = 0


@auto(batch_size=16)
@dataclass(frozen=True, kw_only=True)
class GroupJob:
    seed: int = 0
    steps: int = 2
    batch_size: int = 16
    mini_batches: int = 2
    epochs: int = 1
    early: int = 0
    dtype: DType = "float64"
    architecture: DecoderConfig = TINY
    rollout: GenerationOptions = SAMPLES
    evaluation_batch_size: int | None = None
    prompts: str | None = None
    max_prompt_tokens: int = sort_task.MAX_PROMPT_TOKENS
    data_dir: str = "runs/data"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return [
            *self._sampled,
            ModelFunctionCallDef(
                model_name="actor",
                model_type=self.architecture,
                interface_type=TRAIN_STEP,
                interface_impl=Learner(epochs=self.epochs, early=self.early),
                input_data=["prompt", "seq", "logprob", "advantage"],
                mini_batches=self.mini_batches,
            ),
        ]

    @property
    def _sampled(self) -> list[ModelFunctionCallDef]:
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type=self.architecture,
                interface_type=GENERATE,
                interface_impl=Generate.by(self.rollout),
                input_data=["prompt"],
                output_data=["seq", "logprob"],
            ),
            ModelFunctionCallDef(
                model_name="actor",
                model_type=self.architecture,
                interface_type=INFERENCE,
                interface_impl=Judge(),
                input_data=["prompt", "seq"],
                output_data=["reward", "advantage"],
            ),
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        return {"actor": ModelSetup(dtype=self.dtype, optimizer=OptimizerConfig(lr=1e-3, final_lr_ratio=0.0))}

    @property
    def dataset(self) -> PromptDataset:
        return self._dataset(self.prompts or str(sort_task.ensure(self.data_dir) / "prompts.jsonl"))

    @property
    def evaluation(self) -> Evaluation | None:
        if self.evaluation_batch_size is None:
            return None
        held_out = self._dataset(str(sort_task.ensure(self.data_dir) / "evaluation.jsonl"))
        return Evaluation(rpcs=self._sampled, dataset=held_out, batch_size=self.evaluation_batch_size)

    def _dataset(self, path: str) -> PromptDataset:
        tokenizer = str(sort_task.ensure(self.data_dir) / "tokenizer.json")
        return PromptDataset(path=path, tokenizer=tokenizer, max_prompt_tokens=self.max_prompt_tokens)
