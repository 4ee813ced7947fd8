"""Hyperparameters of PPO, and the settings of its six calls."""

from dataclasses import dataclass, field
from typing import ClassVar

from realhf.algorithms.choices import KLController, KLEstimator, check_choice
from realhf.algorithms.options import PolicyOptions, check_dual_clip
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.architecture.decoding import GraphLife
from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_ranges
from realhf.dataflow.interface import InterfaceConfig

RANGES = {
    "gamma": Range("gamma", 0, 1),
    "lam": Range("lam", 0, 1),
    "kl_coef": Range("kl_coef", 0, 1e6),
    "kl_target": Range("kl_target", 1e-9, 1e6),
    "kl_horizon": Range("kl_horizon", 1, 1e12, "samples"),
    "policy_clip": Range("policy_clip", 1e-6, 1e6),
    "value_clip": Range("value_clip (0: none)", 0, 1e6),
    "value_decay": Range("value_decay", 0, 1 - 1e-9),
    "max_kl": Range("max_kl", 1e-9, 1e6),
    "reward_mean": Range("reward_mean", -1e9, 1e9),
    "reward_std": Range("reward_std", 1e-9, 1e9),
    "reward_clip": Range("reward_clip", 1e-9, 1e9),
}


@dataclass(frozen=True, kw_only=True)
class PPOHyperparameters(PolicyOptions):
    """The settings that PPO's calls share, with the options of rollouts.

    The reward of a response is (score - reward_mean) / reward_std, clipped to +-reward_clip, at
    its last token, and -kl_coef * log(policy / reference) at every token.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.05
    """With `kl_controller` "adaptive" the coefficient of the first step."""
    kl_estimator: KLEstimator = "k1"
    kl_controller: KLController = "fixed"
    """"adaptive" raises the coefficient where the divergence of a response from the reference (the sum over its tokens)
    is above `kl_target`, and lowers it where it is below, by at most 20 % in `kl_horizon` samples."""
    kl_target: float = 6.0
    kl_horizon: float = 10_000
    policy_clip: float = 0.2
    dual_clip: float = 0.0
    """Bounds the loss of tokens with a negative advantage by this multiple of it; above 1, or 0 for no bound."""
    value_clip: float = 0.2
    """0: values are not kept near those of the rollouts."""
    normalise_values: bool = False
    """The critic learns returns in units of their running mean and deviation; its outputs are turned back into returns
    before advantages are estimated from them."""
    value_decay: float = 0.99
    """How slowly the running mean and deviation of the returns change."""
    whiten_advantages: bool = True
    max_kl: float | None = None
    """Training on a step's rollouts ends after the mini-batch in which the policy was further than this from the one
    that drew them (mean over tokens of k3); Spinning Up has 1.5 times its target, 0.015. None: it never does."""
    reward_mean: float = 0.0
    reward_std: float = 1.0
    reward_clip: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(vars(self), RANGES)
        check_choice("kl_estimator", self.kl_estimator, KLEstimator)
        check_choice("kl_controller", self.kl_controller, KLController)
        check_dual_clip(self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class PPOPtx(PPOHyperparameters):
    """PPO's settings, and the weight of the examples that the policy learns beside its rollouts.

    Source: Ouyang et al., "Training language models to follow instructions" (2022), equation 2; their gamma is 27.8, on
    pretraining text.
    """

    ptx_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(vars(self), {"ptx_coef": Range("ptx_coef", 0, 1e6)})


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

    def __post_init__(self) -> None:
        if self.ppo.mask_truncated or self.ppo.importance_correction != "none":
            raise UserError(
                "mask_truncated and importance_correction leave out or weigh samples, which the calls of scripts do "
                "and those of a list of calls do not; write PPO as a script, or set them to false and none"
            )

    @property
    def epochs(self) -> int:
        return self.ppo.epochs

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
    def decode_graphs(self) -> GraphLife | None:
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

    @property
    def epochs(self) -> int:
        return self.ppo.epochs


ppo_advantages = tensor_function("realhf.algorithms.ppo.functions:ppo_advantages")

_policy = loss_function("realhf.algorithms.ppo.functions:ppo_policy")
_policy_with_entropy = loss_function("realhf.algorithms.ppo.functions:ppo_policy_with_entropy")
ppo_value = loss_function("realhf.algorithms.ppo.functions:ppo_value")


def ppo_policy(ppo: PPOHyperparameters) -> BoundLoss:
    """The clipped surrogate, with the entropy where it has a coefficient: entropies take a pass over the logits."""
    return (_policy_with_entropy if ppo.entropy_coef else _policy)(ppo)
