"""Builds and runs the C++ tests under the address and undefined-behaviour sanitizers."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "csrc" / "search"
FLAGS = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", f"-I{SOURCES}"]
TESTS = sorted(Path(__file__).with_name("cpp").glob("test_*.cpp"))


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all translation units but the Python module's, each compiled once, as many at a time as CPUs."""
    folder = tmp_path_factory.mktemp("objects")
    units = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "bindings.cpp"]

    def compile_unit(unit: Path) -> None:
        subprocess.run(["g++", *FLAGS, "-c", str(unit), "-o", str(folder / f"{unit.stem}.o")], check=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_unit, units))
    return folder


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.stem)
@pytest.mark.slow
def test_cpp(test: Path, objects: Path, tmp_path: Path) -> None:
    program = tmp_path / test.stem
    subprocess.run(["g++", *FLAGS, str(test), *map(str, objects.glob("*.o")), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stdout + result.stderr
