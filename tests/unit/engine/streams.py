"""Stand-ins for CUDA streams and events, on the CPU: queues that run later, in any order that the waits allow."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
QUEUED = (aten.copy_.default, aten.fill_.Scalar, aten._fused_adamw_.default)
# From the streams that can go on to the one that does.
Order = Callable[[list["Stream"]], "Stream"]


class Event:
    """`time`: when its stream reaches it; None before."""

    def __init__(self) -> None:
        self.time: float | None = None


class Stream:
    """What it has to do: operators, events to record, events to wait for. `clock`: when it will have done all so far,
    if each operator takes its `seconds`."""

    def __init__(self, streams: "Streams", number: int):
        self._streams, self.number = streams, number
        self.queue: deque[tuple[str, Any]] = deque()
        self.clock = 0.0

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(("record", event))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(("wait", event))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._streams.run(lambda: bool(self.queue))

    @property
    def can_go_on(self) -> bool:
        kind, what = self.queue[0] if self.queue else ("wait", Event())
        return kind != "wait" or what.time is not None

    def go_on(self, seconds: Callable[[Any, tuple[Any, ...]], float]) -> None:
        kind, what = self.queue.popleft()
        if kind == "record":
            what.time = self.clock
        elif kind == "wait":
            self.clock = max(self.clock, what.time)
        else:
            operator, args, kwargs = what
            operator(*args, **kwargs)
            self.clock += seconds(operator, args)


class Streams(TorchDispatchMode):
    """Within it operators that write to tensors are queued on the current stream; what makes tensors runs at once.

    A queue goes on when something waits for it on the host, or at the end; `order` chooses among those that can.
    """

    def __init__(self, order: Order, seconds: Callable[[Any, tuple[Any, ...]], float] = lambda *_: 0.0):
        super().__init__()
        self._order, self._seconds, self._is_running = order, seconds, False
        self.all: list[Stream] = []
        self.current = self.stream()

    def stream(self, device: object = None) -> Stream:
        self.all.append(Stream(self, len(self.all)))
        return self.all[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, is_waited_for: Callable[[], bool]) -> None:
        self._is_running = True
        while is_waited_for():
            able = [stream for stream in self.all if stream.queue and stream.can_go_on]
            assert able, "streams wait for each other"
            self._order(able).go_on(self._seconds)
        self._is_running = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_running or func not in QUEUED:
            return func(*args, **(kwargs or {}))
        self.current.queue.append(("work", (func, args, kwargs or {})))
        return None if func is aten._fused_adamw_.default else args[0]

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self.run(lambda: any(stream.queue for stream in self.all))
        super().__exit__(*exception)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes the place of torch's streams; memory of a GPU is that of the CPU."""
        empty = torch.empty

        def used_before(*size: int, device: object = None, **more: Any) -> torch.Tensor:
            """The current stream may have to work on memory that the allocator gives anew."""
            return empty(*size, **more).fill_(float("nan"))

        monkeypatch.setattr(torch, "empty", used_before)
        monkeypatch.setattr(torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
