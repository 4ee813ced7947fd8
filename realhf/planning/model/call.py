"""What one call of a planning task takes under an option: seconds, and bytes on each of its devices, the same wherever
its mesh lies (within a node, or from the begin of one)."""

from dataclasses import dataclass, field, replace

from realhf.architecture.model import DType
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.communicators import Key, axes_used, group_key, of_all_devices
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.seconds import RankSeconds, crossings
from realhf.planning.model.sharding import Sharding, shard
from realhf.planning.model.timings import Timings
from realhf.planning.model.workload import Workload

BYTES_PER_TOKEN = 8  # of one key of per-sample data: token numbers are int64


@dataclass(frozen=True, kw_only=True)
class CallModel:
    """Seconds and bytes of one call; a reallocation of its parameters is not part of them.

    samples: of a mini-batch.
    lengths: of the call's sequences.
    features: what the engine does during the call; `timings` hold for them.
    hardware: the cluster's, with what was measured of its communicators.
    versions: of the model's parameters that its home keeps.
    factor: by which a run measured the call to be slower than it is computed here.
    shares_devices: other calls may run on the same devices (`realhf.planning.model.sharding.rooms`).
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
    _shardings: dict[tuple[ParallelStrategy, int], Sharding | None] = field(default_factory=dict, init=False)

    def seconds(self, strategy: ParallelStrategy, micro_batches: int) -> float:
        """Seconds from the request's arrival to the result. Of a call that does not use its model only the overhead is
        known."""
        if not self.call.uses_model:
            return self.factor * self.timings.hardware.call_overhead_s
        work = self.work(strategy, micro_batches)
        body = RankSeconds(work, self.timings, crossings(strategy, self.cluster)).total_s()
        if self.call.trains:
            sharding = self.sharding(strategy, micro_batches)
            body = self.call.optimizer_steps * (body + (sharding.plan.added_s if sharding else 0.0))
        return self.factor * (self.timings.hardware.call_overhead_s + body)

    def work(self, strategy: ParallelStrategy, micro_batches: int) -> RankWork:
        """The work of a data-parallel rank in one mini-batch."""
        return RankWork(
            call=self.call,
            samples=self.samples // strategy.dp,
            lengths=self.lengths,
            placed=self.placed(strategy),
            micro_batches=micro_batches,
        )

    def placed(self, strategy: ParallelStrategy) -> PlacedModel:
        """The call's model under a strategy."""
        return PlacedModel(self.call.config, strategy, self.dtype, self.features)

    def static_bytes(self, strategy: ParallelStrategy) -> int:
        """What a home in this strategy keeps on each device: with the optimizer's states, if the call trains."""
        return self.placed(strategy).static_bytes(trained=self.call.trains, versions=self.versions)

    def least_bytes(self, strategy: ParallelStrategy, micro_batches: int) -> float:
        """Bytes that every plan with this option needs: wherever the model lives, its parameters are here too, with the
        optimizer's states for a training. 0 where operators are sharded so that they fit."""
        if self.sharding(strategy, micro_batches):
            return 0.0
        work = self.work(strategy, micro_batches)
        stays = self.static_bytes(strategy) if self.call.trains else work.placed.parameter_bytes()
        return stays + work.dynamic_bytes()

    def sharding(self, strategy: ParallelStrategy, micro_batches: int) -> Sharding | None:
        """What is sharded over dp because it would not fit otherwise; None: nothing, or it would not fit even so."""
        if not self.features.sharded_operators or not self.call.trains or strategy.dp == 1:
            return None
        key = (strategy, micro_batches)
        if key not in self._shardings:
            crosses = crossings(strategy, self.cluster)
            link = self.hardware.link(crosses.data, crosses.data_per_node)
            room_bytes = self._room_bytes(strategy)
            self._shardings[key] = shard(self.work(*key), room_bytes, link, shares_devices=self.shares_devices)
        return self._shardings[key]

    def communicators(self, layout: Layout, *, at_home: bool = True) -> list[Key]:
        """The communicators that the call needs, each once; away from home it finds whole parameters."""
        gathers = at_home and self.features.fully_sharded
        axes = axes_used(self.call, layout.strategy, gathers_parameters=gathers)
        return list(dict.fromkeys(group_key(layout, axis) for axis in axes))

    def communicator_bytes(self, layout: Layout) -> float:
        """The bytes of `communicators` on a device."""
        return self.hardware.communicator_bytes * len(self.communicators(layout))

    def transfer_s(self, keys: int, parts: int, *, crosses_nodes: bool) -> float:
        """Seconds to bring `keys` columns of per-sample data to the call, its batch cut into `parts` (mostly its dp):
        one message to every device, all at the same time. It does not hold where both calls run on the same device."""
        batch_size = self.samples * self.call.mini_batches
        size_bytes = keys * batch_size / parts * self.lengths.tokens * BYTES_PER_TOKEN
        return self.hardware.send_s(size_bytes, crosses_nodes=crosses_nodes)

    def _room_bytes(self, strategy: ParallelStrategy) -> int:
        """What is left of a device beside its communicators: the call's, and those of all devices."""
        own = self.communicators(Layout(DeviceMesh(0, strategy.size), strategy))
        common = of_all_devices(self.cluster.num_devices, moves=self.shares_devices)
        taken = self.hardware.communicator_bytes * (len(own) + len(common))
        return self.cluster.device_memory_bytes - round(taken)


def features_during(call: ModelFunctionCallDef, lengths: Workload, engine: EngineFeatures) -> EngineFeatures:
    """What an engine does during a call."""
    engine = replace(engine, cuda_graphs=engine.replays(call.config, lengths.decode_graphs))
    if call.trains:
        return engine
    gathers = engine.full_logits or (engine.gathers_drawn_logits and call.generates)
    return replace(engine, sequence_parallel=False, full_logits=gathers)
