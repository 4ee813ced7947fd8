"""Hyperparameters of PPO, and the settings of its six calls."""

from dataclasses import dataclass, field
from typing import ClassVar

from realhf.api.generation import DecodeGraphs, GenerationOptions
from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_ranges
from realhf.dataflow.interface import InterfaceConfig

RANGES = {
    "gamma": Range("gamma", 0, 1),
    "lam": Range("lam", 0, 1),
    "kl_coef": Range("kl_coef", 0, 1e6),
    "policy_clip": Range("policy_clip", 1e-6, 1e6),
    "value_clip": Range("value_clip", 1e-6, 1e6),
    "reward_mean": Range("reward_mean", -1e9, 1e9),
    "reward_std": Range("reward_std", 1e-9, 1e9),
    "reward_clip": Range("reward_clip", 1e-9, 1e9),
}


@dataclass(frozen=True, kw_only=True)
class PPOHyperparameters(GenerationOptions):
    """The settings that PPO's calls share, with the options of rollouts.

    The reward of a response is (score - reward_mean) / reward_std, clipped to +-reward_clip, at
    its last token, and -kl_coef * log(policy / reference) at every token.
    """

    max_new_tokens: int = 9
    eos_token: int = 2
    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.05
    policy_clip: float = 0.2
    value_clip: float = 0.2
    whiten_advantages: bool = True
    reward_mean: float = 0.0
    reward_std: float = 1.0
    reward_clip: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise UserError("temperature=0 draws no samples to learn from; PPO needs a temperature above 0")
        check_ranges(vars(self), RANGES)


@dataclass(frozen=True, kw_only=True)
class PPOActor(InterfaceConfig):
    """GENERATE: `prompt` -> `seq`, `logprob` and, if listed, `margin`.

    TRAIN_STEP on `prompt`, `seq`, `logprob`, `ref_logprob`, `reward`, `value`.
    Statistics of training: `reward_mean` (of the scores as the reward model gave them), `kl` (mean
    over tokens of log(policy / reference)), `kl_per_sequence` (its sum over a response),
    `response_length`, `entropy` (sampled), `clip_fraction`, `actor_loss`, `actor_grad_norm`, `actor_lr`.
    """

    implementation: ClassVar[str] = "realhf.algorithms.ppo.interface:PPOActorInterface"
    recordable: ClassVar[tuple[str, ...]] = ("seq", "logprob", "margin", "logits")

    ppo: PPOHyperparameters = field(default_factory=PPOHyperparameters)

    @property
    def max_new_tokens(self) -> int:
        return self.ppo.max_new_tokens

    @property
    def samples_per_prompt(self) -> int:
        return self.ppo.samples_per_prompt

    @property
    def kv_cache_tokens(self) -> int | None:
        return self.ppo.kv_cache_tokens

    @property
    def decode_graphs(self) -> DecodeGraphs:
        return self.ppo.decode_graphs


@dataclass(frozen=True, kw_only=True)
class PPOReference(InterfaceConfig):
    """INFERENCE: `prompt`, `seq` -> `ref_logprob` [response], under the temperature of the rollouts."""

    implementation: ClassVar[str] = "realhf.algorithms.ppo.interface:PPOReferenceInterface"

    ppo: PPOHyperparameters = field(default_factory=PPOHyperparameters)


@dataclass(frozen=True, kw_only=True)
class PPOCritic(InterfaceConfig):
    """INFERENCE: `prompt`, `seq` -> `value` [response], of the states that predict the response's tokens.

    TRAIN_STEP on `prompt`, `seq`, `logprob`, `ref_logprob`, `reward`, `value`.
    Statistics of training: `critic_loss`, `critic_grad_norm`, `critic_lr`, `value_clip_fraction`,
    `value_mean`, `return_mean`, `explained_variance` (of the returns, by the values of the rollout).
    """

    implementation: ClassVar[str] = "realhf.algorithms.ppo.interface:PPOCriticInterface"

    ppo: PPOHyperparameters = field(default_factory=PPOHyperparameters)
