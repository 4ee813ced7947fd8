"""Milestones of a run: steps after which an evaluation or a checkpoint is due, and no step is in flight."""

import math
import time
from collections.abc import Callable

from realhf.rundir.run import Run


class Milestones:
    """Decides one milestone at a time, since checkpoints may be due after a number of minutes.

    Args:
        clock: gives seconds that never go back.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic):
        self._steps: int = run.experiment.steps
        evaluations = list(run.experiment.evaluations.values())
        self._evaluates = bool(evaluations)
        self._evaluation_every = evaluations[0].every_steps if evaluations else None  # all have one number
        self._save_every = run.spec.checkpoint_every_steps
        minutes = run.spec.checkpoint_every_minutes
        self._save_after_s = math.inf if minutes is None else 60.0 * minutes
        self._clock = clock
        self._saved_at_s = self._rested_at_s = clock()
        self._step_s: float | None = None  # measured between the last two milestones

    def next(self, step: int) -> int:
        """The next milestone after `step` that is known now."""
        self._rested_at_s = self._clock()
        due = [self._steps]
        due += [(step // every + 1) * every for every in (self._evaluation_every, self._save_every) if every]
        if self._save_after_s < math.inf:
            left_s = self._save_after_s - (self._rested_at_s - self._saved_at_s)
            due.append(step + max(1, math.ceil(left_s / self._step_s) if self._step_s else 1))
        return min(due)

    def reached(self, before: int, step: int) -> None:
        """Notes that the run has made the steps from `before` to `step` since the call of `next`."""
        self._step_s = (self._clock() - self._rested_at_s) / (step - before)

    def evaluates_after(self, step: int) -> bool:
        every = self._evaluation_every
        return self._evaluates and (step == self._steps or bool(every and step % every == 0))

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due; if so, the count of minutes starts again."""
        every = self._save_every
        is_late = self._clock() - self._saved_at_s >= self._save_after_s
        if not (step == self._steps or is_late or (every and step % every == 0)):
            return False
        self._saved_at_s = self._clock()
        return True
