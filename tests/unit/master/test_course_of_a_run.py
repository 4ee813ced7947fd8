"""The course of a run: what the master trains, evaluates and saves, and how the run ends.

Steps, evaluations and checkpoints are lines of a story here; workers say that they are ready, and nothing else.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.base.files import write_atomically
from realhf.master import master as master_module
from realhf.master.master import Master
from realhf.master.milestones import Milestones
from realhf.rundir.checkpoints import step_folder
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.lines import append_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Deadlines
from realhf.rundir.status import EndRequest, read_status, request_end
from realhf.transport import clock as awake
from realhf.transport.messages import Hello, Ready, Shutdown, ToMaster
from tests.unit.master.test_master import Clock, ScriptedServer

STEPS = 7
STEP_S, SAVE_S = 5.0, 3.0  # in all less than what silent workers are given up for
ASKED, NOTICE = EndRequest(reason="asked"), EndRequest(reason="notice", goes_on=True)


class Course:
    """A run of `STEPS` steps of five seconds each, and what came of it.

    `story`: steps, evaluations and checkpoints in their order, with "shut down" for each worker at the end.
    `activities`: what the master said that it was at, whenever it was at something of these.
    `at`: what happens after so many seconds of the run.
    """

    def __init__(self, directory: RunDirectory, **spec: Any):
        evaluate = spec.pop("evaluate", ())
        self.directory, self.story, self.activities = directory, list[str](), list[str]()
        self.statistics: list[dict[str, float]] = []  # that checkpoints were given
        self.unsaved = spec.pop("unsaved", 0)  # checkpoints after so many steps cannot be written
        self.at: list[tuple[float, Callable[[], object]]] = []
        given: dict[str, Any] = {"num_workers": 2, "resume_step": 0, "setup_timeout_s": 60.0, "drift_threshold": 1.5}
        given |= {"tensorboard": False, "wandb_project": None, "trackio_project": None, "stop_early": None}
        given |= {"stop_early_patience": 2, "stop_early_gain": 0.0}
        self.values = spec.pop("values", {})  # of the statistic "right" in evaluations, by step
        given |= {"checkpoint_every_steps": None, "checkpoint_every_minutes": None, **spec}
        evaluations = {} if evaluate == () else {"evaluation": SimpleNamespace(every_steps=evaluate)}
        self.run: Any = SimpleNamespace(
            spec=SimpleNamespace(**given),
            experiment=SimpleNamespace(steps=STEPS, evaluations=evaluations),
            planned_steps=STEPS,
        )
        self.run.deadlines, self.run.initial_steps = Deadlines(), {}

    def end(self) -> tuple[str, str]:
        """Makes the run: its last state and message."""
        clock = Clock()
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = lambda: clock.now_s  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
            patch.setattr(awake, "time", SimpleNamespace(monotonic=loop.time))
            patch.setattr(Master, "_train", self._train)
            patch.setattr(Master, "_evaluate", self._evaluate)
            patch.setattr(master_module, "Saver", lambda *_: _Saver(self))
            patch.setattr(master_module, "Milestones", partial(Milestones, clock=loop.time))
            runner.run(self._made(clock))
        status = read_status(self.directory.status)
        assert status is not None
        return status.state, status.message

    async def _made(self, clock: Clock) -> None:
        for time_s, happens in self.at:
            asyncio.get_running_loop().call_at(time_s, happens)
        script: list[tuple[float, int, ToMaster | Callable[[], ToMaster] | None]] = []
        for worker in range(2):
            script.append((0.0, worker, Hello(worker=worker, pid=worker, host="h")))
            script.append((0.0, worker, Ready(device="cpu")))
        self.master = Master(self.run, self.directory, _Server(self, script, clock))  # type: ignore[arg-type]
        await self.master.run()

    def note_activity(self) -> None:
        activity = read_activity(self.directory.activity("master"))
        assert activity is not None
        self.activities.append(activity.text)

    async def _train(self, first: int, last: int) -> None:
        self.note_activity()
        for step in range(first, last):
            if self.master._dispatcher._ends_soon:
                return
            await asyncio.sleep(STEP_S)
            self.master._step = step + 1
            self.master._statistics = {"loss": 1.0 / (step + 1)}
            self.story.append(f"step {step + 1}")

    async def _evaluate(self, step: int) -> None:
        if self.run.experiment.evaluations and not self.master._dispatcher._ends_soon:
            append_line(
                self.directory.evaluations, {"step": step, **({"right": self.values[step]} if self.values else {})}
            )
            self.story.append(f"evaluation {step}")


class _Saver:
    def __init__(self, course: Course):
        self._course, self.saved_step, self.kept_step = course, 0, None

    async def begin(self, step: int, statistics: dict[str, float]) -> None:
        self._course.story.append(f"checkpoint {step}")
        self._course.statistics.append(statistics)
        self._course.note_activity()
        await asyncio.sleep(SAVE_S)
        if step != self._course.unsaved:
            self.saved_step = step
            step_folder(self._course.directory.checkpoints, step).mkdir(parents=True, exist_ok=True)

    async def settle(self) -> None:
        self._course.story.append("settled")
        self._course.note_activity()

    async def run(self) -> None:
        await asyncio.Event().wait()


class _Server(ScriptedServer):
    def __init__(self, course: Course, script: Any, clock: Clock):
        super().__init__(script, clock)
        self._course = course

    async def send(self, worker: int, message: Any) -> None:
        if isinstance(message, Shutdown):
            self._course.story.append(f"shut down {worker}")


ENDED = ["settled", "shut down 0", "shut down 1"]


def steps(first: int, last: int) -> list[str]:
    return [f"step {step}" for step in range(first, last + 1)]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_a_run_without_evaluations_is_saved_at_its_end(directory: RunDirectory) -> None:
    course = Course(directory)
    assert course.end() == ("done", "")
    assert course.story == [*steps(1, 7), "checkpoint 7", *ENDED]


def test_evaluations_and_checkpoints_have_their_turns(directory: RunDirectory) -> None:
    course = Course(directory, evaluate=2, checkpoint_every_steps=4)
    assert course.end() == ("done", "")
    assert course.story == [
        *("evaluation 0", *steps(1, 2), "evaluation 2", *steps(3, 4), "evaluation 4", "checkpoint 4"),
        *(*steps(5, 6), "evaluation 6", "step 7", "evaluation 7", "checkpoint 7", *ENDED),
    ]


def test_a_run_ends_early(directory: RunDirectory) -> None:
    """After two evaluations without a gain, with checkpoints of the best ones and of its end, though none was due."""
    values = {0: 0.1, 1: 0.2, 2: 0.5, 3: 0.5, 4: 0.4, 5: 0.9}
    course = Course(directory, evaluate=1, stop_early="right", values=values)
    state, message = course.end()
    assert state == "done"
    assert message == (
        "stopped early after step 4: right did not get better in 2 evaluations; it was best after step 2, 0.5; the "
        f"best checkpoint: {directory.checkpoints / 'step-2'}"
    )
    assert course.story == [
        *("evaluation 0", "step 1", "evaluation 1", "checkpoint 1", "step 2", "evaluation 2", "checkpoint 2"),
        *("step 3", "evaluation 3", "step 4", "evaluation 4", "checkpoint 4", *ENDED),
    ]
    assert course.master._saver.kept_step == 2


def test_a_run_that_was_best_before_training_says_so(directory: RunDirectory) -> None:
    course = Course(directory, evaluate=2, stop_early="min:right", values={0: 0.1, 2: 0.2, 4: 0.5})
    state, message = course.end()
    assert state == "done"
    assert message.endswith("best after step 0, 0.1; the best checkpoint: none")


def test_a_run_that_gets_better_makes_all_its_steps(directory: RunDirectory) -> None:
    course = Course(directory, evaluate=3, stop_early="right", values={0: 0.1, 3: 0.2, 6: 0.2, 7: 0.1})
    assert course.end() == ("done", ""), "the last evaluation has no step after it"


def test_as_many_steps_are_begun_as_the_time_to_the_next_checkpoint_has(directory: RunDirectory) -> None:
    """Every fifteen seconds: after a step of five to measure two more, then twelve seconds behind each checkpoint."""
    course = Course(directory, checkpoint_every_minutes=0.25)
    assert course.end() == ("done", "")
    assert course.story == [
        *(*steps(1, 3), "checkpoint 3", *steps(4, 6), "checkpoint 6", "step 7", "checkpoint 7", *ENDED),
    ]
    assert course.activities == [
        *("training, step 1", "training, steps 2 to 3", "checkpoint after step 3"),
        *("training, steps 4 to 6", "checkpoint after step 6", "training, step 7", "checkpoint after step 7"),
        "waiting for the last checkpoint to be written",
    ]
    assert course.statistics == [{"loss": 1.0 / step} for step in (3, 6, 7)]


@pytest.mark.parametrize(("request_", "state"), [(ASKED, "stopped"), (NOTICE, "requeued")])
def test_a_run_that_is_asked_to_end_does_so_after_its_step(
    directory: RunDirectory, request_: EndRequest, state: str
) -> None:
    """With a checkpoint that was not due, and without the evaluation that was: who goes on makes it."""
    course = Course(directory, evaluate=2)
    course.at = [(1.5 * STEP_S, lambda: request_end(directory.stop, request_))]
    assert course.end() == (state, f"ended after step 2, {request_.in_words}")
    assert course.story == ["evaluation 0", "step 1", "step 2", "settled", "checkpoint 2", *ENDED]
    assert course.activities[2] == "checkpoint after step 2, the last one"
    assert course.statistics == [{"loss": 0.5}]


def test_a_checkpoint_is_not_written_twice_when_a_run_is_asked_to_end(directory: RunDirectory) -> None:
    course = Course(directory, checkpoint_every_steps=3)
    course.at = [(3 * STEP_S + 1.5, lambda: request_end(directory.stop, ASKED))]  # while the checkpoint is written
    assert course.end() == ("stopped", "ended after step 3, as was asked")
    assert course.story == [*steps(1, 3), "checkpoint 3", "settled", *ENDED]


def test_one_that_goes_on_and_is_asked_at_once_writes_no_checkpoint(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own is there. Calls have the numbers that they kept in it; the evaluation was made."""
    kept = {"train": {"kl_coef": 0.5}}
    monkeypatch.setattr(
        master_module, "read_state", lambda folder: SimpleNamespace(calls=kept, weights={}, states={}, folder=folder)
    )
    course = Course(directory, resume_step=4, evaluate=2)
    append_line(directory.evaluations, {"step": 4})
    course.at = [(0.5 * STEP_S, lambda: request_end(directory.stop, ASKED))]
    assert course.end() == ("stopped", "ended after step 5, as was asked")
    assert course.story == ["step 5", "settled", "checkpoint 5", *ENDED]
    assert course.master._dispatcher.states == kept
    again = Course(directory, resume_step=4, evaluate=2)  # asked before it begins
    monkeypatch.setattr(Master, "_wait_until_ready", lambda self: asyncio.sleep(5.0))
    assert again.end() == ("stopped", "ended after step 4, as was asked")
    assert again.story == ["settled", *ENDED]


def test_one_that_goes_on_makes_the_evaluation_that_is_missing(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_module, "read_state", lambda folder: SimpleNamespace(calls={}, weights={}, states={}))
    append_line(directory.evaluations, {"step": 0})
    course = Course(directory, resume_step=6, evaluate=3)
    assert course.end() == ("done", "")
    assert course.story == ["evaluation 6", "step 7", "evaluation 7", "checkpoint 7", *ENDED]
    course = Course(directory, resume_step=5, evaluate=3)  # none is due there
    assert course.end() == ("done", "")
    assert course.story[0] == "step 6"


def test_the_last_step_s_evaluation_is_left_to_whoever_goes_on(directory: RunDirectory) -> None:
    course = Course(directory, evaluate=None)
    course.at = [(6.5 * STEP_S, lambda: request_end(directory.stop, ASKED))]
    assert course.end() == ("stopped", "ended after step 7, as was asked")
    assert course.story == ["evaluation 0", *steps(1, 7), "settled", "checkpoint 7", *ENDED]


def test_a_run_that_is_asked_when_all_is_made_is_done(directory: RunDirectory) -> None:
    """Its last evaluation is there, so nothing is left to whoever would go on."""
    course = Course(directory, evaluate=None)
    append_line(directory.evaluations, {"step": STEPS})
    course.at = [(6.5 * STEP_S, lambda: request_end(directory.stop, ASKED))]
    assert course.end() == ("done", "")
    assert course.story == ["evaluation 0", *steps(1, 7), "checkpoint 7", *ENDED]


def test_a_run_changes_its_plan_behind_a_checkpoint_that_was_written(directory: RunDirectory) -> None:
    course = Course(directory, checkpoint_every_steps=2, unsaved=4)
    course.at = [(3.5 * STEP_S, lambda: write_atomically(directory.switch, b""))]
    assert course.end() == ("replan", "")
    assert course.story == [
        *(*steps(1, 2), "checkpoint 2", *steps(3, 4), "checkpoint 4", "settled"),
        *(*steps(5, 6), "checkpoint 6", "settled", *ENDED),
    ]


def test_a_run_that_is_at_its_end_changes_its_plan_no_more(directory: RunDirectory) -> None:
    course = Course(directory)
    write_atomically(directory.switch, b"")
    assert course.end() == ("done", "")
    assert course.story == [*steps(1, 7), "checkpoint 7", *ENDED]
