"""What a worker is at: requests of calls, and beside them those to send."""

import pytest

from realhf.master.open_requests import OpenRequests
from realhf.master.replies import Request
from realhf.master.state import Node
from realhf.transport.messages import Reply, Span


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reply_to(request_id: int) -> Reply:
    return Reply(request_id=request_id, span=Span("compute", "", 0.0, 1.0))


def test_the_time_of_a_request_begins_when_it_is_sent_to_an_idle_worker_or_the_one_before_is_answered() -> None:
    clock = Clock()
    requests = OpenRequests(1, clock)
    clock.now_s = 50.0
    first, second = Request("first", 5.0), Request("second", 5.0)
    of_first = requests.expect(0, first)
    clock.now_s = 53.0
    requests.expect(0, second)
    clock.now_s = 55.0
    assert requests.late() == {}, "five seconds are not too long"
    clock.now_s = 55.5
    assert requests.late() == {0: first}
    requests.answered(0, reply_to(of_first))
    clock.now_s = 60.5
    assert requests.late() == {}
    clock.now_s = 60.6
    assert requests.late() == {0: second}


def test_a_long_call_and_what_is_sent_beside_it_have_deadlines_of_their_own() -> None:
    clock = Clock()
    requests = OpenRequests(2, clock)
    call = requests.expect(1, Request("a long call", 5.0))
    clock.now_s = 4.0
    first, second = (requests.expect(1, Request(f"sending {i}", 5.0), "moves") for i in (1, 2))
    assert requests.describe(1) == "a long call, and beside it in sending 1"
    clock.now_s = 8.0
    assert list(requests.late()) == [1], "the call; what is sent does not make it younger"
    assert requests.answered(1, reply_to(call)).what == "a long call"
    assert requests.late() == {}
    clock.now_s = 9.5
    assert list(requests.late()) == [1], "of what is sent"
    requests.answered(1, reply_to(first))
    assert requests.late() == {}
    assert requests.describe(1) == "sending 2"
    with pytest.raises(ValueError, match="which is not open"):
        requests.answered(0, reply_to(second))
    assert requests
    requests.answered(1, reply_to(second))
    assert not requests
    assert requests.describe(1) == "no request"


def test_who_waits_for_another_to_come_to_a_call_is_not_late() -> None:
    """Worker 1 has a call that may take long before one that both do, which may not."""
    clock = Clock()
    requests = OpenRequests(2, clock)
    long, short = Request("a long call", 100.0, together=True), Request("a short call", 5.0, together=True)
    of_long = requests.expect(1, long)
    of_short = [requests.expect(worker, short) for worker in range(2)]
    clock.now_s = 99.0
    assert requests.late() == {}
    clock.now_s = 101.0
    assert requests.late() == {1: long}
    requests.answered(1, reply_to(of_long))
    clock.now_s = 106.0
    assert requests.late() == {}, "both have been at it for five seconds"
    clock.now_s = 106.5
    assert requests.late() == {0: short, 1: short}
    requests.answered(0, reply_to(of_short[0]))
    assert requests.late() == {1: short}


def test_of_two_who_prepare_for_one_move_the_one_that_does_not_is_late() -> None:
    """Each of them has the move behind its preparation, and waits in it for the other's."""
    clock = Clock()
    requests = OpenRequests(2, clock)
    prepare, move = Request("a move", 5.0, prepares=Node(0, "a")), Request("a move", 5.0, together=True)
    ids = [[requests.expect(worker, request) for request in (prepare, move)] for worker in range(2)]
    requests.answered(0, reply_to(ids[0][0]))
    clock.now_s = 6.0
    assert requests.late() == {1: prepare}
    requests.answered(1, reply_to(ids[1][0]))
    clock.now_s = 12.0
    assert requests.late() == {0: move, 1: move}


def test_a_call_beside_the_devices_has_time_from_when_the_worker_has_come_to_it() -> None:
    """The worker is in a long call that was sent before, and in another one that was sent behind."""
    clock = Clock()
    requests = OpenRequests(1, clock)
    long = requests.expect(0, Request("a long call", 100.0))
    rule = requests.expect(0, Request("a rule", 5.0, together=True), "beside")
    clock.now_s = 50.0
    behind = requests.expect(0, Request("a call behind it", 100.0))
    clock.now_s = 90.0
    assert requests.late() == {}
    requests.answered(0, reply_to(long))
    clock.now_s = 95.0
    assert requests.late() == {}
    assert requests.describe(0) == "a call behind it, and beside it in a rule"
    assert requests.describe(0, rule) == "a rule"
    clock.now_s = 95.5
    assert [request.what for request in requests.late().values()] == ["a rule"]
    requests.answered(0, reply_to(behind))
    assert [request.what for request in requests.late().values()] == ["a rule"], "that makes it no younger"
    requests.answered(0, reply_to(rule))
    assert not requests


def test_who_waits_in_a_rule_for_another_to_come_to_it_is_not_late() -> None:
    clock = Clock()
    requests = OpenRequests(2, clock)
    requests.expect(1, Request("a long call", 100.0))
    for worker in range(2):
        requests.expect(worker, Request("a rule", 5.0, together=True), "beside")
    clock.now_s = 99.0
    assert requests.late() == {}
