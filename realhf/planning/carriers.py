"""How the parameters of a found plan move: by chains of messages, or by broadcasts in process groups; all of them, or
only what changed.

A search counts with chains. Then each move takes broadcasts where these are predicted to be faster and the memory of
their process groups is there. Then copies keep their memory, and get only what changed, where links are slow and the
memory of the copies is there.
"""

from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.plan_checks import keeping, moves_of
from realhf.planning.model.cluster import share_a_node
from realhf.planning.model.hardware import in_gib
from realhf.planning.options import option_of
from realhf.planning.predict import Prediction, predict
from realhf.planning.problem.option_rows import Numbering
from realhf.planning.task import PlanningTask

# Comparing that takes this part of sending all values may be tried before it is known how many change.
TRIED = 0.2


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


def with_changes(task: PlanningTask, prediction: Prediction) -> Prediction:
    """The plan in which only what changed is sent to copies, if comparing is short beside sending (`TRIED`), makes no
    step longer, and home and copy fit with what is kept; or as `task.send_changes` says. On GPUs it is not chosen: it
    has not been measured there.

    Raises:
        UserError: it is to be so, and does not fit into memory.
    """
    best, cluster, plan = prediction, task.cluster, prediction.plan
    numbers = Numbering(task, {name: [option_of(call)] for name, call in plan.calls.items()}, groups=False)
    for name in keeping(plan, task.graph) if task.send_changes != "off" else ():
        there = predict(task, structs.replace(best.plan, changes=(*best.plan.changes, name)))
        home, transfer = task.homes[name], f"{task.graph.model_calls[name].model_name}: {task.homes[name]} -> {name}"
        comparing_s = numbers.move(name).comparing_s(*numbers.ends(home, name))
        is_short = comparing_s <= TRIED * prediction.transfer_s[transfer]
        crosses = not share_a_node(cluster, plan.layout(home).mesh, plan.layout(name).mesh)
        pays = is_short and crosses and not task.costs.hardware.is_gpu and there.step_s <= best.step_s and there.fits
        if task.send_changes == "on" or pays:
            best = there
    if not best.fits and prediction.fits:
        raise UserError(
            f"send_changes=on: with copies that are kept a device needs {in_gib(best.peak_bytes)} and has "
            f"{in_gib(task.cluster.device_memory_bytes)}; take auto or off"
        )
    return best
