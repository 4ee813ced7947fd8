"""Which device each worker of a local run gets, on machines that stand-ins make."""

import subprocess
import sys
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.launch import devices
from realhf.launch.launcher import NoOptions
from realhf.launch.local import LocalLauncher
from realhf.launch.process import Job, ProcessSpec
from realhf.machine.torch_build import torch_cuda_version
from realhf.rundir.paths import MASTER, RunDirectory, worker_name
from tests.unit.machine.nvml import A100, H100, KINDS, stand_in, uuid_of

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
counts = pytest.mark.parametrize("count", [1, 2, 8])


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_cuda_version", lambda: "12.8")


def job_of(directory: Path, num_workers: int, *avoided: str) -> Job:
    """Its processes do nothing."""
    (directory / "logs").mkdir(exist_ok=True)
    names = (MASTER, *map(worker_name, range(num_workers)))
    processes = (ProcessSpec(name=name, argv=("true",)) for name in names)
    return Job(
        directory=RunDirectory(directory),
        processes=tuple(processes),
        workers_per_node=num_workers,
        avoided=frozenset(avoided),
    )


def launcher() -> LocalLauncher:
    return LocalLauncher(NoOptions())


def shown(job: Job) -> list[tuple[str, str]]:
    """(CUDA_VISIBLE_DEVICES, REALHF_DEVICE) of every worker."""
    _, *workers = launcher().placed(job)
    return [(worker.env["CUDA_VISIBLE_DEVICES"], worker.env["REALHF_DEVICE"]) for worker in workers]


@kinds
@counts
def test_every_worker_is_shown_one_gpu_of_the_machine(kind, count, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [kind] * count)
    assert shown(job_of(tmp_path, count)) == [(uuid_of(i), f"cuda:{i}") for i in range(count)]


@kinds
@counts
@pytest.mark.parametrize("make", [str, uuid_of, lambda index: uuid_of(index)[:7]], ids=["numbers", "UUIDs", "prefixes"])
def test_every_worker_is_shown_one_of_the_gpus_that_the_user_chose(make, kind, count, monkeypatch, tmp_path):
    chosen = [make(index) for index in reversed(range(count))]
    stand_in(monkeypatch, tmp_path, [kind] * count, visible=",".join(chosen))
    assert shown(job_of(tmp_path, count)) == [(token, f"cuda:{i}") for i, token in enumerate(chosen)]


def test_two_workers_take_the_first_of_three_chosen_gpus(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100] * 8, visible="6,2,3")
    assert shown(job_of(tmp_path, 2)) == [("6", "cuda:0"), ("2", "cuda:1")]


@kinds
@counts
@pytest.mark.parametrize("text", ["", "-1"])
def test_an_empty_choice_is_a_run_on_the_cpu_where_no_worker_sees_a_gpu(text, kind, count, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [kind] * count, visible=text)
    assert shown(job_of(tmp_path, 3)) == [("", f"cpu:{i}") for i in range(3)]


@kinds
@counts
def test_more_workers_than_visible_gpus_are_refused(kind, count, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [kind] * count)
    text = (
        rf"{count + 1} workers need a GPU each, and there is {count} x {kind.name}; give --num-workers {count}, or set"
    )
    with pytest.raises(UserError, match=text):
        launcher().preview(job_of(tmp_path, count + 1))


def test_the_number_of_workers_is_held_against_the_chosen_gpus(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100] * 8, visible="3")
    with pytest.raises(UserError, match=r"2 workers need a GPU each, and there is 1 x .*--num-workers 1"):
        launcher().preview(job_of(tmp_path, 2))


def test_a_run_does_without_a_gpu_where_its_workers_died(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [A100] * 3, visible="2,0,1")
    local = launcher()
    local.start(job_of(tmp_path, 2))
    local.stop()
    assert [local.place(worker) for worker in range(2)] == [uuid_of(2), uuid_of(0)]
    assert local.room(frozenset({uuid_of(0)})) == 2  # the third takes its place
    assert local.room(frozenset({uuid_of(0), uuid_of(1)})) == 1
    assert shown(job_of(tmp_path, 2, uuid_of(0))) == [("2", "cuda:0"), ("1", "cuda:2")]
    with pytest.raises(UserError, match=rf"3 workers .* 2 x {A100.name}, without {uuid_of(0)} after failures there"):
        shown(job_of(tmp_path, 3, uuid_of(0)))


def test_on_the_cpu_a_place_is_a_number(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [])
    job, local = job_of(tmp_path, 2, "0"), launcher()
    assert shown(job) == [("", "cpu:1"), ("", "cpu:2")]
    local.start(job)
    local.stop()
    stand_in(monkeypatch, tmp_path, [H100] * 2)
    assert local.place(1) == "2", "devices are those that were there at the first start"
    assert local.room(frozenset({"0", "2"})) == 1


def test_a_torch_for_the_cpu_is_refused_where_there_are_gpus(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100] * 2)
    monkeypatch.setattr(devices, "torch_cuda_version", lambda: None)
    with pytest.raises(UserError, match=rf"this machine has 2 x {H100.name}, but .*torch was not built for CUDA"):
        launcher().preview(job_of(tmp_path, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert shown(job_of(tmp_path, 1)) == [("", "cpu:0")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
        ("__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n", "12.8"),
        ("debug = False\ncuda = '13.0'\n", "13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", None),
        (None, None),
    ],
)
def test_what_torch_was_built_for_is_read_without_importing_it(text, expected, monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('imported')")
    if text is not None:
        (tmp_path / "torch/version.py").write_text(text)
    code = "from realhf.machine.torch_build import torch_cuda_version; print(torch_cuda_version())"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"


def test_the_installed_torch_says_the_same_itself():
    import torch

    assert torch_cuda_version() == torch.version.cuda
