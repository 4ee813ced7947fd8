"""Whether a broken run goes on with fewer workers: whom it does without, and under which given plan."""

from collections.abc import Iterable, Sequence

from realhf.dataflow.plan import ExecutionPlan

# Failures in a row, no new step between them, for which a worker is blamed before the run goes on without it.
FAILURES = 2


class Suspects:
    """Counts for every worker the failures it was blamed for in a row, without a new step between them.

    The number of a worker means the same one for as long as the run has the same workers: after a change, take another.
    """

    def __init__(self) -> None:
        self._furthest = -1
        self._failures: dict[int, int] = {}

    def failed(self, steps: int, workers: Iterable[int], num_workers: int) -> frozenset[int]:
        """The workers to go on without, after a failure for which `workers` are to blame.

        Args:
            steps: how many steps had been made when the run failed.
            num_workers: of the run. Where all are to blame it is the fault of none of them.
        """
        before = {} if steps > self._furthest else self._failures
        self._failures = {worker: before.get(worker, 0) + 1 for worker in workers}
        self._furthest = max(self._furthest, steps)
        found = frozenset(worker for worker, count in self._failures.items() if count >= FAILURES)
        return found if len(found) < num_workers else frozenset()


def largest_fitting(plans: Sequence[ExecutionPlan], num_workers: int) -> ExecutionPlan | None:
    """The plan for the most devices that are no more than the workers left; the first of several. None: none fits."""
    fitting = [plan for plan in plans if plan.num_devices <= num_workers]
    return max(fitting, key=lambda plan: plan.num_devices, default=None)
