"""`realhf run` on simulated GPUs, from the launcher to the checkpoints."""

from pathlib import Path

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import read_status
from tests.simulated.simulator import Simulator

# Parameters of the actor move in each step, and samples between both workers.
PLAN = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), dp=2),
        "reward_inference": CallPlan(devices=(0, 1)),
        "reference_inference": CallPlan(devices=(1, 1)),
        "critic_inference": CallPlan(devices=(1, 1)),
        "actor_train_step": CallPlan(devices=(0, 2), tp=2),
        "critic_train_step": CallPlan(devices=(1, 1)),
    },
)


def test_ppo_goes_through_its_steps(simulator: Simulator, tmp_path: Path) -> None:
    """Its tokens and metrics mean nothing."""
    save_plan(PLAN, tmp_path / "plan.json")
    words = ["--steps", "2", "--batch-size", "8", "--num-workers", "2", "--dtype", "bfloat16", "--no-evaluate"]
    words += ["--verify-reallocations-every", "0"]  # it compares values
    places = ["--data-dir", tmp_path / "data", "--run-dir", tmp_path / "run", "--plan", tmp_path / "plan.json"]
    done = simulator.realhf("run", "experiments/ppo.py", *words, *places, gpus=2)
    assert done.returncode == 0, done.stderr[-4000:]
    status = read_status(RunDirectory(tmp_path / "run").status)
    assert status is not None
    assert (status.state, status.step) == ("done", 2)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    for worker in range(2):
        log = (tmp_path / f"run/logs/worker-{worker}.log").read_text()
        assert "attention on cuda: bfloat16: flash-attn over packed sequences, Triton over the KV cache" in log
        assert "reallocation took" in log
