"""From the source to sdist, wheel and a run: in environments of their own, in folders outside the checkout."""

import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import realhf
from tests.docs.blocks import ROOT
from tests.packaging.builds import User, build_sdist, build_wheel, copy_source, finished, install, lend, run

# Interpreters of environments that have torch: `REALHF_OTHER_PYTHONS=/a/bin/python3.12:/b/bin/python3.13`.
OTHER_PYTHONS = [path for path in os.environ.get("REALHF_OTHER_PYTHONS", "").split(os.pathsep) if path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


def test_the_sdist_has_all_of_the_source(source: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert not {file for file in files - packed if not file.startswith((".ci/", ".git", "realhf.egg-info/"))}


@pytest.mark.slow
def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names} == {"realhf", f"realhf-{realhf.__version__}.dist-info"}
    suffixes = (".py", ".typed", ".yaml", ".html", ".css", ".js")
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "realhf").rglob("*") if path.suffix in suffixes}
    assert sources >= {
        "realhf/py.typed", "realhf/planning/descriptions/h100.yaml", "realhf/report/templates/page.html"
    }  # fmt: skip
    assert sources <= names
    assert sum(name.endswith(".so") for name in names) == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_a_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = install(wheel, environment)
    checked = run(sys.executable, "-m", "pip", "--python", python, "check").stdout
    assert "realhf " not in checked, "a requirement is missing or too old"
    user = User(environment, tmp_path)
    assert user.realhf("--version") == f"realhf {realhf.__version__}\n"
    user.check_all_commands()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "python",
    OTHER_PYTHONS
    or [pytest.param("", marks=pytest.mark.skip("REALHF_OTHER_PYTHONS names no interpreters that have torch"))],
)
def test_an_sdist_runs_under_other_pythons(python: str, sdist: Path, tmp_path: Path) -> None:
    """Torch is lent; all else is installed as for a user, from the package index."""
    environment = tmp_path / "environment"
    finished(python, "-m", "venv", environment)
    lend(python, environment / "bin/python")
    finished(environment / "bin/python", "-m", "pip", "install", sdist)
    User(environment, tmp_path).check_all_commands()


def said_by_failed_build(*words: str | Path, folder: Path, **environment: str) -> str:
    """What it printed, as long as it is what it says before it comes to anything else."""
    done = run(sys.executable, *words, folder=folder, **environment)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout
    assert "copying " not in done.stdout
    return done.stdout


def test_without_a_compiler_a_build_says_what_to_install(source: Path, tmp_path: Path) -> None:
    words = ("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source)
    said = said_by_failed_build(*words, folder=tmp_path, PATH=str(tmp_path))
    assert "error: realhf needs a C++ compiler, and there is no " in said
    assert "apt-get install g++ python3-dev" in said
    said = said_by_failed_build(*words, folder=tmp_path, CC="missing-cc", CXX="missing-c++")
    assert "error: realhf needs a C++ compiler, and there is no missing-c++" in said


def test_without_python_s_headers_a_build_says_what_to_install(source: Path) -> None:
    program = (
        "import runpy, sys, sysconfig; get_path = sysconfig.get_path; "
        "sysconfig.get_path = lambda name, *more: '/nowhere' if name == 'include' else get_path(name, *more); "
        "sys.argv = ['setup.py', 'build']; runpy.run_path('setup.py', run_name='__main__')"
    )
    said = said_by_failed_build("-c", program, folder=source)
    assert "error: realhf needs Python's C headers, and there is no /nowhere/Python.h" in said
    assert "apt-get install g++ python3-dev" in said
