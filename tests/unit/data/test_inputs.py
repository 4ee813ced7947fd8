"""What a run reads is noted when it begins, and compared at every start."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.base import digest
from realhf.base.digest import content_digest, known_digest
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset
from realhf.data.inputs import InputFile, check_inputs, inputs_of, keep_inputs
from realhf.data.merged import MergedDataset
from realhf.geometry.parameters import decoder_parameters
from realhf.rundir.paths import RunDirectory
from tests.unit.checkpoints import save_model
from tests.unit.launch.saved_runs import MODEL


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_model(folder, MODEL, {spec.name: torch.ones(spec.shape) for spec in decoder_parameters(MODEL)})
    return folder


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Any:
    """What of a run is asked: an actor that is trained, a reference that is not, a rule, and rollouts of five steps."""
    dataset = PromptDataset(path=str(tmp_path / "data/*.jsonl"), tokenizer=str(data_of(tmp_path / "data")))
    held_out = PromptDataset(path=str(data_of(tmp_path / "held out") / "a.jsonl"), tokenizer=dataset.tokenizer)
    for name in ("actor", "reference"):
        shutil.copytree(checkpoint, tmp_path / name)
    (tmp_path / "rule.py").write_text("def right(prompt, response): return 1.0\n")
    for step in range(1, 6):
        folder = tmp_path / f"rollouts/step-{step}"
        folder.mkdir(parents=True)
        (folder / "actor_generate-0.safetensors").write_bytes(bytes([step] * 99))
    rule = SimpleNamespace(name="score", interface_impl=SimpleNamespace(read_files=(str(tmp_path / "rule.py"),)))
    setups = {
        "actor": ModelSetup(checkpoint=str(tmp_path / "actor"), optimizer=OptimizerConfig()),
        "reference": ModelSetup(checkpoint=str(tmp_path / "reference")),
    }
    return SimpleNamespace(
        experiment=SimpleNamespace(
            dataset=dataset,
            steps=5,
            setups=setups,
            evaluations={"evaluation": SimpleNamespace(dataset=held_out)},
            graphs={"train": SimpleNamespace(calls={"score": rule})},
        ),
        spec=SimpleNamespace(resume_step=0, replay=str(tmp_path / "rollouts")),
        changing_models=["actor"],
    )


def data_of(folder: Path) -> Path:
    """Two files of rows, and a tokenizer beside them."""
    folder.mkdir()
    sort_task.make_tokenizer().save(str(folder / "tokenizer.json"))
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": name * n}) + "\n" for n in (1, 2, 3)))
    return folder


def edit(path: Path) -> None:
    """Changes one byte, and neither the size nor the time."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_run_goes_on_with_the_inputs_it_began_with(run: Any, directory: RunDirectory) -> None:
    keep_inputs(run, directory)
    for run.spec.resume_step in (0, 3, 5):
        check_inputs(run, directory)


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "what", "how"),
    [
        (lambda at: edit(at / "data/b.jsonl"), "data set", r"data/b\.jsonl has other content \(still \d+ bytes\);"),
        (lambda at: (at / "data/b.jsonl").write_text('{"prompt": "c"}\n'), "data set", r"b\.jsonl .* \(16 bytes, not"),
        (lambda at: (at / "data/b.jsonl").unlink(), "data set", r"data/b\.jsonl is gone;"),
        (lambda at: (at / "data/c.jsonl").write_text('{"prompt": "c"}\n'), "data set", r"data/c\.jsonl is new;"),
        (lambda at: edit(at / "held out/a.jsonl"), "evaluation's data set", r"held out/a\.jsonl has other"),
        (lambda at: edit(at / "data/tokenizer.json"), "tokenizer of the data set", r"tokenizer\.json has other"),
        (
            lambda at: (at / "data/generation_config.json").write_text("{}"),
            "tokenizer of the data set",
            r"generation_config\.json is new",
        ),
        (lambda at: edit(at / "rule.py"), "code of score", r"rule\.py has other content"),
        (
            lambda at: edit(at / "reference/boxes-0.safetensors"),
            "checkpoint of model reference",
            r"reference/boxes-0\.safetensors has other content",
        ),
        (
            lambda at: edit(at / "rollouts/step-4/actor_generate-0.safetensors"),
            "replayed step 4",
            r"step-4/actor_generate-0\.safetensors has other content",
        ),
    ],
)
@pytest.mark.parametrize("resume_step", [0, 3])
def test_what_has_changed_is_named_with_the_remedy(
    change: Change, what: str, how: str, resume_step: int, run: Any, directory: RunDirectory, tmp_path: Path
) -> None:
    keep_inputs(run, directory)
    change(tmp_path)
    run.spec.resume_step = resume_step
    with pytest.raises(UserError, match=rf"^the {what} of the run in .*/run has changed since the run began: .*{how}"):
        check_inputs(run, directory)
    with pytest.raises(UserError, match=r"put it back, or start a new run .*\(--resume --accept-changed-inputs"):
        check_inputs(run, directory)


def test_what_is_not_read_again_may_change_and_go(run: Any, directory: RunDirectory, tmp_path: Path) -> None:
    """The trained model comes from the run's own checkpoint; the first three steps are made."""
    keep_inputs(run, directory)
    shutil.rmtree(tmp_path / "actor")
    for step in (1, 2, 3):
        edit(tmp_path / f"rollouts/step-{step}/actor_generate-0.safetensors")
    run.spec.resume_step = 3
    check_inputs(run, directory)
    run.spec.resume_step = 2
    with pytest.raises(UserError, match="the replayed step 3 of the run"):
        check_inputs(run, directory)
    run.spec.resume_step = 0
    with pytest.raises(UserError, match="actor does not exist"):
        check_inputs(run, directory)


def test_changes_that_are_accepted_are_those_of_the_run_from_then_on(
    run: Any, directory: RunDirectory, tmp_path: Path
) -> None:
    keep_inputs(run, directory)
    began = directory.inputs.read_bytes()
    edit(tmp_path / "data/a.jsonl")
    keep_inputs(run, directory)
    assert directory.inputs.read_bytes() == began, "what a run began with stays"
    keep_inputs(run, directory, anew=True)
    check_inputs(run, directory)
    edit(tmp_path / "data/a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl has other content"):
        check_inputs(run, directory)


def test_more_steps_bring_more_rollouts_and_the_first_are_still_compared(
    run: Any, directory: RunDirectory, tmp_path: Path
) -> None:
    run.experiment.steps = 4
    keep_inputs(run, directory)
    run.experiment.steps, run.spec.resume_step = 5, 2
    check_inputs(run, directory)
    keep_inputs(run, directory)
    for step in (4, 5):
        edit(tmp_path / f"rollouts/step-{step}/actor_generate-0.safetensors")
        with pytest.raises(UserError, match=f"the replayed step {step} of"):
            check_inputs(run, directory)
        edit(tmp_path / f"rollouts/step-{step}/actor_generate-0.safetensors")


def test_a_run_of_an_earlier_version_goes_on(run: Any, directory: RunDirectory, tmp_path: Path) -> None:
    edit(tmp_path / "data/a.jsonl")
    check_inputs(run, directory)
    keep_inputs(run, directory)
    check_inputs(run, directory)


def test_a_run_of_an_earlier_version_goes_on_without_the_files_it_began_with(
    run: Any, directory: RunDirectory, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "actor")
    check_inputs(run, directory)


def test_what_a_run_reads_by_what_it_is_for(run: Any, directory: RunDirectory, tmp_path: Path) -> None:
    found = inputs_of(run)
    assert list(found) == [
        "data set",
        "tokenizer of the data set",
        "evaluation's data set",
        "tokenizer of the evaluation's data set",
        "code of score",
        "checkpoint of model actor",
        "checkpoint of model reference",
        *(f"replayed step {step}" for step in range(1, 6)),
    ]
    rule = tmp_path / "rule.py"
    assert found["code of score"] == {
        str(rule): InputFile(size_bytes=rule.stat().st_size, digest=hashlib.sha256(rule.read_bytes()).hexdigest())
    }
    assert list(found["data set"]) == [f"{tmp_path}/data/a.jsonl", f"{tmp_path}/data/b.jsonl"]
    assert list(found["replayed step 2"]) == [f"{tmp_path}/rollouts/step-2/actor_generate-0.safetensors"]
    run.experiment.evaluations = {}
    run.spec.replay = ""
    small = [name for name in found if "evaluation" not in name and "replayed" not in name]
    assert list(inputs_of(run)) == small
    run.spec.resume_step = 1
    assert list(inputs_of(run)) == [name for name in small if "actor" not in name]
    score = run.experiment.graphs["train"].calls["score"]
    run.experiment.graphs["evaluation"] = SimpleNamespace(calls={"judge": score})
    score.name = "judge"
    assert "code of judge" in inputs_of(run)
    score.interface_impl.read_files = ()
    assert "code of judge" not in inputs_of(run)


def test_the_note_of_what_a_run_reads(run: Any, directory: RunDirectory) -> None:
    keep_inputs(run, directory)
    text = directory.inputs.read_text()
    content = json.loads(text)
    assert content["format"] == "inputs/1"
    assert text == json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    assert content["files"]["code of score"].popitem()[1].keys() == {"size_bytes", "digest"}


def test_a_file_that_cannot_be_read_is_named(run: Any, directory: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "held out/a.jsonl").unlink()
    says = f"{tmp_path}/held out/a.jsonl cannot be read (No such file or directory); put it back"
    for call in (keep_inputs, check_inputs):
        directory.inputs.unlink(missing_ok=True)
        if call is check_inputs:
            directory.inputs.write_text('{"files": {"data set": {}}, "format": "inputs/1"}')
        with pytest.raises(UserError, match=f"^{re.escape(says)}$"):
            call(run, directory)


def test_all_parts_of_a_data_set_are_compared(run: Any, directory: RunDirectory, tmp_path: Path) -> None:
    answered = PromptDataset(
        path=str(tmp_path / "held out/b.jsonl"), tokenizer=run.experiment.dataset.tokenizer, with_answer=True
    )
    merged = object.__new__(MergedDataset)
    object.__setattr__(merged, "parts", (run.experiment.dataset, answered))
    run.experiment.dataset = merged
    keep_inputs(run, directory)
    for name in ("data/a", "held out/b"):
        edit(tmp_path / f"{name}.jsonl")
        with pytest.raises(UserError, match=rf"the data set of the run .*{name}\.jsonl has other content"):
            check_inputs(run, directory)
        edit(tmp_path / f"{name}.jsonl")


def test_many_changes_are_counted(run: Any, directory: RunDirectory, tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"data/c{i}.jsonl").write_text("{}\n")
    keep_inputs(run, directory)
    edit(tmp_path / "data/c3.jsonl")
    with pytest.raises(UserError, match=r"since the run began: \S*c3\.jsonl has other content \([^)]*\); put it back"):
        check_inputs(run, directory)
    for i in (0, 1, 2, 4):
        edit(tmp_path / f"data/c{i}.jsonl")
    with pytest.raises(UserError, match=r"c0\.jsonl .*c1\.jsonl .*c2\.jsonl [^,]*, and 2 more; put it back"):
        check_inputs(run, directory)


# --- Digests.


def test_a_digest_is_of_bytes_and_their_order(tmp_path: Path) -> None:
    contents = {"a": b"one", "b": b"two", "same": b"one", "both": b"onetwo"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    a, b, same, both = (tmp_path / name for name in contents)
    assert known_digest(a) == known_digest(same) != known_digest(b)
    assert len({content_digest(files) for files in ([a, b], [b, a], [both], [a], [a, b, b])}) == 5
    assert content_digest([a, b]) == content_digest([same, b])


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "data", []
    path.write_bytes(b"some rows")
    real, now_s = digest.hashlib.file_digest, path.stat().st_ctime
    monkeypatch.setattr(digest.hashlib, "file_digest", lambda *args: reads.append(1) or real(*args))
    monkeypatch.setattr(digest, "time", SimpleNamespace(time=lambda: now_s))
    known_digest(path)
    known_digest(path)
    assert len(reads) == 2, "it may be written once more at the same time"
    reads.clear()
    now_s += 60.0
    first = known_digest(path)
    assert known_digest(path) == first
    content_digest([path])
    assert len(reads) == 1
    edit(path)
    assert known_digest(path) != first
    assert len(reads) == 2


@pytest.mark.parametrize("size", [1000, 4096, 4097, 50_000])
def test_a_digest_of_weights_sees_both_ends_and_what_training_changes(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_SAMPLED_BYTES", 4096)
    path, found = tmp_path / "weights", set()
    tensor = slice(size // 3, size // 3 + size // 20)  # of 5 % of the file
    for changed in (slice(0), slice(0, 1), slice(size - 1, size), tensor):
        content = bytearray(size)
        content[changed] = b"\1" * len(content[changed])
        path.write_bytes(content)
        found.add(known_digest(path, sampled=True))
    path.write_bytes(bytes(size + 1))
    found.add(known_digest(path, sampled=True))
    assert len(found) == 5


def test_large_weights_are_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(2**40)  # a terabyte, of which nothing is on the disk
    assert known_digest(tmp_path / "weights", sampled=True)
