"""One optimizer step on a mini-batch: pipelined gradients, their sum over the layout, AdamW."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.engine.arena import view_in
from realhf.engine.batch import Batch
from realhf.engine.exact_sums import term
from realhf.engine.forward import pack_for, run_stage
from realhf.engine.interface import LossFunction, Stats
from realhf.engine.pipeline import Neighbours, run_training
from realhf.engine.returned import UnreadLoss, check_loss, read_losses
from realhf.engine.train.data_parallel import Parameters, place_of
from realhf.engine.train.optimizer import FlatAdamW, gradient_dtype, square_sum
from realhf.engine.train.ordered import OrderedGradient
from realhf.geometry.boxes import Box
from realhf.geometry.pipeline_schedule import Pass
from realhf.geometry.shards import counted_slices, shard_boxes
from realhf.models.checkpoint_index import of_kind
from realhf.parallel.sequence import TokenShards
from realhf.parallel.vocabulary import Logits, WholeLogits


def reaching(loss: Tensor, output: Tensor | Logits | WholeLogits) -> Tensor:
    """The same loss, made so that its backward pass always reaches the output of the model's head.

    The loss of a micro-batch without a term may be a constant. Its backward pass has to be there all the same: stages
    before wait for a gradient, and ranks of `fully_shard` for one another.
    """
    head = output if isinstance(output, Tensor) else output.hidden if isinstance(output, Logits) else output.logits
    waiting: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is head.grad_fn:
            return loss
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [function for function, _ in node.next_functions]
    reached: Tensor = _Reached.apply(loss, head)
    return reached


class _Reached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, head: Tensor) -> Tensor:
        ctx.save_for_backward(head)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (head,) = ctx.saved_tensors
        return grad, torch.zeros_like(head)


@dataclass
class _Sums:
    """Sums over the micro-batches of this data-parallel rank."""

    loss: float = 0.0
    stats: Stats = field(default_factory=dict)

    def add(self, loss: float, stats: Stats) -> None:
        self.loss += loss
        for key, (value, weight) in stats.items():
            old_value, old_weight = self.stats.get(key, (0.0, 0.0))
            self.stats[key] = (old_value + value, old_weight + weight)


class Trainer:
    """The training state of one rank's part of a model: the optimizer of the parameters that this data-parallel rank
    updates (ZeRO: Rajbhandari et al., 2020, section 5)."""

    def __init__(
        self,
        parameters: Parameters,
        neighbours: Neighbours,
        config: OptimizerConfig,
        total_optimizer_steps: int,
        compute: Computation,
    ):
        self.parameters, self.decoder, self.neighbours = parameters, parameters.decoder, neighbours
        self.compute = compute
        parameters.attach_gradients(gradient_dtype(parameters.flat.dtype, config))
        self.ordered = None if self.decoder.leaves is None else OrderedGradient(parameters)
        parts = [parameters.flat[part] for part in parameters.updated]
        in_vectors = self.decoder.leaves is not None
        self.optimizer = FlatAdamW(parts, config, total_optimizer_steps, in_vectors=in_vectors)
        groups = self.decoder.groups
        self._counted = counted_slices(self.decoder.config, groups.layout, groups.rank, parameters.data_parallel)

    def train_step(
        self, batch: Batch, tokens_key: str, loss: LossFunction, weight: Callable[[Batch], float], micro_batches: int
    ) -> Stats:
        """See `realhf.engine.interface.Model.train_step`.

        Raises:
            ValueError: the weights of the mini-batch do not sum to a positive number.
            FloatingPointError: the gradient's norm is not finite; the parameters are as before.
        """
        divided = batch.balanced(tokens_key, micro_batches) if self.ordered is None else self.ordered.divided(batch)
        parts = [batch.select(places) for places in divided]
        local_weight = float(sum(weight(part) for part in parts))
        global_weight = self._sum_over_data(local_weight)
        if not (math.isfinite(global_weight) and global_weight > 0):
            raise ValueError(
                f"train_step at optimizer step {self.optimizer.step_count}: the loss weights of the mini-batch sum to "
                f"{global_weight}, which must be finite and above 0; is there any token to train on?"
            )
        sums = self._accumulate(parts, tokens_key, loss, global_weight)
        if self.ordered is None:
            self.parameters.reduce_gradients(sequence_parallel=self.compute.sequence_parallel)
        else:
            self.ordered.collect()
            self.ordered.reduce()
        gradients = [self.parameters.gradient[part] for part in self.parameters.updated]
        lr = self.optimizer.lr
        norm = self._norm()
        self._check(norm, sums)
        limit = self.optimizer.config.max_grad_norm
        self.optimizer.step(gradients, min(1.0, limit / (norm + 1e-6)))  # the guard is torch's clip_grad_norm_'s
        self.parameters.publish()
        if not self.decoder.groups.is_last_stage:
            return {}
        return {
            **sums.stats,
            "loss": (sums.loss, local_weight),
            "grad_norm": (norm, 1.0),
            "lr": (lr, 1.0),
        }

    def state(self) -> list[tuple[Box, Tensor]]:
        """The optimizer's vectors as boxes of their parameters, views to be read or written in place: `NAME@exp_avg`,
        `NAME@exp_avg_sq` and, where parameters are below float32, `NAME@master`.

        They cover the elements that this rank updates, so a parameter may have several boxes here or none.
        """
        groups = self.decoder.groups
        return [
            (of_kind(box, kind), view_in(flat, box, at))
            for box, at in shard_boxes(self.decoder.config, groups.layout, groups.rank, self.parameters.data_parallel)
            for kind, flat in self.optimizer.state.items()
        ]

    def _accumulate(self, parts: list[Batch], tokens_key: str, loss: LossFunction, global_weight: float) -> _Sums:
        """Leaves this rank's gradient of sum(loss) / global_weight with the parameters."""
        device = self.parameters.flat.device
        packed = [pack_for(self.decoder, part.data[tokens_key], device) for part in parts]
        group = self.decoder.groups.tensor if self.compute.sequence_parallel else None
        shards = [None if group is None else TokenShards(group, len(p.tokens)) for p in packed]
        counts = [len(p.tokens) if s is None else s.count for p, s in zip(packed, shards, strict=True)]
        unread: list[UnreadLoss] = []

        def run(forward: Pass, hidden: Tensor | None) -> Tensor:
            i, chunk = forward.micro_batch, forward.chunk
            output = run_stage(self.decoder, packed[i], hidden, shards[i], self.compute.recomputed, chunk)
            if not self.decoder.has_head(chunk):
                assert isinstance(output, Tensor)
                return output
            value, found = check_loss(loss(output, parts[i]), parts[i].ids)
            unread.append(found)
            return reaching(value, output) / global_weight

        self.parameters.zero_gradients()
        with self.parameters.computing() as end_pass:
            end_backward = None if self.ordered is None else self.ordered.add
            run_training(self.neighbours, counts, run, end_pass, end_backward)
        sums = _Sums()
        for value, stats in read_losses(unread):
            sums.add(term(value), {key: (term(total), of) for key, (total, of) in stats.items()})
        return sums

    def _norm(self) -> float:
        """The Euclidean norm of the whole model's gradient; the same on every rank. This rank counts its part.

        In float64: a float32 sum depends on the layout in the fifth digit.
        """
        gradient, updated = self.parameters.gradient, self.parameters.updated
        starts = [(place_of(part.start, updated), part) for part in self._counted if part.stop > part.start]
        counted = [gradient[start : start + part.stop - part.start] for start, part in starts]
        if self.ordered is not None:
            return self.ordered.norm(counted, gradient.device, self.decoder.groups.model)
        square = gradient.new_zeros((), dtype=torch.float64)
        for of_part in counted:
            square += square_sum(of_part)
        if self.decoder.groups.model is not None:
            dist.all_reduce(square, group=self.decoder.groups.model)
        return math.sqrt(square.item())

    def _sum_over_data(self, value: float) -> float:
        group = self.decoder.groups.data
        if group is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.parameters.flat.device)
        dist.all_reduce(total, group=group)
        return total.item()

    def _check(self, norm: float, sums: _Sums) -> None:
        if math.isfinite(norm):
            return
        seen = f"; the loss here was {sums.loss}" if self.decoder.groups.is_last_stage else ""
        raise FloatingPointError(
            f"train_step at optimizer step {self.optimizer.step_count}: the gradient norm is {norm}{seen}. The "
            "parameters are unchanged; lower the learning rate, or look for values that overflow in the loss"
        )
