"""Several responses to a prompt: the same rollouts, statistics and updates under every plan and after a resume."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.models.checkpoint_index import optimizer_steps, read_index
from tests.e2e.forked import quickly_finished
from tests.e2e.group_job import TINY
from tests.e2e.runs import ROOT, FinishedRun, realhf

pytestmark = pytest.mark.distributed

JOB = ROOT / "tests/e2e/group_job.py"
CALLS = ("actor_generate", "actor_inference", "actor_train_step")
STEPS, GROUP, BATCH, EPOCHS, MINI_BATCHES = 2, 4, 16, 2, 2
COMMON = ("--steps", STEPS, "--epochs", EPOCHS, "--early", 1, "--evaluation-batch-size", 200)
COMMON = (*COMMON, "--record", "seq", "reward", "advantage")


def alike(**fields: int) -> ExecutionPlan:
    call = CallPlan(devices=(0, fields.get("dp", 1) * fields.get("tp", 1) * fields.get("pp", 1)), **fields)
    return ExecutionPlan(num_devices=call.devices[1], calls=dict.fromkeys(CALLS, call))


ONE, TWO = CallPlan(devices=(0, 1)), CallPlan(devices=(2, 2), dp=2)
PLANS = {
    "dp4": alike(dp=4),  # 4 samples on every rank: a group; of a mini-batch half a group
    # Parts of a pipeline, a rule over samples on two other devices, and training with groups cut by four ranks.
    "mixed": ExecutionPlan(
        num_devices=4,
        calls={
            "actor_generate": CallPlan(devices=(0, 2), pp=2),
            "actor_inference": TWO,
            "actor_train_step": CallPlan(devices=(0, 4), dp=2, tp=2, micro_batches=2),
        },
    ),
    "dp2": alike(dp=2),
    "tp2": alike(tp=2),
    "pp2": alike(pp=2, micro_batches=2),
}
BY_DEFAULT = ("mixed",)


def run_plan(folder: Path, plan: ExecutionPlan, *words: object) -> FinishedRun:
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / "plan.json")
    return quickly_finished(folder / "run", JOB, "--plan", folder / "plan.json", *map(str, (*COMMON, *words)))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run_plan(tmp_path_factory.mktemp("one"), alike(), "--checkpoint-every", 1)


def evaluations(run: FinishedRun) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.path / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [n if n in BY_DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in PLANS])
def test_a_plan_computes_what_one_worker_does(name: str, one: FinishedRun, tmp_path: Path) -> None:
    run = run_plan(tmp_path, PLANS[name])
    for step in range(STEPS):
        for call, keys in (("actor_generate", ["seq"]), ("actor_inference", ["reward", "advantage"])):
            for key in keys:
                expected, actual = one.recorded(step, key, call), run.recorded(step, key, call)
                assert actual.keys() == expected.keys() == set(range(BATCH))
                assert all(torch.equal(actual[i], expected[i]) for i in expected), f"{key} of step {step}"
    for line, expected_line in zip(run.metrics, one.metrics, strict=True):
        assert line["deviation"] == expected_line["deviation"] > 0, "bit for bit"
        assert line["loss"] == pytest.approx(expected_line["loss"], abs=1e-9)
        assert line["lr"] == expected_line["lr"]
    assert [line["deviation"] for line in evaluations(run)] == [line["deviation"] for line in evaluations(one)]
    torch.testing.assert_close(run.parameters("actor", TINY), one.parameters("actor", TINY), rtol=0, atol=1e-9)


def test_groups_share_a_prompt_and_nothing_else(one: FinishedRun) -> None:
    rows = set()
    for step in range(STEPS):
        sequences = one.recorded(step, "seq")
        groups = [[sequences[i].tolist() for i in range(first, first + GROUP)] for first in range(0, BATCH, GROUP)]
        for group in groups:
            prompts = [tuple(sequence[: sequence.index(3) + 1]) for sequence in group]  # 3 ends a prompt
            assert len(set(prompts)) == 1
            assert len(set(map(tuple, group))) > 1, "each response has random numbers of its own"
            rows.add(prompts[0])
    assert len(rows) == STEPS * BATCH // GROUP, "an epoch has each row once"


def test_metrics_count_rows_epochs_and_evaluated_groups(one: FinishedRun) -> None:
    for step, line in enumerate(one.metrics):
        assert line["prompts"] == BATCH / GROUP
        sequences = one.recorded(step, "seq").values()
        assert line["tokens"] == sum(map(len, sequences)), "once, whatever the epochs"
    # All 512 rows in eleven batches of at most 50, whose sizes differ, and which two ranks do not divide.
    assert [line["prompts"] for line in evaluations(one)] == [512 / 11] * 2
    latest = one.path / "checkpoints" / "latest" / "actor"
    assert optimizer_steps(read_index(latest), latest) == STEPS * MINI_BATCHES * EPOCHS
    # Linear to 0 over all eight optimizer steps; a step reports the mean of the three that it makes of its four.
    assert [line["lr"] / 1e-3 for line in one.metrics] == pytest.approx([(8 + 7 + 6) / 24, (4 + 3 + 2) / 24])


def test_a_resumed_run_draws_what_it_would_have_drawn(one: FinishedRun, tmp_path: Path) -> None:
    """It goes on from the checkpoint after the first step, as a crash in the second one would have left it."""
    shutil.copytree(one.path, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS}")
    resumed = quickly_finished(tmp_path / "run", JOB, "--resume")
    for key, call in (("seq", "actor_generate"), ("advantage", "actor_inference")):
        expected, actual = one.recorded(STEPS - 1, key, call), resumed.recorded(STEPS - 1, key, call)
        assert all(torch.equal(actual[i], expected[i]) for i in range(BATCH)), key
    assert torch.equal(resumed.parameters("actor", TINY), one.parameters("actor", TINY))


def test_broken_groups_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        found = realhf("run", JOB, "--run-dir", tmp_path / "run", *words)
        assert found.returncode == 2
        assert not (tmp_path / "run").exists()
        return found.stderr

    assert "--rollout.samples-per-prompt=4 does not divide --batch-size=18" in refused("--batch-size", "18")
    said = refused("--evaluation-batch-size", "30", "--num-workers", "1")
    assert "--rollout.samples-per-prompt=4 does not divide the evaluation's batch size=30" in said
