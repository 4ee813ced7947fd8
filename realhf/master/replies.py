"""What a request to a worker is answered with, and what is no answer to it. Pure."""

import math
from dataclasses import dataclass

from realhf.master.state import Node
from realhf.transport.messages import Reply


@dataclass(frozen=True)
class Request:
    """A request that a worker has not answered yet.

    `node` is the call that it computes, if it computes one; then the worker's reply describes the keys `outputs` of
    the samples `ids`. `prepares` is the node for whose move of parameters it makes room. It may take `deadline_s`; if
    it is `together`, from when all workers that were asked the same (`what`) have come to it.
    """

    what: str
    deadline_s: float
    node: Node | None = None
    outputs: frozenset[str] = frozenset()
    ids: tuple[int, ...] = ()
    prepares: Node | None = None
    together: bool = False


def check_reply(request: Request | None, reply: Reply) -> None:
    """Raises ValueError unless `reply` answers `request`: whoever sent it has another run, another version, or lies.

    What passes changes nothing but the numbers of one call: its spans are times, and its columns are those expected.
    """
    if request is None:
        raise ValueError(f"a reply to request {reply.request_id}, which is not open")
    for span in (reply.span, reply.wait):
        if span is not None and not (_is_time(span.start) and _is_time(span.end)):
            raise ValueError(f"a reply to {request.what} that took from {span.start} to {span.end}")
    if reply.outputs.keys() != request.outputs:
        raise ValueError(f"a reply to {request.what} with other outputs than {sorted(request.outputs)}")
    for key, metadata in reply.outputs.items():
        if metadata.ids != request.ids or len(metadata.lengths) != len(request.ids):
            raise ValueError(f"a reply to {request.what} with {key} of other samples than asked for")


def _is_time(seconds: float) -> bool:
    """Whether it can be seconds since the epoch; a clock that is set back may make spans end before they start."""
    return math.isfinite(seconds) and 0 <= seconds < 2**40
