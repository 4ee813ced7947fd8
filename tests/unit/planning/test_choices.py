"""Sources of copies, what dominates, and modes by operator, on stand-ins whose numbers are worked by hand."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute, CallPlan, ExecutionPlan, OrderEntry
from realhf.dataflow.rationale import Worth
from realhf.geometry.layout import DeviceMesh, ParallelStrategy
from realhf.planning import copies, dominance
from realhf.planning import ways as ways_module
from realhf.planning.dominance import Dominance, worthwhile
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.predict import Prediction
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, task_of

TASK = task_of(ppo(), **settings(ppo(), cpu_cluster(4)))


# --- sources of copies


def predicted(step_s: float, plan: ExecutionPlan | None = None, *, fits: bool = True) -> Prediction:
    plan = plan or ExecutionPlan(num_devices=4, calls={})
    return Prediction(plan=plan, call_s={}, transfer_s={}, step_s=step_s, needs=[], fits=fits)


ORDER = (OrderEntry(call="a"),)


def copying(sources: Mapping[str, str]) -> ExecutionPlan:
    calls = {name: CallPlan(devices=(0, 1), copy_from=sources.get(name)) for name in ("a", "b", "c")}
    return ExecutionPlan(num_devices=4, calls=calls)


def test_one_choice_after_the_other_the_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until none makes the step shorter by more than rounding."""
    steps = {"": 3.0, "a": 2.5, "b": 2.0, "bc": 1.0, "ab": None, "bcd": 1.0 * (1 - 0.9e-9)}
    more = {"": ["a", "b"], "b": ["ab", "bc"], "bc": ["bcd"]}
    monkeypatch.setattr(copies, "_more", lambda task, plan: more[plan])

    def there(task: Any, known: Any, of: str) -> Any:
        assert (task, known.plan) == (TASK, next(start for start, found in more.items() if of in found))
        step_s = steps[of]
        return None if step_s is None else SimpleNamespace(plan=of, step_s=step_s)

    monkeypatch.setattr(copies, "_predicted", there)
    begin: Any = SimpleNamespace(plan="", step_s=3.0)
    best: Any = copies.with_best_copies(TASK, begin)
    assert (best.plan, best.step_s) == ("bc", 1.0)
    steps["bcd"] = 1.0 - 1.5e-9
    more["bcd"] = []
    best = copies.with_best_copies(TASK, begin)
    assert best.plan == "bcd"


def test_what_copies_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source by itself."""
    plan = structs.replace(copying({"b": "a", "c": "a"}), order=ORDER)
    plan = structs.replace(plan, calls=plan.calls | {"d": CallPlan(devices=(0, 1), copy_from="b")})

    def there(task: PlanningTask, of: ExecutionPlan) -> Prediction:
        assert (task, of.order) == (TASK, ())
        return predicted(5.0 if of.copies == {"d": "b"} else 6.0, fits=of.copies == {"d": "b"})

    monkeypatch.setattr(copies, "predict_in_best_order", there)
    assert copies.copies_worth(TASK, predicted(1.0, plan)) == [
        Worth(of="a", feature="its copy serves b, c", without_s=5.0),
        Worth(of="b", feature="its copy serves d", without_s=None),
    ]


def test_a_plan_with_copies_in_the_better_of_two_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    known = predicted(3.0, structs.replace(copying({}), order=ORDER))
    cases: list[tuple[Any, Any, float | None]] = [
        ((2.0, True), (1.0, True), 1.0), ((2.0, True), (3.0, True), 2.0), ((2.0, True), (1.0, False), 2.0),
        ((2.0, False), (1.0, False), None), ((2.0, True), None, 2.0),
    ]  # fmt: skip
    monkeypatch.setattr(copies, "problem_of_copies", lambda plan, graph: "" if plan.copies == {"b": "a"} else "wrong")
    for best, own, expected in cases:

        def in_best(task: Any, plan: Any, best: Any = best) -> Prediction:
            assert (task, plan.copies, plan.order) == (TASK, {"b": "a"}, ())
            return predicted(best[0], plan, fits=best[1])

        def order_problem(plan: Any, graph: Any, own: Any = own) -> str:
            assert (plan.order, graph) == (ORDER, TASK.graph)
            return "" if own else "the source of the next step comes before the last taker"

        def in_own(task: Any, plan: Any, own: Any = own) -> Prediction:
            assert (task, plan.copies, plan.order) == (TASK, {"b": "a"}, ORDER)
            return predicted(own[0], plan, fits=own[1])

        monkeypatch.setattr(copies, "predict_in_best_order", in_best)
        monkeypatch.setattr(copies, "predict", in_own)
        monkeypatch.setattr(copies, "problem_of_order", order_problem)
        found = copies._predicted(TASK, known, {"b": "a"})
        assert (found and found.step_s) == expected
    monkeypatch.setattr(copies, "problem_of_copies", lambda *_: "cannot run")
    assert copies._predicted(TASK, known, {"b": "a"}) is None


def test_the_next_choices_of_sources() -> None:
    """A call away from home whose copy is kept: for all later ones in its layout, and for one in another besides."""
    names = ("first", "second", "third", "train")
    calls = [
        replace(call("actor", TINY, GENERATE if number == 0 else INFERENCE, "prompts" if number == 0 else "seq",
                     f"out{number}" if number else "seq"), name=name)
        for number, name in enumerate(names[:3])
    ]  # fmt: skip
    calls.append(replace(call("actor", TINY, TRAIN_STEP, "seq out1 out2"), name="train"))
    graph = DataflowGraph(calls, ["prompts"])
    task = task_of(graph, **settings(graph, cpu_cluster(4)))
    home, pair, other = CallPlan(devices=(0, 1)), CallPlan(devices=(2, 2), tp=2), CallPlan(devices=(1, 1))

    def more(first: CallPlan, second: CallPlan, third: CallPlan) -> list[dict[str, str]]:
        plan = ExecutionPlan(num_devices=4, calls={"first": first, "second": second, "third": third, "train": home})
        return list(copies._more(task, plan))

    assert more(home, home, home) == []
    assert more(pair, home, home) == []
    assert more(pair, pair, home) == [{"second": "first"}]
    assert more(pair, other, home) == [{"second": "first"}]
    alike = {"second": "first", "third": "first"}
    assert more(pair, pair, pair)[0] == alike
    found = more(pair, other, pair)
    assert {"third": "first"} in found
    assert {"third": "first", "second": "first"} in found
    assert {"third": "second"} in found


# --- what dominates


@pytest.mark.parametrize(
    ("costs", "kept"),
    [
        ([(1, 1, 1, 1), (1, 1, 1, 1)], [0]),
        ([(2, 1, 1, 1), (1, 1, 1, 1)], [1]),
        ([(1, 2, 1, 1), (2, 1, 1, 1)], [0, 1]),
        ([(1, 1, 2, 1), (2, 1, 1, 1)], [0, 1]),
        ([(1, 1, 1, 2), (2, 1, 1, 1)], [0, 1]),
        ([(1, 1, 1, 1), (2, 1, 1, 1)], [0]),
        ([(1, 2, 1, 1), (2, 1, 2, 1), (3, 2, 2, 1), (3, 1, 1, 1)], [0, 1, 3]),
        ([(5, 5, 5, 5)], [0]),
    ],
)
def test_what_no_other_is_better_than_in_everything(costs: list[tuple[float, ...]], kept: list[int]) -> None:
    """In their own order; of equal ones the first."""
    ways: list[Any] = [
        (f"way {number}", SimpleNamespace(time_s=time_s, static_bytes=static, dynamic_bytes=dynamic, copy_bytes=copied))
        for number, (time_s, static, dynamic, copied) in enumerate(costs)
    ]
    assert dominance._undominated(ways) == [f"way {number}" for number in kept]


def test_worthwhile_options_are_kept_by_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def options(task: Any, name: str, keeps: Dominance) -> list[int]:
        assert keeps == Dominance(task, drops_hopeless=True)
        asked.append((name, task.searched, task.near, task.offload))
        return [len(asked)]

    monkeypatch.setattr(dominance, "options_to_search", options)
    task = replace(TASK)
    name, near = "ref_inference", (DeviceMesh(0, 1),)
    variations = [
        task, task.varied(breadth="plain"), task.varied(near=near), task.varied(offload=("ref",)),
    ]  # fmt: skip
    assert [worthwhile(each, name) for each in variations] == [(1,), (2,), (3,), (4,)]
    assert [worthwhile(each, name) for each in variations] == [(1,), (2,), (3,), (4,)]
    assert worthwhile(task.varied(offload=("reward",)), name) == (1,), "the same for this model"
    assert worthwhile(task, "reward_inference") == (5,)
    assert Dominance(task).drops_hopeless is False


def test_ways_that_need_more_than_there_is_are_dropped() -> None:
    definition = TASK.graph.model_calls["critic_train_step"]
    ways: list[Any] = [(ParallelStrategy(), count, AS_SET_UP) for count in (1, 8)]
    model = TASK.call_models[definition.name]
    least = [model.least_bytes(strategy, count) for strategy, count, _ in ways]
    assert least[1] < least[0]
    for limit, kept in ((least[0], ways), (least[0] - 1, ways[1:]), (least[1], ways[1:]), (least[1] - 1, [])):
        task = replace(TASK, cluster=cpu_cluster(4, memory=int(limit)))
        assert Dominance(task, drops_hopeless=True)(definition, ways) == kept
    assert Dominance(replace(TASK, cluster=cpu_cluster(4, memory=1)))(definition, ways) == ways


def labels(task: PlanningTask, name: str, *computes: CallCompute) -> list[Any]:
    row: Any = SimpleNamespace(strategy="row")
    ways = [(ParallelStrategy(dp=2), 1, compute) for compute in computes]
    return [Dominance(task)._label(task.graph.model_calls[name], way, row) for way in ways]


def test_what_tells_ways_apart_beside_their_costs() -> None:
    """The label of the home where another call asks for it; where a model is loaded, whether its states are there."""
    cluster = Cluster(num_nodes=1, devices_per_node=4, hardware=load_hardware("h100"))
    graph = ppo()
    costs = load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware)
    task = task_of(graph, **{**settings(graph, cluster), "costs": costs, "dtype": "bfloat16"})
    moved, sharded = CallCompute(offload_states=True), CallCompute(data_parallel="fsdp")
    (_, strategy, states), (_, _, moved_states) = labels(task, "actor_train_step", AS_SET_UP, moved)
    assert (strategy, states, moved_states) == ("row", None, None)
    [(_, strategy, states)] = labels(task, "ref_inference", AS_SET_UP)
    assert (strategy, states) == (None, None), "it has one call"
    waiting = replace(task, offload=("actor",))
    assert [label[2] for label in labels(waiting, "actor_train_step", AS_SET_UP, moved)] == [False, True]
    assert labels(waiting, "critic_train_step", AS_SET_UP)[0][2] is None
    whole, divided = labels(task, "actor_train_step", AS_SET_UP, sharded)
    assert whole[0] == divided[0], "gradients are summed anyway"
    reading, gathering = labels(task, "ref_inference", AS_SET_UP, sharded)
    assert reading[0] != gathering[0], "who gathers parameters needs a communicator for that"
    away = labels(task, "critic_inference", AS_SET_UP, sharded)
    assert away[0] == away[1]


# --- modes by operator


class Sharded:
    """A training of which `zero1_s` and `bytes` are by the number of micro-batches; mixes take a tenth longer."""

    shares_devices = False

    def __init__(self, zero1_s: Mapping[int, float], sizes: Mapping[int, tuple[int, int]], compute: Any = None) -> None:
        self.zero1_s, self.sizes, self.compute = zero1_s, sizes, compute
        self.call = SimpleNamespace(name="train")

    def under(self, compute: CallCompute) -> "Sharded":
        return Sharded(self.zero1_s, self.sizes, compute)

    def available_bytes(self, strategy: ParallelStrategy) -> int:
        return 100

    def static_bytes(self, strategy: ParallelStrategy) -> int:
        whole, least = self.sizes[0]
        return least if self.compute.data_parallel == "fsdp" else whole

    def work(self, strategy: ParallelStrategy, count: int) -> Any:
        return SimpleNamespace(dynamic_bytes=lambda: self.sizes[count][0])

    def seconds(self, strategy: ParallelStrategy, count: int) -> float:
        return self.zero1_s[count] * (1.1 if isinstance(self.compute.data_parallel, tuple) else 1.0)


@pytest.mark.parametrize(
    ("zero1_s", "dynamic", "found"),
    [
        ({1: 1.0, 2: 1.05, 4: 2.0}, {1: 40, 2: 30, 4: 10}, [1, 2]),  # 4 is slower than 1 with modes
        ({1: 1.0, 2: 0.95, 4: 0.9}, {1: 40, 2: 30, 4: 10}, []),  # 4 fits with ZeRO-1, and is the fastest
        ({1: 1.0, 2: 1.05, 4: 2.0}, {1: 71, 2: 30, 4: 10}, [2]),  # 1 does not fit even if all is divided
        ({1: 1.0, 2: 1.1, 4: 0.5}, {1: 40, 2: 30, 4: 21}, [4]),
    ],
)
def test_modes_for_ways_that_may_be_the_fastest(
    zero1_s: Mapping[int, float], dynamic: Mapping[int, int], found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of 80 bytes, or 30 where all of them are divided, in 100 bytes. Faster ways come first."""
    model: Any = Sharded(zero1_s, {0: (80, 30)} | {count: (size, 0) for count, size in dynamic.items()})
    task: Any = SimpleNamespace(call_models={"train": model})
    asked: list[Any] = []
    mixed = CallCompute(data_parallel=(("*", "sharded"),))

    def mix(of: Any, of_model: Any, way: Any, limit_bytes: int) -> CallCompute:
        assert (of, of_model) == (task, model)
        asked.append((way[1], limit_bytes, way[2].data_parallel))
        return mixed

    monkeypatch.setattr(ways_module, "_mix", mix)
    monkeypatch.setattr(ways_module, "has_modes", lambda *words: True)
    sharded = CallCompute(data_parallel="fsdp")
    ways: list[Any] = [(ParallelStrategy(), count, compute) for count in zero1_s for compute in (AS_SET_UP, sharded)]
    result = list(ways_module.mixed_ways(task, SimpleNamespace(name="train"), ways))  # type: ignore[arg-type]
    order = sorted(zero1_s, key=lambda count: zero1_s[count])
    expected = [count for count in order if count in found]
    assert [count for _, count, _ in result] == expected
    assert {compute for _, _, compute in result} <= {mixed}
    assert {data_parallel for _, _, data_parallel in asked} <= {None}
    monkeypatch.setattr(ways_module, "has_modes", lambda *words: False)
    assert list(ways_module.mixed_ways(task, SimpleNamespace(name="train"), ways)) == []  # type: ignore[arg-type]


def test_modes_in_each_of_the_memory_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that have fewer limits are within their smallest one again."""
    model: Any = Sharded({1: 1.0, 2: 1.05}, {0: (100, 30), 1: (10, 0), 2: (5, 0)})
    task: Any = SimpleNamespace(call_models={"train": model})
    asked: list[Any] = []

    def limits(left_bytes: float, zero1_bytes: int, least_bytes: int, *, shares_devices: bool) -> list[int]:
        assert (zero1_bytes, least_bytes, shares_devices) == (100, 30, False)
        return {90: [90, 70], 95: [95]}[int(left_bytes)]

    def mix(of: Any, of_model: Any, way: Any, limit_bytes: int) -> CallCompute:
        asked.append((way[1], limit_bytes))
        return CallCompute(data_parallel=(("*", "sharded"),))

    monkeypatch.setattr(ways_module, "memory_limits", limits)
    monkeypatch.setattr(ways_module, "_mix", mix)
    monkeypatch.setattr(ways_module, "has_modes", lambda of, definition: (of, definition.name) == (task, "train"))
    ways: list[Any] = [(ParallelStrategy(), count, CallCompute(data_parallel="fsdp")) for count in (2, 1)]
    list(ways_module.mixed_ways(task, SimpleNamespace(name="train"), ways))  # type: ignore[arg-type]
    assert asked == [(1, 90), (2, 95), (1, 70), (2, 95)]
