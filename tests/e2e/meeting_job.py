"""PPO in small, whose critic trains on a step only while the actor generates for the next: for `test_overlap.py`."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from realhf.api import DecoderConfig, Generate, ModelFunctionCallDef, Update, auto
from realhf.data import sort_task
from realhf.rundir.run import load_experiment_class

PPOExperiment: Any = load_experiment_class(Path(__file__).parents[2] / "experiments/ppo.py")
TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4)


@dataclass(frozen=True, kw_only=True)
class MeetingActor(Generate):
    """Both come to the `meeting`, a folder, and wait there for each other; "" is none."""

    implementation: ClassVar[str] = "meeting_job_interface:MeetingActorInterface"

    meeting: str = ""


@dataclass(frozen=True, kw_only=True)
class MeetingCritic(Update):
    """As `MeetingActor`; in the last of the `steps` it has nobody to wait for."""

    implementation: ClassVar[str] = "meeting_job_interface:MeetingCriticInterface"

    meeting: str = ""
    steps: int


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class MeetingJob(PPOExperiment):
    batch_size: int = 8
    mini_batches: int = 1
    architecture: DecoderConfig = TINY
    evaluate: bool = False
    meeting: str = ""

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        calls: dict[str, ModelFunctionCallDef] = {call.name: call for call in super().rpcs}
        meeting: dict[str, Any] = {
            "actor_generate": partial(MeetingActor, meeting=self.meeting),
            "critic_train_step": partial(MeetingCritic, meeting=self.meeting, steps=self.steps),
        }
        for name, make in meeting.items():
            calls[name] = replace(calls[name], interface_impl=make(**vars(calls[name].interface_impl)))
        return list(calls.values())
