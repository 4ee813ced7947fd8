"""Refuses requests that the run's experiment and plan do not have. Pure."""

from pathlib import Path

from realhf.rundir.run import Run
from realhf.transport.messages import (
    BatchKey,
    CallFunction,
    FollowParameters,
    LoadModel,
    OffloadModel,
    PrepareMove,
    Reallocate,
    Release,
    SaveCheckpoint,
    ToWorker,
    Transfer,
)


def refusal(request: ToWorker, run: Run, checkpoints: Path) -> str | None:
    """Why `request` is not to be executed, in words that follow "refused"; None: it is.

    The master of the run never sends such a request. Whether one comes at the right time is not looked at.
    """
    return _no_batch(run, getattr(request, "batch", None)) or _not_planned(request, run, checkpoints)


def _not_planned(request: ToWorker, run: Run, checkpoints: Path) -> str | None:
    match request:
        case CallFunction(call=call, batch=batch, layout=layout):
            definition = run.experiment.graphs[batch.split].calls.get(call)
            if definition is None or layout != run.call_plan(batch.split, definition).layout:
                return f"a call {call} in a layout that the plan does not have"
            size = run.batch_size(batch.split)
            if request.micro_batches < 1 or any(i >= size for ids in request.mini_batches for i in ids):
                return f"a call {call} of samples that {batch} does not have"
        case PrepareMove(name=name, model=model, layout=layout) if name in run.experiment.graph.follows:
            target = run.experiment.graph.follows[name].target
            if (model, layout) != (target, run.homes[target]):
                return f"to prepare for {name} otherwise than the plan has it"
        case Reallocate(call=call, batch=batch) | PrepareMove(name=call, batch=batch):
            model, layout = request.model, request.layout
            definition = run.experiment.graphs[batch.split].calls.get(call)
            planned = definition and (definition.model_name, run.call_plan(batch.split, definition).layout)
            if (model, layout) != planned:
                return f"a reallocation for {call} that the plan does not have"
            if batch.split == "train" and run.plan.takes_over(call):
                return f"a reallocation for {call}, which takes over the copy of another call"
        case Release(model=model, layout=layout):
            if not any(
                (model, layout) == (call.model_name, copied) != (model, run.homes.get(model))
                for call, copied in run.calls_with_layouts()
            ):
                return f"the release of a copy of {model} that the plan does not have"
        case Transfer(batch=batch, sends=sends, receives=receives):
            makes = run.experiment.graphs[batch.split].makes
            ends = [(each.peer, each.key) for each in sends] + [(each.peer, each.key) for each in receives]
            if any(peer >= run.spec.num_workers or not makes(key) for peer, key in ends):
                return f"a transfer of {batch} of keys or workers that the run does not have"
        case FollowParameters(name=name) if name not in run.experiment.graph.follows:
            return f"to follow {name}, which is no such node"
        case LoadModel(model=model) | OffloadModel(model=model) if model not in run.plan.offload:
            return f"to offload {model}, against the plan"
        case SaveCheckpoint(directory=directory, models=models):
            if not set(models) <= set(run.homes) or not Path(directory).resolve().is_relative_to(checkpoints.resolve()):
                return f"to write {', '.join(models)} to {directory}, which is no checkpoint of the run"
    return None


def _no_batch(run: Run, batch: BatchKey | None) -> str | None:
    if batch is None:
        return None
    is_known = batch.step < run.experiment.steps if batch.split == "train" else batch.split in run.experiment.graphs
    return None if is_known else f"a request of {batch}, which the run does not have"
