"""A reward model from preference pairs; half of the rejected answers are the fine-tuned model's own mistakes."""

from dataclasses import dataclass
from functools import partial

from realhf.algorithms.reward.config import PairLoss, pairwise_loss, sampled_pairwise_loss, with_samples
from realhf.api import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    DecoderConfig,
    DType,
    Evaluation,
    Generate,
    Measure,
    ModelFunctionCallDef,
    ModelSetup,
    ModelSource,
    OptimizerConfig,
    Score,
    Update,
    auto,
    inputs,
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
    def _judge(self) -> DecoderConfig:
        return self._start.architecture.with_head("scalar")

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        loss = sampled_pairwise_loss(PairLoss(score_square_coef=self.score_square_coef))
        return [
            self._sample_call("sft_generate"),
            ModelFunctionCallDef(
                model_name="reward",
                model_type=self._judge,
                interface_type=TRAIN_STEP,
                interface_impl=Update(loss, batch=with_samples(inputs()), rows="pairs"),
                input_data=["prompt", "chosen", "rejected", "sample"],
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
        measure = Measure(pairwise_loss(PairLoss()), rows="pairs")
        score = Score(batch=inputs(seq="sample"), statistics=("sample_score", "sample_score_square"))
        reward = partial(ModelFunctionCallDef, model_name="reward", model_type=self._judge, interface_type=INFERENCE)
        return Evaluation(
            rpcs=[
                self._sample_call("sft_held_out"),
                reward(name="held_out", interface_impl=measure, input_data=["prompt", "chosen", "rejected"]),
                reward(name="samples", interface_impl=score, input_data=["sample"]),
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
            interface_impl=Generate(
                max_new_tokens=sort_task.MAX_NEW_TOKENS,
                eos_token=sort_task.EOS_TOKEN,
                outputs=("sample",),
                statistic="response_length",
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
