"""The master worker: waits for the workers, runs the plan step by step, and records events."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from functools import cached_property

from msgspec.structs import asdict, replace

from realhf.base.errors import RunError, UserError
from realhf.base.files import delete, writing_a_run
from realhf.data.inputs import check_inputs
from realhf.data.rows import DatasetRows, rows_of
from realhf.dataflow.copies import with_copies
from realhf.dataflow.plan import DIGEST_LENGTH, plan_digest
from realhf.dataflow.splits import Split, statistic_name
from realhf.master.clocks import WorkerClocks
from realhf.master.drift import DriftWatch, reported_calls
from realhf.master.early_stop import EarlyStop, Verdict
from realhf.master.key_value_store import KeyValueStore
from realhf.master.live import ProgramQueue, ProgramRounds, Save, Segment
from realhf.master.loop import CallRecord, Dispatcher, PlannedGraph, Sums, added_up, means
from realhf.master.milestones import Milestones
from realhf.master.outputs import step_outputs
from realhf.master.records import Trace, log_step, step_metrics
from realhf.master.saver import Saver
from realhf.master.trackers import Trackers
from realhf.master.uniform_rewards import RewardWatch, remedies
from realhf.master.vital_signs import VitalSigns
from realhf.master.weights import WeightsWatch
from realhf.rundir.checkpoints import RunState as RunCheckpoint
from realhf.rundir.checkpoints import read_state, step_folder
from realhf.rundir.events import note, read_events
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.lines import append_line, evaluation_line, read_lines
from realhf.rundir.paths import MASTER, RunDirectory, worker_name
from realhf.rundir.run import Run
from realhf.rundir.samples import Sample, append_samples
from realhf.rundir.starts import StaleStartError, check_start
from realhf.rundir.status import EndRequest, RunState, Status, requested_end, write_status
from realhf.transport.clock import ListeningClock, now_s
from realhf.transport.messages import (
    Alive,
    CheckpointWritten,
    Completion,
    DumpStacks,
    Failure,
    Heartbeat,
    Hello,
    Ready,
    Reply,
    Shutdown,
    StoreRequest,
    ToMaster,
    ToWorker,
)
from realhf.transport.server import GoneError, Server

logger = logging.getLogger(__name__)

# Workers send a heartbeat every second. A worker is given up after HEARTBEAT_TIMEOUT_S of silence, longer than a busy
# machine keeps it silent. If another failure is known already, a worker is blamed after SUSPICIOUS_SILENCE_S.
HEARTBEAT_TIMEOUT_S = 60.0
SUSPICIOUS_SILENCE_S = 3.0
WATCH_EVERY_S = 1.0
# Workers end by themselves when they have heard nothing for long (`RunSpec.master_timeout_s`).
ALIVE_EVERY_S = 5.0
# How long the master waits for further failures after the first. The first report often comes from a peer of the
# worker that failed, which itself may have fallen silent.
FAILURE_GRACE_S = 8.0
# How long the master waits for workers to write their stacks.
STACKS_S = 2.0
_LOOK_S = 0.05  # and how often it looks for them


class Master:
    """Runs one experiment over workers that connect to `server`, all of the start `start_id` (`rundir.starts`): the
    steps of its graph, or what a live `program` asks for."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        server: "Server[ToMaster, ToWorker]",
        start_id: str = "",
        program: ProgramQueue | None = None,
    ):
        self._program = program
        self._run, self._directory, self._server, self._start_id = run, directory, server, start_id
        self._num_workers = run.spec.num_workers
        self._recorder = ActivityWriter(directory.activity(MASTER))
        self._trace = Trace(directory.trace, self._num_workers)
        self._trackers = Trackers(run.spec, directory.path)
        self._clock = ListeningClock(WATCH_EVERY_S)
        self._clocks = WorkerClocks()
        self._dispatcher = Dispatcher(server.send, self._num_workers, self._trace.add, self._clock.now, run.deadlines)
        self._signs = VitalSigns(self._clock.now, self._dispatcher, directory, server.garbage)
        self._ready: dict[int, str] = {}  # worker -> its device, for workers that are ready
        self._all_ready = asyncio.Event()
        self._weights = WeightsWatch(run)
        self._saver = Saver(run, directory, self._dispatcher, self._weights, start_id)
        self._store = KeyValueStore(self._num_workers)
        self._state: RunState = "starting"
        self._ending: RunState = "done"
        self._end_request: EndRequest | None = None
        self._why_early = ""
        events = read_events(directory.events)
        self._drift = DriftWatch(run.spec.drift_threshold, reported_calls(events))
        self._rewards = RewardWatch(is_told=any(event.event == "uniform_rewards" for event in events))
        early = run.spec.stop_early
        self._early = EarlyStop(early, run.spec.stop_early_patience, run.spec.stop_early_gain) if early else None
        self._step = run.spec.resume_step
        self._statistics: dict[str, float] = {}  # the last step's, and those of an evaluation after it
        self._previous_end = now_s()

    async def run(self) -> None:
        """Runs to the end.

        Raises:
            RunError: a worker failed, fell silent, or did not answer in time; or the run goes on with another start.
        """
        self._write_status("starting")
        self._record_setup()
        receiver = asyncio.create_task(self._receive())
        watchdog = asyncio.create_task(self._watch())
        saver = asyncio.create_task(self._saver.run())
        driver = asyncio.create_task(self._drive())
        tasks = {receiver, watchdog, saver, driver}
        try:
            with writing_a_run():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if driver in done and isinstance(driver.exception(), GoneError):  # that worker may have said why
                    done |= (await asyncio.wait({receiver}, timeout=FAILURE_GRACE_S))[0]
                for task in (receiver, watchdog, saver, driver):
                    if task in done:
                        task.result()
                self._write_status(self._ending, self._why_early)
        except RunError as error:
            check_start(self._directory, self._start_id)  # the error of a stale start is not reported
            try:
                self._write_status("failed", str(error), error.workers)
            except OSError:  # the disk is full; the flight recorder's file has its space, and the launcher reads it
                self._recorder.set(str(error))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(OSError):  # a trace can be read without its end
                self._trace.close()
            with contextlib.suppress(OSError):
                self._trackers.close()

    def interrupted(self) -> None:
        """Notes that the run was interrupted from outside."""
        with contextlib.suppress(OSError, StaleStartError):  # the disk is full; the person who ended the run knows
            check_start(self._directory, self._start_id)
            self._write_status("interrupted", "the run was interrupted")

    async def _drive(self) -> None:
        await asyncio.gather(self._wait_until_ready(), self._check_inputs())
        logger.info("all %d workers are ready", self._num_workers)
        self._write_status("running")
        step, steps = self._step, self._run.experiment.steps
        state = None
        if step:
            state = read_state(step_folder(self._directory.checkpoints, step))
            self._dispatcher.states = state.calls
            self._weights.begin_with(state.weights, step, state.states)
        await (self._make_steps(step, steps) if self._program is None else self._serve(self._program, state))
        for worker in range(self._num_workers):
            await self._server.send(worker, Shutdown())

    async def _serve(self, program: ProgramQueue, state: RunCheckpoint | None) -> None:
        """Does what a live program asks for, until it ends, or a round does after somebody has asked for the end. Then
        there is a checkpoint."""
        rounds, every = ProgramRounds(self._run, self._dispatcher, state), self._run.spec.checkpoint_every_steps
        self._saver.made_steps = lambda model, _: rounds.optimizer_steps[model]
        program.open()
        while (request := await program.get()) is not None:
            self._recorder.set(f"round {self._step + 1}")
            found: dict[str, dict[str, float]] = {}
            match request:
                case Save(step=step):
                    await self._save(step, rounds)
                case Segment(ends=ends):
                    found = await rounds.carry_out(request)
                    if ends and (records := await rounds.finish(request.round)):
                        self._record_step(request.round, records)
                        append_line(self._directory.rounds, rounds.line(request.round))
                        if every and self._step % every == 0:
                            await self._save(self._step, rounds)
                            self._saver.kept_step = self._step  # checkpoints within rounds do not push it out
                    if ends and self._end_request is not None:
                        self._ending = "stopped"
                        self._why_early = f"ended after step {self._step}, {self._end_request.in_words}"
                        break
            request.done.set_result(found)
        await self._save(self._step, rounds)

    async def _save(self, step: int, rounds: ProgramRounds) -> None:
        """Writes a checkpoint, unless there is one of the same weights and step."""
        folder = step_folder(self._directory.checkpoints, step)
        if not step or not self._run.changing_models or (folder.exists() and not rounds.is_changed):
            return
        if folder.exists():  # of the same round, before a further update
            await asyncio.to_thread(delete, folder)
        await self._saver.begin(step, self._statistics)
        await self._saver.settle()
        rounds.is_changed = False

    async def _make_steps(self, step: int, steps: int) -> None:
        """The steps from `step` on, with their evaluations and checkpoints."""
        if not self._is_evaluated(step):  # a run that goes on may have been
            await self._evaluate(step)
        verdict = None
        self._judge()  # a statistic that evaluations do not make is told now
        milestones = Milestones(self._run)
        while step < steps:
            first, last = step, milestones.next(step)
            self._previous_end = now_s()
            if self._end_request is None:
                self._recorder.set(f"training, {f'steps {first + 1} to' if last > first + 1 else 'step'} {last}")
                await self._train(first, last)
                step = self._step
            if self._end_request is None:
                milestones.reached(first, step)
                if milestones.evaluates_after(step):
                    await self._evaluate(step)
            if self._end_request is not None and not (step == steps and self._is_evaluated(step)):
                await self._end_early(self._end_request, step)
                break
            verdict = self._judge() if milestones.evaluates_after(step) else None
            is_due = milestones.saves_after(step)
            if is_due or (verdict is not None and (verdict.is_best or verdict.ends)):
                self._recorder.set(f"checkpoint after step {step}")
                await self._saver.begin(step, self._statistics)
                if verdict is not None and verdict.ends:
                    break
                if step < steps and self._directory.switch.exists():
                    await self._saver.settle()
                    if self._saver.saved_step != step:
                        continue
                    logger.info("ending after step %d, to go on under another plan", step)
                    self._ending = "replan"
                    break
        self._recorder.set("waiting for the last checkpoint to be written")
        await self._saver.settle()
        if self._early and verdict is not None and verdict.ends and step < steps:
            best = step_folder(self._directory.checkpoints, verdict.best_step)
            found = str(best) if best.is_dir() else "none"
            self._why_early = self._early.in_words(step, verdict, found)
            logger.info("%s", self._why_early)

    def _judge(self) -> Verdict | None:
        """The verdict of early stopping after the last evaluation, whose best checkpoint is kept; None without it.

        Raises:
            RunError: evaluations do not make the statistic.
        """
        made = read_lines(self._directory.evaluations, evaluation_line).values if self._early else []
        if not self._early or not made:
            return None
        verdict = self._early.judge(made)
        self._saver.kept_step = verdict.best_step
        return verdict

    async def _end_early(self, request: EndRequest, step: int) -> None:
        """Saves the run after `step`, unless that was done. An evaluation that is due is left to the run that
        resumes."""
        logger.info("ending after step %d, %s", step, request.in_words)
        await self._saver.settle()
        if step not in (self._run.spec.resume_step, self._saver.saved_step):
            self._recorder.set(f"checkpoint after step {step}, the last one")
            await self._saver.begin(step, self._statistics)
        self._ending = "requeued" if request.goes_on else "stopped"
        self._why_early = f"ended after step {step}, {request.in_words}"

    async def _check_inputs(self) -> None:
        """Raises RunError if inputs of the run have changed since it began, as they may while a job waits."""
        if not self._directory.inputs.exists():  # an older version made the run
            return
        try:
            await asyncio.to_thread(check_inputs, self._run, self._directory)
        except UserError as error:
            raise RunError(str(error)) from None

    def _record_setup(self) -> None:
        """Records the progress of the start: the number of connected workers, and the activity of the first one that is
        not ready."""
        texts = [f"setup: {self._signs.num_heard} of {self._num_workers} workers connected, {len(self._ready)} ready"]
        busy = (worker for worker in range(self._num_workers) if worker not in self._ready)
        doing = ((worker, self._signs.activity(worker, "").removeprefix("setup: ")) for worker in busy)
        texts += [f"worker {worker}: {what}" for worker, what in doing if what][:1]
        self._recorder.set("; ".join(texts))

    async def _wait_until_ready(self) -> None:
        """Raises RunError if workers are missing, or have devices of several kinds: a plan assumes equal devices."""
        timeout_s = self._run.spec.setup_timeout_s
        try:
            await asyncio.wait_for(self._all_ready.wait(), timeout_s)
        except TimeoutError:
            missing = [worker for worker in range(self._num_workers) if worker not in self._ready]
            states = ", ".join(f"worker {i} ({self._signs.activity(i, 'never heard of')})" for i in missing)
            raise RunError(
                f"not ready within {timeout_s:g} s: {states}; read {self._directory.log(worker_name(missing[0]))}",
                workers=missing,
            ) from None
        if len(set(self._ready.values())) > 1:
            raise self._signs.several_kinds(self._ready)

    def _is_evaluated(self, step: int) -> bool:
        """Whether no evaluation is due after `step`, or an earlier start of the run has made it."""
        if step and not Milestones(self._run).evaluates_after(step):
            return True
        made = read_lines(self._directory.evaluations, evaluation_line).values
        return step in {line["step"] for line in made}

    @cached_property
    def _plan_digest(self) -> str:
        return plan_digest(self._run.plan)[:DIGEST_LENGTH]

    @cached_property
    def _rows(self) -> DatasetRows:
        return rows_of(self._run, "train")

    async def _train(self, first: int, last: int) -> None:
        run, graph = self._run, self._run.experiment.graph
        calls = {name: run.call_plan("train", call) for name, call in graph.calls.items()}
        planned = PlannedGraph(
            "train",
            with_copies(graph, run.plan.copies),
            calls,
            run.homes,
            run.batch_size("train"),
            self._rows,
            run.plan.offload,
            devices_per_node=run.spec.devices_per_node,
        )
        steps = [(name, first + step) for name, step in run.plan.unrolled(graph, last - first)]
        order = [(name, step) for name, step in steps if name not in graph.follows or graph.follows[name].is_due(step)]
        await self._dispatcher.run_steps(planned, order, run.plan.max_steps_in_flight, self._record_step)

    def _record_step(self, step: int, records: list[CallRecord]) -> None:
        check_start(self._directory, self._start_id)
        metrics = step_metrics(step + 1, records, self._run.plan, self._previous_end)
        self._previous_end = max(record.end for record in records)
        metrics |= {"of_steps": self._run.planned_steps, "num_workers": self._num_workers, "plan": self._plan_digest}
        for record in records:
            if record.node.call in self._run.experiment.graphs["train"].calls:
                reply = next(iter(record.replies.values()))  # it is of all workers
                metrics["calls"][record.node.call]["weights_version"] = reply.weights_version
        digests = self._weights.of_step("train", step, records)
        for call, of_call in digests.items():
            metrics["calls"][call] |= of_call
        append_line(self._directory.outputs, step_outputs(step + 1, records))
        append_line(self._directory.metrics, metrics)
        log_step(metrics)
        self._trackers.step(metrics)
        completions = [each for record in records for each in record.completions]
        self._record_samples(self._samples(step + 1, "train", completions, digests))
        for drift in self._drift.step(metrics):
            logger.warning("%s", drift)
            note(self._directory.events, "drift", step + 1, drift)
        if uniform := self._rewards.step(metrics, is_last=step + 1 == self._run.experiment.steps):
            is_zero = not metrics.get("reward_mean")
            text = f"{uniform}; {remedies(self._run.spec, self._directory.path, is_zero=is_zero)}"
            logger.warning("%s", text)
            note(self._directory.events, "uniform_rewards", step + 1, text)
        self._trace.flush()
        self._statistics = {name: value for name, value in metrics.items() if isinstance(value, float)}
        if step == self._run.spec.resume_step:
            self._check_best(step + 1)
        self._step = step + 1
        self._write_status("running")

    def _samples(
        self, step: int, split: Split, completions: Iterable[Completion], digests: Mapping[str, Mapping[str, str]]
    ) -> list[Sample]:
        """The completions of a step, or of the evaluation after it, with the digest of the weights that drew them."""
        weights = digests.get(self._run.experiment.graphs[split].producers.get("seq", ""), {}).get("weights", "")
        return [Sample(step=step, split=split, weights=weights, **asdict(each)) for each in completions]

    def _record_samples(self, samples: list[Sample]) -> None:
        """Writes those of a step, or of an evaluation, in the order of their ids."""
        samples.sort(key=lambda each: each.sample)
        append_samples(self._directory.samples, samples)
        self._trackers.samples(samples)

    def _check_best(self, step: int) -> None:
        """Raises RunError if neither the first step nor an evaluation has the statistic that `--keep-best` names.

        The check is made here because only interfaces know the names of their statistics.
        """
        best = self._run.spec.keep_best
        evaluations = read_lines(self._directory.evaluations, evaluation_line).values
        known = self._statistics.keys() | {name for line in evaluations for name in line} - {"step"}
        if best is not None and best.removeprefix("min:") not in known:
            raise RunError(
                f"--keep-best {best}: neither step {step} nor an evaluation before it has made such a statistic; "
                f"choose from {', '.join(sorted(known))}"
            )

    async def _evaluate(self, step: int) -> None:
        found: dict[str, float] = {}
        samples: dict[Split, list[Sample]] = {}
        for split in self._run.experiment.evaluations:
            made = await self._evaluate_on(split, step)
            if made is None:
                return  # the run ends; the evaluation is left to the run that resumes
            found |= {statistic_name(split, name): value for name, value in made[0].items()}
            samples[split] = made[1]
        if not samples:
            return
        self._statistics |= found
        line = {"step": step, **found}
        append_line(self._directory.evaluations, line)
        self._trackers.evaluation(line)
        for of_set in samples.values():
            self._record_samples(of_set)

    async def _evaluate_on(self, split: Split, step: int) -> tuple[dict[str, float], list[Sample]] | None:
        """The statistics and samples of one evaluation set after `step`; None where the run ends before."""
        run, graph = self._run, self._run.experiment.graphs[split]
        self._recorder.set(f"{split} after step {step}")
        calls = {name: run.call_plan(split, call) for name, call in graph.calls.items()}
        rows = rows_of(run, split)
        planned = PlannedGraph(
            split, graph, calls, run.homes, rows.batch_size, rows, run.plan.offload,
            versions=lambda model, _: run.experiment.graph.weights_version(model, step),
            trained_steps=step, devices_per_node=run.spec.devices_per_node,
        )  # fmt: skip
        order = [(call, batch) for batch in range(rows.batches) for call in graph.calls]
        stats: list[Sums] = []
        samples: list[Sample] = []

        def add(batch: int, records: list[CallRecord]) -> None:
            self._recorder.set(f"{split} after step {step}: {batch + 1} of {rows.batches} batches")
            stats.extend(record.stats for record in records)
            digests, first = self._weights.of_step(split, step, records), rows.first_sample(batch)
            made = (replace(each, sample=first + each.sample) for record in records for each in record.completions)
            samples.extend(self._samples(step, split, made, digests))

        is_whole = await self._dispatcher.run_steps(planned, order, 1, add)
        return (means(added_up(stats)), samples) if is_whole else None

    async def _receive(self) -> None:
        while True:
            worker, message = await self._server.recv()
            if isinstance(message, Hello) and message.start_id != self._start_id:
                which = f"process {message.pid} on {message.host} is worker {worker} of start {message.start_id}"
                logger.warning("%s, not of this one; it is not heard", which)
                self._server.refuse(worker)
                continue
            self._signs.heard(worker)
            match message:
                case Reply() | CheckpointWritten():
                    try:
                        self._take(worker, message)
                    except ValueError as error:
                        logger.warning("worker %d sent %s", worker, error)
                        self._server.reject(worker)
                case Heartbeat(activity=activity, sent_s=sent_s):
                    if sent_s is not None:
                        self._clocks.heard(worker, sent_s)
                    self._signs.heard(worker, activity=activity)
                case StoreRequest():
                    for waiting, answer in self._store.answers(worker, message):
                        with contextlib.suppress(GoneError):
                            await self._server.send(waiting, answer)
                    await asyncio.sleep(0)  # gloo asks for each pair of ranks; other tasks get their turns in between
                    continue  # and it is no progress to record
                case Hello(host=host):
                    self._signs.heard(worker, host=host)
                    self._clocks.met(worker, host)
                    await self._say_alive([worker])
                case Ready(device=device):
                    self._ready[worker] = device
                    if len(self._ready) == self._num_workers:
                        self._all_ready.set()
                case Failure():
                    cause = await self._explain(worker, message)
                    raise await self._with_stacks(cause) if message.blames_peer else cause
            if self._state == "starting":
                self._record_setup()

    def _take(self, worker: int, message: Reply | CheckpointWritten) -> None:
        span = self._clocks.corrected(worker, message.span)
        if isinstance(message, Reply):
            wait = self._clocks.corrected(worker, message.wait) if message.wait else None
            digests = tuple(self._clocks.corrected(worker, each) for each in message.digests)
            self._dispatcher.reply(worker, replace(message, span=span, wait=wait, digests=digests))
        else:
            self._saver.written(worker, message)
            self._trace.add(worker, span)

    async def _explain(self, worker: int, failure: Failure) -> RunError:
        """Waits for further failures. The cause is one that does not blame a peer, else a silent worker."""
        failures = {worker: failure}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAILURE_GRACE_S):
                while all(f.blames_peer for f in failures.values()) and len(failures) < self._num_workers:
                    other, message = await self._server.recv()
                    self._signs.heard(other)
                    if isinstance(message, Failure):
                        failures[other] = message
        silent = [other for other in self._signs.silent(SUSPICIOUS_SILENCE_S) if other not in failures]
        if silent and all(f.blames_peer for f in failures.values()):
            return self._signs.silence(silent)
        cause = min(failures, key=lambda w: (failures[w].blames_peer, w))
        return self._signs.failure(cause, failures[cause])

    async def _say_alive(self, workers: Iterable[int]) -> None:
        for worker in workers:
            with contextlib.suppress(GoneError):  # it may come back
                await self._server.send(worker, Alive())

    async def _watch(self) -> None:
        said_s = 0.0
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._clock.now() - said_s >= ALIVE_EVERY_S:
                said_s = self._clock.now()
                await self._say_alive(self._server.known_workers)
            self._clock.tick()
            check_start(self._directory, self._start_id)
            self._write_status(self._state)  # a sign of life, for the supervisor
            if self._end_request is None and (request := requested_end(self._directory.stop)):
                logger.info("no further step is begun: the run ends %s", request.in_words)
                self._end_request = request
                if self._program is None:
                    self._dispatcher.end_soon()
            late = {worker: request.deadline_s for worker, request in self._dispatcher.late().items()}
            if silent := self._signs.silent(SUSPICIOUS_SILENCE_S if late else HEARTBEAT_TIMEOUT_S):
                raise await self._with_stacks(self._signs.silence(silent))
            if late:
                raise await self._with_stacks(self._signs.lateness(late))

    async def _with_stacks(self, error: RunError) -> RunError:
        """Has every worker that still answers write its Python stacks; returns `error` with the files, if any."""
        alive = self._signs.alive(SUSPICIOUS_SILENCE_S)
        files = {worker: self._directory.stacks(worker_name(worker)) for worker in alive}
        for worker, file in files.items():
            file.unlink(missing_ok=True)
            with contextlib.suppress(RunError):  # it has gone meanwhile
                await self._server.send(worker, DumpStacks())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STACKS_S):
                while not all(file.exists() for file in files.values()):
                    await asyncio.sleep(_LOOK_S)
        written = sum(file.exists() for file in files.values())
        if not written:
            return error
        return RunError(
            f"{error}\nPython stacks of {written} workers: {self._directory.stacks('worker-*')}", error.workers
        )

    def _write_status(self, state: RunState, message: str = "", blamed: Iterable[int] = ()) -> None:
        self._state = state
        steps = self._run.planned_steps
        status = Status(state=state, step=self._step, steps=steps, message=message, blamed=tuple(sorted(blamed)))
        write_status(self._directory.status, status)
