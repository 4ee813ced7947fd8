"""`realhf.start`: models on workers, for a program that calls them."""

import asyncio
import contextlib
import contextvars
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypedDict, TypeVar, Unpack

import msgspec

from realhf.api.script.data import Prompts, ScriptData
from realhf.api.script.lines import script_line
from realhf.api.script.models import Policy, RewardModel, ScriptModel, ValueModel
from realhf.api.script.program import Program, program_class
from realhf.api.script.reward import Reward
from realhf.architecture.compute import Reproducible
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.code_files import ProgramBegins, loads, module_name, python_command
from realhf.base.errors import RunError, UserError
from realhf.base.files import delete
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.launch.launcher import NoOptions
from realhf.launch.local import LocalLauncher
from realhf.launch.process import Job, workers_of
from realhf.launch.supervisor import supervise
from realhf.lifecycle.controller import LAUNCHER_LOCK, note_start
from realhf.lifecycle.new import check_experiment, fill
from realhf.lifecycle.request import default_run_directory
from realhf.live.columns import LiveColumns
from realhf.live.recorded import Recorded
from realhf.live.rounds import Place, Rounds, Statistics
from realhf.master.__main__ import serve
from realhf.master.live import ProgramQueue, Save, Segment
from realhf.planning.planner import plan_for
from realhf.planning.request import DevicesRequest, PlanRequest, SearchBudget
from realhf.rundir.calls_file import SavedModel, call_line, saved_line
from realhf.rundir.checkpoints import step_folder
from realhf.rundir.lines import append_line, read_lines
from realhf.rundir.live import LiveExperiment
from realhf.rundir.logs import logging_to
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.run import MAX_STEPS, Run, RunSpec
from realhf.rundir.starts import START_VARIABLE, current_start
from realhf.rundir.status import known_status

_LOOK_S = 0.05  # between looks for the end of a call, and whether the run has broken
_END_S = 120.0  # for workers and master to end, when they were told to
_SETTLE_S = 2.0  # after the master's failure, for a worker that died to be found, which may be the cause
_KEPT = 2  # checkpoints
_EVALUATIONS = 2_000  # plans that the search evaluates

Handle = TypeVar("Handle", bound=ScriptModel)


class Settings(TypedDict, total=False):
    """The settings that all models and calls of a program share.

    seed: of all random numbers. dtype: of all models. reproducible: "layout" gives the same bits under every plan
    (docs/reproducibility.md).
    mini_batches: optimizer steps of an update that names no number.
    checkpoint_every: rounds between two checkpoints, of which the newest two are kept; left out: one at the end.
    architecture: of models without a checkpoint, whose weights are random.
    tokenizer: tokenizer.json, or its directory; by default that of the first model with one.
    """

    seed: int
    dtype: DType
    reproducible: Reproducible
    mini_batches: int
    checkpoint_every: int
    architecture: DecoderConfig
    tokenizer: str


def start(
    *,
    num_workers: int | None = None,
    run_dir: str | Path | None = None,
    plan: str | Path | None = None,
    **settings: Unpack[Settings],
) -> "Cluster":
    """Workers on this machine for a program that calls models: `with realhf.start(num_workers=2) as cluster: ...`.

    Args:
        num_workers: processes, one a GPU; without GPUs they share the processor. None: the GPUs that there are, else 1.
        run_dir: the directory of the run's files; by default runs/NAME-TIME.
        plan: a plan.json, of the calls MODEL_generate, MODEL_inference and MODEL_train_step; by default one is searched
            for a round with a call of each kind, when the first calls are made.

    Raises:
        UserError: an argument is out of its range. Models and data are checked when they are first called.
    """
    frame = sys._getframe(1)
    if loads and loads[-1] == "program":
        raise ProgramBegins
    if loads:
        file = frame.f_globals.get("__file__")
        raise UserError(f"{file} is a live program, and no experiment; start it with `python {file}`")
    if unknown := sorted(settings.keys() - Settings.__annotations__.keys()):
        known = ", ".join(("num_workers", "run_dir", "plan", *Settings.__annotations__))
        raise UserError(f"realhf.start knows no {', '.join(unknown)}; choose from {known}")
    file = frame.f_globals.get("__file__") if frame.f_globals.get("__name__") == "__main__" else None
    common = {**settings, "steps": MAX_STEPS}
    devices = DevicesRequest() if num_workers is None else DevicesRequest(num_workers=num_workers)
    budget = SearchBudget(evaluations=_EVALUATIONS)
    request = PlanRequest(devices=devices, plan=None if plan is None else Path(plan), budget=budget)
    return Cluster(Path(file).resolve() if file else None, None if run_dir is None else Path(run_dir), request, common)


class Cluster:
    """The workers of a program, and what it has declared. `with` ends them; a program that fails leaves none behind."""

    def __init__(self, program: Path | None, run_dir: Path | None, request: PlanRequest, common: dict[str, Any]):
        self._checkpoint_every = common.pop("checkpoint_every", None)
        self._file, self._request, self._common = program, request, common
        self._directory = RunDirectory(run_dir or default_run_directory(str(program or "program.py")))
        self._declared: dict[str, Any] = {}
        self._trained: list[str] = []
        self._batch_size = 0
        self._rounds: Rounds | None = None
        self._processes: _Processes | None = None
        self._recorded = Recorded()
        self._saved: list[SavedModel] = []  # by earlier starts
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the calls that were made; then there is a checkpoint. After an error the workers are stopped."""
        with self._held:
            try:
                if error is None and self._rounds is not None:
                    self._rounds.end()
            except BaseException:
                self._end(failed=True)
                raise
            self._end(failed=error is not None)

    # Declarations.

    def policy(self, model: str = "", *, name: str = "", trained: bool = True, **options: Any) -> Policy:
        """A language model: a Hugging Face checkpoint, a run directory or a GGUF file; without one, random weights.

        Its name is that of its calls and statistics, by default `actor`, or `reference` if it is not trained; those of
        further models end with a number. `options` are fields of `realhf.api.Policy`: lr, warmup_steps, compute, ...
        """
        return self._declare(Policy, model, name or ("actor" if trained else "reference"), trained, options)

    def value_model(self, model: str = "", *, name: str = "critic", trained: bool = True, **options: Any) -> ValueModel:
        """A model that gives values of tokens; see `policy`."""
        return self._declare(ValueModel, model, name, trained, options)

    def reward_model(
        self, model: str = "", *, name: str = "reward_model", trained: bool = False, **options: Any
    ) -> RewardModel:
        """A model that scores responses; see `policy`."""
        return self._declare(RewardModel, model, name, trained, options)

    def reward(self, *functions: str, name: str = "reward", **options: Any) -> Any:
        """A reward: functions of texts, `FILE.py:FUNCTION` or `ready:NAME`, that run beside the devices,
        or with `model=DIR` a reward model. `options` are fields of `realhf.api.Reward`."""
        made = Reward(functions=functions, **options)
        name = self._note(name, made)
        return (made.as_model(name) if made.model else made).in_trace(self._trace, name)

    def data(
        self, path: str, *, batch_size: int, steps: int | None = None, kind: type[ScriptData] = Prompts, **options: Any
    ) -> "Batches":
        """Rows of a file or a task, as `--data` takes them. Iterating gives batches of `batch_size` samples: responses,
        examples or pairs. `steps`: how many; None: each row once. `options` are fields of `kind`.

        Further data is read beside the first: `for prompts, texts in zip(first, second)`.
        """
        is_first = not self._batch_size
        if not is_first and batch_size != self._batch_size:
            raise UserError(
                f"batch_size={batch_size} of {path} is not {self._batch_size}, that of the data before; give both one"
            )
        self._batch_size = batch_size
        return Batches(self, self._note("data", kind(data=path, **options)), steps, is_first=is_first)

    def _declare(self, kind: type[Handle], model: str, name: str, trained: bool, options: dict[str, Any]) -> Handle:
        made = kind(model=model, **({"schedule": "constant"} | options))
        if made.follows is not None:
            raise UserError(f"{name}: follows={made.follows} is for declared experiments; leave it out")
        if trained and made.schedule != "constant":
            raise UserError(
                f"{name}: schedule={made.schedule!r} needs the number of updates, which a program does not say before; "
                "leave it out"
            )
        name = self._note(name, made)
        if trained:
            self._trained.append(name)
        return made.in_trace(self._trace, name)

    def _note(self, name: str, made: Any) -> str:
        if self._rounds is not None:
            raise UserError(f"{script_line()}: {name} is declared after the first batch; declare it before")
        number, first = 1, name
        while name in self._declared or name in {one.name for one in dataclasses.fields(Program)}:
            number += 1
            name = f"{first}_{number}"
        self._declared[name] = made
        return name

    # Rounds.

    def _trace(self) -> Rounds:
        if self._rounds is None:
            raise UserError(f"{script_line()}: there is no batch; call models in a loop over cluster.data(...)")
        return self._rounds

    def _begin(self) -> Rounds:
        """Ends the present round, and begins the next one."""
        if self._rounds is None:
            self._rounds = Rounds(self._program(), self._launch, self._module)
        self._rounds.begin()
        return self._rounds

    def _program(self, **changes: Any) -> Program:
        cls = program_class({name: type(one) for name, one in self._declared.items()}, self._batch_size)
        return cls(
            **self._declared, **self._common, batch_size=self._batch_size, trained=tuple(self._trained), **changes
        )

    def _launch(self) -> Place:
        """Plans for the calls that were made so far, and starts the workers."""
        assert self._rounds is not None
        drawn = [call.interface_impl for call in self._rounds.calls if call.generates]
        program = self._program(**({"generation": drawn[0]} if drawn else {}))
        directory = self._directory
        experiment = LiveExperiment(program, calls_file=directory.calls)
        check_experiment(experiment)
        plan, cluster = plan_for(experiment, self._request)
        spec = RunSpec(
            experiment_file=str(self._file or ""),
            experiment_class=type(program).__name__,
            words=tuple(sys.argv[1:]) if self._file else (),
            values=msgspec.to_builtins(program),
            declared={name: f"{type(one).__module__}:{type(one).__qualname__}" for name, one in self._declared.items()},
            working_directory=os.getcwd(),
            num_workers=cluster.num_devices,
            devices_per_node=cluster.devices_per_node,
            hardware=cluster.hardware,
            network_interface="lo",
            checkpoint_every_steps=self._checkpoint_every,
            keep_checkpoints=None if self._checkpoint_every is None else _KEPT,
        )
        if is_new := not directory.experiment.exists():
            RunDirectory.create(directory.path)
            directory.calls.parent.mkdir()
        self._held.enter_context(directory.lock(LAUNCHER_LOCK))
        if not is_new:
            self._recorded = Recorded.read(directory, spec)
            self._saved = list(read_lines(directory.saved, saved_line).values)
        run = Run(msgspec.structs.replace(spec, resume_step=self._recorded.step), experiment, plan)
        try:
            fill(run, directory)
        except (RunError, UserError):
            if is_new:  # there is nothing to go on with
                delete(directory.path)
            raise
        note_start(run, directory, "started" if is_new else "resumed")
        self._processes = _Processes(run, directory, self._broken)
        experiment.program.calls.read()

        def publish(call: ModelFunctionCallDef) -> None:
            append_line(directory.calls, call_line(call, self._module))
            experiment.program.calls.add(call)

        return Place(directory.values, publish, experiment.program.calls, self._save, self._carry_out)

    def _save(self, model: str, path: str, step: int) -> None:
        saved = SavedModel(model=model, path=str(Path(path).absolute()), step=step)
        is_own = saved in self._saved
        if Path(path).exists() and is_own and step <= self._recorded.step:
            return
        if step < self._recorded.step:
            raise UserError(
                f"{path} was not there when the program ended in an earlier start, which has gone on to step "
                f"{self._recorded.step}; its weights are not kept: leave {model}.save out, or start anew in another "
                "run_dir"
            )
        if Path(path).exists() and not is_own:
            raise UserError(f"{path} exists already; give save a new directory, or remove it first")
        save = Save(step=step)
        assert self._processes is not None
        self._processes.put(save)
        self._wait(save.done)
        source = step_folder(self._directory.checkpoints, step) / model
        what = {"source": str(source), "target": path}
        if is_own:  # behind the checkpoint from which the program goes on, which may do something else now
            delete(Path(path))
        # In a process of its own, which needs no memory of this one.
        words = python_command("realhf.models.convert", msgspec.json.encode(what).decode())
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{model}.save({path!r}): {done.stderr.strip()}")
        append_line(self._directory.saved, saved)

    def _module(self, name: str) -> str:
        """The name by which workers know a module."""
        if name != "__main__":
            return name
        if self._file is None:
            raise UserError(
                "workers cannot find what a notebook or a prompt defines; put it into a file, and import it"
            )
        return module_name(self._file)

    def _carry_out(
        self, round_: int, calls: Sequence[ModelFunctionCallDef], new: dict[str, str], ends: bool
    ) -> Statistics:
        if round_ < self._recorded.step:
            return self._recorded.answer(round_, len(calls) - len(new), new, ends)
        segment = Segment(round=round_, calls=tuple(calls), new=new, ends=ends)
        assert self._processes is not None
        self._processes.put(segment)
        return lambda: self._wait(segment.done)

    def _wait(self, done: "Future[Any]") -> Any:
        assert self._processes is not None
        return self._processes.wait(done)

    def _broken(self, error: BaseException) -> NoReturn:
        """Raises what broke the run, with the line of the program whose call it names."""
        line = self._rounds.line_of(str(error)) if self._rounds else ""
        if line and isinstance(error, RunError):
            raise RunError(f"{line}: {error}", error.workers) from error
        raise error

    def _end(self, *, failed: bool) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.end(failed=failed)


class Batches:
    """The batches of a program's data, one after the other, however often it is iterated. A batch of the first data
    begins a round, and ends the one before."""

    def __init__(self, cluster: Cluster, name: str, steps: int | None, *, is_first: bool):
        self._cluster, self._name, self._steps, self._is_first = cluster, name, steps, is_first

    def __iter__(self) -> Iterator[LiveColumns]:
        made = 0
        while self._steps is None or made < self._steps:
            rounds = self._cluster._begin() if self._is_first else self._cluster._trace()
            yield rounds.batch(self._name)
            made += 1
            if self._steps is None and self._is_first and made >= rounds.rows.num_rows // rounds.rows.rows_per_step:
                return


class _Processes:
    """The workers of a run, and its master on a thread of this process. `broken` raises what has ended the run."""

    def __init__(self, run: Run, directory: RunDirectory, broken: Callable[[BaseException], NoReturn]):
        self._run, self._directory, self._broken = run, directory, broken
        self._queue = ProgramQueue()
        self._failure: BaseException | None = None
        self._failed_s: float | None = None
        self._stops = False
        self._cancel: Callable[[], object] = lambda: None
        context = contextvars.copy_context()
        self._master = threading.Thread(target=lambda: context.run(self._run_master), name=MASTER, daemon=True)
        self._workers = threading.Thread(target=self._run_workers, name="workers", daemon=True)
        self._master.start()
        self._workers.start()

    def put(self, request: Segment | Save | None) -> None:
        while not self._queue.put(request, _LOOK_S):
            self._check()

    def wait(self, done: "Future[Any]") -> Any:
        while True:
            try:
                return done.result(timeout=_LOOK_S)
            except TimeoutError:
                if not done.done():
                    self._check()

    def _check(self) -> None:
        if self._failure is not None:
            self._workers.join(_END_S)  # which may know the cause
            self._broken(self._failure)
        if not self._master.is_alive():  # somebody has asked for the end
            status = known_status(self._directory.status)
            self._broken(RunError(f"the run is over: {status.message if status else 'its master has ended'}"))

    def end(self, *, failed: bool) -> None:
        """Ends the processes: at once if the program has `failed`, else when all calls have ended."""
        until_s = time.monotonic() + _END_S
        if not failed and self._failure is None and self._master.is_alive():
            self.put(None)
        self._stops = failed
        while self._master.is_alive() and time.monotonic() < until_s:
            if failed:
                self._cancel()  # it may have begun only now
            self._master.join(_LOOK_S)
        self._workers.join(_END_S)
        if not failed and self._failure is not None:
            self._broken(self._failure)

    def _run_master(self) -> None:
        def begun(task: "asyncio.Task[None]") -> None:
            loop = asyncio.get_running_loop()
            self._cancel = partial(_call_if_open, loop, task.cancel)

        try:
            with logging_to(self._directory.log(MASTER), MASTER), self._directory.lock(MASTER):
                asyncio.run(serve(self._directory, self._run, "127.0.0.1", begun, self._queue))
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # the program raises it
            self._failure = self._failure or error

    def _run_workers(self) -> None:
        run, directory = self._run, self._directory
        threads = run.spec.hardware.threads if run.spec.hardware else 1
        env = {START_VARIABLE: current_start(directory), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        job = Job(
            directory=directory,
            processes=workers_of("realhf.worker", directory, run.spec.num_workers, threads, **env),
            workers_per_node=run.spec.devices_per_node,
            start_id=current_start(directory),
        )
        try:
            supervise(LocalLauncher(NoOptions()), job, self._look)
        except _StoppedError:
            pass
        except BaseException as error:  # it knows more than the master
            self._failure = error
            self._cancel()

    def _look(self) -> None:
        if self._failure is not None and self._failed_s is None:
            self._failed_s = time.monotonic()
        if self._stops or (self._failed_s is not None and time.monotonic() - self._failed_s > _SETTLE_S):
            raise _StoppedError


def _call_if_open(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(call)


class _StoppedError(Exception):
    """The program has failed: the workers are stopped."""
