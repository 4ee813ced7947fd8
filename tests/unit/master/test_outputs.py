"""What calls made is recorded alike, however its samples were divided over workers."""

import hashlib
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from realhf.master.loop import CallRecord
from realhf.master.outputs import step_outputs
from realhf.master.state import Node
from realhf.rundir.lines import append_line
from realhf.rundir.outputs import KeyOutputs, StepOutputs, outputs_line, read_outputs
from realhf.transport.messages import Reply, Span
from realhf.worker.store import describe

VALUES = [torch.arange(n + 1, dtype=torch.float64) / 7 for n in range(6)]
SPAN = Span("compute", "", 0.0, 1.0)


def made(*divided: list[int], values: list[torch.Tensor] = VALUES) -> StepOutputs:
    """Of a call whose workers have made these samples, each in this order."""
    replies = {
        worker: Reply(
            request_id=0,
            span=SPAN,
            outputs={"p": describe(ids, [values[i] for i in ids])} if ids else {},
            stats={"loss": (1.0, 1.0)} if ids else {},
        )
        for worker, ids in enumerate(divided)
    }
    return step_outputs(3, [CallRecord(Node(2, "a_inference"), "a", replies), CallRecord(Node(2, "load a"), "a")])


def test_the_division_over_workers_does_not_count() -> None:
    whole = made([0, 1, 2, 3, 4, 5])
    assert whole == made([5, 0, 2], [], [4, 3, 1]) == made([0, 1, 2, 3, 4, 5], [3, 4])
    assert [*whole.calls] == ["a_inference"], "what is no call made nothing"
    assert whole.calls["a_inference"].statistics == ("loss",)
    table = whole.calls["a_inference"].keys["p"].table()
    assert table["length"].tolist() == [1, 2, 3, 4, 5, 6]
    digest = hashlib.blake2b(VALUES[2].numpy().tobytes(), digest_size=8).digest()
    assert table["digest"][2] == int.from_bytes(digest[:4], "little")


@pytest.mark.parametrize("place", [(0, 0), (5, 5), (3, 1)])
def test_one_bit_and_two_samples_that_changed_places_are_told(place: tuple[int, int]) -> None:
    sample, at = place
    changed = [value.clone() for value in VALUES]
    changed[sample].view(torch.int64)[at] ^= 1
    keys = [each.calls["a_inference"].keys["p"] for each in (made([*range(6)]), made([*range(6)], values=changed))]
    assert keys[0].digest != keys[1].digest
    assert (keys[0].table() != keys[1].table()).nonzero()[0].tolist() == [sample]
    other = made([*range(6)], values=[*VALUES[:4], VALUES[5], VALUES[4]]).calls["a_inference"].keys["p"]
    assert other.digest != keys[0].digest


def test_equal_bits_count_however_they_lie() -> None:
    """Of transposed values, and of a dtype that NumPy lacks."""
    value = torch.arange(6.0).view(2, 3)
    assert describe([0], [value.t().contiguous().t()]) == describe([0], [value])
    assert len(describe([0], [torch.ones(3, dtype=torch.bfloat16)]).digests) == 8


def test_lines_are_read_back(tmp_path: Path) -> None:
    first = made([*range(6)])
    path = tmp_path / "outputs.jsonl"
    for step in (3, 4, 5):
        append_line(path, replace(first, step=step))
    path.open("ab").write(
        b'{"step": 6, "calls": {"a": {"keys": {"p": {"dtype": "int64", "digest": "", "samples": "AAA="}}}}}\n'
    )
    assert read_outputs(path, range(4, 9)) == {4: first.calls, 5: first.calls}
    assert outputs_line(path.read_bytes().splitlines()[0]) == first
    with pytest.raises(ValueError, match="the samples have 3 bytes, must be a multiple of 8"):
        KeyOutputs(dtype="int64", digest="", samples=b"abc")
