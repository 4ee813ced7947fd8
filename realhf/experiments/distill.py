"""On-policy distillation: a student learns the distributions of a teacher on the responses that it draws itself.

Needs: --model, the student; --teacher with the same vocabulary; --data with prompts
"""

from realhf.algorithms.distill.config import Distill, distill_loss, with_teacher
from realhf.api import Policy, Prompts, Teacher, auto


@auto(batch_size=128, steps=200)
def distill(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-5, warmup_steps=5),
    teacher: Teacher,
    distill: Distill,
) -> None:
    rollout = actor.generate(prompts, distill)
    distributions = teacher.distributions(rollout, top_k=distill.teacher_top_k)
    actor.update(with_teacher(rollout, distributions), distill_loss(distill))
