"""From the command line of `realhf run` to a validated run: a new one, or one that goes on from its checkpoint."""

import argparse
import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.experiment import auto_settings, follows_of
from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_ranges
from realhf.cli.experiment import asked_again, build_experiment, plan_request
from realhf.cli.fewer import check_recovery
from realhf.cli.phases import Phases
from realhf.cli.replanning import check_replanning
from realhf.data.fit import check_fit, check_replay
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import ExecutionPlan, load_plan
from realhf.engine.train.megatron_check import check_megatron
from realhf.machine.gpus import count_gpus
from realhf.master.trackers import check_trackers
from realhf.models.checkpoint_index import check_architecture, initial_optimizer_steps, read_index
from realhf.models.hugging_face_files import check_checkpoint
from realhf.planning.cluster import Cluster
from realhf.planning.clusters import MEMORY_GB, cluster_of
from realhf.planning.planner import plan_for
from realhf.planning.request import PlanRequest
from realhf.rundir.checkpoints import Choice, RunState, newest_good, step_folder
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import MAX_DEVICES, MAX_STEPS, RANGES, YEAR_S, Run, RunSpec, read_spec
from realhf.rundir.status import read_status

# Options that are fields of the run's specification; what is not given keeps the field's default, or what the run had.
SPEC_OPTIONS = (
    "record",
    "replay",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_checkpoints",
    "keep_best",
    "checkpoint_failures",
    "verify_reallocations_every",
    "call_timeout_s",
    "deadline_factor",
    "setup_timeout_s",
    "tensorboard",
    "wandb_project",
    "drift_threshold",
)
# Of the numbers of the command line that are no fields of the specification.
OPTION_RANGES = {
    "num_workers": Range("--num-workers", 1, MAX_DEVICES),
    "nodes": Range("--nodes", 1, MAX_DEVICES),
    "gpus_per_node": Range("--gpus-per-node", 1, MAX_DEVICES),
    "memory_gb": Range("--memory-gb", *MEMORY_GB, "GiB"),
    "max_restarts": Range("--max-restarts", 1, 10**6),
    "min_workers": Range("--min-workers", 1, MAX_DEVICES),
    "switch_cost_s": Range("--switch-cost-s", 0, YEAR_S, "seconds"),
    "queue_timeout_s": Range("--queue-timeout-s", 0, YEAR_S, "seconds"),
}
EXPERIMENT_RANGES = {"steps": Range("steps", 1, MAX_STEPS), "seed": Range("seed", 0, 2**63 - 1)}
# What may differ when a run goes on: it is how far to go, and no part of what a step does.
CHANGEABLE_FIELDS = ("steps",)


def new_run(arguments: argparse.Namespace) -> Run:
    """A run from its first step.

    Raises:
        UserError: anything about it that can be wrong, found before a process starts.
    """
    _check_numbers(arguments)
    experiment = build_experiment(arguments.experiment, arguments.overrides)
    _check_experiment(experiment)
    with Phases() as watch:
        plan, cluster = plan_for(experiment, _request(arguments), watch)
    run = Run(RunSpec(**_base(arguments, experiment, cluster), **_given(arguments)), experiment, plan)
    _check(run, arguments)
    return run


def resumed_run(arguments: argparse.Namespace, directory: RunDirectory) -> tuple[Run, Choice]:
    """The run of `directory`, to go on from its newest good checkpoint; also which that is.

    Fields and options that are not given are those of the run. Another plan or number of workers may be given.

    Raises:
        UserError: there is no good checkpoint, the experiment is another one or was changed, the run has ended.
    """
    _check_numbers(arguments)
    saved = read_spec(directory.experiment, RunSpec)
    if os.getcwd() != saved.working_directory:
        raise UserError(
            f"the run was started in {saved.working_directory}, which its relative paths begin at, and this is "
            f"{os.getcwd()}; cd {saved.working_directory} and resume it there"
        )
    experiment = build_experiment(arguments.experiment, arguments.overrides, saved=saved)
    _check_unchanged(saved.values, _plain(experiment), directory)
    choice = newest_good(directory.checkpoints)
    if choice.state is None:
        reasons = "".join(f"\n  step {step}: {reason}" for step, reason in choice.damaged.items())
        raise UserError(
            f"{directory.checkpoints} has no checkpoint to go on from; start a new run with another --run-dir{reasons}"
        )
    _check_steps(experiment.steps, choice.state.step, directory)
    _check_experiment(experiment)
    plan, cluster = _plan(experiment, arguments, saved, directory)
    options = {**_base(arguments, experiment, cluster), **_given(arguments), "resume_step": choice.state.step}
    if arguments.plan is not None or _names_devices(arguments):
        options["avoided"] = ()  # who names devices has seen to them
    run = Run(msgspec.structs.replace(saved, **options), experiment, plan)
    _check(run, arguments)
    _check_state(run, choice.state, directory)
    return run, choice


def _base(arguments: argparse.Namespace, experiment: Any, cluster: Cluster) -> dict[str, Any]:
    interface = arguments.network_interface or ("lo" if arguments.launcher == "local" else None)
    return {
        "experiment_file": str(Path(arguments.experiment).resolve()),
        "experiment_class": type(experiment).__name__,
        "values": msgspec.to_builtins(experiment),
        "working_directory": os.getcwd(),
        "num_workers": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "hardware": cluster.hardware,
        "network_interface": interface,
    }


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in SPEC_OPTIONS if getattr(arguments, name) is not None}
    return msgspec.convert(given, dict[str, Any])


def _plain(experiment: Any) -> dict[str, Any]:
    """The values of an experiment as they stand in experiment.json."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(experiment)))
    return plain


def _check_unchanged(saved: dict[str, Any], now: dict[str, Any], directory: RunDirectory) -> None:
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
    status = None
    with contextlib.suppress(UserError):  # a damaged status is replaced when the run goes on
        status = read_status(directory.status)
    if steps < made:
        raise UserError(f"steps={steps} is below the {made} steps that the run has made; give --steps {made} or more")
    if steps == made and status is not None and status.state == "done":
        raise UserError(f"the run in {directory.path} has made all its {made} steps; give a larger --steps to go on")


def _plan(
    experiment: Any, arguments: argparse.Namespace, saved: RunSpec, directory: RunDirectory
) -> tuple[ExecutionPlan, Cluster]:
    """The run's own plan, unless the command line asks for another or for another number of devices."""
    request = asked_again(_request(arguments), saved)
    if not _names_devices(arguments):
        nodes = 1 if arguments.plan else saved.num_workers // saved.devices_per_node
        per_node = None if arguments.plan else saved.devices_per_node
        request = replace(request, devices=replace(request.devices, nodes=nodes, gpus_per_node=per_node))
    if arguments.plan is None:
        cluster = cluster_of(request.devices)
        before = (saved.num_workers, saved.devices_per_node, saved.hardware or cluster.hardware)
        if (cluster.num_devices, cluster.devices_per_node, cluster.hardware) == before:
            return load_plan(directory.plan), cluster
    with Phases() as watch:
        return plan_for(experiment, request, watch)


def _request(arguments: argparse.Namespace) -> PlanRequest:
    intervals = (arguments.checkpoint_every_steps, arguments.checkpoint_every_minutes)
    return replace(plan_request(arguments), saves=any(interval is not None for interval in intervals))


def _names_devices(arguments: argparse.Namespace) -> bool:
    """Whether the command line says how many devices there are."""
    return arguments.nodes != 1 or arguments.num_workers is not None or arguments.gpus_per_node is not None


def _check_state(run: Run, state: RunState, directory: RunDirectory) -> None:
    """What fields do not tell: the batch size of `@auto`, and the models that the experiment's code makes of them."""
    batch_size = run.settings.batch_size
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
        check_architecture(read_index(checkpoint), checkpoint, run.graph.models[model])


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Every number of the command line, before anything is done with one."""
    check_ranges(vars(arguments), OPTION_RANGES)
    check_ranges(_given(arguments), RANGES)


def _check_experiment(experiment: Any) -> None:
    """What can be wrong about an experiment whatever its plan is."""
    check_ranges({name: getattr(experiment, name) for name in EXPERIMENT_RANGES}, EXPERIMENT_RANGES)
    _check_finite("", msgspec.to_builtins(experiment))
    extent, batch_size = experiment.dataset.check(), auto_settings(experiment).batch_size
    if extent.rows < batch_size:
        raise UserError(f"the data set has {extent.rows} rows, fewer than batch_size={batch_size}; add rows")
    check_fit(DataflowGraph(experiment.rpcs, experiment.dataset.keys, follows_of(experiment)), extent)


def _check_finite(name: str, value: Any) -> None:
    """No field, however deep, is NaN or infinite: JSON, as which workers read them, has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name.removeprefix('.')} {value} is not finite; give a number that is")
    if isinstance(value, dict):
        for key, part in value.items():
            _check_finite(f"{name}.{key}", part)
    if isinstance(value, list | tuple):
        for i, part in enumerate(value):
            _check_finite(f"{name}.{i}", part)


def _check(run: Run, arguments: argparse.Namespace) -> None:
    """Everything about a run that can be wrong, found before a process starts."""
    run.check()
    check_recovery(arguments, run)
    check_replanning(arguments, run)
    check_trackers(run.spec)
    _check_backends(run, has_gpus=count_gpus() > 0 if arguments.launcher == "local" else not arguments.cpu_only)
    for name, setup in run.models.items():  # looked up once here: a checkpoint that does not fit is found now
        if setup.checkpoint is not None:
            check_checkpoint(setup.checkpoint, run.graph.models[name], setup.new_head)
            initial_optimizer_steps(setup)
    if run.evaluation:
        assert run.evaluation_graph
        extent = run.evaluation.dataset.check()
        check_fit(run.evaluation_graph, extent)
        if extent.rows % run.evaluation.batch_size:
            raise UserError(
                f"the evaluation's batch_size={run.evaluation.batch_size} does not divide its {extent.rows} rows; "
                "change either"
            )
    if run.spec.replay:
        folder = Path(run.spec.replay)
        if not folder.is_dir():
            raise UserError(f"--replay {folder}: no such folder; give RUN_DIR/rollouts of a run with --record")
        check_replay(run.graph, folder, range(run.spec.resume_step, run.experiment.steps), run.settings.batch_size)


def _check_backends(run: Run, has_gpus: bool) -> None:
    """As the workers will at their start."""
    for name, setup in run.models.items():
        if setup.backend == "megatron" and setup.optimizer is not None:
            check_megatron(run.graph.models[name], run.homes[name].strategy, "cuda" if has_gpus else "cpu")
