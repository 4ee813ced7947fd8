"""Choices among devices, copies and constants, on stand-ins whose numbers are worked by hand: HybridFlow's mapping,
sources of copies, what dominates, and on what a comparison hinges."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute, CallPlan, ExecutionPlan, OrderEntry
from realhf.dataflow.rationale import Worth
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import copies, dominance, intervals, mapping, mixes
from realhf.planning.dominance import Dominance, worthwhile
from realhf.planning.explain import hinges as hinge_module
from realhf.planning.explain.hinges import Hinge, hinges
from realhf.planning.intervals import Doubt, Draws, PlanDraws, at_ends, drawn, interval, probability_faster, rounded
from realhf.planning.mapping import Colocated, FoundMapping, Mapper, allocations, placed
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.gaussian import standard_draws
from realhf.planning.model.profile import PARTS
from realhf.planning.model.timings import load_costs
from realhf.planning.options import Option
from realhf.planning.predict import Prediction, predict
from realhf.planning.task import PlanningTask, with_staleness
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, task_of

TASK = task_of(ppo(), **settings(ppo(), cpu_cluster(4)))


# --- allocations


def test_devices_for_no_groups() -> None:
    assert list(allocations(0, [])) == [()]
    assert list(allocations(5, [])) == []


def test_sizes_that_leave_too_few_devices_are_not_looked_at() -> None:
    """Nor are those below a minimum, or others than the last group can have."""
    asked: list[tuple[int, ...]] = []

    def keeps(first: tuple[int, ...]) -> bool:
        asked.append(first)
        return first != (2,)

    assert list(allocations(6, [2, 1], None, keeps)) == [(3, 3), (4, 2), (5, 1)]
    assert asked == [(2,), (3,), (3, 3), (4,), (4, 2), (5,), (5, 1)]
    assert list(allocations(6, [1, 1], [1, 2, 4])) == [(2, 4), (4, 2)]
    assert list(allocations(6, [1, 3], [1, 2, 4])) == [(2, 4)]
    assert list(allocations(3, [4])) == []


# --- the choice of strategies for models that share devices

SIZE = DeviceMesh(0, 2)


@dataclass
class Fake:
    """A call whose options take these (static, dynamic, kept) bytes, by the number of micro-batches, in the order of
    their speed. Away from home a copy takes 7 bytes, and communicators one."""

    name: str
    home: str
    sizes: dict[int, tuple[float, float, float]]
    trains: bool = False
    tp: set[int] = field(default_factory=set)

    @property
    def call(self) -> Any:
        kind = TRAIN_STEP if self.trains else INFERENCE
        return SimpleNamespace(name=self.name, trains=self.trains, interface_type=kind)

    @property
    def options(self) -> list[Option]:
        return [
            Option(Layout(SIZE, ParallelStrategy(tp=2) if number in self.tp else ParallelStrategy(dp=2)), number)
            for number in self.sizes
        ]

    def work(self, strategy: ParallelStrategy, number: int) -> Any:
        _, dynamic, kept = self.sizes[number]
        return SimpleNamespace(dynamic_bytes=lambda: dynamic, kept_cache_bytes=lambda: kept)

    def placed(self, strategy: ParallelStrategy) -> Any:
        return SimpleNamespace(copy_bytes=lambda: 7.0)

    def communicator_bytes(self, layout: Layout) -> float:
        return 1.0


def chosen(
    monkeypatch: pytest.MonkeyPatch, calls: Sequence[Fake], room: float, *, frugal: bool = False
) -> dict[str, int] | None:
    """The number of micro-batches of each call in so many bytes of a device."""
    mapper = Mapper(TASK)
    by_name = {each.name: each for each in calls}
    monkeypatch.setattr(mapper, "_room", lambda: room)
    monkeypatch.setattr(mapper, "_ranked", lambda of, devices: of.options if devices == 2 else [])
    monkeypatch.setattr(mapper, "_home", lambda of: by_name[of.home])
    monkeypatch.setattr(mapping, "_static", lambda of, option: of.sizes[option.micro_batches][0])
    found = mapper._choose(calls, 2, frugal)  # type: ignore[arg-type]
    return None if found is None else {name: option.micro_batches for name, option in found.items()}


A = Fake("a", "a", {1: (60, 10, 0), 2: (30, 12, 0)}, trains=True)
B = Fake("b", "b", {1: (40, 20, 0)})


@pytest.mark.parametrize(
    ("room", "fast", "small"),
    [
        (120, 1, 2),
        (119, None, 2),  # a takes its fast form, and b lacks the 20 that it needs while it runs
        (110, None, 2),
        (109, 2, 2),
        (90, 2, 2),
        (89, None, None),
    ],
)
def test_homes_take_their_fastest_form_that_leaves_room_for_the_others(
    room: float, fast: int | None, small: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least that others need is kept free; what a home needs while it runs has to fit beside. Small homes take what
    keeps least."""
    assert chosen(monkeypatch, [A, B], room) == (fast and {"a": fast, "b": 1})
    assert chosen(monkeypatch, [A, B], room, frugal=True) == (small and {"a": small, "b": 1})


@pytest.mark.parametrize(("room", "number"), [(100, 1), (98, 1), (97, 2), (93, 2), (92, None)])
def test_a_call_away_from_home_has_a_copy(room: float, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 bytes, with a communicator of its own; in the home's layout it has none."""
    home = Fake("a", "a", {1: (60, 10, 0)}, trains=True)
    away = Fake("away", "a", {1: (0, 30, 0), 2: (0, 25, 0)}, tp={1, 2})
    there = Fake("there", "a", {3: (0, 32, 0)})
    found = chosen(monkeypatch, [home, away], room)
    assert found == (None if number is None else {"a": 1, "away": number})
    assert (chosen(monkeypatch, [home, there], room) is None) == (room < 92)
    again = Fake("again", "a", {1: (0, 1, 0)}, trains=True, tp={1})
    assert chosen(monkeypatch, [home, again], 1e9) is None, "trainings of a model have one layout"


@pytest.mark.parametrize(("room", "fits"), [(95, True), (94, False)])
def test_what_one_call_leaves_all_others_have_beside_them(
    room: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a leaves 4 bytes and needs 10; b leaves 5 and needs 31 beside the 4; what b leaves away from home goes."""
    a = Fake("a", "a", {1: (30, 10, 4)}, trains=True)
    b = Fake("b", "b", {1: (30, 31, 5)})
    away = Fake("away", "a", {1: (0, 1, 99)}, tp={1})
    assert (chosen(monkeypatch, [a, b, away], room) is not None) == fits


def test_calls_of_a_group_are_tried_with_small_homes_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = Mapper(TASK)
    tried: list[Any] = []

    def choose(calls: Sequence[Any], devices: int, frugal: bool) -> Any:
        tried.append(([each.call.name for each in calls], devices, frugal))
        return {"chosen": 1} if frugal else None

    monkeypatch.setattr(mapper, "_choose", choose)
    monkeypatch.setattr(mapper, "_stages", lambda calls, found: (1.0, 2.0, 3.0))
    names = ["critic_inference", "critic_train_step", "ref_inference"]
    group: Any = Colocated(2, {"chosen": 1}, (1.0, 2.0, 3.0))  # type: ignore[dict-item]
    assert mapper.colocated(("critic", "ref"), 2) == group
    assert mapper.colocated(("critic", "ref"), 2) == group
    assert tried == [(names, 2, False), (names, 2, True)], "once"
    monkeypatch.setattr(mapper, "_ranked", lambda of, devices: [] if of.call.name == "ref_inference" else [1])
    assert mapper.colocated(("critic", "ref"), 4) is None
    assert len(tried) == 2


def test_options_are_ranked_by_their_seconds() -> None:
    mapper = Mapper(TASK)
    model = TASK.call_models["critic_train_step"]
    ranked = mapper._ranked(model, 2)
    seconds = [model.seconds(*option.shape) for option in ranked]
    assert seconds == sorted(seconds)
    assert {option.layout.mesh for option in ranked} == {DeviceMesh(0, 2)}
    assert mapper._ranked(model, 2) is ranked
    least = min(model.static_bytes(option.layout.strategy) for option in ranked)
    assert mapper._least_static(model, 2) == least


def test_the_room_of_a_device_is_beside_the_communicators_of_all() -> None:
    """The world's, that of moves and that of data."""
    hardware = structs.replace(TASK.costs.hardware, communicator_bytes=100.0)
    task = replace(TASK, costs=replace(TASK.costs, hardware=hardware))
    assert Mapper(task)._room() == task.cluster.device_memory_bytes - 300
    model = task.call_models["critic_train_step"]
    option = Option(Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2)), 1)
    own = model.communicator_bytes(option.layout)
    assert own > 0
    assert mapping._static(model, option) == model.static_bytes(ParallelStrategy(dp=2)) + own


def test_stages_are_generation_preparation_and_training() -> None:
    graph = DataflowGraph(
        [
            call("actor", TINY, GENERATE, "prompts", "seq"),
            call("ref", TINY, INFERENCE, "seq", "logp"),
            call("judge", TINY, INFERENCE, "seq", "score"),
            call("actor", TINY, TRAIN_STEP, "seq logp score"),
        ],
        ["prompts"],
    )
    task = task_of(graph, **settings(graph, cpu_cluster(2)))
    option = Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)
    s = {name: model.seconds(*option.shape) for name, model in task.call_models.items()}
    found = Mapper(task)._stages(list(task.call_models.values()), dict.fromkeys(s, option))
    assert found == (s["actor_generate"], s["ref_inference"] + s["judge_inference"], s["actor_train_step"])


@pytest.mark.parametrize(
    ("devices", "nodes", "sizes"), [(4, 1, [1, 2, 4]), (4, 3, [1, 2, 4, 8, 12]), (3, 2, [1, 2, 3, 6]), (1, 2, [1, 2])]
)
def test_sizes_of_meshes(devices: int, nodes: int, sizes: list[int]) -> None:
    assert Mapper(replace(TASK, cluster=cpu_cluster(devices, num_nodes=nodes))).sizes == sizes


def mapper_of(monkeypatch: pytest.MonkeyPatch, groups: Mapping[tuple[str, int], tuple[float, float, float]]) -> Mapper:
    """Of two models on four devices, whose groups take these seconds; others do not fit."""
    mapper = Mapper(TASK)
    option = Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)

    def colocate(group: tuple[str, ...], devices: int) -> Colocated | None:
        found = groups.get(("".join(group), devices))
        return Colocated(devices, {"".join(group): option}, found) if found else None

    monkeypatch.setattr(mapper, "_colocate", colocate)
    return mapper


SECONDS = {("x", 1): (1.0, 5.0, 0.0), ("x", 2): (1.0, 2.0, 0.0), ("y", 2): (3.0, 1.0, 4.0), ("xy", 4): (4.0, 3.0, 4.0)}


def test_mappings_come_by_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x and y apart, on two devices each: by stages the slowest one, 3 + 2 + 4. Together: 4 + 3 + 4."""
    mapper = mapper_of(monkeypatch, SECONDS)
    together, apart = (("x", "y"),), (("x",), ("y",))
    found = mapper.ranked([together, apart])
    assert [(each.placement, each.cost_s) for each in found] == [(apart, 9.0), (together, 11.0)]
    assert mapper.best([together, apart]).placement == apart
    assert mapper.best([together]).placement == together
    assert {name: each.devices for name, each in found[0].calls.items()} == {"x": (0, 2), "y": (2, 2)}
    assert (mapper.least_devices(("x",)), mapper.least_devices(("y",)), mapper.least_devices(("z",))) == (1, 2, None)
    with pytest.raises(UserError, match="none of 1 placements fits into the memory of 4 devices"):
        mapper.ranked([(("x",), ("z",))])
    holes = mapper_of(monkeypatch, {("x", 1): (1.0, 1.0, 1.0), ("y", 2): (1.0, 1.0, 1.0)})
    with pytest.raises(UserError, match="none of 1 placements fits"):
        holes.ranked([(("x",), ("y",))])


def test_the_cheapest_sizes_of_a_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {("x", n): (8.0 / n, 0.0, 0.0) for n in (1, 2)} | {("y", n): (0.0, 0.0, 2.0 * n) for n in (1, 2)}
    mapper = mapper_of(monkeypatch, groups | {("z", 1): (0.0, 1.0, 0.0), ("z", 2): (0.0, 1.0, 0.0)})
    [found] = mapper.ranked([(("x",), ("y",), ("z",))])
    assert found.cost_s == 4 + 1 + 2
    assert {name: each.devices[1] for name, each in found.calls.items()} == {"x": 2, "y": 1, "z": 1}


def test_there_are_not_too_many_ways_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """For x and y these are five: the placement, x on one device or on two, y beside it, and both once more."""
    apart = [(("x",), ("y",))]
    mapper = mapper_of(monkeypatch, SECONDS)
    mapper.best(apart)
    assert mapper._allocations == 5
    monkeypatch.setattr(mapping, "_MOST_ALLOCATIONS", 5)
    assert mapper_of(monkeypatch, SECONDS).best(apart).cost_s == 9.0
    monkeypatch.setattr(mapping, "_MOST_ALLOCATIONS", 4)
    with pytest.raises(UserError) as error:
        mapper_of(monkeypatch, SECONDS).best(apart)
    assert str(error.value) == (
        "there are more than 4 ways to give 4 devices to 4 models; this rule is for smaller clusters"
    )


def test_the_meshes_of_a_mapping() -> None:
    calls = {name: CallPlan(devices=(0, 2), dp=2) for name in TASK.graph.model_calls}
    calls["ref_inference"] = CallPlan(devices=(2, 2), dp=2)
    found = FoundMapping((("actor",), ("ref",)), calls, 1.0).meshes(TASK)
    assert found == {name: DeviceMesh(2 if name == "ref" else 0, 2) for name in TASK.graph.models}
    option = Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 3)
    large = Option(Layout(DeviceMesh(0, 2), ParallelStrategy(tp=2)), 5)
    stages = (0.0, 0.0, 0.0)
    groups = [
        Colocated(1, {"a": option}, stages),
        Colocated(2, {"b": large}, stages),
        Colocated(1, {"c": option}, stages),
    ]
    assert placed(groups) == {
        "b": CallPlan(devices=(0, 2), tp=2, micro_batches=5), "a": CallPlan(devices=(2, 1), micro_batches=3),
        "c": CallPlan(devices=(3, 1), micro_batches=3),
    }  # fmt: skip


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
    """Each source by itself, with the plan's own steps in flight and models in host memory."""
    plan = structs.replace(copying({"b": "a", "c": "a"}), max_steps_in_flight=7, offload=("ref",), order=ORDER)
    plan = structs.replace(plan, calls=plan.calls | {"d": CallPlan(devices=(0, 1), copy_from="b")})

    def there(task: PlanningTask, of: ExecutionPlan) -> Prediction:
        assert (task.max_steps_in_flight, task.offload, of.order) == (7, ("ref",), ())
        return predicted(5.0 if of.copies == {"d": "b"} else 6.0, fits=of.copies == {"d": "b"})

    monkeypatch.setattr(copies, "predict_in_best_order", there)
    assert copies.copies_worth(TASK, predicted(1.0, plan)) == [
        Worth(of="a", feature="its copy serves b, c", without_s=5.0),
        Worth(of="b", feature="its copy serves d", without_s=None),
    ]


def test_a_plan_with_copies_in_the_better_of_two_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    known = predicted(3.0, structs.replace(copying({}), order=ORDER, max_steps_in_flight=3))
    cases: list[tuple[Any, Any, float | None]] = [
        ((2.0, True), (1.0, True), 1.0), ((2.0, True), (3.0, True), 2.0), ((2.0, True), (1.0, False), 2.0),
        ((2.0, False), (1.0, False), None), ((2.0, True), None, 2.0),
    ]  # fmt: skip
    checked: list[Any] = []
    monkeypatch.setattr(copies, "check_plan", lambda plan, graph, batch_size: checked.append((plan.copies, batch_size)))
    for best, own, expected in cases:

        def in_best(task: Any, plan: Any, best: Any = best) -> Prediction:
            assert (task.max_steps_in_flight, plan.copies, plan.order) == (3, {"b": "a"}, ())
            return predicted(best[0], plan, fits=best[1])

        def in_own(task: Any, plan: Any, own: Any = own) -> Prediction:
            if own is None:
                raise UserError("the source of the next step comes before the last taker")
            assert (task.max_steps_in_flight, plan.copies, plan.order) == (3, {"b": "a"}, ORDER)
            return predicted(own[0], plan, fits=own[1])

        monkeypatch.setattr(copies, "predict_in_best_order", in_best)
        monkeypatch.setattr(copies, "predict", in_own)
        found = copies._predicted(TASK, known, {"b": "a"})
        assert (found and found.step_s) == expected
    assert checked == [({"b": "a"}, 16)] * len(cases)

    def refuse(*_: Any) -> None:
        raise UserError("cannot run")

    monkeypatch.setattr(copies, "check_plan", refuse)
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
    label = Dominance(task)._labels(task.graph.model_calls[name])
    row: Any = SimpleNamespace(strategy="row")
    return [label((ParallelStrategy(dp=2), 1, compute), row) for compute in computes]


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

    def room_bytes(self, strategy: ParallelStrategy) -> int:
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

    def mix(of: Any, of_model: Any, way: Any, room_bytes: int) -> CallCompute:
        assert (of, of_model) == (task, model)
        asked.append((way[1], room_bytes, way[2].data_parallel))
        return mixed

    monkeypatch.setattr(mixes, "_mix", mix)
    monkeypatch.setattr(mixes, "has_modes", lambda *words: True)
    sharded = CallCompute(data_parallel="fsdp")
    ways: list[Any] = [(ParallelStrategy(), count, compute) for count in zero1_s for compute in (AS_SET_UP, sharded)]
    result = list(mixes.mixed_ways(task, SimpleNamespace(name="train"), ways))  # type: ignore[arg-type]
    order = sorted(zero1_s, key=lambda count: zero1_s[count])
    expected = [count for count in order if count in found]
    assert [count for _, count, _ in result] == expected
    assert {compute for _, _, compute in result} <= {mixed}
    assert {data_parallel for _, _, data_parallel in asked} <= {None}
    monkeypatch.setattr(mixes, "has_modes", lambda *words: False)
    assert list(mixes.mixed_ways(task, SimpleNamespace(name="train"), ways)) == []  # type: ignore[arg-type]


def test_modes_in_each_room_that_states_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that have fewer rooms are in their smallest one again."""
    model: Any = Sharded({1: 1.0, 2: 1.05}, {0: (100, 30), 1: (10, 0), 2: (5, 0)})
    task: Any = SimpleNamespace(call_models={"train": model})
    asked: list[Any] = []

    def rooms(left_bytes: float, zero1_bytes: int, least_bytes: int, *, shares_devices: bool) -> list[int]:
        assert (zero1_bytes, least_bytes, shares_devices) == (100, 30, False)
        return {90: [90, 70], 95: [95]}[int(left_bytes)]

    def mix(of: Any, of_model: Any, way: Any, room_bytes: int) -> CallCompute:
        asked.append((way[1], room_bytes))
        return CallCompute(data_parallel=(("*", "sharded"),))

    monkeypatch.setattr(mixes, "rooms", rooms)
    monkeypatch.setattr(mixes, "_mix", mix)
    monkeypatch.setattr(mixes, "has_modes", lambda of, definition: (of, definition.name) == (task, "train"))
    ways: list[Any] = [(ParallelStrategy(), count, CallCompute(data_parallel="fsdp")) for count in (2, 1)]
    list(mixes.mixed_ways(task, SimpleNamespace(name="train"), ways))  # type: ignore[arg-type]
    assert asked == [(1, 90), (2, 95), (1, 70), (2, 95)]


# --- intervals


def test_numbers_in_four_digits() -> None:
    assert [rounded(value) for value in (1.23456, 123456.0, 0.000123456, 2.0)] == [1.235, 123500.0, 0.0001235, 2.0]
    draws = np.arange(2001.0)
    assert interval(draws, 0.0) == (0.0, 1900.0)
    assert interval(draws, 5000.0) == (100.0, 5000.0)


def test_a_tie_is_half_a_win() -> None:
    one, other = (PlanDraws(step_s=np.array(s), call_s={}) for s in ([1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]))
    assert probability_faster(one, other) == (1 + 0.5) / 4
    assert probability_faster(other, one) == (2 + 0.5) / 4


def test_the_draws_of_a_task() -> None:
    draws = drawn(TASK)
    assert (draws.count, draws.seed, draws.errors) == (128, 0, True)
    assert np.array_equal(draws.factors, drawn(TASK, 128, 0).factors)
    assert not np.array_equal(draws.factors, drawn(TASK, 128, 1).factors)
    assert drawn(TASK, 3, 5).seed == 5
    assert draws.names == intervals.doubt_of(TASK.costs).names


DOUBT = Doubt(("intra_node_bandwidth", "layers"), np.diag([0.25, 0.04]))


def test_each_constant_at_both_ends_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "doubt_of", lambda costs: DOUBT if costs is TASK.costs else None)
    found = at_ends(TASK)
    assert (found.names, found.errors, found.count) == (DOUBT.names, False, 4)
    first, second = math.exp(1.6448536 * 0.5), math.exp(1.6448536 * 0.2)
    assert found.factors == pytest.approx(np.array([[1 / first, 1], [first, 1], [1, 1 / second], [1, second]]))
    assert DOUBT.spread == pytest.approx([0.5, 0.2])


def test_errors_of_calls_are_drawn_by_their_names() -> None:
    """A factor of the run, of the call and of its option each; the same wherever they are asked for."""
    draws = Draws(TASK, (), np.ones((3, 0)), seed=5)
    sizes: Any = SimpleNamespace(run=0.1, call=0.2, option=0.3)

    def normal(key: str) -> np.ndarray:
        return standard_draws(1, 3, zlib.crc32(f"5 {key}".encode()))[:, 0]

    expected = np.exp(0.1 * normal("run") + 0.2 * normal("a") + 0.3 * normal("a: dp2"))
    assert draws._error("a", "dp2", sizes) == pytest.approx(expected)
    assert replace(draws, errors=False)._error("a", "dp2", sizes) == pytest.approx([1, 1, 1])


def test_without_doubt_a_draw_is_the_prediction_whatever_the_steps_in_flight() -> None:
    """Those of the plan count, and not the task's."""
    graph = with_staleness(ppo(), 1)
    task = task_of(graph, **settings(graph, cpu_cluster(2)))
    calls = {name: CallPlan(devices=(int(name == "actor_generate"), 1)) for name in graph.model_calls}
    found = []
    for in_flight in (1, 2, 3):
        prediction = predict(task, structs.replace(task.plan(calls), max_steps_in_flight=in_flight))
        draws = Draws(task, (), np.ones((2, 0)), errors=False).of(prediction)
        assert draws.step_s == pytest.approx([prediction.step_s] * 2)
        found.append(prediction.step_s)
    assert found[2] != pytest.approx(found[1])


ALL = ("inter_node_bandwidth", "intra_node_latency_s", "host_bandwidth", "reallocation", "memory_bandwidth")


@pytest.mark.parametrize(
    ("nodes", "offload", "names"),
    [
        (1, (), ["intra_node_latency_s", "reallocation"]),
        (2, (), ["intra_node_latency_s", "inter_node_bandwidth", "reallocation"]),
        (1, ("ref",), ["intra_node_latency_s", "host_bandwidth", "reallocation"]),
    ],
)
def test_what_the_times_of_transfers_can_depend_on(nodes: int, offload: tuple[str, ...], names: list[str]) -> None:
    task = replace(TASK, cluster=cpu_cluster(2, num_nodes=nodes))
    draws = Draws(task, ALL, np.ones((1, len(ALL))))
    plan = ExecutionPlan(num_devices=1, calls={}, offload=offload)
    assert draws._of_transfers(predicted(1.0, plan)) == names


# --- hinges


class Ends:
    """Of constants at their ends; `steps` by the seconds of a prediction."""

    def __init__(self, steps: Mapping[float, Sequence[float]], factors: Any = None, costs: Any = None) -> None:
        self.steps, self.factors = steps, factors
        self.task = SimpleNamespace(costs=costs)

    def of(self, prediction: Prediction) -> PlanDraws:
        return PlanDraws(step_s=np.array(self.steps[prediction.step_s]), call_s={})


NAMES = ("intra_node_bandwidth", "layers", "memory_bandwidth")


def hinge_of(monkeypatch: pytest.MonkeyPatch, margins: Sequence[float], *, profiled: bool = False) -> list[Hinge]:
    """For a plan of 1 s and a rival of 1.1 s, which is slower by these parts at the ends of each constant."""
    costs = SimpleNamespace(
        profiled=profiled, hardware="hardware", timings=["m", "n"], call_error=lambda model: {"m": 0.1, "n": 0.2}[model]
    )
    draws: Any = Ends({1.0: [1.0] * 4, 1.1: [0.9, 1.1, 1.2, 1.0]}, costs=costs)
    factors = np.array([[0.5, 1, 1], [2.0, 1, 1], [1, 0.8, 1], [1, 1.25, 1], [1, 1, 0.9], [1, 1, 1.1]])
    ends = Ends({1.0: [2.0] * 6, 1.1: [2.0 * (1 + margin) for margin in margins]}, factors)
    doubt = SimpleNamespace(names=NAMES)
    monkeypatch.setattr(hinge_module, "at_ends", lambda task: ends if task is draws.task else None)
    monkeypatch.setattr(hinge_module, "doubt_of", lambda of: doubt if of is costs else None)
    monkeypatch.setattr(hinge_module, "PARTS", ("layers",))
    monkeypatch.setattr(hinge_module, "constant", lambda hardware, name: {"intra_node_bandwidth": 1e9}.get(name, 3.0))
    monkeypatch.setattr(hinge_module, "measurement_of", lambda name: f"of {name}")
    return hinges(draws, predicted(1.0), {"rival": predicted(1.1)})


def test_constants_that_decide_come_by_how_much_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their own unit, or as times of what was measured."""
    found = hinge_of(monkeypatch, [-0.1, 0.1, 0.3, -0.3, 0.1, 0.9])
    common: dict[str, Any] = {"rival": "rival", "slower": 0.625}
    assert found == [
        Hinge(**common, constant="layers", low=0.8, high=1.25, measurement="of layers"),
        Hinge(**common, constant="intra_node_bandwidth", low=5e8, high=2e9, measurement="of intra_node_bandwidth"),
    ]
    assert hinge_of(monkeypatch, [0.0, 0.1, 0.3, 0.3, -0.9, 0.0], profiled=True) == []


def test_where_no_constant_decides_calls_without_profiles_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the least sure of the models may be off."""
    [hinge] = hinge_of(monkeypatch, [0.1] * 6)
    high = rounded(math.exp(1.6448536 * 0.2))
    assert hinge == Hinge(
        rival="rival", slower=0.625, constant="calls", low=rounded(1 / math.exp(1.6448536 * 0.2)), high=high,
        measurement="layers",
    )  # fmt: skip
    assert hinge_of(monkeypatch, [0.1] * 6, profiled=True) == []


def test_only_rivals_that_may_be_faster_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest; none that takes three times as long, is as fast in every draw, or is surely slower."""
    sure = [1.1] * 19 + [0.9]
    steps: dict[float, Sequence[float]] = {
        1.0: [1.0] * 20, 3.0: [0.5] * 20, 1.01: [1.0] * 20, 1.02: sure, 1.03: [1.1] * 13 + [0.9] * 7,
        1.04: [1.1] * 12 + [0.9] * 8, 2.9: [1.1] * 14 + [0.9] * 6,
    }  # fmt: skip
    costs = SimpleNamespace(profiled=True, hardware="hardware")
    draws: Any = Ends(steps, costs=costs)
    ends = Ends({s: [s - 0.02 * (s > 1), s] for s in steps}, np.array([[0.5], [2.0]]))
    monkeypatch.setattr(hinge_module, "at_ends", lambda task: ends)
    monkeypatch.setattr(hinge_module, "doubt_of", lambda of: SimpleNamespace(names=("layers",)))
    monkeypatch.setattr(hinge_module, "measurement_of", lambda name: name)
    assert hinges(draws, predicted(1.0), {str(s): predicted(s) for s in (3.0, 1.01, 1.02)}) == []
    ends.steps = {s: [s - 0.05 * (s > 1), s] for s in steps} | {2.9: [0.9, 2.9]}
    [found] = hinges(draws, predicted(1.0), {str(s): predicted(s) for s in steps if s > 1})
    assert (found.rival, found.slower) == ("1.04", 0.6)
    [other] = hinges(draws, predicted(1.0), {"near": predicted(2.9)})
    assert (other.rival, other.slower) == ("near", 0.7)


@pytest.mark.parametrize(
    ("constant", "measurement", "what", "words"),
    [
        ("calls", "layers", "how far calls are from their predictions (0.50 to 1500000.00 times)", "--only layers"),
        (
            PARTS[0],
            "layers",
            f"the measured {PARTS[0]} (0.50 to 1500000.00 times what the profile has)",
            "--only layers",
        ),
        ("host_bandwidth", "links", "host_bandwidth (0.5 to 1.5e+06)", "--only links"),
        (
            "inter_node_latency_s",
            "network",
            "inter_node_latency_s (0.5 to 1.5e+06)",
            "--launcher slurm --only network",
        ),
    ],
)
def test_hinges_in_words(constant: str, measurement: str, what: str, words: str) -> None:
    hinge = Hinge(rival="split", slower=0.625, constant=constant, low=0.5, high=1.5e6, measurement=measurement)
    assert str(hinge) == (
        f"split is slower with a probability of 62% only; which is faster hinges on {what}: `realhf profile EXPERIMENT "
        f"{words}` measures that in a few minutes"
    )
