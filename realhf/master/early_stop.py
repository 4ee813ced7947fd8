"""Early stopping: whether the evaluations of a run have stopped getting better, and which was the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.base.errors import RunError


@dataclass(frozen=True)
class Verdict:
    """The verdict after an evaluation.

    best_step, best: the steps before the first evaluation with the best value, and that value. is_best: it is this one.
    waited: evaluations since the value was last improved by more than the least gain. ends: the run is to end.
    """

    best_step: int
    best: float
    is_best: bool
    waited: int
    ends: bool


@dataclass(frozen=True)
class EarlyStop:
    """Judges a run by a statistic of its evaluations, whose highest value is the best (after "min:" the lowest)."""

    statistic: str
    patience: int
    least_gain: float

    def judge(self, evaluations: Sequence[Mapping[str, Any]]) -> Verdict:
        """The verdict on lines of `evaluations.jsonl`, the oldest first.

        Raises:
            RunError: the last one has no such statistic.
        """
        name, sign = self.statistic.removeprefix("min:"), -1.0 if self.statistic.startswith("min:") else 1.0
        if name not in evaluations[-1]:
            raise RunError(
                f"--stop-early {self.statistic}: the evaluation has made no such statistic; choose from "
                f"{', '.join(sorted(evaluations[-1].keys() - {'step'}))}"
            )
        best_step, best, mark, waited = -1, -math.inf, -math.inf, 0
        for line in evaluations:
            value = sign * line.get(name, -sign * math.inf)
            waited = 0 if value > mark + self.least_gain else waited + 1
            mark = mark if waited else value
            if value > best:
                best_step, best = line["step"], value
        return Verdict(best_step, sign * best, best_step == evaluations[-1]["step"], waited, waited >= self.patience)

    def in_words(self, step: int, verdict: Verdict, checkpoint: str) -> str:
        """Why a run ended after `step`, and the best checkpoint."""
        return (
            f"stopped early after step {step}: {self.statistic} did not get better in {verdict.waited} evaluations; it "
            f"was best after step {verdict.best_step}, {verdict.best:.4g}; the best checkpoint: {checkpoint}"
        )
