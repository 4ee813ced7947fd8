"""`realhf verify`: a step executed once more is bit by bit what the run recorded, and what is not is named."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from realhf import cli
from realhf.base.errors import UserError
from realhf.cli.verify import told
from realhf.dataflow.plan import save_plan
from realhf.lifecycle.verify import Verdict, VerifyRequest, verify
from realhf.rundir.lines import read_lines
from realhf.rundir.outputs import SAMPLE
from realhf.worker import rollouts
from tests.e2e.forked import ForkedLauncher, quickly_finished
from tests.e2e.runs import ROOT, FinishedRun, realhf
from tests.e2e.test_weights import BOTH, JOB, PIPELINE, SECOND, TENSOR, plan

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a run with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("verify")
    save_plan(plan(TENSOR, SECOND, BOTH), folder / "plan.json")
    words = ("--plan", folder / "plan.json", "--checkpoint-every", "2", "--record", "seq", "logprob")
    return quickly_finished(folder / "run", JOB, *words).path


@pytest.fixture
def run(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    shutil.copytree(recorded, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def verdict(run: Path, step: int, **more: Any) -> Verdict:
    try:
        return verify(VerifyRequest(run_dir=run, step=step, launcher=ForkedLauncher, **more), lambda _: None)
    finally:
        assert not list(run.glob("verify-*")), "nothing is left"


def changed(path: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a line of a file of JSON lines, counted from 0."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[number])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_step_is_the_same_bit_by_bit_from_its_checkpoint(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".lock"}
    found = verdict(run, 4)
    assert (found.first, found.compared, list(found.found), found.largest) == (3, 2, [], None)
    assert told(found, VerifyRequest(run_dir=run, step=4)) == ["steps 3 to 4: nothing differs"]
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert after == before, "the run is as it was"


def test_the_first_thing_that_differs_is_named(run: Path) -> None:
    """A digest, a text and a statistic of the run are others than what its step makes: one after the other."""
    changed(run / "metrics.jsonl", 2, lambda line: line.update(loss=line["loss"] + 0.25))
    found = verdict(run, 3)
    assert (found.first, found.compared) == (3, 1)
    assert [(each.step, each.what) for each in found.found] == [(3, "the statistic loss of actor_train_step")]
    assert found.largest is not None
    assert found.largest.size == pytest.approx(0.25 / max(1.0, found.found[0].recorded))
    text = told(found, VerifyRequest(run_dir=run, step=3))[0]
    assert text.startswith(f"step 3, the statistic loss of actor_train_step: {found.found[0].recorded} in the run, ")

    changed(run / "metrics.jsonl", 2, lambda line: line["calls"]["actor_generate"].update(weights="0" * 16))
    found = verdict(run, 3)
    whats = ["the weights that were used by actor_generate", "the statistic loss of actor_train_step"]
    assert [each.what for each in found.found] == whats

    def swap(line: dict[str, Any]) -> None:
        """Sample 5 of what the reference made is noted as sample 6."""
        key = line["calls"]["reference_inference"]["keys"]["ref_logprob"]
        table = np.frombuffer(base64.b64decode(key["samples"]), SAMPLE).copy()
        table[[5, 6]] = table[[6, 5]]
        key["samples"] = base64.b64encode(table.tobytes()).decode()

    changed(run / "outputs.jsonl", 2, swap)
    found = verdict(run, 3)
    swapped = "ref_logprob of sample 5 (and of 1 more), made by reference_inference"
    assert [each.what for each in found.found] == [whats[0], swapped, whats[1]]


def test_recorded_tokens_and_numbers_are_compared_one_by_one(run: Path, tmp_path: Path) -> None:
    """The place of a token that differs, and by how much a log-probability does; under another plan too."""
    path = next((run / "rollouts/step-1").glob("actor_generate-*.safetensors"))
    tensors = load_file(path)
    tensors["seq/3"][7] ^= 1
    tensors["logprob/4"][2] -= 0.5
    save_file(tensors, path)

    def forget(line: dict[str, Any]) -> None:
        """The digests are those of the changed values."""
        for key, sample in (("seq", 3), ("logprob", 4)):
            made = line["calls"]["actor_generate"]["keys"][key]
            table = np.frombuffer(base64.b64decode(made["samples"]), SAMPLE).copy()
            table["digest"][sample] ^= 1
            made["samples"] = base64.b64encode(table.tobytes()).decode()

    changed(run / "outputs.jsonl", 0, forget)
    save_plan(plan(PIPELINE, BOTH, TENSOR), tmp_path / "other.json")
    for more in ({}, {"plan": tmp_path / "other.json", "tolerance": 1e-4}):
        found = verdict(run, 1, **more)
        assert [each.what for each in found.found if each.call == "actor_generate"] == [
            "logprob of sample 4, made by actor_generate, at [2]",
            "seq of sample 3, made by actor_generate, at [7]",
        ]
        assert found.found[0].recorded - found.found[0].again == pytest.approx(-0.5, abs=1e-4)
        assert found.found[1].recorded == found.found[1].again ^ 1


def test_under_another_plan_numbers_agree_within_a_tolerance(run: Path, tmp_path: Path) -> None:
    """From the beginning, since there is no checkpoint before the first two steps."""
    save_plan(plan(PIPELINE, BOTH, TENSOR), tmp_path / "other.json")
    found = verdict(run, 2, plan=tmp_path / "other.json", tolerance=1e-4)
    assert (found.first, found.compared, list(found.found)) == (1, 2, [])
    request = VerifyRequest(run_dir=run, step=2, tolerance=1e-4)
    assert told(found, request)[0] == "steps 1 to 2: nothing differs by more than 0.0001"
    exact = verdict(run, 2, num_workers=1)
    assert exact.found[0].step in (1, 2), "sums are rounded in another order"
    assert exact.largest is None or (exact.largest.size or 0.0) < 1e-4


def test_one_call_alone_and_its_tensors(run: Path, tmp_path: Path) -> None:
    """What it read and made, of both sides where the run has recorded it."""
    changed(run / "metrics.jsonl", 2, lambda line: line["calls"]["actor_generate"].update(weights="0" * 16))
    changed(run / "metrics.jsonl", 2, lambda line: line["calls"]["reference_inference"].update(weights="1" * 16))
    found = verdict(run, 3, call="reference_inference", dump=tmp_path / "dump")
    assert [each.what for each in found.found] == ["the weights that were used by reference_inference"]
    files = sorted(str(path.relative_to(tmp_path / "dump")) for path in (tmp_path / "dump").rglob("*.safetensors"))
    assert files == [
        "now/ref_logprob.safetensors",
        "now/seq.safetensors",
        "prompt.safetensors",
        "run/seq.safetensors",
    ]
    for folder in ("run", "now"):
        seq = load_file(tmp_path / f"dump/{folder}/seq.safetensors")
        recorded = rollouts.read(run / "rollouts", 2, "actor_generate", "seq")
        assert seq["ids"].tolist() == [*range(8)]
        assert seq["lengths"].tolist() == [len(recorded[i]) for i in range(8)]
        assert torch.equal(seq["values"], torch.cat([recorded[i] for i in range(8)]))
    prompt = load_file(tmp_path / "dump/prompt.safetensors")
    assert prompt["values"][: int(prompt["lengths"][0])].tolist() == recorded[0][: int(prompt["lengths"][0])].tolist()
    assert len(load_file(tmp_path / "dump/now/ref_logprob.safetensors")["values"]) == int(
        seq["lengths"].sum() - prompt["lengths"].sum()
    )


def test_what_cannot_be_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        UserError, match="--call actor_score: the run has no such call; choose from actor_generate, ref"
    ):
        verdict(run, 3, call="actor_score")
    for words, said in (
        (["--dump", "out"], "--dump out writes what one call reads and makes; name it with --call"),
        (["--dump", str(run), "--call", "a"], f"--dump {run} exists and is not empty; give a new folder"),
    ):
        assert cli.main(["verify", str(run), "--step", "3", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--step 9: the run in .* has recorded 1 to 4; give one of these"):
        verdict(run, 9)
    changed(run / "metrics.jsonl", 3, lambda line: line.update(plan="0" * 12))
    with pytest.raises(UserError, match="has no plan 000000000000, under which step 4 was made; give one with --plan"):
        verdict(run, 4)
    assert len(read_lines(run / "metrics.jsonl", json.loads).values) == 4


def test_a_step_has_the_learning_rate_of_its_time(run: Path) -> None:
    """The run went on with more steps: rates fall more slowly from then on."""
    quickly_finished(run, JOB, "--resume", "--steps", "6")
    assert [line["of_steps"] for line in FinishedRun(run).metrics] == [4, 4, 4, 4, 6, 6]
    for step, first in ((4, 3), (5, 5)):
        found = verdict(run, step)
        assert (found.first, [*found.found]) == (first, [])
    shutil.rmtree(run / "checkpoints/step-4")
    said = "--step 5: learning rates follow the number of steps, which was 4 in step 4 and is 6 in this one, and there "
    with pytest.raises(UserError, match=f"{said}is no good checkpoint in between; give 4 or less"):
        verdict(run, 5)


@pytest.mark.slow
def test_the_command(run: Path) -> None:
    done = realhf("verify", run, "--step", "4")
    assert (done.returncode, done.stdout.strip()) == (0, "steps 3 to 4: nothing differs"), done.stderr
    assert "steps 3 to 4, from checkpoints/step-2, on 2 workers, plan " in done.stderr
    changed(run / "metrics.jsonl", 3, lambda line: line.update(loss=line["loss"] + 0.25))
    done = realhf("verify", run, "--step", "4")
    assert done.returncode == 1
    assert done.stdout.startswith("step 4, the statistic loss of actor_train_step: ")
