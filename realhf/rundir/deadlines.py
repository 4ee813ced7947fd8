"""How long a request to a worker may take: so many times its predicted time, and never less than a floor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of the requests of a run, in seconds.

    A prediction is off by some ten per cent, or by a few times where the machine was not profiled or responses have
    grown: `factor` allows for that. Calls of seconds have the `floor_s`, since a machine may be busy with other things.
    `longest_predicted_s` is the longest prediction of the run's plan.
    """

    floor_s: float = 600.0
    factor: float = 20.0
    longest_predicted_s: float = 0.0

    def of(self, predicted_s: float | None) -> float:
        """That of a call, counted from when all its workers have come to it."""
        return max(self.floor_s, self.factor * (predicted_s or 0.0))

    @property
    def longest_s(self) -> float:
        """That of what has no prediction of its own: parameters on their way, checkpoints. Workers wait for each other
        as long, since one may have come to a call when another still has a longer one to end."""
        return self.of(self.longest_predicted_s)
