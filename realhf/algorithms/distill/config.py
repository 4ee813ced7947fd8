"""Hyperparameters of on-policy distillation."""

from dataclasses import dataclass
from typing import Annotated

from realhf.api.generation import GenerationOptions
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.base.options import ALGORITHM, Common, Option


@dataclass(frozen=True, kw_only=True)
class Distill(GenerationOptions):
    """The settings that the calls of a distillation share, with the options of rollouts.

    The loss of a token is the divergence of the student's distribution from the teacher's, both at `temperature`: with
    m = beta * teacher + (1 - beta) * student, beta * KL(teacher || m) + (1 - beta) * KL(student || m), and at its ends
    KL(teacher || student) (beta=0) and KL(student || teacher) (beta=1).
    """

    HEADING = ALGORITHM

    max_new_tokens: int = 256
    beta: Annotated[
        float,
        Common("the divergence: 1 reverse KL, 0 forward KL, between them generalised Jensen-Shannon", range=(0, 1)),
    ] = 1.0
    teacher_top_k: Annotated[
        int,
        Common(
            "compare the teacher's K most likely tokens, and all others as one (0: the whole vocabulary, which takes "
            "its memory for every token)",
            range=(0, 2**24),
            unit="tokens",
        ),
    ] = 0
    epochs: Annotated[int, Option("passes of an update through the mini-batches of a step", range=(1, 1024))] = 1


with_teacher = tensor_function("realhf.algorithms.distill.functions:with_teacher")

_loss = loss_function("realhf.algorithms.distill.functions:divergence_of_tokens")


def distill_loss(distill: Distill) -> BoundLoss:
    """The loss of rollouts with the columns of the teacher's distributions."""
    return _loss(distill)
