"""Recomputation of the blocks of a module: a block keeps its input alone, and the backward pass runs its forward again
(Chen et al., 2016). Which blocks do so is chosen together with the modes of operators."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from realhf.wrapping.measuring import Example, activations
from realhf.wrapping.operators import is_operator

MOST_SETS = 1024  # each is a search of modes


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The bytes of a sample that recomputation saves.

    saved: by block, of its activations.
    again: of the largest block, while its backward pass has them again; with any recomputation.
    """

    saved: Mapping[str, int]
    again: int

    def bytes_less(self, recomputed: Sequence[str]) -> int:
        """The bytes that these blocks save together."""
        return sum(self.saved[path] for path in recomputed) - self.again if recomputed else 0


NO_BLOCKS = BlockCosts(saved={}, again=0)


def blocks_of(module: nn.Module) -> tuple[str, ...]:
    """The paths of the members of the outermost lists and sequences that hold operators of their own: layers, say. One
    whose forward pass changes running statistics is none, since it would change them twice."""

    def found(owner: nn.Module, path: str) -> Iterator[str]:
        for name, child in owner.named_children():
            here = f"{path}.{name}" if path else name
            has_operators = not is_operator(child) and any(map(is_operator, child.modules()))
            if not isinstance(owner, nn.ModuleList | nn.Sequential) or isinstance(child, nn.ModuleList):
                yield from found(child, here)
            elif has_operators and not any(isinstance(part, _BatchNorm) for part in child.modules()):
                yield here

    return tuple(found(module, ""))


def recompute(block: nn.Module) -> None:
    """From now on the backward pass of a block runs its forward pass again."""
    forward = block.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        return (
            checkpoint(forward, *args, use_reentrant=False, **kwargs)
            if torch.is_grad_enabled()
            else forward(*args, **kwargs)
        )

    block.forward = again


@contextmanager
def recomputing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within it blocks are recomputed."""
    own = [block.__dict__.get("forward") for block in blocks]
    try:
        for block in blocks:
            recompute(block)
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def block_costs(module: nn.Module, example: Example, blocks: Sequence[str]) -> BlockCosts:
    """Measures passes with no block recomputed, and with all."""
    plain_peak, plain = activations(module, example, blocks)
    with recomputing([module.get_submodule(path) for path in blocks]):
        least_peak, least = activations(module, example, blocks)
    saved = {path: max(plain[path] - least[path], 0) for path in blocks}
    return BlockCosts(saved=saved, again=max(least_peak - plain_peak + sum(saved.values()), 0))


def sets_of(blocks: Mapping[str, object]) -> list[tuple[str, ...]]:
    """The sets of blocks to choose from, the empty one first.

    Blocks with the same value are alike: only their number matters, and a set has the first ones. This is exact. With
    more than MOST_SETS such sets, the sets are the first blocks of all.
    """
    counts = Counter(blocks.values())
    if math.prod(count + 1 for count in counts.values()) > MOST_SETS:
        return sets_of(dict.fromkeys(blocks))
    kinds = [[path for path, kind in blocks.items() if kind == each] for each in counts]
    numbers = product(*(range(len(kind) + 1) for kind in kinds))
    return [tuple(path for kind, n in zip(kinds, each, strict=True) for path in kind[:n]) for each in numbers]
