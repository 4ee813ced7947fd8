"""Reallocations by broadcasts in process groups, over gloo and the host's memory: bit-exact, one set of groups for all
moves, and an end at the deadline where a rank of a group does not come."""

import os
import signal
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from realhf.architecture.model import DecoderConfig
from realhf.cpu import host_group
from realhf.geometry.layout import Layout
from realhf.geometry.shards import Placement, held_boxes
from realhf.parallel.groups import GroupTable
from realhf.realloc.execute.carriers import BroadcastCarrier, HostCarrier, ReallocationError, TorchCarrier
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.verification import verify
from realhf.realloc.plan.planner import plan_between, plan_reallocation
from realhf.worker.parameter_moves import groups_of_broadcasts
from tests.distributed.pool import run_distributed
from tests.distributed.test_parameter_moves import PLAN, Worker, run_with
from tests.distributed.test_realloc import PAIRS, SHARDED_PAIRS, boxed, random_state
from tests.distributed.test_realloc_faults import LARGE, SMALL
from tests.unit.realloc.layouts import layouts, models
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed

RANKS = range(4)
SETS = [ranks for size in (2, 3, 4) for ranks in combinations(RANKS, size)]
Case = tuple[DecoderConfig, Layout, Layout, str, str]  # and what divides the parameters of the source and of the target


def carriers() -> dict[str, BroadcastCarrier]:
    """One of each transport, with all groups that four ranks can have: no move makes one of its own."""
    memory = dist.new_group(list(RANKS), backend=host_group.BACKEND)
    over_gloo = {ranks: dist.new_group(list(ranks)) for ranks in SETS}
    over_memory = {ranks: dist.new_group(list(ranks), backend=host_group.BACKEND) for ranks in SETS}
    return {
        "gloo": BroadcastCarrier(over_gloo, TorchCarrier()),
        "host memory": BroadcastCarrier(over_memory, HostCarrier(memory)),
    }


def move_all(rank: int, cases: list[Case]) -> list[str]:
    """What is wrong after the moves of all cases, with eta of 1 and less, over both transports."""
    wrong = []
    for name, carrier in carriers().items():
        for number, (model, a, b, *kinds) in enumerate(cases):
            dtype, eta = [torch.float32, torch.bfloat16, torch.float64][number % 3], [1.0, 1.0, 0.3][number % 3]
            state, ends = random_state(model, dtype), [Placement(*end) for end in zip((a, b), kinds, strict=True)]
            plan = plan_between(model, *ends, 2, dtype.itemsize, [2**20, 512][number % 2], by="broadcasts")
            source, wanted = (boxed(state, held_boxes(model, at.layout, rank, at.data_parallel)) for at in ends)
            target = [(box, torch.full_like(tensor, -7)) for box, tensor in wanted]
            part, arrived = Reallocation(plan, rank, source, target, carrier), {} if eta < 1 else None
            execute(part, eta=eta, arrived=arrived)
            verify(part, arrived=arrived)
            for (box, got), (_, new) in zip(target, wanted, strict=True):
                expected = torch.full_like(new, -7).lerp_(new, eta) if eta < 1 else new
                if not torch.equal(got, expected):
                    wrong.append(f"{name}: {box} of {a} to {b}, eta={eta:g}")
    return wrong


def drawn_cases(number: int) -> list[Case]:
    cases: list[Case] = []

    @settings(
        max_examples=number, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def draw(data: Any) -> None:
        model = data.draw(models())
        fitting = layouts(model).filter(lambda layout: layout.mesh.devices[-1] in RANKS)
        kinds = st.sampled_from(["zero1", "fsdp"])
        cases.append((model, data.draw(fitting), data.draw(fitting), data.draw(kinds), data.draw(kinds)))

    draw()
    return cases


def test_random_layouts_and_chosen_ones_are_bit_exact() -> None:
    chosen = [(*case, "zero1", "zero1") for case in PAIRS] + [(*case, "fsdp", "zero1") for case in SHARDED_PAIRS]
    assert run_distributed(move_all, 4, [*chosen, *drawn_cases(15)]) == [[], [], [], []]


def moves_of_workers(rank: int) -> tuple[list[str], list[str], list[tuple[int, ...]], int]:
    """What two workers say of two moves of each kind by broadcasts, with a bit that flips in the second; their groups;
    and how many the moves made."""
    run = run_with(0.3, every=1)
    run = run.changed(structs.replace(PLAN, broadcasts=("actor_generate", "reference_follows_actor")))
    layouts_of_calls = [PLAN.layout(call) for call in PLAN.calls]
    table = GroupTable(layouts_of_calls, rank, moves=groups_of_broadcasts(run))
    worker, made, new_group = Worker(rank, run, table), [], dist.new_group
    used: list[tuple[int, ...]] = []
    broadcast = dist.broadcast

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(arguments)
        return new_group(*arguments, **options)

    def noted(tensor: Any, root: int, group: Any, **options: Any) -> Any:
        used.append(next(ranks for ranks, known in table.of_moves.items() if known is group))
        return broadcast(tensor, root, group, **options)

    dist.new_group, dist.broadcast = counted, noted
    try:
        generated = [worker.generate(0, is_disturbed) for is_disturbed in (False, True)]
        followed = [worker.follow(step, is_disturbed=step == 1) for step in range(2)]
    finally:
        dist.new_group, dist.broadcast = new_group, broadcast
    assert used, "the moves are broadcasts"
    return followed, generated, sorted(table.of_moves), len(made)


def test_workers_make_groups_once_and_verify_as_with_messages() -> None:
    home, other = run_distributed(moves_of_workers, 2)
    for followed, _, groups, made in (home, other):
        assert (followed[0], groups, made) == ("", [(0, 1)], 0)
    assert home[0][1] == ""
    assert other[0][1].startswith("reallocation of reference: rank 1 holds other values than rank 0 sent of parameter ")
    assert other[1] == ["", ""]
    assert home[1][0] == ""
    assert home[1][1].startswith("actor: rank 0 took other values back than it had lent to a copy, of parameter model.")


KILLED = 1


def lose_a_rank(rank: int, transport: str, is_killed: bool) -> str:
    """Rank 1 leaves before it has sent to all others, or is there and does not send; what the others say."""
    carrier = carriers()[transport]
    dist.barrier()
    if rank == KILLED and is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    plan = plan_reallocation(
        {KILLED: [LARGE], 0: [SMALL]},
        {**{other: [LARGE] for other in (0, 2, 3)}, KILLED: [SMALL]},
        bucket_bytes=2**20,
        by="broadcasts",
    )
    assert plan.groups == ((0, 1, 2, 3), (0, 1))
    said = ""
    if rank != KILLED:
        source = [(SMALL, torch.ones(SMALL.shape))] if rank == 0 else []
        timeout_s = 2 * PATIENCE_S if is_killed else 1.5
        part = Reallocation(
            plan, rank, source, [(LARGE, torch.ones(LARGE.shape))], carrier, model_name="actor", timeout_s=timeout_s
        )
        with pytest.raises(ReallocationError) as raised:
            execute(part)
        said = str(raised.value)
    if not is_killed:
        dist.barrier()  # it waits while the others miss it
    return said


@pytest.mark.parametrize(
    ("transport", "is_killed"),
    [("gloo", False), ("host memory", True), pytest.param("gloo", True, marks=pytest.mark.slow)],
)
def test_a_rank_that_does_not_come_is_named_with_bucket_and_parameters(transport: str, is_killed: bool) -> None:
    all_said = run_distributed(lose_a_rank, 4, transport, is_killed, killed=KILLED if is_killed else None)
    for rank, said in enumerate(all_said):
        if rank != KILLED:
            assert said.startswith("reallocation of actor, bucket 1 of 8: rank ")
            awaited = f"receive {SMALL.name}" if rank == 0 else f"send {LARGE.name}"  # the first in the order
            assert f"rank {KILLED} to {awaited}" in said
            assert is_killed or "s (at most 1.5) in vain" in said
