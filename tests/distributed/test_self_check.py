"""What the doctor has GPUs do, done by four processes over gloo; and that it sees what is wrong."""

import pytest
import torch
import torch.distributed as dist

from realhf.realloc.executor import execute
from realhf.worker import self_check
from tests.distributed.pool import run_distributed

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


def all_checks(rank: int) -> dict[str, str]:
    return {name: check(rank, 4, CPU) for name, check in self_check.CHECKS.items()}


def test_four_ranks_pass() -> None:
    first, *others = run_distributed(all_checks, 4)
    assert all(other == first for other in others)
    assert first["groups"].startswith("all-reduce between 4 processes")
    assert first["reallocation"].startswith("dp4 tp1 pp1 -> dp1 tp4 pp1 -> dp1 tp1 pp4 -> dp1 tp2 pp2 -> dp4")
    assert first["generation"] == "none recorded: a cpu has no graphs"


def broken(rank: int, check: str) -> str:
    """The check where one rank's device computes wrong sums, or a reallocation loses a value."""

    def wrong_sum(numbers: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        numbers.add_(7)

    def losing(plan, rank, source, target, transport, **options) -> None:
        execute(plan, rank, source, target, transport, **options)
        target[0][1].view(-1)[0] += 1

    if check == "groups":
        self_check.dist.all_reduce = wrong_sum
    else:
        self_check.execute, self_check.verify = losing, lambda *_, **__: None
    try:
        self_check.CHECKS[check](rank, 2, CPU)
    except ArithmeticError as error:
        return str(error)
    return "nothing was seen"


@pytest.mark.parametrize(
    ("check", "message"), [("groups", "the all-reduce of"), ("reallocation", "came wrong from dp2 tp1 pp1")]
)
def test_what_is_wrong_is_seen(check: str, message: str) -> None:
    assert all(message in found for found in run_distributed(broken, 2, check))
