"""Builds what `tests/simulated` needs: torch's CUDA build and a simulated driver. No GPU and no driver is used.

SOURCES is a checkout of FakeGPU (MIT, GitHub FanBB2333/FakeGPU), with the changes that docs/gpu.md lists. FOLDER gets

    lib/     the simulated driver, runtime, cuBLAS, NCCL and NVML, and the coordinator of ranks
    venv/    torch's CUDA build, and this checkout, installed editable

A second call goes on where the first one stopped. It takes 5.4 GB and six minutes, most of them for torch.

Command: python scripts/simulated_gpu.py SOURCES FOLDER
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from realhf.base.code_files import python_command

ROOT = Path(__file__).resolve().parents[1]
NCCL_SYMBOLS = ROOT / "tests/simulated/nccl_symbols.c"
TORCH = "torch==2.14.1"
BUILT = (
    "libcuda.so.1", "libcudart.so.12", "libcublas.so.12", "libnccl.so.2", "libnvidia-ml.so.1", "fakegpu-coordinator",
)  # fmt: skip
SHIM = "libncclshim.so"
TOOLS = ("cmake", "make", "c++", "cc")
BUILD_S, INSTALL_S, LOOK_S = 1800, 3600, 120  # deadlines


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


def run(command: Sequence[str | Path], deadline_s: float, log: Path | None = None) -> str:
    """What a command prints; into `log` too, if given. Ends the script where it fails or is late."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=deadline_s, errors="replace"
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        partial = error.stdout or b""
        code, output = None, partial.decode(errors="replace") if isinstance(partial, bytes) else partial
    if log is not None:
        log.write_text(output)
    if code != 0:
        ended = f"ended with code {code}" if code is not None else f"had not ended after {deadline_s:g} s"
        tail = "\n".join(output.splitlines()[-20:])
        where = f"; all it printed is in {log}" if log else ""
        fail(f"`{' '.join(map(str, command))}` {ended}, and must end with 0{where}; correct it and call again\n{tail}")
    return output


def build_libraries(sources: Path, folder: Path) -> None:
    """FakeGPU and the functions of NCCL that it lacks."""
    library, build = folder / "lib", folder / "build"
    if all((library / name).exists() for name in (*BUILT, SHIM)):
        print(f"{library}: complete")
        return
    print(f"{library}: building FakeGPU (3 minutes)", flush=True)
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DENABLE_FAKEGPU_CPU_SIMULATION=OFF"]
    run(["cmake", "-S", sources, "-B", build, *options], BUILD_S, folder / "cmake.log")
    run(["cmake", "--build", build, "-j", str(os.cpu_count() or 1)], BUILD_S, folder / "build.log")
    library.mkdir(exist_ok=True)
    for name in BUILT:
        if not (build / name).exists():
            fail(f"{sources} built no {name}, which the tests load; check out FakeGPU 1.5.5")
        shutil.copy2(build / name, library / name)
    run(["cc", "-shared", "-fPIC", "-o", library / SHIM, NCCL_SYMBOLS], LOOK_S)


def make_environment(folder: Path) -> None:
    """torch's CUDA build and this checkout."""
    python = folder / "venv/bin/python"
    if not python.exists():
        run(python_command("venv", str(folder / "venv")), INSTALL_S)
    look = [python, "-c", "import torch, realhf; print(torch.__version__, torch.version.cuda or '')"]
    if subprocess.run(look, capture_output=True, timeout=LOOK_S).returncode:
        print(f"{folder / 'venv'}: installing {TORCH} and realhf (5 minutes)", flush=True)
        run([python.with_name("pip"), "install", TORCH, "-e", ROOT], INSTALL_S, folder / "pip.log")
    version, _, cuda = run(look, LOOK_S).strip().partition(" ")
    if not cuda:
        fail(
            f"torch {version} in {folder / 'venv'} was built without CUDA, and the tests need a build with it; remove "
            "that folder, see that pip takes torch from where it takes it by default, and call again"
        )
    print(f"{folder / 'venv'}: torch {version}, CUDA {cuda}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a checkout of FakeGPU")
    parser.add_argument("folder", type=Path, help="where libraries and environment go")
    arguments = parser.parse_args()
    sources, folder = arguments.sources.resolve(), arguments.folder.resolve()
    if sys.platform != "linux":
        fail(f"this is {sys.platform}, and FakeGPU takes the place of CUDA's libraries for Linux; use Linux")
    if not (sources / "CMakeLists.txt").is_file():
        fail(f"{arguments.sources} has no CMakeLists.txt; name a checkout of FakeGPU (GitHub FanBB2333/FakeGPU)")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        fail(f"{', '.join(missing)}: not installed, and FakeGPU is built with them; install cmake, make, gcc and g++")
    folder.mkdir(parents=True, exist_ok=True)
    build_libraries(sources, folder)
    make_environment(folder)
    print(f"\nREALHF_SIMULATED_GPU={folder} python -m pytest tests/simulated")


if __name__ == "__main__":
    main()
