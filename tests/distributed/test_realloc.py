"""Reallocation plans carried out by four processes, over gloo and the host's memory: bit-exact, bounded in memory."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
import torch

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.cpu import host_group
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.shards import Placement, held_boxes
from realhf.realloc.execute.carriers import Carrier, HostCarrier, Message, TorchCarrier, Work
from realhf.realloc.execute.checksum import SumsByPeer
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.held import by_name, part
from realhf.realloc.execute.verification import VerificationError, verify
from realhf.realloc.plan.planner import plan_between, plan_reallocation
from tests.distributed.pool import run_distributed

pytestmark = pytest.mark.distributed

BUCKET_BYTES = 4096

# Rows of 2 KB and more, parameters of several messages.
WIDE = DecoderConfig(
    hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=8, num_kv_heads=8, vocab_size=2048
)
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
    carrier: Carrier | None = None,
) -> int:
    state = random_state(model, dtype)
    plan = plan_between(model, *map(Placement, (a, b), divided), 2, dtype.itemsize, bucket_bytes)
    source, expected = (
        boxed(state, held_boxes(model, side, rank, how)) for side, how in zip((a, b), divided, strict=True)
    )
    target = [(box, torch.full_like(tensor, -7)) for box, tensor in expected]
    own = Reallocation(plan, rank, source, target, carrier or TorchCarrier())
    execute(own)
    verify(own)
    for (_, got), (box, tensor) in zip(target, expected, strict=True):
        assert torch.equal(got, tensor), (model, a, b, box)
    return plan.received_bytes.get(rank, 0)


def average(
    rank: int, model: DecoderConfig, a: Layout, b: Layout, dtype: torch.dtype, rounding: float, carrier: Carrier
) -> None:
    """The target becomes eta * source + (1 - eta) * target, as float64 has it but for one rounding."""
    state, eta = random_state(model, dtype), 0.3
    plan = plan_between(model, Placement(a), Placement(b), 2, dtype.itemsize, BUCKET_BYTES, by="messages")
    source, wanted = (boxed(state, held_boxes(model, side, rank)) for side in (a, b))
    target = [(box, (1 + tensor.abs()).to(dtype)) for box, tensor in wanted]
    expected = [
        eta * new.double() + (1 - eta) * old.double() for (_, new), (_, old) in zip(wanted, target, strict=True)
    ]
    largest = [new.double().abs() + old.double().abs() for (_, new), (_, old) in zip(wanted, target, strict=True)]
    arrived: SumsByPeer = {}
    execute(Reallocation(plan, rank, source, target, carrier), eta=eta, arrived=arrived)
    verify(Reallocation(plan, rank, source, target, carrier), arrived=arrived)
    for (box, got), values, size in zip(target, expected, largest, strict=True):
        assert ((got.double() - values).abs() <= size * rounding).all(), (model, a, b, box)


def run_all_pairs(rank: int, carrier: Carrier) -> list[int]:
    received = []
    for index, (model, a, b) in enumerate(PAIRS):
        dtype = [torch.float32, torch.float64, torch.bfloat16][index % 3]
        received.append(run_pair(rank, model, a, b, dtype, BUCKET_BYTES, carrier=carrier))
    for model, a, b in SHARDED_PAIRS:
        run_pair(rank, model, a, b, torch.float32, BUCKET_BYTES, ("fsdp", "zero1"), carrier)
        run_pair(rank, model, b, a, torch.bfloat16, BUCKET_BYTES, ("zero1", "fsdp"), carrier)
        run_pair(rank, model, a, a, torch.float64, BUCKET_BYTES, ("fsdp", "zero1"), carrier)
    for model, a, b in PAIRS[-3:]:
        average(rank, model, a, b, torch.float32, 2**-22, carrier)
        average(rank, model, a, b, torch.bfloat16, 2**-8, carrier)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        run_pair(rank, *PAIRS[0], dtype, bucket_bytes=2**26, carrier=carrier)
    run_pair(rank, WIDE, layout(0, 1, 4, 1), layout(0, 2, 2, 1), torch.float32, 2**21, carrier=carrier)
    return received


class Peak(NamedTuple):
    """Bytes of one reallocation: the most tensors at once, what holds the parameters, and a bucket."""

    eta: float
    peak: int
    held: int
    bucket: int


class Results(NamedTuple):
    """Of one rank."""

    received: dict[str, list[int]]
    in_place: int | list[float]
    peaks: dict[str, list[Peak]]
    complaints: list[str]


def run_all(rank: int) -> Results:
    memory = torch.distributed.new_group(list(range(4)), backend=host_group.BACKEND)
    carriers = {"gloo": TorchCarrier(), "host memory": HostCarrier(memory)}
    return Results(
        {name: run_all_pairs(rank, carrier) for name, carrier in carriers.items()},
        reallocate_in_place(rank),
        {name: peaks(rank, carrier) for name, carrier in carriers.items()},
        [corrupt_a_part(rank, eta) for eta in (1.0, 0.3)],
    )


@pytest.fixture(scope="module")
def results() -> list[Results]:
    """What `run_all` gave on each rank: one world of processes for several tests, as spawning takes longest."""
    return run_distributed(run_all, 4)


def test_layout_pairs_are_bit_exact(results: list[Results]) -> None:
    for model, a, b in PAIRS:
        check_strategy("source", model, a.strategy)
        check_strategy("target", model, b.strategy)
    received = {
        name: np.array([result.received[name] for result in results]).sum(axis=0) for name in results[0].received
    }
    assert (received["gloo"] == received["host memory"]).all()
    assert received["gloo"][6] == 0
    assert (np.delete(received["gloo"], 6) > 0).all()


def reallocate_in_place(rank: int) -> int | list[float]:
    """Targets that are the source views: nothing may be copied, though packed messages are read from them."""
    plan = plan_reallocation({0: [Box("p", (0,), (4,))]}, {0: [Box("p", (0,), (4,))], 1: [Box("p", (1,), (2,))]})
    if rank == 0:
        shared = [(Box("p", (0,), (4,)), torch.arange(4.0, requires_grad=True))]
        execute(Reallocation(plan, rank, shared, shared))
        return int(shared[0][1]._version)
    target = [(Box("p", (1,), (2,)), torch.zeros(2))] if rank == 1 else []
    execute(Reallocation(plan, rank, [], target))
    if rank > 1:
        return 0  # has no part in it and comes back at once
    return target[0][1].tolist()


def test_a_view_that_stays_is_not_copied(results: list[Results]) -> None:
    assert [result.in_place for result in results] == [0, [1.0, 2.0], 0, 0]


# All parts of the first are packed where they are packed at all; the second needs half of its target from others.
PEAKS = [
    (SIX_HEADS, layout(0, 1, 3, 1), layout(1, 1, 3, 1), 4096),
    (WIDE, layout(0, 1, 4, 1), layout(0, 2, 2, 1), 2**21),
]


def peaks(rank: int, carrier: Carrier) -> list[Peak]:
    """As torch's profiler counts allocations, from before source and target to the end."""
    return [peak_of(rank, carrier, *case, eta) for case in PEAKS for eta in (1.0, 0.3)]


def peak_of(
    rank: int, carrier: Carrier, model: DecoderConfig, a: Layout, b: Layout, bucket_bytes: int, eta: float
) -> Peak:
    plan = plan_between(model, Placement(a), Placement(b), 2, 4, bucket_bytes, by="chains" if eta == 1 else "messages")
    kept = set(held_boxes(model, a, rank)) & set(held_boxes(model, b, rank))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        source = [(box, torch.zeros(box.shape)) for box in held_boxes(model, a, rank)]
        shared = {box: tensor for box, tensor in source if box in kept}
        target = [(box, shared.get(box, torch.empty(0))) for box in held_boxes(model, b, rank)]
        target = [(box, tensor if box in kept else torch.zeros(box.shape)) for box, tensor in target]
        execute(Reallocation(plan, rank, source, target, carrier), eta=eta)
    held = sum(4 * box.size for box in {*held_boxes(model, a, rank), *held_boxes(model, b, rank)})
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return Peak(eta, max(accumulate((change for _, change in changes), initial=0)), held, bucket_bytes)


def test_peak_is_source_and_target_less_what_they_share_and_two_buckets(results: list[Results]) -> None:
    for result in results:
        for name, of_transport in result.peaks.items():
            for peak in of_transport:
                assert peak.peak <= peak.held + 2 * peak.bucket, (name, peak)
        # Over the host's memory nothing is packed.
        assert all(peak.peak <= peak.held + 100 for peak in result.peaks["host memory"] if peak.eta == 1)
    assert any(peak.peak > peak.held + peak.bucket for result in results for peak in result.peaks["gloo"])


class FlipsABit:
    """A carrier that changes one bit of the first message."""

    def __init__(self, carrier: Carrier):
        self._carrier, self._has_flipped = carrier, False

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        return self._carrier.packed_bytes(messages)

    def copy(self, here: Message, there: Message) -> list[Work]:
        return self._carrier.copy(here, there)

    def post(self, messages: Sequence[Message]) -> list[Work]:
        first, *others = self._carrier.post(messages)
        if self._has_flipped:
            return [first, *others]
        self._has_flipped = True

        def wait_and_flip(timeout: timedelta) -> None:
            first.wait(timeout)
            messages[0].views[0].flatten().view(torch.uint8)[5] ^= 0x10

        return [replace(first, wait=wait_and_flip), *others]


def corrupt_a_part(rank: int, eta: float) -> str:
    """One bit of what rank 2 receives from rank 0 flips on the way; what verification says of it."""
    model, a, b = FOUR_HEADS, layout(0, 1, 2, 1), layout(2, 1, 2, 1)
    plan = plan_between(model, Placement(a), Placement(b), by="messages")
    source, target = (boxed(random_state(model, torch.float32), held_boxes(model, side, rank)) for side in (a, b))
    arrived: SumsByPeer | None = {} if eta < 1 else None
    carrier = FlipsABit(TorchCarrier()) if rank == 2 else TorchCarrier()
    execute(Reallocation(plan, rank, source, target, carrier), eta=eta, arrived=arrived)
    try:
        verify(Reallocation(plan, rank, source, target, model_name="critic"), arrived=arrived)
    except VerificationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_average", [False, True])
def test_a_flipped_bit_is_named_by_the_rank_that_has_it(results: list[Results], is_average: bool) -> None:
    complaints = [result.complaints[is_average] for result in results]
    assert [bool(complaint) for complaint in complaints] == [False, False, True, False]
    assert "rank 2 holds other values than rank 0 sent of parameter model.embed_tokens.weight" in complaints[2]
    assert "shape (16, 16) at offset (0, 0);" in complaints[2]  # half of 32 x 16
