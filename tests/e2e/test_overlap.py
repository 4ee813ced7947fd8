"""The critic trains on a step while the actor generates for the next: in the trace of a real run."""

from pathlib import Path

import pytest

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.report.run_data import read_trace
from tests.e2e.runs import finished

pytestmark = pytest.mark.distributed

STEPS = 4
ACTOR, CRITIC = CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
CALLS = {
    "actor_generate": ACTOR,
    "reference_inference": ACTOR,
    "actor_train_step": ACTOR,
    "reward_inference": CRITIC,
    "critic_inference": CRITIC,
    "critic_train_step": CRITIC,
}


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_critic_trains_while_the_actor_generates_for_the_next_step(in_flight: int, tmp_path: Path) -> None:
    """Made sure on any machine: with two steps in flight, each of the two waits within its call until the other is in
    its own. With one step in flight nothing waits, and the one starts when the other has ended."""
    save_plan(ExecutionPlan(num_devices=2, calls=CALLS, max_steps_in_flight=in_flight), tmp_path / "plan.json")
    meeting = ("--meeting", tmp_path) if in_flight > 1 else ()
    words = ("--steps", str(STEPS), "--plan", tmp_path / "plan.json", *meeting)
    run = finished(tmp_path / "run", "../tests/e2e/meeting_job", *words)
    spans = {
        event.name: (event.ts, event.ts + event.dur)
        for event in read_trace(run.path / "trace.json")
        if event.cat == "compute"
    }
    for step in range(1, STEPS):
        training, generation = spans[f"critic_train_step of step {step}"], spans[f"actor_generate of step {step + 1}"]
        if in_flight == 1:
            assert training[1] <= generation[0]
        else:
            assert training[0] < generation[1], "training starts before generation ends"
            assert generation[0] < training[1], "and generation before training ends"
