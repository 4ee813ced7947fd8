"""What a worker is at: requests of calls, and beside them those to send."""

import pytest

from realhf.master.open_requests import OpenRequests
from realhf.master.replies import Request
from realhf.transport.messages import Reply, Span


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reply_to(request_id: int) -> Reply:
    return Reply(request_id=request_id, span=Span("compute", "", 0.0, 1.0))


def test_a_long_call_and_what_is_sent_beside_it_have_deadlines_of_their_own() -> None:
    clock = Clock()
    requests = OpenRequests(2, clock)
    call = requests.expect(1, Request("a long call"))
    clock.now_s = 4.0
    first, second = (requests.expect(1, Request(f"sending {i}"), beside=True) for i in (1, 2))
    assert requests.describe(1) == "a long call, and beside it in sending 1"
    clock.now_s = 8.0
    assert requests.late(5.0) == [1], "the call; what is sent does not make it younger"
    assert requests.answered(1, reply_to(call)).what == "a long call"
    assert requests.late(5.0) == []
    clock.now_s = 9.5
    assert requests.late(5.0) == [1], "of what is sent"
    requests.answered(1, reply_to(first))
    assert requests.late(5.0) == []
    assert requests.describe(1) == "sending 2"
    with pytest.raises(ValueError, match="which is not open"):
        requests.answered(0, reply_to(second))
    assert requests
    requests.answered(1, reply_to(second))
    assert not requests
    assert requests.describe(1) == "no request"
