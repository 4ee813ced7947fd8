"""From a request to a validated run: everything that can be wrong is found before a process starts."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.computation import check_given
from realhf.api.fields import flags_of, named_as_typed
from realhf.api.resolved import ResolvedExperiment
from realhf.api.script.experiment import ScriptExperiment
from realhf.base.errors import UserError
from realhf.base.numbers import Bounds, check_fields
from realhf.data.fit import check_fit, check_replay
from realhf.data.inputs import keep_inputs
from realhf.dataflow.plan import load_plan
from realhf.dataflow.splits import set_name
from realhf.engine.megatron_check import check_megatron
from realhf.geometry.shards import shard_boxes
from realhf.lifecycle.request import RunRequest, experiment_of
from realhf.lifecycle.tokenizer import keep_tokenizer
from realhf.machine.gpu_kernels import left_out
from realhf.machine.gpus import visible_gpus
from realhf.machine.host import read_host
from realhf.master.trackers import check_trackers
from realhf.models.hugging_face_files import check_checkpoint
from realhf.planning.clusters import crowded_text, hardware_text
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.hardware import GIB, in_gib
from realhf.planning.model.measured import network_text
from realhf.planning.planner import check_hardware, plan_for
from realhf.planning.request import Watch, unwatched
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import MAX_STEPS, Run, RunSpec

EXPERIMENT_RANGES: dict[str, Bounds] = {"steps": (1, MAX_STEPS), "seed": (0, 2**63 - 1)}


def new_run(request: RunRequest, watch: Watch = unwatched) -> Run:
    """A run from its first step. Raises UserError for whatever is wrong with it."""
    experiment = experiment_of(request.experiment, request.fields)
    check_experiment(experiment)
    with named_as_typed(type(experiment.source), request.fields):
        plan, cluster = plan_for(experiment, request.plan_request(), watch)
        run = Run(RunSpec(**spec_fields(request, experiment, cluster)), experiment.stale(plan.staleness), plan)
        check_run(run, request)
    return run


def fill(run: Run, directory: RunDirectory, *, accepts_inputs: bool = False) -> None:
    """Makes a run directory ready for a start that a command has asked for: notes the inputs, in place of those noted
    before if it `accepts_inputs`, keeps the tokenizer, and prepares the rest. The plan is the last file but the keys:
    where it is, all is there. Raises UserError or RunError as these do."""
    keep_inputs(run, directory, anew=accepts_inputs)
    keep_tokenizer(run, directory)
    prepare(run, directory)


def spec_fields(request: RunRequest, experiment: ResolvedExperiment, cluster: Cluster) -> dict[str, Any]:
    """The fields of the run's specification that a request decides, for a plan on `cluster`."""
    fields = {
        "experiment_file": str(Path(request.experiment).resolve()),
        "experiment_class": type(experiment.source).__name__,
        "values": msgspec.to_builtins(experiment.source),
        "working_directory": os.getcwd(),
        "num_workers": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "hardware": cluster.hardware,
        "network_interface": None if request.launcher.is_remote else "lo",
        **request.spec,
    }
    if request.plan.measured.ignores_runs:
        fields["ignores_runs"] = True
    if "replay" in request.spec:
        fields["replay"] = str(Path(request.spec["replay"]).resolve())
    return fields


def check_experiment(experiment: ResolvedExperiment, batch_size: int | None = None) -> None:
    """Raises UserError if the experiment can run under no plan. `batch_size`: another one than its own."""
    check_values(experiment)
    with named_as_typed(type(experiment.source)):
        graph, extent = experiment.graph, experiment.dataset.check()
        batch_size = batch_size or experiment.settings.batch_size
        rows = graph.rows_per_step(batch_size)
        if extent.rows < rows and experiment.steps:
            divided = f" / samples_per_prompt={graph.samples_per_prompt}" if graph.samples_per_prompt > 1 else ""
            raise UserError(
                f"the data set {extent.path} has {extent.rows} rows, fewer than batch_size={batch_size}{divided}; add "
                "rows, or lower it"
            )
        check_fit(graph, extent)
        for split, evaluation in experiment.evaluations.items():
            size = "eval_batch_size" if hasattr(experiment.source, "eval_batch_size") else f"the {split}'s batch size"
            experiment.graphs[split].rows_per_step(evaluation.batch_size, size)
            check_fit(experiment.graphs[split], evaluation.dataset.check())
        if first := extent.first:
            for call in graph.calls.values():
                call.interface_impl.check_row(*first)


def check_values(experiment: ResolvedExperiment) -> None:
    """As `check_experiment`, of what can be judged before models and data are there."""
    cls = type(experiment.source)
    evaluates_only = issubclass(cls, ScriptExperiment) and cls.evaluates_only()
    with named_as_typed(cls):
        check_fields("", experiment.source, EXPERIMENT_RANGES | ({"steps": (0, 0)} if evaluates_only else {}))
    _check_finite("", msgspec.to_builtins(experiment.source))


def _check_finite(name: str, value: Any) -> None:
    """No field, however deep, is NaN or infinite: JSON, which workers read, has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{name[1:].replace('_', '-')} {value} is not finite; give a number that is")
    if isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_finite(f"{name}.{key}", part)


def check_run(run: Run, request: RunRequest) -> None:
    """Raises UserError if the run cannot be carried out under its plan."""
    run.check()
    _check_recovery(run, request)
    if request.replan.mode == "switch" and not run.spec.saves:
        raise UserError(
            "--replan switch changes the plan at a checkpoint, and there is none before the end; give "
            "--checkpoint-every STEPS or --checkpoint-every-minutes MINUTES"
        )
    if run.spec.hardware:
        check_hardware(run.experiment, run.spec.hardware, is_here=not request.launcher.is_remote)
    check_trackers(run.spec)
    left_out()  # workers would find a wrong word when devices are taken
    with_gpus = not request.cpu_only if request.launcher.is_remote else bool(visible_gpus())
    for name, setup in run.experiment.setups.items():
        home = run.homes[name]
        if setup.backend == "megatron" and setup.optimizer is not None:
            check_megatron(run.experiment.graph.models[name], home.strategy, "cuda" if with_gpus else "cpu")
        data_parallel = run.computations[name].data_parallel
        shard_boxes(run.experiment.graph.models[name], home, home.mesh.first, data_parallel)  # may be impossible
        if setup.checkpoint is not None:  # one that does not fit is found now; planning needs no weights
            check_checkpoint(setup.checkpoint, run.experiment.graph.models[name], setup.new_head)
    _ = run.initial_steps  # raises if a checkpoint lacks optimizer states
    if run.spec.replay:
        folder = Path(run.spec.replay)
        if not folder.is_dir():
            raise UserError(f"--replay {folder}: no such folder; give RUN_DIR/rollouts of a run with --record")
        steps = range(run.spec.resume_step, run.experiment.steps)
        check_replay(run.experiment.graph, folder, steps, run.batch_size("train"))


def _check_recovery(run: Run, request: RunRequest) -> None:
    """Raises UserError if the least number of workers or a fallback plan does not fit the run."""
    least, workers = request.recovery.least_workers or 1, run.spec.num_workers
    if least > workers:
        raise UserError(f"--min-workers {least} is more than the run's {workers}; give {workers} or fewer")
    for path, plan in request.recovery.plans.items():
        if not least <= plan.num_devices < workers:
            raise UserError(
                f"--fallback-plan {path} is for {plan.num_devices} devices, which are not fewer than the run's "
                f"{workers} and at least {least}; make one with `realhf plan --num-workers N`, or change --min-workers"
            )
        if request.launcher.is_remote and plan.num_devices % run.spec.devices_per_node:
            raise UserError(
                f"--fallback-plan {path} is for {plan.num_devices} devices, which are no whole nodes of "
                f"{run.spec.devices_per_node}; nodes are lost as a whole, so make one for fewer --nodes"
            )
        if plan.staleness != run.plan.staleness:
            raise UserError(
                f"--fallback-plan {path} says staleness={plan.staleness} and the run's plan {run.plan.staleness}; make "
                "one with the same, whose models the run's checkpoints have"
            )
        check_given(plan, run.experiment, run.experiment.graph, run.batch_size("train"), workers)


def data_lines(run: Run) -> list[str]:
    """Descriptions of the data for training and evaluation."""
    said: list[str] = [run.experiment.dataset.describe()]
    for split, evaluation in run.experiment.evaluations.items():
        if evaluation.dataset is not run.experiment.dataset:
            name = f"{split}: " if set_name(split) else ""
            said.append(f"{name}{evaluation.dataset.describe()}")
    return said


def schedule_lines(run: Run) -> list[str]:
    """Warnings of learning rates that never reach what was asked for: the warm-up is longer than the run."""
    found = []
    for name, setup in run.experiment.setups.items():
        total = run.initial_steps[name] + run.experiment.steps * run.optimizer_steps(name)
        if setup.optimizer and run.optimizer_steps(name) and setup.optimizer.warmup_steps > total:
            given = flags_of(type(run.experiment.source)).get("warmup_steps", [])
            flag = next((one for one in given if one.startswith(f"--{name}.")), given[0] if given else "warmup_steps")
            found.append(
                f"warning: {flag} {setup.optimizer.warmup_steps} is more than the {total} optimizer steps of {name}, "
                f"so its learning rate ends at {total / setup.optimizer.warmup_steps:.0%} of lr={setup.optimizer.lr:g}"
                "; give fewer, or more --steps"
            )
    return found


def checkpoint_lines(run: Run, folder: Path) -> list[str]:
    """The room that the checkpoints of a run that saves on the way take on the disk of `folder`, and a warning if less
    is free."""
    spec = run.spec
    if not spec.saves:
        return []
    each, count = run.checkpoint_bytes, 1
    if spec.keep_checkpoints is not None:
        count = spec.keep_checkpoints + 1 + (spec.keep_best is not None)  # an older one goes when the next is complete
        many = f"at most {count} at a time"
    elif spec.checkpoint_every_steps and not spec.checkpoint_every_minutes:
        count = math.ceil((run.experiment.steps - spec.resume_step) / spec.checkpoint_every_steps)
        many = f"{count} in all"
    else:
        many = f"one every {spec.checkpoint_every_minutes:g} minutes"
    room = f", {in_gib(each * count)}" if count > 1 else ""
    hint = " (--keep-checkpoints N keeps the newest N alone)" if spec.keep_checkpoints is None else ""
    lines = [f"checkpoints: {in_gib(each)} each, {many}{room}{hint}"]
    if each * count > (free := shutil.disk_usage(folder).free):
        lines.append(f"warning: checkpoints need more than the {in_gib(free)} that are free in {folder}")
    return lines


def hardware_lines(run: Run, given: Path | None) -> list[str]:
    """The hardware that the run is planned for, the memory it will need and the step it will take, and warnings: it
    counts on more cores or memory than there is; the plan in the file `given` comes from elsewhere, or needs more
    memory than the devices have."""
    hardware, workers = run.spec.hardware, run.spec.num_workers
    if hardware is None:
        return []
    per_node = run.spec.devices_per_node
    lines = [f"planned for {hardware_text(hardware, workers // per_node, per_node)}"]
    if workers > per_node and (links := network_text(hardware)):
        lines.append(links)
    there, each = read_host().memory_bytes / GIB, hardware.device_memory_bytes / GIB
    needs = [memory.peak_bytes / GIB for memory in run.plan.rationale.memory] if run.plan.rationale else []
    if needs:
        step = f", a step of {run.plan.predicted_step_s:.3g} s" if run.plan.predicted_step_s else ""
        lines.append(f"predicted: at most {in_gib(max(needs) * GIB)} of the {in_gib(each * GIB)} of a device{step}")
    if crowded := crowded_text(hardware, workers):
        lines.append(crowded)
    if hardware.host_cores is not None and workers * each > there:
        lines.append(
            f"warning: {workers} workers with {each:.1f} GiB each count on more than this machine's {there:.1f}"
        )
    made_for = load_plan(given).notes.get("hardware", hardware.name) if given else hardware.name
    if made_for != hardware.name:
        lines.append(f"note: {given} was made for {made_for}; its times and memory are predicted anew")
    if given and max(needs, default=0) > each:
        lines.append(f"warning: {given} needs {max(needs):.1f} GiB on a device, and they have {each:.1f} GiB")
    return lines
