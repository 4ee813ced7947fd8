"""Small tensors of the host on their way to a device."""

import torch
from torch import Tensor


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """`numbers` of the host on `device`, for the later work of the current stream.

    From pageable memory a copy to a GPU waits until the device has done all work before it, and the host with it.
    """
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
