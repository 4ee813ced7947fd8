"""How `--launcher` finds a class, and what it says of a wrong one."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.launch.launcher import LAUNCHERS, Exit, Launcher, NoOptions, find_launcher, launcher_name
from realhf.launch.local import LocalLauncher
from realhf.launch.process import Job, ProcessSpec
from realhf.rundir.paths import RunDirectory

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

class Other(Good):
    options_type = None

class Bare(Good):
    is_remote = uses_terminal = options_type = property()
    check = None

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "good_launcher.py").write_text(GOOD)
    (tmp_path / "empty_launcher.py").write_text("Good = 3")
    (tmp_path / "importing_launcher.py").write_text("import no_such_package")
    (tmp_path / "broken_launcher.py").write_text("1 / 0")
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("good_launcher", "empty_launcher", "importing_launcher", "broken_launcher"):
        sys.modules.pop(name, None)


def test_the_launchers_of_the_package() -> None:
    assert find_launcher("local") is LocalLauncher
    found = {name: find_launcher(name) for name in LAUNCHERS}
    assert {name for name, launcher in found.items() if launcher.is_remote} == {"slurm"}
    assert {name for name, launcher in found.items() if launcher.uses_terminal} == {"in-process"}
    graces_s = {inspect.signature(each.stop).parameters["grace_s"].default for each in (Launcher, *found.values())}
    assert graces_s == {5.0}, "the same of all, for those who leave it out"


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
        (
            "good_launcher:Bad",
            r"has no class 'Bad'; it has Bare, Foreign, Good, Lacking, Launcher, Other$",
        ),
        ("good_launcher:number", r"has no class 'number'"),
        ("good_launcher:Lacking", r"Lacking in .*good_launcher.py has no poll, stop; see realhf.launch.launcher"),
        (
            "good_launcher:Foreign",
            r"Foreign in .* has no check, preview, start, start_array, poll, stop, status, job_id, adopt, leave, ",
        ),
        ("good_launcher:Other", r": Other in .*good_launcher.py has no options_type that is a dataclass; see realhf"),
        ("good_launcher:Bare", r": Bare in .*good_launcher.py has no check; see realhf"),
        ("empty_launcher:Good", r"empty_launcher.py has no class 'Good'; it has none$"),
        ("importing_launcher:Good", r"cannot be imported: No module named 'no_such_package'"),
        ("broken_launcher:Good", r"broken_launcher cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_name_is_explained(name: str, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        find_launcher(name, folder)


def test_a_launcher_has_its_own_name_or_that_of_its_class(folder: Path) -> None:
    assert [launcher_name(find_launcher(name)) for name in LAUNCHERS] == ["local", "slurm", "in-process"]
    assert launcher_name(find_launcher("good_launcher:Good", folder)) == "good_launcher:Good"


def test_what_a_launcher_says_unless_it_says_more(tmp_path: Path) -> None:
    class Least(Launcher):
        pass

    specs = [ProcessSpec(name=name, argv=("run", name)) for name in ("master", "worker-0")]
    job = Job(directory=RunDirectory(tmp_path), processes=tuple(specs), workers_per_node=1)
    launcher = Least(NoOptions())
    launcher.check()
    assert launcher.preview(job) == "master: run master\nworker-0: run worker-0\n"
    assert (launcher.is_remote, launcher.uses_terminal, launcher.options_type) == (False, False, NoOptions)
    assert (launcher.status(), launcher.job_id(), launcher.is_waiting()) == ("", "", False)
    assert (launcher.place(0), launcher.lost(), launcher.room(frozenset({"n1"}))) == (None, frozenset(), 65_536)
    for missing in (lambda: launcher.start(job), launcher.poll, launcher.stop):
        with pytest.raises(NotImplementedError):
            missing()
    with pytest.raises(UserError, match=r"^Least cannot watch a job that another process has started$"):
        launcher.adopt(job, "17")
    with pytest.raises(UserError, match=r"^the processes of Least do not outlive this one$"):
        launcher.leave()


def test_an_end_is_a_kill_where_a_signal_made_it() -> None:
    assert [Exit(name="master", returncode=code).is_killed for code in (-9, -1, 0, 1)] == [True, True, False, False]
