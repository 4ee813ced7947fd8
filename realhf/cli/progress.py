"""The progress that a person sees during a run, and the table at its end."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from realhf.base.durations import duration
from realhf.cli.output import Output, Phases, number_text, table_of, wide_output
from realhf.cli.trends import trends_table
from realhf.lifecycle.advice import export_command
from realhf.lifecycle.controller import Listener
from realhf.lifecycle.request import RunRequest
from realhf.report.curves import main_names, trends_of
from realhf.report.run_data import CallTime, call_times, read_run
from realhf.report.run_status import SPEED_STEPS, speed_of
from realhf.rundir.events import event_line
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.lines import Tail, evaluation_line, step_line
from realhf.rundir.paths import MASTER, RunDirectory, worker_name, workers_in_words
from realhf.rundir.run import Run

# Statistics in a line of a log, of those that matter most.
NUM_SHOWN = 10
BAR_WIDTH, SHORTEST_BAR = 20, 5
# A line at most so often, and after an hour one a minute: logs of long runs stay readable.
PLAIN_LINES_EVERY_S, SHARE_OF_TIME = 2.0, 1 / 60
# After so long without a line another says what the run is at; each time twice as long is waited for the next one.
SILENCE_S = 60.0


class Progress(Listener):
    """Shows what a run tells: a bar on a terminal, a line now and then elsewhere. `has_bar`: False where what runs may
    use the terminal. `clock`: seconds that never go back."""

    def __init__(self, *, has_bar: bool = True, clock: Callable[[], float] = time.monotonic):
        self._has_bar, self._clock = has_bar, clock
        self._console = Output(stderr=True)
        self._phases: Phases | None = None
        self._bar: Live | None = None
        self.directory: RunDirectory | None = None  # the started run's
        self._job = ""
        self._last_line_s = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end_search(error)
        if self._bar is not None:
            self._bar.stop()

    def search(self, phase: str, detail: str) -> None:
        if self._phases is None:
            self._phases = Phases(self._console)
            if self._bar is None:  # a terminal has room for one of them
                self._phases.__enter__()
        self._phases(phase, detail)

    def _end_search(self, error: BaseException | None = None) -> None:
        if self._phases is not None:
            self._phases.__exit__(None, error, None)
            self._phases = None

    def starting(self, run: Run, directory: RunDirectory, reason: str | None) -> None:
        self.directory = directory
        self._step, self._steps = run.spec.resume_step, run.experiment.steps
        self._parts = ["starting"]
        if reason is not None:  # later steps are made, and shown, once more
            self.say(f"{reason}\nthe run goes on after step {self._step}".lstrip())
        self._metrics = Tail(directory.metrics, step_line, self.say)
        self._evaluations = Tail(directory.evaluations, evaluation_line, self.say)
        self._events = Tail(directory.events, event_line, self.say)
        if self._has_bar and self._console.is_terminal and self._bar is None:
            self._bar = Live(get_renderable=self._bar_line, console=self._console)
            self._bar.start()
        self._begun_s, self._silence_s = self._clock(), SILENCE_S
        self._is_starting, self._phase = True, ""
        self._newest: deque[dict[str, Any]] = deque(maxlen=SPEED_STEPS + 1)
        self.say(f"starting the master and {workers_in_words(run.spec.num_workers)}; logs in {directory.logs}")

    def watched(self, job: str) -> None:
        if job and job != self._job:
            self._job = job
            self.say(job)
        if self.directory is None:
            return
        for evaluation in self._evaluations.read():
            self.say(f"evaluation after step {evaluation['step']}: {'  '.join(_numbers(evaluation, evaluation))}")
        for metrics in self._metrics.read():
            self._step = metrics["step"]
            self._is_starting, self._silence_s = False, SILENCE_S
            self._newest.append(metrics)
            speed, shown = self._speed(), _numbers(metrics, main_names(list(metrics)))
            self._parts = [*speed, *shown]
            if self._bar is None and metrics["calls"] and self._is_due(metrics):
                text = "  ".join(shown[:NUM_SHOWN])
                self.say(f"step {self._step} of {self._steps}, {', '.join(speed)}: {text}")
        for event in self._events.read():
            if event.event == "uniform_rewards":
                self.say(event.message)
        self._tell_phase(self.directory)

    def _bar_line(self) -> Table:
        return bar_line(self._step, self._steps, self._parts, self._console.width)

    def _speed(self) -> list[str]:
        """Seconds a step since this start, and the time left."""
        speed = speed_of(self._newest, ())
        if speed is None:
            return ["no time"]
        left_s = speed.step_s * (self._steps - self._step)
        left = [f"about {duration(left_s)} left"] if self._step < self._steps else []
        return [f"{speed.step_s:.3g} s a step", *left]

    def _tell_phase(self, directory: RunDirectory) -> None:
        """Says what the master notes that it does, before the first step has ended and after the last one; in between
        only where nothing was said for long."""
        activity = read_activity(directory.activity(MASTER))
        phase = activity.text.removeprefix("setup: ") if activity else self._job or "the master has not begun yet"
        if self._is_starting and activity is not None:
            self._parts = [phase]
        now_s = self._clock()
        is_news = phase != self._phase and activity is not None and (self._is_starting or self._step >= self._steps)
        if not (is_news and now_s - self._said_s >= PLAIN_LINES_EVERY_S) and now_s - self._said_s < self._silence_s:
            return
        if is_news:
            self._phase, self._silence_s = phase, SILENCE_S
        else:
            self._silence_s *= 2
            if worker := read_activity(directory.activity(worker_name(0))):
                phase += f"; worker 0: {worker}"
        self.say(f"after {duration(now_s - self._begun_s)}: {phase}")

    def _is_due(self, metrics: dict[str, Any]) -> bool:
        end_s = max(call["end"] for call in metrics["calls"].values())
        every_s = max(PLAIN_LINES_EVERY_S, SHARE_OF_TIME * (self._clock() - self._begun_s))
        if end_s - self._last_line_s < every_s and self._step != self._steps:
            return False
        self._last_line_s = end_s
        return True

    def say(self, text: str) -> None:
        self._end_search()
        self._said_s = self._clock()
        self._console.say(text)


@contextmanager
def shown(request: RunRequest, title: str = "") -> Iterator[Progress]:
    """Shows a run while it goes on, and a summary when it has ended well."""
    began = time.monotonic()
    with Progress(has_bar=not request.launcher.uses_terminal) as progress:
        if title:
            progress.say(title)
        yield progress
    if progress.directory is not None:
        print_summary(progress.directory, time.monotonic() - began)


def bar_line(step: int, steps: int, parts: Sequence[str], width: int) -> Table:
    """The step, and those of `parts`, the most important first, that `width` columns have room for; the first one is
    cut where it is too long. A bar between them takes what is left, if that is enough for one."""
    count = f"step {step}/{steps}"
    left = width - len(count)
    shown: list[str] = []
    for part in parts:
        if shown and len(part) + 2 > left:
            break
        shown.append(part)
        left -= len(part) + 2
    bar = [ProgressBar(steps, step, width=min(BAR_WIDTH, left - 2))] if left - 2 >= SHORTEST_BAR else []
    line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    text = Text("  ".join(shown))
    text.truncate(max(0, width - len(count) - 2), overflow="ellipsis")
    line.add_row(count, *bar, text)
    return line


def _numbers(values: dict[str, Any], names: Iterable[str]) -> list[str]:
    chosen = [n for n in names if n in values and n != "step" and isinstance(values[n], int | float)]
    return [f"{name} {number_text(values[name])}" for name in chosen]


def call_table(times: Sequence[CallTime]) -> Table:
    """Measured (median) against predicted seconds of every call."""
    columns = ("measured (median)", "predicted", "measured / predicted")
    numbers = {row.call: (row.measured_s, row.predicted_s, row.ratio) for row in times}
    rows = ((call, *("-" if each is None else f"{each:.3f}" for each in row)) for call, row in numbers.items())
    return table_of("calls, seconds", "call", *columns, rows=rows)


def print_summary(directory: RunDirectory, seconds: float) -> None:
    """The end of a good run: statistics and evaluations before and after, speed, the calls, where everything lies."""
    out, run = wide_output(), read_run(directory)
    metrics, evaluations = run.metrics, run.evaluations
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        names = [name for name in first if name != "step" and name in last]
        rows = ((name, number_text(first[name]), number_text(last[name])) for name in names)
        out.print(table_of("evaluation", "", "before", "after", rows=rows))
    if (trends := trends_table(trends_of(metrics))).columns:
        out.print(trends)
    if metrics and run.plan:
        out.print(call_table(call_times(run.plan, metrics)))
        tokens, time_s = sum(m["tokens"] for m in metrics), sum(m["time_s"] for m in metrics)
        out.say(f"{len(metrics)} steps in {seconds:.1f} s, start included; {tokens / time_s:.0f} tokens/s")
    if run.status and run.status.message:  # it ended before its last step
        out.say(run.status.message)
    out.say(f"run directory: {directory.path}", f"report: {directory.report}")
    if command := export_command(directory):
        out.say(f"for transformers: {command}")
