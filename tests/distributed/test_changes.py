"""Moves of what changed, by four processes: byte-equal for all pairs of layouts over each carrier, after versions that
a copy missed too; never more bytes than all values and the sizes; few where little changed."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from realhf.architecture.model import DecoderConfig
from realhf.cpu import host_group
from realhf.geometry.shards import Placement, held_boxes
from realhf.realloc.execute.carriers import Carrier, HostCarrier, TorchCarrier
from realhf.realloc.execute.changes import SIZE_BYTES, ChangesCarrier, SentParts, whole_move
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.verification import verify
from realhf.realloc.plan.planner import MovedBy, plan_between
from tests.distributed.pool import run_distributed
from tests.distributed.test_broadcasts import RANKS, carriers
from tests.distributed.test_realloc import PAIRS, SHARDED_PAIRS, boxed, layout, random_state
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed

# Of the values before; the second version is one that the copy misses.
SHARES = (0.005, 0.3, 0.0, 1.0, 0.02, 0.0)
MISSED = 1
LARGE = DecoderConfig(
    hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=4, vocab_size=2048
)
State = dict[str, torch.Tensor]


def changed(state: State, share: float, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    result = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in result.values():
        tensor[torch.rand(tensor.shape, generator=generator) < share] += 1
    return result


class Copy:
    """One rank's source and copy of a model, and moves between them."""

    def __init__(
        self,
        rank: int,
        model: DecoderConfig,
        ends: tuple[Placement, Placement],
        item: int,
        carrier: Carrier,
        by: MovedBy,
    ):
        self.rank, self.ends, self.carrier, self.model = rank, ends, carrier, model
        self.plan = plan_between(model, *ends, 2, item, 2**19 if model is LARGE else 4096, by=by)
        self.target: list = []
        self.sent: SentParts | None = None

    def boxes(self, state: State, end: int) -> list:
        at = self.ends[end]
        return boxed(state, held_boxes(self.model, at.layout, self.rank, at.data_parallel))

    def move(self, state: State) -> Counter[str]:
        """What was moved; raises AssertionError where the copy has other bits then."""
        wanted, source = self.boxes(state, 1), self.boxes(state, 0)
        self.target = self.target or [(box, torch.full_like(tensor, -7)) for box, tensor in wanted]
        part = Reallocation(self.plan, self.rank, source, self.target, self.carrier, timeout_s=PATIENCE_S)
        if self.sent is None:
            execute(part)
            self.sent, moved = SentParts(self.plan, self.rank, source), whole_move(self.plan, self.rank)
        else:
            carrier = ChangesCarrier(self.carrier, self.sent, f"rank {self.rank}", PATIENCE_S)
            execute(replace(part, carrier=carrier))
            moved = carrier.moved
        verify(part)
        for (box, got), (_, tensor) in zip(self.target, wanted, strict=True):
            assert torch.equal(got, tensor), (self.ends, box)
        return moved


def all_carriers() -> dict[str, tuple[Carrier, MovedBy]]:
    memory = dist.new_group(list(RANKS), backend=host_group.BACKEND)
    broadcasts = carriers()
    return {
        "gloo": (TorchCarrier(), "chains"),
        "host memory": (HostCarrier(memory), "chains"),
        "broadcasts, gloo": (broadcasts["gloo"], "broadcasts"),
        "broadcasts, host memory": (broadcasts["host memory"], "broadcasts"),
    }


def move_all(rank: int) -> dict[str, list[list[Counter[str]]]]:
    """Of each carrier and pair what each move brought, all values first."""
    pairs = [(model, (Placement(a), Placement(b))) for model, a, b in PAIRS]
    pairs += [(model, (Placement(a, "fsdp"), Placement(b))) for model, a, b in SHARDED_PAIRS]
    pairs += [(LARGE, (Placement(layout(0, 1, 1, 1)), Placement(layout(0, 4, 1, 1))))]
    result: dict[str, list[list[Counter[str]]]] = {}
    for name, (carrier, by) in all_carriers().items():
        # Broadcasts take longest, and differ by their groups alone.
        for number, (model, ends) in enumerate(pairs):
            if by == "broadcasts" and number % 3:
                continue
            dtype = [torch.bfloat16, torch.float32, torch.float64][number % 3]
            state = random_state(model, dtype)
            copy = Copy(rank, model, ends, dtype.itemsize, carrier, by)
            moved = [copy.move(state)]
            for version, share in enumerate(SHARES):
                state = changed(state, share, version)
                if version != MISSED:
                    moved.append(copy.move(state))
            result.setdefault(name, []).append(moved)
    return result


@pytest.fixture(scope="module")
def moved() -> dict[str, list[list[Counter[str]]]]:
    """Of each carrier and pair the sums over ranks for each move."""
    of_ranks = run_distributed(move_all, 4)
    return {
        name: [
            [sum(of_move, Counter()) for of_move in zip(*of_pair, strict=True)] for of_pair in zip(*pairs, strict=True)
        ]
        for name in of_ranks[0]
        for pairs in [[of_rank[name] for of_rank in of_ranks]]
    }


def test_never_more_bytes_than_all_values_and_the_sizes_of_the_parts(
    moved: dict[str, list[list[Counter[str]]]],
) -> None:
    assert len(moved) == 4
    for of_pairs in moved.values():
        for first, *others in of_pairs:
            for each in others:
                assert each["whole_bytes"] == first["whole_bytes"] == first["bytes"]
                assert each["elements"] == first["elements"] == first["changed"]
                assert each["bytes"] <= each["whole_bytes"] + SIZE_BYTES * each["parts"]
                assert (each["bytes"] > 0) == (first["bytes"] > 0)


def test_few_bytes_where_little_changed(moved: dict[str, list[list[Counter[str]]]]) -> None:
    """Of the large model, in bfloat16: a value's place and it are 4 bytes, in place of 2."""
    for of_pairs in moved.values():
        _, few, missed, everything, more, _ = of_pairs[-1]
        assert few["bytes"] / few["whole_bytes"] == pytest.approx(2 * 0.005, rel=0.1)
        assert few["changed"] / few["elements"] == pytest.approx(0.005, rel=0.1)
        # The copy missed the version before: what changed since its own is sent, 0.3 of the values.
        assert missed["changed"] / missed["elements"] == pytest.approx(0.3, rel=0.1)
        assert everything["bytes"] == everything["whole_bytes"] + SIZE_BYTES * everything["parts"]
        assert everything["changed"] == everything["elements"]
        assert more["bytes"] / more["whole_bytes"] == pytest.approx(2 * 0.02, rel=0.1)


def test_nothing_but_sizes_where_nothing_changed(moved: dict[str, list[list[Counter[str]]]]) -> None:
    for of_pairs in moved.values():
        for of_pair in of_pairs:
            assert of_pair[-1]["bytes"] == SIZE_BYTES * of_pair[-1]["parts"]
            assert of_pair[-1]["changed"] == 0
