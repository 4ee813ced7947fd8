"""The clock of a run's processes."""

import time

import pytest

from realhf.transport.clock import now_s


def test_setting_the_hosts_clock_changes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = now_s()
    monkeypatch.setattr(time, "time", lambda: before - 3600.0)
    assert before <= now_s() < before + 3600.0
