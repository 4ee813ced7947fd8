"""The folder of a miniature task: what it holds, and what it says where something else is there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.data.task_folder import MANIFEST, ensure_folder, make_by_command, task_manifest

SORT = task_manifest("sort", 2, 7, {"a.jsonl": 3})
TEXT = """\
{
  "task": "sort",
  "format_version": 2,
  "seed": 7,
  "sizes": {
    "a.jsonl": 3
  }
}
"""


def write(work: Path) -> None:
    (work / "a.jsonl").write_text("{}\n" * 3)


def test_a_folder_says_what_made_it(tmp_path: Path) -> None:
    """Folders around it are made with it, and an empty one in its place is no hindrance."""
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "some" / "new" / "data", tmp_path / "empty"):
        assert ensure_folder(str(place), SORT, write) == place
        assert (place / MANIFEST).read_text() == TEXT
        assert (place / "a.jsonl").read_text() == "{}\n{}\n{}\n"


def test_it_grows_under_a_hidden_name_and_goes_where_it_fails(tmp_path: Path) -> None:
    names: list[str] = []

    def fail(work: Path) -> None:
        names.append(work.name)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure_folder(tmp_path / "data", SORT, fail)
    assert names[0].startswith(".data-")
    assert list(tmp_path.iterdir()) == []


WITHOUT_VERSION = {name: value for name, value in SORT.items() if name != "format_version"}
OLDER = "holds the data of the task 'sort' as another version of realhf made it; remove the folder, and it is made anew"
OTHER = "not the data of the task 'sort' of seed 7; name another folder or remove this one"


def to_json(values: object) -> str:
    return str(values).replace("'", '"')


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (to_json({**SORT, "format_version": 1}), OLDER),
        (to_json({**SORT, "format_version": "x"}), OLDER),
        (to_json(WITHOUT_VERSION), OLDER),
        (to_json({**SORT, "seed": 8}), f"holds the data of { ({**SORT, 'seed': 8}) }, {OTHER}"),
        (to_json({**SORT, "seed": 8, "format_version": 1}), OTHER),
        (to_json({**SORT, "more": 1}), OTHER),
        ("[1]", f"holds the data of [1], {OTHER}"),
        ("{}", f"holds other files, {OTHER}"),
        ("no JSON", f"holds other files, {OTHER}"),
        (None, f"holds other files, {OTHER}"),
    ],
)
@pytest.mark.parametrize("comes_first", [False, True])
def test_what_something_else_in_its_place_is_called(
    comes_first: bool, manifest: str | None, message: str, tmp_path: Path
) -> None:
    """Whether it was there before, or another process was faster."""

    def strangers(_: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "notes").touch()
        if manifest is not None:
            (tmp_path / "data" / MANIFEST).write_text(manifest)

    if comes_first:
        strangers(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(str(tmp_path / 'data'))} .*{re.escape(message)}$"):
        ensure_folder(tmp_path / "data", SORT, strangers)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_faster_process_with_the_same_data_is_no_error(tmp_path: Path) -> None:
    def both(work: Path) -> None:
        write(work)
        ensure_folder(tmp_path / "data", SORT, write)

    assert ensure_folder(tmp_path / "data", SORT, both) == tmp_path / "data"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def run(monkeypatch: pytest.MonkeyPatch, ensure: Callable[[str, int], Path], *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["task", *words])
    make_by_command("realhf.data.some_task", "runs/some", ensure, lambda folder: f"made {folder}")


def test_the_command_takes_a_folder_and_a_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    def ensure(place: str, seed: int) -> Path:
        asked.append((place, seed))
        return Path(place)

    run(monkeypatch, ensure, "some/data")
    run(monkeypatch, ensure, "--seed", "12", "some/data")
    assert asked == [("some/data", 0), ("some/data", 12)]
    assert capsys.readouterr().out == "made some/data\nmade some/data\n"
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, ensure, "--help")
    assert ended.value.code == 0
    says = capsys.readouterr().out
    assert says.startswith("usage: python -m realhf.data.some_task [-h] [--seed SEED] data_dir\n")
    assert "example: python -m realhf.data.some_task runs/some --seed 0" in says


def test_the_command_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(place: str, seed: int) -> Path:
        raise UserError("not here")

    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, refuse, "data")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "not here\n")
