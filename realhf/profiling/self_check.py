"""Small jobs by which `realhf doctor` checks the basis of runs on this machine's devices: groups, reallocation, graphs.

One rank of a check: `python -m realhf.profiling.self_check CHECK BACKEND RANK SIZE STORE`. It prints a line
`found: ...` and ends with exit code 0, or raises.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from realhf.api.generation import GenerationOptions
from realhf.architecture.decoding import GraphLife, graphs_refusal
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.build import initial_value
from realhf.engine.generate.paged_attention import paged_kernels
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.shards import Placement
from realhf.parallel.collectives import all_gather, reduce_scatter
from realhf.parallel.groups import GroupTable
from realhf.parallel.waiting import end_process, waits_on
from realhf.realloc.execute.carriers import carrier_between
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.verification import verify
from realhf.realloc.plan.planner import plan_between
from realhf.worker.device import own_device

TIMEOUT_S = 280.0
SEED = 1
# Heads that 2, 4 or 8 ranks can divide.
SMALL = DecoderConfig(hidden_size=256, intermediate_size=512, num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=512)
GENERATING = replace(SMALL, num_kv_heads=4)  # grouped heads of a size that all kernels take
BF16_TOLERANCE = 0.1  # for log-probabilities from 0 to about -20


def check_groups(rank: int, size: int, device: torch.device) -> str:
    """Sums, reduce-scatters and gathers in the groups of dp, tp and pp, and a message to every next rank.

    Raises:
        ArithmeticError: a result differs from the one computed by hand.
    """
    layouts = _layouts(size)
    table = GroupTable(layouts, rank, TIMEOUT_S, waits=waits_on(device, end_process))
    for layout in layouts:
        groups = table.groups(layout)
        for name, group in (("tp", groups.tensor), ("dp", groups.data), ("model", groups.model)):
            if group is not None:
                _check_group(group, f"{name} of {layout}", rank, device)
    received = torch.zeros(1024, device=device)
    sent = torch.full_like(received, float(rank))
    ring = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring) if size > 1 else ():
        work.wait()
    _check_equal("a message from the rank before", received, float((rank - 1) % size) if size > 1 else 0.0)
    return f"all-reduce between {size} processes, in groups of dp, tp and pp, and messages between neighbours"


def _check_group(group: dist.ProcessGroup, name: str, rank: int, device: torch.device) -> None:
    members = dist.get_process_group_ranks(group)
    total = float(sum(member + 1 for member in members))
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers, group=group)
    _check_equal(f"the all-reduce of {name}", numbers, total)
    shards = torch.full((64 * len(members),), float(rank + 1), device=device)
    own = reduce_scatter(shards, group)
    _check_equal(f"the reduce-scatter of {name}", own, total)
    own.fill_(float(rank + 1))
    all_gather(shards, group)
    for member, shard in zip(members, shards.chunk(len(members)), strict=True):
        _check_equal(f"the all-gather of {name}", shard, float(member + 1))


def check_reallocation(rank: int, size: int, device: torch.device) -> str:
    """The parameters of a small model from every layout to the next, compared with their initial values bit by bit;
    over the memory of the host where a run would take that way.

    Raises:
        ArithmeticError: a parameter came wrong.
    """
    layouts = _layouts(size)
    table = GroupTable(layouts, rank, TIMEOUT_S, waits=waits_on(device, end_process))
    models = [ShardedModel(ModelSpec(SMALL, table.groups(layout), torch.float32, device)) for layout in layouts]
    models[0].initialise(SEED)
    expected = {spec.name: initial_value(spec, SEED) for spec in decoder_parameters(SMALL)}
    carrier = carrier_between(table.of_host(range(size)), table.waits)
    moved_bytes = 0
    for source, target in zip(models, [*models[1:], models[0]], strict=True):
        plan = plan_between(
            SMALL, Placement(source.groups.layout), Placement(target.groups.layout), size, element_bytes=4
        )
        boxes = source.residency.held(), target.residency.held()
        part = Reallocation(plan, rank, *boxes, carrier, timeout_s=TIMEOUT_S)
        execute(part)
        verify(part)
        moved_bytes += sum(plan.received_bytes.values())
        for box, tensor in target.residency.held():
            if not torch.equal(tensor.cpu(), _part(expected[box.name], box)):
                route = f"{source.groups.layout} to {target.groups.layout}"
                raise ArithmeticError(f"{box.name} came wrong from {route}")
    names = " -> ".join(str(layout.strategy) for layout in (*layouts, layouts[0]))
    return f"{names}, {moved_bytes / 2**20:.0f} MiB moved and equal bit by bit"


def check_generation(rank: int, size: int, device: torch.device) -> str:
    """The same rollouts with decode steps as graphs and without, by the kernels that generation takes, under tp where
    there are two devices: in float64, where rounding flips no token, and the log-probabilities of given responses in
    bfloat16, for which the kernels of packages are taken.

    Raises:
        ArithmeticError: a rollout differs.
    """
    tp = min(size, 2)
    layout = Layout(DeviceMesh(0, size), ParallelStrategy(size // tp, tp, 1))
    groups = GroupTable([layout], rank, TIMEOUT_S, waits=waits_on(device, end_process)).groups(layout)
    generator = torch.Generator().manual_seed(SEED)
    data = {
        key: [torch.randint(GENERATING.vocab_size, (length,), generator=generator) for length in lengths]
        for key, lengths in (("prompt", (1, 7, 30, 100, 250)), ("response", (16, 9, 16, 3, 16)))
    }
    batch = Batch(tuple(range(5)), data).to(device)
    pages = []
    for dtype in (torch.float64, torch.bfloat16):
        model = ShardedModel(ModelSpec(GENERATING, groups, dtype, device))
        model.initialise(SEED)
        for _, local in model.residency.held():
            if local.ndim == 2:
                local.mul_(4)  # so large that attention changes the next token
        _check_replays(model, batch, dtype)
        page = paged_kernels(model.parameters.flat, GENERATING.head_dim).page
        pages.append(f"{dtype} in pages of {page}".removeprefix("torch."))
    why = graphs_refusal(GENERATING, on_gpu=device.type == "cuda")
    found = f"none recorded: {why}" if why else "recorded, replayed, and as kernel by kernel"
    return f"{found} (tp {tp}; {', '.join(pages)} tokens)"


def _check_replays(model: ShardedModel, batch: Batch, dtype: torch.dtype) -> None:
    """Raises ArithmeticError where graphs, just recorded or replayed, generate something else."""
    is_exact = dtype == torch.float64

    def rollouts(graphs: GraphLife) -> list[torch.Tensor]:
        options = GenerationOptions(max_new_tokens=16, eos_token=-1, decode_graphs=graphs)
        forced = None if is_exact else batch.data["response"]
        output = model.generate(batch, GenerationRequest(options, sample_key=(SEED, 0), forced=forced))
        return output.sequences if is_exact else output.logprobs

    expected, recorded, replayed = rollouts("off"), rollouts("kept"), rollouts("kept")
    for attempt, found in (("recorded", recorded), ("replayed", replayed)):
        for ours, theirs in zip(found, expected, strict=True):
            # The padding of graphs changes the sizes of products, hence their rounding.
            if not torch.allclose(ours.double(), theirs.double(), rtol=0, atol=0 if is_exact else BF16_TOLERANCE):
                what = "tokens" if is_exact else "log-probabilities"
                raise ArithmeticError(f"graphs just {attempt} gave other {what} in {dtype} than kernel by kernel")


CHECKS: dict[str, Callable[[int, int, torch.device], str]] = {
    "groups": check_groups,
    "reallocation": check_reallocation,
    "generation": check_generation,
}


def _layouts(size: int) -> list[Layout]:
    """All devices as dp, as tp and as pp, and mixed where there are four or more; tp is at most the number of heads."""
    mesh = DeviceMesh(0, size)
    tp = min(size, SMALL.num_heads)
    degrees = [(size, 1, 1), (size // tp, tp, 1), (1, size // min(size, SMALL.num_layers), min(size, SMALL.num_layers))]
    degrees += [(size // 4, 2, 2)] if size >= 4 else []
    return list(dict.fromkeys(Layout(mesh, ParallelStrategy(*each)) for each in degrees))


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))]


def _check_equal(what: str, numbers: torch.Tensor, expected: float) -> None:
    if not bool((numbers == expected).all()):
        raise ArithmeticError(f"{what} gave {numbers.flatten()[0].item():g} instead of {expected:g}")


def main() -> int:
    check, backend, rank, size, store = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    device = own_device()
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    dist.all_reduce(torch.zeros(1, device=device))  # NCCL wants a collective of all before the first message
    print(f"found: {CHECKS[check](rank, size, device)}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
