"""Executes steps of a run once more from its nearest checkpoint, in a directory of their own, and compares."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import RunError, UserError
from realhf.base.files import delete
from realhf.data.recorded import read_recorded
from realhf.dataflow.plan import DIGEST_LENGTH, ExecutionPlan, load_plan, plan_digest
from realhf.lifecycle.controller import Controller, Listener, launcher_of
from realhf.lifecycle.dump import dump, keys_of
from realhf.lifecycle.interruption import Stopped
from realhf.lifecycle.new import check_experiment, check_run, fill
from realhf.lifecycle.request import RunRequest, experiment_of
from realhf.lifecycle.resume import as_stale, check_working_directory, decaying
from realhf.planning.planner import plan_for
from realhf.planning.request import DevicesRequest, Measured, PlanRequest
from realhf.report.differences import Difference, StepRecord, differences
from realhf.rundir.checkpoints import check, saved_steps, step_folder
from realhf.rundir.lines import Tail, append_line, read_lines, step_line
from realhf.rundir.outputs import read_outputs
from realhf.rundir.paths import RunDirectory, workers_in_words
from realhf.rundir.run import Run, RunSpec, read_spec, refuse_program
from realhf.rundir.samples import Sample, sample_line
from realhf.rundir.status import EndRequest, request_end

# Nothing is saved, tracked or told to others.
_QUIET = {
    "checkpoint_every_steps": None,
    "checkpoint_every_minutes": None,
    "keep_checkpoints": None,
    "keep_best": None,
    "stop_early": None,
    "tensorboard": False,
    "wandb_project": None,
    "trackio_project": None,
    "network_interface": "lo",
    "master_address": None,
    "avoided": (),
}


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """A step of a run, counted from 1, and how it is executed once more: under the plan in a file, on so many workers
    of this machine, or with neither under the plan that it had. `tolerance`: a number that differs by no more,
    relative to the larger of both and 1, does not differ; above 0, digests of weights are not compared. `call`: only
    this call is compared. `dump`: its inputs and outputs in the step are written there (`realhf.lifecycle.dump`)."""

    run_dir: Path
    step: int
    plan: Path | None = None
    num_workers: int | None = None
    tolerance: float = 0.0
    call: str = ""
    dump: Path | None = None
    launcher: Any = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`first`: the first step that was executed; `compared`: how many; `found`: what differs in the first step in which
    something does; `largest`: the largest difference of two numbers, in all steps."""

    first: int
    compared: int
    found: Sequence[Difference]
    largest: Difference | None


def verify(request: VerifyRequest, say: Callable[[str], None]) -> Verdict:
    """Executes the steps from the checkpoint before the asked one up to it, and compares what the run recorded.

    Raises:
        UserError: there is no such step, the experiment or its inputs have changed, or the plan does not fit.
        RunError: the steps could not be executed; the text says why.
    """
    directory = RunDirectory.open(request.run_dir)
    recorded = _recorded(directory)
    if request.step not in recorded:
        made = f"1 to {max(recorded)}" if recorded else "none"
        raise UserError(f"--step {request.step}: the run in {directory.path} has recorded {made}; give one of these")
    before = _checkpoint_before(directory, request.step)
    run = _run(request, directory, recorded[request.step], before)
    _check_schedule(run, [recorded[step] for step in range(before + 1, request.step + 1) if step in recorded])
    again = RunDirectory(directory.path / f"verify-{os.getpid()}")
    steps = f"steps {before + 1} to {request.step}" if before + 1 < request.step else f"step {request.step}"
    say(
        f"{steps}, from {f'checkpoints/step-{before}' if before else 'the beginning'}, on "
        f"{workers_in_words(run.spec.num_workers)}, plan {plan_digest(run.plan)[:DIGEST_LENGTH]}"
    )
    with _removed(again):
        _execute(run, request, directory, again)
        verdict = _compared(request, directory, again, recorded, before)
        if request.dump is not None:
            dump(run, request.call, request.step, {"run": directory.rollouts, "now": again.rollouts}, request.dump)
        return verdict


def _recorded(directory: RunDirectory) -> dict[int, dict[str, Any]]:
    """The lines of `metrics.jsonl`, by step."""
    return {int(line["step"]): line for line in read_lines(directory.metrics, step_line).values}


def _checkpoint_before(directory: RunDirectory, step: int) -> int:
    """The steps of the newest good checkpoint from which `step` can be executed; 0: the beginning."""
    for saved in reversed([each for each in saved_steps(directory.checkpoints) if each < step]):
        with contextlib.suppress(UserError):
            check(step_folder(directory.checkpoints, saved))
            return saved
    return 0


def _run(request: VerifyRequest, directory: RunDirectory, line: dict[str, Any], before: int) -> Run:
    saved = read_spec(directory.experiment, RunSpec)
    refuse_program(saved, "realhf verify")
    check_working_directory(saved)
    # A run that went on with more steps had another schedule before. Older versions do not say how many it was to make.
    of_steps = line.get("of_steps", saved.values["steps"])
    saved = msgspec.structs.replace(saved, values=saved.values | {"steps": of_steps})
    experiment = experiment_of(saved.experiment_file, (), saved)
    check_experiment(experiment)
    if request.call:
        keys = keys_of(experiment.graph, request.call)
        saved = msgspec.structs.replace(saved, record=tuple(sorted({*saved.record, *keys}))) if request.dump else saved
    own = _plan_of(directory, line)
    fields = _QUIET | {"resume_step": before}
    if request.plan or request.num_workers:
        plan, cluster = _other_plan(request, experiment, saved, own)
        fields |= {"num_workers": cluster.num_devices, "devices_per_node": cluster.devices_per_node}
        fields["hardware"] = cluster.hardware
    else:
        plan, workers = own, own.num_devices
        per_node = saved.devices_per_node if workers % saved.devices_per_node == 0 else workers
        fields |= {"num_workers": workers, "devices_per_node": per_node}
    return Run(msgspec.structs.replace(saved, **fields), experiment.stale(plan.staleness), plan)


def _check_schedule(run: Run, lines: Sequence[dict[str, Any]]) -> None:
    """Raises UserError where learning rates followed another number of steps than `run` has in one of its steps."""
    steps = run.experiment.steps
    others = [line for line in lines if line.get("of_steps", steps) != steps]
    if others and decaying(run):
        step, planned = others[-1]["step"], others[-1]["of_steps"]
        raise UserError(
            f"--step {lines[-1]['step']}: learning rates follow the number of steps, which was {planned} in step "
            f"{step} and is {steps} in this one, and there is no good checkpoint in between; give {step} or less"
        )


def _plan_of(directory: RunDirectory, line: dict[str, Any]) -> ExecutionPlan:
    """The plan under which the step of a line was made: that of the run, or one that it had before."""
    for path in (directory.plan, *sorted(directory.path.glob("plan-*.json"))):
        plan = load_plan(path)
        if plan_digest(plan)[:DIGEST_LENGTH] == line.get("plan"):
            return plan
    raise UserError(
        f"{directory.path} has no plan {line.get('plan')}, under which step {line['step']} was made; give one with "
        "--plan"
    )


def _other_plan(
    request: VerifyRequest, experiment: ResolvedExperiment, saved: RunSpec, own: ExecutionPlan
) -> tuple[ExecutionPlan, Any]:
    devices = DevicesRequest(num_workers=request.num_workers, place="here")
    wanted = PlanRequest(plan=request.plan, devices=devices, measured=Measured(ignores_runs=saved.ignores_runs))
    return plan_for(experiment, as_stale(wanted, own.staleness))


@contextlib.contextmanager
def _removed(directory: RunDirectory) -> Iterator[None]:
    """Afterwards the directory is gone, unless the run in it broke."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{error}\nwhat was executed is in {directory.path}", returncode=error.returncode) from None
    except BaseException:
        delete(directory.path)
        raise
    delete(directory.path)


class _Until(Listener):
    """Ends the run once it has recorded a step."""

    def __init__(self, directory: RunDirectory, step: int):
        self._directory, self._step, self.is_asked = directory, step, False
        self._lines = Tail(directory.metrics, step_line, lambda _: None)

    def watched(self, job: str) -> None:
        if not self.is_asked and any(line["step"] >= self._step for line in self._lines.read()):
            self.is_asked = True
            request_end(self._directory.stop, EndRequest(reason="asked"))


def _execute(run: Run, request: VerifyRequest, directory: RunDirectory, again: RunDirectory) -> None:
    given: dict[str, Any] = {} if request.launcher is None else {"launcher": request.launcher}
    asked = RunRequest(experiment=run.spec.experiment_file, run_dir=again.path, **given)
    check_run(run, asked)
    launcher, _ = launcher_of(run, asked, again)
    RunDirectory.create(again.path)
    if before := run.spec.resume_step:
        source, target = (step_folder(each.checkpoints, before) for each in (directory, again))
        shutil.copytree(source, target, copy_function=_link)
        append_line(again.evaluations, {"step": before})  # which need not be made once more
    if directory.inputs.exists():
        shutil.copyfile(directory.inputs, again.inputs)
    fill(run, again)
    try:
        Controller(run, asked, again, launcher, _Until(again, request.step)).carry_out()
    except Stopped:
        pass
    except RunError:  # the error is in a later step than the asked one: some begin before the run ends
        if request.step not in _recorded(again):
            raise


def _link(source: str, target: str) -> None:
    """Nothing writes into a checkpoint: it need not be copied where the file system has links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _compared(
    request: VerifyRequest,
    directory: RunDirectory,
    again: RunDirectory,
    recorded: dict[int, dict[str, Any]],
    before: int,
) -> Verdict:
    lines = _recorded(again)
    if request.step not in lines:
        raise RunError(f"the run that executed the steps once more ended before step {request.step}")
    found: list[Difference] = []
    largest: Difference | None = None
    steps = [step for step in range(before + 1, request.step + 1) if step in recorded and step in lines]
    both = zip(_records(directory, recorded, steps), _records(again, lines, steps), strict=True)
    for one, other in both:
        every = list(differences(one, other, exactly=not request.tolerance))
        every = [each for each in every if request.call in ("", each.call)]
        numbers = [each for each in every if each.size is not None]
        largest = max([*([largest] if largest else []), *numbers], key=lambda each: each.size or 0.0, default=None)
        found = found or [each for each in every if each.size is None or each.size > request.tolerance]
    return Verdict(first=before + 1, compared=len(steps), found=found, largest=largest)


def _records(
    directory: RunDirectory, lines: Mapping[int, dict[str, Any]], steps: Collection[int]
) -> Iterator[StepRecord]:
    """All that a directory has of each of the steps."""
    outputs = read_outputs(directory.outputs, steps)
    samples: dict[int, list[Sample]] = {}
    for sample in read_lines(directory.samples, sample_line).values:
        if sample.split == "train":
            samples.setdefault(sample.step, []).append(sample)
    recorded_keys = read_spec(directory.experiment, RunSpec).record
    for step in steps:
        calls, values = outputs.get(step, {}), {}
        for call, key in ((call, key) for call, made in calls.items() for key in made.keys if key in recorded_keys):
            with contextlib.suppress(UserError):  # not recorded from the beginning, or in a dtype that NumPy lacks
                of_samples = read_recorded(directory.rollouts, step - 1, call, key)
                values[call, key] = {sample: each.value for sample, each in of_samples.items()}
        yield StepRecord(line=lines[step], samples=samples.get(step, ()), outputs=calls, values=values)
