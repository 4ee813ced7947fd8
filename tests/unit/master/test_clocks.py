"""Times of workers are put onto the master's clock, by the fastest of their heartbeats."""

import socket

import pytest

from realhf.master.clocks import WorkerClocks
from realhf.transport.messages import Span

SPAN = Span("compute", "actor_generate of step 1", 1000.0, 1003.0)


def test_clocks_that_differ_are_corrected() -> None:
    now_s = [0.0]
    clocks = WorkerClocks(lambda: now_s[0])
    for now_s[0], sent_s in ((500.9, 700.0), (501.01, 701.0), (502.5, 702.0)):  # 200 s ahead, and late by some
        clocks.heard(1, sent_s)
    assert clocks.corrected(1, SPAN) == Span("compute", SPAN.name, 1000.0 - 199.99, 1003.0 - 199.99)
    assert clocks.corrected(0, SPAN) == SPAN


def test_what_a_busy_machine_delays_is_no_difference() -> None:
    now_s = [0.0]
    clocks = WorkerClocks(lambda: now_s[0])
    for now_s[0], sent_s in ((500.9, 500.0), (501.1, 501.0)):
        clocks.heard(1, sent_s)
    assert clocks.corrected(1, SPAN) == SPAN


@pytest.mark.parametrize(
    ("difference_s", "offset_s"), [(0.25, 0.0), (-0.25, 0.0), (0.3, 0.3), (-0.3, -0.3), (0.2, 0.0)]
)
def test_a_quarter_of_a_second_is_what_clocks_may_differ_by(difference_s: float, offset_s: float) -> None:
    clocks = WorkerClocks(lambda: difference_s)
    clocks.heard(1, 0.0)
    assert clocks.offset_s(1) == offset_s


def test_workers_on_the_masters_host_have_its_clock() -> None:
    clocks = WorkerClocks(lambda: 500.0)
    clocks.met(0, socket.gethostname())
    clocks.met(1, "elsewhere")
    for worker in (0, 1):
        clocks.heard(worker, 490.0)  # a busy host has kept it for ten seconds
    assert clocks.corrected(0, SPAN) == SPAN
    assert clocks.offset_s(1) == 10.0


def test_a_clock_that_is_set_is_followed() -> None:
    now_s = [0.0]
    clocks = WorkerClocks(lambda: now_s[0])
    for i in range(30):
        now_s[0] = 500.0 + i
        clocks.heard(1, 700.0 + i)
    assert clocks.offset_s(1) == -200.0
    for i in range(30, 60):
        now_s[0] = 500.0 + i
        clocks.heard(1, 500.0 + i)
    assert clocks.offset_s(1) == 0.0
