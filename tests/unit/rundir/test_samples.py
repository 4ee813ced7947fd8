"""Completions for people: what of a short file is read, of a very long one, and of a damaged one."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from realhf.base.files import BadContentError
from realhf.dataflow.plan import ExecutionPlan
from realhf.rundir import samples
from realhf.rundir.lines import append_line
from realhf.rundir.outputs import StepOutputs, read_outputs
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run, RunSpec
from realhf.rundir.samples import Sample, append_samples, read_samples, sample_line, title_of


def sample(step: int, place: int = 0, text: str = "b", split: samples.Split = "train") -> Sample:
    return Sample(step=step, sample=place, split=split, prompt="a", response=text, reward=0.5)


def test_what_was_appended_is_read_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert read_samples(path, []) == []
    append_samples(path, [sample(0, split="evaluation")])
    append_samples(path, [sample(1, 3), sample(1, 8, "c\n\x1b")])
    append_samples(path, [sample(1, split="evaluation/hard"), sample(1, split="evaluation/easy")])
    found = read_samples(path, [])
    titles = ["evaluation after step 0", "step 1", "evaluation/hard after step 1", "evaluation/easy after step 1"]
    assert [title_of(each) for each in found] == titles
    assert found[1].samples == (sample(1, 3), sample(1, 8, "c\n\x1b"))


def test_the_line_is_the_one_of_the_documentation() -> None:
    line = b'{"step": 1, "sample": 17, "split": "train", "prompt": "p", "response": "r", "reward": 1.0}'
    assert sample_line(line) == Sample(step=1, sample=17, split="train", prompt="p", response="r", reward=1.0)
    assert sample_line(line.replace(b"1.0", b"null")).reward is None
    named = line.replace(b"train", b"evaluation/math-500")
    assert sample_line(named).split == "evaluation/math-500"
    for wrong in (line.replace(b"17", b"-1"), line.replace(b"train", b"test"), line[:-1], named.replace(b"-", b"<")):
        with pytest.raises(BadContentError):
            sample_line(wrong)


def test_a_damaged_line_is_told(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    append_samples(path, [sample(1)])
    path.write_bytes(b"\xff\n" + path.read_bytes())
    damaged: list[str] = []
    assert [each.step for each in read_samples(path, damaged)] == [1]
    assert str(path) in damaged[0]


def test_of_a_long_run_the_end_and_a_spread_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "samples.jsonl"
    steps = [[sample(step, place, "x" * 100) for place in (0, 1)] for step in range(1, 20_001)]
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for step in steps for each in step))
    decoded = 0

    def counting(line: bytes) -> Sample:
        nonlocal decoded
        decoded += 1
        return sample_line(line)

    monkeypatch.setattr(samples, "sample_line", counting)
    monkeypatch.setattr(samples, "TAIL_BYTES", 10_000)
    monkeypatch.setattr(samples, "WINDOW_BYTES", 2_000)
    found = read_samples(path, [])
    assert decoded < 400
    assert all(each.samples == tuple(steps[each.step - 1]) for each in found), "no step lacks a sample"
    numbers = [each.step for each in found]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (1, 20_000)
    early = [number for number in numbers if number < 19_000]
    assert len(early) >= samples.PLACES - 1
    assert max(b - a for a, b in itertools.pairwise(early)) < 2_500


def test_a_run_that_goes_on_drops_the_samples_of_later_steps(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    spec = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=1, devices_per_node=1,
        resume_step=2,
    )  # fmt: skip
    (directory.checkpoints / "step-2").mkdir()
    append_samples(directory.samples, [sample(1), sample(2), sample(2, split="evaluation"), sample(3)])
    for step in (1, 2, 3):
        append_line(directory.outputs, StepOutputs(step=step, calls={}))
    prepare(Run(spec, SimpleNamespace(steps=4), ExecutionPlan(num_devices=1, calls={})), directory)
    assert [(each.step, each.split) for each in read_samples(directory.samples, [])] == [
        (1, "train"), (2, "train"), (2, "evaluation"),
    ]  # fmt: skip
    assert read_outputs(directory.outputs, range(9)) == {1: {}, 2: {}}
