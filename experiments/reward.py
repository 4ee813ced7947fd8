"""A reward model from preference pairs; half of the rejected answers are the fine-tuned model's own mistakes."""

from dataclasses import dataclass

from realhf.algorithms.reward.config import PairwiseReward
from realhf.algorithms.rollout.config import Rollout
from realhf.api import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    DecoderConfig,
    DType,
    Evaluation,
    ModelFunctionCallDef,
    ModelSetup,
    ModelSource,
    OptimizerConfig,
    auto,
    model_source,
)
from realhf.data import sort_task
from realhf.data.datasets import PreferenceDataset


@auto(batch_size=64)
@dataclass(frozen=True, kw_only=True)
class RewardExperiment:
    """Two models: `sft` draws samples, `reward` (the same trunk under a scalar head) learns.

    `model` is the run directory of sft.py, or a Hugging Face one; without it both have the shape `architecture` and
    random weights. The evaluation's `sample_score` and `sample_score_square` are what PPO's
    `reward_mean` and `reward_std` come from.
    """

    seed: int = 0
    steps: int = 150
    batch_size: int = 64
    architecture: DecoderConfig = sort_task.SORT_MODEL
    dtype: DType = "float32"
    model: str = ""
    lr: float = 3e-4
    warmup_steps: int = 10
    weight_decay: float = 0.01
    score_square_coef: float = 0.001
    data_dir: str = "runs/data"
    evaluate: bool = True

    @property
    def _start(self) -> ModelSource:
        return model_source(self.model, self.architecture)

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return [
            self._sample_call("sft_generate"),
            ModelFunctionCallDef(
                model_name="reward",
                model_type=self._start.architecture.with_head("scalar"),
                interface_type=TRAIN_STEP,
                interface_impl=PairwiseReward(score_square_coef=self.score_square_coef),
                input_data=["chosen", "rejected", "sample"],
            ),
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        checkpoint = self._start.checkpoint
        optimizer = OptimizerConfig(lr=self.lr, warmup_steps=self.warmup_steps, weight_decay=self.weight_decay)
        return {
            "sft": ModelSetup(checkpoint=checkpoint, dtype=self.dtype),
            "reward": ModelSetup(checkpoint=checkpoint, new_head=True, optimizer=optimizer, dtype=self.dtype),
        }

    @property
    def dataset(self) -> PreferenceDataset:
        return self._preferences("preferences.jsonl")

    @property
    def evaluation(self) -> Evaluation | None:
        if not self.evaluate:
            return None
        return Evaluation(
            rpcs=[
                self._sample_call("sft_held_out"),
                ModelFunctionCallDef(
                    name="reward_held_out",
                    model_name="reward",
                    model_type=self._start.architecture.with_head("scalar"),
                    interface_type=INFERENCE,
                    interface_impl=PairwiseReward(),
                    input_data=["chosen", "rejected", "sample"],
                ),
            ],
            dataset=self._preferences("preferences_held_out.jsonl"),
            batch_size=80,
        )

    def _sample_call(self, name: str) -> ModelFunctionCallDef:
        return ModelFunctionCallDef(
            name=name,
            model_name="sft",
            model_type=self._start.architecture,
            interface_type=GENERATE,
            interface_impl=Rollout(
                max_new_tokens=sort_task.MAX_NEW_TOKENS, eos_token=sort_task.EOS_TOKEN, sequence_key="sample"
            ),
            input_data=["prompt"],
            output_data=["sample"],
        )

    def _preferences(self, file: str) -> PreferenceDataset:
        data = sort_task.ensure(self.data_dir)
        return PreferenceDataset(
            path=str(data / file),
            tokenizer=str(data / "tokenizer.json"),
            max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
        )
