"""Statistics of groups: the responses to one prompt, judged against each other.

All functions take what `Context.in_order` gives, the samples of the whole step in the order of their ids, so the result
does not depend on where the samples lie. `is_valid` samples alone count; the others get an advantage of 0.

Differences and squares are taken in float64, from one of the members: equal rewards of any size differ by exactly 0.
Results have the dtype of the rewards.
"""

import torch
from torch import Tensor

from realhf.algorithms.choices import RewardScale

SCALE_EPS = 1e-4  # TRL's and DeepSeekMath's code


def centred_in_groups(x: Tensor, is_valid: Tensor) -> Tensor:
    """`x` less the mean of the valid members of its group, 0 at the others; `x`, `is_valid` [groups, G]."""
    return _centred(x, is_valid, (1,)).to(x.dtype)


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
    advantage = _centred(rewards, is_valid, (1,))
    if scale != "none":
        dims = (1,) if scale == "group" else (0, 1)
        advantage = advantage / (_deviation(rewards, is_valid, dims) + SCALE_EPS)
    return advantage.to(rewards.dtype)


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
    # r_i - mean of the others = n / (n - 1) * (r_i - mean of all), where one alone is its own mean.
    count = is_valid.sum(1, keepdim=True)
    return (_centred(rewards, is_valid, (1,)) * count / (count - 1).clamp(min=1)).to(rewards.dtype)


def normalised(x: Tensor, is_valid: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-4) over all valid elements, 0 at the others; `x`, `is_valid` [groups, G]."""
    everything = (0, 1)
    return (_centred(x, is_valid, everything) / (_deviation(x, is_valid, everything) + SCALE_EPS)).to(x.dtype)


def is_informative(rewards: Tensor, is_valid: Tensor) -> Tensor:
    """[groups] bool: whether the valid responses of a group have different rewards, so that any has an advantage.

    Source: Yu et al., "DAPO" (2025), section 3.2 (it drops prompts whose responses are all right or all wrong).
    """
    largest = rewards.masked_fill(~is_valid, -torch.inf).amax(1)
    smallest = rewards.masked_fill(~is_valid, torch.inf).amin(1)
    return largest > smallest  # False without a valid response: -inf is not above inf


def first_groups(is_chosen: Tensor, count: int) -> Tensor:
    """[groups] bool: the first `count` of the chosen groups, in their order; all of them where there are fewer."""
    return is_chosen & (is_chosen.cumsum(0) <= count)


def _centred(x: Tensor, is_valid: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`x` less the mean of the valid elements along `dims`, float64; 0 where not valid."""
    x = x.double()
    return _kept(x - _mean(x, is_valid, dims), is_valid)


def _mean(x: Tensor, is_valid: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The mean of the valid elements along `dims` (kept), exactly theirs if they are equal; 0 where there are none."""
    count = is_valid.sum(dims, keepdim=True)
    origin = x.masked_fill(~is_valid, -torch.inf).amax(dims, keepdim=True)
    origin = _kept(origin, count > 0)
    return origin + _kept(x - origin, is_valid).sum(dims, keepdim=True) / count.clamp(min=1)


def _deviation(x: Tensor, is_valid: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The unbiased deviation of the valid elements along `dims` (kept), float64; 0 where fewer than two are."""
    squares = _centred(x, is_valid, dims).square().sum(dims, keepdim=True)
    return (squares / (is_valid.sum(dims, keepdim=True) - 1).clamp(min=1)).sqrt()


def _kept(x: Tensor, is_valid: Tensor) -> Tensor:
    """Zero where not valid, whatever stands there (a mask times NaN would be NaN)."""
    return torch.where(is_valid, x, torch.zeros_like(x))
