"""The main job, small, with an actor that raises when a file asks it to: for `benchmarks/faults.py` and tests."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from realhf.algorithms.ppo.config import PPOActor
from realhf.api.experiment import auto
from realhf.api.graph import ModelFunctionCallDef
from realhf.api.model import DecoderConfig
from realhf.api.run import load_experiment_class
from realhf.data import sort_task

PPOExperiment: Any = load_experiment_class(Path(__file__).parents[1] / "experiments/ppo.py")
TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4)


@dataclass(frozen=True, kw_only=True)
class BreakableActor(PPOActor):
    """`fault_file` holds "pid N", or "step N" (from 0): that process raises once, or every one in that step.
    Or "device D from step N": whoever has that device is killed in each of these steps."""

    implementation: ClassVar[str] = "fault_job_interface:BreakableActorInterface"

    fault_file: str = ""


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class FaultJob(PPOExperiment):
    batch_size: int = 8
    mini_batches: int = 1
    model: DecoderConfig = TINY
    evaluate: bool = False
    fault_file: str = ""

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        actor = BreakableActor(ppo=self.ppo, fault_file=self.fault_file)
        calls: list[ModelFunctionCallDef] = super().rpcs
        return [replace(call, interface_impl=actor) if call.model_name == "actor" else call for call in calls]
