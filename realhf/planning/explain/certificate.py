"""How good the best plan is: its cost beside a bound that no plan is below."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """`best` and `lower_bound` in one unit of time; `lower_bound` is None if it is proven that no plan fits.

    `is_optimal`: no feasible plan is faster. With `feasible` false, `best` is the time of a plan that
    does not fit, and nothing is optimal.
    """

    best: float
    lower_bound: float | None
    feasible: bool
    proven: bool

    @property
    def is_optimal(self) -> bool:
        return self.feasible and self.proven

    @property
    def gap(self) -> float | None:
        """By what part of itself the best may be above the optimum; None without a feasible plan."""
        if not self.feasible or self.lower_bound is None:
            return None
        return max(0.0, 1 - self.lower_bound / self.best) if self.best > 0 else 0.0

    def verdict(self) -> str:
        """One line for people."""
        if self.gap is None:
            return "no plan fits into memory (proven)" if self.proven else "no plan that fits into memory was found"
        return "optimal" if self.is_optimal else f"at most {self.gap:.2%} above the optimum"
