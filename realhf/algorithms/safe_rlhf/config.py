"""Hyperparameters of Safe-RLHF: PPO under a limit on the mean cost."""

from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.options import COEFFICIENT
from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_policy, ppo_value
from realhf.api.script.functions import loss_function, tensor_function
from realhf.base.errors import UserError
from realhf.base.options import Common


@dataclass(frozen=True, kw_only=True)
class SafeRLHF(PPOHyperparameters):
    """PPO's settings, and those of the cost.

    A cost model scores responses: above 0 is unsafe. The multiplier of the cost rises while the mean cost of a step is
    above `cost_limit`, and falls while it is below.
    """

    cost_limit: Annotated[float, Common("highest mean cost, in the cost model's units", range=(-1e9, 1e9))] = 0.0
    cost_std: Annotated[float, Common("divide costs by this before advantages are estimated", range=(1e-9, 1e9))] = 1.0
    multiplier: Annotated[float, Common("Lagrange multiplier of the first step", range=(1e-6, 1e6))] = 1.0
    max_multiplier: Annotated[float, Common("largest Lagrange multiplier", range=(1e-6, 1e6))] = 100.0
    multiplier_lr: Annotated[float, Common("step size on the logarithm of the multiplier", range=COEFFICIENT)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multiplier > self.max_multiplier:
            raise UserError(f"multiplier={self.multiplier} must be at most max_multiplier={self.max_multiplier}")
        if self.normalise_values:
            raise UserError(
                "normalise_values=True is for the one critic of PPO, and Safe-RLHF has two; set it to false, and "
                "reward_std and cost_std to what makes returns about 1"
            )


judged = tensor_function("realhf.algorithms.safe_rlhf.functions:judged")
safe_advantages = tensor_function("realhf.algorithms.safe_rlhf.functions:safe_advantages")
# PPO's losses, that of the policy on the combined advantage.
safe_policy, safe_value = ppo_policy, ppo_value
safe_cost_value = loss_function("realhf.algorithms.safe_rlhf.functions:safe_cost_value")
