"""Deadlines kept by CUDA events, and NCCL's collectives in a graph: as far as one GPU goes, in a world of one rank."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from realhf.engine.generate.decode_graphs import CudaCapture
from realhf.parallel.waiting import StreamWaits
from tests.waiting import wait_until

pytestmark = pytest.mark.gpu
A_SECOND = 2_000_000_000  # cycles of a GPU, about


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def test_a_stream_that_is_late_is_told_and_one_in_time_is_not() -> None:
    failed: list[Exception] = []
    waits = StreamWaits(failed.append, look_every_s=0.01)
    waits.watch(60, lambda: "nothing")
    wait_until(lambda: not waits._watched, "an idle stream to be done")
    torch.cuda._sleep(3 * A_SECOND)
    waits.watch(0.1, lambda: "a kernel")
    wait_until(lambda: bool(failed), "the deadline")
    assert str(failed[0]) == "a kernel: timed out after 0.1 s"
    torch.cuda.synchronize()
    waits.close()


def test_a_sum_over_ranks_is_recorded_and_replayed(alone: None) -> None:
    numbers, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def compute() -> None:
        total.copy_(2 * numbers)
        dist.all_reduce(total)

    capture = CudaCapture()
    capture.run(compute)
    replay = capture.record(compute)
    for factor in (3.0, 5.0):
        numbers.fill_(factor)
        replay()
        assert total.tolist() == [2 * factor] * 4
    del replay  # NCCL takes no group apart that is in a graph
