"""Hyperparameters of PPO, its tensor function and its losses."""

from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.choices import KLController, KLEstimator
from realhf.algorithms.options import COEFFICIENT, PolicyOptions, policy_loss
from realhf.api.script.functions import loss_function, tensor_function
from realhf.base.errors import UserError
from realhf.base.options import ALGORITHM, Common, Option


@dataclass(frozen=True, kw_only=True)
class PPOHyperparameters(PolicyOptions):
    """The settings that PPO's calls share, with the options of rollouts.

    The reward of a response is (score - reward_mean) / reward_std, clipped to +-reward_clip, at
    its last token, and -kl_coef * log(policy / reference) at every token. Where its tokens have scores of their own,
    each is divided and clipped, and reward_mean is taken from the last one. With the `kl_controller` "adaptive" kl_coef
    rises where the divergence of a response from the reference (the sum over its tokens) is above `kl_target`, and
    falls where it is below. With `normalise_values` the critic's outputs are turned back into returns before advantages
    are estimated from them. `max_kl` is the mean over tokens of k3, looked at after each mini-batch; Spinning Up has
    1.5 times its target, 0.015.
    """

    HEADING = ALGORITHM

    gamma: Annotated[float, Option("discount of later rewards", range=(0, 1))] = 1.0
    lam: Annotated[float, Common("decay of generalised advantage estimation", range=(0, 1))] = 0.95
    kl_coef: Annotated[
        float, Common("coefficient of the divergence from the reference in the rewards", range=(0, 1e6))
    ] = 0.05
    kl_estimator: Annotated[KLEstimator, Option("estimator of that divergence")] = "k1"
    kl_controller: Annotated[
        KLController, Option("adaptive: kl_coef of the first step, then raised or lowered towards kl_target")
    ] = "fixed"
    kl_target: Annotated[
        float, Option("adaptive: divergence of a whole response that is aimed at", range=(1e-9, 1e6))
    ] = 6.0
    kl_horizon: Annotated[
        float,
        Option("adaptive: samples in which kl_coef changes by at most 20 %", range=(1, 1e12), unit="samples"),
    ] = 10_000
    policy_clip: Annotated[
        float, Common("the ratio to the policy that drew a token stays within 1 +- this", range=(1e-6, 1e6))
    ] = 0.2
    dual_clip: Annotated[
        float, Option("bound on the loss of bad tokens, a multiple of their advantage above 1 (0: none)")
    ] = 0.0
    value_clip: Annotated[
        float, Common("values stay within this distance from those of the rollouts (0: any)", range=(0, 1e6))
    ] = 0.2
    normalise_values: Annotated[
        bool, Option("the critic learns returns in units of their running mean and deviation")
    ] = False
    value_decay: Annotated[float, Option("decay of that running mean and deviation", range=(0, 1 - 1e-9))] = 0.99
    whiten_advantages: Annotated[bool, Option("give the advantages of a batch mean 0 and deviation 1")] = True
    max_kl: Annotated[
        float | None,
        Option(
            "end the training of a step when the policy is further than this from its rollouts (default: never)",
            range=(1e-9, 1e6),
        ),
    ] = None
    reward_mean: Annotated[float, Option("subtracted from scores", range=(-1e9, 1e9))] = 0.0
    reward_std: Annotated[float, Option("divides scores", range=(1e-9, 1e9))] = 1.0
    reward_clip: Annotated[float, Common("clip scaled scores to +- this", range=(1e-9, 1e9))] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.dual_clip == 0 or 1 < self.dual_clip <= COEFFICIENT[1]):
            raise UserError(
                f"dual_clip={self.dual_clip} must be above 1 (3 is usual): at 1 or below bad tokens would teach "
                "nothing; 0: no bound"
            )


@dataclass(frozen=True, kw_only=True)
class PPOPtx(PPOHyperparameters):
    """PPO's settings, and the weight of the examples that the policy learns beside its rollouts.

    Source: Ouyang et al., "Training language models to follow instructions" (2022), equation 2; their gamma is 27.8, on
    pretraining text.
    """

    ptx_coef: Annotated[float, Common("weight of the examples' loss beside the rollouts'", range=(0, 1e6))] = 1.0


ppo_advantages = tensor_function("realhf.algorithms.ppo.functions:ppo_advantages")

ppo_policy = policy_loss("realhf.algorithms.ppo.functions:ppo_policy")
ppo_value = loss_function("realhf.algorithms.ppo.functions:ppo_value")
