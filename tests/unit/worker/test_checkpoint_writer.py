"""A worker's part of a checkpoint is written beside its work, and every end of that is reported."""

import queue
from pathlib import Path

import torch
from safetensors.torch import load_file

from realhf.geometry.boxes import Box
from realhf.models.checkpoint import snapshot
from realhf.models.checkpoint_index import digest_file, staging_directory
from realhf.transport.messages import CheckpointWritten
from realhf.worker.checkpoint_writer import CheckpointWriter

DEADLINE_S = 60.0


def test_what_was_copied_is_written_whatever_training_does_meanwhile(tmp_path: Path) -> None:
    reports: queue.Queue[CheckpointWritten] = queue.Queue()
    parameter = torch.arange(6.0).view(2, 3)
    pieces = {"actor": snapshot([(Box("weight", (0, 0), (2, 3)), parameter)]), "critic": snapshot([])}
    parameter.zero_()
    CheckpointWriter(3, reports.put).start(str(tmp_path / ".step-4.part"), pieces)
    report = reports.get(timeout=DEADLINE_S)
    assert (report.directory, report.error) == (str(tmp_path / ".step-4.part"), "")
    assert (report.span.phase, report.span.name) == ("writing", "writing .step-4.part")
    staging = staging_directory(tmp_path / ".step-4.part/actor")
    found = load_file(staging / "boxes-3.safetensors")
    assert torch.equal(found["weight"], torch.arange(6.0).view(2, 3))
    assert (staging / digest_file(3)).is_file()


def test_only_what_will_change_is_copied() -> None:
    parameter = torch.arange(6.0)
    pieces = [(Box("weight", (0,), (6,)), parameter)]
    assert snapshot(pieces, copied=False)["weight"].data_ptr() == parameter.data_ptr()
    assert snapshot(pieces)["weight"].data_ptr() != parameter.data_ptr()


def test_a_disk_that_takes_nothing_is_reported(tmp_path: Path) -> None:
    reports: queue.Queue[CheckpointWritten] = queue.Queue()
    (tmp_path / "part").write_text("no directory")
    writer = CheckpointWriter(0, reports.put)
    pieces = {"actor": snapshot([(Box("weight", (0,), (2,)), torch.zeros(2))])}
    writer.start(str(tmp_path / "part"), pieces)
    error = reports.get(timeout=DEADLINE_S).error
    assert error.startswith("NotADirectoryError: ")
    assert str(tmp_path / "part") in error
