"""When moves of parameters go out: as soon as all who need to have prepared for them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from realhf.geometry.layout import Layout
from realhf.master.open_requests import OpenRequests
from realhf.master.replies import Request
from realhf.master.state import Node
from realhf.transport.messages import Move, PrepareMove, ToWorker

SendRequest = Callable[[int, ToWorker], Awaitable[None]]


@dataclass(frozen=True)
class _Waiting:
    """A move that goes out when the workers of `unprepared` have prepared for it.

    `ids` are the requests of those who prepare, by worker: what they are at until it has ended. `others` only send.
    """

    unprepared: set[int]
    ids: dict[int, int]
    others: frozenset[int]
    request: Request
    message: Move


class Moves:
    """Has the devices that a node occupies prepare for the move of parameters to it, in the order of their calls, and
    sends the move to all who take part when they have.

    So all of it can happen at once: nobody is found in the middle of a call that the move, and moves behind it on
    the lanes of others, would have to wait for. All workers get all moves in one order, which is that in which
    they became possible.
    """

    def __init__(self, send: SendRequest, open_requests: OpenRequests):
        self._send, self._open = send, open_requests
        self._waiting: dict[Node, _Waiting] = {}

    async def prepare(
        self,
        node: Node,
        model: str,
        layout: Layout,
        occupied: frozenset[int],
        movers: frozenset[int],
        request: Request,
        message: Move,
    ) -> None:
        """Asks `occupied`, of `movers`, to prepare for `message`, which brings `model` into `layout`.

        `request` says what the move is; the id in `message` does not count.
        """
        waiting = _Waiting(set(occupied), {}, movers - occupied, request, message)
        self._waiting[node] = waiting
        for worker in sorted(occupied):
            request_id = self._open.expect(worker, Request(request.what, request.deadline_s, prepares=node))
            waiting.ids[worker] = self._open.expect(worker, request)
            prepare = PrepareMove(
                request_id=request_id, batch=message.batch, name=node.call, model=model, layout=layout
            )
            await self._send(worker, prepare)

    async def prepared(self, worker: int, node: Node) -> None:
        """Takes note that `worker` has prepared; sends the move if it was the last."""
        waiting = self._waiting[node]
        waiting.unprepared.remove(worker)
        if waiting.unprepared:
            return
        del self._waiting[node]
        others = {other: self._open.expect(other, waiting.request, beside=True) for other in sorted(waiting.others)}
        for mover, request_id in sorted((waiting.ids | others).items()):
            await self._send(mover, replace(waiting.message, request_id=request_id))
