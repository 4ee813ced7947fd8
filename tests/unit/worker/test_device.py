import pytest
import torch

from realhf.base.errors import UserError
from realhf.worker.device import own_device


def sees(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_worker_takes_the_one_gpu_that_it_sees(monkeypatch):
    sees(monkeypatch, 1)
    assert own_device({"REALHF_DEVICE": "cuda:3", "CUDA_VISIBLE_DEVICES": "5"}) == torch.device("cuda", 0)


@pytest.mark.parametrize(("given", "number"), [("1", 1), ("2", 2), ("2,1", 2), ("", 1), ("0", 1)])
def test_a_worker_of_a_run_on_the_cpu_takes_no_gpu_that_torch_sees(given, number, monkeypatch):
    """And as many threads as it is given, whatever the user's variable looks like."""
    sees(monkeypatch, 1)
    threads = torch.get_num_threads()
    try:
        assert own_device({"REALHF_DEVICE": "cpu:0", "OMP_NUM_THREADS": given}) == torch.device("cpu")
        assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [0, 2])
def test_a_worker_that_does_not_see_its_gpu_says_so_and_takes_nothing_else(count, monkeypatch):
    sees(monkeypatch, count)
    with pytest.raises(UserError, match=rf"CUDA_VISIBLE_DEVICES='5', and torch .* sees {count}; try .* --cpu-only"):
        own_device({"REALHF_DEVICE": "cuda:0", "CUDA_VISIBLE_DEVICES": "5"})
