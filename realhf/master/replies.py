"""Requests to workers, and whether a reply answers one. Pure."""

from dataclasses import dataclass

from realhf.master.state import Node
from realhf.rundir.outputs import DIGEST_BYTES
from realhf.transport.messages import Reply


@dataclass(frozen=True)
class Request:
    """A request that a worker has not answered yet.

    what: describes the request, for error messages; workers that execute one request together have the same text.
    deadline_s: how long the worker may take.
    node: the call that it computes, if any.
    outputs, ids: the reply describes these keys of these samples.
    prepares: the node for whose move of parameters it makes room, if any.
    returns_state: the reply has the numbers that the call keeps.
    together: the deadline starts when every worker that was asked the same has reached the request.
    """

    what: str
    deadline_s: float
    node: Node | None = None
    outputs: frozenset[str] = frozenset()
    ids: tuple[int, ...] = ()
    prepares: Node | None = None
    together: bool = False
    returns_state: bool = False


def check_reply(request: Request | None, reply: Reply) -> None:
    """Raises ValueError unless `reply` answers `request`: its sender may be of another run or version, or hostile.

    A reply that passes can change nothing but the numbers of one call: its spans are times, and its columns are those
    that were expected.
    """
    if request is None:
        raise ValueError(f"a reply to request {reply.request_id}, which is not open")
    for span in (reply.span, reply.wait, *reply.digests):
        if span is not None and not (_is_time(span.start) and _is_time(span.end)):
            raise ValueError(f"a reply to {request.what} that took from {span.start} to {span.end}")
    if reply.outputs.keys() != request.outputs:
        raise ValueError(f"a reply to {request.what} with other outputs than {sorted(request.outputs)}")
    if reply.state and not request.returns_state:
        raise ValueError(f"a reply to {request.what} with numbers that the call keeps, of a rank that is not asked")
    if not {completion.sample for completion in reply.completions} <= set(request.ids):
        raise ValueError(f"a reply to {request.what} with completions of other samples than asked for")
    for key, metadata in reply.outputs.items():
        if metadata.ids != request.ids or len(metadata.lengths) != len(request.ids):
            raise ValueError(f"a reply to {request.what} with {key} of other samples than asked for")
        if len(metadata.digests) != DIGEST_BYTES * len(request.ids):
            raise ValueError(f"a reply to {request.what} with digests of {key} of other samples than asked for")


def _is_time(seconds: float) -> bool:
    """Whether `seconds` can be a time since the epoch. A span may end before it starts, if the clock was set back."""
    return 0 <= seconds < 2**40
