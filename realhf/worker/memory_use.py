"""How much memory the models and data of a worker take, measured."""

import contextlib
import re
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class MemoryGauge:
    """Measures the memory of this process on its device, beyond the memory that it held when the gauge was made.

    Made before the models, it leaves out the memory of the program itself (Python, torch, on a GPU CUDA's context),
    which the planner does not count either. On a GPU it measures torch's allocations. On the CPU it measures the
    resident set without the pages of files: those are the program's too, and come when code first runs. Memory that is
    freed stays with the process (`realhf.worker.allocator`), so later calls show the memory of earlier ones.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._program_bytes = 0
        self.take_peak()
        if device.type != "cuda":
            self._program_bytes = _resident_bytes("VmRSS") - _resident_bytes("RssFile")

    def take_peak(self) -> int:
        """The most bytes held at once since the last time this was asked; 0 where the system does not tell.

        Where the system tells but cannot start anew (some containers), since the start of the process.
        """
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        peak = _resident_bytes("VmHWM") - _resident_bytes("RssFile")
        with contextlib.suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")  # proc(5): sets the peak to the resident bytes of now
        return max(0, peak - self._program_bytes)


def _resident_bytes(field: str) -> int:
    """Bytes of a field of /proc/self/status: VmRSS (resident now), RssFile (resident pages of files) or VmHWM (peak); 0
    on systems without Linux's /proc."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
