"""Reallocation plans carried out by four processes over gloo: bit-exact, bounded in memory, with deadlines."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from realhf.api.compute import DataParallel
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy
from realhf.api.model import DecoderConfig
from realhf.models.parameters import decoder_parameters
from realhf.realloc import executor
from realhf.realloc.executor import Message, ReallocationError, execute
from realhf.realloc.held import by_name, part
from realhf.realloc.layout import Box
from realhf.realloc.planner import plan_between, plan_reallocation
from realhf.realloc.shards import held_boxes
from realhf.realloc.verification import VerificationError, verify
from tests.distributed.pool import run_distributed
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.distributed

BUCKET_BYTES = 4096

SIX_HEADS = DecoderConfig(
    hidden_size=24, intermediate_size=36, num_layers=5, num_heads=6, num_kv_heads=6, vocab_size=48, tied_embeddings=True
)
FOUR_HEADS = DecoderConfig(
    hidden_size=16, intermediate_size=24, num_layers=4, num_heads=8, num_kv_heads=4, vocab_size=32, head="scalar"
)


def layout(first: int, dp: int, tp: int, pp: int) -> Layout:
    return Layout(DeviceMesh(first, dp * tp * pp), ParallelStrategy(dp, tp, pp))


PAIRS = [
    (SIX_HEADS, layout(0, 1, 2, 1), layout(0, 1, 3, 1)),  # degrees that do not divide each other
    (SIX_HEADS, layout(0, 1, 3, 1), layout(1, 1, 3, 1)),  # overlapping meshes, every box from a neighbour
    (SIX_HEADS, layout(2, 1, 2, 1), layout(0, 1, 3, 1)),
    (SIX_HEADS, layout(0, 1, 1, 3), layout(0, 1, 2, 2)),  # uneven stages, the tied embedding on two of them
    (SIX_HEADS, layout(0, 1, 1, 4), layout(0, 2, 1, 2)),
    (SIX_HEADS, layout(3, 1, 1, 1), layout(0, 1, 1, 3)),  # disjoint
    (FOUR_HEADS, layout(0, 4, 1, 1), layout(0, 1, 2, 2)),  # all of it is there already
    (FOUR_HEADS, layout(0, 1, 2, 2), layout(0, 4, 1, 1)),
    (FOUR_HEADS, layout(0, 1, 4, 1), layout(0, 1, 1, 4)),
    (FOUR_HEADS, layout(0, 1, 1, 4), layout(0, 1, 4, 1)),
    (FOUR_HEADS, layout(0, 2, 1, 1), layout(2, 1, 2, 1)),  # two replicas share the sending
    (FOUR_HEADS, layout(0, 1, 1, 1), layout(0, 2, 2, 1)),
    (FOUR_HEADS, layout(0, 1, 2, 2), layout(1, 1, 1, 1)),
    (SIX_HEADS, layout(0, 1, 1, 1), layout(1, 3, 1, 1)),  # a chain: each part leaves its only holder once
    (FOUR_HEADS, layout(0, 1, 2, 1), layout(0, 4, 1, 1)),
]

# From and to a home whose parameters are divided over its data-parallel ranks too, and from it to all of it there.
SHARDED_PAIRS = [
    (SIX_HEADS, layout(0, 2, 1, 2), layout(0, 1, 3, 1)),
    (FOUR_HEADS, layout(0, 4, 1, 1), layout(0, 1, 2, 2)),
    (FOUR_HEADS, layout(1, 3, 1, 1), layout(0, 2, 1, 1)),
]


def random_state(model: DecoderConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same random parameters on every rank."""
    generator = torch.Generator().manual_seed(1)
    return {
        spec.name: torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(dtype)
        for spec in decoder_parameters(model)
    }


def boxed(state: dict[str, torch.Tensor], boxes: list[Box]) -> list[tuple[Box, torch.Tensor]]:
    """Copies of the parts; those of odd length lie transposed in memory, so that views with strides are moved too."""
    whole = by_name((Box(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor) for name, tensor in state.items())
    result = []
    for box in boxes:
        piece = part(whole, box)
        is_strided = piece.dim() == 2 and box.size % 3 == 0
        result.append((box, piece.t().contiguous().t() if is_strided else piece.clone()))
    return result


def run_pair(
    rank: int,
    model: DecoderConfig,
    a: Layout,
    b: Layout,
    dtype: torch.dtype,
    bucket_bytes: int,
    divided: tuple[DataParallel, DataParallel] = ("zero1", "zero1"),
) -> int:
    state = random_state(model, dtype)
    plan = plan_between(model, a, b, 2, dtype.itemsize, bucket_bytes, *divided)
    source, expected = (
        boxed(state, held_boxes(model, side, rank, how)) for side, how in zip((a, b), divided, strict=True)
    )
    target = [(box, torch.full_like(tensor, -7)) for box, tensor in expected]
    execute(plan, rank, source, target)
    verify(plan, rank, source, target)
    for (_, got), (box, tensor) in zip(target, expected, strict=True):
        assert torch.equal(got, tensor), (model, a, b, box)
    return plan.received_bytes.get(rank, 0)


def average(rank: int, model: DecoderConfig, a: Layout, b: Layout, dtype: torch.dtype, rounding: float) -> None:
    """The target becomes eta * source + (1 - eta) * target, as float64 has it but for one rounding."""
    state, eta = random_state(model, dtype), 0.3
    plan = plan_between(model, a, b, 2, dtype.itemsize, BUCKET_BYTES, forwarding=False)
    source, wanted = (boxed(state, held_boxes(model, side, rank)) for side in (a, b))
    target = [(box, (1 + tensor.abs()).to(dtype)) for box, tensor in wanted]
    expected = [
        eta * new.double() + (1 - eta) * old.double() for (_, new), (_, old) in zip(wanted, target, strict=True)
    ]
    largest = [new.double().abs() + old.double().abs() for (_, new), (_, old) in zip(wanted, target, strict=True)]
    execute(plan, rank, source, target, eta=eta)
    for (box, got), values, size in zip(target, expected, largest, strict=True):
        assert ((got.double() - values).abs() <= size * rounding).all(), (model, a, b, box)


def run_all_pairs(rank: int) -> list[int]:
    received = []
    for index, (model, a, b) in enumerate(PAIRS):
        dtype = [torch.float32, torch.float64, torch.bfloat16][index % 3]
        received.append(run_pair(rank, model, a, b, dtype, BUCKET_BYTES))
    for model, a, b in SHARDED_PAIRS:
        run_pair(rank, model, a, b, torch.float32, BUCKET_BYTES, ("fsdp", "zero1"))
        run_pair(rank, model, b, a, torch.bfloat16, BUCKET_BYTES, ("zero1", "fsdp"))
        run_pair(rank, model, a, a, torch.float64, BUCKET_BYTES, ("fsdp", "zero1"))
    for model, a, b in PAIRS[-3:]:
        average(rank, model, a, b, torch.float32, 2**-22)
        average(rank, model, a, b, torch.bfloat16, 2**-8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        run_pair(rank, *PAIRS[0], dtype, bucket_bytes=2**26)
    return received


class Results(NamedTuple):
    """Of one rank."""

    received: list[int]
    in_place: int | list[float]
    peak_bytes: int
    complaint: str


def run_all(rank: int) -> Results:
    return Results(
        run_all_pairs(rank),
        reallocate_in_place(rank),
        peak_of_buffers(rank, BUCKET_BYTES),
        corrupt_a_part(rank),
    )


@pytest.fixture(scope="module")
def results() -> list[Results]:
    """What `run_all` gave on each rank: one world of processes for several tests, as spawning takes longest."""
    return run_distributed(run_all, 4)


def test_layout_pairs_are_bit_exact(results: list[Results]) -> None:
    for model, a, b in PAIRS:
        check_strategy("source", model, a.strategy)
        check_strategy("target", model, b.strategy)
    received = np.array([result.received for result in results]).sum(axis=0)
    assert received[6] == 0
    assert (np.delete(received, 6) > 0).all()


def reallocate_in_place(rank: int) -> int | list[float]:
    """Targets that are the source views: nothing may be copied, though packed messages are read from them."""
    plan = plan_reallocation({0: [Box("p", (0,), (4,))]}, {0: [Box("p", (0,), (4,))], 1: [Box("p", (1,), (2,))]})
    if rank == 0:
        shared = [(Box("p", (0,), (4,)), torch.arange(4.0, requires_grad=True))]
        execute(plan, rank, shared, shared)
        return int(shared[0][1]._version)
    target = [(Box("p", (1,), (2,)), torch.zeros(2))] if rank == 1 else []
    execute(plan, rank, [], target)
    if rank > 1:
        return 0  # has no part in it and comes back at once
    return target[0][1].tolist()


def test_a_view_that_stays_is_not_copied(results: list[Results]) -> None:
    assert [result.in_place for result in results] == [0, [1.0, 2.0], 0, 0]


ONE_LAYER = Box("model.layers.0.mlp.up_proj.weight", (0, 0), (64, 8))


def wait_for_a_peer_that_does_not_send(rank: int, folder: Path) -> str:
    """Rank 1 waits for rank 0, which is there but never sends; rank 2 for rank 3, which has left."""
    torch.distributed.barrier()  # nobody leaves while another still connects
    if rank == 3:
        torch.distributed.destroy_process_group()
    if rank == 0:
        wait_until(lambda: all((folder / f"rank-{waiting}").exists() for waiting in (1, 2)))
    if rank in (0, 3):
        return ""
    plan = plan_reallocation({0 if rank == 1 else 3: [ONE_LAYER]}, {rank: [ONE_LAYER]}, bucket_bytes=1024)
    target = [(ONE_LAYER, torch.zeros(ONE_LAYER.shape))]
    with pytest.raises(ReallocationError) as raised:
        execute(plan, rank, [], target, model_name="critic", timeout_s=1.5 if rank == 1 else 2 * PATIENCE_S)
    (folder / f"rank-{rank}").touch()
    return str(raised.value)


def test_a_peer_that_is_late_or_gone_is_named_within_the_deadline(tmp_path: Path) -> None:
    _, late, gone, _ = run_distributed(wait_for_a_peer_that_does_not_send, 4, tmp_path)
    assert "reallocation of critic, bucket 1 of 2: rank 1 waited" in late
    assert "s (at most 1.5) in vain for rank 0 to send" in late
    assert "bucket 1 of 2: rank 2" in gone
    assert "rank 3 to send" in gone
    assert ONE_LAYER.name in late
    assert ONE_LAYER.name in gone


def peak_of_buffers(rank: int, bucket_bytes: int) -> int:
    """Bytes of buffers alive at once, counted where the executor allocates them."""
    alive_bytes = peak_bytes = 0
    empty = torch.empty

    def release(size_bytes: int) -> None:
        nonlocal alive_bytes
        alive_bytes -= size_bytes

    def counting_empty(size: int, **options: Any) -> torch.Tensor:
        nonlocal alive_bytes, peak_bytes
        buffer = empty(size, **options)
        alive_bytes += buffer.nbytes
        peak_bytes = max(peak_bytes, alive_bytes)
        weakref.finalize(buffer, release, buffer.nbytes)
        return buffer

    with patch.object(executor.torch, "empty", counting_empty):
        run_pair(rank, SIX_HEADS, layout(0, 1, 3, 1), layout(1, 1, 3, 1), torch.float32, bucket_bytes)
    return peak_bytes


def test_buffers_take_at_most_two_buckets(results: list[Results]) -> None:
    peaks = [result.peak_bytes for result in results]
    assert all(0 < peak <= 2 * BUCKET_BYTES for peak in peaks), peaks
    assert max(peaks) > BUCKET_BYTES  # a rank in the middle sends and receives at once


def corrupt_a_part(rank: int) -> str:
    """One bit of what rank 2 receives from rank 0 flips on the way; what verification says of it."""
    model, a, b = FOUR_HEADS, layout(0, 1, 2, 1), layout(2, 1, 2, 1)
    plan = plan_between(model, a, b)
    source, target = (boxed(random_state(model, torch.float32), held_boxes(model, side, rank)) for side in (a, b))

    def post_and_flip(messages: Sequence[Message], *rest: Any) -> None:
        executor_exchange(messages, *rest)
        if rank == 2:
            messages[0].buffer.view(torch.uint8)[5] ^= 0x10

    executor_exchange = executor.exchange
    with patch.object(executor, "exchange", post_and_flip):
        execute(plan, rank, source, target)
    try:
        verify(plan, rank, source, target, model_name="critic")
    except VerificationError as error:
        return str(error)
    return ""


def test_a_flipped_bit_is_named_by_the_rank_that_has_it(results: list[Results]) -> None:
    complaints = [result.complaint for result in results]
    assert [bool(complaint) for complaint in complaints] == [False, False, True, False]
    assert "rank 2 holds other values than rank 0 sent of parameter model.embed_tokens.weight" in complaints[2]
    assert "shape (16, 16) at offset (0, 0);" in complaints[2]  # half of 32 x 16
