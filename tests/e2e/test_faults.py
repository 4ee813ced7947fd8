"""What a person sees when a run breaks: who broke it and in which call, soon, with nothing left running."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.report.run_status import RunStatus, read_run_status
from realhf.rundir.paths import RunDirectory
from tests.e2e.runs import ROOT, command
from tests.waiting import wait_until

pytestmark = pytest.mark.distributed

BOTH, FIRST, SECOND = CallPlan(devices=(0, 2), dp=2), CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
# Every step has collectives, transfers and calls that only one of the two workers makes.
PPO_PLAN = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": BOTH,
        "actor_train_step": BOTH,
        "reference_inference": FIRST,
        "reward_inference": SECOND,
        "critic_inference": SECOND,
        "critic_train_step": SECOND,
    },
)
CALL = r"(actor_generate|actor_train_step|critic_inference|critic_train_step|reward_inference|reference_inference)"


@dataclass
class StartedRun:
    """A `realhf run` in a process of its own."""

    path: Path
    process: subprocess.Popen[bytes]
    output: Path

    def wait_for_step(self, step: int) -> None:
        """Returns when `step` steps have ended."""
        metrics = self.path / "metrics.jsonl"

        def has_ended() -> bool:
            assert self.process.poll() is None, f"ended early:\n{self.text}"
            return metrics.exists() and metrics.read_bytes().count(b"\n") >= step

        wait_until(has_ended, lambda: f"step {step}:\n{self.text}")

    def find(self, module: str, index: int | None = None) -> psutil.Process:
        """The process of the master (`realhf.master`) or of worker `index` (`realhf.worker`)."""
        for process in self.living():
            if module in process.cmdline() and (
                index is None or process.environ().get("REALHF_WORKER_INDEX") == str(index)
            ):
                return process
        raise AssertionError(f"no process of {module} {index}")

    def living(self) -> list[psutil.Process]:
        """All processes that have the run directory in their command line, that of the command included."""
        found = []
        for process in psutil.process_iter():
            try:
                if any(str(self.path) in word for word in process.cmdline()) and process.status() != "zombie":
                    found.append(process)
            except psutil.NoSuchProcess:
                pass
        return found

    def end(self) -> int:
        """The command's exit code; it has to come and to leave no process behind."""
        wait_until(lambda: self.process.poll() is not None, lambda: f"the end:\n{self.text}")
        code = self.process.returncode
        assert not self.living(), "processes are left"
        assert "Traceback" not in self.text.partition("error: ")[0]
        return code

    @property
    def text(self) -> str:
        """What the command printed."""
        return self.output.read_text()

    @property
    def message(self) -> str:
        """What it printed as the error."""
        assert "\nerror: " in f"\n{self.text}", self.text
        return self.text.partition("error: ")[2]

    @property
    def standing(self) -> RunStatus:
        """What `realhf status` says, asked when the run last gave a sign of life."""
        return read_run_status(RunDirectory(self.path), now_s=float(str(self.status["updated"])))

    @property
    def status(self) -> dict[str, object]:
        return json.loads((self.path / "status.json").read_bytes())


StartRun = Callable[..., StartedRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartRun]:
    """Starts an experiment of many small steps on two workers; nothing survives the test, whatever happens in it."""
    started: list[StartedRun] = []

    def start(experiment: str | Path, plan: ExecutionPlan, *words: str) -> StartedRun:
        save_plan(plan, tmp_path / "plan.json")
        run_dir, output = tmp_path / "run", tmp_path / "output.txt"
        small = ("--steps", "10000", "--batch-size", "8", "--plan", str(tmp_path / "plan.json"))
        # No deadline of a call helps: what ends a run in time is that somebody notices.
        patient = ("--call-timeout-s", "3600", "--setup-timeout-s", "3600")
        with output.open("wb") as file:
            process = subprocess.Popen(
                command("run", experiment, "--run-dir", run_dir, *small, *patient, *words),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        started.append(StartedRun(run_dir, process, output))
        return started[-1]

    yield start
    for run in started:
        for process in run.living():
            process.kill()
        run.process.wait()


def start_ppo(start: StartRun, *words: str) -> StartedRun:
    run = start("experiments/ppo.py", PPO_PLAN, "--no-evaluate", "--mini-batches", "1", *words)
    run.wait_for_step(1)
    return run


def test_a_worker_is_killed(start: StartRun) -> None:
    run = start_ppo(start)
    before = run.standing
    assert (before.state, before.speed is not None, before.remaining_s is not None) == ("running", True, True)
    run.find("realhf.worker", 1).kill()
    assert run.end() == 1
    last = rf"(waiting, after )?{CALL} of step \d+: (compute|transfer|reallocation)"
    assert re.match(rf"worker-1 was killed by signal 9 \(SIGKILL\); last activity: {last}; log: ", run.message)
    assert str(run.path / "logs/worker-1.log") in run.message
    assert run.status["state"] == "failed"
    assert "worker-1" in str(run.status["message"])
    after = run.standing
    assert (after.state, after.message) == ("failed", run.status["message"])
    assert re.fullmatch(last, str(after.processes[2].activity))


def test_the_master_is_killed(start: StartRun) -> None:
    run = start_ppo(start)
    run.find("realhf.master").kill()
    assert run.end() == 1
    assert run.message.startswith("master was killed by signal 9 (SIGKILL)")
    assert str(run.path / "logs/master.log") in run.message
    assert run.status["state"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_command_is_told_to_end(number: signal.Signals, start: StartRun) -> None:
    run = start_ppo(start)
    run.process.send_signal(number)
    assert run.end() == 130
    planned, needs, data, first, *_, last, saved, anew = run.text.rstrip().splitlines()
    assert planned.startswith("planned for 1 x 2 cpu with ")
    assert needs.startswith("predicted: at most ")
    assert data.startswith("data set ")
    assert first == f"starting the master and 2 workers; logs in {run.path / 'logs'}"
    assert last == "interrupted"
    why = "no checkpoint was due before step 10000; --checkpoint-every N saves on the way"
    assert saved == f"nothing was saved: {why}"
    assert re.match(r"start anew with: realhf run experiments/ppo\.py .*--steps 10000 .*--run-dir \S+/run-2$", anew)
    assert run.status["state"] == "interrupted"
    assert run.status["message"] == f"{saved}\n{anew}"
    assert run.status["step"] == (run.path / "metrics.jsonl").read_bytes().count(b"\n")


@pytest.mark.slow
def test_an_impatient_person_interrupts_twice(start: StartRun) -> None:
    run = start_ppo(start)
    run.find("realhf.worker", 0).suspend()  # it does not follow the first request
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.status["state"] == "interrupted"


@pytest.mark.slow
def test_the_command_is_killed(start: StartRun) -> None:
    """Then nobody is left to say anything, and nobody is left."""
    run = start_ppo(start)
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not run.living(), "all processes end")


def test_the_command_is_told_to_end_while_it_starts(start: StartRun) -> None:
    run = start("experiments/ppo.py", PPO_PLAN, "--no-evaluate", "--mini-batches", "1")
    wait_until((run.path / "logs/worker-1.log").exists, "the start of processes")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.status["state"] == "interrupted"


@pytest.mark.slow
def test_a_worker_is_stuck(start: StartRun) -> None:
    """Its peer runs into the same time limit, waiting for it; the blame is the stuck one's."""
    run = start_ppo(
        start, "--call-timeout-s", "15", "--architecture.num-layers", "1"
    )  # its calls take some hundredths of that
    run.find("realhf.worker", 1).suspend()
    assert run.end() == 1
    assert re.match(
        rf"worker 1 has been silent for \d+ s; it was in (data transfer for )?{CALL} of step \d+", run.message
    )
    assert str(run.path / "logs/worker-1.log") in run.message


EXPERIMENT = """
from dataclasses import dataclass
from typing import ClassVar

from realhf.api.decorator import auto
from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.dataflow.graph import TRAIN_STEP, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.data import sort_task
from realhf.data.datasets import SFTDataset


@dataclass(frozen=True, kw_only=True)
class Lesson(InterfaceConfig):
    implementation: ClassVar[str] = "lesson_interface:LessonInterface"
    sequence_keys: ClassVar[tuple[str, ...]] = ("tokens",)


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class School:
    seed: int = 0
    steps: int = 3
    batch_size: int = 8

    @property
    def rpcs(self):
        return [
            ModelFunctionCallDef(
                model_name="pupil",
                model_type=sort_task.SORT_MODEL,
                interface_type=TRAIN_STEP,
                interface_impl=Lesson(),
                input_data=["tokens", "prompt_length"],
            )
        ]

    @property
    def models(self):
        return {"pupil": ModelSetup(optimizer=OptimizerConfig())}

    @property
    def dataset(self):
        data = sort_task.ensure("runs/data")
        return SFTDataset(
            path=str(data / "sft.jsonl"),
            tokenizer=str(data / "tokenizer.json"),
            max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
        )
"""

# The first worker goes on into a collective that the second never joins.
INTERFACE = """
import os

import torch

from realhf.engine.interface import CallResult


class LessonInterface:
    def __init__(self, config):
        self.config = config

    def train_step(self, model, mini_batches, context):
        if context.step == 1 and os.environ["REALHF_WORKER_INDEX"] == "1":
            THE_USERS_LINE
        total = context.sum_over_data_parallel(torch.ones(1))
        return CallResult(stats={"present": (float(total), 1.0)})
"""


def start_school(start: StartRun, folder: Path, line: str) -> tuple[StartedRun, Path]:
    """A run whose second worker comes to `line` in step 2, and the file of its interface."""
    (folder / "school.py").write_text(EXPERIMENT)
    interface = folder / "lesson_interface.py"
    interface.write_text(INTERFACE.replace("THE_USERS_LINE", line))
    return start(folder / "school.py", ExecutionPlan(num_devices=2, calls={"pupil_train_step": BOTH})), interface


def line_of(file: Path, text: str) -> int:
    return 1 + next(i for i, line in enumerate(file.read_text().splitlines()) if text in line)


def test_an_interface_beside_the_experiment_raises(start: StartRun, tmp_path: Path) -> None:
    run, interface = start_school(start, tmp_path, 'raise ValueError("the teacher has gone home")')
    assert run.end() == 1
    assert run.message.startswith("worker 1 failed in pupil_train_step of step 2")
    assert str(run.path / "logs/worker-1.log") in run.message
    assert f'File "{interface}", line {line_of(interface, "raise")}, in train_step' in run.message
    assert run.message.count("  File ") == 1, "the user's frames alone"
    assert "\nValueError: the teacher has gone home\n" in run.message
    assert "model_worker.py" in (run.path / "logs/worker-1.log").read_text(), "all frames"
    assert run.status["state"] == "failed"
    first_step = msgspec.json.decode((run.path / "metrics.jsonl").read_bytes())
    assert first_step["present"] == 2.0, "the step before went well, on both workers"


@pytest.mark.slow
def test_an_interface_returns_a_statistic_that_is_no_pair(start: StartRun, tmp_path: Path) -> None:
    line = 'return CallResult(stats={"present": 3.0})'
    run, interface = start_school(start, tmp_path, line)
    assert run.end() == 1
    first, second, *_ = run.message.splitlines()
    log = run.path / "logs/worker-1.log"
    assert re.fullmatch(
        rf"worker 1 failed in pupil_train_step of step 2; log: {re.escape(str(log))} \(host .*\)", first
    )
    assert second == (
        f"pupil_train_step: LessonInterface.train_step ({interface}, line {line_of(interface, 'def train_step')}): "
        "statistic 'present' is 3.0, must be a pair (sum, weight) of finite numbers, the weight at least 0; its mean "
        "is sum / weight, and mean_of(tensor) makes such a pair"
    )


@pytest.mark.slow
def test_an_interface_ends_its_process(start: StartRun, tmp_path: Path) -> None:
    """The other worker waits for it in a collective, and says that its peer is gone."""
    run, _ = start_school(start, tmp_path, "os._exit(7)")
    assert run.end() == 7
    assert run.message.startswith(
        "worker-1 ended with exit code 7; last activity: pupil_train_step of step 2: compute; log: "
    )
    assert run.status["blamed"] == []
