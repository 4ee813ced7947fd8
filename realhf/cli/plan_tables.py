"""The output of `realhf plan`: the plan, its comparison with others, why not otherwise, cases side by side."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import UserError
from realhf.cli.output import table_of
from realhf.dataflow.plan import ExecutionPlan, interval_text, updates_text
from realhf.dataflow.rationale import slower_text
from realhf.geometry.layout import divisors, undivided
from realhf.planning.clusters import hardware_text
from realhf.planning.explain.comparison import Comparison
from realhf.planning.model.hardware import GIB, in_gib
from realhf.planning.model.measured import network_text
from realhf.planning.predict import preemptions
from realhf.planning.task import PlanningTask


def plan_table(plan: ExecutionPlan) -> Table:
    """The calls of a plan in the order in which they are issued."""
    table = table_of("execution plan", "call", "devices", "dp", "tp", "pp", "micro-batches", "predicted s (90 %)")
    ranges = plan.intervals.call_s if plan.intervals else {}
    known = {*plan.calls, *plan.beside}
    order = [entry.call for entry in plan.order if entry.call in known] or [*plan.calls, *plan.beside]
    for name in order:
        if name in plan.beside:
            table.add_row(name, "beside", *["-"] * 4, sure_text(f"{plan.beside[name]:.3f}", ranges.get(name)))
            continue
        call = plan.calls[name]
        predicted = "-" if call.predicted_s is None else f"{call.predicted_s:.3f}"
        degrees = (call.replicas_text, str(call.tp), call.stages_text)
        seconds = sure_text(predicted, ranges.get(name))
        table.add_row(name, call.mesh.text, *degrees, str(call.micro_batches), seconds)
    return table


def choice_lines(plan: ExecutionPlan) -> Iterator[str]:
    """The plan's decisions other than layouts and micro-batches."""
    computed = [f"{name} ({call.compute})" for name, call in plan.calls.items() if call.compute.chosen]
    if computed:
        yield f"computed with: {', '.join(computed)}"
    if plan.copies:
        yield f"parameters not from home: {plan.copies_text}"
    if plan.broadcasts:
        yield f"parameters by broadcasts in process groups: {', '.join(plan.broadcasts)}"
    if plan.changes:
        yield f"copies that get only what changed: {', '.join(plan.changes)}"
    if plan.offload:
        yield f"in host memory while nothing needs them: {', '.join(plan.offload)}"
    if plan.staleness:
        yield f"rollouts by weights {updates_text(plan.staleness)} old"


def comparison_table(comparison: Comparison) -> Table:
    """The plan and the presets: times, how probably each is slower than the plan, memory, and the largest part of the
    longest chain."""
    table = table_of("comparison", "plan", "s/step (90 %)", "x", "slower", "tokens/s", "GiB", "limited by")
    base = comparison.analysis
    for candidate in comparison.candidates:
        analysis = candidate.analysis
        if analysis is None:
            table.add_row(candidate.name, *["-"] * 6)
        elif candidate.problem:  # the times of a plan that cannot run say nothing
            table.add_row(candidate.name, *["-"] * 4, f"{analysis.prediction.peak_bytes / GIB:.1f}", "memory")
        else:
            ratio = (f"{analysis.step_s / base.step_s:.2f}", candidate.slower_text)
            step = sure_text(f"{analysis.step_s:.3g}", candidate.step_interval_s)
            use = (f"{analysis.tokens_per_s:,.0f}", f"{analysis.prediction.peak_bytes / GIB:.1f}")
            table.add_row(candidate.name, step, *ratio, *use, analysis.bottleneck)
    return table


def alternatives_table(comparison: Comparison) -> Table:
    """For each call, the best other layout, what the step would cost with it, and how many others do not fit."""
    title = "why not: the best other layout of each call, all else as it is"
    table = table_of(title, "call", "instead", "s/step", "slower by", "too large", words=2)
    for alternative in comparison.alternatives:
        refused = f"{alternative.num_too_large / max(alternative.num_layouts, 1):.0%}"
        other = ("nothing else fits", "-", "-")
        if (call := alternative.option) is not None:
            layout = f"{call.mesh.text} {call.strategy} mb{call.micro_batches}"
            other = (layout, f"{alternative.step_s:.4g}", slower_text(alternative.slower_by))
        table.add_row(alternative.call, *other, refused)
    return table


def worth_lines(comparison: Comparison) -> Iterator[str]:
    """For each choice that the plan made of how calls compute, a step of the best plan found without it."""
    for worth in comparison.worth:
        without = "nothing that was found fits without it"
        if worth.without_s is not None:
            longer = worth.without_s / comparison.analysis.step_s - 1
            without = f"{worth.without_s:.4g} s a step without it, {longer:+.1%}"
        yield f"{worth.of}: {worth.feature}: {without}"


def case_table(results: Mapping[str, Comparison | UserError]) -> Table:
    """Clusters, or values of staleness, side by side."""
    table = table_of("side by side", "case", "s/step (90 %)", "tokens/s", "GPU-h/Mtok", "peak GiB", "limited by")
    for name, found in results.items():
        if isinstance(found, UserError):
            table.add_row(name, *["-"] * 5)
            continue
        analysis = found.analysis
        intervals = found.plan.intervals
        step = sure_text(f"{analysis.step_s:.4g}", intervals.step_s if intervals else None)
        speed = (step, f"{analysis.tokens_per_s:,.0f}")
        cost = (f"{analysis.gpu_hours_per_million_tokens:.3g}", f"{analysis.prediction.peak_bytes / GIB:.1f}")
        table.add_row(name, *speed, *cost, analysis.bottleneck)
    return table


def setting_text(task: PlanningTask) -> str:
    """The cluster and the workload in one line."""
    cluster, tokens = task.cluster, task.workload.text(task.batch_size)
    group = f", {task.graph.samples_per_prompt} to a prompt" if task.graph.samples_per_prompt > 1 else ""
    planned_for = hardware_text(cluster.hardware, cluster.num_nodes, cluster.devices_per_node)
    return f"{planned_for}; {task.batch_size} samples of {tokens} tokens a step{group}, {task.dtype}"


def excluded_lines(task: PlanningTask) -> Iterator[str]:
    """The degrees of tensor parallelism within a node that models' sizes exclude, and the size."""
    models: dict[str, list[str]] = {}
    for name, model in task.graph.models.items():
        degrees = [tp for tp in divisors(task.cluster.devices_per_node) if undivided(model, tp)]
        if degrees and not isinstance(model, TransformersConfig):
            why = ", ".join(f"tp={tp} does not divide {undivided(model, tp)}" for tp in degrees)
            models.setdefault(why, []).append(name)
    for why, names in models.items():
        yield f"{', '.join(names)}: {why}: left out of the search"


def totals(comparison: Comparison) -> Iterator[str]:
    """Time and memory of a step, its bottleneck, and the heuristic plan beside it."""
    analysis, costs = comparison.analysis, comparison.task.costs
    source = "measured layer timings" if costs.profiled else "the analytic model (no profile; see `realhf profile`)"
    intervals = comparison.plan.intervals
    range_text = f", in 90 % of draws {interval_text(intervals.step_s)} s" if intervals else ""
    yield f"predicted step: {analysis.step_s:.3f} s{range_text}, from {source}"
    if costs.plain:
        yield option_text(analysis.step_s, comparison.plain_step_s)
    hours = f"{analysis.gpu_hours_per_million_tokens:.3g} GPU-hours per million tokens"
    yield f"{analysis.tokens_per_s:,.0f} tokens/s, {hours}"
    fullest, each = max(analysis.prediction.needs, key=lambda need: need.peak_bytes), comparison.task.cluster
    memory = f"at most {in_gib(fullest.peak_bytes)} of the {in_gib(each.device_memory_bytes)} of a device"
    yield f"memory: {memory}, {in_gib(fullest.static_bytes)} of them from step to step"
    if each.num_nodes > 1 and (links := network_text(each.hardware)):
        yield links
    for name, number in preemptions(comparison.task, comparison.plan).items():
        yield f"{name}: {number:.0f} preemptions a step expected of each rank, since its KV cache does not hold all"
    yield f"limited by {analysis.limits}"
    yield from map(str, comparison.hinges[:1])
    pools = comparison.task.graph.pools
    for pool in dict.fromkeys(pools.values()):
        yield f"{pool}: {', '.join(model for model, its in pools.items() if its == pool)}"
    words, simple = "none is legal", comparison.heuristic
    if simple.prediction:
        step_s = simple.prediction.step_s
        words = f"{step_s:.3f} s, {step_s / analysis.step_s:.2f} x this one"
        words += f", but it {simple.problem}" if simple.problem else ""
    yield f"heuristic plan (all calls alike on all devices): {words}"


def option_text(step_s: float, plain_s: float | None) -> str:
    """What reproducible="layout" costs, of a plan's steps with it and without (None: not known)."""
    if plain_s is None:
        remedy = "measure both, by `realhf profile` with --reproducible layout and with plan"
        return f"reproducible='layout': the prediction does not know its kernels; {remedy}"
    without = f"{plain_s:.3f} s without it ({step_s / plain_s - 1:+.0%})"
    return f"reproducible='layout': predicted step {step_s:.3f} s, {without}"


def sure_text(seconds: str, interval: tuple[float, float] | None) -> str:
    """`0.25 (0.21-0.29)`."""
    return f"{seconds} ({interval_text(interval)})" if interval else seconds
