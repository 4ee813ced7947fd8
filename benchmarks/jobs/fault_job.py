"""The main job, small, with an actor that breaks when a file asks it to: for benchmarks and tests of runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from realhf.api import CallPlan, DecoderConfig, ExecutionPlan, Generate, ModelFunctionCallDef, Update, auto
from realhf.data import sort_task
from realhf.rundir.run import load_experiment_class

PPOExperiment: Any = load_experiment_class(Path(__file__).parents[2] / "experiments/ppo.py")
TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4)
BOTH, FIRST, SECOND = CallPlan(devices=(0, 2), dp=2), CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
# Reallocations before every generation, transfers between all calls, and devices that work on different calls.
PLAN = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), tp=2),
        "reward_inference": SECOND,
        "reference_inference": FIRST,
        "critic_inference": SECOND,
        "actor_train_step": BOTH,
        "critic_train_step": SECOND,
    },
)


@dataclass(frozen=True, kw_only=True)
class BreakableGenerate(Generate):
    """What a file asks for at the beginning of every call: `fault_file`.

    "pid N": that process raises, once; "step N" (from 0): every process raises in that step; "hold N": they wait in
    that step as long as the file says so; "device D from step N": whoever has that device is killed in each of these
    steps; "step N waits for WORD in FILE": in that step, or a later one, they wait for the file to hold the word.
    """

    implementation: ClassVar[str] = "fault_job_interface:BreakableGenerateInterface"

    fault_file: str = ""


@dataclass(frozen=True, kw_only=True)
class BreakableUpdate(Update):
    """As `BreakableGenerate`."""

    implementation: ClassVar[str] = "fault_job_interface:BreakableUpdateInterface"

    fault_file: str = ""


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class FaultJob(PPOExperiment):
    batch_size: int = 8
    mini_batches: int = 1
    architecture: DecoderConfig = TINY
    evaluate: bool = False
    fault_file: str = ""

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        calls: list[ModelFunctionCallDef] = super().rpcs
        return [self._breakable(call) if call.model_name == "actor" else call for call in calls]

    def _breakable(self, call: ModelFunctionCallDef) -> ModelFunctionCallDef:
        kind = BreakableUpdate if call.trains else BreakableGenerate
        return replace(call, interface_impl=kind(**vars(call.interface_impl), fault_file=self.fault_file))
