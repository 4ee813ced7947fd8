"""A worker sends of a model that lives there while it computes a long call of another one."""

from pathlib import Path

import pytest
import torch

from realhf.dataflow.plan import CallPlan, ExecutionPlan, OrderEntry, save_plan
from realhf.report.run_data import read_trace
from tests.e2e.runs import ACTOR, CRITIC, FinishedRun, finished, realhf

pytestmark = pytest.mark.distributed

SEED, STEPS = 7, 2
COMMON = f"--steps {STEPS} --seed {SEED} --batch-size 8 --dtype float64 --no-evaluate --record seq".split()
HOME, ELSEWHERE = CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
PPO_CALLS = (
    "actor_generate",
    "reward_inference",
    "reference_inference",
    "critic_inference",
    "actor_train_step",
    "critic_train_step",
)

# PPO with two calls beside it: an audit that ends when the actor generates, and an usher that lets it in when the audit
# has begun. Files say so.
EXPERIMENT = """
from dataclasses import dataclass, replace
from typing import ClassVar

from experiments.ppo import PPOExperiment
from realhf.api import Generate, ModelSetup, auto
from realhf.dataflow.graph import INFERENCE, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig


@dataclass(frozen=True, kw_only=True)
class Signals(InterfaceConfig):
    implementation: ClassVar[str] = "audited_interfaces:SignalsInterface"
    says: str
    waits_for: str


@dataclass(frozen=True, kw_only=True)
class AuditedActor(Generate):
    implementation: ClassVar[str] = "audited_interfaces:AuditedActorInterface"


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class AuditedPPO(PPOExperiment):
    @property
    def rpcs(self):
        ppo = [
            replace(call, interface_impl=AuditedActor.by(self.ppo)) if call.name == "actor_generate" else call
            for call in super().rpcs
        ]
        beside = [
            ModelFunctionCallDef(
                model_name=name,
                model_type=self.architecture,
                interface_type=INFERENCE,
                interface_impl=Signals(says=f"{name} has begun", waits_for=waits_for),
                input_data=["prompt"],
            )
            for name, waits_for in {"audit": "the actor generates", "usher": "audit has begun"}.items()
        ]
        return [*ppo, *beside]

    @property
    def models(self):
        return super().models | {"audit": ModelSetup(dtype=self.dtype), "usher": ModelSetup(dtype=self.dtype)}
"""

INTERFACES = """
import threading
from pathlib import Path

from realhf.algorithms.script.rollouts import GenerateInterface
from realhf.engine.interface import CallResult

FOLDER = Path(__file__).parent
NEVER = threading.Event()


class SignalsInterface:
    def __init__(self, config):
        self.config = config

    def inference(self, model, batch, context):
        (FOLDER / f"{self.config.says} in step {context.step}").touch()
        while not (FOLDER / f"{self.config.waits_for} in step {context.step}").exists():
            NEVER.wait(0.01)  # the run's deadline of a call ends it
        return CallResult()


class AuditedActorInterface(GenerateInterface):
    def generate(self, model, batch, context):
        (FOLDER / f"the actor generates in step {context.step}").touch()
        return super().generate(model, batch, context)
"""


def save(plan: ExecutionPlan, path: Path) -> Path:
    save_plan(plan, path)
    return path


@pytest.fixture
def audited(tmp_path: Path) -> FinishedRun:
    """Generation is on worker 1, everything else on worker 0, which the audit occupies until the actor generates."""
    (tmp_path / "audited_ppo.py").write_text(EXPERIMENT)
    (tmp_path / "audited_interfaces.py").write_text(INTERFACES)
    calls = dict.fromkeys(("audit_inference", *PPO_CALLS), HOME)
    calls |= {"usher_inference": ELSEWHERE, "actor_generate": ELSEWHERE}
    order = ("audit_inference", "usher_inference", *PPO_CALLS)
    plan = ExecutionPlan(
        num_devices=2, calls=calls, order=tuple(OrderEntry(call=name) for name in order), max_steps_in_flight=1
    )
    words = ("--plan", str(save(plan, tmp_path / "two.json")), "--verify-reallocations-every", "1")
    # A reallocation that waited for the audit, which waits for it, would run into this deadline.
    patience = ("--call-timeout-s", "900")
    return finished(tmp_path / "audited", tmp_path / "audited_ppo.py", *words, *patience, *COMMON)


@pytest.mark.slow
def test_a_model_is_sent_while_its_worker_computes_another_call(audited: FinishedRun, tmp_path: Path) -> None:
    plan = ExecutionPlan(num_devices=1, calls=dict.fromkeys(PPO_CALLS, HOME))
    alone = finished(tmp_path / "alone", "ppo", "--plan", str(save(plan, tmp_path / "one.json")), *COMMON)
    for step in range(STEPS):
        expected, got = alone.recorded(step, "seq"), audited.recorded(step, "seq")
        assert expected.keys() == got.keys()
        assert all(torch.equal(got[sample], expected[sample]) for sample in expected)
    for model, config in (("actor", ACTOR), ("critic", CRITIC)):
        assert torch.equal(audited.parameters(model, config), alone.parameters(model, config))

    spans = {(e.tid, e.cat, e.name): (e.ts, e.ts + e.dur) for e in read_trace(audited.path / "trace.json")}
    for step in range(1, STEPS + 1):
        audit = spans[0, "compute", f"audit_inference of step {step}"]
        sending = spans[0, "sending", f"actor_generate of step {step}"]
        generation = spans[1, "compute", f"actor_generate of step {step}"]
        assert audit[0] <= sending[0] <= generation[0] <= audit[1], "sent while the audit ran"
        assert (1, "reallocation", f"actor_generate of step {step}") in spans, "who receives it waits for it"
        assert (0, "reallocation", f"actor_generate of step {step}") not in spans


BROKEN = """
import os
from dataclasses import dataclass

from experiments.ppo import PPOExperiment
from realhf.api.decorator import auto


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class BrokenPPO(PPOExperiment):
    @property
    def rpcs(self):
        if os.environ.get("REALHF_WORKER_INDEX") == "0":
            from realhf.worker import parameter_moves

            parameter_moves.execute = fail_to_send
        return super().rpcs


def fail_to_send(*arguments, **options):
    raise ValueError("the cable is out")
"""


@pytest.mark.slow
def test_what_a_move_raises_ends_the_run_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_ppo.py").write_text(BROKEN)
    calls = dict.fromkeys(PPO_CALLS, HOME) | {"actor_generate": ELSEWHERE}
    plan = save(ExecutionPlan(num_devices=2, calls=calls), tmp_path / "plan.json")
    ended = realhf("run", tmp_path / "broken_ppo.py", "--run-dir", tmp_path / "run", "--plan", plan, *COMMON)
    assert ended.returncode == 1
    message = ended.stderr.partition("error: ")[2]
    assert message.startswith("worker 0 failed in reallocation of actor for actor_generate of step 1; log: "), message
    assert "in fail_to_send" in message
    assert "\nValueError: the cable is out\n" in message
