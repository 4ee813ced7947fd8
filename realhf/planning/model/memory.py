"""Bytes of a model on a device: what its home keeps there, and what a copy takes."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from realhf.architecture.chunks import OPTIMIZER_ELEMENTS, STAGED_CHUNKS
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.base.kept import kept
from realhf.geometry.layout import ParallelStrategy, stage_layers
from realhf.geometry.reproducible import tensor_leaves
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.osdp.units import StageUnits, by_stage
from realhf.planning.model.sizes import linear_elements, model_sizes
from realhf.planning.model.timings import kv_bytes_per_token_layer
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES


@dataclass(frozen=True)
class PlacedModel:
    """A model under a strategy, on the device that holds the most of it, in an engine with these features."""

    model: DecoderConfig
    strategy: ParallelStrategy
    dtype: DType
    features: EngineFeatures = ENGINE

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_divided(self) -> bool:
        """Whether the parameters lie divided over dp, and are gathered for each use."""
        if self.stages:
            return any(stage.gathered for stage in self.stages)
        return self.features.fully_sharded and self.strategy.dp > 1

    @cached_property
    def stages(self) -> tuple[StageUnits, ...]:
        """The devices of every stage, where operators have modes of their own; else none."""
        modes = self.features.modes
        return () if modes is None or self.strategy.dp == 1 else by_stage(self.model, self.strategy, modes)

    def parameter_bytes(self) -> int:
        return self.elements() * self.item

    def copy_bytes(self) -> int:
        """A reallocated copy of the parameters, and the two buckets that fill it: one to send, one to receive."""
        return self.parameter_bytes() + 2 * DEFAULT_BUCKET_BYTES

    def static_bytes(self, *, trained: bool, versions: int = 1) -> int:
        """Bytes that the home of a model keeps on each device.

        An untrained model: its parameters, in each of `versions`. A trained one: parameters, gradients, the two states
        of AdamW (at least in fp32), and below fp32 a master copy in fp32 (ReaL, section 5.1, "static memory"). Every
        rank of a data-parallel group has all of it; ZeRO-1 divides states and master copy over the group (16 or 4 + 12
        / dp bytes a parameter in bf16, 2 more with gradients in fp32; ZeRO, section 5.1), full sharding divides all.
        With modes by operator each keeps what its mode says (OSDP, section 3), on the stage with the most bytes.
        States that wait in host memory count nothing. `copies_checkpoints` adds what this device writes, a part of a
        data-parallel group's.
        """
        features, state_bytes = self.features, self.features.state_bytes(self.dtype)
        elements = self._kept_elements(trained=trained)
        if not trained:
            return versions * elements * self.item
        states = 0 if features.offloads_states else self.updated_elements() * state_bytes
        written = self.elements(is_divided=True) if features.copies_checkpoints else 0
        elsewhere = self.gradient_elements() - self.elements()
        return (
            elements * (self.item + features.gradient_bytes(self.dtype))
            + elsewhere * features.gradient_bytes(self.dtype)
            + states + written * (self.item + state_bytes)
        )  # fmt: skip

    def offloaded_bytes(self, *, trained: bool, versions: int = 1) -> int:
        """Bytes that move between a device and host memory: `static_bytes` without gradients and copies."""
        without_copies = replace(self, features=replace(self.features, copies_checkpoints=False))
        static_bytes = without_copies.static_bytes(trained=trained, versions=versions)
        elements = self._kept_elements(trained=True) if trained else 0
        return static_bytes - elements * self.features.gradient_bytes(self.dtype)

    @kept
    def elements(self, *, is_divided: bool = False) -> int:
        """Parameters, whole or divided over dp."""
        return math.ceil(model_sizes(self.model).largest(self.strategy) / (self.strategy.dp if is_divided else 1))

    def gradient_elements(self) -> int:
        """Elements of what a part of a mini-batch has a gradient of under reproducible="layout": the rows of a tied
        embedding that tokens look up are apart from its head, where one device has both."""
        sizes, one_stage = model_sizes(self.model), self.strategy.pp == 1
        apart = sizes.embedding_sharded // self.strategy.tp if self.features.ordered and sizes.tied and one_stage else 0
        return self.elements() + apart

    def _kept_elements(self, *, trained: bool) -> int:
        """Parameters that the device keeps, and of a training their gradients."""
        if self.stages:
            return self._fullest(trained=trained).kept
        return self.elements(is_divided=self.features.fully_sharded)

    def updated_elements(self) -> int:
        """Parameters whose optimizer states the device has."""
        if self.stages:
            return self._fullest(trained=True).updated
        return self.elements(is_divided=self.features.zero1 or self.features.fully_sharded)

    def _fullest(self, *, trained: bool) -> StageUnits:
        """The stage whose devices keep the most bytes."""
        states = 0 if self.features.offloads_states else self.features.state_bytes(self.dtype)
        both = self.item + self.features.gradient_bytes(self.dtype)  # parameter and gradient
        return max(self.stages, key=lambda stage: both * stage.kept + states * stage.updated if trained else stage.kept)

    def chunk_bytes(self) -> int:
        """Bytes on the device during an optimizer step whose states wait in host memory."""
        if not self.features.offloads_states:
            return 0
        updated, scaled = self.updated_elements(), max(self.item, 4)  # a chunk of gradients is scaled
        staged = min(updated, STAGED_CHUNKS * OPTIMIZER_ELEMENTS) * self.features.state_bytes(self.dtype)
        return staged + min(updated, OPTIMIZER_ELEMENTS) * scaled

    def packed_bytes(self) -> int:
        """The second copy of the linears' weights while a call generates
        (`realhf.engine.generate.loop.packed_weights`). Under reproducible="layout" prefill keeps one more of its own,
        with the head's even if it is tied, and decode steps without tensor parallelism have row-parallel weights by
        leaves too."""
        if not self.features.packs_weights or self.dtype == "float64":
            return 0
        model, strategy = self.model, self.strategy
        linears, tied = linear_elements(model, strategy), model_sizes(model).tied
        if not self.features.ordered:
            return linears * self.item
        kept = linears + (model_sizes(model).embedding_sharded // strategy.tp if tied else 0)
        if strategy.tp > 1:
            return kept * self.item
        layers = len(stage_layers(model.num_layers, strategy.pp, 0))
        by_leaves = (
            0 if model.experts.count or tensor_leaves(model) == 1 else model.query_size + model.intermediate_size
        )
        return (linears + kept + layers * model.hidden_size * by_leaves) * self.item

    def cache_bytes(self, tokens: float) -> float:
        """Keys and values of `tokens` tokens on the first stage: no other has more layers."""
        layers = len(stage_layers(self.model.num_layers, self.strategy.pp, 0))
        return kv_bytes_per_token_layer(self.model, self.dtype) / self.strategy.tp * layers * tokens
