"""A mini-batch's gradient whose bits do not depend on the layout: its parts are computed one by one and added along one
tree, which data-parallel ranks cut (`realhf.geometry.reproducible`)."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.chunks import GATHERED_ELEMENTS
from realhf.engine.batch import PART, Batch
from realhf.engine.returned import InterfaceError
from realhf.engine.train.data_parallel import Parameters, sum_over
from realhf.parallel.collectives import gathered
from realhf.parallel.ordered import tree_sum

# Elements that stay in a core's cache from the first operation on them to the last; on a GPU launches are what costs.
_IN_CACHE, _ON_GPU = 2**16, 2**26


class OrderedGradient:
    """The gradient of a rank's parameters: that of its parts of a mini-batch, then that of all ranks.

    A tied embedding's gradient has two sources, the rows that tokens look up and the head. They may be on different
    stages, so that they are summed apart over parts and ranks, and together at the end.
    """

    def __init__(self, parameters: Parameters):
        self.parameters, self.decoder = parameters, parameters.decoder
        self._groups = self.decoder.groups
        self._tied: Tensor | None = None  # the gradient of a tied embedding
        self._looked_up: Tensor | None = None  # its part by tokens that are looked up, where the head is here too
        if self._groups.is_first_stage:
            looked_up = self.decoder.model.embed_tokens
            assert looked_up.weight is not None, "no weight is cut"
            looked_up.own_sink = looked_up.weight.grad
        if self.decoder.config.tied_embeddings and (self._groups.is_first_stage or self._groups.is_last_stage):
            embedding = self.decoder.model.embed_tokens
            assert embedding.weight is not None, "a tied embedding is not cut"
            self._tied = embedding.weight.grad
            assert self._tied is not None, "gradients are attached before"
            if self._groups.is_first_stage and self._groups.is_last_stage:
                embedding.own_sink = self._looked_up = torch.zeros_like(self._tied)
        self._present: list[int] = []
        self._parts = 1
        self._next = 0
        self._waiting: list[list[Tensor] | None] = []

    def divided(self, batch: Batch) -> list[list[int]]:
        """The places of the samples of each part that has some. Raises InterfaceError for a batch without parts."""
        if PART not in batch.data:
            raise InterfaceError(
                "train_step under reproducible='layout' got a batch that does not say which part of the gradient each "
                "sample belongs to; train by the interfaces of realhf, or leave reproducible out"
            )
        places: dict[int, list[int]] = {}
        for place, part in enumerate(batch.data[PART]):
            places.setdefault(int(part[0]), []).append(place)
            self._parts = int(part[1])
        self._present, self._next, self._waiting = sorted(places), 0, []
        return [places[part] for part in self._present]

    def add(self, micro_batch: int) -> None:
        """Takes the gradient of a part, and leaves zeros for the next one."""
        part = self._present[micro_batch]
        while self._next < part:
            self._climb(None)
        self._climb([each.clone() for each in self.vectors])
        for each in self.vectors:
            each.zero_()

    def collect(self) -> None:
        """After the last part: the gradient is that of all parts of this rank."""
        while self._next < self._parts:
            self._climb(None)
        [total] = self._waiting
        for vector, of_rank in zip(self.vectors, total or (), strict=bool(total)):
            vector.copy_(of_rank)
        self._waiting = []

    def reduce(self) -> None:
        """After `collect`: the gradient is that of the whole mini-batch, over all ranks."""
        if (group := self._groups.data) is not None:
            for vector in self.vectors:
                for chunk in vector.flatten().split(GATHERED_ELEMENTS):
                    chunk.copy_(tree_sum(gathered(chunk, group)))
        if self._tied is not None and self._looked_up is not None:
            self._tied += self._looked_up
            self._looked_up.zero_()
        elif self._tied is not None and self._groups.tied is not None:
            sum_over(self._groups.tied, [self._tied])

    @staticmethod
    def norm(counted: Sequence[Tensor], device: torch.device, group: dist.ProcessGroup | None) -> float:
        """The Euclidean norm of the gradient's vectors `counted` of all ranks of `group`, those of a model.

        Squares are added on two grids, the coarser for what the greatest square allows: sums on them are exact, so that
        their order does not matter (Demmel and Nguyen, "Parallel reproducible summation", 2015).
        """
        greatest = torch.zeros(1, dtype=torch.float64, device=device)
        for vector in counted:
            greatest = torch.maximum(greatest, torch.stack(vector.aminmax()).abs().max().double())
        elements = torch.tensor([float(sum(map(len, counted)))], dtype=torch.float64, device=device)
        if group is not None:
            dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(elements, group=group)
        if not math.isfinite(greatest.item()) or not greatest.item():
            return greatest.item()
        _, exponent = math.frexp(greatest.item() ** 2)
        number = math.ceil(math.log2(elements.item() + 1))
        grids = [2.0 ** max(exponent + number - 52, -1020), 2.0 ** max(exponent + 2 * number - 104, -1070)]
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for vector in counted:
            for chunk in vector.split(_IN_CACHE if device.type == "cpu" else _ON_GPU):
                rest = chunk.double().square_()
                for place, grid in enumerate(grids):
                    rounded = (rest / grid).round_().mul_(grid)
                    sums[place] += rounded.sum()
                    rest -= rounded
        if group is not None:
            dist.all_reduce(sums, group=group)
        return math.sqrt(sums.sum().item())

    @property
    def vectors(self) -> list[Tensor]:
        """The gradient of all parameters, and that of the rows that tokens look up where it is apart."""
        gradient = self.parameters.gradient
        return [gradient] if self._looked_up is None else [gradient, self._looked_up]

    def _climb(self, total: list[Tensor] | None) -> None:
        """Adds the next part to the tree; None for a part without samples."""
        place, size = self._next, 1
        while place % 2 and size < self._parts:
            left = self._waiting.pop()
            if left is not None and total is not None:
                left = [one.add_(other) for one, other in zip(left, total, strict=True)]
            total = total if left is None else left
            place, size = place // 2, size * 2
        self._waiting.append(total)
        self._next += 1
