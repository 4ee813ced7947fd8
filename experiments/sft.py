"""Supervised fine-tuning on the sorting task: of a tiny model from random weights, or of a checkpoint."""

from dataclasses import dataclass

from realhf.algorithms.sft.config import sft_loss
from realhf.api import (
    GENERATE,
    TRAIN_STEP,
    DecoderConfig,
    DType,
    Evaluation,
    ModelFunctionCallDef,
    ModelSetup,
    ModelSource,
    OptimizerConfig,
    SampledAccuracy,
    Update,
    auto,
    model_source,
)
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset, SFTDataset


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class SFTExperiment:
    """One model, one call: train_step.

    `model` (the directory of a run, or a Hugging Face one) is where it starts; empty: the shape `architecture` and
    random weights. `with_optimizer` takes the optimizer's states of a run as well.
    """

    seed: int = 0
    steps: int = 400
    batch_size: int = 128
    architecture: DecoderConfig = sort_task.SORT_MODEL
    dtype: DType = "float32"
    model: str = ""
    with_optimizer: bool = False
    lr: float = 1e-3
    warmup_steps: int = 30
    weight_decay: float = 0.01
    data_dir: str = "runs/data"
    evaluate: bool = True

    @property
    def _start(self) -> ModelSource:
        return model_source(self.model, self.architecture)

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return [
            ModelFunctionCallDef(
                model_name="sft",
                model_type=self._start.architecture,
                interface_type=TRAIN_STEP,
                interface_impl=Update(sft_loss(), rows="examples"),
                input_data=["tokens", "prompt_length"],
            )
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        optimizer = OptimizerConfig(lr=self.lr, warmup_steps=self.warmup_steps, weight_decay=self.weight_decay)
        setup = ModelSetup(
            checkpoint=self._start.checkpoint, with_optimizer=self.with_optimizer, optimizer=optimizer, dtype=self.dtype
        )
        return {"sft": setup}

    @property
    def dataset(self) -> SFTDataset:
        data = sort_task.ensure(self.data_dir)
        return SFTDataset(
            path=str(data / "sft.jsonl"),
            tokenizer=str(data / "tokenizer.json"),
            max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
        )

    @property
    def evaluation(self) -> Evaluation | None:
        if not self.evaluate:
            return None
        data = sort_task.ensure(self.data_dir)
        return Evaluation(
            rpcs=[
                ModelFunctionCallDef(
                    name="sft_accuracy",
                    model_name="sft",
                    model_type=self._start.architecture,
                    interface_type=GENERATE,
                    interface_impl=SampledAccuracy(
                        max_new_tokens=sort_task.MAX_NEW_TOKENS,
                        eos_token=sort_task.EOS_TOKEN,
                        tokenizer=str(data / "tokenizer.json"),
                    ),
                    input_data=["prompt", "answer"],
                )
            ],
            dataset=PromptDataset(
                path=str(data / "evaluation.jsonl"),
                tokenizer=str(data / "tokenizer.json"),
                max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
                with_answer=True,
            ),
            batch_size=128,
        )
