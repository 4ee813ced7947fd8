"""Stand-ins for CUDA graphs, on the CPU: what generation asks of them, without a device."""

from collections.abc import Callable

import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import has_side_effect

Compute = Callable[[], None]

# They write into their arguments, which their schemas do not say: a trace would leave them out as unused.
COLLECTIVES = (torch.ops.c10d.allreduce_.default, torch.ops.c10d._allgather_base_.default)
for collective in COLLECTIVES:
    has_side_effect(collective)


class _InOrder(Interpreter):
    """What comes behind a collective is behind it, as on a stream."""

    def call_function(self, target, args, kwargs):
        result = super().call_function(target, args, kwargs)
        if target in COLLECTIVES:
            result[1].wait()
        return result


class EagerCapture:
    """Computes again what was to be recorded; counts the runs before, the recordings and the replays."""

    def __init__(self) -> None:
        self.runs = self.captures = self.replays = 0

    def run(self, compute: Compute) -> None:
        self.runs += 1
        compute()

    def record(self, compute: Compute, size: int = 0) -> Compute:
        self.captures += 1
        again = self.recorded(compute)

        def replay() -> None:
            self.replays += 1
            again()

        return replay

    def recorded(self, compute: Compute) -> Compute:
        return compute


class TracedCapture(EagerCapture):
    """Records the operators, with the tensors they take, and replays just these.

    As with a CUDA graph, what Python decided stays as it was, and a value that is read on the host is an error.
    """

    def recorded(self, compute: Compute) -> Compute:
        def traced() -> torch.Tensor:
            compute()
            return torch.zeros(())

        graph = make_fx(traced)()
        return lambda: _InOrder(graph).run()
