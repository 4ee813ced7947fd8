"""Grouped calls in planning: what is moved, the plans that have them, and memory that holds a model's part once."""

from itertools import product

import pytest
from msgspec.structs import replace

from realhf.architecture.model import DecoderConfig
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.dataflow.plan_checks import check_plan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.micro_dp import contains_home, grouped_like
from realhf.geometry.shards import Placement
from realhf.planning import search
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.reallocation import (
    Reallocation,
    grouped,
    moved_elements,
    moved_to_groups,
    with_groups,
)
from realhf.planning.options import Option
from realhf.planning.predict import predict, with_copies_in_place
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import reallocation_table
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES, plan_between
from tests.unit.planning.graphs import TINY, call_options, cpu_cluster, ppo, settings, task_of

CLUSTER = cpu_cluster(4, 2, 2**34)
CPU = load_hardware("cpu")


def layout(size: int, tp: int, pp: int, first: int = 0) -> Layout:
    return Layout(DeviceMesh(first, size), ParallelStrategy(size // (tp * pp), tp, pp))


@pytest.mark.parametrize("tied", [False, True])
def test_what_moves_to_groups_is_what_the_planner_moves(tied: bool) -> None:
    """The closed form against the one for all layouts, and against boxes."""
    model = DecoderConfig(
        hidden_size=16, intermediate_size=24, num_layers=5, num_heads=4, num_kv_heads=4, vocab_size=32,
        tied_embeddings=tied,
    )  # fmt: skip
    found = 0
    for t, p, t_g, p_g in product((1, 2, 4), repeat=4):
        if t * p > 8:
            continue
        home, target = layout(8, t, p), layout(8, t_g, p_g) if t_g * p_g <= 8 else layout(8, 1, 1)
        with_micro_dp = grouped_like(home, target, model.num_layers)
        if with_micro_dp is None:
            continue
        found += 1
        elements = moved_to_groups(model, home.strategy, target.strategy)
        assert elements == moved_elements(model, Placement(home), with_micro_dp)
        lacking = plan_between(model, Placement(home), Placement(with_micro_dp)).lacking_bytes
        assert elements == (max(lacking.values()) // 4, sum(lacking.values()) // 4)
    assert found > 10


def test_tensor_peers_are_not_put_on_other_nodes() -> None:
    """tp 8 on two nodes of four: its every second rank would be peers across nodes, which plain tp 4 does not have."""
    assert grouped(layout(8, 8, 1), layout(8, 4, 1), TINY.num_layers, CLUSTER) is None
    found = grouped(layout(8, 4, 1), layout(8, 2, 1), TINY.num_layers, CLUSTER)
    assert found is not None
    assert found.strategy == ParallelStrategy(4, 2, 1, micro_dp=(2, 1))


def test_the_tables_of_the_search_count_groups_and_its_plans_have_them() -> None:
    """Against the formula of every pair of layouts of one home and one copy of it."""
    graph = ppo(mini_batches=1)
    cluster = cpu_cluster(8, memory=2**34)
    shared = settings(graph, cluster, batch_size=8)
    whole_mesh = [
        option
        for option in call_options(graph.calls["actor_train_step"], 8, cluster)
        if option.micro_batches == 1 and option.layout.mesh.size == 8
    ]
    options = {name: whole_mesh if name.startswith("actor") else whole_mesh[:1] for name in graph.calls}
    task = task_of(graph, **shared)
    plain, problem = (
        build_problem(task, options, reallocations=Reallocation.table, groups=groups) for groups in (False, True)
    )
    name = "actor: actor_train_step -> actor_generate"
    before, table = (next(t for t in p.transfers if t.name == name) for p in (plain, problem))
    seen = 0
    for i, source in enumerate(options["actor_train_step"]):
        for j, target in enumerate(options["actor_generate"]):
            calls = {name: option[0].call_plan() for name, option in options.items()}
            calls |= {"actor_train_step": source.call_plan(), "actor_generate": target.call_plan()}
            arranged = with_groups(calls, task.homes, graph, cluster)["actor_generate"]
            seen += arranged.micro_dp != (1, 1)
            place = table.rows[i] * table.num_columns + table.columns[j]
            assert table.seconds[place] <= before.seconds[place]
            assert table.seconds[place] == Reallocation(TINY, 4, cluster, CPU).seconds(
                moved_elements(TINY, Placement(source.layout), arranged.layout), source.layout.mesh, crosses_nodes=False
            )
    assert seen == 3  # to tp2 from dp2 tp4, and to tp2 with and without pp2 from tp4 pp2: all others contain their home


def with_home(**generation: object) -> ExecutionPlan:
    """Actor trained as tp4, and generating as given; all other calls as data parallelism of four."""
    calls = {name: CallPlan(devices=(0, 4), dp=4) for name in ppo(mini_batches=1).calls}
    calls["actor_train_step"] = CallPlan(devices=(0, 4), tp=4)
    calls["actor_generate"] = replace(calls["actor_generate"], **generation)
    return ExecutionPlan(num_devices=4, calls=calls, max_steps_in_flight=1)


def test_a_grouped_copy_counts_without_the_part_that_it_contains() -> None:
    """Groups save what the home has on a device, or less if the transition needs more than the call."""
    graph = ppo(mini_batches=1)
    cluster = cpu_cluster(4, memory=2**34)
    shared = settings(graph, cluster, batch_size=4)
    plain, arranged = with_home(dp=2, tp=2), with_home(dp=2, tp=2, micro_dp=(2, 1))
    tables = []
    for plan in (plain, arranged):
        options = {name: [Option(call.layout, call.micro_batches)] for name, call in plan.calls.items()}
        problem = build_problem(task_of(graph, max_steps_in_flight=1, **shared), options)
        tables.append(next(call for call in problem.calls if call.name == "actor_generate"))
    home_bytes = PlacedModel(TINY, ParallelStrategy(tp=4), "float32").parameter_bytes()
    copy = PlacedModel(TINY, ParallelStrategy(dp=2, tp=2), "float32").parameter_bytes()
    assert [table.options[0].copy_bytes for table in tables] == [copy + 2 * DEFAULT_BUCKET_BYTES] * 2
    assert tables[0].spared == []
    spared = (str(plain.calls["actor_train_step"].layout.strategy), tables[1].options[0].strategy)
    assert tables[1].spared == [(*spared, home_bytes + 2 * DEFAULT_BUCKET_BYTES)]
    assert predict(task_of(graph, **shared), arranged).plan.calls["actor_generate"].micro_dp == (2, 1)


def test_a_search_finds_copies_that_fit_only_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts are given, and the memory is between that of a copy beside its home and that of one in place."""
    graph = ppo(mini_batches=1)
    beside = with_home(dp=2, tp=2, micro_dp=(2, 1))

    def task_with(memory: int) -> PlanningTask:
        return task_of(graph, max_steps_in_flight=1, **settings(graph, cpu_cluster(4, memory=memory), batch_size=4))

    large = task_with(2**34)
    needed = predict(large, beside).peak_bytes
    task = task_with(round(needed) - 1)
    assert not predict(task, beside).fits
    found = with_copies_in_place(task, beside)
    assert found is not None
    assert [name for name, call in found.calls.items() if call.compute.in_place] == ["actor_generate"]
    prediction = predict(task, found)
    home_bytes = PlacedModel(TINY, ParallelStrategy(tp=4), "float32").parameter_bytes()
    assert prediction.fits
    assert needed - prediction.peak_bytes == home_bytes + DEFAULT_BUCKET_BYTES
    assert with_copies_in_place(large, beside) == beside
    assert with_copies_in_place(task_with(round(prediction.peak_bytes) - 1), beside) is None

    options = {name: [Option(call.layout, call.micro_batches)] for name, call in with_home(dp=2, tp=2).calls.items()}
    monkeypatch.setattr(search, "worthwhile_options", lambda task: options)
    monkeypatch.setattr(search, "evaluate_presets", lambda task, watch: ())
    plan = search_plan(task, SearchBudget(evaluations=10)).plan
    assert {name: (call.layout, call.compute) for name, call in plan.calls.items()} == {
        name: (call.layout, call.compute) for name, call in found.calls.items()
    }
    check_plan(plan, graph, 4)


def test_a_table_of_moves_knows_groups() -> None:
    home, target = layout(4, 4, 1), layout(4, 2, 1)
    arranged = grouped_like(home, target, TINY.num_layers)
    assert arranged is not None
    move, sources, targets = Reallocation(TINY, 4, CLUSTER, CPU), [Placement(home)], [target, arranged]
    plain_s, arranged_s = reallocation_table(move, sources, targets)
    assert [plain_s, arranged_s] == pytest.approx(move.table(sources, targets))
    assert arranged_s < plain_s, "the groups of a copy contain what the home has"


def test_what_contains_the_home() -> None:
    home, copy = layout(4, 4, 1), layout(4, 1, 1)
    assert contains_home(TINY.num_layers, home, copy)
    assert not contains_home(TINY.num_layers, home, layout(4, 2, 1))  # device 1 has another part there
    assert not contains_home(TINY.num_layers, home, home)  # no copy
    assert not contains_home(TINY.num_layers, home, layout(4, 1, 1, first=4))
    assert contains_home(TINY.num_layers, layout(4, 2, 1), copy)
