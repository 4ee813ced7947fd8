"""`realhf run` on simulated GPUs, from the launcher to the checkpoints."""

from pathlib import Path

import pytest

from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, save_plan
from realhf.planning.model.descriptions import load_hardware
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import read_status
from tests.simulated.simulator import Simulator

# Parameters of the actor move in each step, and samples between both workers through host memory.
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


def ran(simulator: Simulator, folder: Path, steps: int) -> tuple[Path, list[str], int]:
    """PPO's run directory, the logs of its workers, and the sum of the sizes of all communicators."""
    save_plan(PLAN, folder / "plan.json")
    words = ["--steps", str(steps), "--batch-size", "8", "--num-workers", "2", "--dtype", "bfloat16", "--no-evaluate"]
    words += ["--verify-reallocations-every", "0"]  # it compares values
    places = ["--data-dir", folder / "data", "--run-dir", folder / "run", "--plan", folder / "plan.json"]
    done, memberships = simulator.realhf("run", "experiments/ppo.py", *words, *places, gpus=2)
    assert done.returncode == 0, done.stderr[-4000:]
    status = read_status(RunDirectory(folder / "run").status)
    assert status is not None
    assert (status.state, status.step) == ("done", steps)
    logs = [(folder / f"run/logs/worker-{worker}.log").read_text() for worker in range(2)]
    return folder / "run", logs, memberships


def test_ppo_goes_through_its_steps(simulator: Simulator, tmp_path: Path) -> None:
    """Its tokens and metrics mean nothing. It makes the communicators that its plan counts."""
    run, logs, memberships = ran(simulator, tmp_path, steps=2)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    why = load_plan(run / "plan.json").rationale
    assert why is not None
    planned = sum(memory.communicator_bytes * memory.devices[1] for memory in why.memory)
    # Each device has the world's, that of moves, and one for all axes of the actor's layouts; none for samples.
    assert memberships * load_hardware("h100").communicator_bytes == planned == 6 * 688e6
    for log in logs:
        assert "attention on cuda: bfloat16: flash-attn over packed sequences, Triton over the KV cache" in log
        assert "remedy: " not in log
        assert "reallocation took" in log


def test_workers_do_without_what_is_left_out(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And say what takes its place."""
    monkeypatch.setenv("REALHF_WITHOUT", "triton")
    for log in ran(simulator, tmp_path, steps=1)[1]:
        assert "flash-attn over packed sequences, flash-attn over the KV cache" in log
        assert "triton is left out by REALHF_WITHOUT: over the KV cache flash-attn takes its place, in pages of" in log
