"""Hyperparameters of direct preference optimisation."""

from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.choices import DPOLoss
from realhf.algorithms.options import COEFFICIENT
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.base.errors import UserError
from realhf.base.options import ALGORITHM, Common, Option, Settings


@dataclass(frozen=True, kw_only=True)
class DPO(Settings):
    """The settings of an update on preference pairs.

    `loss_type` "sigmoid" is DPO (with `label_smoothing`: conservative DPO), "robust" its unbiased form under wrong
    labels, "hinge" SLiC's, "ipo" IPO, whose log-ratios are means over tokens, and whose square loss aims at a margin of
    1 / (2 beta).
    """

    HEADING = ALGORITHM

    loss_type: Annotated[DPOLoss, Common("DPO's loss, SLiC's hinge, IPO, or DPO that is robust to wrong labels")] = (
        "sigmoid"
    )
    beta: Annotated[float, Common("how strongly the policy is kept near the reference", range=(1e-9, 1e6))] = 0.1
    label_smoothing: Annotated[
        float, Common("share of pairs that are the wrong way round (sigmoid and robust)", range=(0, 0.5 - 1e-9))
    ] = 0.0
    reference_free: Annotated[bool, Common("take a uniform reference: the margin of the policy alone counts")] = False
    sft_coef: Annotated[
        float, Common("coefficient of the mean log-probability of the chosen response (RPO)", range=COEFFICIENT)
    ] = 0.0
    epochs: Annotated[int, Option("passes of an update through the mini-batches of a step", range=(1, 1024))] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
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
