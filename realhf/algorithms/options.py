"""Settings that several algorithms share. Without torch: experiments import it."""

from collections.abc import Mapping
from dataclasses import dataclass

from realhf.algorithms.choices import ImportanceCorrection, check_choice
from realhf.api.generation import GenerationOptions
from realhf.api.script.functions import TOKEN_MEAN, Reduction
from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_ranges

COEFFICIENT = (0.0, 1e6)

_RANGES = {
    "epochs": Range("epochs", 1, 1024),
    "entropy_coef": Range("entropy_coef", -1e3, 1e3),
    "importance_low": Range("importance_low", 0, 1),
    "importance_high": Range("importance_high", 1, 1e6),
}


def coefficients(*names: str) -> Mapping[str, Range]:
    """For `check_ranges`: fields that are 0 or more."""
    return {name: Range(name, *COEFFICIENT) for name in names}


_CLIP_RANGES = {"clip_low": Range("clip_low", 1e-6, 1), "clip_high": Range("clip_high", 1e-6, 1e6)}


def check_dual_clip(value: float) -> None:
    """Raises UserError unless the bound is 0 (none) or above 1."""
    if not (value == 0 or 1 < value <= COEFFICIENT[1]):
        raise UserError(
            f"dual_clip={value} must be above 1 (3 is usual): at 1 or below bad tokens would teach nothing; 0: no bound"
        )


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(GenerationOptions):
    """The options of rollouts, and what all algorithms that learn from them have in common."""

    max_new_tokens: int = 256
    epochs: int = 1
    """How often an update goes through the mini-batches of a step."""
    entropy_coef: float = 0.0
    """How much the mean entropy of the tokens' distributions is raised. Entropies are computed only if it is not 0."""
    importance_correction: ImportanceCorrection = "none"
    """The correction for rollouts that another distribution drew than the one that training begins with: an engine with
    other numerics, or older weights. It needs the column `old_logprob`. Weights are those of tokens or of whole
    responses; "truncate" clips them to the bounds, "mask" leaves out what lies outside of them."""
    importance_low: float = 0.0
    importance_high: float = 2.0
    mask_truncated: bool = False
    """Leaves out responses that were cut off at `max_new_tokens`. Statistics of groups still count their rewards."""

    @property
    def reduction(self) -> Reduction:
        """How the losses of tokens become that of a mini-batch."""
        return TOKEN_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            name = type(self).__name__
            raise UserError(f"temperature=0 draws no samples to learn from; {name} needs a temperature above 0")
        check_ranges(vars(self), _RANGES)
        check_choice("importance_correction", self.importance_correction, ImportanceCorrection)


@dataclass(frozen=True, kw_only=True)
class ClippedOptions(PolicyOptions):
    """Those of algorithms whose loss is the clipped surrogate with a range of its own on either side."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio to the policy that training begins with stays from 1 - clip_low to 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(vars(self), _CLIP_RANGES)
