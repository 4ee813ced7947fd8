"""Copies on a GPU that both threads of a worker use, each on a stream of its own, are freed when both have ended."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.transport.messages import Release
from realhf.worker.parameter_moves import ParameterMoves

LAYOUT, HOME = (Layout(DeviceMesh(first, 1), ParallelStrategy()) for first in (0, 1))


class Stream:
    """Has work to do until it is waited for."""

    def __init__(self) -> None:
        self.is_busy = True

    def synchronize(self) -> None:
        self.is_busy = False


@pytest.mark.parametrize("is_call_last", [False, True])
def test_a_shared_copy_is_freed_when_the_kernels_of_all_that_use_it_have_run(
    monkeypatch: pytest.MonkeyPatch, is_call_last: bool
) -> None:
    of_calls, of_moves = Stream(), Stream()
    busy: list[bool] = []
    copy = SimpleNamespace(residency=SimpleNamespace(free=lambda: busy.append(of_calls.is_busy or of_moves.is_busy)))
    run: Any = SimpleNamespace(
        deadlines=SimpleNamespace(longest_s=1.0),
        spec=SimpleNamespace(verify_reallocations_every=0),
        homes={"actor": HOME},
        plan=SimpleNamespace(calls={}, changes=()),
    )
    models: Any = {("actor", LAYOUT): copy}
    groups: Any = SimpleNamespace(spans_hosts=False)
    moves = ParameterMoves(run, 0, torch.device("cuda", 0), groups, models)
    moves._uses["actor", LAYOUT] = 2  # its own call, and one that takes its parameters from it

    def on(stream: Stream, act: Callable[[], None]) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        act()

    uses = [
        (of_calls, lambda: moves.release(Release(model="actor", layout=LAYOUT))),
        (of_moves, lambda: moves._used("actor", LAYOUT)),
    ]
    for stream, act in reversed(uses) if is_call_last else uses:
        assert busy == []
        on(stream, act)
    assert busy == [False]
    assert not moves._uses
