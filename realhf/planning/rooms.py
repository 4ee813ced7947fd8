"""KV caches get the memory that a found plan leaves (HybridFlow, section 6, algorithm 2)."""

from bisect import bisect_left

from msgspec import structs

from realhf.architecture.decoding import PAGE_TOKENS
from realhf.dataflow.plan import ExecutionPlan
from realhf.planning.predict import Prediction, predict
from realhf.planning.task import PlanningTask


def with_room_left(task: PlanningTask, prediction: Prediction) -> Prediction:
    """The plan with a larger KV cache in place of each that the plan made smaller, one call after the other, where its
    step gets shorter so: enough for all sequences, or else as much as fits. Its order stays as it is."""
    best = prediction
    for name, call in prediction.plan.calls.items():
        if (room := call.compute.kv_cache_tokens) is None:
            continue
        work = task.call_models[name].under(call.compute).work(call.strategy, call.micro_batches)
        page = work.parts_in_flight * PAGE_TOKENS
        plan, rooms = best.plan, range(room, int(work.needed_tokens), page)
        too_large = bisect_left(rooms, True, key=lambda each: not predict(task, _with_room(plan, name, each)).fits)
        larger = [predict(task, _with_room(plan, name, each)) for each in (None, rooms[max(too_large - 1, 0)])]
        best = min((best, *(each for each in larger if each.fits)), key=lambda each: each.step_s)
    return best


def _with_room(plan: ExecutionPlan, name: str, room: int | None) -> ExecutionPlan:
    """The plan with `room` tokens in the KV cache of a call; None: enough for all sequences."""
    call = plan.calls[name]
    compute = structs.replace(call.compute, kv_cache_tokens=room)
    return structs.replace(plan, calls={**plan.calls, name: structs.replace(call, compute=compute)})
