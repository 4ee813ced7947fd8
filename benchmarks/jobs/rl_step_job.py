"""A GRPO and a PPO step on models given by their size, with random weights: for `benchmarks/rl_step.py`.

64 responses of exactly 64 tokens to prompts of exactly 32, four optimizer steps on 16 of them each, a reference model
that the KL divergence is taken from, and a rule for a reward.
"""

import json
import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy, ppo_value
from realhf.api import (
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
    Update,
    Values,
    auto,
    inputs,
)
from realhf.data.datasets import PromptDataset

Size = Literal["4M", "34M"]
Algorithm = Literal["grpo", "ppo"]
VOCABULARY = 2048
SIZES: dict[str, DecoderConfig] = {
    "4M": DecoderConfig(
        hidden_size=256, intermediate_size=688, num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=VOCABULARY
    ),
    "34M": DecoderConfig(
        hidden_size=512, intermediate_size=1376, num_layers=10, num_heads=8, num_kv_heads=8, vocab_size=VOCABULARY
    ),
}
BATCH, GROUP, MINI_BATCHES = 64, 8, 4
PROMPT_TOKENS, NEW_TOKENS = 32, 64
LEARNING_RATE = 1e-5
KL_COEF = 0.04
POLICY_CLIP = 0.2
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
FIRST_LETTER = 0x4E00  # the tokens behind the three special ones are so many characters from this one on


@dataclass(frozen=True, kw_only=True)
class RuleReward(InterfaceConfig):
    """INFERENCE: `prompt`, `seq` -> `reward` [1], the share of even tokens in the response."""

    implementation: ClassVar[str] = "rl_step_job_interface:RuleRewardInterface"
    uses_model: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class GRPOActor(InterfaceConfig):
    """TRAIN_STEP on `prompt`, `seq`, `logprob`, `ref_logprob`, `reward`.

    Statistics: `reward_mean`, `clip_fraction`, `loss`, `grad_norm`, `lr`. Source: Shao et al., "DeepSeekMath" (2024),
    section 4.1, with the mean over all tokens (Yu et al., "DAPO", 2025), as TRL has it by default.
    """

    implementation: ClassVar[str] = "rl_step_job_interface:GRPOActorInterface"

    kl_coef: float = KL_COEF
    policy_clip: float = POLICY_CLIP


@auto(batch_size=BATCH)
@dataclass(frozen=True, kw_only=True)
class RLStepJob:
    algorithm: Algorithm = "grpo"
    size: Size = "4M"
    dtype: DType = "float32"
    seed: int = 0
    steps: int = 6
    rollout: PPOHyperparameters = field(
        # No token ends a response.
        default_factory=lambda: PPOHyperparameters(
            max_new_tokens=NEW_TOKENS, eos_token=-1, kl_coef=KL_COEF, policy_clip=POLICY_CLIP
        )
    )
    data_dir: str = "runs/rl-step-data"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return self._grpo if self.algorithm == "grpo" else self._ppo

    @property
    def _grpo(self) -> list[ModelFunctionCallDef]:
        return [
            *self._rollout_calls,
            ModelFunctionCallDef(
                model_name="actor",
                model_type=SIZES[self.size],
                interface_type=TRAIN_STEP,
                interface_impl=GRPOActor(),
                input_data=["prompt", "seq", "logprob", "ref_logprob", "reward"],
                mini_batches=MINI_BATCHES,
            ),
        ]

    @property
    def _ppo(self) -> list[ModelFunctionCallDef]:
        actor, critic = SIZES[self.size], SIZES[self.size].with_head("scalar")
        columns = ["prompt", "seq", "logprob", "ref_logprob", "reward", "value"]
        step, ppo = inputs(), self.rollout
        batch = ppo_advantages(step, step, step, step, ppo)
        return [
            *self._rollout_calls,
            ModelFunctionCallDef(
                model_name="critic",
                model_type=critic,
                interface_type=INFERENCE,
                interface_impl=Values(),
                input_data=["prompt", "seq"],
                output_data=["value"],
            ),
            ModelFunctionCallDef(
                model_name="actor",
                model_type=actor,
                interface_type=TRAIN_STEP,
                interface_impl=Update(ppo_policy(ppo), batch=batch, prefix="actor"),
                input_data=columns,
                mini_batches=MINI_BATCHES,
            ),
            ModelFunctionCallDef(
                model_name="critic",
                model_type=critic,
                interface_type=TRAIN_STEP,
                interface_impl=Update(ppo_value(ppo), batch=batch, prefix="critic", reports=()),
                input_data=columns,
                mini_batches=MINI_BATCHES,
            ),
        ]

    @property
    def _rollout_calls(self) -> list[ModelFunctionCallDef]:
        """Generation, the reward, and the reference's log-probabilities."""
        model = SIZES[self.size]
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type=model,
                interface_type=GENERATE,
                interface_impl=Generate.by(self._options),
                input_data=["prompt"],
                output_data=["seq", "logprob"],
            ),
            ModelFunctionCallDef(
                name="reward",
                model_name="reference",
                model_type=model,
                interface_type=INFERENCE,
                interface_impl=RuleReward(),
                input_data=["prompt", "seq"],
                output_data=["reward"],
            ),
            ModelFunctionCallDef(
                model_name="reference",
                model_type=model,
                interface_type=INFERENCE,
                interface_impl=Logprobs(),
                input_data=["prompt", "seq"],
                output_data=["ref_logprob"],
            ),
        ]

    @property
    def _options(self) -> PPOHyperparameters:
        return replace(self.rollout, samples_per_prompt=GROUP if self.algorithm == "grpo" else 1)

    @property
    def models(self) -> dict[str, ModelSetup]:
        trained = ModelSetup(optimizer=OptimizerConfig(lr=LEARNING_RATE), dtype=self.dtype)
        critic = {} if self.algorithm == "grpo" else {"critic": trained}
        return {"actor": trained, "reference": ModelSetup(dtype=self.dtype), **critic}

    @property
    def dataset(self) -> PromptDataset:
        folder = ensure_data(Path(self.data_dir))
        return PromptDataset(
            path=str(folder / "prompts.jsonl"),
            tokenizer=str(folder / "tokenizer.json"),
            max_prompt_tokens=PROMPT_TOKENS,
        )


def ensure_data(folder: Path) -> Path:
    """The folder with `tokenizer.json` (one token a character) and `prompts.jsonl`; makes them where they lack."""
    if not (folder / "prompts.jsonl").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        letters = [chr(FIRST_LETTER + i) for i in range(VOCABULARY - 3)]
        vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *letters])}
        tokenizer = Tokenizer(WordLevel(vocabulary))
        tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
        tokenizer.save(str(folder / "tokenizer.json"))
        lines = [json.dumps({"prompt": "".join(rng.choices(letters, k=PROMPT_TOKENS))}) + "\n" for _ in range(256)]
        unfinished = folder / f".prompts-{os.getpid()}"
        unfinished.write_text("".join(lines))
        unfinished.rename(folder / "prompts.jsonl")
    return folder
