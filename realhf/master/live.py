"""The requests of a live program, which runs on another thread of the master's process."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

from realhf.data.rows import DatasetRows, rows_of
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.master.loop import CallRecord, Dispatcher, OpenSteps, PlannedGraph, means
from realhf.master.state import Node
from realhf.rundir.calls_file import RoundLine
from realhf.rundir.checkpoints import RunState
from realhf.rundir.run import Run


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Calls that a program has made in a round since the last segment; they end before the next segment begins.

    calls: all calls of the round so far. new: by name the digests of those to be executed.
    ends: whether the round ends with them, and its data goes.
    """

    round: int
    calls: tuple[ModelFunctionCallDef, ...]
    new: dict[str, str]
    ends: bool
    done: "Future[dict[str, dict[str, float]]]" = field(default_factory=Future)  # by call its statistics


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint of all models, as they are after `step` rounds."""

    step: int
    done: "Future[dict[str, dict[str, float]]]" = field(default_factory=Future)  # empty


class ProgramQueue:
    """The way from the program's thread to the master's loop. None: the program has ended."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._queue: asyncio.Queue[Segment | Save | None]

    def open(self) -> None:
        """From now on the master listens; called by its loop."""
        self._queue, self._loop = asyncio.Queue(), asyncio.get_running_loop()
        self._opened.set()

    def put(self, request: Segment | Save | None, wait_s: float) -> bool:
        """Called by the program; whether the master listens within `wait_s` seconds, and has the request now."""
        if not self._opened.wait(wait_s):
            return False
        self._loop.call_soon_threadsafe(self._queue.put_nowait, request)
        return True

    async def get(self) -> Segment | Save | None:
        return await self._queue.get()


class ProgramRounds:
    """Executes the segments of a program. A round is a step of the run."""

    def __init__(self, run: Run, dispatcher: Dispatcher, state: RunState | None):
        self._run, self._dispatcher = run, dispatcher
        self._opened = OpenSteps()
        self.versions: Counter[str] = Counter()  # by model: its updates
        self.optimizer_steps: Counter[str] = Counter()
        if state is not None:
            self.versions.update({model: state.weights[model].version for model in run.changing_models})
            made = {model: steps - run.initial_steps[model] for model, steps in state.optimizer_steps.items()}
            self.optimizer_steps.update(made)
        self.is_changed = False  # since the last checkpoint
        self._calls: list[tuple[str, str]] = []  # of the present round, with their digests
        self._statistics: dict[str, dict[str, float]] = {}

    async def carry_out(self, segment: Segment) -> dict[str, dict[str, float]]:
        """Returns when its calls have ended: by call the statistics."""
        if not segment.new:
            return {}
        run = self._run
        graph = DataflowGraph(segment.calls, run.experiment.graph.dataset_keys)
        planned = PlannedGraph(
            "train",
            graph,
            {call.name: run.call_plan("train", call) for call in segment.calls},
            run.homes,
            run.batch_size("train"),
            self._rows,
            run.plan.offload,
            versions=lambda model, _: self.versions[model],
            devices_per_node=run.spec.devices_per_node,
            grows=True,
        )
        order = [(name, segment.round) for name in segment.new]
        await self._dispatcher.run_steps(planned, order, 1, lambda step, records: None, self._opened)
        for call in (graph.calls[name] for name in segment.new):
            self.versions[call.model_name] += call.trains
            self.optimizer_steps[call.model_name] += call.optimizer_steps
            self.is_changed = self.is_changed or call.trains
        found = {name: means(self._opened.records[Node(segment.round, name)].stats) for name in segment.new}
        self._calls += segment.new.items()
        self._statistics |= found
        return found

    @cached_property
    def _rows(self) -> DatasetRows:
        return rows_of(self._run, "train")

    async def finish(self, round_: int) -> list[CallRecord]:
        """Frees a round's data on the workers; returns its calls, none where it had none."""
        if round_ not in self._opened.directories:
            return []
        return await self._dispatcher.finish("train", round_, self._opened)

    def line(self, round_: int) -> RoundLine:
        """The record of the round that has ended."""
        versions = {model: self.versions[model] for model in self._run.changing_models}
        calls, self._calls = tuple(self._calls), []
        statistics, self._statistics = self._statistics, {}
        return RoundLine(round=round_, calls=calls, statistics=statistics, versions=versions)
