"""The spawning helper itself: results in rank order, failures with their traceback, nothing left on a timeout."""

import os
import time

import psutil
import pytest
import torch

from tests.distributed.pool import run_distributed
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed


def sum_of_ranks(rank: int, factor: int) -> tuple[int, float]:
    value = torch.tensor(float(rank * factor))
    torch.distributed.all_reduce(value)
    return rank, value.item()


def fail_on_one(rank: int, how: str) -> None:
    if rank == 1 and how == "raise":
        raise ValueError("boom on one")
    if rank == 1 and how == "die":
        os._exit(7)
    time.sleep(2 * PATIENCE_S)


def test_results_come_in_rank_order() -> None:
    assert run_distributed(sum_of_ranks, 2, 10) == [(0, 10.0), (1, 10.0)]


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raise", RuntimeError, "rank 1 raised:(.|\n)*boom on one"),
        ("die", RuntimeError, "rank 1 died with exit code 7"),
        ("hang", TimeoutError, r"ranks \[0, 1\] were not done after"),
    ],
)
def test_failures_are_raised_and_leave_no_process(how: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run_distributed(fail_on_one, 2, how, timeout_s=2 if how == "hang" else PATIENCE_S)
    assert [process for process in psutil.Process().children(recursive=True) if process.ppid() != os.getpid()] == []
