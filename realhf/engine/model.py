"""The native backend: one rank's part of a model, laid out for a call."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from realhf.cpu.in_order import check_in_order
from realhf.engine import build
from realhf.engine.arena import view_in
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch, check_tokens
from realhf.engine.forward import forward
from realhf.engine.generate.decode_graphs import KeptWorkspace
from realhf.engine.generate.loop import generate
from realhf.engine.interface import GenerationOutput, GenerationRequest, LossFunction, Postprocess, Stats
from realhf.engine.pipeline import Neighbours
from realhf.engine.residency.residency import Boxes, Residency
from realhf.engine.train.data_parallel import NativeParameters, Parameters, place_of
from realhf.engine.train.step import Trainer
from realhf.geometry.boxes import Box
from realhf.geometry.reproducible import tensor_leaves
from realhf.geometry.shards import shard_boxes
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import newer_kinds, of_kind, optimizer_steps
from realhf.models.ordered_layers import OrderedLayers
from realhf.parallel.ordered import Leaves


class ShardedModel:
    """The native backend: a decoder of this project on the parameters that this rank holds under a layout.

    Implements `realhf.engine.backend.EngineModel`. `train_step` is an error where the spec has no optimizer.
    """

    def __init__(self, spec: ModelSpec):
        config, groups, compute = spec.config, spec.groups, spec.compute
        self.config, self.groups = config, groups
        self.tokens_processed = 0
        self.parameters: Parameters = self.make_parameters(spec)
        self.decoder = self.parameters.decoder
        if compute.reproducible == "layout":
            device = torch.device(spec.device)
            check_in_order(None if device.type == "cpu" else str(device), torch.get_num_threads())
            self.decoder.leaves = Leaves(tensor_leaves(config) // groups.layout.strategy.tp, groups.tensor)
            self.decoder.trains_layer = self.decoder.infers_layer = OrderedLayers(self.decoder.leaves)
        is_replicated = self.parameters.data_parallel == "zero1"
        self._kept = KeptWorkspace(is_possible=is_replicated, timeout_s=spec.timeout_s)
        self._neighbours = Neighbours(groups, config.hidden_size, self.parameters.flat, spec.timeout_s)
        self.trainer: Trainer | None = None
        if spec.optimizer is not None:
            self.trainer = Trainer(
                self.parameters, self._neighbours, spec.optimizer, spec.total_optimizer_steps, compute
            )
        self.residency = Residency(
            [self.parameters.flat],
            self.parameters.held,
            versions=spec.versions,
            states=self.trainer.optimizer.on_device() if self.trainer else (),
            gradient=self.parameters.gradient if self.trainer else None,
            on_leaving=self._kept.forget,
            on_written=self.trainer.optimizer.parameters_changed if self.trainer else lambda: None,
        )

    def make_parameters(self, spec: ModelSpec) -> Parameters:
        """The parameters, zeros, with the decoder that computes with them."""
        device, compute = torch.device(spec.device), spec.compute
        return NativeParameters(
            spec.config, spec.groups, spec.dtype, device, compute.data_parallel, prefetch=compute.prefetch
        )

    @property
    def trains(self) -> bool:
        return self.trainer is not None

    @property
    def optimizer_steps(self) -> int:
        return 0 if self.trainer is None else self.trainer.optimizer.step_count

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        assert self.trainer is not None, "a model without an optimizer has no schedule"
        self.trainer.optimizer.step_count = steps

    def initialise(self, seed: int) -> None:
        """Random weights that depend on the seed alone, whatever the layout; see `build.fill_initial`."""
        build.fill_initial(self.config, self.residency.held(), seed)
        self.residency.written()

    def close(self) -> None:
        """Gives back the KV cache and the graphs that generation keeps between its calls."""
        self._kept.forget()

    def state(self) -> Boxes:
        groups, updated = self.groups, self.parameters.updated
        counted = shard_boxes(self.config, groups.layout, groups.rank, self.parameters.data_parallel, only_counted=True)
        states = {} if self.trainer is None else self.trainer.optimizer.state
        versions = self.residency.versions
        flat_of_kind = [
            (kind, self.residency.vectors(version)[0])
            for kind, version in zip(("", *newer_kinds(len(versions))), versions, strict=True)
        ]
        pieces = []
        for box, at in counted:
            start = place_of(at, updated)
            pieces += [(of_kind(box, kind), view_in(flat, box, start)) for kind, flat in flat_of_kind]
            pieces += [(of_kind(box, kind), view_in(flat, box, at)) for kind, flat in states.items()]
        return pieces

    def masters(self) -> Boxes:
        states = self.trainer.state() if self.trainer is not None else []
        return [
            (Box(box.name.removesuffix("@master"), box.offset, box.shape), tensor)
            for box, tensor in states
            if box.name.endswith("@master")
        ]

    def load_state(self, reader: CheckpointReader) -> None:
        assert self.trainer is not None, "a model without an optimizer reads parameters alone into `residency.held()`"
        reader.check_architecture(self.config)
        saved = set(reader.names())
        steps = optimizer_steps(reader.index, reader.directory)
        is_wide = not self.trainer.optimizer.has_master
        for box, tensor in self.residency.held():
            master = of_kind(box, "master")
            reader.read_into(tensor, master if is_wide and master.name in saved else box)
        for box, tensor in self.trainer.state():
            name, _, kind = box.name.partition("@")
            is_missing = kind == "master" and box.name not in saved
            reader.read_into(tensor, Box(name, box.offset, box.shape) if is_missing else box)
        self.optimizer_steps = steps
        self.residency.trained()

    def forward(
        self, batch: Batch, tokens_key: str, postprocess: Postprocess, micro_batches: int
    ) -> dict[str, list[Tensor]]:
        check_tokens(batch, tokens_key, self.config)
        self._count(batch.data[tokens_key])
        with self.parameters.computing() as end_pass:
            return forward(self.decoder, self._neighbours, batch, tokens_key, postprocess, micro_batches, end_pass)

    def train_step(
        self, batch: Batch, tokens_key: str, loss: LossFunction, weight: Callable[[Batch], float], micro_batches: int
    ) -> Stats:
        assert self.trainer is not None, "train_step on a model that was built without an optimizer"
        check_tokens(batch, tokens_key, self.config)
        self.residency.trained()
        self._count(batch.data[tokens_key])
        return self.trainer.train_step(batch, tokens_key, loss, weight, micro_batches)

    def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
        self.residency.check_here()
        with self.parameters.whole():
            workspace = self._kept.of_call(self.decoder, request.decode_graphs)
            output, _ = generate(self.decoder, batch, request, workspace)
        self._count(output.sequences)
        return output

    def _count(self, sequences: Sequence[Tensor]) -> None:
        self.residency.check_here()
        self.tokens_processed += sum(map(len, sequences))
