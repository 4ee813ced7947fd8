"""One contiguous tensor with named views, which collectives and the optimizer see as a single vector."""

from math import prod

import torch
from torch import Tensor

from realhf.geometry.boxes import Box
from realhf.geometry.shards import FlatLayout


class Arena:
    """Tensors laid one behind the other as `layout` says, in `flat`, a vector of zeros at first.

    The padding between views stays zero: it adds nothing to norms, and AdamW keeps zeros at zero.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)

    def views(self) -> dict[str, Tensor]:
        """Every name's view of `flat`."""
        return views_in(self.flat, self.layout)


def views_in(flat: Tensor, layout: FlatLayout) -> dict[str, Tensor]:
    """Every name's view of a vector that is laid out so."""
    return {
        name: flat[start : start + prod(layout.shapes[name])].view(layout.shapes[name])
        for name, start in layout.starts.items()
    }


def view_in(flat: Tensor, box: Box, at: int) -> Tensor:
    """The view of a vector that has the elements of `box` from `at` on."""
    return flat[at : at + box.size].view(box.shape)
