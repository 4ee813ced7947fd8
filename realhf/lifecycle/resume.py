"""A run that goes on from its newest good checkpoint, when somebody asks for it."""

import os
from dataclasses import replace
from typing import Any

import msgspec

from realhf.api.computation import check_given
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.data.inputs import check_inputs
from realhf.dataflow.plan import ExecutionPlan, load_plan, updates_text
from realhf.lifecycle.new import check_experiment, check_run, spec_fields
from realhf.lifecycle.request import RunRequest, experiment_of
from realhf.models.checkpoint_index import check_architecture, read_index
from realhf.planning.clusters import cluster_of
from realhf.planning.model.cluster import Cluster
from realhf.planning.planner import plan_for
from realhf.planning.request import PlanRequest, Watch, unwatched
from realhf.rundir.checkpoints import Choice, RunState, newest_good, step_folder
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, RunSpec, read_spec, refuse_program
from realhf.rundir.status import known_status

# A resumed run may make more steps than were asked for first. All other fields stay as they were.
CHANGEABLE_FIELDS = ("steps",)


def resumed_run(request: RunRequest, directory: RunDirectory, watch: Watch = unwatched) -> tuple[Run, Choice]:
    """The run of `directory`, to go on from its newest good checkpoint; also which checkpoint that is.

    Fields and options that are not given are those of the run. Raises UserError if there is no good checkpoint, the
    experiment is another one or was changed, as is what it reads, or the run has ended.
    """
    saved = read_spec(directory.experiment, RunSpec)
    refuse_program(saved, "--resume")
    check_working_directory(saved)
    experiment = experiment_of(request.experiment, request.fields, saved)
    _check_unchanged(saved.values, experiment, directory)
    choice = newest_good(directory.checkpoints)
    if choice.state is None:
        reasons = "".join(f"\n  step {step}: {reason}" for step, reason in choice.damaged.items())
        raise UserError(
            f"{directory.checkpoints} has no checkpoint to go on from; start a new run with another --run-dir{reasons}"
        )
    _check_steps(experiment.steps, choice.state.step, directory)
    check_experiment(experiment)
    plan, cluster = _plan(experiment, request, saved, directory, watch)
    fields = spec_fields(request, experiment, cluster) | {"resume_step": choice.state.step}
    if request.plan.plan or request.plan.rule or request.names_devices:
        fields["avoided"] = ()  # a user who names devices knows which are good
    run = Run(msgspec.structs.replace(saved, **fields), experiment.stale(plan.staleness), plan)
    check_run(run, request)
    _check_state(run, choice.state, directory)
    if not request.recovery.accept_changed_inputs:
        check_inputs(run, directory)
    return run, choice


def check_working_directory(saved: RunSpec) -> None:
    """Raises UserError where a run's relative paths would begin elsewhere."""
    if os.getcwd() != saved.working_directory:
        raise UserError(
            f"the run was started in {saved.working_directory}, which its relative paths begin at, and this is "
            f"{os.getcwd()}; cd {saved.working_directory} and give the command there"
        )


def schedule_note(run: Run, directory: RunDirectory) -> str | None:
    """A warning where another number of steps than the run had, by its directory, changes learning rates to come."""
    before, steps = read_spec(directory.experiment, RunSpec).values["steps"], run.experiment.steps
    models = decaying(run)
    if steps == before or not models:
        return None
    return (
        f"warning: --steps {steps} in place of {before} moves the end of the learning-rate schedule of "
        f"{', '.join(models)}: the rates from here on are {'above' if steps > before else 'below'} those of the run "
        "until now; to keep them leave --steps out, and train further in a new run from this one's model"
    )


def decaying(run: Run) -> list[str]:
    """The models whose learning rates follow the number of steps of the run."""
    optimizers = {name: setup.optimizer for name, setup in run.experiment.setups.items() if run.optimizer_steps(name)}
    return [name for name, one in optimizers.items() if one and one.schedule != "constant"]


def _check_unchanged(saved: dict[str, Any], experiment: ResolvedExperiment, directory: RunDirectory) -> None:
    fields = msgspec.to_builtins(experiment.source)
    now = msgspec.json.decode(msgspec.json.encode(fields))  # as they stand in experiment.json
    changed = [text for name, text in _differences(saved, now) if name not in CHANGEABLE_FIELDS]
    if changed:
        raise UserError(
            f"the run in {directory.path} has other fields: {'; '.join(changed)}. A run goes on as it began: leave "
            "them out (only steps may change), or start a new run with another --run-dir"
        )


def _differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, "name was ..., now ...") of every field with another value."""
    found = []
    for name in saved.keys() & now.keys():
        before, after = saved[name], now[name]
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append((f"{prefix}{name}", f"{prefix}{name} was {before!r}, now {after!r}"))
    return sorted(found)


def _check_steps(steps: int, made: int, directory: RunDirectory) -> None:
    if steps < made:
        raise UserError(f"steps={steps} is below the {made} steps that the run has made; give --steps {made} or more")
    status = known_status(directory.status)
    if steps == made and status is not None and status.state == "done":
        raise UserError(f"the run in {directory.path} has made all its {made} steps; give a larger --steps to go on")


def _plan(
    experiment: ResolvedExperiment, request: RunRequest, saved: RunSpec, directory: RunDirectory, watch: Watch
) -> tuple[ExecutionPlan, Cluster]:
    """The run's own plan, unless another one or another number of devices is asked for."""
    wanted, own = request.plan_request(saved), load_plan(directory.plan)
    if not request.names_devices and not wanted.plan:
        nodes, per_node = saved.num_workers // saved.devices_per_node, saved.devices_per_node
        wanted = replace(wanted, devices=replace(wanted.devices, nodes=nodes, gpus_per_node=per_node))
    if not wanted.plan and not wanted.rule:
        cluster = cluster_of(replace(wanted.devices, threads=experiment.threads))
        before = (saved.num_workers, saved.devices_per_node, saved.hardware or cluster.hardware)
        if (cluster.num_devices, cluster.devices_per_node, cluster.hardware) == before:
            stale = experiment.stale(own.staleness)
            check_given(own, stale, stale.graph, stale.settings.batch_size, cluster.num_devices)
            return own, cluster
    return plan_for(experiment, as_stale(wanted, own.staleness), watch)


def as_stale(wanted: PlanRequest, staleness: int) -> PlanRequest:
    """The request for a plan of the run's staleness: copies that keep old weights are in its checkpoints. Raises
    UserError if it asks for another."""
    asked = wanted.given.staleness if wanted.given else staleness
    if wanted.staleness_up_to or asked != staleness:
        option = f"--plan says staleness={asked}" if asked != staleness else "--staleness-up-to is for new runs"
        raise UserError(
            f"{option}, and the run's rollouts are by weights {updates_text(staleness)} old, of which its checkpoints "
            "have copies; leave it out, or start a new run"
        )
    return replace(wanted, staleness=staleness)


def _check_state(run: Run, state: RunState, directory: RunDirectory) -> None:
    """Checks what fields do not tell: the batch size of `@auto`, and the models that the experiment's code makes."""
    batch_size = run.experiment.settings.batch_size
    if state.samples != state.step * batch_size:
        raise UserError(
            f"the run has read {state.samples} samples in {state.step} steps, which is no batch_size={batch_size}; "
            f"give the batch size of before, {state.samples // state.step}, or start a new run"
        )
    if set(run.changing_models) != set(state.models):
        raise UserError(
            f"the experiment trains {', '.join(sorted(run.changing_models))}, the run in {directory.path} trains "
            f"{', '.join(sorted(state.models))}; resume it with the experiment it was started with"
        )
    for model in run.changing_models:
        checkpoint = step_folder(directory.checkpoints, state.step) / model
        check_architecture(read_index(checkpoint), checkpoint, run.experiment.graph.models[model])
