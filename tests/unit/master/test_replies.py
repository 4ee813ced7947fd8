"""Replies that answer nothing, or not what was asked, change nothing; whatever comes, the run goes on to its end."""

import asyncio
import math
import random
from dataclasses import replace

import msgspec
import pytest

from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.master.loop import PlannedGraph
from realhf.master.replies import Request, check_reply
from realhf.master.state import Node
from realhf.transport.codec import Codec, UndecodableError
from realhf.transport.messages import Completion, KeyMetadata, Reply, Span, ToMaster
from tests.unit.master.workers import GRAPH, Workers

ASKED = Request("a of step 1", 600.0, Node(0, "a"), frozenset({"x"}), (0, 2))
X = KeyMetadata(dtype="int64", trailing=(), ids=(0, 2), lengths=(3, 4), digests=b"abcdefgh" * 2)
SPAN = Span("compute", "a of step 1", 1.0, 2.0)
GOOD = Reply(request_id=7, span=SPAN, outputs={"x": X})


def test_what_answers_passes() -> None:
    check_reply(ASKED, GOOD)
    check_reply(Request("checkpoint", 600.0), Reply(request_id=1, span=SPAN, wait=SPAN))
    latest = Span("compute", "a", 0.0, 2.0**40 - 1)
    check_reply(ASKED, msgspec.structs.replace(GOOD, span=latest, wait=latest))
    all_of_it = tuple(Completion(sample=sample, prompt="", response="", reward=None) for sample in (2, 0))
    check_reply(ASKED, msgspec.structs.replace(GOOD, completions=all_of_it))
    check_reply(replace(ASKED, returns_state=True), msgspec.structs.replace(GOOD, state={"a": 1.0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": {}}, r"with other outputs than \['x'\]"),
        ({"outputs": {"x": X, "y": X}}, "with other outputs than"),
        ({"outputs": {"x": msgspec.structs.replace(X, ids=(0, 1))}}, "with x of other samples than asked for"),
        ({"outputs": {"x": msgspec.structs.replace(X, lengths=(3,))}}, "with x of other samples than asked for"),
        (
            {"outputs": {"x": msgspec.structs.replace(X, digests=b"abcdefgh")}},
            "with digests of x of other samples than asked for",
        ),
        (
            {"completions": (Completion(sample=1, prompt="", response="", reward=None),)},
            "with completions of other samples than asked for",
        ),
        ({"state": {"a": 1.0}}, "with numbers that the call keeps, of a rank that is not asked"),
        ({"span": Span("compute", "a", 0.0, math.inf)}, "that took from 0.0 to inf"),
        ({"wait": Span("transfer", "a", math.nan, 1.0)}, "that took from nan to 1.0"),
        ({"span": Span("compute", "a", -1.0, 1e300)}, "that took from -1.0"),
        ({"span": Span("compute", "a", 2.0**40, 1.0)}, "that took from 1099511627776.0 to 1.0"),
    ],
)
def test_what_does_not_answer_is_told(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"a reply to a of step 1 {message}"):
        check_reply(ASKED, msgspec.structs.replace(GOOD, **changes))


def test_a_reply_to_nothing() -> None:
    with pytest.raises(ValueError, match="a reply to request 7, which is not open"):
        check_reply(None, GOOD)


class Distorted(Workers):
    """Every reply comes behind frames that differ from it in a few bits, and then once more."""

    FRAMES = 40

    def __init__(self) -> None:
        super().__init__(4)
        self._dice = random.Random(3)
        self._codec = Codec[ToMaster](ToMaster)
        self._hand_over, self.dispatcher.reply = self.dispatcher.reply, self.distort  # type: ignore[method-assign]
        self.handed_over = self.undecodable = self.refused = self.accepted = 0

    def distort(self, worker: int, reply: Reply) -> None:
        frame = self._codec.encode(reply)
        for _ in range(self.FRAMES):
            changed = bytearray(frame)
            for _ in range(self._dice.choice([1, 1, 2, 8])):
                changed[self._dice.randrange(len(frame))] ^= 1 << self._dice.randrange(8)
            self.receive(self._dice.randrange(4) if self._dice.random() < 0.2 else worker, bytes(changed))
        self.receive(worker, frame)
        self.receive(worker, frame)

    def receive(self, worker: int, frame: bytes) -> None:
        self.handed_over += 1
        try:
            message = self._codec.decode(frame)
            if isinstance(message, Reply):
                self._hand_over(worker, message)
                self.accepted += 1
        except UndecodableError:
            self.undecodable += 1
        except ValueError:
            self.refused += 1


def test_ten_thousand_distorted_replies() -> None:
    plan = ExecutionPlan(num_devices=4, calls=dict.fromkeys(GRAPH.calls, CallPlan(devices=(0, 4), dp=2, tp=2)))
    planned = PlannedGraph("train", GRAPH, plan.calls, {m: plan.layout(plan.home(GRAPH, m)) for m in GRAPH.models}, 8)
    workers, steps, ended = Distorted(), 13, []
    order = plan.unrolled(GRAPH, steps)
    asyncio.run(workers.dispatcher.run_steps(planned, order, 2, lambda step, _: ended.append(step)))
    assert ended == list(range(steps))
    assert workers.handed_over == steps * 5 * 4 * (workers.FRAMES + 2) > 10_000
    assert workers.accepted == steps * 5 * 4, "one answer to a request, whichever came first"
    assert min(workers.undecodable, workers.refused) > 1000
