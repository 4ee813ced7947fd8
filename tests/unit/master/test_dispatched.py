"""All that the dispatcher sends for a plan, message by message, and all that it keeps of replies."""

import asyncio
import weakref
from collections.abc import Coroutine

import msgspec
import pytest

from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallCompute, CallPlan
from realhf.dataflow.splits import Split
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master import loop
from realhf.master.data import DataDirectory
from realhf.master.loop import CallRecord, PlannedGraph, means
from realhf.master.open_requests import Thread
from realhf.master.replies import Request
from realhf.master.state import Node
from realhf.transport.messages import (
    BatchKey,
    CallFunction,
    Completion,
    FollowParameters,
    FreeBatch,
    KeyMetadata,
    LoadModel,
    OffloadModel,
    PrepareMove,
    Reallocate,
    Receive,
    Release,
    Reply,
    SaveCheckpoint,
    Send,
    Span,
    ToWorker,
    Transfer,
)
from tests.unit.api.calls import call, rule
from tests.unit.master.workers import Workers

ZERO, ONE = (Layout(DeviceMesh(device, 1), ParallelStrategy()) for device in (0, 1))
ON_ZERO, ON_ONE = CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
ACTOR = DataflowGraph(
    [
        call("actor", GENERATE, ["prompt"], ["seq"]),
        call("actor", TRAIN_STEP, ["prompt", "seq"], mini_batches=2),  # a part of what it reads is in the data set
    ],
    ["prompt"],
)
APART = {
    "actor_generate": CallPlan(
        devices=(1, 1), micro_batches=2, compute=CallCompute(decode_graphs="call", kv_cache_tokens=64)
    ),
    "actor_train_step": ON_ZERO,
}


def planned_of(
    graph: DataflowGraph, calls: dict[str, CallPlan], split: Split = "train", offload: tuple[str, ...] = ()
) -> PlannedGraph:
    """Homes are on worker 0; four samples a step."""
    return PlannedGraph(split, graph, calls, dict.fromkeys(graph.models, ZERO), 4, offload=offload)


def run(workers: Workers, planned: PlannedGraph, order: list[tuple[str, int]]) -> bool:
    return asyncio.run(workers.dispatcher.run_steps(planned, order, 1, lambda *_: None))


def sent(workers: Workers) -> list[tuple[int, ToWorker]]:
    """To whom what was sent; the ids of requests are all different, and of no other meaning."""
    ids = [message.request_id for _, message in workers.got if hasattr(message, "request_id")]
    assert len(set(ids)) == len(ids)
    return [
        (to, msgspec.structs.replace(message, request_id=0) if hasattr(message, "request_id") else message)
        for to, message in workers.got
    ]


def test_a_step_of_two_layouts_message_by_message() -> None:
    """Worker 1 generates with a copy of the parameters of worker 0, which trains on what was generated."""
    workers = Workers(2, ACTOR)
    assert run(workers, planned_of(ACTOR, APART), [(name, step) for step in (0, 1) for name in ACTOR.calls])
    seq = KeyMetadata(dtype="int64", trailing=(), ids=(0, 1, 2, 3), lengths=(3, 3, 3, 3))

    def of_step(step: int) -> list[tuple[int, ToWorker]]:
        batch = BatchKey("train", step)
        move = Reallocate(request_id=0, batch=batch, call="actor_generate", model="actor", layout=ONE, version=step)
        return [
            (1, PrepareMove(request_id=0, batch=batch, name="actor_generate", model="actor", layout=ONE)),
            (
                1,
                CallFunction(
                    request_id=0, batch=batch, call="actor_generate", layout=ONE, mini_batches=((0, 1, 2, 3),),
                    micro_batches=2, version=step, decode_graphs="call", kv_cache_tokens=64,
                ),
            ),
            (1, Release(model="actor", layout=ONE)),
            (0, move),
            (1, move),
            (0, Transfer(batch=batch, receives=(Receive(peer=1, key="seq", metadata=seq),))),
            (1, Transfer(batch=batch, sends=(Send(peer=0, key="seq", ids=(0, 1, 2, 3)),))),
            (
                0,
                CallFunction(
                    request_id=0, batch=batch, call="actor_train_step", layout=ZERO, mini_batches=((0, 1), (2, 3)),
                    micro_batches=1, version=step, makes_version=step + 1,
                ),
            ),
            (0, FreeBatch(batch=batch)),
            (1, FreeBatch(batch=batch)),
        ]  # fmt: skip

    assert sent(workers) == [*of_step(0), *of_step(1)]


def test_a_model_that_waits_in_host_memory_message_by_message() -> None:
    """It comes with its optimizer states where it is trained, and goes after each call; both calls are at home."""
    workers = Workers(1, ACTOR)
    planned = planned_of(ACTOR, dict.fromkeys(ACTOR.calls, ON_ZERO), offload=("actor",))
    batch = BatchKey("train", 0)
    order = [("actor_generate", 0), ("actor_train_step", 0)]
    assert run(workers, planned, order)
    got = [message for _, message in sent(workers)]
    assert [type(message) for message in got] == [
        *(LoadModel, CallFunction, OffloadModel, LoadModel, CallFunction, OffloadModel, FreeBatch)
    ]
    assert [message for message in got if isinstance(message, LoadModel)] == [
        LoadModel(request_id=0, batch=batch, model="actor", states=states) for states in (False, True)
    ]
    assert got[2] == got[5] == OffloadModel(request_id=0, batch=batch, model="actor")


def test_a_model_that_follows_message_by_message() -> None:
    """The reference lies on worker 1, its source on worker 0: worker 1 prepares, and both take part."""
    graph = DataflowGraph(
        [call("reference", INFERENCE, ["x"], ["y"]), call("actor", TRAIN_STEP, ["x"])],
        ["x"],
        {"reference": Follow("actor", eta=0.5)},
    )
    name, batch = "reference_follows_actor", BatchKey("train", 0)
    calls = {"reference_inference": ON_ONE, "actor_train_step": ON_ZERO}
    planned = PlannedGraph("train", graph, calls, {"reference": ONE, "actor": ZERO}, 4)
    workers = Workers(2, graph)
    assert run(workers, planned, [("reference_inference", 0), ("actor_train_step", 0), (name, 0)])
    assert [each for each in sent(workers) if isinstance(each[1], PrepareMove | FollowParameters)] == [
        (1, PrepareMove(request_id=0, batch=batch, name=name, model="reference", layout=ONE)),
        (0, FollowParameters(request_id=0, batch=batch, name=name)),
        (1, FollowParameters(request_id=0, batch=batch, name=name)),
    ]


def test_a_copy_that_is_taken_over_does_not_move() -> None:
    """Each call lets its copy go behind itself; the second call has the copy of the first in the same layout."""
    graph = DataflowGraph(
        [call("judge", INFERENCE, ["x"], ["y"], name="one"), call("judge", INFERENCE, ["y"], name="two")], ["x"]
    )
    calls = {"one": ON_ONE, "two": msgspec.structs.replace(ON_ONE, copy_from="one")}
    workers = Workers(2, graph)
    assert run(workers, planned_of(graph, calls), [("one", 0), ("two", 0)])
    kinds = [type(message) for to, message in workers.got if to == 1]
    assert kinds == [PrepareMove, CallFunction, Release, Reallocate, CallFunction, Release, FreeBatch]


def test_an_evaluation_has_its_versions_and_none_of_the_numbers_that_training_keeps() -> None:
    workers = Workers(1, ACTOR)
    workers.state = lambda worker, call: {"count": 1.0}  # type: ignore[method-assign]
    workers.dispatcher.states = {"actor_generate": {"count": 5.0}}
    planned = PlannedGraph(
        "evaluation", ACTOR, dict.fromkeys(ACTOR.calls, ON_ZERO), {"actor": ZERO}, 4,
        versions=lambda model, step: 7 if (model, step) == ("actor", 2) else 0, trained_steps=9,
    )  # fmt: skip
    assert run(workers, planned, [("actor_generate", 2), ("actor_train_step", 2)])
    calls = [message for _, message in workers.got if isinstance(message, CallFunction)]
    assert [(made.batch, made.version, made.state) for made in calls] == [(BatchKey("evaluation", 2), 7, {})] * 2
    assert [made.trained_steps for made in calls] == [9, 9]
    assert workers.got[-1] == (0, FreeBatch(batch=BatchKey("evaluation", 2)))
    assert workers.dispatcher.states == {"actor_generate": {"count": 5.0}}


def test_calls_beside_the_devices_are_asked_of_the_thread_that_runs_them() -> None:
    graph = DataflowGraph([call("actor", GENERATE, ["prompt"], ["seq"]), rule("judge", ["seq"])], ["prompt"])
    workers = Workers(1, graph)
    threads: dict[str, str] = {}
    expect = workers.dispatcher._open.expect

    def noted(worker: int, request: Request, thread: Thread) -> int:
        threads[request.what] = thread
        return expect(worker, request, thread)

    workers.dispatcher._open.expect = noted  # type: ignore[method-assign, assignment]
    run(workers, planned_of(graph, dict.fromkeys(graph.calls, ON_ZERO)), [("actor_generate", 0), ("judge", 0)])
    assert threads == {"actor_generate of step 1": "calls", "judge of step 1": "beside"}


def test_a_call_beside_the_devices_has_no_copy_and_is_its_own_model() -> None:
    graph = DataflowGraph(
        [
            call("actor", GENERATE, ["prompt"], ["seq"]),
            rule("judge", ["seq"], ["reward"]),
            call("actor", TRAIN_STEP, ["seq", "reward"]),
            call("reference", INFERENCE, ["prompt"]),
        ],
        ["prompt"],
        {"reference": Follow("actor", eta=0.5)},
    )
    planned = planned_of(graph, {**dict.fromkeys(graph.calls, ON_ZERO), "judge": ON_ONE}, offload=("actor",))
    assert not planned.is_copy(graph.calls["judge"])
    assert not planned.is_copy(graph.calls["actor_generate"])
    assert planned_of(graph, dict.fromkeys(graph.calls, ON_ONE)).is_copy(graph.calls["actor_generate"])
    models = {node: planned.model_of(node) for node in (*graph.nodes, *planned.loads)}
    assert models == {
        "actor_generate": "actor",
        "actor_train_step": "actor",
        "reference_inference": "reference",
        "judge": "judge",
        "reference_follows_actor": "reference",
        "load actor for actor_generate": "actor",
        "load actor for actor_train_step": "actor",
        "load actor for reference_follows_actor": "actor",
    }


class Measured(Workers):
    """Replies with all numbers that there are; each call waited for a second."""

    def _result(self, worker: int, call: CallFunction) -> Reply:
        return msgspec.structs.replace(
            super()._result(worker, call),
            wait=Span("transfer", f"for {call.call}", 0.0, 1.0),
            peak_bytes=10 + worker,
            sent_bytes={"all_gather": 20 + worker},
            weights_version=30 + call.batch.step,
            completions=tuple(
                Completion(sample=sample, prompt="", response=call.call, reward=None) for sample in call.mini_batches[0]
            ),
        )


def test_a_record_has_all_that_the_replies_say() -> None:
    spans: list[tuple[int, Span]] = []
    graph = DataflowGraph([call("actor", GENERATE, ["prompt"], ["seq"])], ["prompt"])
    planned = planned_of(graph, {"actor_generate": CallPlan(devices=(0, 2), dp=2)})
    workers = Measured(2, graph, on_span=lambda worker, span: spans.append((worker, span)))
    ended: list[tuple[int, list[CallRecord]]] = []
    asyncio.run(
        workers.dispatcher.run_steps(
            planned, [("actor_generate", 0), ("actor_generate", 1)], 1, lambda *step: ended.append(step)
        )
    )
    assert [step for step, _ in ended] == [0, 1]
    for step, (record,) in ended:
        assert (record.node, record.model, record.tokens) == (Node(step, "actor_generate"), "actor", 12)
        replies = [record.replies[worker] for worker in (0, 1)]
        assert [reply.peak_bytes for reply in replies] == [10, 11]
        assert [reply.sent_bytes for reply in replies] == [{"all_gather": 20}, {"all_gather": 21}]
        assert [reply.weights_version for reply in replies] == [30 + step] * 2
        assert sorted(completion.sample for completion in record.completions) == [0, 1, 2, 3]
    of_moves = [(worker, span) for worker, span in spans if span.phase == "reallocation"]
    of_calls = [(worker, span.phase, span.name) for worker, span in spans if span.phase != "reallocation"]
    assert of_moves == [(worker, Span("reallocation", "", 0, 1)) for _ in (0, 1) for worker in (0, 1, 0, 1)]
    waited = [
        (worker, *what)
        for worker in (0, 1)
        for what in (("transfer", "for actor_generate"), ("compute", "actor_generate"))
    ]
    assert of_calls == waited * 2


def test_numbers_without_weight_have_no_mean() -> None:
    assert means({"loss": (3.0, 2.0), "nothing": (0.0, 0.0)}) == {"loss": 1.5}


@pytest.mark.parametrize(("after", "made", "is_whole"), [(0, 2, False), (1, 3, True), (9, 3, True)])
def test_a_run_that_ends_soon_ends_the_steps_that_have_begun(after: int, made: int, is_whole: bool) -> None:
    """Step t + 1 begins when step t ends, before anybody is told so."""
    workers = Workers(1, ACTOR)
    planned = planned_of(ACTOR, dict.fromkeys(ACTOR.calls, ON_ZERO))
    ended = []

    def on_step(step: int, _: list[CallRecord]) -> None:
        ended.append(step)
        if step == after:
            workers.dispatcher.end_soon()

    order = [(name, step) for step in range(3) for name in ACTOR.calls]
    assert asyncio.run(workers.dispatcher.run_steps(planned, order, 1, on_step)) == is_whole
    assert ended == list(range(made))


def test_a_step_s_records_are_in_one_order() -> None:
    """By name, in whatever order the calls were issued."""
    graph = DataflowGraph([call("z", INFERENCE, ["x"], ["y"]), call("a", INFERENCE, ["y"])], ["x"])
    workers = Workers(1, graph)
    ended: list[str] = []
    planned = planned_of(graph, dict.fromkeys(graph.calls, ON_ZERO))
    order = [("z_inference", 0), ("a_inference", 0)]
    asyncio.run(
        workers.dispatcher.run_steps(planned, order, 1, lambda _, made: ended.extend(each.node.call for each in made))
    )
    assert ended == ["a_inference", "z_inference"]


def test_what_is_known_of_the_data_of_a_step_goes_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    known: weakref.WeakSet[DataDirectory] = weakref.WeakSet()

    class Noted(DataDirectory):
        def __init__(self, devices_per_node: int | None = None):
            super().__init__(devices_per_node)
            assert devices_per_node == 8
            known.add(self)

    monkeypatch.setattr(loop, "DataDirectory", Noted)
    workers = Workers(1, ACTOR)
    planned = PlannedGraph("train", ACTOR, dict.fromkeys(ACTOR.calls, ON_ZERO), {"actor": ZERO}, 4, devices_per_node=8)
    most = []
    order = [(name, step) for step in range(4) for name in ACTOR.calls]
    asyncio.run(workers.dispatcher.run_steps(planned, order, 1, lambda *_: most.append(len(known))))
    assert len(most) == 4
    assert max(most) <= 1


def test_steps_and_checkpoints_end_when_what_ends_no_call_is_answered_too() -> None:
    """Here that a model has gone to host memory, and that a worker has copied its part."""

    class WithoutAnswer(Workers):
        held: list[int]

        async def send(self, worker: int, message: ToWorker) -> None:
            if isinstance(message, OffloadModel | SaveCheckpoint):
                self.held.append(message.request_id)
            else:
                await super().send(worker, message)

    async def ends_with_the_answer(workers: WithoutAnswer, what: Coroutine[None, None, object]) -> None:
        workers.held = []
        task = asyncio.ensure_future(what)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(workers.held) == 1
        assert not task.done()
        workers.dispatcher.reply(0, Reply(request_id=workers.held[0], span=Span("reallocation", "", 0, 1)))
        await task

    async def script() -> None:
        graph = DataflowGraph([call("actor", GENERATE, ["prompt"], ["seq"])], ["prompt"])
        planned = planned_of(graph, {"actor_generate": ON_ZERO}, offload=("actor",))
        workers = WithoutAnswer(1, graph)
        steps = workers.dispatcher.run_steps(planned, [("actor_generate", 0)], 1, lambda *_: None)
        await ends_with_the_answer(workers, steps)
        await ends_with_the_answer(workers, workers.dispatcher.save("part", {0: ("actor",)}, is_last=True))

    asyncio.run(script())


def test_a_checkpoint_message_by_message() -> None:
    workers = Workers(2)
    asyncio.run(workers.dispatcher.save("part", {0: ("actor",), 1: ("critic",)}, is_last=False))
    assert sent(workers) == [
        (0, SaveCheckpoint(request_id=0, directory="part", models=("actor",), is_last=False)),
        (1, SaveCheckpoint(request_id=0, directory="part", models=("critic",), is_last=False)),
    ]
