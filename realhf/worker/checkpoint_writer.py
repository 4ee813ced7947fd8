"""Writes a worker's part of a checkpoint from a thread of its own, while the worker goes on."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from realhf.models.checkpoint import write_snapshot
from realhf.transport.clock import now_s
from realhf.transport.messages import CheckpointWritten, Span

Snapshots = Mapping[str, Mapping[str, Tensor]]  # by model, then as `realhf.models.checkpoint.snapshot` makes them


class CheckpointWriter:
    """Writes snapshots, one checkpoint at a time: the master asks for the next one when it has heard of the last.

    Args:
        report: called from the thread when all is on the disk, or could not be written.
    """

    def __init__(self, rank: int, report: Callable[[CheckpointWritten], None]):
        self._rank, self._report = rank, report
        self._thread: threading.Thread | None = None

    def start(self, directory: str, snapshots: Snapshots) -> None:
        """Returns at once; the snapshots must not change any more."""
        assert self._thread is None or not self._thread.is_alive(), "two checkpoints at a time"
        # A process that has to end does not wait for it: unfinished files have a temporary name and are removed later.
        self._thread = threading.Thread(target=self._write, args=(directory, snapshots), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, directory: str, snapshots: Snapshots) -> None:
        start, error = now_s(), ""
        try:
            for model, content in snapshots.items():
                write_snapshot(Path(directory) / model, self._rank, content, hashed=True)
        except Exception as caught:  # whatever it is, the master must hear of it, or it would wait
            error = f"{type(caught).__name__}: {caught}"
        span = Span("writing", f"writing {Path(directory).name}", start, now_s())
        self._report(CheckpointWritten(directory=directory, span=span, error=error))
