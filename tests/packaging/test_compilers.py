"""The C++ sources under the compilers that users have: no warning, and modules that compute the same."""

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pybind11
import pytest

from tests.e2e.runs import ROOT
from tests.packaging.builds import copy_source, finished

# By C++ compiler; what `make setup` built is of the default one.
C_COMPILERS = {"g++-11": "gcc-11", "clang++": "clang"}
CROSS = "aarch64-linux-gnu-g++"  # nothing that it builds runs on this machine
# What searcher and kernels compute, against references in Python and torch.
TESTS = ("tests/unit/cpu", "tests/unit/planning/test_searcher.py", "tests/unit/planning/test_bounds.py")
# Puts the modules of the first argument's folder in the place of the built ones, and runs the tests of the others.
RUN = """
import importlib.util, pathlib, sys, pytest
for name in ("realhf.planning._search", "realhf.cpu._cpu", "realhf.cpu._host"):
    [path] = pathlib.Path(sys.argv[1]).glob(name.replace(".", "/") + ".*.so")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__file__ == str(path)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", C_COMPILERS)
def test_compiles_without_a_warning_and_computes_the_same(compiler: str, tmp_path: Path) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path)
    finished(*build, copy_source(tmp_path), CC=C_COMPILERS[compiler], CXX=compiler, REALHF_WERROR="1")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "modules", [name for name in packed.namelist() if name.endswith(".so")])
    finished(sys.executable, "-c", RUN, tmp_path / "modules", *TESTS)


@pytest.mark.slow
def test_another_architecture_takes_the_sources_without_a_warning() -> None:
    if not shutil.which(CROSS):
        pytest.skip(f"{CROSS} is not installed")
    headers = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    sources = sorted((ROOT / "csrc").glob("*/*.cpp"))
    assert len(sources) > 15
    finished(CROSS, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-psabi", "-Werror", *headers, *sources)
