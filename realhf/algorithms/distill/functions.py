"""The loss of on-policy distillation on the workers."""

from torch import Tensor

from realhf.algorithms.distill.config import Distill
from realhf.algorithms.script.update import Divergence
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.parallel.divergence import Target


def with_teacher(rollout: Columns, teacher: Columns) -> dict[str, list[Tensor]]:
    """The rollouts with the columns of the teacher's distributions."""
    return {name: getattr(teacher, name) for name in teacher.names}


def divergence_of_tokens(logprob: Tensor, batch: Batch, distill: Distill, *, divergence: Divergence) -> Tensor:
    """The divergence from the teacher at each response token, [responses] with gradient.

    Args:
        batch: `teacher_logprob` [response, vocab]; or [response, k + 1] with `teacher_token` [response, k].
    """
    tokens = batch.packed("teacher_token").values if distill.teacher_top_k else None
    return divergence(Target(batch.packed("teacher_logprob").values, tokens), distill.beta)
