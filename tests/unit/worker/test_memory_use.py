"""Measured memory: what is held for a moment is seen, and only until it was asked for."""

from pathlib import Path

import pytest
import torch

from realhf.worker import memory_use as memory
from realhf.worker.memory_use import MemoryGauge

MIB = 2**20


def can_start_anew() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def test_a_moment_of_much_memory_is_seen_once() -> None:
    gauge = MemoryGauge(torch.device("cpu"))
    before = gauge.take_peak()
    held = bytearray(b"1") * (256 * MIB)  # every page is written to
    del held
    assert 250 * MIB < gauge.take_peak() - before < 350 * MIB
    if can_start_anew():
        assert gauge.take_peak() - before < 50 * MIB


def test_where_the_peak_cannot_start_anew_it_is_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t   5000 kB\nVmRSS:\t   3000 kB\n")
    (tmp_path / "clear_refs").mkdir()  # cannot be written to
    monkeypatch.setattr(memory, "_PROCESS", tmp_path)
    gauge = MemoryGauge(torch.device("cpu"))
    assert gauge.take_peak() == gauge.take_peak() == 2000 * 1024


def test_a_system_without_proc_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "nothing")
    assert MemoryGauge(torch.device("cpu")).take_peak() == 0
