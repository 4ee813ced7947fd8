"""The parts that programs share: groups, models and batches on a simulated GPU."""

import os
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation
from realhf.architecture.decoding import GraphLife
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import PART, Batch
from realhf.engine.interface import GenerationRequest, Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import GroupTable, ParallelGroups, make_world
from realhf.parallel.vocabulary import Logits
from realhf.parallel.waiting import end_process, waits_on
from tests.simulated.programs import stand_ins

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", 0)
TIMEOUT_S = 600.0
SMALL = DecoderConfig(hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, vocab_size=512)
# Large enough that the segments of the allocator are small beside it; 4 GiB with the optimizer's states.
LARGE = DecoderConfig(
    hidden_size=2048, intermediate_size=8192, num_layers=4, num_heads=16, num_kv_heads=4, vocab_size=32768
)


def say(*what: object) -> None:
    print(*what, flush=True)


def join_world() -> None:
    """Makes the world of all ranks over NCCL, as a worker does."""
    make_world(dist.FileStore(os.environ["STORE"], WORLD), RANK, WORLD, DEVICE, TIMEOUT_S)
    dist.all_reduce(torch.zeros(1, device=DEVICE))
    torch.cuda.synchronize()


def layout_of(dp: int, tp: int, pp: int) -> Layout:
    return Layout(DeviceMesh(0, dp * tp * pp), ParallelStrategy(dp, tp, pp))


def table_of(*layouts: Layout) -> GroupTable:
    return GroupTable(layouts, RANK, TIMEOUT_S, waits=waits_on(DEVICE, end_process))


def groups_of(layout: Layout) -> ParallelGroups:
    """This rank's groups in a layout, the only one of the program; of one device without torch.distributed."""
    if WORLD == 1:
        return ParallelGroups(layout, 0)
    join_world()
    return table_of(layout).groups(layout)


def model_in(
    groups: ParallelGroups,
    config: DecoderConfig = SMALL,
    dtype: torch.dtype = torch.bfloat16,
    *,
    trains: bool = True,
    compute: Computation | None = None,
) -> ShardedModel:
    optimizer = OptimizerConfig() if trains else None
    compute = compute or Computation(sequence_parallel=groups.layout.strategy.tp > 1)
    return ShardedModel(
        ModelSpec(
            config, groups, dtype, DEVICE, optimizer=optimizer, total_optimizer_steps=10, compute=compute,
            timeout_s=TIMEOUT_S,
        )
    )  # fmt: skip


def _loss(output: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    return -output.of_tokens(torch.cat(batch.data["tokens"])).logprob.sum(), {}


def _zeros(count: int, length: int) -> list[Tensor]:
    """Made on the CPU: no kernel fills them on the device, and the host reads the same ones on every rank."""
    return [torch.zeros(length, dtype=torch.int64).to(DEVICE) for _ in range(count)]


def train(model: ShardedModel, samples: int = 8, length: int = 64, micro_batches: int = 4, *, parts: int = 0) -> None:
    """`parts`: of the whole batch's gradient, where its sums have one order; this rank has `samples` of it."""
    batch = Batch(tuple(range(samples)), {"tokens": _zeros(samples, length)})
    if parts:
        groups = model.groups
        own = parts // groups.layout.strategy.dp
        of_sample = [torch.tensor([groups.dp_index * own + i * own // samples, parts]) for i in range(samples)]
        batch, micro_batches = batch.with_data(**{PART: of_sample}), own
    model.train_step(batch, "tokens", _loss, lambda part: float(sum(map(len, part.data["tokens"]))), micro_batches)


def generate(
    model: ShardedModel, graphs: GraphLife, samples: int = 8, new_tokens: int = 5, prompt_tokens: int = 20
) -> None:
    options = GenerationOptions(max_new_tokens=new_tokens, eos_token=-1, decode_graphs=graphs)
    batch = Batch(tuple(range(samples)), {"prompt": _zeros(samples, prompt_tokens)})
    model.generate(batch, GenerationRequest(options, sample_key=(0, 0)))


def end() -> NoReturn:
    """Ends the process at once: the simulator's destructors and torch's may wait for each other."""
    torch.cuda.synchronize()
    say("end")
    os._exit(0)


stand_ins.install()
