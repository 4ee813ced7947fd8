"""How `--launcher` finds a class, and what it says of a wrong one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.launch.launcher import LAUNCHERS, Launcher, find_launcher
from realhf.launch.local import LocalLauncher

GOOD = """
from realhf.launch.launcher import Launcher

class Good(Launcher):
    def start(self, job): ...
    def poll(self): return []
    def stop(self, *, grace_s=5.0): ...

class Lacking(Launcher):
    def start(self, job): ...

class Foreign:
    start = poll = stop = None

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "good_launcher.py").write_text(GOOD)
    (tmp_path / "importing_launcher.py").write_text("import no_such_package")
    (tmp_path / "broken_launcher.py").write_text("1 / 0")
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("good_launcher", "importing_launcher", "broken_launcher"):
        sys.modules.pop(name, None)


def test_the_launchers_of_the_package() -> None:
    assert find_launcher("local") is LocalLauncher
    found = {name: find_launcher(name) for name in LAUNCHERS}
    assert {name for name, launcher in found.items() if launcher.is_remote} == {"slurm"}
    assert {name for name, launcher in found.items() if launcher.uses_terminal} == {"in-process"}


def test_one_from_elsewhere_is_a_module_or_a_file(folder: Path) -> None:
    for launcher in (find_launcher("good_launcher:Good", folder), find_launcher(f"{folder}/good_launcher.py:Good")):
        assert launcher.__name__ == "Good"
        assert Launcher in launcher.__mro__
        assert not launcher.is_remote


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ray", r"ray: no such launcher; choose from local, slurm, in-process, or name a class as MODULE:CLASS"),
        (":Good", r":Good: no such launcher"),
        ("good_launcher:", r"good_launcher:: no such launcher"),
        ("absent_launcher:Good", r"no module 'absent_launcher'; put absent_launcher.py beside the experiment"),
        ("absent.launcher:Good", r"no module 'absent.launcher'; put launcher.py beside"),
        ("absent.py:Good", r"absent.py:Good: absent.py: no such file"),
        ("good_launcher:Bad", r"good_launcher.py has no class 'Bad'; it has Foreign, Good, Lacking, Launcher$"),
        ("good_launcher:number", r"has no class 'number'"),
        ("good_launcher:Lacking", r"Lacking in .*good_launcher.py has no poll, stop; see realhf.launch.launcher"),
        (
            "good_launcher:Foreign",
            r"Foreign in .* has no check, preview, start, poll, stop, status, job_id, adopt, leave, is_waiting, ",
        ),
        ("importing_launcher:Good", r"cannot be imported: No module named 'no_such_package'"),
        ("broken_launcher:Good", r"broken_launcher cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_name_is_explained(name: str, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        find_launcher(name, folder)
