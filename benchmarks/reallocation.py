"""Reallocation of a whole model between layouts: by chains and by broadcasts, beside the bare transport and another
way.

The processes of one machine move float32 parameters by the executor, over gloo and over the host's memory, between six
pairs of layouts; models of 1 GB, 144 MB and 36 MB in four processes, and one of 144 MB in eight: 48 cases. Beside the
chains stand, of the same bytes and in the same processes:

- broadcasts: the same move by collectives of process groups, one for each set of a root and its receivers;
- raw: messages of the chains' sizes through the same transport, each one piece of memory, and one copy of as many
  bytes as a process copies within its own memory;
- gather: every parameter is sent whole to every process, which cuts its part out, over the same transport.

*chosen* is the carrier that the planner takes by its prices, with the constants of `cpu`: those of messages between the
workers of a host stand for gloo's, too, which goes over the loopback here.

*changes* has the same pairs in bfloat16, of 72 MB in four processes over gloo, where only what changed is sent: the
part of the bytes, and byte for byte what all values are. The last case is such a move of a model of 135 M parameters
over a link of 200 Mbit/s between two networks of their own, which needs root.

All memory was touched before; a time is the median over the repetitions, from barrier to barrier, the ways in turns;
raw and gather have the first four turns. `--quick` moves 144 MB in four processes, once.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from lib.common import argument_parser, case, finish
from lib.reallocation_changes import APART, SLOW, SMALL_LM, Changed, Pair, can_link, moved
from lib.reallocation_rivals import RawMessages, gather_and_slice
from msgspec import structs
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.cpu import host_group
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement
from realhf.launch.process import process_environment
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.reallocation import Reallocation as Move
from realhf.realloc.execute.carriers import BroadcastCarrier, HostCarrier, TorchCarrier
from realhf.realloc.execute.checksum import bit_sum
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import ReallocationPlan, plan_between
from realhf.worker.allocator import keep_freed_memory

MEASURES = (
    "realhf/cpu/host_group.py",
    "realhf/geometry",
    "realhf/planning/model/cluster.py",
    "realhf/planning/model/hardware.py",
    "realhf/planning/model/reallocation.py",
    "realhf/realloc",
    "realhf/worker/allocator.py",
    "csrc/host",
    "csrc/kernels/changes.cpp",
    "benchmarks/lib/reallocation_changes.py",
    "benchmarks/lib/reallocation_rivals.py",
)
MODELS = {
    "36MB": DecoderConfig(hidden_size=256, intermediate_size=704, num_layers=8, num_heads=8, num_kv_heads=8,
                          vocab_size=10240, tied_embeddings=True),
    "144MB": DecoderConfig(hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=8,
                           vocab_size=20480, tied_embeddings=True),
    "1GB": DecoderConfig(hidden_size=1024, intermediate_size=2816, num_layers=16, num_heads=16, num_kv_heads=16,
                         vocab_size=61440, tied_embeddings=True),
}  # fmt: skip
SIZES = [("1GB", 4), ("144MB", 4), ("144MB", 8), ("36MB", 4)]  # models, and processes that move them
TRANSPORTS = {"gloo": 0.6, "host memory": 0.8}  # the least part of the raw bandwidth
LEAST_BYTES = 100e6  # below that the part is not demanded,
MOST_PROCESSES = 4  # nor of more processes, which wait for the machine's cores
REPETITIONS = 10
RIVAL_TURNS = 4  # of raw messages and of gather, which takes long
FASTER = 1.1  # the chosen carrier takes at most this much of the faster one's time,
LEAST_CHOSEN = 44 / 48  # in this part of all cases
DEADLINE_S = 160.0
MOST_CHANGES = 0.03  # of the bytes of all values, where what changed is sent
LEAST_FASTER = 10.0  # over the slow link,
SLOW_REPETITIONS = 3  # where all values take 11 s


@dataclass(frozen=True)
class Measured:
    """Seconds of one pair over one transport."""

    pair: str
    transport: str
    moved_bytes: int
    copied_bytes: int
    chosen: str
    reallocation_s: float
    broadcasts_s: float
    raw_s: float
    gather_s: float

    @property
    def is_well_chosen(self) -> bool:
        chosen_s = self.broadcasts_s if self.chosen == "broadcasts" else self.reallocation_s
        return chosen_s <= FASTER * min(self.broadcasts_s, self.reallocation_s)


def layout_pairs(processes: int) -> dict[str, tuple[Layout, Layout]]:
    """Six pairs of (source, target), by name."""
    half, quarter = processes // 2, processes // 4

    def layout(dp: int, tp: int, pp: int, first: int = 0) -> Layout:
        return Layout(DeviceMesh(first, dp * tp * pp), ParallelStrategy(dp, tp, pp))

    pairs = [
        (layout(1, processes, 1), layout(1, 1, processes)),
        (layout(1, 1, processes), layout(2, half, 1)),
        (layout(1, half, 1), layout(1, half, 1, first=quarter)),
        (layout(1, half, 2), layout(4, quarter, 1)),
        (layout(1, half, 1), layout(1, 1, half, first=half)),
        (layout(1, 1, 1), layout(1, processes, 1)),
    ]
    return {f"{_name(source)} to {_name(target)}": (source, target) for source, target in pairs}


def _name(layout: Layout) -> str:
    s = layout.strategy
    degrees = [f"{axis}{degree}" for axis, degree in (("dp", s.dp), ("tp", s.tp), ("pp", s.pp)) if degree > 1]
    return "-".join(degrees or ["one"]) + (f"@{layout.mesh.first}" if layout.mesh.first else "")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, help="default: all sizes, with their numbers of processes")
    parser.add_argument("--processes", type=int, default=4, help="with --model; default: 4")
    parser.add_argument("--pair", help="of the layouts' names, such as 'tp4 to pp4'; default: all six")
    parser.add_argument("--transport", choices=TRANSPORTS, help="default: both")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.repetitions = arguments.model or "144MB", 1
    sizes = [(arguments.model, arguments.processes)] if arguments.model else SIZES
    transports = [arguments.transport] if arguments.transport else list(TRANSPORTS)
    rows, all_found = [], []
    for model, processes in sizes:
        pairs = [arguments.pair] if arguments.pair else list(layout_pairs(processes))
        found = run(model, processes, pairs, transports, arguments.repetitions)
        rows += [row for each in found for row in cases(model, processes, each)]
        all_found += found
    well_chosen, least = sum(each.is_well_chosen for each in all_found), LEAST_CHOSEN * len(all_found)
    rows.append(case(f"chosen carrier at most {FASTER:g} x the faster one's time", well_chosen, "cases",
                     baseline=len(all_found), ratio=well_chosen / len(all_found), target=LEAST_CHOSEN,
                     holds=well_chosen >= least))  # fmt: skip
    rows += change_cases(arguments.pair, arguments.repetitions)
    finish("reallocation", rows, arguments.json)


def change_cases(only: str | None, repetitions: int) -> Iterator[dict]:
    """Moves of what changed: the part of the bytes on all pairs, or one; the time over a slow link."""
    pairs = [Pair(name, MODELS["144MB"], ends, repetitions) for name, ends in layout_pairs(4).items()]
    for found in moved([pair for pair in pairs if only in (None, pair.name)], 4):
        yield _of_bytes(f"changes: {found.pair}", found)
    if not can_link():
        print("changes: a slow link needs root and iproute2; left out", file=sys.stderr)
        return
    [found] = moved([Pair(f"135M apart, {SLOW}", SMALL_LM, APART, SLOW_REPETITIONS)], 2, SLOW)
    yield _of_bytes(f"changes: {found.pair}", found)
    ratio = found.whole_s / found.changes_s
    yield case(f"changes: {found.pair}: beside all values", found.changes_s, "s", baseline=found.whole_s, ratio=ratio,
               target=LEAST_FASTER, holds=ratio >= LEAST_FASTER)  # fmt: skip


def _of_bytes(name: str, found: Changed) -> dict:
    return {
        **case(f"{name}: bytes", found.bytes / 1e6, "MB", baseline=found.whole_bytes / 1e6,
               ratio=found.bytes / found.whole_bytes, target=MOST_CHANGES,
               holds=found.bytes <= MOST_CHANGES * found.whole_bytes),
        "seconds": found.changes_s,
        "whole_seconds": found.whole_s,
    }  # fmt: skip


def cases(model: str, processes: int, measured: Measured) -> Iterator[dict]:
    """The comparisons of one measurement."""
    name = f"{model}, {processes} processes, {measured.pair}, {measured.transport}"
    seconds, gigabytes = measured.reallocation_s, measured.moved_bytes / 1e9
    part = measured.raw_s / seconds
    is_demanded = measured.moved_bytes > LEAST_BYTES and processes <= MOST_PROCESSES
    least = TRANSPORTS[measured.transport] if is_demanded else 0.0
    yield {
        **case(f"{name}: of raw bandwidth", gigabytes / seconds, "GB/s", baseline=gigabytes / measured.raw_s,
               ratio=part, target=least, holds=part >= least),
        "seconds": seconds,
        "bytes": measured.moved_bytes,
        "copied_locally_bytes": measured.copied_bytes,
    }  # fmt: skip
    yield {
        **case(f"{name}: beside broadcasts", seconds, "s", baseline=measured.broadcasts_s,
               ratio=measured.broadcasts_s / seconds, target=0.0, holds=True),
        "chosen": measured.chosen,
    }  # fmt: skip
    ratio = measured.gather_s / seconds
    yield case(f"{name}: beside gather", seconds, "s", baseline=measured.gather_s, ratio=ratio, target=1.0,
               holds=ratio > 1)  # fmt: skip


def run(
    model: str, processes: int, pairs: Sequence[str], transports: Sequence[str], repetitions: int
) -> list[Measured]:
    """Measures in new processes; ends them all, whatever happens."""
    os.environ.update(process_environment())  # as a worker has it
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="realhf-reallocation-", dir="/dev/shm") as directory:
        reader, writer = context.Pipe(duplex=False)
        workers = [
            context.Process(
                target=_measure, daemon=True,
                args=(rank, processes, directory, model, pairs, transports, repetitions, writer if rank == 0 else None),
            )
            for rank in range(processes)
        ]  # fmt: skip
        try:
            for worker in workers:
                worker.start()
            writer.close()
            if not reader.poll(DEADLINE_S * len(pairs)):
                sys.exit(f"{model}, {processes} processes: nothing measured in {DEADLINE_S * len(pairs):g} s")
            return [Measured(**fields) for fields in reader.recv()]
        finally:
            for worker in workers:
                worker.join(timeout=5)
                worker.kill()


def _measure(
    rank: int, processes: int, directory: str, model: str, pairs: Sequence[str], transports: Sequence[str],
    repetitions: int, results: Connection | None,
) -> None:  # fmt: skip
    """One process: all pairs over all transports; rank 0 gives back the figures."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.FileStore(f"{directory}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timeout)
    memory = dist.new_group(list(range(processes)), backend=host_group.BACKEND, timeout=timeout)
    groups = {"gloo": dist.group.WORLD, "host memory": memory}
    measured = []
    for pair in pairs:
        source, target = layout_pairs(processes)[pair]
        measured += measure_pair(rank, MODELS[model], pair, source, target, groups, transports, repetitions)
    if results is not None:
        results.send([vars(each) for each in measured])
    dist.barrier()
    dist.destroy_process_group()


def measure_pair(
    rank: int, model: DecoderConfig, pair: str, source: Layout, target: Layout,
    groups: Mapping[str, dist.ProcessGroup], transports: Sequence[str], repetitions: int,
) -> list[Measured]:  # fmt: skip
    plan, by_broadcasts = (plan_between(model, Placement(source), Placement(target), by=by)
                           for by in ("chains", "broadcasts"))  # fmt: skip
    (source_flat, held), (target_flat, wanted) = (_allocate(model, layout, rank) for layout in (source, target))
    for box, tensor in held:
        tensor.normal_(generator=torch.Generator().manual_seed(zlib.crc32(repr(box).encode())))
    moved = sum(plan.sent_bytes.values())
    copied = sum(box.size * plan.element_bytes for boxes in plan.local_copies.values() for box in boxes)
    measured = []
    for transport in transports:
        group = groups[transport]
        carrier = HostCarrier(group) if transport == "host memory" else TorchCarrier(group)
        of_groups = BroadcastCarrier(_groups_of(by_broadcasts, group), carrier)
        ways = [
            partial(execute, Reallocation(plan, rank, held, wanted, carrier, timeout_s=DEADLINE_S)),
            partial(execute, Reallocation(by_broadcasts, rank, held, wanted, of_groups, timeout_s=DEADLINE_S)),
            RawMessages(plan, rank, carrier, source_flat, target_flat, DEADLINE_S),
            partial(gather_and_slice, model, source, rank, held, wanted, group),
        ]
        _check([way for way in ways if not isinstance(way, RawMessages)], wanted)
        seconds: list[list[float]] = [[] for _ in ways]
        for turn in range(repetitions):
            for way, times in zip(ways if turn < RIVAL_TURNS else ways[:2], seconds, strict=False):
                times.append(_seconds(way))
        chosen = chosen_carrier(model, source, target, transport, dist.get_world_size())
        measured.append(Measured(pair, transport, moved, copied, chosen, *map(statistics.median, seconds)))
    return measured


_GROUPS: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}  # of this process, for all pairs


def _groups_of(plan: ReallocationPlan, like: dist.ProcessGroup) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The groups of a plan's broadcasts, over the transport of `like`; each is made once, by all processes."""
    backend = dist.get_backend(like)
    for ranks in plan.groups:
        if (backend, ranks) not in _GROUPS:
            _GROUPS[backend, ranks] = dist.new_group(list(ranks), timedelta(seconds=DEADLINE_S), backend)
    return {ranks: _GROUPS[backend, ranks] for ranks in plan.groups}


def chosen_carrier(model: DecoderConfig, source: Layout, target: Layout, transport: str, processes: int) -> str:
    """By the planner's prices."""
    cpu = load_hardware("cpu")
    loopback = {"inter_node_bandwidth": cpu.intra_node_bandwidth, "inter_node_latency_s": cpu.intra_node_latency_s}
    hardware = structs.replace(cpu, **loopback)
    per_node = processes if transport == "host memory" else 1
    cluster = Cluster(num_nodes=processes // per_node, devices_per_node=per_node, hardware=hardware)
    move = Move(model, 4, cluster, hardware)
    chains_s = move.table([Placement(source)], [target])[0]
    return "broadcasts" if move.broadcasts_s(Placement(source), target) < chains_s else "chains"


def _allocate(model: DecoderConfig, layout: Layout, rank: int) -> tuple[Tensor, list[tuple[Box, Tensor]]]:
    """A vector, and the boxes of a rank as parts of it one behind the other."""
    boxes = device_boxes(model, layout, rank)
    flat = torch.zeros(sum(box.size for box in boxes))
    parts = flat.split([box.size for box in boxes]) if boxes else []
    return flat, [(box, part.view(box.shape)) for box, part in zip(boxes, parts, strict=True)]


def _check(ways: Sequence[Callable[[], object]], wanted: Sequence[tuple[Box, Tensor]]) -> None:
    """Every way leaves the same values in `wanted`; also touches all memory."""
    sums = []
    for way in ways:
        for _, tensor in wanted:
            tensor.zero_()
        dist.barrier()
        way()
        sums.append([int(bit_sum(tensor)) for _, tensor in wanted])
    assert all(other == sums[0] for other in sums), "the ways do not move the same values"


def _seconds(way: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    way()
    dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
