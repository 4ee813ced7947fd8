"""The ways to run a call that a search leaves out: none is needed for the best plan."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import structs

from realhf.api import Generate
from realhf.architecture.decoding import GraphLife
from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute
from realhf.planning.dominance import Dominance
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import Option, options_to_search
from realhf.planning.predict import predict
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem
from realhf.planning.problem.option_rows import row_of
from realhf.planning.problem.tables import OptionRow
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, all_options, call, cpu_cluster, ppo, settings, task_of, with_memory
from tests.unit.planning.simulation import device_needs, makespan_s, simulate

CHOICES = ("recomputation", "sequence_parallel", "data_parallel", "offload_states")


def opened(task: PlanningTask) -> PlanningTask:
    """All choices are left to the plan."""
    return replace(task, open_choices=dict.fromkeys(task.graph.models, CHOICES))


def on_gpus(graph: DataflowGraph, devices: int) -> PlanningTask:
    cluster = Cluster(num_nodes=1, devices_per_node=devices, hardware=load_hardware("h100"))
    costs = load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware)
    return opened(task_of(graph, **{**settings(graph, cluster), "costs": costs, "dtype": "bfloat16"}))


def train_and_read(model: DecoderConfig = TINY) -> DataflowGraph:
    return DataflowGraph(
        [call("actor", model, INFERENCE, "seq", "values"), call("actor", model, TRAIN_STEP, "seq values")], ["seq"]
    )


def test_an_option_is_not_taken_to_need_more_than_its_smallest_plan() -> None:
    """A model that is only read: alone on four devices, in each way to compute it."""
    graph = DataflowGraph([call("reference", "llama7b", INFERENCE, "seq", "values")], ["seq"])
    task, spared = on_gpus(graph, 4), []
    [name] = graph.model_calls
    for option in options_to_search(task, name):
        found = task.call_models[name].under(option.compute)
        strategy, count = option.layout.strategy, option.micro_batches
        least = found.least_bytes(strategy, count)
        assert least <= predict(task, task.plan({name: option.call_plan()})).peak_bytes
        spared.append(found.placed(strategy).parameter_bytes() + found.work(strategy, count).dynamic_bytes() - least)
    assert min(spared) == 0
    assert max(spared) > 2**30


def test_what_a_search_may_choose_of_a_training() -> None:
    task = on_gpus(train_and_read(), 4)
    found = {option.compute for option in options_to_search(task, "actor_train_step")}
    assert {compute.recomputation for compute in found} == {None, "selective", "full"}
    assert {compute.sequence_parallel for compute in found} == {None, True}
    assert {compute.data_parallel for compute in found} == {None, "fsdp"}
    assert {compute.offload_states for compute in found} == {None, True}
    assert {option.compute for option in options_to_search(task, "actor_inference")} == {AS_SET_UP}
    for option in options_to_search(task, "actor_train_step"):
        assert option.compute.sequence_parallel is None or option.layout.strategy.tp > 1
        assert option.compute.data_parallel is None or option.layout.strategy.dp > 1
    chunks = {option.layout.strategy.chunks for option in options_to_search(task, "actor_train_step")}
    assert chunks == {1, 2}, "four layers on two stages or four"


def test_what_is_fixed_is_not_searched() -> None:
    task = replace(on_gpus(train_and_read(), 4), open_choices={"actor": ("recomputation",)})
    found = {option.compute for option in options_to_search(task, "actor_train_step")}
    assert found == {CallCompute(recomputation=kind) for kind in (None, "selective", "full")}
    closed = replace(task, open_choices={})
    assert {option.compute for option in options_to_search(closed, "actor_train_step")} == {AS_SET_UP}


def test_in_host_memory_states_have_no_other_place() -> None:
    task = opened(task_of(train_and_read(), **settings(train_and_read(), cpu_cluster(4))))
    assert not any(option.compute.offload_states for option in options_to_search(task, "actor_train_step"))


def test_several_trainings_of_a_model_compute_as_it_is_set_up() -> None:
    graph = DataflowGraph(
        [call("actor", TINY, TRAIN_STEP, "seq"), replace(call("actor", TINY, TRAIN_STEP, "seq"), name="again")], ["seq"]
    )
    task = opened(task_of(graph, **settings(graph, cpu_cluster(2))))
    assert {option.compute for name in graph.calls for option in options_to_search(task, name)} == {AS_SET_UP}


def row(task: PlanningTask, name: str, option: Option) -> OptionRow:
    return row_of(task, task.graph.model_calls[name], *option.shape, option.compute)


def test_a_cache_that_stays_counts_once_and_for_good() -> None:
    task, name, kept = on_gpus(ppo("llama7b"), 4), "actor_generate", []
    for option in options_to_search(task, name):
        work = task.call_models[name].under(option.compute).work(*option.shape)
        found = row(task, name, option)
        assert found.static_bytes == work.kept_cache_bytes()
        assert found.static_bytes + found.dynamic_bytes == pytest.approx(work.dynamic_bytes())
        kept.append(work.kept_cache_bytes())
    assert max(kept) > 0


def costs(task: PlanningTask, name: str, option: Option) -> tuple[float, ...]:
    of = row(task, name, option)
    return of.time_s, of.static_bytes, of.dynamic_bytes, of.copy_bytes


def is_as_good(task: PlanningTask, name: str, one: Option, other: Option) -> bool:
    """Whether `one` can stand for `other`: on the same devices in the same (dp, tp, pp), with the same label where
    another call asks for it, and in nothing worse."""
    is_alone = len(task.graph.calls_of(task.graph.model_calls[name].model_name)) == 1
    return (
        one.layout.mesh == other.layout.mesh
        and structs.replace(one.layout.strategy, chunks=1) == structs.replace(other.layout.strategy, chunks=1)
        and (is_alone or row(task, name, one).strategy == row(task, name, other).strategy)
        and all(a <= b for a, b in zip(costs(task, name, one), costs(task, name, other), strict=True))
    )


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_what_is_left_out_is_dominated_and_what_is_kept_is_not(hardware: str) -> None:
    graph, left_out = ppo(), 0
    task = on_gpus(graph, 4) if hardware == "h100" else opened(task_of(graph, **settings(graph, cpu_cluster(4))))
    for name in graph.model_calls:
        options, kept = options_to_search(task, name), options_to_search(task, name, Dominance(task))
        assert set(kept) <= set(options)
        for option in set(options) - set(kept):
            left_out += 1
            assert any(is_as_good(task, name, other, option) for other in kept), option
        for option in kept:
            assert not any(is_as_good(task, name, other, option) for other in kept if other != option), option
    assert left_out > 100


@st.composite
def plans_of_all_options(draw: st.DrawFn) -> tuple[PlanningTask, dict[str, Option]]:
    graph = train_and_read() if draw(st.booleans()) else ppo()
    is_gpu = draw(st.booleans())
    task = on_gpus(graph, 4) if is_gpu else opened(task_of(graph, **settings(graph, cpu_cluster(4))))
    return task, {name: draw(st.sampled_from(rows)) for name, rows in all_options(task).items()}


@given(plans_of_all_options())
@hypothesis_settings(max_examples=50, deadline=None)
@pytest.mark.slow
def test_a_plan_of_what_is_kept_is_as_good(case: tuple[PlanningTask, dict[str, Option]]) -> None:
    """For any plan there is one of kept options that needs no more memory on any device, and takes no longer in the
    same order."""
    task, chosen = case
    kept = all_options(task, Dominance(task))
    better = {
        name: next(other for other in kept[name] if is_as_good(task, name, other, option))
        for name, option in chosen.items()
    }
    problems = [build_problem(task, {name: [one] for name, one in each.items()}) for each in (chosen, better)]
    choice = [0] * len(chosen)
    before, after = (device_needs(problem, choice) for problem in problems)
    assert all(a.peak_bytes <= b.peak_bytes * (1 + 1e-12) for a, b in zip(after, before, strict=True))
    order = [(event.node, event.step) for event in simulate(problems[0], choice, 4)]
    before_s, after_s = (makespan_s(simulate(problem, choice, 4, order)) for problem in problems)
    assert after_s <= before_s * (1 + 1e-12)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 1.0])
def test_the_search_finds_the_best_of_all_combinations(part: float) -> None:
    """Against every plan on two devices, with memory for all of them and for less."""
    task = on_gpus(train_and_read(), 2)
    options = all_options(task)
    native = native_problem(build_problem(task, options, groups=True))
    plans = [native.evaluate(list(each)) for each in product(*(range(len(rows)) for rows in options.values()))]
    least, most = (pick(plan["peak_bytes"] for plan in plans) for pick in (min, max))
    limit = int(least + part * (most - least)) + 1
    best_s = min(plan["step_time"] for plan in plans if plan["peak_bytes"] <= limit)
    tight = replace(task, cluster=with_memory(task.cluster, limit))
    found = search_plan(tight, SearchBudget(evaluations=20_000))
    assert found.certificate.proven
    assert found.certificate.cost_s == pytest.approx(best_s, rel=1e-9)
    assert found.prediction.fits
    assert predict(tight, found.plan).step_s == pytest.approx(found.prediction.step_s)


def test_a_search_recomputes_where_memory_is_short() -> None:
    task = on_gpus(train_and_read(replace(TINY, hidden_size=1024, intermediate_size=4096, num_layers=16)), 1)
    roomy = search_plan(task, SearchBudget(evaluations=2000))
    assert roomy.plan.calls["actor_train_step"].compute == AS_SET_UP
    peak = roomy.prediction.peak_bytes
    found = search_plan(
        replace(task, cluster=with_memory(task.cluster, int(0.9 * peak))), SearchBudget(evaluations=2000)
    )
    assert found.plan.calls["actor_train_step"].compute != AS_SET_UP
    assert found.prediction.peak_bytes <= 0.9 * peak
    assert found.prediction.step_s > roomy.prediction.step_s


def generates_and_trains(graphs: GraphLife | None = None) -> DataflowGraph:
    """A model whose KV cache takes more memory than its parameters."""
    model = replace(TINY, hidden_size=1024, intermediate_size=4096, num_layers=16)
    rollout = Generate(max_new_tokens=8, eos_token=-1, decode_graphs=graphs)
    generate = replace(call("actor", model, GENERATE, "prompts", "seq"), interface_impl=rollout)
    return DataflowGraph([generate, call("actor", model, TRAIN_STEP, "seq")], ["prompts"])


def test_graphs_of_decode_steps_live_as_long_as_memory_allows() -> None:
    """Kept graphs are faster, and keep the KV cache while the model trains; those of a call are recorded in each."""
    task = replace(
        on_gpus(generates_and_trains(), 1), batch_size=64, workload=Workload(prompt_tokens=2000, new_tokens=8)
    )
    roomy = search_plan(task, SearchBudget(evaluations=2000))
    assert roomy.plan.calls["actor_generate"].compute == AS_SET_UP
    tight = replace(task, cluster=with_memory(task.cluster, int(0.9 * roomy.prediction.peak_bytes)))
    found = search_plan(tight, SearchBudget(evaluations=2000))
    assert found.plan.calls["actor_generate"].compute == CallCompute(decode_graphs="call")
    recorded_s = found.prediction.call_s["actor_generate"] - roomy.prediction.call_s["actor_generate"]
    hardware = task.costs.hardware
    launched_s = 2 * hardware.decode_launch_s - hardware.decode_graph_launch_s
    assert recorded_s == pytest.approx(16 * launched_s), "16 layers, in place of a graph and to be recorded"
    for fixed, expected in (("kept", AS_SET_UP), ("call", AS_SET_UP), ("off", AS_SET_UP)):
        graph = generates_and_trains(fixed)  # type: ignore[arg-type]
        assert {option.compute for option in options_to_search(replace(task, graph=graph), "actor_generate")} == {
            expected
        }
    on_cpu = task_of(generates_and_trains(), **settings(generates_and_trains(), cpu_cluster(1)))
    assert {option.compute for option in options_to_search(on_cpu, "actor_generate")} == {AS_SET_UP}
