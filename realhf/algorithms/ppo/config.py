"""Hyperparameters of PPO, its tensor function and its losses."""

from dataclasses import dataclass

from realhf.algorithms.choices import KLController, KLEstimator, check_choice
from realhf.algorithms.options import PolicyOptions, check_dual_clip
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.base.numbers import Range, check_ranges

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


ppo_advantages = tensor_function("realhf.algorithms.ppo.functions:ppo_advantages")

_policy = loss_function("realhf.algorithms.ppo.functions:ppo_policy")
_policy_with_entropy = loss_function("realhf.algorithms.ppo.functions:ppo_policy_with_entropy")
ppo_value = loss_function("realhf.algorithms.ppo.functions:ppo_value")


def ppo_policy(ppo: PPOHyperparameters) -> BoundLoss:
    """The clipped surrogate, with the entropy where it has a coefficient: entropies take a pass over the logits."""
    return (_policy_with_entropy if ppo.entropy_coef else _policy)(ppo)
