"""The processes of a run as a launcher gets them: names, commands, environments."""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.launch import process
from realhf.launch.launcher import UNKNOWN_RETURNCODE
from realhf.launch.process import (
    AGAIN_ENDED,
    MASTERLESS_RETURNCODE,
    TOLD_RETURNCODE,
    Job,
    ProcessSpec,
    gpu_environment,
    job_name,
    job_of,
    module_of,
    process_environment,
    processes_of,
    worker_index,
    workers_of,
)
from realhf.rundir.paths import RunDirectory

GPU = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "NCCL_GRAPH_REGISTER": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


def spec(name: str) -> ProcessSpec:
    return ProcessSpec(name=name, argv=("true",))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which the user has said nothing, on a machine without our library of memory."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GLIBC_TUNABLES", "LD_PRELOAD", *GPU, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_aligned_memory", lambda: None)


def test_a_process_has_a_name_that_tells_its_index_and_a_command() -> None:
    assert [spec(name).index for name in ("master", "worker-0", "worker-12")] == [None, 0, 12]
    for name in ("worker-01", "worker", "worker-x", "Master", "worker-"):
        with pytest.raises(AssertionError, match=f"process name '{name}'"):
            spec(name)
    with pytest.raises(AssertionError, match="worker-3 has no command"):
        ProcessSpec(name="worker-3", argv=())


def test_a_job_has_its_workers_by_index_and_one_master_at_most(directory: RunDirectory) -> None:
    def made(*names: str) -> Job:
        return Job(directory=directory, processes=tuple(map(spec, names)), workers_per_node=1, start_id="second")

    job = made("master", "worker-0", "worker-1")
    assert [worker.name for worker in job.workers] == ["worker-0", "worker-1"]
    assert [worker.name for worker in made("worker-0").workers] == ["worker-0"]
    assert made("master").workers == ()
    assert job.exits == directory.exits / "second"
    defaults = (job.name, job.nodelist, job.avoided, job.again, job.is_made_ready_there, job.after, job.takes_notice)
    assert defaults == ("realhf", None, frozenset(), (), False, "", False)
    for names in (("worker-1", "worker-0"), ("worker-1",), ("master", "worker-0", "worker-2")):
        with pytest.raises(AssertionError, match="workers "):
            made(*names)
    with pytest.raises(AssertionError, match="several masters"):
        made("master", "master", "worker-0")


@pytest.mark.usefixtures("plain")
def test_the_job_of_a_run_is_what_its_specification_says(directory: RunDirectory) -> None:
    directory.start.write_text("a1b2\n")
    spec: dict[str, Any] = {
        "experiment_file": "experiments/my_ppo.py",
        "num_workers": 4,
        "devices_per_node": 2,
        "avoided": ("n3", "n5"),
        "hardware": SimpleNamespace(threads=6),
    }
    experiment = SimpleNamespace(settings=SimpleNamespace(nodelist="n[1-9]"))
    run: Any = SimpleNamespace(spec=SimpleNamespace(**spec), experiment=experiment)
    job = job_of(run, directory, is_remote=True)
    assert job == Job(
        name="realhf-my_ppo",
        directory=directory,
        processes=processes_of(directory, 4, 6, is_remote=True),
        workers_per_node=2,
        nodelist="n[1-9]",
        avoided=frozenset({"n3", "n5"}),
        again=(sys.executable, "-P", "-m", "realhf.lifecycle.again", str(directory.path)),
        takes_notice=True,
        start_id="a1b2",
    )
    run.spec.hardware = None
    one_thread = job_of(run, directory, is_remote=False)
    assert one_thread.processes == processes_of(directory, 4, 1, is_remote=False)
    assert job_name("a/b.c.py") == "realhf-b.c"


@pytest.mark.usefixtures("plain")
def test_the_processes_of_a_run(directory: RunDirectory) -> None:
    python, folder = (sys.executable, "-P", "-m"), str(directory.path)
    common = {"PYTHONUNBUFFERED": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    one, three = (
        {**common, "OMP_NUM_THREADS": "1"},
        {**common, "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    # Nothing was started yet: there is no start to tell.
    assert processes_of(directory, 2, 3, is_remote=False) == (
        ProcessSpec(
            name="master",
            argv=(*python, "realhf.master", folder, "127.0.0.1"),
            env={**one, "CUDA_VISIBLE_DEVICES": ""},
        ),
        ProcessSpec(name="worker-0", argv=(*python, "realhf.worker", folder), env=three | GPU),
        ProcessSpec(name="worker-1", argv=(*python, "realhf.worker", folder), env=three | GPU),
    )
    directory.start.write_text("a1b2\n")
    master, worker = processes_of(directory, 1, 1, is_remote=True)
    assert master.argv == (*python, "realhf.master", folder)
    assert master.env == {**one, "CUDA_VISIBLE_DEVICES": "", "REALHF_START_ID": "a1b2"}
    assert worker.env == {**one, **GPU, "REALHF_START_ID": "a1b2"}
    [bench] = workers_of("realhf.profiling.job", directory, 1, 3, SEED="4")
    assert (bench.name, bench.argv) == ("worker-0", (*python, "realhf.profiling.job", folder))
    assert bench.env == {**three, **GPU, "SEED": "4"}
    assert module_of(master) == ("realhf.master", folder)
    with pytest.raises(AssertionError, match="is no command of Python"):
        module_of(ProcessSpec(name="master", argv=("bash", "-P", "-m", "realhf.master")))


@pytest.mark.usefixtures("plain")
def test_what_the_user_has_set_stays_beside_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_environment() == {
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"
    }  # fmt: skip
    monkeypatch.setattr(process, "_aligned_memory", lambda: "/lib/aligned.so")
    assert process_environment(2)["LD_PRELOAD"] == "/lib/aligned.so"
    for name, value in (("LD_PRELOAD", "/m.so"), ("GLIBC_TUNABLES", "a=b"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    assert process_environment(2) == {
        "LD_PRELOAD": "/m.so:/lib/aligned.so",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:a=b",
    }


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("value", ["8", ""])
def test_what_the_user_has_set_for_gpus_stays(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_environment() == GPU
    for name in GPU:
        with monkeypatch.context() as user:
            user.setenv(name, value)
            others = {other: GPU[other] for other in GPU if name != other}
            assert gpu_environment() == (others if name == "PYTORCH_ALLOC_CONF" else others | {name: value})
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)  # which torch reads where the new name is not set
    assert "PYTORCH_ALLOC_CONF" not in gpu_environment()


@pytest.mark.parametrize(
    ("origin", "libc", "is_loaded"),
    [
        ("/opt/realhf/_aligned.so", "glibc", True),
        ("/opt/my realhf/_aligned.so", "glibc", False),
        ("/opt/a:b/_aligned.so", "glibc", False),
        (None, "glibc", False),
        ("/opt/realhf/_aligned.so", "musl", False),
    ],
)
def test_the_library_of_memory_is_loaded_where_the_loader_can_name_it(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, libc: str, is_loaded: bool
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=origin))
    assert process_environment().get("LD_PRELOAD") == (origin if is_loaded else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "LD_PRELOAD" not in process_environment()


def test_a_worker_knows_its_index_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "REALHF_WORKER_INDEX", "12")
    assert worker_index() == 12


def test_exit_codes_that_have_a_meaning_stay_as_they_are() -> None:
    """Batch scripts of earlier versions, and whoever reads logs, know them."""
    assert (AGAIN_ENDED, TOLD_RETURNCODE, MASTERLESS_RETURNCODE, UNKNOWN_RETURNCODE) == (3, 86, 87, 255)
