"""Refuses requests that the run's experiment and plan do not have. Pure."""

from pathlib import Path

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import Layout
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
    Split,
    ToWorker,
    Transfer,
)


def refusal(request: ToWorker, run: Run, checkpoints: Path) -> str | None:
    """Why `request` is not to be executed, in words that follow "refused"; None: it is.

    The master of the run never sends such a request. Whether one comes at the right time is not looked at.
    """
    return _not_planned(request, run, checkpoints) or _no_batch(run, getattr(request, "batch", None))


def _not_planned(request: ToWorker, run: Run, checkpoints: Path) -> str | None:
    match request:
        case CallFunction(call=call, batch=batch, layout=layout):
            definition = _call(run, batch.split, call)
            if definition is None or layout != _layout(run, batch.split, definition):
                return f"a call {call} in a layout that the plan does not have"
            size = _batch_size(run, batch.split)
            if request.micro_batches < 1 or any(i >= size for ids in request.mini_batches for i in ids):
                return f"a call {call} of samples that {batch} does not have"
        case PrepareMove(name=name, model=model, layout=layout) if name in run.graph.follows:
            if (model, layout) != (run.graph.follows[name].target, run.homes[run.graph.follows[name].target]):
                return f"to prepare for {name} otherwise than the plan has it"
        case Reallocate(call=call, batch=batch) | PrepareMove(name=call, batch=batch):
            model, layout = request.model, request.layout
            definition = _call(run, batch.split, call)
            if definition is None or (model, layout) != (definition.model_name, _layout(run, batch.split, definition)):
                return f"a reallocation for {call} that the plan does not have"
            if batch.split == "train" and run.plan.takes_over(call):
                return f"a reallocation for {call}, which takes over the copy of another call"
        case Release(model=model, layout=layout):
            if not any(
                (model, layout) == (call.model_name, _layout(run, split, call)) != (model, run.homes.get(model))
                for split, call in _calls(run)
            ):
                return f"the release of a copy of {model} that the plan does not have"
        case Transfer(batch=batch, sends=sends, receives=receives):
            keys = {key for split, call in _calls(run) if split == batch.split for key in call.output_data}
            ends = [(each.peer, each.key) for each in sends] + [(each.peer, each.key) for each in receives]
            if any(peer >= run.spec.num_workers or key not in keys for peer, key in ends):
                return f"a transfer of {batch} of keys or workers that the run does not have"
        case FollowParameters(name=name) if name not in run.graph.follows:
            return f"to follow {name}, which is no such node"
        case LoadModel(model=model) | OffloadModel(model=model) if model not in run.plan.offload:
            return f"to offload {model}, against the plan"
        case SaveCheckpoint(directory=directory, models=models):
            if not set(models) <= set(run.homes) or not Path(directory).resolve().is_relative_to(checkpoints.resolve()):
                return f"to write {', '.join(models)} to {directory}, which is no checkpoint of the run"
    return None


def _calls(run: Run) -> list[tuple[Split, ModelFunctionCallDef]]:
    calls: list[tuple[Split, ModelFunctionCallDef]] = [("train", call) for call in run.graph.calls.values()]
    if run.evaluation_graph:
        calls += [("evaluation", call) for call in run.evaluation_graph.calls.values()]
    return calls


def _call(run: Run, split: Split, name: str) -> ModelFunctionCallDef | None:
    return next((call for of, call in _calls(run) if of == split and call.name == name), None)


def _layout(run: Run, split: Split, call: ModelFunctionCallDef) -> Layout:
    return (run.training_plan(call) if split == "train" else run.evaluation_plan(call)).layout


def _batch_size(run: Run, split: Split) -> int:
    return run.settings.batch_size if split == "train" or run.evaluation is None else run.evaluation.batch_size


def _no_batch(run: Run, batch: BatchKey | None) -> str | None:
    if batch is None:
        return None
    is_known = batch.step < run.experiment.steps if batch.split == "train" else run.evaluation is not None
    return None if is_known else f"a request of {batch}, which the run does not have"
