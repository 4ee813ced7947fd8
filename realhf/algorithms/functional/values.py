"""Losses of a value model, per response token and not reduced, and the scale of its targets."""

from dataclasses import dataclass

import torch
from torch import Tensor


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error per token, with the value kept within `clip` of the old value.

        L = 1/2 max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)

    Returns:
        (L [responses], is_clipped [responses]).
    """
    free = (value - returns).square()
    clipped = (torch.minimum(torch.maximum(value, old_value - clip), old_value + clip) - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error per token, without a clip: [responses]."""
    return 0.5 * (value - returns).square()


@dataclass(frozen=True)
class ValueScale:
    """Running mean and mean square of returns, by which a value model's targets are normalised.

        m' = decay * m + (1 - decay) * mean(R),  s' and w' alike with mean(R^2) and 1;
        mean = m / w,  std = sqrt(max(s / w - mean^2, 1e-2))

    Dividing by w takes away the pull towards the zeros that the averages begin with. Before the first update mean is 0
    and std is 1.

    Source: Yu et al., "The surprising effectiveness of PPO in cooperative multi-agent games" (2022), section 3.2 and
    code (`ValueNorm`); the head of the model is not rescaled, as PopArt would.
    """

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        if not self.weight:
            return 1.0
        return max(self.square_sum / self.weight - self.mean**2, 1e-2) ** 0.5

    def updated(self, mean: float, square: float, decay: float) -> "ValueScale":
        """After returns with that mean and that mean of squares."""
        new = 1 - decay
        return ValueScale(
            decay * self.mean_sum + new * mean, decay * self.square_sum + new * square, decay * self.weight + new
        )

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std, in the dtype of `x`."""
        return ((x.double() - self.mean) / self.std).to(x.dtype)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        return x * self.std + self.mean
