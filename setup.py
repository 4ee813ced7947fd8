"""Builds the C++ modules: plan searcher, CPU kernels, host memory, tensor memory. The rest is in pyproject.toml.

REALHF_WERROR=1 makes the compiler's warnings errors, for those who work on realhf.
"""

import os
import shutil
import sysconfig
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build import build
from setuptools.errors import PlatformError

WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", *(["-Werror"] if os.environ.get("REALHF_WERROR") == "1" else [])]
REMEDY = """
  Debian, Ubuntu:  apt-get install g++ python3-dev
  Fedora, RHEL:    dnf install gcc-c++ python3-devel
or name another compiler: CC=clang CXX=clang++"""


def extension(name: str, folder: str, *arguments: str) -> Pybind11Extension:
    """The module `name` from all sources of `folder`."""
    sources = sorted(map(str, Path(folder).glob("*.cpp")))
    flags = ["-O3", *WARNINGS, *arguments]
    return Pybind11Extension(name, sources, include_dirs=[folder], cxx_std=17, extra_compile_args=flags)


class BuildModules(build_ext):
    def build_extensions(self) -> None:
        """Says in one line what is missing, and not only at the first file that cannot be compiled."""
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            raise PlatformError(f"realhf needs a C++ compiler, and there is no {compiler}; install one:{REMEDY}")
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.is_file():
            raise PlatformError(f"realhf needs Python's C headers, and there is no {header}; install them:{REMEDY}")
        super().build_extensions()


class Build(build):
    # Modules first: what a machine lacks is then said before anything else.
    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


ParallelCompile("BUILD_JOBS").install()
setup(
    ext_modules=[
        extension("realhf.planning._search", "csrc/search"),
        # Products and sums may become one instruction.
        extension("realhf.cpu._cpu", "csrc/kernels", "-ffp-contract=fast"),
        extension("realhf.cpu._host", "csrc/host"),
        # Not a module of Python's: processes load it before everything else (`realhf/launch/launcher.py`).
        extension("realhf.machine._aligned", "csrc/memory"),
    ],
    cmdclass={"build": Build, "build_ext": BuildModules},
)
