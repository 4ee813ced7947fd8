"""Which checkpoint a run goes on from, and which are kept."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from realhf.base.errors import UserError
from realhf.rundir import checkpoints
from realhf.rundir.checkpoints import DAMAGED, RunState, check, newest_good, retain, saved_steps, tidy
from tests.unit.launch.saved_runs import damage, save


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "actor/boxes-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def change_index(checkpoint: Path) -> None:
    path = checkpoint / "actor/index.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "float64"'))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit in a file": (damage, r"step-3/actor/boxes-0\.safetensors has other content than when it was saved"),
    "a truncated file": (truncate, r"step-3/actor/boxes-0\.safetensors has \d+ bytes, not \d+"),
    "a missing file": (
        lambda path: (path / "actor/boxes-0.safetensors").unlink(),
        r"step-3/actor/boxes-0\.safetensors is missing",
    ),
    "another index": (change_index, r"step-3/actor/index\.json is missing or has other content"),
    "no index": (lambda path: (path / "actor/index.json").unlink(), r"step-3/actor/index\.json is missing"),
    "no state": (lambda path: (path / "run.json").unlink(), r"step-3/run\.json cannot be read \(No such file"),
    "a truncated state": (lambda path: (path / "run.json").write_text("{"), r"step-3/run\.json is damaged"),
    "no UTF-8": (lambda path: (path / "run.json").write_bytes(b'{"format": "\xff"}'), r"step-3/run\.json is damaged"),
    "a folder": (
        lambda path: replace_by_folder(path / "run.json"),
        r"step-3/run\.json cannot be read \(Is a directory",
    ),
    "that of another step": (
        lambda path: shutil.copy(path.parent / "step-2/run.json", path / "run.json"),
        r"step-3/run\.json is of the checkpoint after step 2",
    ),
    "another version": (
        lambda path: (path / "run.json").write_text('{"step":3,"format":"run-checkpoint/1"}'),
        r"the format is run-checkpoint/1, and this version of realhf reads run-checkpoint/2\); use another",
    ),
    "a file in its place": (lambda path: replace_by_file(path), r"step-3/run\.json cannot be read \(Not a directory"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_newest_good_one_is_found_whatever_latest_says(kind: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    do_damage, message = DAMAGES[kind]
    do_damage(tmp_path / "step-3")
    assert (tmp_path / "latest").readlink() == Path("step-3")
    with pytest.raises(UserError, match=message):
        check(tmp_path / "step-3")
    choice = newest_good(tmp_path)
    assert choice.state is not None
    assert (choice.state.step, choice.state.samples) == (2, 8)
    assert list(choice.damaged) == [3]


def flip_bits(path: Path, every: int = 1) -> Iterator[None]:
    """Changes one bit of a file at a time: each of its bits in turn, or every so many."""
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(0, 8 * len(content), every):
            byte = content[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            yield
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)


def test_no_bit_of_a_state_changes_unseen(tmp_path: Path) -> None:
    save(tmp_path, 2)
    good = check(save(tmp_path, 3, reward=-1.5e-07, kl=0.25))
    harmless = 0
    for number, _ in enumerate(flip_bits(tmp_path / "step-3/run.json")):
        try:
            assert check(tmp_path / "step-3") == good  # another way to write the same: 1E-7 instead of 1e-7
            harmless += 1
        except UserError:
            if number % 50 == 0:
                choice = newest_good(tmp_path)
                assert choice.state is not None
                assert (choice.state.step, list(choice.damaged)) == (2, [3])
    assert harmless == 1


@pytest.mark.parametrize(("file", "every"), [("index.json", 17), ("boxes-0.safetensors", 101)])
def test_no_bit_of_a_models_files_changes_unseen(file: str, every: int, tmp_path: Path) -> None:
    for _ in flip_bits(save(tmp_path, 3) / "actor" / file, every):
        with pytest.raises(UserError, match=rf"{file} .*has other content than when it was saved"):
            check(tmp_path / "step-3")


def test_every_wrong_digit_of_a_step_is_seen(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    path = tmp_path / "step-2/run.json"
    content = path.read_text()
    for digit in "013456789":
        path.write_text(content.replace('"step": 2', f'"step": {digit}'))
        assert newest_good(tmp_path).state == check(tmp_path / "step-1")


def test_there_may_be_none(tmp_path: Path) -> None:
    (tmp_path / ".step-2.part").mkdir()
    choice = newest_good(tmp_path)
    assert (choice.state, choice.damaged) == (None, {})
    damage(save(tmp_path, 1))
    assert newest_good(tmp_path).state is None


def test_steps_are_numbers_not_names(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path, step)
    assert saved_steps(tmp_path) == [9, 10]


def test_a_run_that_goes_on_finds_the_names_free_that_it_will_need(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    damage(tmp_path / "step-6")
    (tmp_path / ".step-8.part/.actor.partial").mkdir(parents=True)
    (tmp_path / ".latest.part").symlink_to("step-8")
    tidy(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-6", "latest", "step-2", "step-4"]
    assert (tmp_path / "latest").readlink() == Path("step-4")
    damage(save(tmp_path, 6))
    tidy(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-6", "latest", "step-2", "step-4"]
    tidy(tmp_path, 0)
    assert "latest" not in {path.name for path in tmp_path.iterdir()}


def test_whatever_stands_in_the_way_of_names_is_moved(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    (tmp_path / "step-4").write_text("no folder")
    (tmp_path / f"{DAMAGED}step-4").write_text("neither")
    (tmp_path / "step-007").mkdir()  # no name of a checkpoint
    tidy(tmp_path, 2)
    assert (tmp_path / "latest").readlink() == Path("step-2")
    assert saved_steps(tmp_path) == [2]
    assert (tmp_path / f"{DAMAGED}step-4").read_text() == "no folder"


def test_a_damaged_one_is_not_the_best_and_ends_no_run(tmp_path: Path) -> None:
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.1)):
        save(tmp_path, step, accuracy=accuracy)
    (tmp_path / "step-1/run.json").write_bytes(b"\xff")
    retain(tmp_path, 1, "accuracy")
    assert saved_steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("best", ["accuracy", "min:accuracy"])
def test_of_equally_good_ones_the_newest_is_kept(best: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, accuracy=0.5)
    save(tmp_path, 4)  # without the statistic
    retain(tmp_path, 1, best)
    assert saved_steps(tmp_path) == [3, 4]


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [
        (None, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (9, None, [1, 2, 3, 4]),
        (1, "accuracy", [2, 4]),
        (1, "min:accuracy", [1, 4]),
        (2, "unknown", [3, 4]),
        (None, "accuracy", [1, 2, 3, 4]),
    ],
)
def test_what_is_kept(keep: int | None, best: str | None, kept: list[int], tmp_path: Path) -> None:
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.6)):
        save(tmp_path, step, accuracy=accuracy)
    retain(tmp_path, keep, best)
    assert saved_steps(tmp_path) == kept
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_state_without_numbers_of_calls_has_the_digest_of_before() -> None:
    """So checkpoints that were written before there were any are good."""
    fields = {"step": 3, "seed": 0, "samples": 24, "num_workers": 1, "plan_sha256": "p", "optimizer_steps": {}}
    state = RunState(**fields, models={"a": "d"}, statistics={"loss": 0.1})
    body = {**fields, "models": {"a": "d"}, "statistics": {"loss": 0.1}, "sha256": "", "format": "run-checkpoint/2"}
    assert checkpoints._digest(state) == hashlib.sha256(msgspec.json.encode(body)).hexdigest()
    kept = msgspec.structs.replace(state, calls={"rule": {"sum": 0.1}})
    other = msgspec.structs.replace(state, calls={"rule": {"sum": 0.2}})
    assert len({checkpoints._digest(each) for each in (state, kept, other)}) == 3
