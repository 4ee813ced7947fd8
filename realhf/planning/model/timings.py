"""Seconds of the parts of a call: from a measured profile where there is one, else from a model of the hardware."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec

from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.planning.model import profile as profiles
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.profile import CallOverheads, Curve, LayerProfile, TensorTimings

# `Hardware.call_overhead_s` has what a call prepares, and launches are in the layers.
NO_OVERHEADS = CallOverheads()
LOGITS_PASSES = 4  # fp32 reads and writes of all logits each way; see `Timings.head`


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds on one device for one model type, by a model of the hardware.

    Nothing hides anything: compute, element-wise passes, all-reduces and launches add up. Compute is a roofline of
    FLOPs and bytes. FLOPs: 2 a weight and token forward, twice that backward (Kaplan et al., 2020, section 2.1); causal
    attention 2 x sequence x hidden a token forward (QK and AV over half the positions). `docs/cost_model.md` has all.

    `tokens` are those of one micro-batch on one data-parallel rank. `tp_crosses_nodes`: the tensor-parallel group lies
    on several nodes. Its all-reduces are part of the times of layers, embedding and head.
    """

    model: DecoderConfig
    dtype: DType
    hardware: Hardware
    features: EngineFeatures = ENGINE
    overheads: CallOverheads = NO_OVERHEADS

    def layer(self, tokens: float, sequence_length: float, tp: int, *, backward: bool, tp_crosses_nodes: bool) -> float:
        """Forward, or backward without recomputation: twice the compute, passes and launches, the same all-reduces."""
        weights = self._layer_weights(self.model.experts.per_token or 1)
        flops = tokens * (2 * weights + 2 * sequence_length * self.model.query_size) / tp
        passes = 2 if backward else 1
        compute = self._roofline(passes * flops, passes * self._layer_read_elements(tokens) / tp * self._item)
        elementwise = passes * tokens * self.elementwise_bytes(tp) / self.hardware.memory_bandwidth
        reduces = 2 * self._reduce(tokens, tp, tp_crosses_nodes)
        return passes * self.hardware.layer_launch_s + compute + elementwise + reduces

    def recomputed(self, tokens: float, tp: int, *, tp_crosses_nodes: bool) -> float:
        """What selective recomputation makes again of one layer: all of its forward but products and attention."""
        elementwise = tokens * self.elementwise_bytes(tp) / self.hardware.memory_bandwidth
        return self.hardware.layer_launch_s + elementwise + 2 * self._reduce(tokens, tp, tp_crosses_nodes)

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

    def embedding(self, tokens: float, tp: int, *, backward: bool, tp_crosses_nodes: bool) -> float:
        copy = 2 * tokens * self.model.hidden_size * self._item / self.hardware.memory_bandwidth
        return copy + (0.0 if backward else self._reduce(tokens, tp, tp_crosses_nodes))

    def head(self, tokens: float, tp: int, *, backward: bool, tp_crosses_nodes: bool) -> float:
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
        weights = self.model.vocab_size * self.model.hidden_size / tp
        full, chunk = self.features.full_logits, self.features.logits_chunk_bytes
        is_projected_again = backward and not full and chunk is not None and logits_bytes / tp > chunk
        compute = (passes + is_projected_again) * self._roofline(2 * tokens * weights, weights * self._item)
        compute += LOGITS_PASSES * logits_bytes / (1 if full else tp) / self.hardware.memory_bandwidth
        if backward:
            return compute + self._reduce(tokens, tp, tp_crosses_nodes)
        if not full:
            return compute
        gathered = tokens * self.model.vocab_size * self._item
        per_node = self._tensor_group_per_node(tp)
        return compute + self.hardware.all_gather_s(gathered, tp, crosses_nodes=tp_crosses_nodes, per_node=per_node)

    def decode_layer(self, sequences: float, context: float, tp: int, *, tp_crosses_nodes: bool) -> float:
        """One layer of one decode step of `sequences` sequences with `context` tokens in their caches: the layer's
        weights and the KV cache of grouped-query heads are read once."""
        weights = self._layer_weights(self.model.experts.per_token or 1) / tp
        cache_bytes = sequences * context * kv_bytes_per_token_layer(self.model, self.dtype) / tp
        flops = sequences * (2 * weights + 4 * context * self.model.query_size / tp)
        read = self._layer_read_elements(sequences) / tp
        compute = self._roofline(flops, read * self._item + cache_bytes)
        elementwise = sequences * self.elementwise_bytes(tp) / self.hardware.memory_bandwidth
        graphs = self.features.cuda_graphs
        launch = self.hardware.decode_graph_launch_s if graphs else self.hardware.decode_launch_s
        return launch + compute + elementwise + 2 * self._reduce(sequences, tp, tp_crosses_nodes)

    def optimizer(self, parameters: float) -> float:
        """AdamW is bound by memory: it reads the gradient, reads and writes parameter, both states and below fp32 the
        master copy, and makes one more pass to clip."""
        gradient, states = self.features.gradient_bytes(self.dtype), self.features.state_bytes(self.dtype)
        moved_bytes = 3 * gradient + 2 * self._item + 2 * states  # an element
        return parameters * moved_bytes / self.hardware.memory_bandwidth

    def all_reduce(self, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1) -> float:
        return self.hardware.all_reduce_s(size_bytes, group_size, crosses_nodes=crosses_nodes, per_node=per_node)

    def send(self, size_bytes: float, *, crosses_nodes: bool) -> float:
        return self.hardware.send_s(size_bytes, crosses_nodes=crosses_nodes)

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

    def _roofline(self, flops: float, size_bytes: float) -> float:
        return max(flops / self.hardware.flops(self.dtype), size_bytes / self.hardware.memory_bandwidth)

    def _reduce(self, tokens: float, tp: int, crosses_nodes: bool) -> float:
        """One all-reduce of hidden states (Megatron-LM, section 3: two a layer forward, two backward), or with sequence
        parallelism the same bytes in the reduce-scatter and the all-gather of one ring."""
        size_bytes = tokens * self.model.hidden_size * self._item
        per_node = self._tensor_group_per_node(tp)
        return self.hardware.all_reduce_s(size_bytes, tp, crosses_nodes=crosses_nodes, per_node=per_node)

    def _tensor_group_per_node(self, tp: int) -> int:
        """Members of a tensor-parallel group in each node, if it crosses nodes: they are neighbours."""
        return self.hardware.devices_per_node if tp > self.hardware.devices_per_node else 1


@dataclass(frozen=True, kw_only=True)
class ProfiledTimings(Timings):
    """Interpolates a profile. What one machine cannot show, as links between nodes, is as the hardware is described.

    A degree of tensor parallelism that was not measured takes the compute of the next smaller one, divided by the
    ratio, and the all-reduces of the whole group. `recomputed` is the description's: layers are measured whole.
    """

    profile: LayerProfile

    @classmethod
    def of(cls, profile: LayerProfile, hardware: Hardware) -> "ProfiledTimings":
        """On `hardware`, with the measured seconds of a call and of sampling in place of its own."""
        hardware = msgspec.structs.replace(
            hardware, call_overhead_s=profile.call_overhead_s, sampling_s=profile.sampling_s
        )
        return cls(
            model=profile.model, dtype=profile.dtype, hardware=hardware, overheads=profile.overheads, profile=profile
        )

    def layer(self, tokens: float, sequence_length: float, tp: int, *, backward: bool, tp_crosses_nodes: bool) -> float:
        measured = self._measured(tp)
        curve = measured.layer_backward if backward else measured.layer_forward
        return self._with_reduces(curve.at(tokens), tokens, tp, 2, tp_crosses_nodes)

    def embedding(self, tokens: float, tp: int, *, backward: bool, tp_crosses_nodes: bool) -> float:
        measured = self._measured(tp)
        curve = measured.embedding_backward if backward else measured.embedding_forward
        return self._with_reduces(curve.at(tokens), tokens, tp, 0 if backward else 1, tp_crosses_nodes)

    def head(self, tokens: float, tp: int, *, backward: bool, tp_crosses_nodes: bool) -> float:
        measured = self._measured(tp)
        curve = measured.head_backward if backward else measured.head_forward
        return self._with_reduces(curve.at(tokens), tokens, tp, 1, tp_crosses_nodes)

    def decode_layer(self, sequences: float, context: float, tp: int, *, tp_crosses_nodes: bool) -> float:
        points = [
            (float(timings.context), timings.seconds.at(sequences)) for timings in self._measured(tp).layer_decode
        ]
        return self._with_reduces(profiles.interpolate(points, context), sequences, tp, 2, tp_crosses_nodes)

    def optimizer(self, parameters: float) -> float:
        return parameters * self.profile.optimizer_s_per_parameter

    def all_reduce(self, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1) -> float:
        if group_size == 1 or crosses_nodes or not self._all_reduces:
            return super().all_reduce(size_bytes, group_size, crosses_nodes=crosses_nodes, per_node=per_node)
        return profiles.interpolate([(n, curve.at(size_bytes)) for n, curve in self._all_reduces], group_size)

    def send(self, size_bytes: float, *, crosses_nodes: bool) -> float:
        measured = self.profile.collective("send")
        if crosses_nodes or not measured:
            return super().send(size_bytes, crosses_nodes=crosses_nodes)
        return measured[0].seconds.at(size_bytes)

    @property
    def links(self) -> Hardware:
        measured = self.profile.reallocation
        if measured is None:
            return self.hardware
        return msgspec.structs.replace(
            self.hardware, intra_node_latency_s=measured.latency_s, intra_node_bandwidth=measured.bandwidth
        )

    @cached_property
    def _all_reduces(self) -> list[tuple[float, Curve]]:
        return [(float(c.group_size), c.seconds) for c in self.profile.collective("all_reduce")]

    def _measured(self, tp: int) -> TensorTimings:
        return self.profile.tensor[bisect_right(self.profile.tensor, tp, key=lambda timings: timings.tp) - 1]

    def _with_reduces(self, seconds: float, tokens: float, tp: int, reduces: int, crosses_nodes: bool) -> float:
        timings = self._measured(tp)
        if tp == timings.tp and (tp == 1 or (timings.includes_all_reduce and not crosses_nodes)):
            return seconds
        size_bytes = tokens * self.model.hidden_size * self._item
        if timings.includes_all_reduce and timings.tp > 1:  # take the measured group's own all-reduces out again
            seconds -= reduces * self.all_reduce(size_bytes, timings.tp, crosses_nodes=False)
        all_reduces = reduces * self.all_reduce(size_bytes, tp, crosses_nodes=crosses_nodes)
        return max(seconds, 0.0) * timings.tp / tp + all_reduces


def kv_bytes_per_token_layer(model: DecoderConfig, dtype: DType) -> int:
    """Keys and values of one token in one layer, over all tensor-parallel ranks (grouped-query heads)."""
    return 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Costs:
    """What the cost model knows.

    `of_models`: the features that the setups of single models choose, by name. `call_factors`: a call's measured over
    its predicted seconds, by name; they scale all options of the call.
    """

    hardware: Hardware
    timings: Mapping[DecoderConfig, Timings]
    features: EngineFeatures = ENGINE
    of_models: Mapping[str, EngineFeatures] = field(default_factory=dict)
    call_factors: Mapping[str, float] = field(default_factory=dict)

    def features_of(self, model_name: str) -> EngineFeatures:
        return self.of_models.get(model_name, self.features)

    def of(self, model: DecoderConfig, features: EngineFeatures | None = None) -> Timings:
        """The timings of a model under `features`; what was measured stays as it is."""
        timings = self.timings[model]
        if features is None or isinstance(timings, ProfiledTimings):
            return timings
        return replace(timings, features=features)

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
) -> Costs:
    """Measured timings where `ROOT/HARDWARE` has a profile of the model type, else the analytic model.

    `features` and `of_models`: see `Costs`; what depends on the hardware is taken from it (`EngineFeatures.on`). Raises
    UserError for a broken profile, or a profile of another model.
    """
    features = features.on(hardware)
    of_models = {name: own.on(hardware) for name, own in (of_models or {}).items()}
    timings: dict[DecoderConfig, Timings] = {}
    measured_bytes: list[int] = []  # of communicators
    for model in models.values():
        path = profiles.profile_path(model, dtype, hardware.name, root)
        if not path.is_file():
            timings[model] = Timings(model=model, dtype=dtype, hardware=hardware, features=features)
            continue
        profile = profiles.load_profile(path)
        if (profile.model, profile.dtype) != (model, dtype):
            raise UserError(f"{path}: the profile is of another model or dtype; measure it again with `realhf profile`")
        timings[model] = ProfiledTimings.of(profile, hardware)
        if profile.communicator_bytes is not None:
            measured_bytes.append(profile.communicator_bytes)
    if measured_bytes:
        hardware = msgspec.structs.replace(hardware, communicator_bytes=float(max(measured_bytes)))
    return Costs(hardware, timings, features, of_models)
