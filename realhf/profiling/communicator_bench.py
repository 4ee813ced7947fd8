"""The memory of a communicator, measured."""

import torch
import torch.distributed as dist

from realhf.parallel.groups import group_of_all_ranks

# NCCL takes other algorithms for small than for large tensors, and buffers for each.
SIZES_BYTES = (2**10, 2**24)


def communicator_bytes(device: torch.device, timeout_s: float) -> int | None:
    """The most bytes that a communicator of all ranks takes on one of their devices; None with one rank, and on a CPU.
    All ranks call it together. Nothing else may use the devices meanwhile, because it compares their free memory.
    """
    if device.type != "cuda" or dist.get_world_size() == 1:
        return None
    tensors = [torch.zeros(size_bytes // 4, device=device) for size_bytes in SIZES_BYTES]
    taken = torch.zeros(1, dtype=torch.int64, device=device)
    before = _free_bytes(device)
    group = group_of_all_ranks(device, timeout_s)
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    taken.fill_(max(before - _free_bytes(device), 0))
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return int(taken)


def _free_bytes(device: torch.device) -> int:
    """Free memory of the device, by CUDA: torch does not know NCCL's allocations."""
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
