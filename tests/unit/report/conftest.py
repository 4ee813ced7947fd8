"""Runs that say they are going on, and are as files alone."""

import pytest

from realhf.report import run_status


@pytest.fixture(autouse=True)
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """`realhf status` does not wait long for a sign of life that never comes."""
    monkeypatch.setattr(run_status, "LOOKED_AT_S", 0.1)
