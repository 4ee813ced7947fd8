"""Ways to run a call that need less memory, beside those that its setup names: a training with some of its layers
recomputed, or with modes of its operators of their own, between ZeRO-1 and full sharding; a generation with less room
for keys and values."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from realhf.architecture.decoding import PAGE_TOKENS
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import CallCompute
from realhf.geometry.layout import ParallelStrategy, chunk_layers
from realhf.planning.model.call import CallModel
from realhf.planning.model.mode_choice import memory_limits
from realhf.planning.model.workload import Workload
from realhf.planning.task import PlanningTask

Way = tuple[ParallelStrategy, int, CallCompute]  # strategy, number of micro-batches, computation

PARTS = (0.25, 0.5, 0.75)  # parts of the layers, where other calls share the devices
CACHE_PARTS = (1 / 2, 1 / 4, 1 / 8, 1 / 16)  # the KV cache, between the least and the one for all sequences
# Where calls share more devices than that, what a search loses by more options is more than these are worth: PPO of 7B
# models on 8 H100, a step of 28.5 s found in place of 28.1 s by as many evaluations.
MOST_SHARED_DEVICES = 4


def partly_recomputed(task: PlanningTask, call: ModelFunctionCallDef, ways: Sequence[Way]) -> Iterator[Way]:
    """Of `ways` those that recompute all layers, with as few layers as memory allows in place of that: fewer take less
    time and more memory. None where the training fits without recomputation.

    What other models keep on the device is not known before a plan is chosen. Here they keep what they would divided
    over all devices; where other calls share the devices, some parts of the layers are choices, too, but not together
    with other ways to save memory: a search has to look at all of them.
    """
    if not call.trains or task.searched != "all" or "recomputation" not in task.open_choices.get(call.model_name, ()):
        return
    model = task.call_models[call.name]
    if model.shares_devices and task.cluster.num_devices > MOST_SHARED_DEVICES:
        return
    left_bytes = task.cluster.device_memory_bytes - _others_bytes(task, call)
    for strategy, count, compute in ways:
        is_plain = strategy.chunks == 1 and compute.data_parallel is None and not compute.offload_states
        if compute.recomputation is None or (model.shares_devices and not is_plain):
            continue
        kept = model.under(replace(compute, recomputation=None))
        if kept.least_bytes(strategy, count) > left_bytes:
            for number in _numbers(model, (strategy, count, compute), left_bytes):
                yield strategy, count, replace(compute, recomputed_layers=number)


def smaller_caches(task: PlanningTask, call: ModelFunctionCallDef, ways: Sequence[Way]) -> Iterator[Way]:
    """The `ways` that generate all samples together, with a KV cache that does not hold all of them at their longest.

    The rooms: the least, one sequence in each part in flight; some parts of the way from it to all; and the room left
    beside the homes of all models, each on all devices with data parallelism alone (HybridFlow, section 6, algorithm
    2).

    None where the experiment gives the room, or where all of it fits beside these homes. More micro-batches save the
    same memory, but run as few sequences at once as if all reached the limit; which of both is faster depends on the
    responses.
    """
    if not has_open_room(task, call):
        return
    model = task.call_models[call.name]
    everywhere = ParallelStrategy(task.cluster.num_devices)
    kept = {home for home in task.homes.values() if task.graph.model_calls[home].model_name not in task.offload}
    left_bytes = task.cluster.device_memory_bytes
    left_bytes -= sum(task.call_models[home].static_bytes(everywhere) for home in kept)
    for strategy, count, compute in ways:
        work = model.under(compute).work(strategy, count)
        own_bytes = left_bytes - (0 if strategy == everywhere else work.placed.parameter_bytes())
        if count > 1 or work.dynamic_bytes() <= own_bytes:
            continue
        parts = work.parts_in_flight
        rooms = range(least_room(model.lengths, parts), int(work.needed_tokens), parts * PAGE_TOKENS)
        found = {rooms[int(part * len(rooms))] for part in (0, *CACHE_PARTS)} if rooms else set()
        for room in sorted(found | _fitting(model, (strategy, count, compute), rooms, own_bytes), reverse=True):
            yield strategy, count, replace(compute, kv_cache_tokens=room)


def _fitting(model: CallModel, way: Way, rooms: range, own_bytes: float) -> set[int]:
    """The largest of these rooms with which a generation takes no more than `own_bytes`, if there is one."""
    strategy, count, compute = way

    def is_too_large(room: int) -> bool:
        within = model.under(replace(compute, kv_cache_tokens=room))
        return within.work(strategy, count).dynamic_bytes() > own_bytes

    return set(rooms[: bisect_left(rooms, True, key=is_too_large)][-1:])


def has_open_room(task: PlanningTask, call: ModelFunctionCallDef) -> bool:
    """Whether a plan may choose the room for keys and values of a call: of a generation in the engine of this project,
    where the experiment leaves it open."""
    is_open = getattr(call.interface_impl, "kv_cache_tokens", 0) is None
    return call.generates and is_open and task.searched == "all" and call.model_name in task.mixed


def least_room(lengths: Workload, parts: int) -> int:
    """Tokens of the smallest KV cache: one sequence at its longest in each part of the batch that is in flight."""
    return parts * math.ceil(lengths.max_tokens / PAGE_TOKENS) * PAGE_TOKENS


def _numbers(model: CallModel, way: Way, left_bytes: float) -> list[int]:
    """Numbers of layers worth a search, neither none nor all."""
    strategy, count, compute = way
    most = len(chunk_layers(model.call.config.num_layers, strategy, 0)[0])  # of a model chunk

    def fits(number: int) -> bool:
        return model.under(replace(compute, recomputed_layers=number)).least_bytes(strategy, count) <= left_bytes

    found = [round(part * most) for part in PARTS] if model.shares_devices else []
    if model.under(compute).least_bytes(strategy, count) <= left_bytes:
        # What is needed while a layer is run again fits with all layers, and fewer need less: only what is kept counts.
        found.append(bisect_left(range(most), True, key=fits))
    return sorted({number for number in found if 0 < number < most})


def _others_bytes(task: PlanningTask, call: ModelFunctionCallDef) -> float:
    """Bytes that the other models' homes keep on a device where all devices have an equal part."""
    homes = {task.homes[name] for name, other in task.graph.model_calls.items() if other.model_name != call.model_name}
    kept = [home for home in homes if task.graph.model_calls[home].model_name not in task.offload]
    whole = sum(task.call_models[home].static_bytes(ParallelStrategy()) for home in kept)
    return whole / task.cluster.num_devices


def mixed_ways(task: PlanningTask, call: ModelFunctionCallDef, ways: Sequence[Way]) -> Iterator[Way]:
    """Of `ways`, all in one (dp, tp, pp), those that are fully sharded, but with modes of operators in place of that.

    Within each of the states' `memory_limits` those that may be the fastest. Modes are taken to make a way no
    faster than ZeRO-1 does: so a way gets none where a faster one is known, with modes, or with ZeRO-1 that fits. (With
    one micro-batch and all gathers hidden behind computation, sharding would save an all-gather.)
    """
    if not has_modes(task, call):
        return
    model = task.call_models[call.name]
    candidates = sorted(_candidates(model, ways), key=lambda candidate: candidate.zero1_s)
    for level in range(max((len(candidate.limits) for candidate in candidates), default=0)):
        fastest_s = float("inf")
        for candidate in candidates:
            limit_bytes = candidate.limits[min(level, len(candidate.limits) - 1)]
            if candidate.zero1_s >= fastest_s or candidate.zero1_bytes <= limit_bytes:
                break
            if candidate.least_bytes > limit_bytes:
                continue
            strategy, count, _ = candidate.way
            mixed = _mix(task, model, candidate.way, limit_bytes)
            if mixed is not None:
                yield strategy, count, mixed
                fastest_s = min(fastest_s, model.under(mixed).seconds(strategy, count))


class _Candidate(NamedTuple):
    """A way as ZeRO-1 has it: its seconds, the bytes of its states so and with all of them divided, and the limits that
    they may have."""

    zero1_s: float
    zero1_bytes: int
    least_bytes: int
    limits: list[int]
    way: Way


def _candidates(model: CallModel, ways: Sequence[Way]) -> Iterator[_Candidate]:
    """Those that fit with all states divided."""
    available_bytes = {strategy: model.available_bytes(strategy) for strategy in {strategy for strategy, _, _ in ways}}
    for strategy, count, compute in ways:
        if compute.data_parallel != "fsdp":
            continue
        plain = replace(compute, data_parallel=None)
        of_way, least_bytes = model.under(plain), model.under(compute).static_bytes(strategy)
        dynamic = of_way.work(strategy, count).dynamic_bytes()
        left_bytes, zero1_bytes = available_bytes[strategy] - dynamic, of_way.static_bytes(strategy)
        if least_bytes <= left_bytes:
            limits = memory_limits(left_bytes, zero1_bytes, least_bytes, shares_devices=model.shares_devices)
            zero1_s = of_way.seconds(strategy, count)
            yield _Candidate(zero1_s, zero1_bytes, least_bytes, limits, (strategy, count, plain))


def smallest_mix(task: PlanningTask, call: ModelFunctionCallDef, sharded: Way) -> CallCompute | None:
    """As a fully sharded training, but with the modes of operators that need the least memory; None where a plan may
    choose none."""
    if not has_modes(task, call):
        return None
    strategy, count, compute = sharded
    way = replace(compute, data_parallel=None, prefetch=_prefetches(task, call)[-1])
    rules = task.call_models[call.name].under(way).mix(strategy, count, None)
    return replace(way, data_parallel=rules) if rules else None


def _mix(task: PlanningTask, model: CallModel, way: Way, limit_bytes: int) -> CallCompute | None:
    strategy, count, compute = way
    for prefetch in _prefetches(task, model.call):
        plain = replace(compute, prefetch=prefetch)
        rules = model.under(plain).mix(strategy, count, limit_bytes)
        if rules:
            return replace(plain, data_parallel=rules)
    return None


def has_modes(task: PlanningTask, call: ModelFunctionCallDef) -> bool:
    """Whether a plan may choose modes of the operators that a call trains, in an engine that has ZeRO-1."""
    is_open = task.searched == "all" and call.model_name in task.mixed
    return call.trains and is_open and task.call_models[call.name].features.zero1


def _prefetches(task: PlanningTask, call: ModelFunctionCallDef) -> list[bool | None]:
    """Whether the next gather begins early, in the order in which it is tried: memory for two gathers is taken only
    where it saves time, and is there."""
    features = task.call_models[call.name].features
    if "prefetch" not in task.open_choices.get(call.model_name, ()) or not features.prefetch:
        return [None]
    return [None, False] if features.on_gpus else [False]
