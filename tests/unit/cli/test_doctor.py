"""`realhf doctor`: once for real, and what it says when something is missing."""

import io
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pynvml
import pytest
import torch
from rich.console import Console

from realhf.base.errors import UserError
from realhf.cli import doctor, doctor_devices, doctor_wire
from realhf.cli.doctor import base_checks, gpu_checks, run_checks
from realhf.cli.doctor_devices import find_ranks
from realhf.cli.doctor_wire import find_host_name, find_keys
from realhf.cli.findings import Check, Finding
from realhf.engine.generate import paged_attention
from realhf.machine.gpu_kernels import REMEDIES
from realhf.models.attention_kernels import Lack, Machine
from realhf.transport.keys import WorkerKeys
from tests.unit.machine.nvml import A100, H100, Device, stand_in
from tests.waiting import PATIENCE_S


def printed(*checks: Check) -> tuple[int, list[str]]:
    console = Console(file=io.StringIO(), width=40)
    code = run_checks(checks, console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue().splitlines()


def found(name: str, runs_dir: Path) -> Finding:
    (check,) = (check for check in base_checks(runs_dir) if check.name == name)
    return check.run()


@pytest.mark.slow
def test_this_machine_can_run_runs(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "realhf.cli", "doctor", "--runs-dir", str(tmp_path / "runs")]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(base_checks(tmp_path))
    assert all(line.startswith(("ok", "info", "warn")) for line in lines)
    assert any("all-reduce between 2 processes" in line for line in lines)
    assert any("dp2 tp1 pp1 -> dp1 tp2 pp1" in line and "equal bit by bit" in line for line in lines)
    assert any("a stranger's and an exposed key are refused" in line for line in lines)
    assert any(f"{tmp_path}: atomic rename, modes and locks are kept" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line_with_its_remedy() -> None:
    def find() -> Finding:
        raise UserError("libzmq 4 cannot\nencrypt")

    code, lines = printed(Check("messages", find, "pip install --force-reinstall pyzmq"))
    assert code == 1
    assert lines == [
        "fail messages          libzmq 4 cannot encrypt; remedy: pip install --force-reinstall pyzmq",
        "1 of 1 checks failed",
    ]


def test_what_a_check_raises_is_a_failure_and_the_others_go_on() -> None:
    def find() -> Finding:
        raise ImportError("no module named [bold]_search[/bold]")

    code, lines = printed(Check("C++ searcher", find, "compile it"), Check("python", lambda: "3.12", ""))
    assert code == 1
    assert lines[0].endswith("ImportError: no module named [bold]_search[/bold]; remedy: compile it")
    assert lines[1] == "ok   python            3.12"


def test_warnings_and_notes_do_not_fail() -> None:
    code, lines = printed(
        Check("cores, memory", lambda: Finding(state="warn", detail="1 core", remedy="take another"), ""),
        Check("SLURM", lambda: Finding(state="info", detail="none here"), ""),
    )
    assert code == 0
    assert lines == ["warn cores, memory     1 core; remedy: take another", "info SLURM             none here"]


def test_a_failure_without_a_remedy_is_a_mistake_in_the_check() -> None:
    with pytest.raises(AssertionError, match="no remedy"):
        Finding(state="fail", detail="broken")


def test_an_interface_without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_wire.zmq, "has", lambda _: False)
    finding = found("messages", Path("runs"))
    assert (finding.state, finding.detail[-25:]) == ("fail", "cannot encrypt (no CURVE)")
    assert "pyzmq" in finding.remedy


def test_a_file_system_without_modes_and_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", lambda *_: None)  # as on a FAT disk
    monkeypatch.setattr(doctor.fcntl, "flock", lambda *_: None)  # as on Lustre mounted with localflock
    finding = found("run directories", tmp_path / "not" / "yet")
    assert finding.state == "fail"
    assert finding.detail.startswith(f"{tmp_path}: modes 0700, 0600 became ")
    assert "flock lets two in at once" in finding.detail
    assert "--run-dir" in finding.remedy


def test_processes_that_cannot_meet_are_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_devices, "RANKS_TIMEOUT_S", 0.2)
    with pytest.raises(TimeoutError, match=r"process 0 of 2 did not end within 0.2 s"):
        find_ranks("groups", "gloo", 2)
    assert not multiprocessing.active_children()


def test_a_process_that_fails_gives_its_last_line() -> None:
    with pytest.raises(RuntimeError, match=r"process 0 of 1: .*nonsense"):
        find_ranks("groups", "nonsense", 1)


def test_processes_of_an_nccl_check_are_shown_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, [H100] * 2, visible="1,0")
    with pytest.raises(RuntimeError, match=r"process 0 of 2: .*CUDA_VISIBLE_DEVICES='1', and torch .* sees 0"):
        find_ranks("groups", "nccl", 2)


def test_a_key_that_others_can_read_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_wire, "load_worker_keys", taking_any(doctor_wire.load_worker_keys))
    with pytest.raises(PermissionError, match="a key of mode 0644 was taken"):
        find_keys(tmp_path)
    assert list(tmp_path.iterdir()) == []


def taking_any(load: Callable[..., WorkerKeys]) -> Callable[..., WorkerKeys]:
    """A loader that does not look at modes."""

    def take(directory: Path, *, worker: int) -> WorkerKeys:
        (directory / f"worker-{worker}.secret").chmod(0o600)
        keys = load(directory, worker=worker)
        (directory / f"worker-{worker}.secret").chmod(0o644)
        return keys

    return take


def test_a_host_name_that_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_wire.socket, "gethostbyname", lambda _: "203.0.113.9")
    finding = find_host_name()
    assert isinstance(finding, Finding)
    assert finding.state == "warn"
    assert "is 203.0.113.9, no address of this machine (" in finding.detail
    assert "lo 127.0.0.1" in finding.detail


def found_gpus(monkeypatch: pytest.MonkeyPatch, cuda: str | None = "12.8") -> Finding:
    monkeypatch.setattr(doctor_devices, "torch_cuda_version", lambda: cuda)
    return found("GPUs", Path("runs"))


def test_the_gpus_that_a_run_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, [H100] * 8)
    of_all = f"8 x {H100.name} of 79.6 GiB, compute capability 9.0, driver 580.95.05; 8 of the 8 here"
    assert found_gpus(monkeypatch) == Finding(state="ok", detail=of_all)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert found_gpus(monkeypatch).detail.endswith("; 2 of the 8 here, CUDA_VISIBLE_DEVICES=3,1")


@pytest.mark.parametrize(
    ("devices", "visible", "why"),
    [([], None, "no NVIDIA GPU"), ([H100], "", "CUDA_VISIBLE_DEVICES= leaves none")],
)
def test_no_gpu_is_a_note(
    devices: list[Device], visible: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, devices, visible)
    assert found_gpus(monkeypatch, None) == Finding(state="info", detail=f"{why}: runs compute on the CPU")


def test_gpus_that_a_run_cannot_use_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, [A100] * 2)
    finding = found_gpus(monkeypatch, None)
    assert finding.state == "fail"
    assert finding.detail.endswith("the installed torch was not built for CUDA")
    assert "pytorch.org" in finding.remedy
    stand_in(monkeypatch, tmp_path, [A100, H100])
    assert "2 kinds are visible" in found_gpus(monkeypatch).detail
    stand_in(monkeypatch, tmp_path, [A100], init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert "version mismatch" in found_gpus(monkeypatch).detail


def test_every_gpu_check_says_what_to_do() -> None:
    """Without a GPU each fails by itself, and the others go on."""
    for check in gpu_checks():
        finding = check.run()
        assert finding.state in ("ok", "info") or finding.remedy
    names = [check.name for check in gpu_checks()]
    assert names == [
        "CUDA", "GPU arithmetic", "NCCL groups", "GPU reallocation", "CUDA graphs", "GPU attention",
        "triton", "flash-attn", "varlen",
    ]  # fmt: skip


def test_a_kernel_that_is_missing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way to have it; one that is there has its version."""
    machine = Machine(device="cuda", compute_capability=(9, 0), lacks=(Lack("triton", "is broken", "mend it"),))
    monkeypatch.setattr(paged_attention, "machine", lambda device: machine)
    monkeypatch.setattr(doctor_devices, "version", lambda name: f"{name} 3.8")
    checks = {check.name: check for check in gpu_checks()}
    assert {checks[name].run().detail for name in REMEDIES} == {"no GPU to choose for"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = checks["triton"].run()
    assert (found.state, found.remedy) == ("warn", "mend it")
    assert found.detail.startswith("triton is broken: over the KV cache gathered pages takes its place")
    assert checks["flash-attn"].run() == Finding("ok", "flash-attn 3.8")
    monkeypatch.setattr(doctor_devices, "version", missing)
    assert checks["varlen"].run() == Finding("ok", "nothing is missing")


def missing(name: str) -> str:
    raise PackageNotFoundError(name)
