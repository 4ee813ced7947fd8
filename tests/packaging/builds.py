"""What users and packagers do with the source: copy it, build sdist and wheel, install them, run them elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT, Document
from tests.waiting import PATIENCE_S

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.so", "*.egg-info", "build", "dist", "runs", "local"
)
EXPERIMENT = "reinforce.py"  # of docs/experiments.md, with an algorithm of its own
FEW = ("--batch-size", "8", "--num-workers", "2")


def run(*words: str | Path, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command with these further variables, its output captured together."""
    return subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def finished(*words: str | Path, folder: Path = ROOT, **environment: str) -> str:
    """What a command printed that has to end well."""
    done = run(*words, folder=folder, **environment)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-6000:]}"
    return done.stdout


def copy_source(folder: Path) -> Path:
    """A copy of the source as it would be committed: what lies around in the checkout must not help a build."""
    return shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)


def build_sdist(source: Path, folder: Path) -> Path:
    """The source distribution; nothing is compiled for it."""
    finished(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, source)
    [sdist] = folder.glob("*.tar.gz")
    return sdist


def build_wheel(sdist: Path, folder: Path) -> Path:
    """A wheel from the source distribution, as an installation of that would build it, with the build requirements of
    this environment."""
    words = ("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist)
    finished(sys.executable, "-m", "pip", *words)
    [wheel] = folder.glob("*.whl")
    return wheel


def site_packages(python: str | Path) -> Path:
    """Where the packages of an interpreter lie."""
    return Path(finished(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def lend(lender: str | Path, borrower: Path) -> None:
    """The borrower's environment finds the lender's packages behind its own."""
    (site_packages(borrower) / "lent.pth").write_text(f"{site_packages(lender)}\n")


def install(wheel: Path, environment: Path) -> Path:
    """A new environment with this wheel, which finds what else it needs in the running one. Returns its interpreter."""
    finished(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin/python"
    # Before it can see the realhf of the lender.
    finished(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    lend(sys.executable, python)
    return python


class User:
    """Somebody with an environment whose `realhf` is installed, a home and a folder of experiments."""

    def __init__(self, environment: Path, folder: Path):
        self.bin, self.home, self.folder = environment / "bin", folder / "home", folder / "work"
        self.home.mkdir(parents=True)
        self.folder.mkdir()
        for block in Document(ROOT / "docs/experiments.md").blocks("python"):
            first, _, code = block.partition("\n")
            (self.folder / first.removeprefix("# file: ")).write_text(code)

    def realhf(self, *words: str) -> str:
        """What a `realhf` command printed that has to end well."""
        variables = {
            "HOME": str(self.home),
            "XDG_DATA_HOME": "",  # as if it were not set
            "PYTHONPATH": "",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        return finished(self.bin / "realhf", *words, folder=self.folder, **variables)

    def check_all_commands(self) -> None:
        """Everything that a user does with an installation, once."""
        where = finished(self.bin / "python", "-P", "-c", "import realhf; print(realhf.__file__)", folder=self.folder)
        assert Path(where.strip()).is_relative_to(self.bin.parent)
        self.realhf("doctor")
        assert "analytic model" in self.realhf("plan", EXPERIMENT, *FEW)
        measured = self.realhf("profile", EXPERIMENT, *FEW, "--repetitions", "1", "--max-tokens", "64")
        profiles = list((self.home / ".local/share/realhf/profiles").rglob("*.json"))
        assert profiles
        assert all(f"written to {profile}" in measured for profile in profiles)
        assert "measured layer timings" in self.realhf("plan", EXPERIMENT, *FEW)
        self.realhf("run", EXPERIMENT, *FEW, "--steps", "1", "--run-dir", "runs/mine")
        report = self.folder / "runs/mine/report.html"
        report.unlink()
        self.realhf("report", "runs/mine")
        assert report.is_file()
