"""The tables of a planning problem, entry by entry: nodes and what they wait for, rows of options, one plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallCompute
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.geometry.shards import Placement
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.reallocation import Reallocation
from realhf.planning.model.timings import load_costs
from realhf.planning.options import Option
from realhf.planning.problem.builder import MANY_STEPS, STEPS, build_problem, steps_of
from realhf.planning.problem.native import DeviceNeed, device_needs, native_problem, reallocation_table, simulate
from realhf.planning.problem.option_rows import Numbering, OptionRows, distinct, row_of, seconds_of
from realhf.planning.problem.tables import CallTable, OptionRow, Problem, TransferTable
from realhf.planning.task import PlanningTask, with_staleness
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, task_of
from tests.unit.planning.simulation import Simulation
from tests.unit.planning.test_beside import Rule
from tests.unit.planning.test_beside import task as task_with_rule

ONE, DP2, TP2 = ParallelStrategy(), ParallelStrategy(dp=2), ParallelStrategy(tp=2)


FSDP = CallCompute(data_parallel="fsdp")


CPU = load_hardware("cpu")


def layout(strategy: ParallelStrategy = ONE, first: int = 0) -> Layout:
    return Layout(DeviceMesh(first, strategy.size), strategy)


def task_on_cpu(graph: DataflowGraph, devices: int = 2, **fields: Any) -> PlanningTask:
    return replace(task_of(graph, **settings(graph, cpu_cluster(devices))), **fields)


def on_one(graph: DataflowGraph, **others: Layout) -> dict[str, list[Option]]:
    """One option for each call: on device 0, where no other layout is given."""
    return {name: [Option(others.get(name, layout()), 1)] for name in graph.model_calls}


# --- nodes and what they wait for


@pytest.mark.parametrize(("in_flight", "steps"), [(1, 4), (2, 4), (3, 16), (9, 16)])
def test_more_steps_are_unrolled_where_more_overlap(in_flight: int, steps: int) -> None:
    assert (STEPS, MANY_STEPS) == (4, 16)
    assert steps_of(in_flight) == steps
    problem = build_problem(task_on_cpu(ppo(), max_steps_in_flight=in_flight), on_one(ppo()))
    assert (problem.steps, problem.max_steps_in_flight) == (steps, in_flight)


def test_what_the_nodes_of_ppo_wait_for() -> None:
    """With the actor in host memory. Its parameters are loaded for each of its calls, and sent back behind."""
    graph = ppo()
    task = task_on_cpu(graph, offload=("actor",))
    problem = build_problem(task, on_one(graph))
    waits: dict[str, Any] = {node.name: node.parents for node in problem.nodes}
    train, generate = "actor_train_step", "actor_generate"
    back = f"offload actor after {train}"
    move = f"actor: {train} -> {generate}"
    assert waits[back] == [(train, 0)]
    assert waits[f"offload actor after {generate}"] == [(generate, 0)]
    assert waits[f"load actor for {generate}"] == [(back, 1)]
    assert waits[f"load actor for {train}"] == [(f"offload actor after {generate}", 0), (back, 1)]
    assert waits[move] == [(train, 1), (f"load actor for {generate}", 0)]
    assert waits[generate] == [(train, 1), (f"load actor for {generate}", 0), (move, 0)]
    assert waits["critic_inference"] == [
        ("critic_train_step", 1), (f"data: {generate} -> critic_inference", 0),
        ("critic: critic_train_step -> critic_inference", 0),
    ]  # fmt: skip
    assert waits[f"data: {generate} -> ref_inference"] == [(generate, 0)]
    on = {transfer.name: transfer.on for transfer in problem.transfers}
    assert on[move] == [train, generate], "who sends has to load it"
    assert on["critic: critic_train_step -> critic_inference"] == ["critic_inference"]
    assert on[back] == on[f"load actor for {train}"] == on[f"load actor for {generate}"] == [train]
    assert on[f"data: {generate} -> ref_inference"] == [generate, "ref_inference"]
    seconds = {transfer.name: list(transfer.seconds) for transfer in problem.transfers}
    count = parameter_count(TINY)
    assert seconds[f"offload actor after {generate}"] == [0.0], "nothing has changed it"
    assert seconds[f"load actor for {generate}"] == [4 * count / CPU.host_bandwidth]
    assert seconds[f"load actor for {train}"] == seconds[back] == [12 * count / CPU.host_bandwidth]
    homes = {each.name: each.home for each in problem.calls}
    assert homes == task.homes
    assert {each.name: (each.model, each.trains) for each in problem.calls} == {
        name: (of.model_name, of.trains) for name, of in graph.model_calls.items()
    }


def test_data_of_calls_that_run_ahead_leaves_beside_their_next_one() -> None:
    plain, stale = (build_problem(task_on_cpu(with_staleness(ppo(), k)), on_one(ppo())) for k in (0, 1))
    name = "data: actor_generate -> ref_inference"
    on = [next(move.on for move in problem.transfers if move.name == name) for problem in (plain, stale)]
    assert on == [["actor_generate", "ref_inference"], ["ref_inference"]]
    other = "data: ref_inference -> actor_train_step"
    assert next(move.on for move in stale.transfers if move.name == other) == ["ref_inference", "actor_train_step"]


@pytest.mark.parametrize("every", [1, 4])
def test_a_model_that_follows_every_few_steps_takes_a_part_of_it_in_each(every: int) -> None:
    """As a list, and as a table of the engine. It waits for both models where these wait in host memory."""
    graph = DataflowGraph(list(ppo().calls.values()), ["prompts"], {"ref": Follow("actor", eta=0.5, every_steps=every)})
    options = on_one(graph, ref_inference=layout(first=1))
    task = task_on_cpu(graph, offload=("ref",))
    whole_s = CPU.send_s(4 * parameter_count(TINY), crosses_nodes=False)
    for table in (Reallocation.table, reallocation_table):
        problem = build_problem(task, options, reallocations=table)
        [move] = [each for each in problem.transfers if each.name == "ref_follows_actor"]
        assert list(move.seconds) == pytest.approx([whole_s / every])
        assert (move.source, move.target) == ("actor_train_step", "ref_inference")
        assert (move.name, ("load ref for ref_follows_actor", 0) in move.parents) == ("ref_follows_actor", True)


def test_followers_neither_send_on_nor_take_groups() -> None:
    """A copy's devices do: two of them get the parameters of one model from who has them."""
    graph = DataflowGraph(list(ppo().calls.values()), ["prompts"], {"ref": Follow("actor", eta=0.5)})
    task = task_on_cpu(graph, devices=4)
    pair = layout(DP2, first=2)
    problem = build_problem(task, on_one(graph, ref_inference=pair, actor_generate=pair))
    seconds = {move.name: list(move.seconds) for move in problem.transfers}
    count = parameter_count(TINY)
    assert seconds["ref_follows_actor"] == pytest.approx([CPU.send_s(2 * 4 * count, crosses_nodes=False)])
    move = "actor: actor_train_step -> actor_generate"
    assert seconds[move] == pytest.approx([CPU.send_s(4 * count, crosses_nodes=False)])
    options = on_one(graph, actor_train_step=layout(ParallelStrategy(tp=4)),
                     ref_inference=layout(ParallelStrategy(dp=2, tp=2)))  # fmt: skip
    plain, grouped = (build_problem(task, options, groups=groups) for groups in (False, True))
    [first, second] = (
        next(list(each.seconds) for each in of.transfers if each.name == "ref_follows_actor") for of in (plain, grouped)
    )
    assert first == second


def test_the_time_of_a_rule_is_by_the_devices_of_whose_samples_it_reads() -> None:
    task = task_with_rule(Rule(seconds_per_sample=3.0), devices=2)
    options = on_one(task.graph)
    options["actor_generate"] = [Option(layout(DP2), 1), Option(layout(), 1), Option(layout(first=1), 1)]
    [rule] = [each for each in build_problem(task, options).transfers if each.name == "judge"]
    assert (rule.rows, rule.columns, rule.num_columns, rule.on) == ([0, 1, 1], [0, 0, 0], 1, [])
    assert (list(rule.seconds), rule.source, rule.target) == ([24.0, 48.0], "actor_generate", "actor_generate")
    assert rule.parents == [("actor_generate", 0)]
    reads = "data: judge -> actor_train_step"
    [data] = [each for each in build_problem(task, options).transfers if each.name == reads]
    assert (data.source, data.parents, data.on) == ("actor_generate", [("judge", 0)], ["actor_train_step"])
    waiting = build_problem(replace(task, offload=("ref",)), {**options, "ref_inference": options["actor_generate"]})
    [load] = [each for each in waiting.transfers if each.name == "load ref for ref_inference"]
    assert (load.rows, load.columns, load.num_columns, len(load.seconds)) == ([0, 1, 1], [0, 0, 0], 1, 2)


@pytest.mark.parametrize(
    ("nodes", "shares", "graph", "expected"),
    [
        (1, True, ppo(), 0.0),
        (2, True, ppo(), 2.0 * DEFAULT_BUCKET_BYTES),
        (1, False, ppo(), 2.0 * DEFAULT_BUCKET_BYTES),
        (2, True, DataflowGraph([call("actor", TINY, TRAIN_STEP, "seq")], ["seq"]), 0.0),
    ],
)
def test_memory_of_a_device_that_sends_copies(nodes: int, shares: bool, graph: DataflowGraph, expected: float) -> None:
    """Where messages are packed, and a call is not at home."""
    cluster = cpu_cluster(2, num_nodes=nodes)
    task = task_of(graph, **settings(graph, cluster))
    hardware = structs.replace(task.costs.hardware, shares_host_memory=shares, communicator_bytes=7.0)
    problem = build_problem(replace(task, costs=replace(task.costs, hardware=hardware)), on_one(graph))
    assert (problem.sending_bytes, problem.communicator_bytes) == (expected, 7.0)
    assert (problem.num_devices, problem.devices_per_node) == (2 * nodes, 2)
    assert problem.device_memory_bytes == cluster.device_memory_bytes


def test_calls_in_the_devices_of_their_home_are_grouped_where_that_is_asked_for() -> None:
    graph, home = ppo(), ParallelStrategy(tp=4)
    task = task_on_cpu(graph, devices=4)
    options = on_one(graph, actor_train_step=layout(home), actor_generate=layout(ParallelStrategy(dp=2, tp=2)))
    plain, default, grouped = (
        build_problem(task, options, **words) for words in ({"groups": False}, {}, {"groups": True})
    )
    [first, second, third] = (
        next(list(move.seconds) for move in problem.transfers if move.target == "actor_generate")
        for problem in (plain, default, grouped)
    )
    assert first == second
    assert third[0] < first[0]


# --- rows of options


def reading(reads: Any = INFERENCE) -> DataflowGraph:
    """A model that is trained, and reads or generates before."""
    return DataflowGraph(
        [call("actor", TINY, reads, "seq", "values"), call("actor", TINY, TRAIN_STEP, "seq values")], ["seq"]
    )


def on_h100(graph: DataflowGraph, **fields: Any) -> PlanningTask:
    cluster = Cluster(num_nodes=1, devices_per_node=4, hardware=load_hardware("h100"))
    costs = load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware)
    return replace(task_of(graph, **{**settings(graph, cluster), "costs": costs, "dtype": "bfloat16"}), **fields)


@pytest.mark.parametrize("prefetch", [None, True, False])
def test_a_sharded_home_gathers_for_those_who_read_in_it(prefetch: bool | None) -> None:
    """What reading takes, once, is the home's. Readers gather as early as the home does."""
    task, strategy = on_h100(reading()), ParallelStrategy(dp=4)
    train = task.graph.model_calls["actor_train_step"]
    sharded = CallCompute(data_parallel="fsdp", prefetch=prefetch)
    home = task.call_models[train.name].under(sharded)
    other = task.call_models["actor_inference"].under(structs.replace(sharded, prefetch=not home.features.prefetch))
    of_home = CallCompute(data_parallel="fsdp", prefetch=home.features.prefetch)
    reader = task.call_models["actor_inference"].under(of_home)
    work = home.work(strategy, 2)
    row = row_of(task, train, strategy, 2, sharded)
    assert reader.work(strategy, 1).gathered_bytes() != other.work(strategy, 1).gathered_bytes()
    gathered_s = home.gathering_s(strategy, 2) + reader.gathering_s(strategy, 1)
    assert reader.gathering_s(strategy, 1) > 0
    assert row.time_s == home.seconds(strategy, 2) + gathered_s == seconds_of(task, home, strategy, 2)
    gathered = reader.work(strategy, 1).gathered_bytes()
    assert gathered > 0
    assert row.static_bytes == home.static_bytes(strategy) + gathered
    assert row.dynamic_bytes == work.dynamic_bytes()
    assert (row.strategy, row.copy_bytes, row.micro_batches) == ("dp4 tp1 pp1", 0.0, 2)
    plain = row_of(task, train, strategy, 2, CallCompute())
    whole = task.call_models[train.name]
    assert plain.time_s == whole.seconds(strategy, 2)
    assert plain.static_bytes == whole.static_bytes(strategy)


def test_a_model_that_generates_takes_a_copy_of_its_sharded_home() -> None:
    """The home has a label of its own, and gathers for nobody."""
    task, strategy = on_h100(reading(GENERATE)), ParallelStrategy(dp=4)
    train, generation = (task.graph.model_calls[name] for name in ("actor_train_step", "actor_generate"))
    row = row_of(task, train, strategy, 1, FSDP)
    home = task.call_models[train.name].under(FSDP)
    assert row.strategy == "dp4 tp1 pp1 sharded"
    assert row.static_bytes == home.static_bytes(strategy)
    assert row_of(task, train, strategy, 1, CallCompute()).strategy == "dp4 tp1 pp1"
    copied = row_of(task, generation, strategy, 1, CallCompute())
    work = task.call_models[generation.name].work(strategy, 1)
    assert copied.copy_bytes == work.placed.copy_bytes() > 0
    assert copied.static_bytes == work.kept_cache_bytes()
    assert copied.static_bytes + copied.dynamic_bytes == work.dynamic_bytes()
    assert copied.time_s == task.call_models[generation.name].seconds(strategy, 1)
    assert row_of(task, generation, strategy, 1, CallCompute()) is copied, "the task keeps it"


def test_a_home_that_only_reads_gathers_what_it_uses() -> None:
    graph = DataflowGraph([call("ref", TINY, INFERENCE, "seq", "logp")], ["seq"])
    task, strategy = on_h100(graph), ParallelStrategy(dp=4)
    [definition] = graph.model_calls.values()
    model = task.call_models[definition.name].under(FSDP)
    work, row = model.work(strategy, 2), row_of(task, definition, strategy, 2, FSDP)
    assert work.gathered_bytes() > 0
    assert row.dynamic_bytes == work.dynamic_bytes() + work.gathered_bytes()
    assert row.static_bytes == model.static_bytes(strategy)
    assert row.time_s == model.seconds(strategy, 2) + model.gathering_s(strategy, 2)


def test_a_second_training_of_a_model_has_no_other_layout() -> None:
    again = replace(call("actor", TINY, TRAIN_STEP, "seq"), name="again")
    graph = DataflowGraph([call("actor", TINY, TRAIN_STEP, "seq"), again], ["seq"])
    task = on_h100(graph)
    row = row_of(task, again, ONE, 1, CallCompute())
    assert row.copy_bytes == 2.0 * task.cluster.device_memory_bytes, "more than there is"


def test_rows_of_a_model_in_host_memory() -> None:
    """All of it counts while a call runs, and beside a call that is not the home what is loaded there. Of the homes
    those count that fit into memory, where any does."""
    graph = reading()
    task = task_on_cpu(graph, offload=("actor",))
    train, inference = (graph.model_calls[name] for name in ("actor_train_step", "actor_inference"))
    homes = [Option(layout(), 1), Option(layout(DP2), 2)]
    options = {train.name: homes, inference.name: [Option(layout(TP2, 2), 1)]}
    rows = OptionRows(Numbering(task, options, False))
    for option, row in zip(homes, rows.rows(train), strict=True):
        there = row_of(task, train, *option.shape, option.compute)
        assert (row.static_bytes, row.dynamic_bytes) == (0.0, there.static_bytes + there.dynamic_bytes)
        assert (row.devices, row.micro_batches) == ((0, option.layout.mesh.size), option.micro_batches)
    [row] = rows.rows(inference)
    there = row_of(task, inference, TP2, 1, CallCompute())
    model = task.call_models[inference.name]
    whole = float(model.static_bytes(ONE))
    assert whole == 4 * parameter_count(TINY)
    assert row.dynamic_bytes == there.static_bytes + there.dynamic_bytes + whole
    assert (row.devices, row.copy_bytes, row.static_bytes) == ((2, 2), there.copy_bytes, 0.0)
    home = task.call_models[train.name]
    needed = [home.static_bytes(strategy) for strategy in (ONE, DP2)]
    assert needed[1] < needed[0]
    tight = replace(task, cluster=cpu_cluster(2, memory=needed[1]))
    options = {train.name: [Option(layout(TP2), 1), Option(layout(), 1)], inference.name: [Option(layout(), 1)]}
    [row] = OptionRows(Numbering(tight, options, False)).rows(inference)
    there = row_of(tight, inference, ONE, 1, CallCompute())
    assert row.dynamic_bytes == there.static_bytes + there.dynamic_bytes + model.static_bytes(TP2)
    stays = OptionRows(Numbering(replace(task, offload=()), options, False)).rows(inference)[0]
    assert (stays.static_bytes, stays.dynamic_bytes) == (there.static_bytes, there.dynamic_bytes)


def test_options_of_one_layout_have_one_number() -> None:
    """Also where they do not follow one another, or are equal and not the same."""
    task = task_on_cpu(ppo())
    first, second = layout(), layout(DP2)
    rows = [Option(first, 1), Option(first, 2), Option(second, 1), Option(layout(), 4)]
    options = dict.fromkeys(task.graph.model_calls, rows)
    numbers = Numbering(task, options, False)
    assert numbers.layouts["ref_inference"] == ([first, second], [0, 0, 1, 0])
    assert distinct(numbers.layouts["ref_inference"], lambda each: each.mesh.first) == ([0], [0, 0, 0, 0])
    sizes = distinct(([first, second, layout(TP2)], [2, 0, 1]), lambda each: each.mesh.size)
    assert sizes == ([1, 2], [1, 0, 1])


MODES = (("*", "sharded"),)


KEPT = (("*", "zero1"),)


def test_where_parameters_lie_depends_on_the_homes_computation() -> None:
    task = on_h100(reading())
    computes = [CallCompute(), FSDP, CallCompute(data_parallel="zero1"), CallCompute(data_parallel=MODES),
                CallCompute(data_parallel=KEPT)]  # fmt: skip
    home = layout(DP2)
    options = {
        "actor_train_step": [Option(home, 1, compute) for compute in computes],
        "actor_inference": [Option(layout(), 1), Option(home, 1)],
    }
    numbers = Numbering(task, options, False)
    whole, divided = Placement(home, "zero1"), Placement(home, "fsdp")
    assert numbers.homes("actor") == ([whole, divided], [0, 1, 0, 1, 0])
    assert numbers.sources("actor_train_step") == numbers.homes("actor")
    assert numbers.sources("actor_inference") == ([Placement(layout()), Placement(home)], [0, 1])
    assert numbers.home_call("actor").name == "actor_train_step"
    features = replace(task.costs.features, fully_sharded=True)
    sharded = replace(task, costs=replace(task.costs, features=features))
    assert Numbering(sharded, options, False).homes("actor") == ([divided, whole], [0, 0, 1, 0, 1])


def test_a_reader_in_the_layout_of_a_sharded_home_moves_nothing() -> None:
    """It gathers there what it uses; a generation takes a copy."""
    for reads, is_free in ((INFERENCE, True), (GENERATE, False)):
        graph = reading(reads)
        task, home = on_h100(graph), layout(DP2)
        name = next(iter(graph.model_calls))
        options = {
            "actor_train_step": [Option(home, 1, compute) for compute in (CallCompute(), FSDP)],
            name: [Option(layout(), 1), Option(home, 1)],
        }
        problem = build_problem(task, options, reallocations=Reallocation.table)
        [move] = [each for each in problem.transfers if not each.name.startswith("data")]
        assert (move.rows, move.columns, move.num_columns) == ([0, 1], [0, 1], 2)
        whole_to_one, whole_to_home, shard_to_one, shard_to_home = move.seconds
        assert (whole_to_one, whole_to_home) == (0.0, 0.0)
        assert shard_to_one > 0
        assert (shard_to_home == 0) is is_free


# --- one plan in detail


def row(devices: tuple[int, int], time_s: float, strategy: str = "a", **amounts: float) -> OptionRow:
    sizes = {"static_bytes": 0.0, "dynamic_bytes": 0.0, "copy_bytes": 0.0} | amounts
    return OptionRow(devices=devices, strategy=strategy, micro_batches=1, time_s=time_s, **sizes)


def problem_of(
    rows: Mapping[str, OptionRow], parents: Mapping[str, Any] | None = None, *, in_flight: int = 1, **fields: Any
) -> Problem:
    calls = [
        CallTable(name=name, model=name, trains=False, home=name, parents=(parents or {}).get(name, []), options=[row])
        for name, row in rows.items()
    ]
    given: dict[str, Any] = {"num_devices": 4, "devices_per_node": 4, "device_memory_bytes": 100.0, "steps": 2,
                             "transfers": []}  # fmt: skip
    return Problem(calls=calls, max_steps_in_flight=in_flight, **given | fields)


def moving(seconds: Sequence[float], **fields: Any) -> TransferTable:
    given: dict[str, Any] = {"name": "move", "source": "a", "target": "b", "on": ["b"], "parents": [("a", 0)],
                             "rows": [0], "columns": [0], "num_columns": 1}  # fmt: skip
    return TransferTable(**given | fields, seconds=seconds)


def test_a_transfer_takes_its_time_between_equal_layouts_too() -> None:
    """Unless its table says that it is free there."""
    rows = {"a": row((0, 1), 1.0), "b": row((0, 1), 2.0)}
    for is_free, seconds in ((None, 6.0), (True, 3.0)):
        words = {} if is_free is None else {"free_if_unmoved": is_free}
        problem = problem_of(rows, {"b": [("move", 0)]}, transfers=[moving([3.0], **words)], steps=1)
        assert native_problem(problem).evaluate([0, 0])["step_time"] == seconds


def test_what_nodes_wait_for_and_occupy() -> None:
    """The first nodes of a step wait for everything of the step that has to be over."""
    rows = {"a": row((0, 2), 1.0), "b": row((2, 1), 2.0)}
    move = moving([3.0, 4.0, 5.0, 6.0], rows=[1], columns=[1], num_columns=2, on=["a", "b"])
    problem = problem_of(rows, {"a": [("b", 2)], "b": [("move", 0), ("a", 1)]}, transfers=[move], in_flight=1)
    simulation = Simulation(problem, [0, 0])
    assert simulation.durations == [1.0, 2.0, 6.0]
    assert simulation.devices == [{0, 1}, {2}, {0, 1, 2}]
    assert simulation.parents(0, 0) == []
    assert simulation.parents(1, 0) == [(0, 0), (0, 1), (0, 2)]
    assert simulation.parents(2, 0) == [(0, 1), (1, 0), (1, 1), (1, 2)]
    assert simulation.parents(2, 1) == [(2, 2), (1, 0)]
    assert simulation.parents(0, 1) == [(0, 2)]
    assert simulation.parents(1, 2) == [(1, 0)]


def test_nodes_in_a_given_order() -> None:
    """All are ready at once. Without an order the first goes first; a call elsewhere waits for neither."""
    rows = {"a": row((0, 2), 1.0), "b": row((1, 2), 2.0), "c": row((3, 1), 5.0)}
    problem = problem_of(rows, steps=1)
    native = native_problem(problem)
    free = simulate(native, [0, 0, 0], 1)
    assert free == [(0, 0, 0.0, 1.0, []), (1, 0, 1.0, 3.0, [0]), (2, 0, 0.0, 5.0, [])]
    given = simulate(native, [0, 0, 0], 1, [(1, 0), (0, 0)])
    assert given == [(1, 0, 0.0, 2.0, []), (0, 0, 2.0, 3.0, [0]), (2, 0, 0.0, 5.0, [])]
    waiting = native_problem(problem_of(rows, {"b": [("a", 0)]}, steps=1))
    with pytest.raises(ValueError, match="the order breaks an edge"):
        simulate(waiting, [0, 0, 0], 1, [(1, 0), (0, 0)])
    for node, step in ((3, 0), (0, 1), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="names a node that is not there"):
            simulate(native, [0, 0, 0], 1, [(node, step)])


def test_the_needs_of_devices() -> None:
    """Static bytes of all calls there, and the largest dynamic need; each communicator once, and that of moves where
    copies are; two buckets where a copy is sent from."""
    home = row((0, 2), 1.0, static_bytes=10.0, dynamic_bytes=5.0)
    copy = structs.replace(row((2, 1), 1.0, "b", static_bytes=1.0, dynamic_bytes=2.0), copy_bytes=7.0)
    rows = {"a": structs.replace(home, communicators=(0, 5)), "b": structs.replace(copy, communicators=(0,))}
    problem = problem_of(rows, communicator_bytes=3.0, sending_bytes=4.0)
    [first, second] = problem.calls
    problem = structs.replace(problem, calls=[first, structs.replace(second, home="a")])
    assert device_needs(native_problem(problem), [0, 0]) == [
        DeviceNeed(9.0, 19.0, 19.0 + 5.0 + 4.0), DeviceNeed(9.0, 19.0, 19.0 + 5.0 + 4.0),
        DeviceNeed(6.0, 6.0, 6.0 + 1.0 + 2.0 + 7.0), DeviceNeed(0.0, 0.0, 0.0),
    ]  # fmt: skip
    alone = problem_of(rows, communicator_bytes=3.0, sending_bytes=4.0)
    assert device_needs(native_problem(alone), [0, 0])[2:] == [DeviceNeed(3.0, 4.0, 6.0), DeviceNeed(0.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("spared", "devices", "peak"),
    [
        ([("h", "c", 6.0)], (0, 2), 10 + 1 + 7 + 3),
        ([("h", "c", 99.0)], (0, 2), 10 + 9),  # filling the copy takes as much as ever
        ([("h", "x", 6.0)], (0, 2), 10 + 1 + 7 + 9),
        ([("x", "c", 6.0)], (0, 2), 10 + 1 + 7 + 9),
        ([("h", "c", 6.0)], (0, 1), 10 + 1 + 7 + 9),  # on other devices than the home's
    ],
)
def test_a_copy_takes_the_place_of_its_home(
    spared: list[tuple[str, str, float]], devices: tuple[int, int], peak: float
) -> None:
    copying = row(devices, 1.0, "c", static_bytes=1.0, dynamic_bytes=7.0, copy_bytes=9.0)
    assert peak_of_a_copy(copying, spared=spared) == peak


def peak_of_a_copy(copying: OptionRow, **fields: Any) -> float:
    """Of the first device, where a home of ten bytes is copied by a call with these `fields`."""
    problem = problem_of({"a": row((0, 2), 1.0, "h", static_bytes=10.0), "b": copying})
    [first, second] = problem.calls
    calls = [first, structs.replace(second, home="a", **fields)]
    return device_needs(native_problem(structs.replace(problem, calls=calls)), [0, 0])[0].peak_bytes


@pytest.mark.parametrize(
    ("in_place_bytes", "devices", "peak"),
    [
        (None, (0, 2), 10 + 9),
        (2.0, (0, 2), 10 + 9 - (6 - 2)),
        (0.0, (0, 2), 10 + 9 - 6),
        (8.0, (0, 2), 10 + 9),
        (2.0, (0, 1), 10 + 9),  # on other devices than the home's
    ],
)
def test_a_copy_that_is_filled_in_place_takes_its_homes_place_at_once(
    in_place_bytes: float | None, devices: tuple[int, int], peak: float
) -> None:
    copying = row(devices, 1.0, "c", static_bytes=0.0, dynamic_bytes=0.0, copy_bytes=9.0)
    assert peak_of_a_copy(copying, spared=[("h", "c", 6.0)], in_place_bytes=in_place_bytes) == peak
