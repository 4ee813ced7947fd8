"""Runs as jobs that wait for each other, as arrays, and planned in their jobs, under a real SLURM."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from testbed.cluster import Testbed

from realhf.dataflow.plan import load_plan
from realhf.lifecycle.new import new_run
from realhf.rundir.starts import read_launched
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ACTOR, ROOT, FinishedRun, command, realhf
from tests.e2e.test_resume import statistics
from tests.unit.lifecycle.requests import request_of
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slurm

SFT = "experiments/sft.py"
SLURM = (
    *("--launcher", "slurm", "--nodes", "1", "--gpus-per-node", "1", "--cpu-only", "--network-interface", "lo"),
    *("--evaluations", "100"),
)
LOCAL = ("--num-workers", "1", "--evaluations", "100")
NEVER = ("--sbatch=--begin=now+1hour",)  # it waits in the queue for as long as the test goes on


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    data = tmp_path_factory.mktemp("sorting") / "data"
    return ("--steps", "2", "--batch-size", "8", "--no-evaluate", "--data-dir", str(data))


@pytest.fixture(autouse=True)
def empty_queue(slurm_testbed: Testbed) -> Iterator[None]:
    """Whatever a test does, no job is left."""
    yield
    wait_until(lambda: not slurm_testbed.run("squeue", "-h").stdout, "the queue is empty")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `realhf run`, to be interrupted by the test; it prints into `output.txt`."""
    made: list[subprocess.Popen[bytes]] = []

    def start(*words: str | Path) -> subprocess.Popen[bytes]:
        with (tmp_path / "output.txt").open("wb") as file:
            made.append(subprocess.Popen(command("run", *words), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
        return made[-1]

    yield start
    for process in made:
        process.terminate()
        process.wait()


def job_of(run_dir: Path) -> str:
    launched = read_launched(run_dir / "launcher/job.json")
    assert launched is not None
    return launched.job


def shown(cluster: Testbed, run_dir: Path) -> str:
    return cluster.run("scontrol", "show", "job", "-o", job_of(run_dir)).stdout


@pytest.mark.slow
def test_a_chain_is_what_its_stages_are_by_hand(slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = (SFT, *small, "--run-dir", first, *SLURM, "--then", SFT, *small, "--model", first, "--run-dir", second)
    done = realhf("run", *words)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Dependency=(null)" in shown(slurm_testbed, first)
    # The second was submitted before there was anything to start from, and planned by its job.
    assert (second / "launcher/request.json").exists()
    assert not (first / "launcher/request.json").exists()
    assert f"--dependency=afterok:{job_of(first)}\n" in (second / "launcher/job.sbatch").read_text()
    by_hand = [quickly_finished(tmp_path / "a", "sft", *small, *LOCAL)]
    by_hand.append(quickly_finished(tmp_path / "b", "sft", *small, "--model", tmp_path / "a", *LOCAL))
    for run_dir, expected in zip((first, second), by_hand, strict=True):
        got = FinishedRun(run_dir)
        assert statistics(got) == statistics(expected)
        assert torch.equal(got.parameters("sft", ACTOR), expected.parameters("sft", ACTOR))


def test_a_stage_does_not_begin_where_the_one_before_has_failed(
    slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = (SFT, *small, "--run-dir", first, *SLURM, "--setup-line", "[ ! -e no-such-file ] && exit 17")
    words = (*words, "--then", SFT, *small, "--setup-line", ":", "--model", first, "--run-dir", second)
    done = realhf("run", *words)
    assert done.returncode == 1, done.stderr[-4000:]
    assert "FAILED (NonZeroExitCode, exit code 17:0)" in done.stderr
    assert f"not started, since the stage before, {first}, has not ended well: {second}" in done.stderr
    assert first.exists()
    assert not second.exists()


@pytest.mark.slow
def test_without_a_launching_process_a_stage_says_why_it_has_not_begun(
    slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    words = (SFT, *small, "--run-dir", first, *SLURM, "--detach", "--then", SFT, *small)
    done = realhf(
        "run", *words, "--model", tmp_path / "nonesuch", "--run-dir", second, "--then", SFT, *small, "--run-dir", third
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"job {job_of(third)}: the run goes on by itself: realhf status | attach | stop {third}" in done.stderr
    assert re.search(r"third: starting\njob \d+: PENDING \(Dependency\)", realhf("status", third).stdout)
    wait_until(lambda: "JobState=CANCELLED" in shown(slurm_testbed, third), lambda: shown(slurm_testbed, third))
    assert realhf("attach", first).returncode == 0
    told = realhf("attach", second)
    assert told.returncode == 2
    assert f"model '{tmp_path}/nonesuch': no such directory" in told.stderr
    assert f"model '{tmp_path}/nonesuch': no such directory" in realhf("status", second).stdout
    reason = f"not started, since the stage before, {second}, failed"
    assert reason in realhf("status", third).stdout
    told = realhf("attach", third)
    assert (told.returncode, told.stderr.splitlines()[-1]) == (2, f"error: {reason}")


def test_a_refused_stage_leaves_nothing(slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = (SFT, *small, "--run-dir", first, *SLURM, *NEVER, "--then", SFT, *small, "--run-dir", second)
    done = realhf("run", *words, "--sbatch=--constraint=nonesuch")
    assert done.returncode == 2
    assert "--sbatch=--constraint=nonesuch: partition main has no features" in done.stderr
    assert not first.exists()
    assert not second.exists()


def test_the_end_of_a_chain_s_command_ends_the_chain(
    slurm_testbed: Testbed, held: Callable[..., subprocess.Popen[bytes]], small: tuple[str, ...], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = (SFT, *small, "--run-dir", first, *SLURM, *NEVER, "--plan-in-job", "--then", SFT, *small)
    process = held(*words, "--run-dir", second)
    wait_until((second / "launcher/job.json").exists, lambda: (tmp_path / "output.txt").read_text())
    wait_until(lambda: "PENDING (BeginTime)" in (tmp_path / "output.txt").read_text(), "the first job waits")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert slurm_testbed.run("squeue", "-h").stdout == ""
    assert not first.exists()
    assert not second.exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_launched", [True, False])
def test_a_stage_that_is_stopped_in_the_queue(
    is_launched: bool,
    slurm_testbed: Testbed,
    held: Callable[..., subprocess.Popen[bytes]],
    small: tuple[str, ...],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    words = (SFT, *small, "--run-dir", run_dir, *SLURM, *NEVER, "--plan-in-job")
    process = held(*words, *(() if is_launched else ("--detach",)))
    wait_until((run_dir / "launcher/job.json").exists, lambda: (tmp_path / "output.txt").read_text())
    stopped = realhf("stop", run_dir)
    assert stopped.stdout == "stopped after step 0 of 2; nothing saved\n", stopped.stderr
    assert process.wait(PATIENCE_S) == (130 if is_launched else 0)
    assert realhf("attach", run_dir).returncode == 130


@pytest.mark.slow
def test_a_run_that_its_job_plans_has_the_plan_of_the_login_node(
    slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path
) -> None:
    words = (SFT, *small, *SLURM, "--gpus-per-node", "2", "--ignore-runs")
    done = realhf("run", *words, "--run-dir", tmp_path / "run", "--plan-in-job")
    assert done.returncode == 0, done.stderr[-4000:]
    there, here = load_plan(tmp_path / "run/plan.json"), new_run(request_of(*words)).plan
    assert there.calls == here.calls
    assert (there.num_devices, there.devices_per_node) == (2, 2) == (here.num_devices, here.devices_per_node)


def test_nodes_that_the_login_node_does_not_know_are_planned_for_in_the_job(
    slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path
) -> None:
    """The GPUs that SLURM has here are none of NVIDIA's, which the job finds and the login node cannot."""
    run_dir = tmp_path / "run"
    words = (SFT, *small, "--run-dir", run_dir, "--launcher", "slurm", "--network-interface", "lo")
    done = realhf("run", *words, "--gpus-per-node", "1", "--ignore-runs")
    assert done.returncode == 2, done.stderr[-4000:]
    assert re.search(r"job \d+: FAILED", done.stderr)
    assert "CUDA_VISIBLE_DEVICES=0: there is no GPU 0" in done.stderr
    assert not run_dir.exists()
    done = realhf("run", *words)
    assert done.returncode == 2
    assert "nothing here tells the devices of the job's nodes: give --gpus-per-node" in done.stderr
    assert not run_dir.exists()


@pytest.mark.slow
def test_a_sweep_is_an_array_that_is_compared(slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    done = realhf("run", SFT, *small, "--run-dir", folder, "--seeds", "2", *SLURM)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in folder.iterdir()) == ["array.sbatch", "compare.html", "seed-0", "seed-1"]
    array, _, task = job_of(folder / "seed-1").partition("_")
    assert (job_of(folder / "seed-0"), task) == (f"{array}_0", "1")
    assert f"ArrayJobId={array} ArrayTaskId=1" in shown(slurm_testbed, folder / "seed-1")
    assert re.search(r"runs +\n.*\n +seed-0 +seed-1", done.stdout)
    expected = quickly_finished(tmp_path / "hand", "sft", *small, "--seed", "1", *LOCAL)
    assert statistics(FinishedRun(folder / "seed-1")) == statistics(expected)


@pytest.mark.slow
def test_a_run_of_an_array_that_fails_leaves_the_others(
    slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    fails = '[ "$SLURM_ARRAY_TASK_ID" != 0 ] || exit 17'
    done = realhf("run", SFT, *small, "--run-dir", folder, "--seeds", "2", "--setup-line", fails, *SLURM)
    assert done.returncode == 1, done.stderr[-4000:]
    assert f"job {job_of(folder / 'seed-0')}: FAILED (NonZeroExitCode, exit code 17:0)" in done.stderr
    assert done.stderr.endswith(f"{folder}/seed-0 has ended with exit code 1\n")
    assert json.loads((folder / "seed-1/status.json").read_text())["state"] == "done"
    assert (folder / "compare.html").exists()


def test_a_run_of_an_array_that_is_stopped_in_the_queue_leaves_the_others(
    slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    words = (SFT, *small, "--run-dir", folder, "--seeds", "3", "--at-most", "1", *SLURM, *NEVER, "--plan-in-job")
    done = realhf("run", *words, "--detach")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "#SBATCH --array=0-2%1\n" in (folder / "array.sbatch").read_text()
    assert realhf("stop", folder / "seed-1").stdout == "stopped after step 0 of 2; nothing saved\n"
    assert realhf("attach", folder / "seed-1").returncode == 130
    array = job_of(folder / "seed-0").partition("_")[0]
    assert slurm_testbed.run("squeue", "-h", "-r", "--format=%i").stdout.split() == [f"{array}_0", f"{array}_2"]
    slurm_testbed.run("scancel", array)


@pytest.mark.slow
def test_a_run_of_an_array_starts_once_more_by_itself(
    slurm_testbed: Testbed, small: tuple[str, ...], tmp_path: Path
) -> None:
    """The one whose job has the array's own number too."""
    folder, gate = tmp_path / "sweep", tmp_path / "gate"
    waits = f"until [ -e {gate} ]; do sleep 0.1; done"
    words = (SFT, *small, "--run-dir", folder, "--seeds", "2", *SLURM, "--until-done", "--time-limit", "10")
    done = realhf("run", *words, "--plan-in-job", "--detach", "--setup-line", waits)
    assert done.returncode == 0, done.stderr[-4000:]
    last = folder / "seed-1"
    wait_until(lambda: "JobState=RUNNING" in shown(slurm_testbed, last), lambda: shown(slurm_testbed, last))
    array = job_of(last).partition("_")[0]
    assert f"JobId={array} ArrayJobId={array} ArrayTaskId=1" in shown(slurm_testbed, last)
    slurm_testbed.run("scontrol", "requeue", job_of(last))
    wait_until(lambda: "JobState=PENDING" in shown(slurm_testbed, last), lambda: shown(slurm_testbed, last))
    assert "JobState=RUNNING" in shown(slurm_testbed, folder / "seed-0")
    gate.touch()
    slurm_testbed.run("scontrol", "update", f"JobId={job_of(last)}", "StartTime=now+3")
    for name in ("seed-0", "seed-1"):
        assert realhf("attach", folder / name).returncode == 0
        assert json.loads((folder / name / "status.json").read_text())["state"] == "done"


def test_the_end_of_a_sweep_s_command_ends_the_array(
    slurm_testbed: Testbed, held: Callable[..., subprocess.Popen[bytes]], small: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    process = held(SFT, *small, "--run-dir", folder, "--seeds", "3", "--at-most", "1", *SLURM, *NEVER)
    wait_until((folder / "seed-2/launcher/job.json").exists, lambda: (tmp_path / "output.txt").read_text())
    wait_until(lambda: "PENDING (BeginTime)" in (tmp_path / "output.txt").read_text(), "the first job waits")
    assert "#SBATCH --array=0-2%1\n" in (folder / "array.sbatch").read_text()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 130
    assert slurm_testbed.run("squeue", "-h").stdout == ""
    assert sorted(path.name for path in folder.iterdir()) == ["array.sbatch", "seed-0"]  # as a run that is interrupted
