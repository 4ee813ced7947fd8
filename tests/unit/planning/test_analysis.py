"""What limits a plan, what else its calls could do, what would make it fit: each against a plain recomputation."""

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.layout import Layout
from realhf.planning.explain.analysis import COMPUTE, analyse
from realhf.planning.explain.comparison import best_alternatives
from realhf.planning.explain.remedies import find_remedies, smallest_peak_bytes
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.options import Option, options_to_search
from realhf.planning.predict import predict, predict_in_best_order
from realhf.planning.problem.builder import STEPS, build_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask, with_staleness
from tests.unit.planning.graphs import cpu_cluster, ppo, settings, task_of, with_memory
from tests.unit.planning.simulation import device_needs, makespan_s, simulate


def task(devices: int, num_nodes: int = 1, memory: int = 2**32) -> PlanningTask:
    graph = ppo()
    return PlanningTask(graph=graph, max_steps_in_flight=2, **settings(graph, cpu_cluster(devices, num_nodes, memory)))


def split_plan(of: PlanningTask) -> ExecutionPlan:
    """Actor and reference on device 0, critic and reward on device 1."""
    calls = {
        name: CallPlan(devices=(0 if definition.model_name in ("actor", "ref") else 1, 1))
        for name, definition in of.graph.calls.items()
    }
    return of.plan(calls, preset="by hand")


def test_busy_time_and_memory_of_each_device() -> None:
    of = task(2)
    prediction = predict(of, split_plan(of))
    analysis = analyse(of, prediction)
    on_0 = sum(prediction.call_s[name] for name in ("actor_generate", "ref_inference", "actor_train_step"))
    sent = sum(s for name, s in prediction.transfer_s.items() if not same_device(of, name, prediction.plan))
    transfers_0 = sum(s for name, s in prediction.transfer_s.items() if touches(of, name, prediction.plan, 0))
    assert sent > 0
    assert analysis.busiest_device == 0
    assert analysis.busy == pytest.approx((on_0 + transfers_0) / prediction.step_s)
    assert analysis.tokens_per_s == pytest.approx(16 * 16 / prediction.step_s)
    assert analysis.gpu_hours_per_million_tokens == pytest.approx(2 * 1e6 / analysis.tokens_per_s / 3600)
    assert prediction.peak_bytes == max(prediction.device_bytes)
    assert all(need.static_bytes < need.peak_bytes for need in prediction.needs)


def ends(of: PlanningTask, transfer: str) -> list[str]:
    return transfer.removeprefix("data: ").partition(": ")[0].split(" -> ")


def same_device(of: PlanningTask, transfer: str, plan: ExecutionPlan) -> bool:
    return len({plan.calls[name].devices for name in ends(of, transfer) if name in plan.calls}) == 1


def touches(of: PlanningTask, transfer: str, plan: ExecutionPlan, device: int) -> bool:
    return any(device in plan.calls[name].mesh.devices for name in ends(of, transfer) if name in plan.calls)


def test_the_longest_chain_has_no_gap() -> None:
    of = task(2)
    analysis = analyse(of, predict(of, split_plan(of)))
    assert sum(analysis.chain.values()) == pytest.approx(1)
    assert list(analysis.chain.values()) == sorted(analysis.chain.values(), reverse=True)
    assert analysis.bottleneck.startswith(next(iter(analysis.chain)))


def test_spans_of_a_device_do_not_overlap() -> None:
    of = task(2)
    analysis = analyse(of, predict(of, split_plan(of)))
    by_device = defaultdict(list)
    for span in analysis.spans:
        for device in span.devices:
            by_device[device].append((span.start_s, span.end_s))
    for spans in by_device.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
    computed = [(span.name, span.step) for span in analysis.spans if span.kind == COMPUTE]
    assert sorted(computed) == sorted((name, step) for name in of.graph.calls for step in range(STEPS))


@pytest.mark.parametrize("memory", [2**32, 90 * 2**20])
def test_alternatives_are_the_best_changes_of_one_call(memory: int) -> None:
    """Against the plain simulation of every change."""
    of = task(2, memory=memory)
    plan, num_too_large = split_plan(of), 0
    for alternative in best_alternatives(of, plan):
        chosen = {name: [Option(entry.layout, entry.micro_batches)] for name, entry in plan.calls.items()}
        of_layouts: dict[Layout, list[float]] = {}
        for option in options_to_search(of, alternative.call):
            if option.layout == plan.layout(alternative.call):
                continue
            times = of_layouts.setdefault(option.layout, [])
            problem = build_problem(of, {**chosen, alternative.call: [option]})
            choice = [0] * len(problem.calls)
            if max(need.peak_bytes for need in device_needs(problem, choice)) <= of.cluster.device_memory_bytes:
                times.append(makespan_s(simulate(problem, choice, STEPS)) / STEPS)
        too_large = [layout for layout, times in of_layouts.items() if not times]
        assert (alternative.num_layouts, alternative.num_too_large) == (len(of_layouts), len(too_large))
        best = min((min(times) for times in of_layouts.values() if times), default=None)
        assert (alternative.option is None) == (best is None)
        assert best is None or alternative.step_s == pytest.approx(best, rel=1e-5)
        num_too_large += len(too_large)
    assert (num_too_large > 0) == (memory < 2**32)


def test_remedies_are_enough_and_the_least() -> None:
    of = replace(task(4), batch_size=4)  # of a larger one, micro-batches of one sample need no more
    peak = smallest_peak_bytes(of)
    assert peak is not None
    tight = replace(of, cluster=with_memory(of.cluster, int(peak) - 1))
    remedies = find_remedies(tight)
    assert remedies.memory_bytes == peak
    assert remedies.batch_size is not None
    assert remedies.batch_size < of.batch_size
    assert remedies.num_nodes == 2
    assert remedies.offload
    for fitting in (
        replace(tight, batch_size=remedies.batch_size),
        replace(tight, cluster=replace(tight.cluster, num_nodes=2)),
        replace(tight, offload=remedies.offload),
    ):
        smaller = smallest_peak_bytes(fitting)
        assert smaller is not None
        assert smaller < peak
    assert str(remedies).startswith("the smallest change that is enough: ")
    offload = ",".join(remedies.offload)
    assert str(remedies).endswith(
        f"or a batch of {remedies.batch_size} samples, or 2 nodes of this kind, or --offload {offload}"
    )


def test_remedies_know_what_a_search_may_choose() -> None:
    """The search finds a plan in the memory that is named, which no plan has that computes as the models are set up."""
    graph = ppo("llama7b", "llama7b-critic")
    cluster = Cluster(devices_per_node=4, hardware=load_hardware("h100"))
    costs = load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware)
    of = task_of(graph, **{**settings(graph, cluster), "costs": costs, "dtype": "bfloat16"})
    choices = ("recomputation", "sequence_parallel", "data_parallel", "offload_states")
    opened = replace(of, open_choices=dict.fromkeys(graph.models, choices), may_offload=True)
    plain_bytes, smallest_bytes = smallest_peak_bytes(of), smallest_peak_bytes(opened)
    assert plain_bytes
    assert smallest_bytes
    assert smallest_bytes < plain_bytes / 2
    tight = replace(opened, cluster=with_memory(cluster, round(smallest_bytes)))
    assert search_plan(tight, SearchBudget(evaluations=20_000)).prediction.fits
    less = replace(opened, cluster=with_memory(cluster, round(smallest_bytes * 0.9)))
    assert find_remedies(less).offload is None


def test_no_remedy() -> None:
    remedies = find_remedies(task(2, memory=10))
    assert (remedies.batch_size, remedies.num_nodes, remedies.offload) == (None, None, None)


def test_staleness_moves_generations_edge_only() -> None:
    graph = ppo()
    stale = with_staleness(graph, 2)
    changes = [(a, b) for a, b in zip(graph.edges, stale.edges, strict=True) if a != b]
    assert [(a.child, a.steps_back, b.steps_back) for a, b in changes] == [("actor_generate", 1, 3)]
    assert graph.edges == ppo().edges
    assert with_staleness(graph, 0) is graph


def test_stale_rollouts_overlap_with_training_on_other_devices() -> None:
    """Generation on device 0, everything else on device 1: on-policy they take turns, one step stale they overlap."""
    of = replace(task(2), max_steps_in_flight=3)
    calls = {name: CallPlan(devices=(0 if name == "actor_generate" else 1, 1)) for name in of.graph.calls}
    plan = changed(of.plan(calls, preset="disaggregated"), max_steps_in_flight=3)
    stale = replace(of, graph=with_staleness(of.graph, 1))
    on_policy_s = predict_in_best_order(of, plan).step_s
    stale_s = predict_in_best_order(stale, plan).step_s
    call_s = predict(of, plan).call_s
    generate_s = call_s["actor_generate"]
    others_s = sum(call_s.values()) - generate_s
    assert on_policy_s >= generate_s + call_s["actor_train_step"]
    assert stale_s < on_policy_s
    assert stale_s >= max(generate_s, others_s)
