"""Losses of preference pairs, per pair and not reduced."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from realhf.algorithms.choices import DPOLoss
from realhf.algorithms.functional.tokens import at_least_fp32


def margin_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, centre_coef: float = 0.0) -> Tensor:
    """The Bradley-Terry loss with a margin that the chosen score should keep, and a pull of the pair's sum to 0.

        L = -log sigmoid(s_chosen - s_rejected - margin) + c * (s_chosen + s_rejected)^2

    Args:
        chosen, rejected: scores [pairs]; margin: [pairs], how much better the chosen one is said to be, or one number.

    Returns:
        [pairs].

    Sources: Touvron et al., "Llama 2" (2023), equation 2 (margin); Eisenstein et al., "Helping or herding?" (2023)
    (centring).
    """
    chosen, rejected = at_least_fp32(chosen), at_least_fp32(rejected)
    return -logsigmoid(chosen - rejected - margin) + centre_coef * (chosen + rejected).square()


def safe_pairwise_loss(safer: Tensor, other: Tensor, safer_sign: Tensor, other_sign: Tensor) -> Tensor:
    """The loss of a cost model: the other response costs more, and unsafe responses cost above 0, safe ones below.

        L = -log sigmoid(c_other - c_safer) - log sigmoid(g_safer * c_safer) - log sigmoid(g_other * c_other)

    Args:
        safer, other: costs [pairs]; safer_sign, other_sign: [pairs], +1 for unsafe, -1 for safe, 0 for unknown.

    Returns:
        [pairs].

    Source: Dai et al., "Safe RLHF" (2024), equation 6.
    """
    safer, other = at_least_fp32(safer), at_least_fp32(other)
    loss = -logsigmoid(other - safer)
    for cost, sign in ((safer, safer_sign), (other, other_sign)):
        loss = loss - torch.where(sign == 0, 0.0, logsigmoid(sign * cost))
    return loss


def dpo_loss(kind: DPOLoss, margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair from the margin of its implicit rewards.

        margin      = log(pi / ref) of the chosen response - log(pi / ref) of the rejected one
        "sigmoid"   -(1 - e) log sigmoid(beta * margin) - e log sigmoid(-beta * margin)      (e > 0: cDPO)
        "robust"    (-(1 - e) log sigmoid(beta * margin) + e log sigmoid(-beta * margin)) / (1 - 2 e)
        "hinge"     max(0, 1 - beta * margin)
        "ipo"       (margin - 1 / (2 beta))^2, with log-ratios that are means over the tokens of a response

    Args:
        margin: [pairs] with gradient; label_smoothing e: the share of pairs that are the wrong way round, below 1/2.

    Returns:
        [pairs].

    Sources: Rafailov et al., "Direct preference optimization" (2023), equation 7; Mitchell, "A note on DPO with noisy
    preferences" (2023) (cDPO); Chowdhury et al., "Provably robust DPO" (2024); Zhao et al., "SLiC-HF" (2023) (hinge);
    Azar et al., "A general theoretical paradigm to understand learning from human preferences" (2023), equation 17.
    """
    z, e = beta * margin, label_smoothing
    match kind:
        case "sigmoid":
            # Without smoothing the second term is left out: 0 * logsigmoid(-inf) would be NaN.
            return -logsigmoid(z) if e == 0 else -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)
        case "robust":
            return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)
        case "hinge":
            return torch.relu(1 - z)
        case "ipo":
            return (margin - 1 / (2 * beta)).square()
