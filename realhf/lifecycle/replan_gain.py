"""Whether another plan is worth the change to it: what it gains over the steps that are left against what it costs."""

from dataclasses import dataclass

# A step predicted to be shorter by less than this part is within what predictions are worth.
LEAST_GAIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Switch:
    """From the present plan to another one.

    `step_s` is a step as measured under the present plan. `present_s` and `other_s` are predictions under the same
    costs: their ratio counts, since both are off in the same direction. `cost_s` is how long no step is made.
    """

    step_s: float
    present_s: float
    other_s: float
    steps_left: int
    cost_s: float

    @property
    def gain(self) -> float:
        """The part of a step that is saved."""
        return 1 - self.other_s / self.present_s

    @property
    def gain_s(self) -> float:
        """Seconds saved over the steps that are left, without the cost."""
        return self.gain * self.step_s * self.steps_left

    @property
    def pays(self) -> bool:
        return self.gain >= LEAST_GAIN and self.gain_s > self.cost_s

    def __str__(self) -> str:
        return (
            f"{self.other_s:.3g} s instead of {self.present_s:.3g} s a step; {self.steps_left} steps are left, of "
            f"{self.step_s:.3g} s each: gains {self.gain_s:.3g} s, a change costs {self.cost_s:.3g} s"
        )
