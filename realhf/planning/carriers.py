"""How the parameters of a found plan move: by chains of messages, or by broadcasts in process groups.

A search counts with chains. Then each move takes broadcasts where these are predicted to be faster and the memory of
their process groups is there.
"""

from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.plan import moves_of
from realhf.planning.model.hardware import in_gib
from realhf.planning.predict import Prediction, predict
from realhf.planning.task import PlanningTask


def with_best_carriers(task: PlanningTask, prediction: Prediction) -> Prediction:
    """The plan with broadcasts for the moves that get shorter so, unless the step gets longer or they do not fit; or as
    `task.moved_by` says. Layouts and order stay as they are.

    Raises:
        UserError: all are to be broadcasts, and these do not fit into memory.
    """
    best = prediction
    for name in moves_of(prediction.plan, task.graph) if task.moved_by != "chains" else ():
        there = predict(task, structs.replace(best.plan, broadcasts=(*best.plan.broadcasts, name)))
        is_shorter = sum(there.transfer_s.values()) < sum(best.transfer_s.values()) and there.step_s <= best.step_s
        if task.moved_by == "broadcasts" or (is_shorter and there.fits):
            best = there
    if not best.fits and prediction.fits:
        raise UserError(
            f"moved_by=broadcasts: with the process groups of all moves a device needs {in_gib(best.peak_bytes)} and "
            f"has {in_gib(task.cluster.device_memory_bytes)}; take auto or chains"
        )
    return best
