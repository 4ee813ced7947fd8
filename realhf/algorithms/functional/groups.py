"""Statistics of groups: the responses to one prompt, judged against each other.

All functions take what `Context.in_order` gives, the samples of the whole step in the order of their ids, so the result
does not depend on where the samples lie. `is_valid` samples alone count; the others get an advantage of 0.
"""

import torch
from torch import Tensor

from realhf.algorithms.choices import RewardScale

SCALE_EPS = 1e-4  # TRL's and DeepSeekMath's code


def group_means(x: Tensor, is_valid: Tensor) -> Tensor:
    """[groups, 1]: the mean of the valid members of each group; 0 where there are none. `x`, `is_valid` [groups, G]."""
    count = is_valid.sum(1, keepdim=True)
    return _kept(x, is_valid).sum(1, keepdim=True) / count.clamp(min=1)


def standard_deviation(x: Tensor, is_valid: Tensor, dim: int | None = None) -> Tensor:
    """The unbiased deviation of the valid elements, along `dim` (kept) or of all ([1, 1]); 0 where fewer than two are.

    Args:
        x, is_valid: [groups, G].
    """
    dims = (0, 1) if dim is None else (dim,)
    count = is_valid.sum(dims, keepdim=True)
    mean = _kept(x, is_valid).sum(dims, keepdim=True) / count.clamp(min=1)
    square = _kept((x - mean).square(), is_valid).sum(dims, keepdim=True)
    return (square / (count - 1).clamp(min=1)).sqrt()


def group_advantages(rewards: Tensor, is_valid: Tensor, scale: RewardScale = "group") -> Tensor:
    """The reward of each response against the mean of its group.

        A_i = (r_i - mean(group)) / (std + 1e-4)

    with the group's deviation, the batch's, or, for "none", without a division. Deviations are unbiased (n - 1).

    Args:
        rewards: [groups, G]; is_valid: [groups, G] bool.

    Returns:
        [groups, G].

    Sources: Shao et al., "DeepSeekMath" (2024), section 4.1.2 ("group"); Hu et al., "REINFORCE++" (2025), and Liu et
    al., "Part I: tricks or traps?" (2025) ("batch"); Liu et al., "Understanding R1-Zero-like training" (2025) ("none").
    """
    advantage = rewards - group_means(rewards, is_valid)
    match scale:
        case "group":
            advantage = advantage / (standard_deviation(rewards, is_valid, dim=1) + SCALE_EPS)
        case "batch":
            advantage = advantage / (standard_deviation(rewards, is_valid) + SCALE_EPS)
        case "none":
            pass
    return _kept(advantage, is_valid)


def leave_one_out_advantages(rewards: Tensor, is_valid: Tensor) -> Tensor:
    """The reward of each response against the mean of the others of its group.

        A_i = r_i - 1 / (n - 1) * sum over j != i of r_j

    for the n valid responses of a group; 0 where n is below 2.

    Args:
        rewards: [groups, G]; is_valid: [groups, G] bool.

    Returns:
        [groups, G].

    Source: Ahmadian et al., "Back to basics: REINFORCE style optimization" (2024), equation 8.
    """
    total = _kept(rewards, is_valid).sum(1, keepdim=True)
    count = is_valid.sum(1, keepdim=True)
    others = (total - rewards) / (count - 1).clamp(min=1)
    return _kept(rewards - others, is_valid & (count > 1))


def normalised(x: Tensor, is_valid: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-4) over all valid elements, 0 at the others; `x`, `is_valid` [groups, G]."""
    mean = _kept(x, is_valid).sum() / is_valid.sum().clamp(min=1)
    return _kept((x - mean) / (standard_deviation(x, is_valid) + SCALE_EPS), is_valid)


def is_informative(rewards: Tensor, is_valid: Tensor) -> Tensor:
    """[groups] bool: whether the valid responses of a group have different rewards, so that any has an advantage.

    Source: Yu et al., "DAPO" (2025), section 3.2 (it drops prompts whose responses are all right or all wrong).
    """
    largest = rewards.masked_fill(~is_valid, -torch.inf).amax(1)
    smallest = rewards.masked_fill(~is_valid, torch.inf).amin(1)
    return is_valid.any(1) & (largest > smallest)


def first_groups(is_chosen: Tensor, count: int) -> Tensor:
    """[groups] bool: the first `count` of the chosen groups, in their order; all of them where there are fewer."""
    return is_chosen & (is_chosen.cumsum(0) <= count)


def _kept(x: Tensor, is_valid: Tensor) -> Tensor:
    """Zero where not valid, whatever stands there (a mask times NaN would be NaN)."""
    return torch.where(is_valid, x, torch.zeros_like(x))
