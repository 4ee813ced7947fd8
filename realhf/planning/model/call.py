"""What one call of a planning task takes under an option: seconds, and bytes on each of its devices, the same wherever
its mesh lies (within a node, or from the begin of one)."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from realhf.architecture.compute import ModeRules
from realhf.architecture.model import DType
from realhf.base.kept import kept
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import AS_SET_UP, CallCompute
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.communicators import Key, axes_used, group_key, of_all_devices
from realhf.planning.model.experience import CallError, RunTimes, expected
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.mode_choice import Chooser
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.seconds import RankSeconds, crossings
from realhf.planning.model.timings import Timings
from realhf.planning.model.workload import Workload

BYTES_PER_TOKEN = 8  # for one key of per-sample data: token numbers are int64


@dataclass(frozen=True, kw_only=True)
class CallModel:
    """Seconds and bytes of one call; a reallocation of its parameters is not part of them.

    samples: of a mini-batch.
    lengths: of the call's sequences.
    features: what the engine does during the call; `timings` hold for them.
    hardware: the cluster's, with what was measured of its communicators.
    versions: of the model's parameters that its home keeps.
    factor: by which a run measured the call to be slower than it is computed here.
    seen: finished runs with calls of this model; error: a call's before that (`Costs.call_error`).
    shares_devices: other calls may run on the same devices (`realhf.planning.model.mode_choice.memory_limits`).
    known: seconds and bytes of parts of the work, for all ways to compute the call (`RankWork.once`).
    """

    call: ModelFunctionCallDef
    samples: int
    lengths: Workload
    dtype: DType
    features: EngineFeatures
    timings: Timings
    cluster: Cluster
    hardware: Hardware
    versions: int = 1
    factor: float = 1.0
    shares_devices: bool = True
    seen: tuple[RunTimes, ...] = ()
    error: float = 0.0
    known: dict[Hashable, float] = field(default_factory=dict)

    # The search and the plans by rule ask for the same again and again.
    @kept
    def under(self, compute: CallCompute) -> "CallModel":
        """The call as a plan has it computed."""
        if compute == AS_SET_UP:
            return self
        lengths = replace(
            self.lengths,
            decode_graphs=compute.decode_graphs or self.lengths.decode_graphs,
            kv_cache_tokens=compute.kv_cache_tokens or self.lengths.kv_cache_tokens,
        )
        features = features_during(self.call, lengths, self.features.under(compute))
        return replace(self, lengths=lengths, features=features, timings=self.timings.under(features))

    @kept
    def seconds(self, strategy: ParallelStrategy, micro_batches: int) -> float:
        """Seconds from the request's arrival to the result. Of a call that does not use its model only the overhead is
        known."""
        if not self.call.uses_model:
            return self.factor * self.timings.hardware.call_overhead_s
        factor = self.factor * math.exp(self.expected(strategy, micro_batches).mean)
        body = self._rank_seconds(strategy, micro_batches).total_s()
        if self.call.trains:
            body *= self.call.optimizer_steps
        return factor * (self.timings.hardware.call_overhead_s + body)

    def expected(self, strategy: ParallelStrategy, micro_batches: int) -> CallError:
        """By what measured seconds are expected to differ from those computed here."""
        option = self.option_text(strategy, micro_batches) if self.seen else ""
        return self._expected(option if option in self._seen_options else "")  # all that no run has had are alike

    @kept
    def _expected(self, option: str) -> CallError:
        return expected(self.seen, self.call.interface_type.value, option, self.error)

    @cached_property
    def _seen_options(self) -> frozenset[str]:
        return frozenset(call.option for run in self.seen for call in run.calls)

    def option_text(self, strategy: ParallelStrategy, micro_batches: int) -> str:
        """The key of an option of calls, the same in all runs."""
        return (
            f"{strategy}, {micro_batches} micro-batches of {self.samples} samples of {self.lengths.tokens:.0f} tokens"
        )

    def gathering_s(self, strategy: ParallelStrategy, micro_batches: int) -> float:
        """Seconds in which an inference or a generation at a sharded home gathers the parameters: for every
        micro-batch, or once. A training has them in `seconds`."""
        work = self.work(strategy, micro_batches)
        if self.call.trains or not self.call.uses_model or not work.placed.is_divided:
            return 0.0
        crosses = crossings(strategy, self.cluster)
        gathers = 1 if self.call.generates else work.parts
        stages, placed = work.placed.stages, work.placed
        sharded_bytes = max(s.sharded for s in stages) * placed.item if stages else placed.parameter_bytes()
        # An all-gather is half of the ring of an all-reduce.
        once_s = self.timings.collective(
            "all_reduce", sharded_bytes / 2, strategy.dp, crosses_nodes=crosses.data, per_node=crosses.data_per_node
        )
        return self.factor * gathers * once_s

    @kept
    def work(self, strategy: ParallelStrategy, micro_batches: int) -> RankWork:
        """The work of a data-parallel rank in one mini-batch."""
        samples, computed = self.samples // strategy.dp, self.call.interface_impl.computed_samples
        return RankWork(
            call=self.call,
            samples=samples,
            expected=computed(samples, strategy.dp, self.call.mini_batches) if self.call.trains else 0,
            lengths=self.lengths,
            placed=self.placed(strategy),
            micro_batches=micro_batches,
            known=self.known,
        )

    def _rank_seconds(self, strategy: ParallelStrategy, micro_batches: int) -> RankSeconds:
        """The seconds of parts of that work."""
        return RankSeconds(self.work(strategy, micro_batches), self.timings, crossings(strategy, self.cluster))

    @kept
    def placed(self, strategy: ParallelStrategy) -> PlacedModel:
        """The call's model under a strategy."""
        return PlacedModel(self.call.config, strategy, self.dtype, self.features)

    @kept
    def static_bytes(self, strategy: ParallelStrategy) -> int:
        """Bytes that a home in this strategy keeps on each device, with the optimizer's states if the call trains."""
        return self.placed(strategy).static_bytes(trained=self.call.trains, versions=self.versions)

    def least_bytes(self, strategy: ParallelStrategy, micro_batches: int) -> float:
        """Bytes that every plan with this option needs: wherever the model lives, its parameters are here too, with the
        optimizer's states for a training; at a sharded home a share of them, and what the call gathers, unless a copy
        is less."""
        work = self.work(strategy, micro_batches)
        if self.call.trains:
            return self.static_bytes(strategy) + work.dynamic_bytes()
        copy_bytes = work.placed.parameter_bytes()
        home_bytes = work.placed.static_bytes(trained=False) + work.gathered_bytes()
        return min(copy_bytes, home_bytes) + work.dynamic_bytes()

    def mix(self, strategy: ParallelStrategy, micro_batches: int, limit_bytes: int | None) -> ModeRules | None:
        """The modes of operators with which this training, computed otherwise as here with ZeRO-1, takes the least time
        while states, and what is gathered of them, take no more than `limit_bytes` (None: with which they take the
        least memory); None: there are none."""
        parts = self._rank_seconds(strategy, micro_batches)
        return Chooser(parts.work, tuple(map(parts.exchange, range(strategy.pp)))).rules(limit_bytes)

    def communicators(self, layout: Layout, *, at_home: bool = True) -> list[Key]:
        """The communicators that the call needs, each once; away from home it finds whole parameters."""
        gathers = at_home and self.features.divides_parameters
        axes = axes_used(self.call, layout.strategy, gathers_parameters=gathers)
        return list(dict.fromkeys(group_key(layout, axis) for axis in axes))

    def communicator_bytes(self, layout: Layout) -> float:
        """The bytes of `communicators` on a device."""
        return self.hardware.communicator_bytes * len(self.communicators(layout))

    def transfer_s(self, keys: int, parts: int, wide_bytes: int = 0, *, crosses_nodes: bool) -> float:
        """Seconds to bring `keys` columns of per-sample data to the call, its batch cut into `parts` (mostly its dp):
        one message to every device, all at the same time. It does not hold where both calls run on the same device.

        wide_bytes: of a response token in those columns that have many numbers for each."""
        batch_size = self.samples * self.call.mini_batches
        size_bytes = keys * batch_size / parts * self.lengths.tokens * BYTES_PER_TOKEN
        size_bytes += batch_size / parts * self.lengths.new_tokens * wide_bytes
        return self.hardware.send_s(size_bytes, crosses_nodes=crosses_nodes)

    def available_bytes(self, strategy: ParallelStrategy) -> int:
        """Memory of a device without its communicators: the call's, and those of all devices."""
        own = self.communicators(Layout(DeviceMesh(0, strategy.size), strategy))
        common = of_all_devices(self.cluster.num_devices, moves=self.shares_devices)
        taken = self.hardware.communicator_bytes * (len(own) + len(common))
        return self.cluster.device_memory_bytes - round(taken)


def features_during(call: ModelFunctionCallDef, lengths: Workload, engine: EngineFeatures) -> EngineFeatures:
    """The features of the engine during a call."""
    engine = replace(engine, cuda_graphs=engine.replays(call.config, lengths.decode_graphs))
    if call.trains:
        return engine
    gathers = engine.full_logits or (engine.gathers_drawn_logits and call.generates)
    return replace(engine, sequence_parallel=False, full_logits=gathers)
