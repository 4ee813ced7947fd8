"""Stand-ins for CUDA graphs, on the CPU: what generation asks of them, without a device."""

from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx

Compute = Callable[[], None]


class EagerCapture:
    """Computes again what was to be recorded; counts the recordings and the replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, compute: Compute) -> Compute:
        self.captures += 1
        again = self.record(compute)

        def replay() -> None:
            self.replays += 1
            again()

        return replay

    def record(self, compute: Compute) -> Compute:
        return compute


class TracedCapture(EagerCapture):
    """Records the operators, with the tensors they take, and replays just these.

    As with a CUDA graph, what Python decided stays as it was, and a value that is read on the host is an error.
    """

    def record(self, compute: Compute) -> Compute:
        def traced() -> torch.Tensor:
            compute()
            return torch.zeros(())

        graph = make_fx(traced)()
        return lambda: graph()
