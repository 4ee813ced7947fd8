"""When a move of parameters is sent, to whom, and in which order."""

import asyncio

from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master.moves import Moves
from realhf.master.open_requests import OpenRequests
from realhf.master.replies import Request
from realhf.master.state import Node
from realhf.transport.messages import BatchKey, FollowParameters, PrepareMove, Reply, Span, ToWorker

BATCH, NODE = BatchKey("train", 0), Node(0, "b_follows_a")
LAYOUT = Layout(DeviceMesh(7, 2), ParallelStrategy(dp=2))


def test_a_move_is_sent_when_the_last_one_has_prepared_in_the_order_of_workers() -> None:
    """Workers 7 and 8 make room; 1 and 16 only send, and are asked last."""
    sent: list[tuple[int, ToWorker]] = []

    async def send(worker: int, message: ToWorker) -> None:
        sent.append((worker, message))

    def move(request_id: int) -> FollowParameters:
        return FollowParameters(request_id=request_id, batch=BATCH, name="b_follows_a")

    async def script() -> None:
        now_s = 0.0
        requests = OpenRequests(17, lambda: now_s)
        moves = Moves(send, requests)
        request = Request("a move", 5.0, NODE, together=True)
        await moves.prepare(NODE, "b", LAYOUT, frozenset({8, 7}), frozenset({16, 8, 7, 1}), request, move(0))
        assert sent == [
            (worker, PrepareMove(request_id=number, batch=BATCH, name="b_follows_a", model="b", layout=LAYOUT))
            for worker, number in ((7, 0), (8, 2))
        ]
        sent.clear()
        for worker, number in ((8, 2), (7, 0)):
            assert sent == []
            prepared = requests.answered(worker, Reply(request_id=number, span=Span("reallocation", "", 0.0, 1.0)))
            assert prepared == Request("a move", 5.0, prepares=NODE)
            await moves.prepared(worker, NODE)
        assert sent == [(1, move(4)), (7, move(1)), (8, move(3)), (16, move(5))]
        now_s = 5.1
        assert requests.late() == dict.fromkeys((1, 7, 8, 16), request)
        # Those who only send do it beside their calls.
        requests.expect(1, Request("a call", 5.0))
        assert requests.describe(1) == "a call, and beside it in a move"

    asyncio.run(script())
