"""HybridFlow's mapping of models onto devices, on stand-ins whose numbers are worked by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import mapping
from realhf.planning.mapping import Colocated, FoundMapping, Mapper, allocations, placed
from realhf.planning.options import Option
from tests.unit.planning.graphs import TINY, call, cpu_cluster, settings, task_of
from tests.unit.planning.test_choices import TASK

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
    monkeypatch.setattr(mapper, "_left_bytes", lambda: room)
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
    """The world's and that of moves."""
    hardware = structs.replace(TASK.costs.hardware, communicator_bytes=100.0)
    task = replace(TASK, costs=replace(TASK.costs, hardware=hardware))
    assert Mapper(task)._left_bytes() == task.cluster.device_memory_bytes - 200
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
    assert mapper.ranked([together, apart])[0].placement == apart
    assert mapper.ranked([together])[0].placement == together
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
    mapper.ranked(apart)
    assert mapper._allocations == 5
    monkeypatch.setattr(mapping, "_MOST_ALLOCATIONS", 5)
    assert mapper_of(monkeypatch, SECONDS).ranked(apart)[0].cost_s == 9.0
    monkeypatch.setattr(mapping, "_MOST_ALLOCATIONS", 4)
    with pytest.raises(UserError) as error:
        mapper_of(monkeypatch, SECONDS).ranked(apart)
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
