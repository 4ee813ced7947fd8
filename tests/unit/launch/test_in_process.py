"""A run in the launching process itself, with modules in the places of master and worker that note what they see."""

import bdb
import contextvars
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.launch import in_process
from realhf.launch.in_process import InProcessLauncher
from realhf.launch.launcher import Exit, NoOptions
from realhf.launch.process import Job, ProcessSpec
from realhf.rundir.paths import RunDirectory
from tests.unit.machine.nvml import H100, stand_in, uuid_of

IN_CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("IN_CONTEXT", default="of the caller")


class Module:
    """What stands in for the modules: `behaviours` by name say what happens in each step."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.environments: dict[str, dict[str, str]] = {}
        self.behaviours: dict[str, list[Any]] = {}
        self.kept: list[Iterator[None]] = []  # which nobody but the launcher ends

    def in_process(self, path: str, name: str) -> Iterator[None]:
        self.environments[f"{name} is made"] = dict(os.environ)
        self.kept.append(self._steps(path, name))
        return self.kept[-1]

    def _steps(self, path: str, name: str) -> Iterator[None]:
        self.environments[f"{name} runs"] = dict(os.environ)
        IN_CONTEXT.set(name)
        try:
            for behaviour in self.behaviours[name]:
                self.noted.append((name, path, IN_CONTEXT.get()))
                if isinstance(behaviour, BaseException):
                    raise behaviour
                if isinstance(behaviour, int):
                    return behaviour  # type: ignore[return-value]
                yield
        finally:
            self.noted.append(f"{name} ends")


class Clock:
    """Shows an eighth of a second more at each look."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.125
        return self.now_s


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    stand_in_module = ModuleType("its_module.__main__")
    stand_in_module.in_process = made.in_process  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "its_module", ModuleType("its_module"))
    monkeypatch.setitem(sys.modules, "its_module.__main__", stand_in_module)
    monkeypatch.setattr(in_process, "time", Clock())
    return made


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[InProcessLauncher]:
    stand_in(monkeypatch, tmp_path, [])
    made = InProcessLauncher(NoOptions())
    yield made
    made.stop()


def job(path: Path, *workers: str, **more: Any) -> Job:
    names = ("master", *workers)
    processes = tuple(
        ProcessSpec(name=name, argv=python_command("its_module", "/run", name), env={f"OF_{name[:6].upper()}": name})
        for name in names
    )
    return Job(directory=RunDirectory(path), processes=processes, workers_per_node=1, **more)


def test_it_runs_one_worker(launcher: InProcessLauncher, module: Module, tmp_path: Path) -> None:
    assert launcher.preview(job(tmp_path, "worker-0")) == (
        "master: its_module /run master, in this process\nworker-0: its_module /run worker-0, in this process\n"
    )
    for workers in ((), ("worker-0", "worker-1")):
        message = (
            f"^--launcher in-process runs one worker, and the run has {len(workers)}; give --num-workers 1, or "
            "--launcher local$"
        )
        with pytest.raises(UserError, match=message):
            launcher.preview(job(tmp_path, *workers))
        with pytest.raises(UserError, match=message):
            launcher.start(job(tmp_path, *workers))
    assert module.environments == {}


def test_master_and_worker_take_turns_until_each_has_ended(
    launcher: InProcessLauncher, module: Module, tmp_path: Path
) -> None:
    module.behaviours = {"master": [None, 3], "worker-0": [None, None, None, 0]}
    launcher.start(job(tmp_path, "worker-0"))
    assert launcher.poll() == [], "the caller has to be back once before anything is executed"
    assert module.noted == []
    assert launcher.poll() == [Exit(name="master", returncode=3)]
    once = [("master", "/run", "master"), ("worker-0", "/run", "worker-0")]
    assert module.noted == [*once, *once[:1], "master ends", *once[1:], *once[1:]], "for half a second"
    assert IN_CONTEXT.get() == "of the caller"
    assert launcher.poll() == [Exit(name="worker-0", returncode=0)]
    assert launcher.poll() == []
    assert module.noted[-2:] == [*once[1:], "worker-0 ends"]


def test_environment_and_logging_are_the_workers_until_it_is_stopped(
    launcher: InProcessLauncher, module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_USER", "kept")
    monkeypatch.setattr(sys, "excepthook", print)
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", logging.ERROR)
    before = dict(os.environ)
    module.behaviours = {"master": [None, 0], "worker-0": [None]}
    launcher.start(job(tmp_path, "worker-0", avoided=frozenset({"0"})))
    launcher.poll()
    launcher.poll()
    made, runs = module.environments["master is made"], module.environments["worker-0 runs"]
    assert (made["OF_MASTER"], made.get("OF_WORKER")) == ("master", None)
    assert "REALHF_WORKER_INDEX" not in made
    assert (runs["OF_MASTER"], runs["OF_WORKER"], runs["OF_THE_USER"]) == ("master", "worker-0", "kept")
    assert (runs["REALHF_WORKER_INDEX"], runs["REALHF_DEVICE"], runs["CUDA_VISIBLE_DEVICES"]) == ("0", "cpu:1", "")
    assert root.level == logging.INFO
    sys.excepthook = repr
    launcher.stop(grace_s=1.0)
    assert dict(os.environ) == before
    assert (root.level, sys.excepthook) == (logging.ERROR, print)


def test_the_worker_has_a_gpu_where_there_is_one(
    launcher: InProcessLauncher, module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, [H100, H100])
    monkeypatch.setattr("realhf.launch.devices.torch_cuda_version", lambda: "12.8")
    launcher.start(job(tmp_path, "worker-0", avoided=frozenset({uuid_of(0)})))
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["REALHF_DEVICE"]) == (uuid_of(1), "cuda:1")
    launcher.stop()
    with pytest.raises(UserError, match="1 workers need a GPU each, and there is none, without GPU-"):
        launcher.start(job(tmp_path, "worker-0", avoided=frozenset({uuid_of(0), uuid_of(1)})))


def test_stopping_ends_the_worker_first_and_the_next_job_begins_anew(
    launcher: InProcessLauncher, module: Module, tmp_path: Path
) -> None:
    module.behaviours = {"master": [None] * 9, "worker-0": [None] * 9}
    assert launcher.poll() == []
    for _ in range(2):
        module.noted.clear()
        launcher.start(job(tmp_path, "worker-0"))
        assert (launcher.poll(), module.noted) == ([], [])
        launcher.poll()
        launcher.stop()
        assert module.noted[-2:] == ["worker-0 ends", "master ends"]
        assert launcher.poll() == []


@pytest.mark.parametrize(
    ("raised", "seen"), [(bdb.BdbQuit(), KeyboardInterrupt), (ZeroDivisionError("of an interface"), ZeroDivisionError)]
)
def test_what_the_worker_raises_is_raised_and_quit_is_an_interruption(
    launcher: InProcessLauncher, module: Module, tmp_path: Path, raised: BaseException, seen: type[BaseException]
) -> None:
    module.behaviours = {"master": [None] * 9, "worker-0": [raised]}
    launcher.start(job(tmp_path, "worker-0"))
    launcher.poll()
    with pytest.raises(seen):
        launcher.poll()
