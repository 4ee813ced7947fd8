"""The main job (`make run`) and its commands on machines of few GPUs, up to the start of the workers."""

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from realhf.cli import main
from realhf.launch import devices
from realhf.launch.local import LocalLauncher
from realhf.launch.process import Job, job_of
from realhf.lifecycle import controller
from realhf.machine import host
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run
from tests.unit.machine.nvml import A100, H100, KINDS, RTX_4090, Device, stand_in, uuid_of

UNKNOWN = replace(H100, name="NVIDIA X9000", memory_mib=30_000)  # no preset is of it
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_cuda_version", lambda: "12.8")
    monkeypatch.chdir(ROOT)


@pytest.fixture
def main_job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose commands are not carried out but kept in `commands`."""
    spec = importlib.util.spec_from_file_location("main_job", ROOT / "scripts/main_job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.commands = []
    monkeypatch.setattr(module, "realhf", lambda *words: module.commands.append(words))
    monkeypatch.setattr(module, "print_result", lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("found", "visible", "cores", "workers"),
    [
        ([H100], None, 26, "1"),
        ([RTX_4090] * 2, None, 1, "2"),
        ([A100] * 8, None, 64, "2"),
        ([A100] * 8, "5", 64, "1"),
        ([A100] * 8, "", 64, "2"),
        ([], None, 1, "1"),
    ],
)
def test_the_main_job_takes_two_devices_or_the_only_one(
    found: list[Device],
    visible: str | None,
    cores: int,
    workers: str,
    main_job: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    stand_in(monkeypatch, tmp_path, found, visible)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(cores))
    (tmp_path / "reward").mkdir()
    scores = {"step": 1, "sample_score": 1.0, "sample_score_square": 2.0}
    (tmp_path / "reward/evaluations.jsonl").write_text(json.dumps(scores) + "\n")
    monkeypatch.setattr("sys.argv", ["main_job.py", "--root", str(tmp_path)])
    main_job.main()
    experiments = ["ppo", "sft", "reward", "ppo"]
    assert [words[:2] for words in main_job.commands] == [
        ("run" if i else "profile", f"experiments/{name}.py") for i, name in enumerate(experiments)
    ]
    assert [words[words.index("--num-workers") + 1] for words in main_job.commands] == [workers] * 4


def test_the_main_job_says_what_is_wrong_with_the_gpus(
    main_job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, [H100, RTX_4090])
    monkeypatch.setattr("sys.argv", ["main_job.py", "--root", str(tmp_path)])
    with pytest.raises(SystemExit, match="error: a run needs GPUs of one kind"):
        main_job.main()


@pytest.mark.parametrize("experiment", ["ppo", "sft"])
@pytest.mark.parametrize("kind", [*KINDS, UNKNOWN], ids=lambda kind: kind.name)
def test_a_run_on_one_gpu_is_planned_and_its_worker_is_shown_it(
    kind: Device, experiment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, [kind])
    started = []

    class Carried:
        def __init__(self, run: Run, request: Any, directory: RunDirectory, launcher: LocalLauncher, listener: Any):
            started.append((run, launcher.placed(job_of(run, directory, is_remote=False))))

        def carry_out(self) -> None: ...

    monkeypatch.setattr(controller, "Controller", Carried)
    words = ["run", f"experiments/{experiment}.py", "--run-dir", str(tmp_path / "run"), "--num-workers", "1"]
    assert main([*words, "--data-dir", str(tmp_path / "data")]) == 0
    ((job, (master, worker)),) = started
    assert job.plan.num_devices == 1
    assert (master.env["CUDA_VISIBLE_DEVICES"], worker.env["CUDA_VISIBLE_DEVICES"]) == ("", uuid_of(0))
    assert worker.env["REALHF_DEVICE"] == "cuda:0"


def test_the_profiler_s_workers_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, tmp_path, [H100] * 2, visible="1,0")
    measured = []

    def measure(launcher: LocalLauncher, job: Job, *_: Any) -> None:
        measured.extend(launcher.placed(job))
        raise KeyboardInterrupt

    monkeypatch.setattr("realhf.profiling.measure.supervise", measure)
    words = ["profile", "experiments/ppo.py", "--profiles-dir", str(tmp_path / "profiles")]
    assert main([*words, "--data-dir", str(tmp_path / "data")]) == 130
    assert [(spec.env["CUDA_VISIBLE_DEVICES"], spec.env["REALHF_DEVICE"]) for spec in measured] == [
        ("1", "cuda:0"),
        ("0", "cuda:1"),
    ]


def test_more_workers_than_gpus_leave_no_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, tmp_path, [H100])
    words = ["run", "experiments/sft.py", "--run-dir", str(tmp_path / "run"), "--num-workers", "2"]
    assert main([*words, "--data-dir", str(tmp_path / "data")]) == 2
    assert f"2 workers need a GPU each, and there is 1 x {H100.name}; give --num-workers 1" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "run")
