"""GRPO on a model given by its size, with random weights: for tests of the memory that it takes.

Four prompts, four responses to each, all of full length; a rule gives the reward. `--size 0.5B` has the architecture
of Qwen2.5-0.5B. Nothing is learned that anybody wants: what a step takes does not depend on it.
"""

import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.api import (
    ARCHITECTURES,
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    DecoderConfig,
    DType,
    Generate,
    InterfaceConfig,
    Logprobs,
    ModelFunctionCallDef,
    ModelSetup,
    OptimizerConfig,
    auto,
)
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset

Size = Literal["4M", "34M", "0.5B"]
SIZES: dict[str, DecoderConfig] = {
    "4M": DecoderConfig(
        hidden_size=256, intermediate_size=688, num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=2048
    ),
    "34M": DecoderConfig(
        hidden_size=512, intermediate_size=1376, num_layers=10, num_heads=8, num_kv_heads=8, vocab_size=2048
    ),
    "0.5B": ARCHITECTURES["qwen2.5-0.5b"],
}
PROMPT_TOKENS, NEW_TOKENS = 16, 32
PROMPTS, GROUP = 4, 4  # and responses to each


@dataclass(frozen=True, kw_only=True)
class GRPOActor(InterfaceConfig):
    """TRAIN_STEP on `prompt`, `seq`, `logprob`, `ref_logprob`: GRPO with a rule for a reward.

    Statistics: `reward_mean`, `clip_fraction`, `loss`, `grad_norm`, `lr`. Source: Shao et al., "DeepSeekMath" (2024),
    section 4.1.
    """

    implementation: ClassVar[str] = "memory_job_interface:GRPOActorInterface"

    kl_coef: float = 0.04
    policy_clip: float = 0.2


@auto(batch_size=PROMPTS * GROUP)
@dataclass(frozen=True, kw_only=True)
class MemoryJob:
    size: Size = "4M"
    dtype: DType = "bfloat16"
    seed: int = 0
    steps: int = 3
    rollout: PPOHyperparameters = field(
        # No response ends early.
        default_factory=lambda: PPOHyperparameters(
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token=sort_task.EOS_TOKEN,
            samples_per_prompt=GROUP,
        )
    )
    data_dir: str = "runs/real-size-data"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        model = SIZES[self.size]
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type=model,
                interface_type=GENERATE,
                interface_impl=Generate.by(self.rollout),
                input_data=["prompt"],
                output_data=["seq", "logprob"],
            ),
            ModelFunctionCallDef(
                model_name="reference",
                model_type=model,
                interface_type=INFERENCE,
                interface_impl=Logprobs(),
                input_data=["prompt", "seq"],
                output_data=["ref_logprob"],
            ),
            ModelFunctionCallDef(
                model_name="actor",
                model_type=model,
                interface_type=TRAIN_STEP,
                interface_impl=GRPOActor(),
                input_data=["prompt", "seq", "logprob", "ref_logprob"],
            ),
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        return {
            "actor": ModelSetup(optimizer=OptimizerConfig(lr=1e-5), dtype=self.dtype),
            "reference": ModelSetup(dtype=self.dtype),
        }

    @property
    def dataset(self) -> PromptDataset:
        folder = Path(self.data_dir)
        if not (folder / "prompts.jsonl").is_file():
            _write(folder)
        return PromptDataset(
            path=str(folder / "prompts.jsonl"),
            tokenizer=str(folder / "tokenizer.json"),
            max_prompt_tokens=PROMPT_TOKENS,
        )


def _write(folder: Path) -> None:
    """A prompt for each response of a step, should groups have one; each begins with a letter of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    sort_task.make_tokenizer().save(str(folder / "tokenizer.json"))
    letters = itertools.cycle("realhf")
    prompts = [first + "".join(itertools.islice(letters, PROMPT_TOKENS - 2)) for first in "abcdefghijklmnop"]
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    unfinished = folder / f".prompts-{os.getpid()}"
    unfinished.write_text("".join(lines))
    unfinished.rename(folder / "prompts.jsonl")
