"""staging: optimizer states in pinned host memory pass through the device for a step, two chunks at a time."""

import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import realhf.engine.train.optimizer as optimizer_module
from realhf.api.experiment import OptimizerConfig
from realhf.engine.train.optimizer import FlatAdamW
from tests.simulated.programs.common import DEVICE, end, say

CHUNK = 2**18  # elements
optimizer_module.OPTIMIZER_ELEMENTS = CHUNK  # in place of GiB
COUNT = 9 * CHUNK // 2  # five chunks


class Sequence(TorchDispatchMode):
    """Notes on which stream the host and the device exchange values, and on which states are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        if func is torch.ops.aten._fused_adamw_.default:
            self.steps.append(f"update on {names.setdefault(stream, len(names))}")
        elif func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            what = "come" if args[0].is_cuda else "go"
            self.steps.append(f"{what} on {names.setdefault(stream, len(names))}")
        return func(*args, **(kwargs or {}))


names = {torch.cuda.current_stream().cuda_stream: 0}
parameters = torch.empty(COUNT, dtype=torch.bfloat16, device=DEVICE)
gradients = torch.empty(COUNT, device=DEVICE)
before = torch.cuda.memory_allocated()
optimizer = FlatAdamW([parameters], OptimizerConfig(offload_states=True), 10)
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as waits, Sequence() as sequence:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        optimizer.step([gradients], 0.5)
        torch.cuda.set_sync_debug_mode("default")
    say(f"bytes by those of a chunk's states: {(torch.cuda.max_memory_allocated() - before) / (12 * CHUNK):.4f}")
    say(f"bytes left behind: {torch.cuda.memory_allocated() - before}")
    say(f"waits of the host: {sum('called a synchronizing' in str(wait.message) for wait in waits)}")
    say(f"sequence: {', '.join(sequence.steps)}")
end()
