"""The queue against workers that are queues: any graph, any layouts, any timing."""

import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realhf.base.errors import UserError
from realhf.dataflow.copies import with_copies
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.offload import loads_of, with_loads
from realhf.dataflow.plan import CallPlan, ExecutionPlan, OrderEntry
from realhf.dataflow.plan_checks import check_plan
from realhf.geometry.layout import Layout
from realhf.master.loop import PlannedGraph
from realhf.master.state import Action, CallQueue, FinishStep, Issue, Node, movers_of, occupied
from tests.unit.api.calls import call, ppo_graph, rule


@dataclass(frozen=True)
class Item:
    """What stands in the queues of its devices and runs when it is first in all of them. A move of parameters then gets
    in line in the lanes of `movers`, and runs when it is first in these, too.

    A call is reallocated (if it is not laid out as its parameters are) and computed; then each of
    its devices sends the outputs on.
    """

    kind: str
    node: Node
    devices: frozenset[int]
    movers: frozenset[int] = frozenset()


@dataclass
class Simulation:
    """Workers that execute first in, first out, under a queue; `seconds` tells how long an item takes."""

    queue: CallQueue
    graph: DataflowGraph
    plan: ExecutionPlan
    seconds: Callable[[Item], float]
    queues: dict[int, deque[Item]] = field(default_factory=dict)
    lanes: dict[int, deque[Item]] = field(default_factory=dict)
    executed: list[tuple[float, float, Item]] = field(default_factory=list)
    finished_steps: list[int] = field(default_factory=list)
    issued: list[Node] = field(default_factory=list)
    sent: set[Item] = field(default_factory=set)
    max_in_flight: int = 0

    def run(self) -> "Simulation":
        running: set[Item] = set()
        ends: list[tuple[float, int, float, Item]] = []
        order = itertools.count()
        now_s = 0.0
        self._perform(self.queue.start())
        while True:
            for item in self._startable() - running:
                running.add(item)
                heapq.heappush(ends, (now_s + self.seconds(item), next(order), now_s, item))
            if not ends:
                return self
            now_s, _, start_s, item = heapq.heappop(ends)
            running.remove(item)
            for device in item.devices:
                assert self.queues[device].popleft() == item
            for device in item.movers:
                assert self.lanes[device].popleft() == item
            self.executed.append((start_s, now_s, item))
            if item.kind == "send":
                self.sent.add(item)
            if item.kind == "compute":
                for send in self._sends(item.node):
                    self._enqueue(send)
                self._perform(self.queue.ended(item.node))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Issue(node):
                    self.issued.append(node)
                    for kind, devices, movers in steps_of(self.graph, self.plan, node.call):
                        self._enqueue(Item(kind, node, devices, movers))
                case FinishStep(step):
                    self.finished_steps.append(step)
        self.max_in_flight = max(self.max_in_flight, len({n.step for n in self.issued} - set(self.finished_steps)))

    def _enqueue(self, item: Item) -> None:
        for device in item.devices:
            self.queues.setdefault(device, deque()).append(item)

    def _sends(self, node: Node) -> list[Item]:
        if node.call not in self.graph.calls:
            return []
        return [Item("send", node, frozenset({device})) for device in self.plan.layout(node.call).mesh.devices]

    def _startable(self) -> set[Item]:
        heads = {queue[0] for queue in self.queues.values() if queue}
        first = {item for item in heads if all(self.queues[d][0] == item for d in item.devices)}
        moving = {item for lane in self.lanes.values() for item in lane}
        for item in sorted(first - moving, key=lambda item: (item.node, item.kind)):
            for device in item.movers:
                self.lanes.setdefault(device, deque()).append(item)
        return {
            item
            for item in first
            if all(self.lanes[d][0] == item for d in item.movers) and (item.kind != "compute" or self._has_data(item))
        }

    def _has_data(self, item: Item) -> bool:
        if item.node.call not in self.graph.calls:
            return True
        keys = [key for key in self.graph.calls[item.node.call].input_data if key in self.graph.producers]
        parents = {Node(item.node.step, self.graph.producers[key]) for key in keys}
        return all(send in self.sent for parent in parents for send in self._sends(parent))

    def span(self, name: str, step: int) -> tuple[float, float]:
        """When a call was computed."""
        return next(
            (start_s, end_s)
            for start_s, end_s, item in self.executed
            if item.kind == "compute" and item.node == Node(step, name)
        )


def steps_of(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> list[tuple[str, frozenset[int], frozenset[int]]]:
    """What has to be done for a node: what it is, in whose queues and in whose lanes."""

    def home(model: str) -> frozenset[int]:
        return frozenset(plan.layout(plan.home(graph, model)).mesh.devices)

    if load := loads_of(graph, plan.offload).get(name):
        return [("compute", home(load.model), frozenset())]
    if follow := graph.follows.get(name):
        queues = home(follow.target) | (home(follow.source) if follow.source in plan.offload else set())
        return [("compute", queues, home(follow.source) | home(follow.target))]
    model, mesh = graph.calls[name].model_name, frozenset(plan.layout(name).mesh.devices)
    compute = ("compute", mesh, frozenset[int]())
    if plan.layout(name) == plan.layout(plan.home(graph, model)):
        return [compute]
    return [("reallocate", mesh | (home(model) if model in plan.offload else set()), mesh | home(model)), compute]


def queue_of(graph: DataflowGraph, plan: ExecutionPlan, order: list[tuple[str, int]]) -> CallQueue:
    homes: dict[str, Layout] = {model: plan.layout(plan.home(graph, model)) for model in graph.models}
    planned = PlannedGraph("train", graph, plan.calls, homes, 1, offload=plan.offload)
    return CallQueue(graph, with_loads(order, planned.loads), planned.devices, plan.max_steps_in_flight)


def random_graph(random: Random, num_models: int = 4) -> DataflowGraph:
    """A few calls of a few models; each reads outputs of earlier ones, the last of a model may train it."""
    num_calls = random.randint(1, 7)
    models = [f"m{random.randrange(num_models)}" for _ in range(num_calls)]
    trained = {model for model in sorted(set(models)) if random.random() < 0.7}
    calls = []
    for i, model in enumerate(models):
        trains = model in trained and (model not in models[i + 1 :] or (random.random() < 0.2 and i > 0))
        inputs = [f"k{j}" for j in range(i) if random.random() < 0.35]
        calls.append(call(model, TRAIN_STEP if trains else INFERENCE, [*inputs, "x"], [f"k{i}"], name=f"c{i}"))
    seen_training: set[str] = set()
    for i, one in enumerate(calls):  # no reader behind the training of its model: it would have to come before
        if one.model_name in seen_training and not one.trains:
            calls[i] = call(one.model_name, TRAIN_STEP, one.input_data, one.output_data, name=one.name)
        elif one.trains:
            seen_training.add(one.model_name)
    random.shuffle(calls)
    trainings = [c.name for c in calls if c.trains]
    calls.sort(key=lambda c: (c.name in trainings, c.name if c.name in trainings else ""))
    trained = {c.model_name for c in calls if c.trains}
    followers = [model for model in sorted(set(models) - trained) if trained and random.random() < 0.7]
    source = {model: random.choice(sorted(trained)) for model in followers}
    stale = {model for model in followers if random.random() < 0.5}
    for staleness in (1 + len(calls) % 3, 0):  # some cannot be stale: their calls need the result of the training
        follows = {m: Follow(source[m], eta=1.0, staleness=staleness * (m in stale)) for m in followers}
        with contextlib.suppress(UserError):
            return DataflowGraph(calls, ["x"], follows)
    raise AssertionError("without staleness no node comes before the training of its step")


def random_order(graph: DataflowGraph, max_steps_in_flight: int, random: Random) -> tuple[OrderEntry, ...]:
    """An order that `check_plan` allows, with calls of earlier steps among those of the current one where it can."""
    back: dict[str, int] = {}
    for name in graph.order:
        lowest = max((back[e.parent] for e in graph.parents(name) if e.steps_back == 0), default=0)
        back[name] = min(lowest + (random.random() < 0.4), max_steps_in_flight - 1)
    return _order(graph, back, random) or _order(graph, dict.fromkeys(graph.nodes, 0), random) or ()


def _order(graph: DataflowGraph, back: dict[str, int], random: Random) -> tuple[OrderEntry, ...] | None:
    before: dict[str, set[str]] = {name: set() for name in graph.nodes}
    for edge in graph.edges:
        if back[edge.parent] - edge.steps_back > back[edge.child]:
            return None
        if back[edge.parent] - edge.steps_back == back[edge.child]:
            before[edge.child].add(edge.parent)
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError:
        return None
    names: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready += sorted(sorter.get_ready())
        names.append(ready.pop(random.randrange(len(ready))))
        sorter.done(names[-1])
    return tuple(OrderEntry(call=name, steps_back=back[name]) for name in names)


def random_plan(graph: DataflowGraph, random: Random) -> ExecutionPlan:
    num_devices = random.choice([1, 2, 4, 6])
    calls = {}
    for name in graph.calls:
        first = random.randrange(num_devices)
        size = random.choice([s for s in (1, 2, 4) if first + s <= num_devices])
        calls[name] = CallPlan(devices=(first, size), dp=size)
    homes = ExecutionPlan(num_devices=num_devices, calls=calls)
    for name, definition in graph.calls.items():
        if definition.trains:  # all training of one model is in one place
            calls[name] = calls[homes.home(graph, definition.model_name)]
    window = random.randint(1, 3)
    follows = {model for follow in graph.follows.values() for model in (follow.source, follow.target)}
    offload = tuple(model for model in graph.models if model not in follows and random.random() < 0.4)
    order = random_order(graph, window, random) if random.random() < 0.9 else ()
    plan = ExecutionPlan(num_devices=num_devices, calls=calls, order=order, offload=offload, max_steps_in_flight=window)
    check_plan(plan, graph, 4)
    return plan


def random_copies(random: Random) -> tuple[DataflowGraph, ExecutionPlan]:
    """A random plan in which some calls take their copies from others', and the graph that waits for these."""
    while not (found := _with_copies(random_graph(random, num_models=2), random))[1].copies:
        pass
    return found


def _with_copies(graph: DataflowGraph, random: Random) -> tuple[DataflowGraph, ExecutionPlan]:
    plan = random_plan(graph, random)
    for name, definition in random.sample(list(graph.calls.items()), len(graph.calls)):
        of_model = [call.name for call in graph.calls_of(definition.model_name)]
        source, calls = random.choice(of_model), dict(plan.calls)
        layout = calls[source] if random.random() < 0.5 else calls[name]
        calls[name] = replace(layout, copy_from=source)
        for other in of_model:
            if other != source and calls[other].layout == calls[source].layout:
                calls[other] = replace(calls[other], copy_from=source)
        changed = replace(plan, calls=calls, offload=tuple(m for m in plan.offload if m != definition.model_name))
        for order in ((), plan.order):
            with contextlib.suppress(UserError):
                check_plan(replace(changed, order=order), graph, 4)
                plan = replace(changed, order=order)
    return with_copies(graph, plan.copies), plan


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**62))
def test_any_plan_on_any_graph_under_any_timing(seed: int) -> None:
    random = Random(seed)
    graph = random_graph(random)
    plan = random_plan(graph, random)
    first, steps = random.choice([0, 0, 5]), random.randint(1, 5)
    order = [(name, first + step) for name, step in plan.unrolled(graph, steps)]
    nodes = [Node(step, name) for name, step in with_loads(order, loads_of(graph, plan.offload))]
    for _ in range(2):
        queue = queue_of(graph, plan, order)
        simulation = Simulation(queue, graph, plan, lambda _: random.expovariate(1.0)).run()
        assert queue.finished, "deadlock"
        check_execution(simulation, nodes)


def check_execution(simulation: Simulation, nodes: list[Node]) -> None:
    graph, plan = simulation.graph, simulation.plan
    spans = {item.node: (start, end) for start, end, item in simulation.executed if item.kind == "compute"}
    assert sorted(spans) == sorted(nodes) == sorted(simulation.issued), "every call once"
    for node, (start_s, _) in spans.items():
        for edge in graph.parents(node.call):
            parent = Node(node.step - edge.steps_back, edge.parent)
            assert parent not in spans or spans[parent][1] <= start_s, f"{node} before {parent} has ended"
    for device in range(plan.num_devices):
        seen = [
            (item.node, item.kind)
            for _, _, item in simulation.executed
            if device in item.devices and item.kind != "send"
        ]
        expected = [
            (node, kind) for node in nodes for kind, devices, _ in steps_of(graph, plan, node.call) if device in devices
        ]
        assert seen == expected, f"device {device} leaves the plan's order"
    for load in loads_of(graph, plan.offload).values():
        for node in (node for node in nodes if node.call == load.node):
            assert spans[Node(node.step, load.name)][1] <= spans[node][0], "loaded before it is needed"
    assert simulation.max_in_flight <= plan.max_steps_in_flight
    assert simulation.finished_steps == sorted({node.step for node in nodes})
    assert not any(simulation.queues.values())


def test_the_random_cases_are_not_all_trivial() -> None:
    """They have overlapping steps, trained models, those that follow them, reallocations, and copies from copies."""
    overlapping = trained = following = stale = offloading = reallocating = taking_over = 0
    for seed in range(200):
        random = Random(seed)
        graph = random_graph(random)
        plan = random_plan(graph, random)
        overlapping += any(entry.steps_back for entry in plan.order)
        trained += any(c.trains for c in graph.calls.values())
        following += bool(graph.follows)
        stale += any(follow.staleness for follow in graph.follows.values())
        offloading += bool(plan.offload)
        reallocating += any(
            plan.layout(name) != plan.layout(plan.home(graph, c.model_name)) for name, c in graph.calls.items()
        )
        _, plan = random_copies(random)
        taking_over += any(plan.layout(name) == plan.layout(source) for name, source in plan.copies.items())
    assert min(overlapping, trained, following, offloading, reallocating, taking_over, 200 - taking_over) > 40
    assert stale > 20


def test_a_node_occupies_its_own_devices_and_its_parameters_come_from_others() -> None:
    graph = DataflowGraph(
        [
            call("teacher", INFERENCE, ["x"], ["y"]),
            call("pupil", INFERENCE, ["x", "y"], ["z"]),
            call("pupil", TRAIN_STEP, ["z"]),
        ],
        ["x"],
    )
    places = {"teacher_inference": 0, "pupil_inference": 1, "pupil_train_step": 2}
    layouts = {name: CallPlan(devices=(device, 1)).layout for name, device in places.items()}
    homes = {"teacher": layouts["teacher_inference"], "pupil": layouts["pupil_train_step"]}
    found = {name: occupied(graph, name, layouts, homes) for name in places}
    assert found == {"teacher_inference": {0}, "pupil_inference": {1}, "pupil_train_step": {2}}
    assert occupied(graph, "pupil_inference", layouts, homes, ["pupil"]) == {1, 2}, "loaded there, for it"
    moving = {name: movers_of(graph, name, layouts, homes) for name in places}
    assert moving == {"teacher_inference": set(), "pupil_inference": {1, 2}, "pupil_train_step": set()}


def test_a_model_follows_only_when_it_is_due() -> None:
    """Reader and training are on devices of their own; a node that is left out of a step keeps nobody waiting."""
    calls = [call("average", INFERENCE, ["x"], ["y"]), call("student", TRAIN_STEP, ["x"])]
    graph = DataflowGraph(calls, ["x"], {"average": Follow("student", eta=0.5, every_steps=2)})
    places = {"average_inference": CallPlan(devices=(0, 1)), "student_train_step": CallPlan(devices=(1, 1))}
    plan = ExecutionPlan(num_devices=2, calls=places, max_steps_in_flight=3)
    follow = graph.follows["average_follows_student"]
    order = [(name, step) for name, step in plan.unrolled(graph, 3) if name != follow.name or follow.is_due(step)]
    queue = queue_of(graph, plan, order)
    ask, train = ([Node(step, name) for step in range(3)] for name in places)
    assert queue.start() == [Issue(ask[0]), Issue(train[0])]
    assert queue.ended(ask[0]) == [Issue(ask[1])]
    assert queue.ended(train[0]) == [FinishStep(0), Issue(train[1])]
    assert queue.ended(ask[1]) == []
    assert queue.ended(train[1]) == [Issue(Node(1, follow.name))]
    assert queue.ended(Node(1, follow.name)) == [FinishStep(1), Issue(ask[2]), Issue(train[2])]


ACTOR, CRITIC = CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
DISJOINT = {
    "actor_generate": ACTOR,
    "actor_train_step": ACTOR,
    "reward_inference": CRITIC,
    "critic_inference": CRITIC,
    "critic_train_step": CRITIC,
}
SECONDS = {
    "actor_generate": 4.0,
    "actor_train_step": 2.0,
    "reward_inference": 1.0,
    "critic_inference": 1.0,
    "critic_train_step": 3.0,
}
STEP = ("actor_generate", "reward_inference", "critic_inference", "actor_train_step", "critic_train_step")


def ppo_on_two_devices(max_steps_in_flight: int, steps: int = 4) -> Simulation:
    graph = ppo_graph()
    order = tuple(OrderEntry(call=name) for name in STEP)
    plan = ExecutionPlan(num_devices=2, calls=DISJOINT, order=order, max_steps_in_flight=max_steps_in_flight)
    check_plan(plan, graph, 1)
    queue = queue_of(graph, plan, plan.unrolled(graph, steps))
    return Simulation(queue, graph, plan, lambda item: SECONDS[item.node.call] if item.kind == "compute" else 0.0).run()


def test_the_critic_trains_while_the_actor_generates_for_the_next_step() -> None:
    """A step: 4 s generation, 2 s on the critic's device, then 2 s actor against 3 s critic training."""
    simulation = ppo_on_two_devices(max_steps_in_flight=2)
    for step in range(4):
        assert simulation.span("actor_generate", step) == (8.0 * step, 8.0 * step + 4)
        assert simulation.span("actor_train_step", step) == (8.0 * step + 6, 8.0 * step + 8)
        assert simulation.span("critic_train_step", step) == (8.0 * step + 6, 8.0 * step + 9)
    assert simulation.max_in_flight == 2


def test_one_step_in_flight_waits_for_the_critic() -> None:
    simulation = ppo_on_two_devices(max_steps_in_flight=1)
    assert [simulation.span("actor_generate", step)[0] for step in range(4)] == [0.0, 9.0, 18.0, 27.0]
    assert simulation.max_in_flight == 1


def test_actions_of_one_small_graph() -> None:
    """Two calls on one device, one edge between them, two steps; worked out by hand."""
    graph = DataflowGraph([call("a", INFERENCE, ["x"], ["y"]), call("b", INFERENCE, ["y"])], ["x"])
    plan = ExecutionPlan(num_devices=1, calls=dict.fromkeys(graph.calls, CallPlan(devices=(0, 1))))
    queue = queue_of(graph, plan, plan.unrolled(graph, 2))
    a0, b0, a1, b1 = Node(0, "a_inference"), Node(0, "b_inference"), Node(1, "a_inference"), Node(1, "b_inference")
    assert queue.start() == [Issue(a0)]
    assert queue.ended(a0) == [Issue(b0), Issue(a1)], "a of step 1 may queue up behind b of step 0"
    assert queue.ended(b0) == [FinishStep(0)]
    assert queue.ended(a1) == [Issue(b1)]
    assert not queue.finished
    assert queue.ended(b1) == [FinishStep(1)]
    assert queue.finished


def test_a_call_beside_the_devices_holds_up_no_other_and_is_held_up_by_none() -> None:
    """The device's next call waits for the rule, and the rule comes behind calls that wait in the order."""
    graph = DataflowGraph(
        [
            call("a", GENERATE, ["x"], ["seq"]),
            rule("judge", ["seq"], ["reward"]),
            call("b", INFERENCE, ["seq"], ["value"]),
            call("a", TRAIN_STEP, ["reward", "value"]),
        ],
        ["x"],
    )
    calls = dict.fromkeys(graph.model_calls, CallPlan(devices=(0, 1)))
    order = tuple(OrderEntry(call=name) for name in ("a_generate", "b_inference", "judge", "a_train_step"))
    plan = ExecutionPlan(num_devices=1, calls=calls, order=order)
    check_plan(plan, graph, 1)
    queue = queue_of(graph, plan, plan.unrolled(graph, 2))

    def node(name: str, step: int = 0) -> Node:
        return Node(step, name)

    assert queue.start() == [Issue(node("a_generate"))]
    assert queue.ended(node("a_generate")) == [Issue(node("judge")), Issue(node("b_inference"))]
    assert queue.ended(node("b_inference")) == [], "training waits for the rewards"
    assert queue.ended(node("judge")) == [Issue(node("a_train_step"))]
    assert queue.ended(node("a_train_step")) == [FinishStep(0), Issue(node("a_generate", 1))]
    assert queue.ended(node("a_generate", 1)) == [Issue(node("judge", 1)), Issue(node("b_inference", 1))]
    assert queue.ended(node("judge", 1)) == []
    assert queue.ended(node("b_inference", 1)) == [Issue(node("a_train_step", 1))]
    assert queue.ended(node("a_train_step", 1)) == [FinishStep(1)]
    assert queue.finished


def test_a_call_waits_for_that_of_the_step_before_since_it_may_keep_numbers() -> None:
    graph = DataflowGraph([call("a", INFERENCE, ["x"], ["y"])], ["x"])
    plan = ExecutionPlan(num_devices=1, calls={"a_inference": CallPlan(devices=(0, 1))})
    queue = queue_of(graph, plan, plan.unrolled(graph, 2))
    assert queue.start() == [Issue(Node(0, "a_inference"))], "not that of step 1, though nothing else holds it up"
    assert queue.ended(Node(0, "a_inference")) == [FinishStep(0), Issue(Node(1, "a_inference"))]


def test_nothing_to_do() -> None:
    queue = queue_of(ppo_graph(), ExecutionPlan(num_devices=2, calls=DISJOINT), [])
    assert queue.start() == []
    assert queue.finished


def test_after_a_cut_only_the_steps_that_have_begun_are_ended() -> None:
    graph = DataflowGraph([call("a", INFERENCE, ["x"], ["y"]), call("b", INFERENCE, ["y"], ["z"])], ["x"])
    plan = ExecutionPlan(
        num_devices=2, calls={"a_inference": CallPlan(devices=(0, 1)), "b_inference": CallPlan(devices=(1, 1))}
    )
    queue = queue_of(graph, plan, plan.unrolled(graph, 4))
    assert queue.start() == [Issue(Node(0, "a_inference"))]
    issued = queue.ended(Node(0, "a_inference"))
    assert sorted(action.node for action in issued) == [Node(0, "b_inference"), Node(1, "a_inference")]
    assert queue.cut(), "steps 2 and 3"
    assert not queue.cut(), "there are no more"
    assert queue.ended(Node(1, "a_inference")) == []
    assert queue.ended(Node(0, "b_inference")) == [FinishStep(0), Issue(Node(1, "b_inference"))]
    assert queue.ended(Node(1, "b_inference")) == [FinishStep(1)]
    assert queue.finished


# Two rules that read the data set alone, and a call with a model.
RULED = DataflowGraph([rule("z", ["x"]), rule("a", ["x"]), call("m", INFERENCE, ["x"])], ["x"])
ON = {"z": frozenset[int](), "a": frozenset[int](), "m_inference": frozenset({0})}


def queue_of_rules(steps: int, window: int) -> CallQueue:
    rules = [(name, step) for step in reversed(range(steps)) for name in ("z", "a")]
    return CallQueue(RULED, [*rules, *(("m_inference", step) for step in range(steps))], ON, window)


def issues(step: int, *names: str) -> list[Action]:
    return [Issue(Node(step, name)) for name in names]


def test_calls_beside_the_devices_come_first_step_by_step_and_as_listed() -> None:
    """In as many steps as may be in flight, whatever the order of steps in the plan's order."""
    assert queue_of_rules(3, window=1).start() == issues(0, "z", "a", "m_inference")
    queue = queue_of_rules(3, window=2)  # a call waits for that of the step before
    assert queue.start() == issues(0, "z", "a", "m_inference")
    assert queue.ended(Node(0, "z")) == issues(1, "z")
    assert queue.ended(Node(0, "a")) == issues(1, "a")
    assert queue.ended(Node(1, "z")) == []


def test_steps_that_have_not_begun_are_cut_with_all_their_calls() -> None:
    queue = queue_of_rules(3, window=1)
    assert queue.start() == issues(0, "z", "a", "m_inference")
    assert queue.cut()
    assert not queue.cut(), "nothing is left to cut"
    assert not queue.finished
    assert [queue.ended(Node(0, name)) for name in ("z", "a")] == [[], []]
    assert queue.ended(Node(0, "m_inference")) == [FinishStep(0)]
    assert queue.finished
    queue = queue_of_rules(2, window=1)  # none has begun
    assert queue.cut()
    assert queue.finished
    assert queue.start() == []


def test_a_step_that_has_begun_is_not_cut() -> None:
    queue = queue_of_rules(2, window=2)
    queue.start()
    queue.ended(Node(0, "z"))  # for which that of step 1 has waited
    assert not queue.cut()
    assert queue.ended(Node(0, "a")) == issues(1, "a")
