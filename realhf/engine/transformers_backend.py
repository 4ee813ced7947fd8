"""The transformers backend: any causal language model that `transformers` can build, on data-parallel ranks.

Micro-batches, losses, the optimizer, random numbers and checkpoints are those of the native backend: this file has a
module of `transformers` in the place of the decoder, parameters that torch's `fully_shard` divides, and generation with
the KV cache of `transformers`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from realhf.architecture.compute import DataParallel
from realhf.architecture.transformers_config import TransformersConfig, check_backend
from realhf.base.errors import UserError
from realhf.engine.arena import Arena, view_in
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.build import build_arena
from realhf.engine.generate.choice import DrawnTokens, TokenChoice
from realhf.engine.generate.loop import check_request, concatenated
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.engine.pipeline import EndPass, no_end
from realhf.engine.train.data_parallel import Parameters
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import check_strategy
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.shards import shard_boxes
from realhf.models.attention import PackedAttention
from realhf.models.transformers_models import CausalModel, random_weights
from realhf.parallel.collectives import all_gather, reduce_scatter
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.vocabulary import WholeLogits


class TransformersDecoder:
    """Computes packed micro-batches as `realhf.models.decoder.Decoder` does, with a model of `transformers`."""

    def __init__(self, config: TransformersConfig, groups: ParallelGroups, dtype: torch.dtype, device: torch.device):
        self.config, self.groups = config, groups
        self.network = CausalModel(config, dtype)
        for module in self.network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.network.parameters()

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return [self.network]

    def has_head(self, chunk: int) -> bool:
        return True

    @property
    def shares_prefixes(self) -> bool:
        return False

    @property
    def leaves(self) -> None:
        """Its sums are transformers' own."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: PackedAttention,
        restore: Tensor | None = None,
        *_: object,
    ) -> WholeLogits | Tensor:
        """Logits [tokens, vocab] or values [tokens] of packed sequences, in the order of the batch; `tokens` [rows]
        int64. See `realhf.engine.packing.PackedMicroBatch`.

        The model gets one sequence a row, padded behind its end, where no token attends to.
        """
        lengths, padding = attend.lengths, 0
        if restore is not None:
            padding = len(tokens) - len(restore)  # sequences of one token, in front
            restore, lengths = restore - padding, lengths[padding:]
        sequences = tokens[padding:].split(lengths)
        padded = pad_sequence(list(sequences), batch_first=True)  # [sequences, longest]
        sizes = torch.tensor(lengths, device=tokens.device)
        is_token = torch.arange(padded.shape[1], device=tokens.device) < sizes[:, None]
        rows = self.network(padded, is_token)  # [tokens, ...], in the order of the packing
        rows = rows if restore is None else rows[restore]
        return rows if self.config.head == "scalar" else WholeLogits(rows)


class WholeParameters:
    """Every data-parallel rank has all parameters and gradients, and updates a shard of them (ZeRO-1). Implements
    `realhf.engine.train.data_parallel.Parameters`."""

    data_parallel: DataParallel = "zero1"

    def __init__(self, config: TransformersConfig, groups: ParallelGroups, dtype: torch.dtype, device: torch.device):
        self._groups = groups
        self.arena = build_arena(config, groups, dtype, device)
        self.decoder = TransformersDecoder(config, groups, dtype, device)
        self.flat, views = self.arena.flat, self.arena.views()
        self._parameters = {name: nn.Parameter(view, requires_grad=False) for name, view in views.items()}
        for name, places in self.decoder.network.places().items():
            self.decoder.network.set_parameter(places, self._parameters[name])
        shard = self.arena.layout.shard(groups.dp_index)
        self.updated = [slice(shard.start, shard.stop)]
        self._boxes = device_boxes(config, groups.layout, groups.rank)

    def held(self) -> list[tuple[Box, Tensor]]:
        return [(box, self._parameters[box.name].detach()) for box in self._boxes]

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def computing(self) -> AbstractContextManager[EndPass]:
        return nullcontext(no_end)

    def attach_gradients(self, dtype: torch.dtype) -> None:
        self._gradients = Arena(self.arena.layout, dtype, self.flat.device)
        for name, view in self._gradients.views().items():
            parameter = self._parameters[name].requires_grad_(True)
            parameter.grad_dtype, parameter.grad = dtype, view

    @property
    def gradient(self) -> Tensor:
        return self._gradients.flat

    def zero_gradients(self) -> None:
        self.gradient.zero_()

    def reduce_gradients(self, *, sequence_parallel: bool) -> None:
        reduce_scatter(self.gradient, self._groups.data)

    def publish(self) -> None:
        all_gather(self.flat, self._groups.data)


class FullyShardedParameters:
    """torch's `fully_shard` (FSDP2) divides every parameter along a dimension; a layer is gathered for its use. The
    shards lie in one vector. Implements `realhf.engine.train.data_parallel.Parameters`."""

    data_parallel: DataParallel = "fsdp"

    def __init__(self, config: TransformersConfig, groups: ParallelGroups, dtype: torch.dtype, device: torch.device):
        assert groups.data is not None, "one data-parallel rank has nothing to divide: WholeParameters"
        self._boxes = shard_boxes(config, groups.layout, groups.rank, self.data_parallel)
        self._shapes = {spec.name: spec.shape for spec in decoder_parameters(config)}
        last, start = self._boxes[-1]
        self.flat = torch.zeros(start + last.size, dtype=dtype, device=device)
        self.updated = [slice(0, len(self.flat))]
        self.decoder = TransformersDecoder(config, groups, dtype, device)
        self._mesh = DeviceMesh.from_group(groups.data, device.type)
        network = self.decoder.network
        places = network.places()  # before they are divided
        divided = {
            network.get_parameter(places[box.name][0]): Shard(_dimension(box, self._shapes[box.name]))
            for box, _ in self._boxes
        }
        policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(dtype, torch.float32))
        layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
        for module in (*layers, network):
            fully_shard(module, mesh=self._mesh, shard_placement_fn=divided.get, mp_policy=policy)
        self._units = [module for module in network.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # plain sums over the ranks, which every backend has
        self._parameters = {name: nn.Parameter(part, requires_grad=False) for name, part in self._parts(self.flat)}
        for name, of_name in places.items():
            network.set_parameter(of_name, self._parameters[name])

    def _parts(self, vector: Tensor) -> Iterator[tuple[str, DTensor]]:
        """Every parameter's shard in `vector`, as a part of the whole."""
        for box, local in self._views(vector):
            whole = torch.empty(self._shapes[box.name], device="meta")
            placement = [Shard(_dimension(box, self._shapes[box.name]))]
            yield (
                box.name,
                DTensor.from_local(
                    local, self._mesh, placement, run_check=False, shape=whole.shape, stride=whole.stride()
                ),
            )

    def _views(self, vector: Tensor) -> list[tuple[Box, Tensor]]:
        return [(box, view_in(vector, box, at)) for box, at in self._boxes]

    def held(self) -> list[tuple[Box, Tensor]]:
        return self._views(self.flat)

    @contextmanager
    def whole(self) -> Iterator[None]:
        try:
            for unit in self._units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            yield
        finally:
            for unit in self._units:
                unit.reshard()
                unit.set_reshard_after_forward(True, recurse=False)

    @contextmanager
    def computing(self) -> Iterator[EndPass]:
        try:
            yield no_end
        finally:
            for unit in self._units:
                unit.reshard()

    def attach_gradients(self, dtype: torch.dtype) -> None:
        self.gradient = torch.zeros_like(self.flat, dtype=dtype)
        for name, part in self._parts(self.gradient):
            parameter = self._parameters[name].requires_grad_(True)
            parameter.grad_dtype, parameter.grad = dtype, part

    def zero_gradients(self) -> None:
        self.gradient.zero_()

    def reduce_gradients(self, *, sequence_parallel: bool) -> None:
        """The backward pass has reduced them."""

    def publish(self) -> None:
        """Nothing is gathered between steps."""


def _dimension(box: Box, shape: tuple[int, ...]) -> int:
    """Along which dimension a box is a part of a parameter."""
    return next((dim for dim, (part, whole) in enumerate(zip(box.shape, shape, strict=True)) if part != whole), 0)


class TransformersModel(ShardedModel):
    """The transformers backend. Implements `realhf.engine.backend.EngineModel`."""

    config: TransformersConfig

    def __init__(self, spec: ModelSpec):
        """Raises UserError for a model of this project's, and where more than data parallelism divides it."""
        check_backend("the model", spec.config, "transformers")
        check_strategy("the model", spec.config, spec.groups.layout.strategy)
        super().__init__(spec)

    def make_parameters(self, spec: ModelSpec) -> Parameters:
        assert isinstance(spec.config, TransformersConfig)
        is_sharded = spec.compute.data_parallel == "fsdp" and spec.groups.data is not None
        kind = FullyShardedParameters if is_sharded else WholeParameters
        parameters = kind(spec.config, spec.groups, spec.dtype, torch.device(spec.device))
        self._network = parameters.decoder.network
        return cast("Parameters", parameters)  # its decoder has all of a Decoder that training asks for

    def initialise(self, seed: int) -> None:
        """The random weights of `transformers`, which depend on the seed alone."""
        weights = random_weights(self.config, seed)
        for box, tensor in self.residency.held():
            whole = weights[box.name]
            tensor.copy_(whole[box.slices_in(Box(box.name, (0,) * whole.dim(), tuple(whole.shape)))])
        self.residency.written()

    def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
        self.residency.check_here()
        check_request(self.decoder, batch, request)
        count = self._together(batch, request)
        outputs = []
        with torch.no_grad(), self.parameters.whole():
            for start in range(0, len(batch), count):
                run = range(start, min(start + count, len(batch)))
                part = batch.select(run)
                choice = TokenChoice(part, request.of_samples(run), self.parameters.flat.device)
                outputs.append(_rollouts(self._network, choice, part.data[request.prompt_key], request))
        output = concatenated(outputs)
        self._count(output.sequences)
        return output

    def _together(self, batch: Batch, request: GenerationRequest) -> int:
        """How many samples are computed together. Raises UserError where the KV cache's budget holds none."""
        longest = max(len(prompt) for prompt in batch.data[request.prompt_key]) + request.options.max_new_tokens
        count, budget_tokens = -(-len(batch) // request.micro_batches), request.room
        if request.options.kv_cache_tokens is not None and request.options.kv_cache_tokens < longest:
            raise UserError(
                f"kv_cache_tokens={budget_tokens} does not hold one sequence of {longest} tokens; set it to at least "
                f"{longest}"
            )
        return count if budget_tokens is None else min(count, max(budget_tokens // longest, 1))


def _rollouts(
    network: CausalModel, choice: TokenChoice, prompts: Sequence[Tensor], request: GenerationRequest
) -> GenerationOutput:
    """Takes all sequences of `choice` to their ends, a token of each in every step; those that end leave the cache.

    Prompts are padded in front, so that all sequences continue at one place of the KV cache.
    """
    device = choice.device
    cache = DynamicCache(config=network.causal.config)
    running = np.arange(len(prompts))
    lengths = choice.prompt_lengths.copy()
    width = int(lengths.max())
    is_token = torch.arange(width) >= width - torch.from_numpy(lengths)[:, None]  # [sequences, width]
    tokens = torch.zeros(is_token.shape, dtype=torch.int64)
    tokens[is_token] = torch.cat([prompt.cpu() for prompt in prompts])
    positions = (is_token.cumsum(1) - 1).clamp_min(0)
    drawn = DrawnTokens()
    while len(running):
        arguments = {"attention_mask": is_token.long().to(device), "position_ids": positions.to(device)}
        arguments = {name: value for name, value in arguments.items() if network.takes(name)}
        logits = network(tokens.to(device), past_key_values=cache, use_cache=True, **arguments)[:, -1]
        draw = choice.draw(logits, running, lengths[running])
        drawn.add(running, draw, logits if request.return_logits else None)
        is_end = choice.accept(draw.tokens.cpu().numpy(), running, lengths[running])
        lengths[running] += 1
        running = running[~is_end]
        if is_end.any() and len(running):
            left = torch.from_numpy(np.flatnonzero(~is_end))
            cache.batch_select_indices(left.to(device))
            is_token = is_token[left]
        is_token = torch.cat([is_token, is_token.new_ones(len(is_token), 1)], dim=1)
        tokens = torch.from_numpy(choice.tokens[running, lengths[running] - 1])[:, None]
        positions = torch.from_numpy(lengths[running] - 1)[:, None]
    return drawn.output(prompts, device)
