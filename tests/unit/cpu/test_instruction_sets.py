"""The kernels as processors of fewer instructions run them: here the loader always takes the best variant."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from tests.e2e.runs import ROOT
from tests.waiting import PATIENCE_S

# All that the kernels compute, and generation with them.
TESTS = (
    "tests/unit/cpu",
    "tests/unit/parallel/test_linear.py",
    "tests/unit/engine/test_kv_cache.py",
    "tests/unit/engine/test_generate.py",
)
# Puts the module of the first argument in the place of the built one, and runs the tests of the others.
RUN = """
import importlib.util, sys, pytest
spec = importlib.util.spec_from_file_location("realhf.cpu._cpu", sys.argv[1])
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from realhf.cpu import native
assert native.kernels is module
assert module.use_instructions(module.Instructions.amx) == module.Instructions.any
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["x86-64-v3", "x86-64"])
def test_kernels_compute_the_same_with_fewer_instructions(instructions: str, tmp_path: Path) -> None:
    """AVX2, and what every processor of 64 bits has. Built with little optimisation: the compiler is not on trial."""
    module = tmp_path / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    # torch has pybind11's headers
    folders = [ROOT / "csrc/kernels", sysconfig.get_paths()["include"], *include_paths()]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-psabi", "-ffp-contract=fast", "-fvisibility=hidden"]
    compiler = ["g++", *flags, f"-march={instructions}", "-DKERNELS_NO_CLONES", *(f"-I{folder}" for folder in folders)]
    built = run(*compiler, *map(str, sorted((ROOT / "csrc/kernels").glob("*.cpp"))), "-o", str(module))
    assert built.returncode == 0, built.stderr[-4000:]
    words = ("env", "ONEDNN_MAX_CPU_ISA=AVX2", sys.executable, "-c", RUN, str(module))
    done = run(*words, *TESTS, "-k", "not instruction_sets")
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count(".") > 100, "tests that passed"


def test_bfloat16_where_onednn_has_none() -> None:
    """Processors with AVX2 alone."""
    code = "import torch; from realhf.parallel.linear import linear\n"
    code += "x = torch.eye(8, dtype=torch.bfloat16)\nassert torch.equal(linear(x, 3 * x), 3 * x)"
    done = run("env", "ONEDNN_MAX_CPU_ISA=AVX2", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr[-4000:]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
