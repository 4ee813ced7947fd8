"""Checkpoints of a run: workers copy their parts between steps and write them beside training; the master completes
them."""

import asyncio
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.dataflow.plan import plan_digest
from realhf.geometry.boxes import Box
from realhf.master.loop import Dispatcher
from realhf.master.weights import WeightsWatch
from realhf.models.checkpoint_index import STEPS_KEY, finish, state_owners
from realhf.rundir import checkpoints
from realhf.rundir.checkpoints import RunState, step_folder
from realhf.rundir.events import note
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run
from realhf.rundir.starts import check_start
from realhf.transport.messages import CheckpointWritten

logger = logging.getLogger(__name__)


class Saver:
    """Writes one checkpoint at a time: `begin` waits for the one before.

    A checkpoint has every trained model with its optimizer states, every model that follows one, and the state of the
    run. It gets its name when all of it is on the disk, so a crash at any moment leaves the last checkpoint as it was.

    A checkpoint that cannot be written ends the run. `RunSpec.checkpoint_failures` allows some to fail in a row: the
    failure is noted, and training goes on. The last checkpoint of a run must be written.
    """

    def __init__(
        self, run: Run, directory: RunDirectory, dispatcher: Dispatcher, weights: WeightsWatch, start_id: str = ""
    ):
        self._run, self._directory, self._dispatcher, self._start_id = run, directory, dispatcher, start_id
        self._weights = weights
        self._initial_steps = run.initial_steps  # now: the checkpoints that models start from may go during the run
        self._writing: set[int] = set()  # workers
        self._under_way = ""
        self._step: int  # the present checkpoint's
        self._all_written = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._begun: asyncio.Queue[RunState] = asyncio.Queue()
        self._error: RunError | None = None  # the present checkpoint's
        self._failures = 0  # in a row
        self.saved_step = 0
        # Optimizer steps of a model in the first steps of the run.
        self.made_steps: Callable[[str, int], int] = lambda model, step: step * run.optimizer_steps(model)
        self.kept_step: int | None = None  # its checkpoint is not removed: the best by early stopping

    async def begin(self, step: int, statistics: Mapping[str, float]) -> None:
        """Returns when every worker has copied its part, so that training may go on. No step may be in flight."""
        await self._idle.wait()
        self._idle.clear()
        writers: dict[int, tuple[str, ...]] = {}
        for model, owners in sorted(self._owners.items()):
            for worker in owners:
                writers[worker] = (*writers.get(worker, ()), model)
        self._writing, self._under_way, self._error = set(writers), str(self._staging(step)), None
        self._step = step
        self._all_written.clear()
        if not writers:  # no model changes
            self._all_written.set()
        staging = self._staging(step)
        try:
            staging.mkdir()
        except OSError as error:
            self._note_failure(step, _not_complete(step, error))
            self._idle.set()
            return
        await self._dispatcher.save(str(staging), writers, is_last=step == self._run.experiment.steps)
        self._begun.put_nowait(self._state(step, statistics))

    def written(self, worker: int, message: CheckpointWritten) -> None:
        """Notes that a worker has written its part, or failed to.

        Raises:
            RunError: the part could not be written, and this checkpoint must be.
            ValueError: the worker was not asked for this part, or has reported it before; nothing was changed.
        """
        if worker not in self._writing or message.directory != self._under_way:
            raise ValueError(f"a report of the checkpoint {message.directory}, for which it was not asked")
        if message.error:
            self._error = RunError(
                f"worker {worker} could not write its part of the checkpoint {message.directory}: {message.error}; "
                "earlier checkpoints are intact: make room and go on from the last one with --resume"
            )
            if not self._may_fail(self._step):
                raise self._error
        self._writing.discard(worker)
        if not self._writing:
            self._all_written.set()

    async def run(self) -> None:
        """Completes the checkpoints that `begin` has begun, until it is cancelled.

        Raises:
            RunError: a worker did not write its part in time, or a checkpoint that must be written cannot be completed.
        """
        while True:
            state = await self._begun.get()
            await self._wait_for_writers(state.step)
            error = self._error
            if error is None:
                try:
                    await asyncio.to_thread(self._complete, state)
                    self.saved_step, self._failures = state.step, 0
                except (OSError, UserError) as caught:
                    error = _not_complete(state.step, caught)
            if error is not None:
                self._note_failure(state.step, error)
            self._idle.set()

    async def settle(self) -> None:
        """Returns when no checkpoint is being written."""
        await self._idle.wait()

    def _may_fail(self, step: int) -> bool:
        """Whether the run goes on if the checkpoint after `step` cannot be written."""
        return self._failures < self._run.spec.checkpoint_failures and step < self._run.experiment.steps

    def _note_failure(self, step: int, error: RunError) -> None:
        """Counts a failed checkpoint; raises `error` if the run may not go on without it."""
        if not self._may_fail(step):
            raise error
        self._failures += 1
        left = self._run.spec.checkpoint_failures - self._failures
        text = f"{error}; the run goes on, and may fail to write {left} more in a row"
        logger.warning("%s", text)
        note(self._directory.events, "unsaved", step, text)
        shutil.rmtree(self._staging(step), ignore_errors=True)

    async def _wait_for_writers(self, step: int) -> None:
        timeout_s = self._run.deadlines.longest_s
        try:
            await asyncio.wait_for(self._all_written.wait(), timeout_s)
        except TimeoutError:
            late = ", ".join(f"worker {worker}" for worker in sorted(self._writing))
            raise RunError(
                f"{late}: the checkpoint after step {step} was not written within {timeout_s:g} s; look at the disk of "
                f"{self._directory.checkpoints}, or raise --call-timeout-s"
            ) from None

    def _complete(self, state: RunState) -> None:
        """Checks the files of the workers and gives the checkpoint its name. It runs in a thread, as disks are slow."""
        check_start(self._directory, self._start_id)
        run, staging = self._run, self._staging(state.step)
        for model, owners in sorted(self._owners.items()):
            metadata = {"step": state.step, "seed": state.seed}
            if model in state.optimizer_steps:
                metadata[STEPS_KEY] = state.optimizer_steps[model]
            architecture, dtype = run.experiment.graph.models[model], run.experiment.setups[model].dtype
            finish(staging / model, architecture, dtype, owners, metadata)
        target = step_folder(self._directory.checkpoints, state.step)
        checkpoints.complete(staging, target, state, list(self._owners))
        note(self._directory.events, "checkpoint", state.step)
        keep, best = run.spec.keep_checkpoints, run.spec.keep_best
        checkpoints.retain(self._directory.checkpoints, keep, best, self.kept_step)

    def _state(self, step: int, statistics: Mapping[str, float]) -> RunState:
        run = self._run
        return RunState(
            step=step,
            seed=run.experiment.seed,
            samples=step * run.batch_size("train"),
            num_workers=run.spec.num_workers,
            plan_sha256=plan_digest(run.plan),
            optimizer_steps={
                model: self._initial_steps[model] + self.made_steps(model, step)
                for model in self._owners
                if run.optimizer_steps(model)
            },
            models={},  # known when they are written
            weights=self._weights.newest(),
            states=self._weights.newest_states(),
            calls={call: numbers for call, numbers in self._dispatcher.states.items() if numbers},
            statistics={
                name: value for name, value in statistics.items() if math.isfinite(value)
            },  # JSON has no others
        )

    @property
    def _owners(self) -> dict[str, dict[int, list[Box]]]:
        """By model that changes and worker: the boxes that the worker writes."""
        run = self._run
        return {
            model: state_owners(
                run.experiment.graph.models[model],
                run.homes[model],
                run.experiment.setups[model].dtype,
                run.computations[model].data_parallel,
                with_optimizer=run.optimizer_steps(model) > 0,
                versions=run.experiment.graph.versions_kept(model),
            )
            for model in run.changing_models
        }

    def _staging(self, step: int) -> Path:
        target = step_folder(self._directory.checkpoints, step)
        # Leftover processes of another start may still write their own.
        return target.with_name(f".{'.'.join(filter(None, [target.name, self._start_id, 'part']))}")


def _not_complete(step: int, error: Exception) -> RunError:
    return RunError(
        f"the master could not complete the checkpoint after step {step}: {error}; earlier checkpoints are intact: "
        "go on from the last one with --resume"
    )
