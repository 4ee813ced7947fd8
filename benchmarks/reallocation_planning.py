"""Planning a reallocation at size: seconds until one device of 128 knows what it sends, receives and copies where.

Llama-70B's shapes in bfloat16, eight devices a node. A pair costs `plan_between` and `locate` of the device that the
plan gives the most to do. Named pairs each by itself, random ones of a kind by their worst. `--quick`: the named ones.
"""

import random
import statistics
import time
from typing import Any

import torch
from lib.common import case, finish, parse_arguments

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement, held_boxes
from realhf.realloc.execute.locations import locate
from realhf.realloc.plan.planner import plan_between

LLAMA_70B = DecoderConfig(
    hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8, vocab_size=128256
)
DEVICES, TARGET_S, PAIRS_OF_A_KIND = 128, 2.0, 30

# (dp, tp, pp) of source and target.
NAMED = (
    ((4, 8, 4), (16, 8, 1)),
    ((2, 8, 8), (16, 4, 2)),
    ((1, 8, 16), (8, 2, 8)),
    ((8, 8, 2), (32, 4, 1)),
)
# Every device gets the whole model, 141 GB, more than it can hold: nothing else is as much to plan.
WHOLE = ParallelStrategy(128)


def main() -> None:
    arguments = parse_arguments(__doc__)
    everywhere, first_half, second_half = DeviceMesh(0, DEVICES), DeviceMesh(0, 64), DeviceMesh(64, 64)
    results = [
        *(named_pair(ParallelStrategy(*source), ParallelStrategy(*target)) for source, target in NAMED),
        named_pair(ParallelStrategy(8, 8, 2), ParallelStrategy(32, 4, 1), "fsdp"),
        named_pair(ParallelStrategy(1, 8, 16), WHOLE),
        named_pair(ParallelStrategy(64, 2, 1), WHOLE, "fsdp"),
    ]
    if not arguments.quick:
        results += random_pairs("on the same devices", everywhere, everywhere)
        results += random_pairs("on the same devices, from fsdp", everywhere, everywhere, "fsdp")
        results += random_pairs("from one half to the other", first_half, second_half)
        results += random_pairs("between halves that overlap", first_half, DeviceMesh(32, 64))
    finish("reallocation_planning", results, arguments.json)


def named_pair(
    source: ParallelStrategy, target: ParallelStrategy, data_parallel: DataParallel = "zero1"
) -> dict[str, Any]:
    mesh = DeviceMesh(0, DEVICES)
    how = " fsdp" if data_parallel == "fsdp" else ""
    return at_most(f"{source}{how} -> {target}", seconds(Layout(mesh, source), Layout(mesh, target), data_parallel))


def random_pairs(
    kind: str, source: DeviceMesh, target: DeviceMesh, data_parallel: DataParallel = "zero1"
) -> list[dict[str, Any]]:
    """The worst and the median of pairs of any layouts on the two meshes."""
    choice = random.Random(kind)
    measured = [
        seconds(choice.choice(layouts(source)), choice.choice(layouts(target)), data_parallel)
        for _ in range(PAIRS_OF_A_KIND)
    ]
    name = f"{PAIRS_OF_A_KIND} pairs {kind}"
    return [at_most(f"{name}, worst", max(measured)), at_most(f"{name}, median", statistics.median(measured))]


def layouts(mesh: DeviceMesh) -> list[Layout]:
    """Those with tp to 8 and pp to 16 under which no device holds the whole model."""
    degrees = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8, 16) if 1 < tp * pp <= mesh.size]
    return [Layout(mesh, ParallelStrategy(mesh.size // (tp * pp), tp, pp)) for tp, pp in degrees]


def seconds(source: Layout, target: Layout, data_parallel: DataParallel = "zero1") -> float:
    plan_between.cache_clear()
    start = time.perf_counter()
    plan = plan_between(LLAMA_70B, Placement(source, data_parallel), Placement(target), 8, element_bytes=2)
    taken = time.perf_counter() - start
    moved = {
        device: plan.sent_bytes.get(device, 0) + plan.received_bytes.get(device, 0)
        for device in (*source.mesh.devices, *target.mesh.devices)
    }
    busiest = max(moved, key=moved.__getitem__)
    held = [
        [(box, torch.empty(box.shape, dtype=torch.bfloat16, device="meta")) for box in boxes]
        for boxes in (held_boxes(LLAMA_70B, source, busiest, data_parallel), held_boxes(LLAMA_70B, target, busiest))
    ]
    start = time.perf_counter()
    locate(plan, busiest, *held)
    return taken + time.perf_counter() - start


def at_most(name: str, value: float) -> dict[str, Any]:
    """A case where less is better; the target is the baseline."""
    ratio = TARGET_S / max(value, 1e-12)
    return case(name, value, "s", baseline=TARGET_S, ratio=ratio, target=TARGET_S, holds=value <= TARGET_S)


if __name__ == "__main__":
    main()
