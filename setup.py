"""Builds the C++ modules: plan searcher, CPU kernels, host memory, tensor memory. The rest is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup


def extension(name: str, folder: str, *arguments: str) -> Pybind11Extension:
    """The module `name` from all sources of `folder` but its tests."""
    sources = sorted(str(path) for path in Path(folder).glob("*.cpp") if not path.name.startswith("test_"))
    flags = ["-O3", "-Wall", "-Wextra", "-Werror", *arguments]
    return Pybind11Extension(name, sources, include_dirs=[folder], cxx_std=17, extra_compile_args=flags)


ParallelCompile("BUILD_JOBS").install()
setup(
    ext_modules=[
        extension("realhf.search._search", "csrc/search"),
        # Products and sums may become one instruction; vectors are passed between inlined functions only.
        extension("realhf.kernels._cpu", "csrc/kernels", "-ffp-contract=fast", "-Wno-psabi"),
        extension("realhf.parallel._host", "csrc/host"),
        # Not a module of Python's: processes load it before everything else (`realhf/scheduler/base.py`).
        extension("realhf.machine._aligned", "csrc/memory"),
    ],
    cmdclass={"build_ext": build_ext},
)
