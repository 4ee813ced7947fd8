"""The dispatcher with made-up workers: what is sent to whom, what comes together of their replies, who is late."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from realhf.base.errors import RunError
from realhf.data import sort_task
from realhf.data.datasets import SFTDataset
from realhf.data.rows import DatasetRows
from realhf.dataflow.graph import INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.layout import Layout
from realhf.master.loop import CallRecord, PlannedGraph, means
from realhf.master.open_requests import Thread
from realhf.master.replies import Request
from realhf.master.state import Node
from realhf.rundir.run import Deadlines
from realhf.transport.messages import (
    CallFunction,
    FreeBatch,
    LoadModel,
    OffloadModel,
    PrepareMove,
    Reallocate,
    Release,
    Reply,
    Span,
    Transfer,
)
from tests.unit.api.calls import call
from tests.unit.master.workers import GRAPH, Workers


def run(workers: Workers, plan: ExecutionPlan, steps: int, batch_size: int) -> list[tuple[int, list[CallRecord]]]:
    homes: dict[str, Layout] = {model: plan.layout(plan.home(GRAPH, model)) for model in GRAPH.models}
    planned = PlannedGraph("train", GRAPH, plan.calls, homes, batch_size, offload=plan.offload)
    ended: list[tuple[int, list[CallRecord]]] = []
    asyncio.run(
        workers.dispatcher.run_steps(
            planned,
            plan.unrolled(GRAPH, steps),
            plan.max_steps_in_flight,
            lambda step, calls: ended.append((step, calls)),
        )
    )
    return ended


def test_replies_of_all_ranks_become_one_record() -> None:
    plan = ExecutionPlan(num_devices=4, calls=dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 4), dp=2, tp=2)))
    workers = Workers(4)
    ended = run(workers, plan, steps=2, batch_size=8)
    assert [step for step, _ in ended] == [0, 1]
    for step, records in ended:
        assert sorted(record.node.call for record in records) == sorted(GRAPH.calls)
        for record in records:
            assert record.node.step == step
            assert (record.start, record.end, sorted(record.replies)) == (0.0, 4.0, [0, 1, 2, 3])
            assert record.tokens == 24, "each sample once, not once a tensor-parallel rank"
            assert means(record.stats) == {"ids": 3.5}
    assert len(workers.sent(CallFunction)) == 2 * 5 * 4
    assert not workers.sent(Reallocate), "all calls are laid out alike"
    assert len(workers.sent(FreeBatch)) == 2 * 4


def test_numbers_that_a_call_keeps_come_back_to_all_its_ranks_in_the_next_step() -> None:
    plan = ExecutionPlan(num_devices=4, calls=dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 4), dp=2, tp=2)))
    workers = Workers(4)
    workers.state = lambda worker, call: (  # type: ignore[method-assign]
        {"count": call.state.get("count", 0.5) + 1} if call.call == "critic_train_step" else {}
    )
    run(workers, plan, steps=3, batch_size=8)
    got = [(call.batch.step, call.call, call.state) for call in workers.sent(CallFunction) if call.state]
    assert got == [(step, "critic_train_step", {"count": step + 0.5}) for step in (1, 2) for _ in range(4)]
    assert workers.dispatcher.states["critic_train_step"] == {"count": 3.5}


def test_ranks_that_leave_other_numbers_end_the_run() -> None:
    plan = ExecutionPlan(num_devices=2, calls=dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 2), dp=2)))
    workers = Workers(2)
    workers.state = lambda worker, call: {"a": 1.0, "b": float(worker)}  # type: ignore[method-assign]
    message = r"of step 1: worker 0 leaves context\.state\['b'\]=0.0 for the next step and worker 1 1.0; all ranks"
    with pytest.raises(RunError, match=message):
        run(workers, plan, steps=1, batch_size=8)


def test_rows_of_the_data_set_are_divided_by_their_tokens(tmp_path: Path) -> None:
    """Two ranks, two mini-batches; the letters of each prompt are its tokens, with the begin token."""
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "rows.jsonl"
    words = ["abcdefg", "abcdef", "ab", "a", "abc", "abc", "abc", "abc"]
    path.write_text("".join(json.dumps({"prompt": word, "answer": "a"}) + "\n" for word in words))
    tokenizer = str(tmp_path / "tokenizer.json")
    dataset = SFTDataset(path=str(path), tokenizer=tokenizer, max_prompt_tokens=20)
    graph = DataflowGraph([call("sft", TRAIN_STEP, ["tokens"], mini_batches=2)], dataset.keys)
    plan = ExecutionPlan(num_devices=2, calls={"sft_train_step": CallPlan(devices=(0, 2), dp=2)})
    homes = {"sft": plan.layout(plan.home(graph, "sft"))}
    rows = DatasetRows(dataset, None, 8)
    planned = PlannedGraph("train", graph, plan.calls, homes, 8, rows)
    workers = Workers(2, graph)
    asyncio.run(workers.dispatcher.run_steps(planned, plan.unrolled(graph, 1), 1, lambda *_: None))
    divided = [message.mini_batches for _, message in workers.got if isinstance(message, CallFunction)]
    assert divided == [((0, 3), (4, 5)), ((1, 2), (6, 7))]
    lengths = rows.lengths(0, ["tokens"])
    assert [lengths[sample] - lengths[3] for sample in range(8)] == [len(word) - 1 for word in words]


def test_a_call_laid_out_otherwise_is_reallocated_and_released() -> None:
    calls = {
        **dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 2), dp=2)),
        "actor_generate": CallPlan(devices=(2, 2), tp=2),
    }
    workers = Workers(4)
    run(workers, ExecutionPlan(num_devices=4, calls=calls), steps=1, batch_size=8)
    assert [to for to, message in workers.got if isinstance(message, PrepareMove)] == [2, 3], "the target"
    assert [to for to, message in workers.got if isinstance(message, Reallocate)] == [0, 1, 2, 3], "home and target"
    kinds = [type(message) for _, message in workers.got if not isinstance(message, Transfer)]
    of_worker_2 = [type(message) for to, message in workers.got if to == 2 and not isinstance(message, Transfer)]
    assert of_worker_2 == [PrepareMove, CallFunction, Release, Reallocate, FreeBatch]
    assert kinds[-4:] == [FreeBatch] * 4
    # seq and logprob come to both workers of the other calls, from the rank that holds the outputs.
    sends = [send for message in workers.sent(Transfer, worker=2) for send in message.sends]  # type: ignore[union-attr]
    moved = Counter((send.peer, send.key) for send in sends for _ in send.ids)
    assert moved == {(0, "seq"): 4, (1, "seq"): 4, (0, "logprob"): 4, (1, "logprob"): 4}


def test_a_model_in_host_memory_is_loaded_before_its_calls_and_sent_back_behind_them() -> None:
    """The actor's home is on worker 0; for generation worker 1 gets a copy, with which worker 0 has done its part."""
    calls = {**dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 1))), "actor_generate": CallPlan(devices=(1, 1))}
    workers = Workers(2)
    run(workers, ExecutionPlan(num_devices=2, calls=calls, offload=("actor",)), steps=1, batch_size=2)
    kinds = [
        [type(message) for to, message in workers.got if to == worker and not isinstance(message, Transfer)]
        for worker in range(2)
    ]
    others = [CallFunction] * 3  # of reward and critic, which stay
    assert kinds[1] == [PrepareMove, CallFunction, Release, Reallocate, FreeBatch]
    generation, training = [LoadModel, PrepareMove, OffloadModel], [LoadModel, CallFunction, OffloadModel]
    assert kinds[0][:4] == [*generation, Reallocate], "which is on a lane of its own: the rest is in order"
    assert sorted(kinds[0][4:-1], key=str) == sorted([*others, *training], key=str)
    place = kinds[0].index(LoadModel, 4)
    assert kinds[0][place : place + 3] == training


def test_a_thousand_workers() -> None:
    plan = ExecutionPlan(num_devices=1024, calls=dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 1024), dp=1024)))
    workers = Workers(1024)
    assert len(run(workers, plan, steps=2, batch_size=1024)) == 2
    assert len(workers.sent(CallFunction)) == 2 * len(GRAPH.calls) * 1024
    # Rollouts stay where they were made, and no worker has to do with any other.
    assert len(workers.got) <= 2 * 1024 * (2 * len(GRAPH.calls) + 1)


def test_a_checkpoint_is_written_by_its_writers() -> None:
    workers = Workers(4)
    asyncio.run(workers.dispatcher.save("somewhere", {1: ("actor",), 3: ("actor", "critic")}, is_last=True))
    assert [message.is_last for _, message in workers.got] == [True, True]  # type: ignore[union-attr]
    assert [(to, message.models) for to, message in workers.got] == [(1, ("actor",)), (3, ("actor", "critic"))]  # type: ignore[union-attr]


class Silent(Workers):
    """Hands no reply over by itself."""

    def __init__(self, num_workers: int, graph: DataflowGraph = GRAPH, deadlines: Deadlines | None = None):
        super().__init__(num_workers, graph, deadlines)
        self.replies: list[tuple[int, Reply]] = []
        self.dispatcher.reply, self._hand_over = self.keep, self.dispatcher.reply  # type: ignore[method-assign]

    def keep(self, worker: int, reply: Reply) -> None:
        self.replies.append((worker, reply))

    async def answer(self, worker: int) -> None:
        """The oldest request of a worker is answered."""
        reply = min((reply for to, reply in self.replies if to == worker), key=lambda reply: reply.request_id)
        self.replies.remove((worker, reply))
        self._hand_over(worker, reply)
        await asyncio.sleep(0)


def test_ranks_get_equally_many_tokens_of_what_was_generated() -> None:
    plan = ExecutionPlan(num_devices=2, calls=dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 2), dp=2)))
    workers = Workers(2)
    workers.length = lambda key, sample: 8 - sample  # type: ignore[method-assign]
    run(workers, plan, steps=1, batch_size=8)
    shares: dict[str, list[tuple[int, ...]]] = {}
    for message in workers.sent(CallFunction):
        shares.setdefault(message.call, []).append(message.mini_batches[0])  # type: ignore[union-attr]
    assert shares.pop("actor_generate") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert len(shares) == 4
    for share in shares.values():
        assert share == [(0, 3, 4, 7), (1, 2, 5, 6)]  # 8 + 5 + 4 + 1 and 7 + 6 + 3 + 2
    # Every rank lacks two of the samples that the other generated, whose data comes to it once.
    sends = [(to, send) for to, message in workers.got if isinstance(message, Transfer) for send in message.sends]
    assert {(to, send.ids) for to, send in sends if send.key == "seq"} == {(0, (1, 2)), (1, (4, 7))}


async def until_idle() -> None:
    """Everything here is done within some turns of the event loop: nothing waits for anything outside."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_the_division_does_not_depend_on_who_ends_first() -> None:
    graph = DataflowGraph(
        [
            call("a", INFERENCE, ["prompt"], ["x"]),
            call("b", INFERENCE, ["prompt"], ["y"]),
            call("c", INFERENCE, ["y", "x"], []),
        ],
        ["prompt"],
    )
    calls = {
        "a_inference": CallPlan(devices=(0, 1)),
        "b_inference": CallPlan(devices=(1, 1)),
        "c_inference": CallPlan(devices=(2, 2), dp=2),
    }
    plan = ExecutionPlan(num_devices=4, calls=calls)

    async def script(workers: Silent, order: tuple[int, int]) -> list[tuple[int, str]]:
        homes = {model: plan.layout(plan.home(graph, model)) for model in graph.models}
        planned = PlannedGraph("train", graph, plan.calls, homes, 4)
        task = asyncio.ensure_future(workers.dispatcher.run_steps(planned, plan.unrolled(graph, 1), 1, lambda *_: None))
        for worker in (*order, 2, 3):
            await until_idle()
            await workers.answer(worker)
        await task
        got = [(to, message) for to, message in workers.got if isinstance(message, CallFunction | Transfer)]
        for to, message in got:
            if isinstance(message, CallFunction) and to >= 2:
                assert message.mini_batches == (((0, 3),), ((1, 2),))[to - 2]
        return sorted(
            (receive.peer, to, receive.key, receive.metadata.ids)
            for to, message in got
            if isinstance(message, Transfer)
            for receive in message.receives
        )

    received = []
    for order in ((0, 1), (1, 0)):
        workers = Silent(4, graph)
        workers.length = lambda key, sample: 4 - sample if key == "y" else 1 + 9 * (sample == 0)
        received.append(asyncio.run(script(workers, order)))
    assert received[0] == received[1]
    assert [entry[2:] for entry in received[0]] == [("x", (0, 3)), ("x", (1, 2)), ("y", (0, 3)), ("y", (1, 2))]


def test_a_worker_is_late_at_the_request_it_executes_not_at_those_behind() -> None:
    calls = dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 1))) | {"actor_generate": CallPlan(devices=(1, 1))}
    plan = ExecutionPlan(num_devices=2, calls=calls)

    async def script(workers: Silent) -> None:
        describe, late = workers.dispatcher.describe, workers.dispatcher.late
        homes = {model: plan.layout(plan.home(GRAPH, model)) for model in GRAPH.models}
        planned = PlannedGraph("train", GRAPH, plan.calls, homes, 1)
        task = asyncio.ensure_future(workers.dispatcher.run_steps(planned, plan.unrolled(GRAPH, 1), 1, lambda *_: None))
        await until_idle()
        reallocation = "reallocation of actor for actor_generate of step 1"
        assert (describe(0), describe(1)) == ("no request", reallocation), "worker 0 is asked when worker 1 is prepared"
        workers.now_s = 5.0
        assert late() == {}
        workers.now_s = 5.1
        assert list(late()) == [1]
        await workers.answer(1)
        await until_idle()
        assert (describe(0), describe(1)) == (reallocation, reallocation)
        assert late() == {}
        workers.now_s = 10.2
        assert list(late()) == [0, 1]
        await workers.answer(0)
        await workers.answer(1)
        assert describe(0) == "no request"
        assert describe(1) == "actor_generate of step 1"
        assert late() == {}
        workers.now_s = 16.0
        assert list(late()) == [1]
        await workers.answer(1)
        await until_idle()
        assert describe(0) in ("critic_inference of step 1", "reward_inference of step 1")
        before = describe(0)
        workers.now_s = 22.0
        assert list(late()) == [0]
        await workers.answer(0)
        assert describe(0) != before
        assert late() == {}, "the time of the next starts now"
        task.cancel()

    asyncio.run(script(Silent(2, deadlines=Deadlines(floor_s=5.0))))


def test_a_call_may_take_as_much_longer_as_was_predicted_of_it() -> None:
    """Seven predicted seconds allow for 70; what the plan says nothing of has the floor of five."""
    calls = dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 1)))
    calls["actor_generate"] = CallPlan(devices=(0, 1), predicted_s=7.0)
    plan = ExecutionPlan(num_devices=1, calls=calls)

    async def script(workers: Silent) -> None:
        homes = {model: plan.layout(plan.home(GRAPH, model)) for model in GRAPH.models}
        planned = PlannedGraph("train", GRAPH, plan.calls, homes, 1)
        task = asyncio.ensure_future(workers.dispatcher.run_steps(planned, plan.unrolled(GRAPH, 1), 1, lambda *_: None))
        await until_idle()
        workers.now_s = 70.0
        assert workers.dispatcher.describe(0) == "actor_generate of step 1"
        assert workers.dispatcher.late() == {}
        workers.now_s = 70.1
        assert list(workers.dispatcher.late()) == [0]
        await workers.answer(0)
        await until_idle()
        workers.now_s = 75.2
        assert list(workers.dispatcher.late()) == [0], "the next call has five seconds"
        task.cancel()

    asyncio.run(script(Silent(1, deadlines=Deadlines(floor_s=5.0, factor=10.0))))


def test_requests_without_a_prediction_have_the_longest_deadline_of_the_plan() -> None:
    """A call of 40 s may take 200 s, and the floor is 60 s; what has no prediction may take the 200 s too."""
    calls = dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 2), dp=2, predicted_s=1.0))
    calls["actor_generate"] = CallPlan(devices=(0, 2), tp=2, predicted_s=40.0)  # and the actor's home is another
    calls["critic_inference"] = CallPlan(devices=(0, 2), dp=2)
    plan = ExecutionPlan(num_devices=2, calls=calls, offload=("reward",))
    workers = Workers(2, deadlines=Deadlines(floor_s=60.0, factor=5.0, longest_predicted_s=40.0))
    expected: dict[str, set[float]] = {}
    alone, together = set[str](), set[str]()
    expect = workers.dispatcher._open.expect

    def noted(worker: int, request: Request, *thread: Thread) -> int:
        expected.setdefault(request.what, set()).add(request.deadline_s)
        what = "preparation" if request.prepares else request.what.partition(" ")[0]
        (together if request.together else alone).add(what)
        return expect(worker, request, *thread)

    workers.dispatcher._open.expect = noted  # type: ignore[method-assign]
    run(workers, plan, steps=1, batch_size=8)
    asyncio.run(workers.dispatcher.save("part", {0: ("actor",)}, is_last=False))
    deadlines = {what.partition(" ")[0]: found for what, found in expected.items()}
    unpredicted = {what: found for what, found in deadlines.items() if what not in GRAPH.calls}
    assert unpredicted.keys() == {"reallocation", "load", "offload", "checkpoint"}
    assert set().union(*unpredicted.values()) == {200.0}
    assert deadlines["actor_generate"] == {200.0}
    assert deadlines["critic_inference"] == deadlines["actor_train_step"] == {60.0}
    # What workers do with each other has its time from when the last of them has come to it.
    assert alone == {"preparation", "load", "offload", "checkpoint"}
    assert together == {"reallocation", *GRAPH.calls}


def test_statistics_do_not_depend_on_the_order_of_replies() -> None:
    """0.1 + 0.2 + 0.3 has other last bits than 0.3 + 0.2 + 0.1."""
    replies = [
        Reply(request_id=worker, span=Span("compute", "", 0.0, 1.0), stats={"loss": (0.1 * (worker + 1), 1.0)})
        for worker in range(3)
    ]
    sums = [
        CallRecord(Node(0, "actor_train_step"), "actor", {worker: replies[worker] for worker in order}).stats
        for order in ((0, 1, 2), (2, 1, 0))
    ]
    assert sums[0] == sums[1]
