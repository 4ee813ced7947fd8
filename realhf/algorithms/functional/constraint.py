"""A Lagrange multiplier for a limit on the mean cost."""

import math

from torch import Tensor


def updated_multiplier(
    log_multiplier: float, mean_cost: float, limit: float, step_size: float, largest: float
) -> float:
    """log lambda after a step of gradient ascent on lambda * (mean_cost - limit), taken in log lambda.

        log lambda' = min(log lambda + step_size * lambda * (mean_cost - limit), log largest)

    Source: Dai et al., "Safe RLHF" (2024), section 3.3 and equation 30.
    """
    gradient = math.exp(log_multiplier) * (mean_cost - limit)
    return min(log_multiplier + step_size * gradient, math.log(largest))


def constrained_advantage(reward_advantage: Tensor, cost_advantage: Tensor, multiplier: float) -> Tensor:
    """(A_reward - lambda * A_cost) / (1 + lambda), of any shape.

    Source: Dai et al., "Safe RLHF" (2024), equation 10 and appendix B.3.
    """
    return (reward_advantage - multiplier * cost_advantage) / (1 + multiplier)
