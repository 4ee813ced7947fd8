"""The actor of `fault_job.py`."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from fault_job import BreakableGenerate, BreakableUpdate

from realhf.algorithms.script.rollouts import GenerateInterface
from realhf.algorithms.script.update import UpdateInterface
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model
from realhf.launch.devices import DEVICE_VARIABLE


class BreakableGenerateInterface(GenerateInterface):
    """See `BreakableGenerate`."""

    def __init__(self, config: BreakableGenerate):
        super().__init__(config)
        self._fault = _Fault(config.fault_file)

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        self._fault.break_if_asked(context)
        return super().generate(model, batch, context)


class BreakableUpdateInterface(UpdateInterface):
    """See `BreakableUpdate`."""

    def __init__(self, config: BreakableUpdate):
        super().__init__(config)
        self._fault = _Fault(config.fault_file)

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        self._fault.break_if_asked(context)
        return super().train_step(model, mini_batches, context)


class _Fault:
    """What a file asks for; empty: nothing."""

    def __init__(self, fault_file: str):
        self._fault_file = Path(fault_file) if fault_file else None

    def break_if_asked(self, context: Context) -> None:
        while (wanted := self._wanted()) == f"hold {context.step}":
            time.sleep(0.01)
        if wanted == f"step {context.step}":
            raise RuntimeError("broken on purpose")
        match wanted.split():
            case ["device", device, "from", "step", step]:
                if os.environ[DEVICE_VARIABLE].endswith(f":{device}") and context.step >= int(step):
                    os.kill(os.getpid(), signal.SIGKILL)
            case ["step", step, "waits", "for", word, "in", file] if context.step >= int(step):
                while word not in Path(file).read_text():
                    time.sleep(0.05)
        if self._fault_file and wanted == f"pid {os.getpid()}":
            self._fault_file.unlink()
            raise RuntimeError("broken on purpose")

    def _wanted(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._fault_file.read_text() if self._fault_file else ""
        return ""
