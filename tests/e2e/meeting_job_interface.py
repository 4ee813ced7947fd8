"""Actor and critic of `meeting_job.py`."""

from collections.abc import Sequence
from pathlib import Path

from meeting_job import MeetingActor, MeetingCritic

from realhf.algorithms.script.rollouts import GenerateInterface
from realhf.algorithms.script.update import UpdateInterface
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model
from tests.waiting import wait_until


def meet(meeting: str, here: str, there: str) -> None:
    """Returns when both have come."""
    if meeting:
        (Path(meeting) / here).touch()
        wait_until((Path(meeting) / there).exists, f"{there}, while this is {here}")


class MeetingActorInterface(GenerateInterface):
    def __init__(self, config: MeetingActor):
        super().__init__(config)
        self._meeting = config.meeting

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        result = super().generate(model, batch, context)
        if context.step:
            meet(self._meeting, f"generation of step {context.step}", f"training of step {context.step - 1}")
        return result


class MeetingCriticInterface(UpdateInterface):
    def __init__(self, config: MeetingCritic):
        super().__init__(config)
        self._meeting, self._last = config.meeting, config.steps - 1

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        if context.step < self._last:
            meet(self._meeting, f"training of step {context.step}", f"generation of step {context.step + 1}")
        return super().train_step(model, mini_batches, context)
