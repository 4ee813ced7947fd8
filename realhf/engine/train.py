"""One optimizer step on a mini-batch: pipelined gradients, their sum over the layout, AdamW."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.compute import ComputeConfig
from realhf.api.experiment import OptimizerConfig
from realhf.engine.arena import Arena
from realhf.engine.batch import Batch
from realhf.engine.build import attach_gradients
from realhf.engine.forward import pack_micro_batch, run_stage
from realhf.engine.interface import LossFunction, Stats
from realhf.engine.optimizer import FlatAdamW, gradient_dtype
from realhf.engine.pipeline import Neighbours, run_training
from realhf.engine.schedule import Pass
from realhf.models.checkpoint_index import of_kind
from realhf.models.decoder import Decoder
from realhf.models.parameters import decoder_parameters, sees_own_tokens
from realhf.parallel.collectives import all_gather, reduce_scatter
from realhf.parallel.sequence import TokenShards
from realhf.realloc.layout import Box
from realhf.realloc.shards import boxes_in, counted_range


@dataclass
class _Sums:
    """Sums over the micro-batches of this data-parallel rank."""

    loss: Tensor | float = 0.0
    stats: Stats | None = None

    def add(self, loss: Tensor, stats: Stats) -> None:
        self.loss = self.loss + loss.detach().double()
        self.stats = self.stats or {}
        for key, (value, weight) in stats.items():
            old_value, old_weight = self.stats.get(key, (0.0, 0.0))
            self.stats[key] = (old_value + value, old_weight + weight)


class Trainer:
    """The training state of one rank's part of a model: gradients of the decoder's arena, and the optimizer of
    this data-parallel rank's shard of it (ZeRO-1: Rajbhandari et al., 2020, section 5.1)."""

    def __init__(
        self,
        decoder: Decoder,
        neighbours: Neighbours,
        arena: Arena,
        config: OptimizerConfig,
        total_optimizer_steps: int,
        compute: ComputeConfig,
    ):
        self.decoder, self.neighbours, self.arena, self.compute = decoder, neighbours, arena, compute
        self.gradients = Arena(arena.layout, gradient_dtype(arena.flat.dtype, config), arena.flat.device)
        attach_gradients(decoder, self.gradients)
        groups = decoder.groups
        shard = arena.layout.shard(groups.dp_index)
        self._shard = slice(shard.start, shard.stop)
        self.optimizer = FlatAdamW(arena.flat[self._shard], config, total_optimizer_steps)
        counted = counted_range(decoder.config, groups.layout, groups.rank)
        self._counted = slice(counted.start, counted.stop)

    def train_step(
        self, batch: Batch, tokens_key: str, loss: LossFunction, weight: Callable[[Batch], float], micro_batches: int
    ) -> Stats:
        """See `realhf.engine.interface.Model.train_step`.

        Raises:
            ValueError: the weights of the mini-batch do not sum to a positive number.
            FloatingPointError: the gradient's norm is not finite; the parameters are as before.
        """
        parts = [batch.select(places) for places in batch.balanced(tokens_key, micro_batches)]
        local_weight = float(sum(weight(part) for part in parts))
        global_weight = self._sum_over_data(local_weight)
        if not (math.isfinite(global_weight) and global_weight > 0):
            raise ValueError(
                f"train_step at optimizer step {self.optimizer.step_count}: the loss weights of the mini-batch sum to "
                f"{global_weight}, which must be finite and above 0; is there any token to train on?"
            )
        sums = self._accumulate(parts, tokens_key, loss, global_weight)
        self._reduce_gradients()
        lr = self.optimizer.lr
        norm = self._gradient_norm()
        self._check(norm, sums)
        limit = self.optimizer.config.max_grad_norm
        gradients = self.gradients.flat[self._shard]
        if norm > limit:
            gradients.mul_(limit / (norm + 1e-6))  # the guard is torch's clip_grad_norm_'s
        self.optimizer.step(gradients)
        all_gather(self.arena.flat, self.decoder.groups.data)
        if not self.decoder.groups.is_last_stage:
            return {}
        return {
            **(sums.stats or {}),
            "loss": (float(sums.loss), local_weight),
            "grad_norm": (norm, 1.0),
            "lr": (lr, 1.0),
        }

    def state(self, only_counted: bool = False) -> list[tuple[Box, Tensor]]:
        """The optimizer's vectors as boxes of their parameters, views to be read or written in place: `NAME@exp_avg`,
        `NAME@exp_avg_sq` and, where parameters are below float32, `NAME@master`.

        They cover this rank's shard, so that a parameter may have several boxes here or none; with `only_counted`, the
        part of it that no other rank has (`counted_range`).
        """
        groups, first = self.decoder.groups, self._shard.start
        part = self._counted if only_counted else self._shard
        return [
            (of_kind(box, kind), flat[start - first : start - first + box.size].view(box.shape))
            for box, start in boxes_in(self.decoder.config, groups.layout, groups.rank, range(part.start, part.stop))
            for kind, flat in self.optimizer.state.items()
        ]

    def _accumulate(self, parts: list[Batch], tokens_key: str, loss: LossFunction, global_weight: float) -> _Sums:
        """Leaves this rank's gradient of sum(loss) / global_weight in the gradient arena."""
        packed = [pack_micro_batch(part.data[tokens_key], self.arena.flat.device) for part in parts]
        shards = [self._shards(len(p.tokens)) for p in packed]
        counts = [len(p.tokens) if s is None else s.count for p, s in zip(packed, shards, strict=True)]
        sums = _Sums()

        def run(forward: Pass, hidden: Tensor | None) -> Tensor:
            i, chunk = forward.micro_batch, forward.chunk
            output = run_stage(self.decoder, packed[i], hidden, shards[i], self.compute.recomputation, chunk)
            if not self.decoder.has_head(chunk):
                return output
            value, stats = loss(output, parts[i])
            sums.add(value, stats)
            return value / global_weight

        self.gradients.flat.zero_()
        run_training(self.neighbours, counts, run)
        return sums

    def _shards(self, tokens: int) -> TokenShards | None:
        group = self.decoder.groups.tensor
        return TokenShards(group, tokens) if self.compute.sequence_parallel and group is not None else None

    def _reduce_gradients(self) -> None:
        """Leaves the sum over the layout in this rank's shard of the gradient arena."""
        groups = self.decoder.groups
        if self.compute.sequence_parallel and groups.tensor is not None:
            self._sum_over_own_tokens(groups.tensor)
        if self.decoder.config.tied_embeddings and groups.tied is not None:
            dist.all_reduce(self.decoder.model.embed_tokens.weight.grad, group=groups.tied)
        reduce_scatter(self.gradients.flat, groups.data)

    def _sum_over_own_tokens(self, group: dist.ProcessGroup) -> None:
        """Sums what each rank of a tensor-parallel group has of the gradients of its own tokens."""
        names = {spec.name for spec in decoder_parameters(self.decoder.config) if sees_own_tokens(spec)}
        views = [view for name, view in self.gradients.views().items() if name in names]
        if views:
            total = torch.cat([view.flatten() for view in views])
            dist.all_reduce(total, group=group)
            for view, part in zip(views, total.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view_as(view))

    def _gradient_norm(self) -> float:
        """The Euclidean norm of the whole model's gradient, the same on every rank.

        In float64: a float32 sum depends on the layout in the fifth digit.
        """
        square = torch.linalg.vector_norm(self.gradients.flat[self._counted], dtype=torch.float64).square()
        if self.decoder.groups.model is not None:
            dist.all_reduce(square, group=self.decoder.groups.model)
        return math.sqrt(square.item())

    def _sum_over_data(self, value: float) -> float:
        group = self.decoder.groups.data
        if group is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.arena.flat.device)
        dist.all_reduce(total, group=group)
        return total.item()

    def _check(self, norm: float, sums: _Sums) -> None:
        if math.isfinite(norm):
            return
        seen = f"; the loss here was {float(sums.loss)}" if self.decoder.groups.is_last_stage else ""
        raise FloatingPointError(
            f"train_step at optimizer step {self.optimizer.step_count}: the gradient norm is {norm}{seen}. The "
            "parameters are unchanged; lower the learning rate, or look for values that overflow in the loss"
        )
