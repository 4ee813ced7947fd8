"""`realhf verify` on one process, of runs of four that were stopped, restarted, shrunk and planned anew."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from realhf import cli
from realhf.data import sort_task
from realhf.dataflow.plan import save_plan
from realhf.launch.launcher import Exit
from realhf.launch.process import Job as StartedJob
from realhf.lifecycle.verify import VerifyRequest, verify
from realhf.rundir.events import note
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import worker_name
from realhf.rundir.status import EndRequest, request_end
from tests.e2e.forked import ForkedLauncher
from tests.e2e.runs import ROOT, SMALL, FinishedRun
from tests.e2e.test_algorithms_plans import COPIED, Job, Pattern, at, graph_of, of, ready, rollouts_of
from tests.e2e.test_elastic import hurried_search

pytestmark = pytest.mark.distributed

GRPO = rollouts_of("grpo", *COPIED, *of("grpo", samples_per_prompt=4))
PPO = rollouts_of("ppo", *COPIED, *of("ppo", normalise_values=True, epochs=2), models=("actor", "critic"))
# dp x micro-batches of a training is 4: the parts of a mini-batch's gradient.
FOUR = Pattern(
    train=(at(0, 2, dp=2, tp=2), at(0, dp=4)),
    generate=(at(0, dp=2, tp=2), at(0, 2, dp=4)),
    infer=(at(0, tp=2, pp=2), at(2, dp=2), at(3)),
)
OTHER = Pattern(
    train=(at(0, 4, pp=2, tp=2), at(0, 2, dp=2, pp=2)), generate=(at(0, pp=2, dp=2),), infer=(at(0, dp=4), at(1, tp=2))
)
TWO = Pattern(train=(at(0, 4, pp=2),), generate=(at(0, tp=2),), infer=(at(0, dp=2), at(1)))
# All on one of four devices, but one call: any search finds a better plan.
POOR = Pattern(train=(at(0, 4),), generate=(at(0),), infer=(at(3), at(0)))
End = tuple[Literal["stop", "kill", "replan"], int]


class MortalLauncher(ForkedLauncher):
    """Ends its starts, one after the other, as `ends` says: after so many further steps the run is asked to stop, or
    the last worker is killed, or it stands still until another plan has been searched, since drift is noted."""

    ends: Sequence[End] = ()

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._job: StartedJob | None = None
        self._end: End | None = None
        self._still: int | None = None  # the process that stands still

    def start(self, job: StartedJob) -> None:
        super().start(job)
        self._job, self._end = job, None
        if type(self).ends:
            (how, further), *type(self).ends = type(self).ends
            self._end = how, len(read_lines(job.directory.metrics, step_line).values) + further

    def poll(self) -> list[Exit]:
        assert self._job is not None
        directory, last = self._job.directory, worker_name(len(self._job.workers) - 1)
        if self._end and len(read_lines(directory.metrics, step_line).values) >= self._end[1]:
            pid = next(process.pid for name, process in self._running if name == last)
            match self._end[0]:
                case "stop":
                    request_end(directory.stop, EndRequest(reason="asked"))
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "replan":
                    self._still = pid
                    os.kill(pid, signal.SIGSTOP)
                    note(directory.events, "drift", self._end[1], "as a test says")
            self._end = None
        if self._still and b'"proposal"' in directory.events.read_bytes():
            os.kill(self._still, signal.SIGCONT)
            self._still = None
        return super().poll()

    def place(self, worker: int) -> str:
        return str(worker)

    def room(self, avoided: frozenset[str]) -> int:
        assert self._job is not None
        return len(self._job.workers) - len(avoided - self._job.avoided)


class Life:
    """A run of a job on four workers, in the folder `path`."""

    def __init__(self, folder: Path, job: Job, *words: str):
        self.path, self._folder, self._job = folder / "run", folder, job
        data = sort_task.ensure(folder / "data")
        own = (*SMALL, "--batch-size", "16", "--mini-batches", "2", *words, "--data", data / job.data)
        rates = [word for model in job.models for word in (f"--{model}.lr", "2e-3", f"--{model}.warmup-steps", "0")]
        own = (*own, "--tokenizer", data / "tokenizer.json", *rates, *job.words)
        self._words = tuple(map(str, own))

    def begin(self, *words: str, ends: Sequence[End]) -> int:
        return self._carry_out(*self._words, "--checkpoint-every", "2", *self.under(FOUR), *words, ends=ends)

    def go_on(self, *words: str, ends: Sequence[End] = ()) -> int:
        return self._carry_out("--resume", *words, ends=ends)

    def under(self, pattern: Pattern) -> tuple[str, str]:
        path = self._folder / "plan.json"
        save_plan(pattern.plan(graph_of(self._job, self._words)), path)
        return "--plan", str(path)

    def _carry_out(self, *words: str, ends: Sequence[End]) -> int:
        """The exit code of `realhf run`, all of whose starts have ended as they should."""
        MortalLauncher.ends = ends
        launcher = ("--launcher", f"{__name__}:MortalLauncher")
        code = cli.main(["run", str(ready(self._job)), "--run-dir", str(self.path), *words, *launcher])
        assert not MortalLauncher.ends
        return code

    def parts(self) -> dict[str, list[int]]:
        """The steps that the run has recorded, by the start that made them: what it was, and how many came before."""
        events = [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]
        starts = [each for each in events if each["event"] in ("started", "resumed", "restarted", "replanned")]
        found: dict[str, list[int]] = {}
        for step in (line["step"] for line in FinishedRun(self.path).metrics):
            last = max(i for i, start in enumerate(starts) if start["step"] < step)
            found.setdefault(f"{last} {starts[last]['event']}", []).append(step)
        return found

    def workers(self, step: int) -> int:
        return int(FinishedRun(self.path).metrics[step - 1]["num_workers"])

    def check(self, step: int, *, tolerance: float = 0.0) -> int:
        """Executes a step, on one process; nothing may differ. Returns how many steps that took."""
        request = VerifyRequest(
            run_dir=self.path, step=step, num_workers=1, tolerance=tolerance, launcher=ForkedLauncher
        )
        found = verify(request, lambda _: None)
        assert not [str(each) for each in found.found]
        assert (found.largest is None) == (tolerance == 0), "without the option sums are rounded in another order"
        return found.compared

    def forget_checkpoints(self) -> None:
        for checkpoint in (self.path / "checkpoints").glob("step-*"):
            shutil.rmtree(checkpoint)


LAYOUT = ("--reproducible", "layout", "--dtype")


def test_all_bits_of_a_run_that_broke_and_was_planned_anew_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker was killed and the run restarted; then two workers went on, under another plan and for more steps."""
    monkeypatch.chdir(ROOT)
    life = Life(tmp_path, GRPO, *LAYOUT, "bfloat16", "--actor.schedule", "constant")
    assert life.begin("--steps", "5", "--recover", "auto", ends=[("kill", 3)]) == 0
    assert life.go_on("--steps", "6", *life.under(TWO)) == 0
    assert [*life.parts()] == ["0 started", "1 restarted", "2 resumed"]
    assert (life.workers(5), life.workers(6)) == (4, 2)
    life.forget_checkpoints()
    assert life.check(6) == 6


@pytest.mark.slow
def test_a_run_that_changed_its_plan_on_its_way_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--replan switch`: another plan is searched with measured times, and the run goes on under it."""
    monkeypatch.chdir(ROOT)
    life = Life(tmp_path, GRPO, *LAYOUT, "float32")
    switch = ("--replan", "switch", "--switch-cost-s", "0", "--evaluations", "1000")
    with hurried_search(life.path):
        assert life.begin("--steps", "12", *life.under(POOR), *switch, ends=[("replan", 5)]) == 0
    parts = life.parts()
    assert [*parts] == ["0 started", "1 replanned"]
    assert len({FinishedRun(life.path).metrics[steps[-1] - 1]["plan"] for steps in parts.values()}) == 2
    for steps in parts.values():
        assert life.check(steps[-1]) <= 2
    life.forget_checkpoints()
    assert life.check(12) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "words", "tolerance"),
    [(PPO, (*LAYOUT, "float32"), 0), (GRPO, (*LAYOUT, "bfloat16"), 0), (PPO, ("--dtype", "float64"), 1e-7)],
)
def test_every_part_of_a_run_is_that_of_one_process(
    job: Job, words: tuple[str, ...], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and resumed; restarted after a worker was killed; shrunk after it was killed twice, under a plan that was
    searched; stopped, and resumed on four workers under another plan."""
    monkeypatch.chdir(ROOT)
    life = Life(tmp_path, job, *words)
    assert life.begin("--steps", "24", ends=[("stop", 2)]) == 130
    recovery = ("--recover", "auto", "--min-workers", "2", "--evaluations", "300")
    assert life.go_on(*recovery, ends=[("kill", 4), ("kill", 4), ("kill", 0), ("stop", 2)]) == 130
    assert life.go_on(*life.under(OTHER)) == 0
    parts = life.parts()
    assert [*parts] == ["0 started", "1 resumed", "2 restarted", "4 restarted", "5 resumed"]
    assert [life.workers(steps[-1]) for steps in parts.values()] == [4, 4, 4, 3, 4]
    for steps in parts.values():
        assert life.check(steps[-1], tolerance=tolerance) <= 2
    life.forget_checkpoints()
    assert life.check(24, tolerance=tolerance) == 24
