"""When a move of parameters is sent: as soon as all workers that must prepare for it have done so."""

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
    """A move that is sent when all workers of `unprepared` have prepared for it.

    ids: by worker, the request id of the move, for the workers that prepare.
    others: workers that only send parameters, and need not prepare.
    """

    unprepared: set[int]
    ids: dict[int, int]
    others: frozenset[int]
    request: Request
    message: Move


class Moves:
    """Sends each move of parameters when every worker of its target is ready for it.

    The workers that a node occupies prepare for the move in the order of their calls. When all have prepared, all
    workers that take part get the move and can execute it at once: none is in the middle of a call, which would hold up
    this move and the moves behind it. All workers get all moves in one order, in which they became possible.
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
        """Asks the workers `occupied`, a part of `movers`, to prepare for a move of `model` into `layout`.

        `message` is the move, whose id is set later; `request` describes it.
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
        """Notes that `worker` has prepared; sends the move if it was the last."""
        waiting = self._waiting.pop(node)
        waiting.unprepared.remove(worker)
        if waiting.unprepared:
            self._waiting[node] = waiting
            return
        others = {other: self._open.expect(other, waiting.request, "moves") for other in sorted(waiting.others)}
        for mover, request_id in sorted((waiting.ids | others).items()):
            await self._send(mover, replace(waiting.message, request_id=request_id))
