"""The work of one data-parallel rank in a call: its samples, in micro-batches, through a model in shards."""

import math
from dataclasses import dataclass
from functools import cached_property

from realhf.architecture.model import DecoderConfig, DType
from realhf.dataflow.graph import GENERATE, ModelFunctionCallDef
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """What seconds and bytes of a call depend on, for one option: as in `CallModel`, but `samples` are of one rank."""

    call: ModelFunctionCallDef
    samples: int
    lengths: Workload
    dtype: DType
    features: EngineFeatures
    strategy: ParallelStrategy
    micro_batches: int

    @property
    def model(self) -> DecoderConfig:
        return self.call.config

    @property
    def generates(self) -> bool:
        return self.call.interface_type is GENERATE

    @cached_property
    def parts(self) -> int:
        """Micro-batches; of a generation one for every stage at least, none empty."""
        return min(max(self.micro_batches, self.strategy.pp), self.samples) if self.generates else self.micro_batches

    @property
    def parts_in_flight(self) -> int:
        """Parts of a generation that are under way at once; the others wait without a cache."""
        return min(self.parts, self.strategy.pp)

    @cached_property
    def cache_turns(self) -> float:
        """Room for keys and values that the sequences in flight need over the room that the call was given, at least 1:
        with 1 / turns of them at a time, there are turns times as many decode steps."""
        in_flight = self.parts_in_flight * math.ceil(self.samples / self.parts)
        return max(1.0, in_flight * self.lengths.max_tokens / (self.lengths.kv_cache_tokens or math.inf))
