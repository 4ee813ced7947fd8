"""Moves of which only what changed is sent: on pairs of layouts over the loopback, and over a slow link between two
networks of their own.

The parameters are bfloat16. Before each move the lowest bit of `SHARE` of them flips, drawn at random: as many as
differ between the roundings of a real model of 135 M parameters before and after six updates with learning rates up to
1e-6.
"""

import ctypes
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement
from realhf.launch.process import process_environment
from realhf.realloc.execute.carriers import TorchCarrier
from realhf.realloc.execute.changes import ChangesCarrier, SentParts
from realhf.realloc.execute.checksum import bit_sum
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_between
from realhf.worker.allocator import keep_freed_memory

SHARE = 0.0042
SMALL_LM = DecoderConfig(hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
                         vocab_size=49152, tied_embeddings=True)  # fmt: skip
SLOW, LINK = "200mbit", "fab0"
_ONE = ParallelStrategy(1, 1, 1)
APART = Layout(DeviceMesh(0, 1), _ONE), Layout(DeviceMesh(1, 1), _ONE)
DEADLINE_S = 300.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Pair:
    """A move, and how often it is repeated."""

    name: str
    model: DecoderConfig
    ends: tuple[Layout, Layout]
    repetitions: int


@dataclass(frozen=True)
class Changed:
    """Bytes that all processes received, and seconds, where only what changed is sent and where all values are."""

    pair: str
    bytes: int
    whole_bytes: int
    changes_s: float
    whole_s: float


def moved(pairs: Sequence[Pair], processes: int, rate: str = "") -> list[Changed]:
    """Measures in new processes, and ends them all. With a `rate` of two processes, each in a network of its own (which
    needs root), linked at that rate.

    Raises:
        RuntimeError: a process failed, or nothing was measured within `DEADLINE_S` of a pair.
    """
    os.environ.update(process_environment())
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="realhf-changes-", dir="/dev/shm") as directory:
        pipes = [context.Pipe() for _ in range(processes)]
        workers = [
            context.Process(target=_measure, daemon=True, args=(rank, processes, directory, pairs, bool(rate), end))
            for rank, (_, end) in enumerate(pipes)
        ]
        try:
            for worker in workers:
                worker.start()
            if rate:
                for own, _ in pipes:
                    own.recv()  # it is in a network of its own
                link([worker.pid for worker in workers], rate)
            for own, end in pipes:
                end.close()
                own.send("go on")
            results = {}
            while len(results) < processes:
                ready = wait([own for own, _ in pipes if own not in results], DEADLINE_S * len(pairs))
                if not ready:
                    raise RuntimeError(f"nothing measured in {DEADLINE_S * len(pairs):g} s")
                results |= {own: own.recv() for own in ready}
            return [Changed(**fields) for fields in results[pipes[0][0]]]
        except EOFError:
            raise RuntimeError("a process failed; see its traceback above") from None
        finally:
            for worker in workers:
                worker.join(timeout=5)
                worker.kill()


def can_link() -> bool:
    """Whether networks of their own can be made here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nsenter")))


def link(pids: Sequence[int | None], rate: str) -> None:
    """Joins the networks of two processes; what goes out of either is limited to `rate`."""
    first, second = map(str, pids)
    within = ["nsenter", "-t"]
    commands = [
        [*within, first, "-n", "ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", second]
    ]
    for number, pid in enumerate((first, second)):
        bucket = ["tbf", "rate", rate, "burst", "256k", "latency", "200ms"]
        commands += [
            [*within, pid, "-n", "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", LINK],
            [*within, pid, "-n", "ip", "link", "set", LINK, "up"],
            [*within, pid, "-n", "tc", "qdisc", "add", "dev", LINK, "root", *bucket],
        ]
    for command in commands:
        subprocess.run(command, check=True)


def _measure(
    rank: int, processes: int, directory: str, pairs: Sequence[Pair], is_apart: bool, results: Connection
) -> None:
    if is_apart:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "no network of its own")
        results.send("apart")
    results.recv()
    os.environ["GLOO_SOCKET_IFNAME"] = LINK if is_apart else "lo"
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    store = dist.FileStore(f"{directory}/store", processes)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timeout)
    results.send([_move(rank, pair) for pair in pairs])
    dist.barrier()
    dist.destroy_process_group()


def _move(rank: int, pair: Pair) -> dict[str, object]:
    plan = plan_between(pair.model, *map(Placement, pair.ends), element_bytes=2)
    held, wanted = (_boxes(pair.model, layout, rank) for layout in pair.ends)
    for box, tensor in held:
        tensor.normal_(generator=_generator(box, 0))
    part = Reallocation(plan, rank, held, wanted, TorchCarrier(), timeout_s=DEADLINE_S)
    execute(part)
    sent, counted = SentParts(plan, rank, held), Counter[str]()
    whole_s, changes_s = [], []
    for turn in range(pair.repetitions):
        for box, tensor in held:
            flips = torch.rand(tensor.shape, generator=_generator(box, turn + 1)) < SHARE
            tensor.view(torch.int16).bitwise_xor_(flips.to(torch.int16))
        carrier = ChangesCarrier(part.carrier, sent, f"rank {rank}", DEADLINE_S)
        changes_s.append(_seconds(replace(part, carrier=carrier)))
        sums = [int(bit_sum(tensor)) for _, tensor in wanted]
        for _, tensor in wanted:
            tensor.zero_()
        whole_s.append(_seconds(part))
        assert sums == [int(bit_sum(tensor)) for _, tensor in wanted], f"{pair.name}: other bytes than all values are"
        counted += carrier.moved
    sums_of_all = torch.tensor([counted["bytes"], counted["whole_bytes"]])
    dist.all_reduce(sums_of_all)
    received, whole = (sums_of_all // pair.repetitions).tolist()
    times = {"changes_s": statistics.median(changes_s), "whole_s": statistics.median(whole_s)}
    return {"pair": pair.name, "bytes": received, "whole_bytes": whole, **times}


def _generator(box: Box, turn: int) -> torch.Generator:
    """The same for all holders of a whole parameter; parts of it differ, as their boxes do."""
    return torch.Generator().manual_seed(hash((box.offset, box.shape, turn)) % 2**63)


def _boxes(model: DecoderConfig, layout: Layout, rank: int) -> list[tuple[Box, Tensor]]:
    return [(box, torch.zeros(box.shape, dtype=torch.bfloat16)) for box in device_boxes(model, layout, rank)]


def _seconds(part: Reallocation) -> float:
    dist.barrier()
    start = time.perf_counter()
    execute(part)
    dist.barrier()
    return time.perf_counter() - start
