"""How good the best plan is: its cost beside a bound that no plan is below."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """No feasible plan costs less than `lower_bound_s` seconds a step, which the best one found costs as `cost_s`.

    `lower_bound_s` is infinite if it is proven that no plan fits. `proven`: no feasible plan is faster. With `feasible`
    false, `cost_s` is of a plan that does not fit. Without `has_all_meshes` all this is about plans on meshes of
    aligned powers of two of nodes.
    """

    cost_s: float
    lower_bound_s: float
    proven: bool
    feasible: bool = True
    has_all_meshes: bool = True

    @property
    def gap(self) -> float:
        """How much slower than the best the plan can be, as a part of the best, at most; 0 where it is proven."""
        if self.proven:
            return 0.0
        return self.cost_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else float("inf")

    def __str__(self) -> str:
        if not self.feasible:
            return "no plan fits into memory (proven)" if self.proven else "no plan that fits into memory was found"
        plans = "plan" if self.has_all_meshes else "plan on meshes of aligned powers of two (all that was searched)"
        if self.proven:
            return f"optimal: no {plans} takes less than {self.cost_s:.4g} s a step"
        if self.lower_bound_s <= 0:
            return "no lower bound was proven"
        return (
            f"no {plans} takes less than {self.lower_bound_s:.4g} s a step; this one is within {self.gap:.1%} of that"
        )
