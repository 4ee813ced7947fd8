"""Moves of parameters on a thread of their own, beside the one that executes calls."""

import logging
import threading
import time
from collections.abc import Callable

import torch

from realhf.rundir.logs import place_of
from realhf.transport.clock import now_s
from realhf.transport.messages import BatchKey, Move, PrepareMove, Reallocate, Reply, Span
from realhf.worker.channels import Channels

logger = logging.getLogger(__name__)

Key = tuple[BatchKey, str]  # names a move, and the request that prepares for it
LOOK_EVERY_S = 1.0  # whether a move that is waited for is late


class MoveThread:
    """Carries out moves one after the other, in the order in which the master sends them, and replies.

    So a worker sends parameters of a model that lives here while it computes calls. A worker that receives a copy
    prepares for it when its calls have come to that place; until the move has ended it computes nothing.

    Why no worker waits for ever: the master sends a move when all workers that have to prepare have done so, and it
    sends all moves to all workers in one order. A thread of moves never waits for calls, only for the threads of moves
    of other workers, which are at the same move or an earlier one. Calls wait for the moves that they prepared for,
    and for calls and moves that were sent before them; moves wait for no call that was sent after them. So the first
    call or move that has not ended can always proceed, whatever the meshes.

    Args:
        channels: where moves come in; gets the replies, and the exception of `carry_out`.
        carry_out: does this worker's part of a move.
        timeout_s: how long calls wait for a move to begin: at least the time of other workers' calls before it.
    """

    def __init__(self, channels: Channels, carry_out: Callable[[Move], None], device: torch.device, timeout_s: float):
        self._channels, self._carry_out, self._device, self._timeout_s = channels, carry_out, device, timeout_s
        self._prepared: Key | None = None
        self._carried_out: Key | None = None  # at this moment
        self._has_ended = threading.Condition()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._computed: torch.cuda.Event | None = None
        self.computed()
        self._thread = threading.Thread(target=self._run, name="moves of parameters", daemon=True)
        self._thread.start()

    def prepared(self, request: PrepareMove) -> None:
        """To be called before the reply: the thread of calls goes on when that move has ended (`wait`)."""
        self._prepared = request.batch, request.name

    def wait(self) -> None:
        """Returns when the move that was prepared for has ended; at once where there is none.

        Once the move has begun, the deadlines of its parts count instead: their errors name the peer.

        Raises:
            TimeoutError: the move has not begun within the deadline, since other workers have not come to it.
        """
        start = time.monotonic()
        with self._has_ended:
            while self._prepared is not None:
                self._has_ended.wait(min(LOOK_EVERY_S, self._timeout_s))
                waited_s, is_under_way = time.monotonic() - start, self._carried_out == self._prepared
                if self._prepared is not None and waited_s > self._timeout_s and not is_under_way:
                    batch, name = self._prepared
                    raise TimeoutError(
                        f"reallocation for {name} of {batch}: waited {self._timeout_s:g} s for other workers "
                        "to come to it and timed out"
                    )

    def computed(self) -> None:
        """To be called after every request that is no move: on the device, moves wait for the work that the request has
        queued, and not for the call behind it."""
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._computed = event

    def close(self) -> None:
        """Ends the thread behind the moves that have come."""
        self._channels.moves.put(None)
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        while (move := self._channels.moves.get()) is not None:
            self._carried_out = _key(move)
            try:
                self._channels.report(self._reply(move))
            except Exception as error:
                self._carried_out = None
                self._channels.fail(error)
                return
            with self._has_ended:
                self._carried_out = None
                if self._prepared == _key(move):
                    self._prepared = None
                    self._has_ended.notify_all()

    def _reply(self, move: Move) -> Reply:
        batch, name = _key(move)
        is_prepared = self._prepared == (batch, name)  # then calls wait, and say what for
        what = f"{name} of {batch}"
        self._channels.activity.set_beside("" if is_prepared else f"{what}: sending")
        start = now_s()
        if self._stream is None:
            self._carry_out(move)
        else:
            with torch.cuda.stream(self._stream):
                assert self._computed is not None
                self._stream.wait_event(self._computed)
                self._carry_out(move)
            self._stream.synchronize()
        span = Span("reallocation" if is_prepared else "sending", what, start, now_s())
        logger.info("%s took %.3f s", span.phase, span.end - start, extra={"place": place_of(f"{what}: {span.phase}")})
        self._channels.activity.set_beside("")
        return Reply(request_id=move.request_id, span=span)


def _key(move: Move) -> Key:
    return move.batch, move.call if isinstance(move, Reallocate) else move.name
