"""Timelines, orders and plans by rule, each on numbers that are worked by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan, OrderEntry
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import predict as prediction_module
from realhf.planning import presets
from realhf.planning.explain import analysis
from realhf.planning.explain.analysis import BESIDE, COMPUTE, OFFLOAD, REALLOCATION, TRANSFER, Analysis, Span
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.predict import Prediction, fastest_order, possible_orders
from realhf.planning.presets import PresetResult, evaluate_preset, evaluate_presets, hybridflow, mapping, rule_plan
from realhf.planning.problem.native import DeviceNeed, Event
from realhf.planning.request import unwatched
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, task_of

TASK = task_of(ppo(), **settings(ppo(), cpu_cluster(4)))
GIB = 2.0**30


def predicted(
    step_s: float, *, fits: bool = True, peaks: Sequence[float] = (1.0,), plan: ExecutionPlan | None = None
) -> Prediction:
    needs = [DeviceNeed(communicator_bytes=0.0, static_bytes=0.0, peak_bytes=peak) for peak in peaks]
    plan = plan or ExecutionPlan(num_devices=4, calls={})
    return Prediction(plan=plan, call_s={}, transfer_s={}, step_s=step_s, needs=needs, fits=fits)


# --- timelines

NAMES = ("a", "b", "data: a -> b", "load m for a", "offload m after a", "m: a -> b", "rule")


@pytest.mark.parametrize(
    ("node", "on", "kind"),
    [
        (0, ["a"], COMPUTE),
        (1, [], COMPUTE),
        (2, ["b"], TRANSFER),
        (3, ["a"], OFFLOAD),
        (4, ["a"], OFFLOAD),
        (5, ["b"], REALLOCATION),
        (6, [], BESIDE),
    ],
)
def test_the_kind_of_a_span(node: int, on: list[str], kind: str) -> None:
    """Two calls come before the transfers."""
    problem: Any = SimpleNamespace(
        nodes=[SimpleNamespace(name=name) for name in NAMES],
        calls=NAMES[:2],
        transfers=[SimpleNamespace(on=["b"])] * (node - 2) + [SimpleNamespace(on=on)],
    )
    found = analysis._span(problem, (1, 8, 16), Event(node, 3, 1.0, 2.0, []))
    assert found == Span(NAMES[node], kind, 3, 1.0, 2.0, (1, 8, 16))


def chain(spans: Sequence[Span], parents: Mapping[int, Sequence[int]]) -> dict[str, float]:
    """Of events one for each span, in this order, of nodes by these numbers, which also wait for their devices."""
    before = [[n for n in range(number) if {*spans[n].devices} & {*span.devices}] for number, span in enumerate(spans)]
    events = [
        Event(node, span.step, span.start_s, span.end_s, [*parents.get(node, ()), *before[node]])
        for node, span in enumerate(spans)
    ]
    return analysis._chain(events, spans, max(span.end_s for span in spans))


def test_the_longest_chain_goes_back_over_what_was_waited_for() -> None:
    """Over a parent on another device, and over what used the same device; not over what ended earlier."""
    spans = [
        Span("a", COMPUTE, 0, 0.0, 2.0, (0,)),
        Span("other", COMPUTE, 0, 0.0, 1.0, (1,)),
        Span("data: a -> b", TRANSFER, 0, 2.0, 3.0, (1,)),
        Span("aside", COMPUTE, 0, 2.0, 6.0, (2,)),
        Span("rule", BESIDE, 0, 3.0, 3.5, ()),
        Span("b", COMPUTE, 0, 3.0, 7.0, (1,)),
        Span("elsewhere", COMPUTE, 0, 6.0, 7.0, (3,)),
        Span("a", COMPUTE, 1, 7.0, 8.0, (1,)),
    ]
    found = chain(spans, {2: [0], 5: [2], 7: [1]})
    assert found == pytest.approx({"b": 0.5, "a": 0.375, "transfer": 0.125})
    assert list(found) == ["b", "a", "transfer"]


def test_what_takes_no_time_is_not_on_the_chain_and_what_is_beside_is_by_its_name() -> None:
    spans = [
        Span("a", COMPUTE, 0, 0.0, 2.0, (0,)),
        Span("load m for b", OFFLOAD, 0, 2.0, 2.0, (0,)),
        Span("rule", BESIDE, 0, 2.0, 4.0, ()),
    ]
    assert chain(spans, {1: [0], 2: [1]}) == {"a": 0.5, "rule": 0.5}


def test_of_what_ended_at_once_the_later_one_was_waited_for() -> None:
    spans = [
        Span("a", COMPUTE, 0, 0.0, 2.0, (0,)),
        Span("b", COMPUTE, 0, 0.0, 2.0, (1,)),
        Span("c", COMPUTE, 0, 2.0 + 5e-10, 4.0, (0, 1)),
    ]
    assert chain(spans, {}) == pytest.approx({"b": 0.5, "c": 0.5})


def test_limits_name_the_three_largest_parts() -> None:
    found = Analysis(
        prediction=predicted(2.0), tokens_per_s=1.0, gpu_hours_per_million_tokens=1.0, spans=(),
        chain={"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}, busiest_device=2, busy=0.456,
    )  # fmt: skip
    assert found.bottleneck == "a 40%"
    assert found.step_s == 2.0
    assert found.limits == (
        "the longest chain of calls (a 40%, b 30%, c 20%); the busiest device, 2, is busy for 46% of the time"
    )


def test_the_busiest_device_of_an_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are as busy the first, and one that comes after an idle one."""
    spans = iter([Span("a", COMPUTE, 0, 0.0, 3.0, (1, 2)), Span("b", COMPUTE, 0, 3.0, 4.0, (0,))])
    problem = SimpleNamespace(calls=["a", "b"], num_devices=4, steps=2)
    plan = ExecutionPlan(num_devices=4, calls={})

    def simulated(*words: Any) -> tuple[Any, str, list[Event]]:
        assert words == (TASK, plan)
        return problem, "native", [Event(0, 0, 0.0, 3.0, []), Event(1, 0, 3.0, 4.0, [0])]

    monkeypatch.setattr(analysis, "simulated", simulated)
    monkeypatch.setattr(analysis, "occupied", lambda of, choice: {(0, 0): [(1, 2), (0,)]}[tuple(choice)])
    monkeypatch.setattr(analysis, "_span", lambda *words: next(spans))
    monkeypatch.setattr(analysis, "_chain", lambda events, spans, whole_s: {"whole": whole_s})
    found = analysis.analyse(TASK, predicted(2.0, plan=plan))
    assert (found.busiest_device, found.busy, found.chain) == (1, 0.75, {"whole": 4.0})
    assert found.tokens_per_s == 256 / 2.0
    assert found.gpu_hours_per_million_tokens == pytest.approx(4 * 1e6 / 128 / 3600)
    assert [span.name for span in found.spans] == ["a", "b"]


# --- orders


def ordered(*calls: str, back: Mapping[str, int] | None = None) -> tuple[OrderEntry, ...]:
    return tuple(OrderEntry(call=name, steps_back=(back or {}).get(name, 0)) for name in calls)


@pytest.fixture
def line() -> DataflowGraph:
    return DataflowGraph(
        [
            call("a", TINY, GENERATE, "prompts", "seq"),
            call("b", TINY, INFERENCE, "seq", "score"),
            call("c", TINY, TRAIN_STEP, "seq score"),
        ],
        ["prompts"],
    )


def orders_of(
    graph: DataflowGraph, starts: Sequence[tuple[str, int, float]], monkeypatch: pytest.MonkeyPatch, in_flight: int = 2
) -> list[Any]:
    """Possible orders, where all can be run."""
    monkeypatch.setattr(prediction_module, "problem_of_order", lambda *words: "")
    plan = ExecutionPlan(num_devices=1, calls={}, max_steps_in_flight=in_flight)
    return possible_orders(starts, plan, graph)


A, B, C = "a_generate", "b_inference", "c_train_step"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_orders_of_a_simulation(in_flight: int, line: DataflowGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 3 s, of which training ends in the next one: it comes second there, one step back. The middle of the
    simulation counts: the steps before are in another order."""
    middle = in_flight + 2
    starts = [(name, step, 3.0 * step + s) for step in range(8) for name, s in ((A, 0.0), (B, 2.0), (C, 3.5))]
    starts = [
        (name, step, 3.0 * step + ((A, B, C).index(name) if step < middle - 1 else s - 3.0 * step))
        for name, step, s in starts
    ]
    found = orders_of(line, starts, monkeypatch, in_flight)
    from_a = ordered(A, C, B, back={C: 1})
    from_b = ordered(B, A, C, back={A: -1})
    assert found[0] == from_a
    assert found[-1] == ordered(A, B, C)
    assert from_b in found
    assert len(found) == len(set(found)) == 4


def test_calls_that_start_at_once_keep_the_order_of_the_simulation(
    line: DataflowGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [(name, step, float(step)) for step in range(8) for name in (A, C, B)]
    assert orders_of(line, starts, monkeypatch)[0] == ordered(A, C, B)


def test_a_period_that_does_not_come_back_is_no_order(line: DataflowGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other step inference comes after training."""
    starts = [
        (name, step, 3.0 * step + s)
        for step in range(10)
        for name, s in ((A, 0.0), (B, 1.0 if step % 2 else 2.0), (C, 2.0 if step % 2 else 1.0))
    ]
    assert orders_of(line, starts, monkeypatch) == [ordered(A, C, B)]


def test_orders_that_cannot_be_run_are_left_out(line: DataflowGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(plan: ExecutionPlan, graph: DataflowGraph) -> str:
        assert graph is line
        return "too far back" if any(entry.steps_back for entry in plan.order) else ""

    monkeypatch.setattr(prediction_module, "problem_of_order", problem)
    starts = [(name, step, 3.0 * step + s) for step in range(8) for name, s in ((A, 0.0), (B, 2.0), (C, 3.5))]
    plan = ExecutionPlan(num_devices=1, calls={}, max_steps_in_flight=2)
    assert possible_orders(starts, plan, line) == [ordered(A, B, C)]


def test_the_fastest_of_the_possible_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many steps as show two periods; only calls have a place in an order."""
    task = TASK
    names = list(task.graph.nodes)
    plan = ExecutionPlan(num_devices=4, calls={}, max_steps_in_flight=3)

    def trace(choice: Sequence[int], steps: int, order: Any) -> list[tuple[int, int, float, float, list[int]]]:
        assert (choice, steps, order) == ([1, 2], 12, ())
        return [(1, 0, 5.0, 6.0, []), (len(names), 0, 1.0, 2.0, []), (0, 1, 7.0, 8.0, [])]

    def possible(starts: Any, of: Any, graph: Any) -> list[Any]:
        assert starts == [(names[1], 0, 5.0), (names[0], 1, 7.0)]
        assert (of, graph) == (plan, task.graph)
        return [ordered("slow"), ordered("fast"), ordered("slower")]

    seconds = {ordered("slow"): 3.0, ordered("fast"): 1.0, ordered("slower"): 4.0}
    monkeypatch.setattr(prediction_module, "possible_orders", possible)
    monkeypatch.setattr(
        prediction_module, "predict", lambda of, ordered_plan: predicted(seconds[ordered_plan.order], plan=ordered_plan)
    )
    native: Any = SimpleNamespace(trace=trace)
    assert fastest_order(task, plan, native, [1, 2]).plan.order == ordered("fast")


def test_a_plan_fits_up_to_the_last_byte() -> None:
    plan = TASK.plan({name: CallPlan(devices=(0, 4), tp=4) for name in TASK.graph.model_calls})
    found = prediction_module.predict(TASK, plan)
    peak = int(found.peak_bytes)
    assert peak == found.peak_bytes
    for memory, fits in ((peak, True), (peak - 1, False)):
        assert prediction_module.predict(replace(TASK, cluster=cpu_cluster(4, memory=memory)), plan).fits is fits
    assert found.plan.predicted_step_s == found.step_s
    assert {name: entry.predicted_s for name, entry in found.plan.calls.items()} == found.call_s


# --- plans by rule


def test_all_rules_are_tried_with_one_mapper(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    results = {
        name: PresetResult(
            name=name, prediction=None if place == 2 else predicted(1.0), problem="x" * (place in (1, 2))
        )
        for place, name in enumerate(presets.PRESETS)
    }
    mappers: list[Any] = []

    def evaluate(name: str, task: PlanningTask, mapper: Any) -> PresetResult:
        assert task is TASK
        mappers.append(mapper)
        return results[name]

    monkeypatch.setattr(presets, "evaluate_preset", evaluate)
    assert evaluate_presets(TASK, lambda *words: said.append(words)) == list(results.values())
    names = ["heuristic", "real-heuristic", "colocate", "split", "standalone", "hybridflow", "mapping"]
    assert said == [("plans by rule", name) for name in names] + [("plans by rule", "5 of 7 fit")]
    assert len({id(mapper) for mapper in mappers}) == 1
    assert mappers[0].task is TASK
    assert evaluate_presets(TASK, unwatched) == list(results.values())


def test_a_rule_that_does_not_fit_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ExecutionPlan(num_devices=4, calls={})
    checked: list[Any] = []
    monkeypatch.setattr(presets, "check_confined", lambda *words: checked.append(words))
    monkeypatch.setattr(presets, "PRESETS", {"mine": lambda mapper: plan if mapper.task is TASK else None})
    small = predicted(1.0, fits=False, peaks=[4.25 * GIB, 5.25 * GIB, 3 * GIB])
    monkeypatch.setattr(
        presets, "predict_in_best_order", lambda task, of: small if (task, of) == (TASK, plan) else None
    )
    text = "needs 5.2 GiB on device 1, which has 4.0 GiB"
    assert evaluate_preset("mine", TASK) == PresetResult(name="mine", prediction=small, problem=text)
    assert checked == [(plan, TASK.graph)]
    with pytest.raises(UserError) as error:
        rule_plan("mine", TASK)
    assert str(error.value) == f"--rule mine: {text}; take another rule, or leave --rule out to search for a plan"
    fitting = replace(small, fits=True)
    monkeypatch.setattr(presets, "predict_in_best_order", lambda task, of: fitting)
    assert evaluate_preset("mine", TASK) == PresetResult(name="mine", prediction=fitting)
    assert rule_plan("mine", TASK) is fitting


def test_which_results_can_run() -> None:
    found = predicted(1.0)
    assert PresetResult(name="a", prediction=found).fitting is found
    assert PresetResult(name="a", prediction=found, problem="too large").fitting is None
    assert PresetResult(name="a", prediction=None, problem="none").fitting is None


class Mapped:
    """A mapper whose placements have these plans by their own costs, or fit nowhere."""

    def __init__(self, task: PlanningTask, numbers: Sequence[int]) -> None:
        self.task, self.numbers = task, numbers

    @property
    def mappings(self) -> list[Any]:
        if not self.numbers:
            raise UserError("none fits")
        return [SimpleNamespace(calls=f"calls {n}", meshes=lambda task, n=n: f"meshes {n}") for n in self.numbers]


def hybrid(
    monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int], seconds: Mapping[str, float], unfit: Sequence[str] = (),
    task: PlanningTask = TASK,
) -> tuple[str, list[str], list[str]]:  # fmt: skip
    """The plan that is taken, those that are priced, and those that are checked, by the meshes that they are on."""
    checked: list[str] = []
    priced: list[str] = []

    def price(of: Any, plan: str) -> Any:
        priced.append(plan)
        return SimpleNamespace(step_s=seconds.get(plan, 9.0), fits=plan not in unfit, plan=plan)

    def best_on(of: Any, meshes: str, preset: str) -> str:
        assert (of, preset) == (task, "mapping")
        return f"best on {meshes}"

    monkeypatch.setattr(presets, "predict_in_best_order", price)
    monkeypatch.setattr(presets, "_best_on", best_on)
    monkeypatch.setattr(presets, "_all_devices", lambda of: "all")
    monkeypatch.setattr(presets, "check_confined", lambda plan, graph: checked.append(plan))
    monkeypatch.setattr(PlanningTask, "plan", lambda self, calls, preset: f"{preset} {calls}")
    mapper: Any = Mapped(task, numbers)
    found: Any = mapping(mapper)
    return found, priced, checked


def test_the_cheapest_placements_and_all_together_are_priced_as_they_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["mapping calls 1", "best on meshes 1", "best on meshes 2", "best on meshes 3"]
    found, priced, checked = hybrid(monkeypatch, [1, 2, 3, 4], {"best on meshes 2": 1.0, "best on all": 2.0})
    assert (found, priced, checked) == ("best on meshes 2", [*own, "best on all"], own)
    found, _, _ = hybrid(monkeypatch, [1, 2], {"best on meshes 2": 1.0, "best on all": 2.0}, ["best on meshes 2"])
    assert found == "best on all"
    assert hybrid(monkeypatch, [1], {})[0] == "mapping calls 1", "the algorithm's own, where they tie"


def test_the_algorithms_own_choice_is_the_cheapest_by_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanningTask, "plan", lambda self, calls, preset: f"{preset} {calls}")
    mapper: Any = Mapped(TASK, [3, 1, 2])
    assert hybridflow(mapper) == "hybridflow calls 3"
    mapper = Mapped(TASK, [])
    with pytest.raises(UserError, match="none fits"):
        hybridflow(mapper)


def test_where_no_placement_fits_all_models_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pools the reason is told: other models keep to theirs."""
    assert hybrid(monkeypatch, [], {}) == ("best on all", ["best on all"], [])
    plain = ppo()
    pools = {"critic": Pool("p", devices=[1, 2])}
    graph = DataflowGraph(list(plain.calls.values()), plain.dataset_keys, pools=pools)
    with pytest.raises(UserError, match="none fits"):
        hybrid(monkeypatch, [], {}, task=replace(TASK, graph=graph))


def test_the_largest_meshes_of_models_and_their_pools() -> None:
    plain = ppo()
    pools = {"critic": Pool("p", devices=[1, 2])}
    graph = DataflowGraph(list(plain.calls.values()), plain.dataset_keys, pools=pools)
    found = presets._all_devices(replace(TASK, graph=graph))
    assert found == {name: DeviceMesh(1, 2) if name == "critic" else DeviceMesh(0, 4) for name in graph.models}


def halved(graph: DataflowGraph, monkeypatch: pytest.MonkeyPatch, cluster: Any = None) -> dict[str, int]:
    """The half of each model."""
    monkeypatch.setattr(presets, "_best_on", lambda task, meshes, preset: (meshes, preset))
    task = task_of(graph, **settings(graph, cluster or cpu_cluster(4)))
    meshes, preset = presets.split(task)  # type: ignore[misc]
    assert preset == "split"
    return {name: (DeviceMesh(0, 2), DeviceMesh(2, 2)).index(mesh) for name, mesh in meshes.items()}  # type: ignore[attr-defined]


def test_models_that_generate_and_those_like_them_are_on_one_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are trained themselves; without generation the first model is there."""
    other = replace(TINY, num_layers=2)
    graph = DataflowGraph(
        [
            call("reward", other, INFERENCE, "prompts", "score"),
            call("actor", TINY, GENERATE, "prompts", "seq"),
            call("ref", TINY, INFERENCE, "seq", "logp"),
            call("student", TINY, TRAIN_STEP, "seq logp"),
        ],
        ["prompts"],
    )
    assert halved(graph, monkeypatch) == {"reward": 1, "actor": 0, "ref": 0, "student": 1}
    reading = DataflowGraph(
        [
            call("reward", other, INFERENCE, "prompts", "score"),
            call("judge", other, INFERENCE, "prompts", "more"),
            call("ref", TINY, INFERENCE, "prompts", "logp"),
        ],
        ["prompts"],
    )
    assert halved(reading, monkeypatch) == {"reward": 0, "judge": 0, "ref": 1}
    alone = DataflowGraph([call("actor", TINY, GENERATE, "prompts", "seq")], ["prompts"])
    with pytest.raises(UserError, match="split: all models belong to the side of generation; nothing is left"):
        halved(alone, monkeypatch)
    with pytest.raises(UserError, match="split: 3 devices cannot be halved into device meshes; take an even number"):
        halved(graph, monkeypatch, cpu_cluster(3))


def test_the_best_strategies_on_given_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the least memory where none fits."""
    meshes = {name: DeviceMesh(0, 2 if name == "critic" else 4) for name in TASK.graph.models}
    given: dict[str, Any] = {}
    for feasible in (True, False):

        def build(task: Any, options: Any) -> str:
            given.update(options)
            return "problem"

        def search(native: Any, request: Any, feasible: bool = feasible) -> Any:
            assert (request.budget.evaluations, request.seed, request.proves) == (20_000, 0, False)
            return SimpleNamespace(feasible=feasible, choice=[1] * 6)

        native = SimpleNamespace(smallest_plan=lambda seed: [2 + seed] * 6)
        monkeypatch.setattr(presets, "build_problem", build)
        monkeypatch.setattr(presets, "native_problem", lambda problem, native=native: native)
        monkeypatch.setattr(presets, "search_problem", search)
        plan = presets._best_on(TASK, meshes, "mine")
        number = 1 if feasible else 2
        assert plan.calls == {name: options[number].call_plan() for name, options in given.items()}
        assert plan.notes["preset"] == "mine"
    for name, options in given.items():
        assert {option.layout.mesh for option in options} == {meshes[TASK.graph.model_calls[name].model_name]}
    monkeypatch.setattr(presets, "options_on", lambda *words: [])
    with pytest.raises(UserError) as error:
        presets._best_on(TASK, meshes, "mine")
    assert str(error.value) == (
        "mine: no (dp, tp, pp) on 4 devices is legal for actor_generate with mini-batches of 16 samples; choose a "
        "batch size that the number of devices divides"
    )


def test_what_a_device_lacks_for_each_call() -> None:
    """Beside all homes, communicators, and what other calls leave; each call in its smallest form."""
    strategy = ParallelStrategy(tp=4)
    models = TASK.call_models
    static = sum(
        models[name].static_bytes(strategy)
        for name in ("reward_inference", "ref_inference", "actor_train_step", "critic_train_step")
    )
    dynamic = {name: model.work(strategy, 4).dynamic_bytes() for name, model in models.items()}
    counts: dict[str, Sequence[int]] = dict.fromkeys(models, (1, 4))
    limit = int(static + max(dynamic.values())) - 10
    tight = replace(TASK, cluster=cpu_cluster(4, memory=limit))
    found = presets._lacking_bytes(tight, strategy, counts)
    assert found == {name: max(static + dynamic[name] - limit, 0.0) for name in models}
    assert max(found.values()) == pytest.approx(10, abs=1)
    assert min(found.values()) == 0.0
    assert presets._lacking_bytes(TASK, strategy, counts) == dict.fromkeys(models, 0.0)
    each = 1000.0
    costs = replace(TASK.costs, hardware=structs.replace(TASK.costs.hardware, communicator_bytes=each))
    own = {key for model in models.values() for key in model.communicators(
        Layout(DeviceMesh(0, 4), strategy))}  # fmt: skip
    more = presets._lacking_bytes(replace(tight, costs=costs), strategy, counts)
    assert max(more.values()) == pytest.approx(max(found.values()) + (len(own) + 1) * each)


def test_what_a_generation_leaves_counts_beside_all_other_calls() -> None:
    """A cache that is kept on the device; each call in whatever number of micro-batches needs least."""
    graph = ppo()
    cluster = Cluster(num_nodes=1, devices_per_node=4, hardware=load_hardware("h100"))
    costs = load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware)
    task = task_of(graph, **{**settings(graph, cluster), "costs": costs, "dtype": "bfloat16"})
    strategy = ParallelStrategy(dp=4)
    counts: dict[str, Sequence[int]] = dict.fromkeys(task.call_models, (1, 2))
    works = {name: [model.work(strategy, count) for count in (1, 2)] for name, model in task.call_models.items()}
    kept = {name: min(work.kept_cache_bytes() for work in each) for name, each in works.items()}
    assert kept["actor_generate"] < works["actor_generate"][0].kept_cache_bytes()
    assert sum(kept.values()) == kept["actor_generate"] > 0
    static = sum(task.call_models[home].static_bytes(strategy) for home in set(task.homes.values()))
    own = {
        key for model in task.call_models.values() for key in model.communicators(Layout(DeviceMesh(0, 4), strategy))
    }
    communicators = cluster.hardware.communicator_bytes * (len(own) + 1)
    limit = int(static)
    found = presets._lacking_bytes(
        replace(task, cluster=replace(cluster, hardware=structs.replace(cluster.hardware, device_memory_bytes=limit))),
        strategy,
        counts,
    )
    for name, each in works.items():
        beside = sum(kept.values()) - kept[name]
        dynamic = min(work.dynamic_bytes() for work in each)
        assert found[name] == pytest.approx(static + communicators + beside + dynamic - limit)


def heuristic_of(
    monkeypatch: pytest.MonkeyPatch, lacking: Mapping[tuple[ParallelStrategy, int], float], task: PlanningTask = TASK
) -> tuple[ParallelStrategy, dict[str, int]]:
    """The strategy and micro-batches of the plan, where generation lacks these bytes and other calls none."""

    def lacks(of: Any, strategy: ParallelStrategy, counts: Mapping[str, Sequence[int]]) -> dict[str, float]:
        least = min(lacking.get((strategy, count), 0.0) for count in counts["actor_generate"])
        return {name: least if name == "actor_generate" else 0.0 for name in counts}

    monkeypatch.setattr(presets, "_lacking_bytes", lacks)
    plan = presets.heuristic(task)
    [strategy] = {entry.strategy for entry in plan.calls.values()}
    assert {entry.devices for entry in plan.calls.values()} == {(0, task.cluster.num_devices)}
    return strategy, {name: entry.micro_batches for name, entry in plan.calls.items()}


def test_the_heuristic_takes_tensor_parallelism_and_then_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call in its fastest number of micro-batches. Stages where memory would lack otherwise."""
    task = replace(TASK, cluster=cpu_cluster(8))
    strategy, numbers = heuristic_of(monkeypatch, {}, task)
    assert strategy == ParallelStrategy(dp=2, tp=4)
    for name, model in task.call_models.items():
        counts = [count for count in (1, 2, 4, 8) if count <= model.samples // 2]
        assert numbers[name] == min(counts, key=lambda count, model=model: model.seconds(strategy, count))  # type: ignore[misc]
    lacking = {(strategy, count): 5.0 for count in (1, 2, 4, 8)}
    assert heuristic_of(monkeypatch, lacking, task)[0] == ParallelStrategy(tp=4, pp=2)
    nodes = replace(TASK, cluster=cpu_cluster(2, num_nodes=4))
    assert heuristic_of(monkeypatch, {}, nodes)[0] == ParallelStrategy(dp=4, tp=2), "within a node"
    with pytest.raises(UserError) as error:
        presets.heuristic(replace(TASK, cluster=cpu_cluster(7)))
    assert str(error.value) == (
        "heuristic plan: no (dp, tp, pp) on 7 devices is legal for all calls with batch_size=16; choose another number "
        "of devices or a batch size that it divides"
    )


def test_reals_heuristic_has_stages_across_nodes_whatever_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """tp within a node first, then as many stages as nodes, or a part of them; never more data parallelism instead."""
    for (devices, nodes), expected in {
        (4, 1): ParallelStrategy(tp=4), (8, 1): ParallelStrategy(dp=2, tp=4), (2, 2): ParallelStrategy(tp=2, pp=2),
        (4, 2): ParallelStrategy(tp=4, pp=2), (8, 2): ParallelStrategy(dp=2, tp=4, pp=2),
        (2, 8): ParallelStrategy(dp=2, tp=2, pp=4),  # four layers have no eight stages
    }.items():  # fmt: skip
        task = replace(TASK, cluster=cpu_cluster(devices, num_nodes=nodes))
        plan = presets.real_heuristic(task)
        assert {call.strategy for call in plan.calls.values()} == {expected}, (devices, nodes)
        monkeypatch.setattr(presets, "_lacking_bytes", lambda of, strategy, counts: dict.fromkeys(counts, 1e9))
    with pytest.raises(UserError, match="real-heuristic plan: no"):
        presets.real_heuristic(replace(TASK, cluster=cpu_cluster(7)))


def test_calls_of_the_heuristic_take_the_fastest_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ParallelStrategy(tp=4)
    model = TASK.call_models["actor_generate"]
    by_speed = sorted((1, 2, 4, 8, 16), key=lambda count: model.seconds(strategy, count))
    lacking = {(strategy, count): 9.0 for count in by_speed[:2]}
    assert heuristic_of(monkeypatch, lacking)[1]["actor_generate"] == by_speed[2]
    none_fits = {(each, count): 5.0 for each in (strategy, ParallelStrategy(dp=4)) for count in by_speed}
    none_fits |= {(each, by_speed[3]): 4.0 for each in (strategy, ParallelStrategy(dp=4))}
    monkeypatch.setattr(presets, "call_strategies", lambda *words: [(strategy, list(by_speed))])
    assert heuristic_of(monkeypatch, none_fits)[1]["actor_generate"] == by_speed[3], "what needs least"


def test_each_model_on_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranked(among: Any) -> Any:
        assert among == [(("actor",), ("reward",), ("ref",), ("critic",))]
        return [SimpleNamespace(meshes=lambda task: ("meshes", task)), "dearer"]

    monkeypatch.setattr(presets, "_best_on", lambda task, meshes, preset: (task, meshes, preset))
    mapper: Any = SimpleNamespace(task=TASK, ranked=ranked)
    found: Any = presets.standalone(mapper)
    assert found == (TASK, ("meshes", TASK), "standalone")
    monkeypatch.setattr(presets, "_all_devices", lambda task: "all")
    everywhere: Any = presets.colocate(TASK)
    assert everywhere == (TASK, "all", "colocate")
