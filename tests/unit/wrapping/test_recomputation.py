"""Blocks that run their forward pass again: which there are, what they save, and their choice together with modes."""

from collections import Counter
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from realhf.base.errors import UserError
from realhf.planning.model.osdp.collective_costs import CollectiveCost, CollectiveCosts
from realhf.planning.model.osdp.problem import Links, OsdpPlan, OsdpProblem, solve
from realhf.planning.model.osdp.table import plan_text
from realhf.wrapping.choice import block_kinds, problem_of
from realhf.wrapping.measuring import OptimizerCosts, SampleCosts
from realhf.wrapping.operators import operators_of
from realhf.wrapping.recomputation import (
    MOST_SETS,
    BlockCosts,
    block_costs,
    blocks_of,
    recompute,
    recomputing,
    sets_of,
)
from tests.waiting import PATIENCE_S


class Block(nn.Module):
    """Keeps four times what it gets."""

    def __init__(self, size: int = 10) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        y: Tensor = self.second(self.first(x).exp().exp()).exp()
        return y


class Model(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 10)
        self.blocks = nn.ModuleList([*(Block(size) for size in sizes), nn.LayerNorm(10), nn.Linear(10, 10)])
        self.ends = nn.ModuleDict(
            {"head": nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)), Block())}
        )


def test_blocks_are_members_with_operators() -> None:
    """Neither single operators, nor norms, nor what keeps running statistics."""
    assert blocks_of(Model(10, 10)) == ("blocks.0", "blocks.1", "ends.head.1")
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))) == ("1",)
    assert blocks_of(nn.Sequential(nn.ModuleList([Block()]))) == ("0.0",)
    assert blocks_of(Block()) == ()


def test_a_block_runs_again_in_the_backward_pass_alone() -> None:
    block, plain = Block(), Block()
    plain.load_state_dict(block.state_dict())
    inputs = torch.ones(3, 10) / 9
    plain(inputs).sum().backward()
    with recomputing([block]):
        block(inputs).sum().backward()
    assert block.passes == 2
    for mine, other in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)
    block(inputs).sum().backward()
    assert block.passes == 3
    recompute(block)
    with torch.no_grad():
        block(inputs)
    assert block.passes == 4
    block(inputs).sum().backward()
    assert block.passes == 6


def test_what_blocks_save_by_hand() -> None:
    """A block of 100 numbers a sample keeps what both exps gave, and its output; recomputed, its output alone. While
    the backward pass is in a block, that block has all again."""
    blocks = [Block(100), Block(100)]
    model = nn.Sequential(*blocks, nn.Linear(100, 1))
    costs = block_costs(model, lambda samples: model(torch.ones(samples, 100) / 99).sum(), blocks_of(model))
    assert costs.saved == {"0": 800, "1": 800}
    assert costs.bytes_less(()) == 0
    assert costs.bytes_less(("0", "1")) == 1600 - costs.again
    assert 800 <= costs.again <= 1600
    assert [block.passes for block in blocks] == [6, 6]  # with one sample and with two, then both twice


def test_sets_of_blocks() -> None:
    """Of those that are alike the first ones."""
    assert sets_of({}) == [()]
    assert sets_of({"a": 1, "b": 2, "c": 1}) == [(), ("b",), ("a",), ("a", "b"), ("a", "c"), ("a", "c", "b")]
    many = {f"layers.{number}": number for number in range(10)}
    assert len(sets_of(many)) == MOST_SETS
    assert [len(each) for each in sets_of(many | {"last": 10})] == list(range(12))


COST = CollectiveCost(latency_s=1e-3, seconds_per_byte=1e-6)
LINKS = Links(num_devices=2, measured=CollectiveCosts(all_reduce=COST, all_gather=COST, reduce_scatter=COST))
OPTIMIZER = OptimizerCosts(state_bytes=8.0, update_s=0.0)


def problems(
    sizes: list[int], memory_bytes: int, seconds: float, sets: list[tuple[str, ...]] | None = None
) -> list[OsdpProblem]:
    """Of blocks of these sizes and a linear; None: those that the choice is made of."""
    model = nn.Sequential(*(Block(size) for size in sizes), nn.Linear(7, 7, bias=False))
    operators, names = operators_of(model), [str(number) for number in range(len(sizes))]
    paths = [path for op in operators for path in op.modules]
    sample = SampleCosts(
        bytes_per_sample=40 * sum(sizes) + 28,
        seconds_per_sample=seconds,
        uses=Counter(paths),
        products=Counter({path: next(model.get_submodule(path).parameters()).numel() for path in paths}),
        used_elsewhere=frozenset(),
    )
    blocks = BlockCosts(saved={name: 30 * size for name, size in zip(names, sizes, strict=True)}, again=30 * max(sizes))
    sets = sets_of(block_kinds(operators, sample, blocks)) if sets is None else sets
    measured = (sample, OPTIMIZER)
    return [problem_of(operators, 4, measured, LINKS, memory_bytes, each, blocks.bytes_less(each)) for each in sets]


def test_a_recomputed_block_by_hand() -> None:
    """Two blocks of two operators with 100 products each, and one of 49; a forward pass of an operator takes
    3 s x 100 / (3 x 449)."""
    plain, again = problems([10, 10], 10**6, 3.0, [(), ("0",)])
    forward_s = 3.0 * 100 / (3 * 449)
    assert (plain.seconds_per_sample, plain.bytes_per_sample) == (3.0, 828)
    assert again.seconds_per_sample == pytest.approx(3.0 + 2 * forward_s)
    assert again.bytes_per_sample == 828 - 300 + 300
    assert [op.gathers for op in again.operators] == [3, 3, 2, 2, 2]
    assert again.operators[0].ahead_s == pytest.approx((forward_s, forward_s, 2 * forward_s))
    [both] = problems([10, 10], 10**6, 3.0, [("0", "1")])
    assert both.bytes_per_sample == 828 - 600 + 300
    assert both.recomputed == ("0", "1")


def test_recomputation_changes_a_plan() -> None:
    """Where it takes little time, a block less that is kept leaves room for operators that are not sharded."""

    def best(sets: list[tuple[str, ...]] | None, seconds: float) -> OsdpPlan:
        return solve(problems([10, 10, 10, 10], 21000, seconds, sets), range(8, 9))

    alone, together = best([()], 1e-4), best(None, 1e-4)
    assert together.problem.recomputed == ("0", "1", "2", "3")
    assert together.step_s < alone.step_s
    sharded = [sum(row[2] for row in plan.slices) for plan in (alone, together)]
    assert sharded[1] < sharded[0]
    assert "recomputed: 0-3" in plan_text(together, {})
    slow = best(None, 100.0)
    assert slow.problem.recomputed == ()
    assert "recomputed" not in plan_text(slow, {})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([6, 10]), min_size=1, max_size=4), st.integers(2000, 16000), st.floats(1e-5, 1e-1))
def test_the_choice_is_the_best_of_all_sets_of_blocks(sizes: list[int], memory_bytes: int, seconds: float) -> None:
    names = [str(number) for number in range(len(sizes))]
    every = list(chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)))
    batches = range(1, 9)
    try:
        expected = solve(problems(sizes, memory_bytes, seconds, every), batches, time_limit_s=PATIENCE_S)
    except UserError:
        with pytest.raises(UserError):
            solve(problems(sizes, memory_bytes, seconds), batches)
        return
    found = solve(problems(sizes, memory_bytes, seconds), batches, time_limit_s=PATIENCE_S)
    assert found.proven
    assert found.seconds_per_sample == pytest.approx(expected.seconds_per_sample, rel=1e-11)
