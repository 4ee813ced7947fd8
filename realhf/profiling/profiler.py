"""Measures the constants and timings of the planner's cost model: `python -m realhf.profiling.profiler RUN_DIR`, a
process a device.

All ranks measure at the same time, because that is how a run loads the machine.
"""

import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.base.files import decode_json, read_bytes
from realhf.engine.train.optimizer import FlatAdamW, gradient_dtype, square_sum
from realhf.engine.train.ordered import OrderedGradient
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.reproducible import unordered
from realhf.launch.process import worker_index
from realhf.parallel.collectives import all_gather, reduce_scatter
from realhf.parallel.groups import GroupTable, make_world
from realhf.parallel.waiting import end_process, waits_on
from realhf.planning.model.measured import (
    CONSTANTS_FILE,
    NETWORK,
    MeasuredConstant,
    MeasuredConstants,
    save_constants,
)
from realhf.planning.model.profile import (
    CallOverheads,
    CollectiveKind,
    CollectiveTimings,
    Curve,
    DecodeTimings,
    LayerProfile,
    ProfilePart,
    TensorTimings,
    save_profile,
)
from realhf.profiling.call_bench import SEQUENCES, CallBench
from realhf.profiling.constants_bench import ConstantsBench, communicator_bytes
from realhf.profiling.curves import (
    LEAST_OF_EMBEDDING,
    Floors,
    backward_floors,
    clock_floors,
    measured_curves,
    noise_text,
)
from realhf.profiling.job import JOB_FILE, RESULTS, ProfileJob, ProfileTarget
from realhf.profiling.model_bench import ModelBench, Stopwatch
from realhf.profiling.network_bench import there_and_back
from realhf.profiling.nodes import Nodes, on_found, stay_within_node
from realhf.profiling.reallocation_bench import reallocation
from realhf.profiling.round_trip import median_round_trip_s
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.paths import RunDirectory, worker_name
from realhf.worker.allocator import keep_freed_memory
from realhf.worker.device import own_device

SMALLEST_TOKENS = 16
COLLECTIVE_BYTES = tuple(2**k for k in range(10, 25, 2))
LARGEST_OPTIMIZER = 2**23  # parameters; more of them leave the caches as these do

Run = Callable[[Tensor], object]


class Profiler:
    """Carries out a job on all ranks of the world together. `set_activity` gets the present measurement in words."""

    def __init__(
        self, job: ProfileJob, rank: int, device: torch.device, directory: Path, set_activity: Callable[[str], None]
    ):
        assert job.hardware is not None, "`on_found` has named it"
        self.job, self.rank, self.device, self.directory = job, rank, device, directory
        self.hardware = job.hardware.name
        self.set_activity = set_activity
        self.watch = Stopwatch(device, job.repetitions)
        self.noisy: list[str] = []  # found by `_curves` since the last `_take_noisy`
        workers = job.num_workers
        self.layouts = {
            size: Layout(DeviceMesh(0, workers // size * size), ParallelStrategy(dp=workers // size, tp=size))
            for size in powers_of_two(1, workers)
        }
        pairs = workers // 2
        self.pipeline = Layout(DeviceMesh(0, 2 * pairs), ParallelStrategy(dp=pairs, pp=2)) if pairs else None
        # Neighbours, which measure messages in the same way as pipeline stages send them.
        stages = [Layout(DeviceMesh(2 * i, 2), ParallelStrategy(pp=2)) for i in range(pairs)]
        alone = [Layout(DeviceMesh(device, 1), ParallelStrategy()) for device in range(2 * pairs)]
        layouts = [*self.layouts.values(), *([self.pipeline] if self.pipeline else []), *stages, *alone]
        self.table = GroupTable(layouts, rank, job.timeout_s, waits=waits_on(device, end_process))
        # The messages and the layouts of this rank and its neighbour; None for the last of an odd number.
        self.exchange: Run | None = None
        self.neighbours: tuple[Layout, Layout] | None = None
        if rank // 2 < pairs:
            self.exchange = partial(there_and_back, self.table.groups(stages[rank // 2]))
            self.neighbours = alone[rank // 2 * 2], alone[rank // 2 * 2 + 1]

    def profiles(self) -> list[LayerProfile]:
        """One profile a target of the job, in their order; those of rank 0 are complete."""
        of_communicator = communicator_bytes(self.device, self.job.timeout_s)
        self.watch.take_spread()
        collectives = self._collectives()
        of_collectives: dict[ProfilePart, float] = {"collectives": self.watch.take_spread()} if collectives else {}
        noisy_collectives = self._take_noisy()
        found: list[LayerProfile] = []
        # By trunk: the first of the models that differ in their heads alone.
        measured: dict[tuple[DecoderConfig, DType], LayerProfile] = {}
        for target in self.job.targets:
            trunk = replace(target.model.with_head("scalar"), num_layers=1), target.dtype
            if trunk in measured:
                found.append(self._with_head(measured[trunk], target))
            else:
                measured[trunk] = self._measure(target)
                found.append(measured[trunk])
        self.set_activity("measuring the way of a request and its reply")
        call_overhead_s = median_round_trip_s(
            self.directory, self.rank, self.job.num_workers, self.job.batch_size, self.job.timeout_s
        )
        return [
            msgspec.structs.replace(
                profile,
                collectives=collectives,
                communicator_bytes=of_communicator,
                call_overhead_s=call_overhead_s,
                spread={**profile.spread, **of_collectives},
                noisy=(*profile.noisy, *noisy_collectives),
            )
            for profile in found
        ]

    def constants(self) -> MeasuredConstants:
        """The constants of the machine that the job asks for; the result of rank 0 is complete."""
        groups = self.table.groups(self.layouts[1])
        bench = ConstantsBench(self.job.dtypes, groups, self.exchange, self.job.num_workers, self.watch)
        found: dict[str, MeasuredConstant] = {}
        for measurement in self.job.constants:
            if measurement == NETWORK:
                continue  # `Nodes` has measured it
            self.set_activity(f"measuring {measurement}")
            found |= bench.found(measurement)
        return MeasuredConstants(hardware=self.hardware, constants=found, measured=self._circumstances())

    def _measure(self, target: ProfileTarget) -> LayerProfile:
        """The profile of a model type, without the timings that `profiles` measures once for the machine."""
        spread: dict[ProfilePart, float] = {}
        self.watch.take_spread()
        tensor = tuple(self._tensor(target, tp) for tp in self.layouts if _is_legal(target, tp))
        self.set_activity(f"measuring sampling and the optimizer, {target.dtype}")
        bench = self._bench(target, 1)
        # A worker's share of the batch under pure data parallelism.
        sequences = max(1, self.job.batch_size // self.job.num_workers)
        sampling_s = bench.sampling(sequences, self.job.sequence_length)
        _, training = bench.parts(self._lengths(SMALLEST_TOKENS))
        optimizer_s = self._optimizer_s_per_parameter(target, training)
        spread["layers"] = self.watch.take_spread()
        self.set_activity(f"measuring whole calls, {target.dtype}")
        overheads = self._overheads(target, optimizer_s)
        spread["overheads"] = self.watch.take_spread()
        self.set_activity(f"measuring reallocation, {target.dtype}")
        moved = None
        if self.job.num_workers > 1:
            moved = reallocation(target, self.neighbours, self.table, self.watch)
            spread["reallocation"] = self.watch.take_spread()
        return LayerProfile(
            hardware=self.hardware,
            model=target.model,
            dtype=target.dtype,
            reproducible=target.reproducible,
            sequence_length=self.job.sequence_length,
            tensor=tensor,
            collectives=(),
            optimizer_s_per_parameter=optimizer_s,
            call_overhead_s=0.0,
            sampling_s=sampling_s,
            overheads=overheads,
            reallocation=moved,
            spread=spread,
            noisy=self._take_noisy(),
            measured=self._circumstances(),
        )

    def _tensor(self, target: ProfileTarget, tp: int) -> TensorTimings:
        bench, of_embedding = self._bench(target, tp), partial(backward_floors, part=LEAST_OF_EMBEDDING)
        what = f"{target.model.head} model, {target.dtype}, tp={tp}"
        self.set_activity(f"measuring layer and embedding: {what}")
        layer = self._both_ways(f"tp={tp} layer", lambda tokens: bench.layer(self._lengths(tokens)))
        embedding = self._both_ways(f"tp={tp} embedding", bench.embedding, of_embedding)
        self.set_activity(f"measuring head: {what}")
        head = self._both_ways(_head_name(tp), bench.head)
        self.set_activity(f"measuring decode: {what}")
        length = self.job.sequence_length
        contexts = sorted({max(length // 2, 1), length, 2 * length})
        return TensorTimings(
            tp=tp,
            includes_all_reduce=True,
            layer_forward=layer[0],
            layer_backward=layer[1],
            embedding_forward=embedding[0],
            embedding_backward=embedding[1],
            head_forward=head[0],
            head_backward=head[1],
            layer_decode=tuple(self._decode(bench, tp, context) for context in contexts),
        )

    def _decode(self, bench: ModelBench, tp: int, context: int) -> DecodeTimings:
        name = f"tp={tp} layer_decode of context {context}"
        batches = powers_of_two(1, self.job.max_sequences)
        (seconds,) = self._curves([name], "sequences", batches, lambda sequences: (bench.decode(sequences, context),))
        return DecodeTimings(context=context, seconds=seconds)

    def _with_head(self, measured: LayerProfile, target: ProfileTarget) -> LayerProfile:
        """The profile of a model type whose trunk was measured: only the head is new."""
        tensor = []
        for timings in measured.tensor:
            self.set_activity(f"measuring head: {target.model.head} model, {target.dtype}, tp={timings.tp}")
            forward, backward = self._both_ways(_head_name(timings.tp), self._bench(target, timings.tp).head)
            tensor.append(msgspec.structs.replace(timings, head_forward=forward, head_backward=backward))
        heads = tuple(_head_name(timings.tp) for timings in measured.tensor)
        of_trunk = (text for text in measured.noisy if not text.startswith(heads))
        noisy = (*of_trunk, *self._take_noisy())
        return msgspec.structs.replace(measured, model=target.model, tensor=tuple(tensor), noisy=noisy)

    def _both_ways(
        self, name: str, measure: Callable[[int], tuple[float, float]], floors: Floors = backward_floors
    ) -> tuple[Curve, Curve]:
        """The curves of forward and backward by tokens."""
        sizes = powers_of_two(SMALLEST_TOKENS, self.job.max_tokens)
        forward, backward = self._curves([f"{name}_forward", f"{name}_backward"], "tokens", sizes, measure, floors)
        return forward, backward

    def _curves(
        self,
        names: Sequence[str],
        unit: str,
        sizes: Sequence[int],
        measure: Callable[[int], tuple[float, ...]],
        floors: Floors = clock_floors,
    ) -> tuple[Curve, ...]:
        """The curves whose seconds `measure` gives; notes the noisy ones by name."""
        found = measured_curves(sizes, measure, floors)
        self.noisy += [noise_text(name, unit, each) for name, each in zip(names, found, strict=True) if each.noisy]
        return tuple(each.curve for each in found)

    def _take_noisy(self) -> tuple[str, ...]:
        noisy, self.noisy = tuple(self.noisy), []
        return noisy

    def _optimizer_s_per_parameter(self, target: ProfileTarget, training: Callable[[], object]) -> float:
        """Seconds per parameter of a mini-batch: AdamW, zeroing gradients, norm and clipping.

        They follow `training`, as in a run: repeated without anything between, they took a quarter less on the CPU.
        """
        count = min(sum(prod(spec.shape) for spec in decoder_parameters(target.model)), LARGEST_OPTIMIZER)
        parameters = torch.zeros(count, dtype=getattr(torch, target.dtype), device=self.device)
        config = OptimizerConfig()
        gradients = torch.ones(count, dtype=gradient_dtype(parameters.dtype, config), device=self.device)
        is_ordered = target.reproducible == "layout"
        optimizer = FlatAdamW([parameters], config, total_steps=1)

        def step() -> None:
            gradients.zero_()
            if is_ordered:
                OrderedGradient.norm([gradients], self.device, None)
            else:
                square_sum(gradients).item()
            optimizer.step([gradients], 0.5)

        return self.watch.seconds(step, before=training) / count

    def _overheads(self, target: ProfileTarget, optimizer_s_per_parameter: float) -> CallOverheads:
        sequences = self._lengths(SEQUENCES * self.job.sequence_length)
        bench = CallBench(
            target,
            self.table.groups(self.layouts[1]),
            self.table.groups(self.pipeline) if self.pipeline and self.exchange else None,
            self.watch,
            (SEQUENCES * sequences)[:SEQUENCES],  # rounding may leave fewer
        )
        message_s = bench.message_s(self.exchange) if self.pipeline else 0.0
        return bench.overheads(optimizer_s_per_parameter, message_s)

    def _bench(self, target: ProfileTarget, tp: int) -> ModelBench:
        layout = self.layouts[tp]
        groups = self.table.groups(layout) if self.rank in layout.mesh.devices else None
        return ModelBench(target.model, target.dtype, groups, self.watch, reproducible=target.reproducible)

    def _lengths(self, tokens: int) -> list[int]:
        return spread_lengths(tokens, self.job.sequence_length, self.job.length_spread)

    def _collectives(self) -> tuple[CollectiveTimings, ...]:
        """Timings in groups of 2, 4, ... neighbours, all groups of one size at the same time."""
        found = []
        for size, layout in self.layouts.items():
            if size == 1:
                continue
            self.set_activity(f"measuring collectives of {size}")
            group = self.table.groups(layout).tensor if self.rank in layout.mesh.devices else None
            for kind, run in self._works(size).items():
                found.append(self._collective(kind, size, None if group is None else partial(run, group=group)))
        if self.job.num_workers > 1:
            found.append(self._collective("send", 2, self.exchange))
        return tuple(found)

    def _works(self, size: int) -> dict[CollectiveKind, Callable[..., object]]:
        """The collectives of a run in a group of neighbours: tensor parallelism sums, data parallelism divides."""
        return {
            "all_reduce": dist.all_reduce,
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
            "broadcast": partial(dist.broadcast, src=self.rank // size * size),
        }

    def _collective(self, kind: CollectiveKind, size: int, run: Run | None) -> CollectiveTimings:
        def measure(size_bytes: int) -> tuple[float]:
            return (self.watch.buffer_s(run, size_bytes, turns=2 if kind == "send" else 1),)

        (seconds,) = self._curves([f"{kind} of {size}"], "bytes", COLLECTIVE_BYTES, measure)
        return CollectiveTimings(kind=kind, group_size=size, seconds=seconds)

    def _circumstances(self) -> dict[str, str | int | float]:
        is_gpu = self.device.type == "cuda"
        return {
            "date": time.strftime("%Y-%m-%d"),
            "host": platform.node(),
            "device": torch.cuda.get_device_name(self.device) if is_gpu else platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "threads_per_worker": torch.get_num_threads(),
            "workers": self.job.num_workers,
            "repetitions": self.job.repetitions,
            "length_spread": self.job.length_spread,
            "torch": str(torch.__version__),
        }


def powers_of_two(first: int, last: int) -> list[int]:
    """`first`, a power of two, and its doubles up to `last`."""
    return [first * 2**k for k in range((last // first).bit_length())]


def spread_lengths(tokens: int, mean: int, spread: int) -> list[int]:
    """Lengths of sequences that sum to `tokens`: as many as have about `mean` tokens on average, evenly spread
    over `spread` tokens to either side. Attention runs once for each distinct length, so it matters."""
    count = max(1, round(tokens / mean))
    low = max(mean - spread, 1)
    wanted = [low + (mean + spread - low) * (i + 0.5) / count for i in range(count)]
    borders = [round(border * tokens / sum(wanted)) for border in accumulate(wanted, initial=0.0)]
    return [end - start for start, end in pairwise(borders) if end > start]


def _is_legal(target: ProfileTarget, tp: int) -> bool:
    try:
        check_strategy("profile", target.model, ParallelStrategy(tp=tp))
    except UserError:
        return False
    return target.reproducible == "plan" or not unordered(target.model, ParallelStrategy(tp=tp))


def _head_name(tp: int) -> str:
    return f"tp={tp} head"


def carry_out(job: ProfileJob, directory: RunDirectory, rank: int, set_activity: Callable[[str], None]) -> None:
    """This rank's part of a job: first the network between nodes, if it is asked for, then on the first node the rest.
    Rank 0 writes the results."""
    set_activity("joining the other workers")
    device = own_device()
    results = directory.path / RESULTS
    job = on_found(job, results, rank, device)
    nodes = Nodes(job, directory, rank, device) if job.num_nodes > 1 else None
    if nodes and NETWORK in job.constants:
        set_activity("measuring network")
        network = nodes.network()
        if rank == 0:
            save_constants(network, results / CONSTANTS_FILE)
    if nodes and not nodes.is_on_first:
        nodes.wait_for_first()
        return
    stay_within_node()
    store = dist.FileStore(str(directory.rendezvous / "torch"), job.num_workers)
    make_world(store, rank, job.num_workers, device, job.timeout_s)
    profiler = Profiler(job, rank, device, directory.path / "round_trip", set_activity)
    constants = profiler.constants() if job.constants else None
    profiles = profiler.profiles() if job.targets else []
    if rank == 0:
        if constants is not None:
            save_constants(constants, results / CONSTANTS_FILE)
        set_activity("writing the profiles")
        for target, profile in zip(job.targets, profiles, strict=True):
            save_profile(profile, results / target.file)
        if nodes:
            nodes.tell_end()
    dist.destroy_process_group()


def main() -> int:
    keep_freed_memory()
    directory = RunDirectory.open(Path(sys.argv[1]))
    rank = worker_index()
    job = decode_json(read_bytes(directory.path / JOB_FILE), ProfileJob)
    activity = ActivityWriter(directory.activity(worker_name(rank)))
    try:
        carry_out(job, directory, rank, activity.set)
    except Exception:
        traceback.print_exc()
        # Groups whose peers are gone can block an orderly end for minutes; there is nothing left to save.
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
