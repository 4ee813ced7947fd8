"""Copies through pinned memory, with a device that copies when it is waited for."""

import torch
from torch import Tensor

from realhf.models.host_copies import copies_on_host, through


class Device:
    """Copies nothing before its arrival is waited for, and knows which parts are under way."""

    def __init__(self) -> None:
        self.under_way: list[tuple[Tensor, Tensor]] = []
        self.most = 0

    def start(self, stage: Tensor, source: Tensor) -> "Arriving":
        assert all(stage.data_ptr() != taken.data_ptr() for taken, _ in self.under_way), "still in use"
        self.under_way.append((stage, source))
        self.most = max(self.most, len(self.under_way))
        return Arriving(self, stage, source)


class Arriving:
    def __init__(self, device: Device, stage: Tensor, source: Tensor):
        self.device, self.stage, self.source = device, stage, source

    def synchronize(self) -> None:
        oldest, _ = self.device.under_way.pop(0)
        assert oldest is self.stage, "in the order of the stream"
        self.stage.copy_(self.source)


def test_every_byte_arrives_while_the_next_part_is_under_way() -> None:
    device = Device()
    sources = [
        torch.arange(1000, dtype=torch.float32).view(40, 25),
        torch.empty(0, 3),
        torch.arange(77).to(torch.bfloat16),
        torch.tensor(5.0, dtype=torch.float64),
        torch.arange(1200, dtype=torch.int64).view(30, 40)[:, 3:20],  # not contiguous
    ]
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    stages = [torch.zeros(512, dtype=torch.uint8) for _ in range(2)]
    through(stages, sources, targets, device.start)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
    assert device.most == 2
    assert not device.under_way


def test_without_tensors_of_a_gpu_no_memory_is_pinned() -> None:
    assert copies_on_host([]) == []
