"""`scripts/simulated_gpu.py` builds once, goes on where it stopped, and says what is in its way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated.simulator import LIBRARIES, ROOT, Simulator, missing_in
from tests.waiting import PATIENCE_S

BUILT = " ".join(name for name in (*LIBRARIES, "fakegpu-coordinator") if name != "libncclshim.so")
# They stand for tools that take minutes, and write down that they were called.
TOOLS = {
    "cmake": f'echo "$@" >> "$CALLS"; [ "$1" = --build ] && cd "$2" && touch {BUILT} || mkdir -p "$4"',
    "cc": 'echo "$@" >> "$CALLS"; touch "$4"',
    "make": "",
    "c++": "",
}


def script(tmp_path: Path, sources: Path, folder: Path, **tools: str) -> tuple[int, str]:
    """Its code, and what it printed, where the tools are stand-ins."""
    for name, text in (TOOLS | tools).items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, "scripts/simulated_gpu.py", sources, folder],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    path = tmp_path / "FakeGPU"
    path.mkdir()
    (path / "CMakeLists.txt").touch()
    return path


def with_torch(folder: Path, cuda: str) -> Path:
    """A folder whose environment is there, with a torch that was built for this version of CUDA."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho 2.14.1 {cuda}\n")
    python.chmod(0o755)
    return folder


def test_a_second_call_builds_nothing(tmp_path: Path, sources: Path) -> None:
    folder = with_torch(tmp_path / "gpu", "13.0")
    code, output = script(tmp_path, sources, folder)
    assert code == 0, output
    assert f"REALHF_SIMULATED_GPU={folder}" in output
    assert not missing_in(folder)
    calls = (tmp_path / "calls").read_text()
    assert calls.count("\n") == 3  # cmake twice, cc once
    assert script(tmp_path, sources, folder)[0] == 0
    assert (tmp_path / "calls").read_text() == calls


@pytest.mark.parametrize(
    ("tools", "texts"),
    [
        ({"cmake": "echo no compiler; exit 3"}, ["ended with code 3, and must end with 0", "no compiler", "cmake.log"]),
        ({"cmake": 'mkdir -p "$4"'}, ["built no libcuda.so.1", "check out FakeGPU 1.5.5"]),
    ],
)
def test_what_fails_is_named(tmp_path: Path, sources: Path, tools: dict[str, str], texts: list[str]) -> None:
    code, output = script(tmp_path, sources, with_torch(tmp_path / "gpu", "13.0"), **tools)
    assert code == 1
    assert all(text in output for text in texts), output


def test_a_torch_without_cuda_is_refused(tmp_path: Path, sources: Path) -> None:
    code, output = script(tmp_path, sources, with_torch(tmp_path / "gpu", ""))
    assert code == 1
    assert "was built without CUDA, and the tests need a build with it; remove that folder" in output


def test_sources_have_to_be_there(tmp_path: Path) -> None:
    code, output = script(tmp_path, tmp_path / "nothing", tmp_path / "gpu")
    assert code == 1
    assert "has no CMakeLists.txt; name a checkout of FakeGPU" in output


def test_the_folder_of_the_other_tests_is_complete(tmp_path: Path, sources: Path, simulator: Simulator) -> None:
    code, output = script(tmp_path, sources, simulator.folder)
    assert code == 0, output
    assert "CUDA 1" in output
    assert not (tmp_path / "calls").exists()
