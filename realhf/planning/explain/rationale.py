"""Says of a plan why it is this one: `Rationale`, from what a search and a prediction know."""

from itertools import groupby

from realhf.dataflow.rationale import DeviceMemory, Instead, Rationale
from realhf.planning.explain.analysis import Analysis, analyse
from realhf.planning.explain.comparison import Alternative, best_alternatives
from realhf.planning.predict import Prediction
from realhf.planning.presets import evaluate_preset
from realhf.planning.search import SearchResult
from realhf.planning.task import PlanningTask


def explain(task: PlanningTask, prediction: Prediction, result: SearchResult | None) -> Rationale:
    """The rationale of a predicted plan; `result` is the search that found it, None if a person gave it."""
    analysis = analyse(task, prediction)
    simple = evaluate_preset("heuristic", task)
    origin, certificate = "given to the run", ""
    if result:
        options, certificate = " x ".join(map(str, result.num_options.values())), str(result.certificate)
        origin = f"the best of {result.evaluations:,} plans that a search looked at, out of {options} options"
    return Rationale(
        origin=origin,
        hardware=task.cluster.hardware.name,
        profiled=task.costs.profiled,
        certificate=certificate,
        limits=analysis.limits,
        heuristic_step_s=simple.prediction.step_s if simple.prediction else None,
        heuristic_fits=not simple.problem,
        device_memory_bytes=task.cluster.device_memory_bytes,
        memory=_memory(analysis),
        instead=tuple(_instead(alternative) for alternative in best_alternatives(task, prediction.plan)),
    )


def _memory(analysis: Analysis) -> tuple[DeviceMemory, ...]:
    """Neighbouring devices with the same needs are one entry."""
    needs = list(zip(analysis.static_bytes, analysis.prediction.device_bytes, analysis.communicator_bytes, strict=True))
    groups = [list(group) for _, group in groupby(range(len(needs)), needs.__getitem__)]
    return tuple(
        DeviceMemory(
            devices=(group[0], len(group)),
            static_bytes=round(needs[group[0]][0]),
            peak_bytes=round(needs[group[0]][1]),
            communicator_bytes=round(needs[group[0]][2]),
        )
        for group in groups
    )


def _instead(alternative: Alternative) -> Instead:
    numbers = {"num_too_large": alternative.num_too_large, "num_others": alternative.num_options}
    option = alternative.option
    if option is None:
        return Instead(call=alternative.call, layout="", **numbers)
    plural = "" if option.micro_batches == 1 else "es"
    return Instead(
        call=alternative.call,
        layout=f"{option.layout}, {option.micro_batches} micro-batch{plural}",
        slower_by=alternative.slower_by,
        **numbers,
    )
