"""Hyperparameters of direct preference optimisation."""

from dataclasses import dataclass

from realhf.algorithms.choices import DPOLoss, check_choice
from realhf.algorithms.options import coefficients
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_ranges

_RANGES = {
    "beta": Range("beta", 1e-9, 1e6),
    "label_smoothing": Range("label_smoothing", 0, 0.5 - 1e-9),
    "epochs": Range("epochs", 1, 1024),
    **coefficients("sft_coef"),
}


@dataclass(frozen=True, kw_only=True)
class DPO:
    """The settings of an update on preference pairs."""

    loss_type: DPOLoss = "sigmoid"
    """"sigmoid" is DPO (with `label_smoothing`: conservative DPO), "robust" its unbiased form under wrong labels,
    "hinge" SLiC's, "ipo" IPO, whose log-ratios are means over tokens."""
    beta: float = 0.1
    """How strongly the policy is kept near the reference; of "ipo" the square loss aims at a margin of 1 / (2 beta)."""
    label_smoothing: float = 0.0
    """The share of pairs that are the wrong way round; of "sigmoid" and "robust"."""
    reference_free: bool = False
    """The reference is uniform: the margin is that of the policy's log-probabilities."""
    sft_coef: float = 0.0
    """How much the mean log-probability of a chosen response's tokens is raised beside it (RPO)."""
    epochs: int = 1

    def __post_init__(self) -> None:
        check_ranges(vars(self), _RANGES)
        check_choice("loss_type", self.loss_type, DPOLoss)
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise UserError(
                f"label_smoothing={self.label_smoothing} is for the losses sigmoid and robust; set it to 0 with "
                f"loss_type={self.loss_type!r}"
            )


with_reference = tensor_function("realhf.algorithms.dpo.functions:with_reference")

_loss = loss_function("realhf.algorithms.dpo.functions:dpo_pairs")


def dpo_loss(dpo: DPO) -> BoundLoss:
    """The loss of pairs with the columns `chosen_ref_logprob` and `rejected_ref_logprob` (none if reference_free)."""
    return _loss(dpo)
