"""Checksums of tensors, to notice bits that changed on the way or in memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

# By rank, the bit sum of each part that came from it, in the order of the plan.
SumsByPeer = dict[int, list[Tensor]]

_CHUNK = 1 << 18  # elements; on the CPU these stay in a core's caches
_GPU_CHUNK = 1 << 21  # so that a kernel takes longer than its launch


def bit_sum(tensor: Tensor) -> Tensor:
    """A sum of the bits of `tensor` that depends on their positions, modulo 2^64: an int64 scalar on its device.

    It changes with any one or two bits, any one element of up to 32 bits, and any one half of a longer one, in tensors
    of up to 2^31 such words. Other changes leave the sum as it was once in 2^32 times or less. Equal contents give
    equal sums on every device and for every stride. It costs one pass and 10 MB (on a GPU 80), and the host does not
    wait for it.
    """
    # A word has 32 bits at most: of a 64th bit every odd factor leaves only the parity, and two changed signs would
    # cancel out.
    word = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    rows = tensor.detach() if tensor.dim() else tensor.detach()[None]
    row_elements = max(1, rows.numel() // max(1, rows.shape[0]))
    first, size = 0, _CHUNK if tensor.device.type == "cpu" else _GPU_CHUNK
    for chunk in rows.split(max(1, size // row_elements)):
        for words in chunk.reshape(-1).contiguous().view(word).split(size):
            total += _factors(first, words).mul_(words).sum()
            first += words.numel()
    return total


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """The bit sum of each of them, int64 [tensors]; there must be one."""
    return torch.stack([bit_sum(tensor) for tensor in tensors])


def _factors(first: int, words: Tensor) -> Tensor:
    """The factors of word `first` and those after it, int64 of the shape of `words`: distinct odd numbers below 2^32.

    An odd factor has an inverse modulo 2^64, so no change of a single word can cancel out. A change of one bit in two
    words adds 2^n (f + g) or 2^n (f - g) with n < 32, which is not 0 modulo 2^64 either. The factors are in mixed
    order: with 1, 3, 5, ... many equal changes, such as of all signs, would cancel out.
    """
    # Products with odd numbers modulo 2^31, and the shift between them, can be undone: different inputs stay different.
    mixed = torch.arange(first, first + words.numel(), device=words.device)
    mixed.mul_(0x2545F491).bitwise_and_(0x7FFFFFFF)
    mixed.bitwise_xor_(mixed >> 15)
    return mixed.mul_(0x5851F42D).bitwise_and_(0x7FFFFFFF).mul_(2).add_(1)
