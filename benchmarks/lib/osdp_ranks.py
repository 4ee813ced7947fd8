"""Measures ways to train in processes of their own: times interleaved step by step, bytes sent, memory."""

import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from lib.osdp_shapes import Shape
from lib.osdp_traffic import planned_sent_bytes
from lib.osdp_ways import FullyShard, Osdp, Way
from torch.distributed.device_mesh import DeviceMesh

from realhf.architecture.compute import MODES
from realhf.cpu import host_group
from realhf.launch.process import process_environment
from realhf.planning.model.osdp.problem import Operator
from realhf.planning.model.osdp.units import SMALLEST_SLICED_BYTES
from realhf.worker.allocator import keep_freed_memory

DEADLINE_S = 300.0
WARM_UPS, FEWEST_ROUNDS, MOST_ROUNDS = 2, 12, 200
FSDP2 = "FSDP2"
LEAST, SLICES = "all sharded, in slices", 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """One shape at one number of ranks.

    limits: of memory: 0 is what all sharded in slices needs, 1 what all replicated does.
    timing_s: how long steps are timed; 0: not at all.
    slices: for each of these, what is gathered at a time is measured with all operators in so many slices.
    backend: of this project's ways; FSDP2 has gloo.
    """

    shape: Shape
    ranks: int
    limits: tuple[float, ...]
    timing_s: float = 0.0
    slices: tuple[int, ...] = ()
    backend: str = host_group.BACKEND


@dataclass(kw_only=True)
class Measured:
    """One way. What has no plan has zeros.

    state_bytes: the peak of parameters, gradients, optimizer states and gathers, `planned_state_bytes` that of the
        plan; `planned_bytes` is all that the plan counts, activations too.
    gathered_bytes: the peak of gathered parameters.
    sent_bytes: of one step of a rank; `planned_sent_bytes` are the plan's.
    """

    seconds: list[float] = field(default_factory=list)
    planned_s: float = 0.0
    planned_bytes: int = 0
    planned_state_bytes: int = 0
    state_bytes: int = 0
    gathered_bytes: int = 0
    sent_bytes: int = 0
    planned_sent_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Split:
    """What was gathered at a time with all operators in slices; `largest_bytes` are of the largest operator, whole."""

    slices: int
    prefetch: bool
    gathered_bytes: int
    largest_bytes: int


@dataclass(kw_only=True)
class Outcome:
    """limits: the bytes of each limit of the task, in its order. chosen: the name of the way that was chosen there."""

    ways: dict[str, Measured]
    limits: list[int]
    chosen: list[str]
    splits: list[Split]


def measured(task: Task) -> Outcome:
    """The outcome of a task."""
    found: Outcome = in_ranks(task, Bench)
    return found


def in_ranks(task: Task, bench: "type[Bench]") -> Any:
    """What a bench finds, in new processes; they all end, whatever happens."""
    os.environ.update(process_environment())  # as a worker has it
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="realhf-osdp-") as directory:
        reader, writer = context.Pipe(duplex=False)
        ranks = [
            context.Process(
                target=_rank_main, daemon=True, args=(rank, task, bench, directory, writer if rank == 0 else None)
            )
            for rank in range(task.ranks)
        ]
        try:
            for rank in ranks:
                rank.start()
            writer.close()
            if not reader.poll(DEADLINE_S):
                sys.exit(f"{task.shape.name} on {task.ranks} ranks: nothing measured in {DEADLINE_S:g} s")
            return reader.recv()
        except EOFError:
            sys.exit(f"{task.shape.name} on {task.ranks} ranks: a rank failed; its error stands above")
        finally:
            for rank in ranks:
                rank.join(timeout=5)
                rank.kill()


def _rank_main(rank: int, task: Task, bench: "type[Bench]", directory: str, results: Connection | None) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.FileStore(f"{directory}/store", task.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.ranks, timeout=timeout)
    group = dist.new_group(timeout=timeout, backend=task.backend)
    outcome = bench(task, rank, DeviceMesh.from_group(group, "cpu")).outcome()
    if results is not None:
        results.send(outcome)
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """One rank of a task; all make the same calls."""

    def __init__(self, task: Task, rank: int, mesh: DeviceMesh):
        self.task, self.mesh, self.tokens = task, mesh, task.shape.tokens(rank)

    def outcome(self) -> Any:
        ways: dict[str, Osdp] = {f"all {mode}": self.osdp(modes=mode) for mode in MODES}
        operators = ways["all sharded"].plan.chosen.problem.operators
        ways[LEAST] = self.osdp(modes=tuple((op.name, _least_modes(op)) for op in operators))
        least, most = (ways[name].plan.memory_bytes for name in (LEAST, "all replicated"))
        # A byte more than a plan needs, so that rounding to gibibytes leaves it.
        limits = [round(least + part * (most - least)) + 1024 for part in self.task.limits]
        chosen = [f"chosen at {part:g}" for part in self.task.limits]
        for name, limit in zip(chosen, limits, strict=True):
            ways[name] = self.osdp(memory_bytes=limit)
        found = {name: self._measured(way) for name, way in ways.items()}
        if self.task.timing_s:
            of_torch = FullyShard(self.task.shape, DeviceMesh.from_group(dist.group.WORLD, "cpu"), self.tokens)
            found[FSDP2] = Measured()
            del ways[LEAST]  # what is chosen at 0 is as good or better
            for name, seconds in self.times({**ways, FSDP2: of_torch}).items():
                found[name].seconds = seconds
        splits = [self._split(slices, prefetch) for slices in self.task.slices for prefetch in (False, True)]
        return Outcome(ways=found, limits=limits, chosen=chosen, splits=splits)

    def _split(self, slices: int, prefetch: bool) -> Split:
        way = self.osdp(modes=f"{slices} sharded", prefetch=prefetch)
        gathered_bytes = self._measured(way).gathered_bytes
        largest = max(op.parameter_bytes for op in way.plan.chosen.problem.operators)
        return Split(slices=slices, prefetch=prefetch, gathered_bytes=gathered_bytes, largest_bytes=largest)

    def osdp(self, **how: Any) -> Osdp:
        return Osdp(self.task.shape, self.mesh, self.tokens, **how)

    def _measured(self, way: Osdp) -> Measured:
        """All but times; two steps before, so that the order of gathers is known."""
        way.step()
        way.step()
        state_bytes, gathered_bytes = way.peaks()
        return Measured(
            planned_s=way.plan.step_s,
            planned_bytes=way.plan.memory_bytes,
            planned_state_bytes=way.planned_state_bytes,
            state_bytes=state_bytes,
            gathered_bytes=gathered_bytes,
            sent_bytes=way.sent_bytes(),
            planned_sent_bytes=planned_sent_bytes(way.plan.chosen),
        )

    def times(self, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        """Seconds of steps, those of the slowest rank: every way once a round, in an order that is drawn anew."""
        names, draw, rounds = list(ways), random.Random(0), []
        start = time.perf_counter()
        while len(rounds) < WARM_UPS + MOST_ROUNDS and not self._is_over(len(rounds), start):
            taken = dict.fromkeys(names, 0.0)
            for name in draw.sample(names, len(names)):
                taken[name] = _seconds(ways[name].step)
            rounds.append(list(taken.values()))
        slowest = torch.tensor(rounds[WARM_UPS:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return dict(zip(names, slowest.T.tolist(), strict=True))

    def _is_over(self, rounds: int, start: float) -> bool:
        """What rank 0's clock says: all ranks take as many rounds."""
        passed = torch.tensor([time.perf_counter() - start])
        dist.broadcast(passed, src=0)
        return rounds >= WARM_UPS + FEWEST_ROUNDS and passed.item() > self.task.timing_s


def _least_modes(op: Operator) -> str:
    """Of the least memory that the search can find."""
    if "sharded" not in op.modes:
        return "zero1"
    return f"{SLICES} sharded" if op.parameter_bytes >= SMALLEST_SLICED_BYTES else "sharded"


def _seconds(work: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
