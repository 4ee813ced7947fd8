"""Seconds of the parts of a call: from a measured profile where there is one, else from a model of the hardware."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from realhf.architecture.compute import Reproducible
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.geometry.reproducible import tensor_leaves
from realhf.planning.model import profile as profiles
from realhf.planning.model.experience import RunTimes, load_runs
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import with_measured
from realhf.planning.model.profile import (
    PARTS,
    CallOverheads,
    CollectiveKind,
    Curve,
    LayerProfile,
    ProfilePart,
    TensorTimings,
)

# `Hardware.call_overhead_s` has what a call prepares, and launches are in the layers.
NO_OVERHEADS = CallOverheads()
LOGITS_PASSES = 4  # fp32 reads and writes of all logits each way; see `Timings.head`


class TensorGroup(NamedTuple):
    """Tensor-parallel ranks: their number, and whether they lie on several nodes."""

    tp: int
    crosses_nodes: bool = False


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds on one device for one model type, by a model of the hardware.

    Nothing hides anything: compute, element-wise passes, all-reduces and launches add up. Compute is FLOPs and the
    bytes that products read and write, one after the other: so a product that tensor parallelism makes narrow, with few
    FLOPs a byte, reaches less. FLOPs: 2 a weight and token forward, twice that backward (Kaplan et al., 2020, section
    2.1); causal attention 2 x sequence x hidden a token forward (QK and AV over half the positions).
    `docs/cost_model.md` has all.

    `tokens` are those of one micro-batch on one data-parallel rank. The all-reduces of the tensor-parallel group are
    part of the times of layers, embedding and head.
    """

    model: DecoderConfig
    dtype: DType
    hardware: Hardware
    features: EngineFeatures = ENGINE
    overheads: CallOverheads = NO_OVERHEADS

    def layer(
        self, tokens: float, sequence_length: float, group: TensorGroup, *, backward: bool, trains: bool
    ) -> float:
        """Forward, or backward without recomputation: twice the compute, passes and launches, the same all-reduces,
        and half of them again where the engine gathers inputs again. `trains`: as part of a training."""
        weights = self._layer_weights(self.model.experts.per_token or 1)
        flops = tokens * (2 * weights + 2 * sequence_length * self.model.query_size) / group.tp
        passes = 2 if backward else 1
        moved = (self._layer_read_elements(tokens) / group.tp + tokens * self._product_elements(group.tp)) * self._item
        compute = self._products(passes * flops, passes * moved)
        elementwise = passes * tokens * self.elementwise_bytes(group.tp) / self.hardware.memory_bandwidth
        reduces = 3 if backward and self.features.sequence_parallel and self.features.regathers_inputs else 2
        launches = passes * self.hardware.launch_s(trains=trains or backward)
        return launches + compute + elementwise + reduces * self._reduce(tokens, group)

    def recomputed(self, tokens: float, group: TensorGroup) -> float:
        """Seconds of selective recomputation of one layer: all of its forward but products and attention."""
        elementwise = tokens * self.elementwise_bytes(group.tp) / self.hardware.memory_bandwidth
        return self.hardware.launch_s(trains=True) + elementwise + 2 * self._reduce(tokens, group)

    def elementwise_bytes(self, tp: int) -> float:
        """Memory traffic of one layer's forward beside its products, a token; every kernel reads and writes its arrays.

        They are those of `realhf/models/decoder.py`, with i bytes an element and w = max(i, 4) where it is widened:

        - whole on every rank without sequence parallelism, twice over hidden: an RMSNorm, 7 w and below fp32 4 i more
          (widen, square, mean, scale, narrow, weight); a residual sum, 3 i;
        - divided over tp: rotation, 10 i over q and k; attention, i over q, k, v and its output; silu and product,
          5 i over intermediate.
        """
        hidden, query, kv = self.model.hidden_size, self.model.query_size, self.model.kv_size
        item, wide = self._item, max(self._item, 4)
        norm = 7 * wide + (4 * item if item < wide else 0)
        whole = 2 * (norm + 3 * item) * hidden
        divided = item * (10 * (query + kv) + 2 * (query + kv) + 5 * self.model.active_intermediate_size)
        return whole / (tp if self.features.sequence_parallel else 1) + divided / tp

    def embedding(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        copy = 2 * tokens * self.model.hidden_size * self._item / self.hardware.memory_bandwidth
        return copy + (0.0 if backward else self._reduce(tokens, group))

    def head(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        """lm: projection and LOGITS_PASSES over the fp32 logits; scalar: one dot product.

        The passes: forward widening (1.5), log-softmax (2) and picking the labels; backward as many (softmax minus
        labels, scaling, narrowing). They are over the rank's part of the vocabulary, or with `full_logits` over all of
        it, gathered over tp. Backward, logits of more than one chunk are projected again, and the input's gradient is
        summed over tp.
        """
        passes = 2 if backward else 1
        if self.model.head == "scalar":
            return passes * 2 * tokens * self.model.hidden_size * self._item / self.hardware.memory_bandwidth
        logits_bytes = tokens * self.model.vocab_size * max(self._item, 4)
        weights = self.model.vocab_size * self.model.hidden_size / group.tp
        full, chunk = self.features.full_logits, self.features.logits_chunk_bytes
        is_projected_again = backward and not full and chunk is not None and logits_bytes / group.tp > chunk
        compute = (passes + is_projected_again) * self._products(2 * tokens * weights, weights * self._item)
        compute += LOGITS_PASSES * logits_bytes / (1 if full else group.tp) / self.hardware.memory_bandwidth
        if backward:
            return compute + self._reduce(tokens, group)
        if not full:
            return compute
        gathered = tokens * self.model.vocab_size * self._item
        per_node = self._tensor_group_per_node(group.tp)
        return compute + self.hardware.all_gather_s(
            gathered, group.tp, crosses_nodes=group.crosses_nodes, per_node=per_node
        )

    def decode_layer(self, sequences: float, context: float, group: TensorGroup) -> float:
        """One layer of one decode step of `sequences` sequences with `context` tokens in their caches: the layer's
        weights and the KV cache of grouped-query heads are read once."""
        weights = self._layer_weights(self.model.experts.per_token or 1) / group.tp
        cache_bytes = sequences * context * kv_bytes_per_token_layer(self.model, self.dtype) / group.tp
        flops = sequences * (2 * weights + 4 * context * self.model.query_size / group.tp)
        moved = self._layer_read_elements(sequences) / group.tp + sequences * self._product_elements(group.tp)
        compute = self._products(flops, moved * self._item + cache_bytes)
        elementwise = sequences * self.elementwise_bytes(group.tp) / self.hardware.memory_bandwidth
        graphs = self.features.cuda_graphs
        launch = self.hardware.decode_graph_launch_s if graphs else self.hardware.decode_launch_s
        return launch + compute + elementwise + 2 * self._reduce(sequences, group)

    def optimizer(self, parameters: float) -> float:
        """AdamW is bound by memory: it reads the gradient, reads and writes parameter, both states and below fp32 the
        master copy, and makes one more pass to clip."""
        gradient, states = self.features.gradient_bytes(self.dtype), self.features.state_bytes(self.dtype)
        moved_bytes = 3 * gradient + 2 * self._item + 2 * states  # an element
        return parameters * moved_bytes / self.hardware.memory_bandwidth

    def parts(self, count: int, elements: float) -> float:
        """Seconds under reproducible="layout" to take the gradients of `count` parts of a mini-batch and add them up.
        Each part needs a copy, zeros and a sum."""
        moved_bytes = 6 * count * elements * self.features.gradient_bytes(self.dtype)
        return moved_bytes / self.hardware.memory_bandwidth

    def collective(
        self, kind: CollectiveKind, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1
    ) -> float:
        """Seconds for a vector of `size_bytes` in all; an all-gather or a reduce-scatter is half of a ring all-reduce.
        `per_node`: see `Hardware.link`."""
        seconds = self.hardware.all_reduce_s if kind == "all_reduce" else self.hardware.all_gather_s
        return seconds(size_bytes, group_size, crosses_nodes=crosses_nodes, per_node=per_node)

    def send(self, size_bytes: float, *, crosses_nodes: bool, senders: int | None = None) -> float:
        """Seconds of a message; `senders`: see `Hardware.send_s`."""
        return self.hardware.send_s(size_bytes, crosses_nodes=crosses_nodes, senders=senders)

    def under(self, features: EngineFeatures) -> "Timings":
        """With other features; what was measured stays as it is."""
        return replace(self, features=features)

    @property
    def links(self) -> Hardware:
        """As a reallocation of this model uses them."""
        return self.hardware

    @property
    def _item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def _layer_weights(self, experts: float) -> float:
        """Elements of the products of one layer: q, k, v, o and, in `experts` MLPs, gate, up, down."""
        model = self.model
        mlps = (3 if model.mlp == "gated" else 2) * model.intermediate_size * experts
        return model.hidden_size * (2 * model.query_size + 2 * model.kv_size + mlps)

    def _layer_read_elements(self, tokens: float) -> float:
        """Those that `tokens` tokens need together: of a mixture at most as many experts as there are."""
        experts = self.model.experts
        touched = min(tokens * experts.per_token, experts.count) if experts.count else 1
        return self._layer_weights(touched)

    def _product_elements(self, tp: int) -> float:
        """Elements that the products of one layer read and write beside weights, a token: their inputs, whole before
        column-parallel and divided before row-parallel ones, and their outputs."""
        model = self.model
        inner = model.active_intermediate_size
        divided = 2 * model.query_size + 2 * model.kv_size + (3 if model.mlp == "gated" else 2) * inner
        return 4 * model.hidden_size + divided / tp

    def _products(self, flops: float, size_bytes: float) -> float:
        return flops / self.hardware.flops(self.dtype) + size_bytes / self.hardware.memory_bandwidth

    def _reduce(self, tokens: float, group: TensorGroup) -> float:
        """One all-reduce of hidden states (Megatron-LM, section 3: two a layer forward, two backward), or with sequence
        parallelism the same bytes in the reduce-scatter and the all-gather of one ring; under reproducible="layout" all
        parts of the sum are gathered."""
        size_bytes = tokens * self.model.hidden_size * self._item
        per_node = self._tensor_group_per_node(group.tp)
        if self.features.ordered:
            size_bytes *= tensor_leaves(self.model)
            return self.hardware.all_gather_s(
                size_bytes, group.tp, crosses_nodes=group.crosses_nodes, per_node=per_node
            )
        return self.hardware.all_reduce_s(size_bytes, group.tp, crosses_nodes=group.crosses_nodes, per_node=per_node)

    def _tensor_group_per_node(self, tp: int) -> int:
        """Members of a tensor-parallel group in each node, if it crosses nodes: they are neighbours."""
        return self.hardware.devices_per_node if tp > self.hardware.devices_per_node else 1


@dataclass(frozen=True, kw_only=True)
class ProfiledTimings(Timings):
    """Interpolates a profile. What one machine cannot show, as links between nodes, is as the hardware is described.

    A degree of tensor parallelism that was not measured takes the compute of the next smaller one, divided by the
    ratio, and the all-reduces of the whole group. `recomputed` is the description's: layers are measured whole.

    `factors` scale the seconds of the profile's parts.
    """

    profile: LayerProfile
    factors: Mapping[ProfilePart, float]

    @classmethod
    def of(
        cls, profile: LayerProfile, hardware: Hardware, factors: Mapping[ProfilePart, float] | None = None
    ) -> "ProfiledTimings":
        """On `hardware`, with the measured seconds of a call and of sampling in place of its own."""
        factors = dict.fromkeys(PARTS, 1.0) | dict(factors or {})
        scale = factors["overheads"]
        overheads = {name: scale * seconds for name, seconds in msgspec.structs.asdict(profile.overheads).items()}
        return cls(
            model=profile.model,
            dtype=profile.dtype,
            hardware=msgspec.structs.replace(
                hardware,
                call_overhead_s=scale * profile.call_overhead_s,
                sampling_s=scale * profile.sampling_s,
                mini_batch_s=0.0,
            ),
            overheads=CallOverheads(**overheads),
            profile=profile,
            factors=factors,
        )

    def layer(
        self, tokens: float, sequence_length: float, group: TensorGroup, *, backward: bool, trains: bool
    ) -> float:
        measured = self._measured(group.tp)
        curve = measured.layer_backward if backward else measured.layer_forward
        longer = self._attention_s(tokens, sequence_length - self.profile.sequence_length, group.tp, backward=backward)
        seconds = max(self.factors["layers"] * curve.at(tokens) + longer, 0.0)
        return self._with_reduces(seconds, tokens, group, 2)

    def _attention_s(self, tokens: float, attended: float, tp: int, *, backward: bool) -> float:
        """What attention to so many more tokens adds to a layer, or to fewer takes off, at the FLOP/s that the layer
        was measured with at sequences of the profile's length."""
        measured = self.profile.tensor[0]
        curve = measured.layer_backward if backward else measured.layer_forward
        attention = 2 * self.model.query_size  # FLOPs for each token that is attended to
        flops = 2 * self._layer_weights(self.model.experts.per_token or 1) + attention * self.profile.sequence_length
        return self.factors["layers"] * curve.at(tokens) * attention * attended / flops / tp

    def embedding(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        measured = self._measured(group.tp)
        curve = measured.embedding_backward if backward else measured.embedding_forward
        seconds = self.factors["layers"] * curve.at(tokens)
        return self._with_reduces(seconds, tokens, group, 0 if backward else 1)

    def head(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        measured = self._measured(group.tp)
        curve = measured.head_backward if backward else measured.head_forward
        return self._with_reduces(self.factors["layers"] * curve.at(tokens), tokens, group, 1)

    def decode_layer(self, sequences: float, context: float, group: TensorGroup) -> float:
        points = [
            (float(timings.context), timings.seconds.at(sequences)) for timings in self._measured(group.tp).layer_decode
        ]
        seconds = self.factors["layers"] * profiles.interpolate(points, context)
        return self._with_reduces(seconds, sequences, group, 2)

    def parts(self, count: int, elements: float) -> float:
        return count * elements * self.overheads.part_s_per_parameter

    def optimizer(self, parameters: float) -> float:
        return self.factors["layers"] * parameters * self.profile.optimizer_s_per_parameter

    def collective(
        self, kind: CollectiveKind, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1
    ) -> float:
        if group_size > 1 and not crosses_nodes and (curves := self._curves[kind]):
            seconds = profiles.interpolate([(n, curve.at(size_bytes)) for n, curve in curves], group_size)
            return self.factors["collectives"] * seconds
        group: dict[str, Any] = {"crosses_nodes": crosses_nodes, "per_node": per_node}
        if kind == "all_reduce":
            return super().collective(kind, size_bytes, group_size, **group)
        # A profile that is older than the other kinds has all-reduces alone.
        return self.collective("all_reduce", size_bytes, group_size, **group) / 2

    def send(self, size_bytes: float, *, crosses_nodes: bool, senders: int | None = None) -> float:
        curves = self._curves["send"]
        if crosses_nodes or not curves:
            return super().send(size_bytes, crosses_nodes=crosses_nodes, senders=senders)
        return self.factors["collectives"] * curves[0][1].at(size_bytes)

    def under(self, features: EngineFeatures) -> "Timings":
        return self

    @property
    def links(self) -> Hardware:
        measured = self.profile.reallocation
        if measured is None:
            return self.hardware
        scale = self.factors["reallocation"]
        return msgspec.structs.replace(
            self.hardware,
            intra_node_latency_s=scale * measured.latency_s,
            intra_node_bandwidth=measured.bandwidth / scale,
        )

    @cached_property
    def _curves(self) -> dict[CollectiveKind, list[tuple[float, Curve]]]:
        """Of each collective that the profile may have: (group size, curve), the smallest group first."""
        return {
            kind: [(float(c.group_size), c.seconds) for c in self.profile.collective(kind)]
            for kind in get_args(CollectiveKind)
        }

    def _measured(self, tp: int) -> TensorTimings:
        return self.profile.tensor[bisect_right(self.profile.tensor, tp, key=lambda timings: timings.tp) - 1]

    def _with_reduces(self, seconds: float, tokens: float, group: TensorGroup, reduces: int) -> float:
        (tp, crosses_nodes), timings = group, self._measured(group.tp)
        if tp == timings.tp and (tp == 1 or (timings.includes_all_reduce and not crosses_nodes)):
            return seconds
        kind: CollectiveKind = "all_reduce"
        size_bytes = tokens * self.model.hidden_size * self._item
        if self.profile.reproducible == "layout":
            kind, size_bytes = "all_gather", size_bytes * tensor_leaves(self.model)
        if timings.includes_all_reduce and timings.tp > 1:  # take the measured group's own sums out again
            seconds -= reduces * self.collective(kind, size_bytes, timings.tp, crosses_nodes=False)
        sums = reduces * self.collective(kind, size_bytes, tp, crosses_nodes=crosses_nodes)
        return max(seconds, 0.0) * timings.tp / tp + sums


def kv_bytes_per_token_layer(model: DecoderConfig, dtype: DType) -> int:
    """Keys and values of one token in one layer, over all tensor-parallel ranks (grouped-query heads)."""
    return 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Costs:
    """The knowledge of the cost model.

    `of_models`: the features that the setups of single models choose, by name. `call_factors`: a call's measured over
    its predicted seconds, by name; they scale all options of the call. `changed_shares`: by model the measured part of
    the bytes that a copy gets of which only what changed is sent. `seen`: finished runs with calls of a model. `plain`:
    the costs without reproducible="layout", where models are computed with it.
    """

    hardware: Hardware
    timings: Mapping[DecoderConfig, Timings]
    features: EngineFeatures = ENGINE
    of_models: Mapping[str, EngineFeatures] = field(default_factory=dict)
    call_factors: Mapping[str, float] = field(default_factory=dict)
    changed_shares: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[DecoderConfig, tuple[RunTimes, ...]] = field(default_factory=dict)
    plain: "Costs | None" = None

    def features_of(self, model_name: str) -> EngineFeatures:
        return self.of_models.get(model_name, self.features)

    @property
    def part_spread(self) -> dict[ProfilePart, float]:
        """How sure the profiles are of their parts: the least sure of those there are."""
        profiles = [timings.profile for timings in self.timings.values() if isinstance(timings, ProfiledTimings)]
        return {part: max(profile.error_of(part) for profile in profiles) for part in PARTS if profiles}

    def scaled(self, factors: Mapping[str, float]) -> "Costs":
        """With the named constants of the hardware and parts of profiles times these factors."""
        measured = {part: factors[part] for part in PARTS if part in factors}
        values = {name: by * self.hardware.constant(name) for name, by in factors.items() if name not in measured}
        hardware = self.hardware.with_constants(values)
        timings = {
            model: ProfiledTimings.of(known.profile, hardware, measured)
            if isinstance(known, ProfiledTimings)
            else replace(known, hardware=hardware)
            for model, known in self.timings.items()
        }
        return replace(self, hardware=hardware, timings=timings)

    def call_error(self, model: DecoderConfig) -> float:
        """The standard deviation of the logarithm of measured / predicted seconds of a call of this model, where the
        constants or the profile are right. A run is disturbed as the readings of its profile were."""
        stated, timings = self.hardware.sureness, self.timings.get(model)
        if isinstance(timings, ProfiledTimings):
            return math.hypot(stated.profiled_error, timings.profile.spread.get("layers", 0.0))
        return stated.call_error

    @property
    def profiled(self) -> bool:
        """Whether every model type was measured."""
        return all(isinstance(timings, ProfiledTimings) for timings in self.timings.values())


def load_costs(
    models: Mapping[str, DecoderConfig],
    *,
    dtype: DType,
    hardware: Hardware,
    root: Path | None = None,
    features: EngineFeatures = ENGINE,
    of_models: Mapping[str, EngineFeatures] | None = None,
    ignores_runs: bool = False,
) -> Costs:
    """Measured timings where `ROOT/HARDWARE` has a profile of the model type, else the analytic model.

    `features` and `of_models`: see `Costs`; what depends on the hardware is taken from it (`EngineFeatures.on`). Raises
    UserError for a broken profile, or a profile of another model. `ignores_runs`: what finished runs measured beside
    the profiles is not read.
    """
    plain, of_models = None, of_models or {}
    if any(own.ordered for own in of_models.values()):
        without = {name: replace(own, ordered=False) for name, own in of_models.items()}
        plain = load_costs(
            models,
            dtype=dtype,
            hardware=hardware,
            root=root,
            features=features,
            of_models=without,
            ignores_runs=ignores_runs,
        )
    hardware = with_measured(hardware, root)
    features = features.on(hardware)
    of_models = {name: own.on(hardware) for name, own in of_models.items()}
    timings: dict[DecoderConfig, Timings] = {}
    seen: dict[DecoderConfig, tuple[RunTimes, ...]] = {}
    measured_bytes: list[int] = []  # measured of communicators
    for name, model in models.items():
        reproducible: Reproducible = "layout" if of_models.get(name, features).ordered else "plan"
        path = profiles.profile_path(model, dtype, hardware.name, root, reproducible)
        if not path.is_file():
            timings[model] = Timings(model=model, dtype=dtype, hardware=hardware, features=features)
            continue
        profile = profiles.load_profile(path)
        if (profile.model, profile.dtype, profile.reproducible) != (model, dtype, reproducible):
            raise UserError(f"{path}: the profile is of another model or dtype; measure it again with `realhf profile`")
        timings[model] = ProfiledTimings.of(profile, hardware)
        seen[model] = () if ignores_runs else load_runs(path)
        if profile.communicator_bytes is not None:
            measured_bytes.append(profile.communicator_bytes)
    if measured_bytes:
        hardware = msgspec.structs.replace(hardware, communicator_bytes=float(max(measured_bytes)))
    return Costs(hardware, timings, features, of_models, seen=seen, plain=plain)
