"""The proof about the best plan that a search found, and the set of plans that it covers."""

from dataclasses import dataclass

from realhf.planning.task import Breadth

LIMITS = {
    "all": "",
    "computation": "without chunks, moved optimizer states, modes of operators or smaller KV caches",
    "plain": "without chunks, with calls computed as they are set up",
}


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """No feasible plan costs less than `lower_bound_s` seconds a step, which the best one found costs as `cost_s`.

    `lower_bound_s` is infinite if it is proven that no plan fits. `proven`: no feasible plan is faster. With `feasible`
    false, `cost_s` is of a plan that does not fit. Without `has_all_meshes` all this is about plans on the meshes of
    `node_runs`; it is about plans of this `breadth` (`PlanningTask`) that have the models `offload` in host memory
    (None: as was asked for), and all copies of parameters from home: `copying_s` is a step of the plan whose copies
    also come from other copies (None: it has no such ones, and is the one of `cost_s`). `wider_s` is a step of the plan
    where it has what `breadth` leaves out, other models in host memory, or KV caches of another size. `num_meshes`: all
    this is about plans on so many of the meshes (None: on all).
    """

    cost_s: float
    lower_bound_s: float
    proven: bool
    feasible: bool = True
    has_all_meshes: bool = True
    breadth: Breadth = "all"
    offload: tuple[str, ...] | None = None
    copying_s: float | None = None
    wider_s: float | None = None
    num_meshes: int | None = None

    @property
    def gap(self) -> float:
        """How much slower than the best the plan can be, as a part of the best, at most; 0 where it is proven."""
        if self.proven:
            return 0.0
        return self.cost_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else float("inf")

    def __str__(self) -> str:
        if not self.feasible:
            return "no plan fits into memory (proven)" if self.proven else "no plan that fits into memory was found"
        limits = [] if self.has_all_meshes else ["on runs of blocks of nodes"]
        limits += [] if self.num_meshes is None else [f"on {self.num_meshes} of the meshes"]
        limits += [LIMITS[self.breadth]] if LIMITS[self.breadth] else []
        limits += [] if self.offload is None else [f"with {', '.join(self.offload) or 'no model'} in host memory"]
        limits += [] if self.copying_s is None else ["with copies from home alone"]
        plans = " ".join(["plan", " and ".join(limits)]) if limits else "plan"
        bound_s = self.cost_s if self.proven else self.lower_bound_s
        if bound_s > 0 and (others := self._others()):
            return f"no {plans} takes less than {bound_s:.4g} s a step; {others}"
        if self.proven:
            return f"optimal: no {plans} takes less than {self.cost_s:.4g} s a step"
        if self.lower_bound_s <= 0:
            return "no lower bound was proven"
        return (
            f"no {plans} takes less than {self.lower_bound_s:.4g} s a step; this one is within {self.gap:.1%} of that"
        )

    def _others(self) -> str:
        """In words, where the plan is none of those that all this is about."""
        if self.wider_s is not None:
            return f"this plan is not one of them and takes {self.wider_s:.4g} s"
        return "" if self.copying_s is None else f"this plan has other copies and takes {self.copying_s:.4g} s"
