"""HybridFlow's transition experiment in small: from training to generation and back, by the engines of its Table 2.

Its Figure 8: training with tp 4 and dp 2 on eight devices, generation with tp 2. Processes on the CPU, over the memory
of their host, as workers do it.

- DeepSpeed-Chat: ZeRO-3 over all devices; the model is gathered on each, and generation's part copied from it.
- HybridFlow-V: the model is gathered from the tensor-parallel peers, and generation's part copied from it.
- HybridFlow, which is how this project does it: generation's part is gathered in micro data-parallel groups, and
  that of training freed; back, it is copied out.
- two copies: training on the first half of the devices, with tp 4 and dp 1, sends its parameters to generation on the
  other half; nothing goes back.

Bytes received are those of the busiest device, by the planner; seconds those of the slowest process, the best of the
turns. Targets: the bytes of Table 2's formulas, and that HybridFlow is the fastest of the first three. Parameters "in
transition" are all that a device has at the worst moment: here every engine copies what it has already, where the
paper counts gathering in place. What they are while it generates is for reading.

Command: OMP_NUM_THREADS=1 python benchmarks/transition.py --json benchmarks/results/transition.json
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from lib.common import case, finish, parse_arguments
from lib.hybridflow_transition import Transition, transition
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.cpu import host_group
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters
from realhf.launch.process import process_environment
from realhf.realloc.execute.carriers import Carrier, carrier_between
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.held import by_name, part
from realhf.worker.allocator import keep_freed_memory

ENGINES = ("deepspeed-chat", "hybridflow-v", "hybridflow", "two copies")
TIMEOUT_S = 120.0
ITEM = 4


@dataclass(frozen=True)
class Setting:
    """`devices` train with `tp`, and generate with half of it."""

    model: DecoderConfig
    devices: int
    tp: int
    turns: int

    @property
    def training(self) -> Layout:
        return Layout(DeviceMesh(0, self.devices), ParallelStrategy(self.devices // self.tp, self.tp))


FULL = Setting(
    DecoderConfig(hidden_size=512, intermediate_size=2048, num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=4096),
    devices=8,
    tp=4,
    turns=5,
)
QUICK = Setting(
    DecoderConfig(hidden_size=256, intermediate_size=1024, num_layers=4, num_heads=8, num_kv_heads=8, vocab_size=1024),
    devices=4,
    tp=4,
    turns=2,
)


def planned(engine: str, setting: Setting) -> Transition:
    """What the engine keeps, gathers and computes with, by device."""
    if engine != "two copies":
        return transition(engine, setting.model, setting.training, tp=setting.tp // 2, pp=1)
    half = setting.devices // 2
    degrees = (min(setting.tp, half), min(setting.tp, half) // 2)
    layouts = [
        Layout(DeviceMesh(first, half), ParallelStrategy(half // tp, tp))
        for first, tp in zip((0, half), degrees, strict=True)
    ]
    kept, computes = (
        {device: device_boxes(setting.model, layout, device) for device in range(setting.devices)} for layout in layouts
    )
    return Transition(kept=kept, gathered=computes, computes=computes)


class Device:
    """One process with its tensors."""

    def __init__(self, engine: str, plan: Transition, rank: int, carrier: Carrier):
        self.engine, self.plan, self.rank, self.carrier = engine, plan, rank, carrier
        self.kept = filled(plan.kept[rank])
        self.computes: list[tuple[Box, Tensor]] = []
        if engine == "two copies":
            self.computes = empty(plan.computes[rank])  # for good

    def to_generation(self) -> int:
        """Returns the most bytes of parameters on the device during the transition."""
        plan, rank = self.plan, self.rank
        gathered = self.computes or empty(plan.gathered[rank])
        execute(Reallocation(plan.plan, rank, self.kept, gathered, self.carrier, timeout_s=TIMEOUT_S))
        peak = size_bytes(self.kept, gathered)
        if self.engine in ("deepspeed-chat", "hybridflow-v"):
            self.computes = copied(plan.computes[rank], gathered)
            peak += size_bytes(self.computes)
        else:
            self.computes = gathered
        if self.engine == "hybridflow":
            self.kept = []
        return peak

    def generating_bytes(self) -> int:
        """Of parameters, while it generates."""
        return size_bytes(self.kept, self.computes)

    def to_training(self) -> None:
        if self.engine == "hybridflow":
            self.kept = copied(self.plan.kept[self.rank], self.computes)
        if self.engine != "two copies":
            self.computes = []


def filled(boxes: Sequence[Box]) -> list[tuple[Box, Tensor]]:
    return [(box, numbered(box)) for box in boxes]


def numbered(box: Box) -> Tensor:
    """Every element says its place in the global parameter, so that a wrong part shows."""
    numbers = torch.zeros(box.shape)
    for dim, (offset, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        along = [1] * len(box.shape)
        along[dim] = extent
        numbers += (torch.arange(offset, offset + extent, dtype=torch.float32) * 10_000**dim % 65_521).view(along)
    return numbers


def empty(boxes: Sequence[Box]) -> list[tuple[Box, Tensor]]:
    return [(box, torch.empty(box.shape)) for box in boxes]


def copied(boxes: Sequence[Box], held: Sequence[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
    found = by_name(held)
    return [(box, part(found, box).clone()) for box in boxes]


def size_bytes(*held: Sequence[tuple[Box, Tensor]]) -> int:
    return sum(tensor.nbytes for some in held for _, tensor in some)


@dataclass(frozen=True)
class Measured:
    """The slowest process' seconds and the largest bytes, of parameters alone."""

    to_generation_s: float
    to_training_s: float
    received_bytes: int
    transition_bytes: int
    generating_bytes: int


def measure(engine: str, setting: Setting, rank: int, carrier: Carrier) -> Measured:
    plan = planned(engine, setting)
    device = Device(engine, plan, rank, carrier)
    there, back, peak, generating = [], [], 0, 0
    for _ in range(setting.turns):
        dist.barrier()
        start = time.perf_counter()
        peak = max(peak, device.to_generation())
        there.append(slowest(time.perf_counter() - start))
        generating = max(generating, device.generating_bytes())
        for box, tensor in device.computes:
            assert torch.equal(tensor, numbered(box)), f"{engine}: {box} was not moved"
        dist.barrier()
        start = time.perf_counter()
        device.to_training()
        back.append(slowest(time.perf_counter() - start))
        for box, tensor in device.kept:
            assert torch.equal(tensor, numbered(box)), f"{engine}: {box} did not come back"
    received = plan.plan.received_bytes.get(rank, 0)
    return Measured(min(there), min(back), *(int(slowest(float(n))) for n in (received, peak, generating)))


def slowest(value: float) -> float:
    """The largest over all processes."""
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def process(rank: int, setting: Setting, store: str, results: Connection) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, setting.devices),
        rank=rank,
        world_size=setting.devices,
        timeout=timeout,
    )
    memory = dist.new_group(list(range(setting.devices)), backend=host_group.BACKEND, timeout=timeout)
    measured = {engine: measure(engine, setting, rank, carrier_between(memory)) for engine in ENGINES}
    if rank == 0:
        results.send(measured)
    dist.barrier()
    dist.destroy_process_group()


def run(setting: Setting) -> dict[str, Measured]:
    """Each engine's figures."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(process_environment())  # as a worker has it
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="realhf-transition-") as folder:
        arguments = (setting, str(Path(folder) / "store"), writer)
        processes = [context.Process(target=process, args=(rank, *arguments)) for rank in range(setting.devices)]
        for started in processes:
            started.start()
        writer.close()
        try:
            return reader.recv() if reader.poll(4 * TIMEOUT_S) else sys.exit("transition: no result in time")
        except EOFError:
            sys.exit("transition: a process died; what it said is above")
        finally:
            for started in processes:
                started.join(10)
                started.kill()


def formulas(setting: Setting) -> dict[str, float]:
    """Bytes that a device receives (Table 2), of the parameters that are divided: norms are on every rank of tp, and
    only ZeRO-3 divides them."""
    specs = decoder_parameters(setting.model)
    divided = ITEM * sum(spec.size for spec in specs if spec.shard_dim is not None)
    whole = ITEM * sum(spec.size for spec in specs)
    n, t, t_g = setting.devices, setting.tp, setting.tp // 2
    generation_tp = min(t, n // 2) // 2
    copied_norms = (whole - divided) * generation_tp
    return {
        "deepspeed-chat": (n - 1) / n * whole,
        "hybridflow-v": (t - 1) / t * divided,
        "hybridflow": (t - t_g) / (t_g * t) * divided,
        "two copies": (divided + copied_norms) / generation_tp,
    }


def cases(setting: Setting, measured: dict[str, Measured]) -> list[dict]:
    """Seconds beside the slowest of the first three engines, bytes beside the formula, memory beside the model."""
    expected = formulas(setting)
    model_bytes = ITEM * sum(spec.size for spec in decoder_parameters(setting.model))
    there = {engine: found.to_generation_s for engine, found in measured.items()}
    both_ways = {engine: found.to_generation_s + found.to_training_s for engine, found in measured.items()}
    on_the_same_devices = ENGINES[:3]
    results = []
    for engine, found in measured.items():
        wanted, received = expected[engine], found.received_bytes
        results.append(
            case(
                f"{engine}: received by a device",
                received / 1e6,
                "MB",
                baseline=wanted / 1e6,
                ratio=wanted / received,
                target=1.0,
                holds=abs(wanted / received - 1) < 1e-9,
            )
        )
        for name, seconds in (("to generation", there), ("and back", both_ways)):
            baseline = max(seconds[other] for other in on_the_same_devices)
            is_fastest = seconds[engine] == min(seconds[other] for other in on_the_same_devices)
            results.append(
                case(
                    f"{engine}: {name}",
                    seconds[engine],
                    "s",
                    baseline=baseline,
                    ratio=baseline / seconds[engine],
                    target=1.0 if engine == "hybridflow" else 0.0,
                    holds=engine != "hybridflow" or is_fastest,
                )
            )
        for name, size in (("in transition", found.transition_bytes), ("generating", found.generating_bytes)):
            results.append(
                case(
                    f"{engine}: parameters {name}",
                    size / 1e6,
                    "MB",
                    baseline=model_bytes / 1e6,
                    ratio=model_bytes / size,
                    target=0.0,
                    holds=True,
                )
            )
    return results


def main() -> None:
    arguments = parse_arguments(__doc__)
    setting = QUICK if arguments.quick else FULL
    finish("transition", cases(setting, run(setting)), arguments.json)


if __name__ == "__main__":
    main()
