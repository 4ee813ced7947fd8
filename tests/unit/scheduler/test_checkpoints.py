"""Which checkpoint a run goes on from, and which are kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.api.errors import UserError
from realhf.scheduler.checkpoints import check, newest_good, retain, saved_steps, tidy
from tests.unit.scheduler.saved_runs import damage, save


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "actor/boxes-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def change_index(checkpoint: Path) -> None:
    path = checkpoint / "actor/index.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "float64"'))


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
