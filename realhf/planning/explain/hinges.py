"""On which constants it hinges whether a plan is the faster one, and what would settle it."""

import math
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np

from realhf.planning.intervals import LEVEL, Draws, at_ends, probability_faster, rounded
from realhf.planning.model.measured import LAYERS, NETWORK, measurement_of
from realhf.planning.model.profile import PARTS
from realhf.planning.predict import Prediction

SURE = 0.95  # a probability from here on needs no measurement
FAR = 3.0  # times the plan's step: no draw makes up for that
CALLS = "calls"


@dataclass(frozen=True, kw_only=True)
class Hinge:
    """Within the middle 90 % of the draws of `constant`, from `low` to `high` (of a part of a profile: times what was
    measured), `rival` turns from slower to faster than the plan, or back, all else as predicted. CALLS: no constant
    does so alone, and calls of models without a profile may take `low` to `high` times what is predicted.

    slower: the probability that the rival is slower. measurement: of `realhf profile --only`.
    """

    rival: str
    slower: float
    constant: str
    low: float
    high: float
    measurement: str

    def __str__(self) -> str:
        what = f"{self.constant} ({self.low:.3g} to {self.high:.3g})"
        if self.constant == CALLS:
            what = f"how far calls are from their predictions ({self.low:.2f} to {self.high:.2f} times)"
        elif self.constant in PARTS:
            what = f"the measured {self.constant} ({self.low:.2f} to {self.high:.2f} times what the profile has)"
        where = "--launcher slurm " if self.measurement == NETWORK else ""
        remedy = f"`realhf profile EXPERIMENT {where}--only {self.measurement}` measures that in a few minutes"
        slower = f"{self.rival} is slower with a probability of {self.slower:.0%} only"
        return f"{slower}; which is faster hinges on {what}: {remedy}"


def hinges(draws: Draws, plan: Prediction, rivals: dict[str, Prediction]) -> list[Hinge]:
    """For the rival that is likeliest to be faster than the plan after all, the constants on which that hinges: those
    first whose ends differ most; where none decides by itself and not all models have a profile, CALLS. None where
    every rival is surely slower."""
    planned = draws.of(plan)
    near = {name: rival for name, rival in rivals.items() if rival.step_s < FAR * plan.step_s}
    chances = {name: probability_faster(planned, draws.of(rival)) for name, rival in near.items()}
    undecided = {
        name: chance
        for name, chance in chances.items()
        if chance < SURE and not np.array_equal(planned.step_s, draws.of(rivals[name]).step_s)
    }
    if not undecided:
        return []
    rival = min(undecided, key=lambda name: undecided[name])
    hinge = partial(Hinge, rival=rival, slower=undecided[rival])
    costs, ends = draws.task.costs, at_ends(draws.task)
    # [names, 2]: by how much the rival is slower, relative to the plan, with the constant at its low and high end.
    margin = (ends.of(rivals[rival]).step_s / ends.of(plan).step_s - 1).reshape(-1, 2)
    found = []
    for number in np.argsort(-np.abs(margin[:, 0] - margin[:, 1]), kind="stable"):
        name = ends.names[number]
        if margin[number].min() < 0 < margin[number].max():
            value = 1.0 if name in PARTS else costs.hardware.constant(name)
            low, high = (rounded(value * ends.factors[2 * number + end, number]) for end in (0, 1))
            found.append(hinge(constant=name, low=low, high=high, measurement=measurement_of(name)))
    if not found and not costs.profiled:
        error = max(costs.call_error(model) for model in costs.timings)
        high = math.exp(NormalDist().inv_cdf((1 + LEVEL) / 2) * error)
        found.append(hinge(constant=CALLS, low=rounded(1 / high), high=rounded(high), measurement=LAYERS))
    return found
