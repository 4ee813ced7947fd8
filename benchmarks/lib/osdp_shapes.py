"""Models of the OSDP paper's three shapes, scaled down to a machine's cores: plain torch modules."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

INNER = 4  # times the hidden size, as in the paper's models


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`parts`: (blocks, hidden size), one part after the other. A step is of `samples` of `length` tokens on a rank."""

    name: str
    parts: tuple[tuple[int, int], ...]
    vocabulary: int = 2048
    samples: int = 4
    length: int = 32

    def tokens(self, seed: int) -> Tensor:
        return torch.randint(
            self.vocabulary, (self.samples, self.length), generator=torch.Generator().manual_seed(seed)
        )


SHAPES = (
    Shape(name="narrow and deep", parts=((24, 160),)),
    Shape(name="wide and shallow", parts=((2, 768),)),
    Shape(name="inconsistent", parts=((8, 160), (2, 512))),
)
QUICK_SHAPES = (Shape(name="inconsistent, small", parts=((4, 96), (2, 320)), vocabulary=512),)


class Block(nn.Module):
    """A norm and an MLP beside the residual stream."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, INNER * hidden, bias=False)
        self.down = nn.Linear(INNER * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [samples, length, hidden]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens to the loss of the tokens that follow; widths change by a linear."""

    def __init__(self, shape: Shape):
        super().__init__()
        hidden = [size for _, size in shape.parts]
        self.embedding = nn.Embedding(shape.vocabulary, hidden[0])
        self.blocks = nn.ModuleList(blocks_of(shape.parts))
        self.norm = nn.LayerNorm(hidden[-1])
        self.head = nn.Linear(hidden[-1], shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [samples, length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)  # [samples x (length - 1), vocabulary]
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def blocks_of(parts: Sequence[tuple[int, int]]) -> list[nn.Module]:
    """The blocks of all parts, with a linear between two parts."""
    found: list[nn.Module] = [Block(parts[0][1]) for _ in range(parts[0][0])]
    for (_, before), (count, hidden) in pairwise(parts):
        found += [nn.Linear(before, hidden, bias=False), *(Block(hidden) for _ in range(count))]
    return found
