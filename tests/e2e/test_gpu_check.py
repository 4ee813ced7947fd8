"""The one command for a machine with a GPU: the order of its steps, its first failure, and the folder it leaves."""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml
import pytest

from realhf.machine.gpus import VISIBLE, visible_gpus
from tests.docs.blocks import ROOT
from tests.unit.machine.nvml import H100, stand_in
from tests.waiting import PATIENCE_S, wait_until

SCRIPT = ROOT / "scripts/gpu_check.py"
LEAVES_A_CHILD = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"


def loaded(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_check() -> ModuleType:
    return loaded(SCRIPT)


@pytest.fixture
def gpu_parts() -> ModuleType:
    return loaded(ROOT / "scripts/gpu_parts.py")


Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Takes these steps instead of its own: name, code, and further fields; returns `gpu_check.json`."""

    def check(
        *taken: tuple[str, str, dict[str, Any]], words: tuple[str, ...] = ("--cpu",), code: int = 1
    ) -> dict[str, Any]:
        steps = [
            gpu_check.Step(**{"name": name, "command": (sys.executable, "-c", source), "deadline_s": PATIENCE_S,
                              "remedy": f"the remedy of {name}", **more})
            for name, source, more in taken
        ]  # fmt: skip
        monkeypatch.setattr(gpu_check, "steps", lambda out, gpus, on_cpu: steps)
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out"), *words])
        assert gpu_check.main() == code
        result: dict[str, Any] = json.loads((tmp_path / "out/gpu_check.json").read_text())
        return result

    handler = signal.getsignal(signal.SIGTERM)
    yield check
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_the_order_of_the_steps_and_their_deadlines(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    stand_in(monkeypatch, tmp_path, [H100] * num_gpus)
    gpus = visible_gpus()
    steps = gpu_check.steps(tmp_path, gpus, on_cpu=not gpus)
    assert sum(step.deadline_s for step in steps) < 600
    one, two, wire = ("one GPU", "two GPUs", "NCCL") if gpus else ("one process", "two processes", "gloo")
    assert [step.name for step in steps] == [
        "driver and packages", one, "attention kernels", "graphs and memory", f"{two}: {wire} in graphs",
        f"{two}: groups, messages, reallocation", "doctor", "profile in float32", "profile in bfloat16",
        "PPO in float32", "PPO in bfloat16", "generation benchmark", "training benchmark",
    ]  # fmt: skip
    skipped = {"attention kernels": "no GPU", "graphs and memory": "no GPU"}
    skipped = [skipped, {step.name: "one GPU" for step in steps[4:6]}, {}][num_gpus]
    assert {step.name: step.skipped for step in steps if step.skipped} == skipped
    assert steps[1].environment == {VISIBLE: gpus[0].token if gpus else ""}
    assert all(step.remedy for step in steps)
    parts = [step.command[2:] for step in steps if step.command[1] == "scripts/gpu_parts.py"]
    assert parts == [(part, *(() if gpus else ("--cpu",))) for part in ("packages", "one", "graphs", "groups")]
    names = [word for step in steps for word in step.command if word.endswith(".py")]
    assert all((ROOT / name).is_file() for name in names)
    assert {Path(name) for name in names} >= {path.relative_to(ROOT) for path in ROOT.glob("tests/gpu/test_[!b]*.py")}


def test_the_first_failure_ends_it_with_its_log_and_its_remedy(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        ("skipped", "", {"skipped": "one GPU"}),
        ("good", "print('all is well')", {"is_shown": True}),
        ("bad", "for i in range(99): print('line', i)\nraise SystemExit(3)", {}),
        ("after it", "raise SystemExit(4)", {}),
        ("never", "", {"skipped": "no GPU"}),
    ]
    result = check(*steps)
    outcomes = ["skipped: one GPU", "passed", "failed with exit code 3", "not tried", "skipped: no GPU"]
    assert [step["result"] for step in result["steps"]] == outcomes
    assert [step["remedy"] for step in result["steps"]] == ["", "", "the remedy of bad", "", ""]
    out = capsys.readouterr().out
    assert "all is well" in out
    assert "line 98" in out
    assert "line 80" not in out  # its last lines alone
    assert "what to do: the remedy of bad" in out
    shown = [line.split() for line in out.splitlines()]
    for name, outcome in zip(steps, outcomes, strict=True):
        assert any(words[:-1] == [*name[0].split(), *outcome.split()] for words in shown), (name[0], outcome)


def test_a_driver_that_does_not_answer_is_left_to_the_first_step(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, [H100], init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert "version mismatch" in check(("good", "", {}), words=(), code=0)["hardware"]


def test_go_on_takes_the_later_steps_and_a_check_has_its_own_remedies(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("ok   torch   2.13", "fail NCCL   a; b; remedy: mend the links", "warn x   y; remedy: no matter")
    result = check(
        ("bad", f"print({os.linesep.join(lines)!r})\nraise SystemExit(1)", {}),
        ("good", "print('all is well')", {}),
        words=("--cpu", "--go-on"),
    )
    assert [step["result"] for step in result["steps"]] == ["failed with exit code 1", "passed"]
    assert result["steps"][0]["remedy"] == "mend the links"
    assert "what to do: mend the links\n" in capsys.readouterr().out


def test_predictions_stand_beside_measurements(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("call", "predicted_s", "measured_s", "predicted_bytes", "measured_bytes")
    calls = [dict(zip(keys, row, strict=True)) for row in (("act", 0.25, 0.5, None, 2**21), ("all", 1.0, 2.0, 0, 3))]
    (tmp_path / "PPO.log").touch()
    outcome = gpu_check.Outcome("PPO", "passed", (), 1.0, "PPO.log", "", calls)
    gpu_check.tell(gpu_check.Step("PPO", (), 1, "none"), outcome, tmp_path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["call", "predicted", "s", "measured", "s", "predicted", "MiB", "measured", "MiB"] in lines
    assert ["act", "0.250", "0.500", "-", "2"] in lines


def test_no_process_is_left(check: Check, tmp_path: Path) -> None:
    """By a step that hangs, by one that ends well, and by one in which the check itself is ended."""
    hangs = f"{LEAVES_A_CHILD}; import time; time.sleep(1000)"
    result = check(("hangs", hangs, {"deadline_s": 5.0}), ("leaves", LEAVES_A_CHILD, {}), words=("--cpu", "--go-on"))
    assert [step["result"] for step in result["steps"]] == ["not done within 5 s", "passed"]
    ends_it = f"{LEAVES_A_CHILD}; import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(1000)"
    with pytest.raises(SystemExit) as ended:
        check(("ends it", ends_it, {}), words=("--cpu", "--out", str(tmp_path / "ended")))
    assert ended.value.code == 128 + signal.SIGTERM
    for log in ("out/hangs.log", "out/leaves.log", "ended/ends-it.log"):
        child = int((tmp_path / log).read_text())
        wait_until(lambda child=child: not is_running(child), "the end of a process that a step has started")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_packed_folder_has_all_but_secrets(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the run has failed. Of the environment it has the variables that GPUs and runs depend on."""
    for name in ("NCCL_DEBUG", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "REALHF_X", "HF_TOKEN", "MY_CUDA_KEY"):
        monkeypatch.setenv(name, f"value of {name}")
    run = tmp_path / "out/ppo"
    files = ("keys/master.secret", "rendezvous/store", "checkpoints/step-2/actor.bin", "logs/worker-0.log")
    code = "import sys, pathlib\nfor f in map(pathlib.Path, sys.argv[1:]):\n f.parent.mkdir(parents=True); f.touch()"
    result = check(("PPO", f"{code}\nsys.exit(1)", {"run_dir": run, "command": (
        sys.executable, "-c", f"{code}\nsys.exit(1)", *(str(run / file) for file in files))}))  # fmt: skip
    assert {"NCCL_DEBUG", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "REALHF_X"} <= set(result["environment"])
    assert not {"HF_TOKEN", "MY_CUDA_KEY", "PATH", "HOME"} & set(result["environment"])
    assert result["commit"]
    assert result["versions"]["torch"]
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    subprocess.run(command, cwd=tmp_path, check=True, timeout=PATIENCE_S)
    listed = subprocess.run(("tar", "-tzf", tmp_path / "out.tar.gz"), capture_output=True, text=True, check=True)
    assert {name for name in listed.stdout.split() if not name.endswith("/")} == {
        "out/gpu_check.json", "out/ppo.log", "out/ppo/logs/worker-0.log",
    }  # fmt: skip


def test_without_a_gpu_or_a_new_folder_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    cases = {(): "this machine has no GPU; --cpu takes the steps in small on a CPU",
             ("--cpu", "--out", str(tmp_path)): "exists and is not empty; give a new folder"}  # fmt: skip
    for words, message in cases.items():
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        argv = [sys.executable, str(SCRIPT), *words]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.parametrize(
    ("cuda_of_torch", "detail", "remedy"),
    [
        ("12.8", "580.95.05, up to CUDA 13.0; 1 x NVIDIA H100 80GB HBM3; torch was built for CUDA 12.8", ""),
        (None, "torch was built without CUDA", "install a torch that was built for CUDA 13 (https://pytorch.org"),
        ("14.0", "the driver is too old for it", "built for CUDA 13 (https://pytorch.org/get-started/locally), or a "),
    ],
)
def test_the_driver_takes_the_torch_or_the_remedy_names_another(
    gpu_parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_of_torch: str | None, detail: str,
    remedy: str,
) -> None:  # fmt: skip
    stand_in(monkeypatch, tmp_path, [H100])
    monkeypatch.setattr(gpu_parts, "torch_cuda_version", lambda: cuda_of_torch)
    finding = gpu_parts.checks_of("packages", on_cpu=False)[0].run()
    assert detail in finding.detail
    assert finding.state == ("fail" if remedy else "ok")
    assert remedy in finding.remedy


def test_missing_packages_are_named_with_the_way_to_install_them(
    gpu_parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention kernels' by the checks of the doctor."""
    stand_in(monkeypatch, tmp_path, [H100])
    monkeypatch.setattr(gpu_parts, "version", lambda name: loaded_version(name))

    def loaded_version(name: str) -> str:
        raise gpu_parts.PackageNotFoundError(name)

    checks = {check.name: check for check in gpu_parts.checks_of("packages", on_cpu=False)}
    assert {"attention", "triton", "flash-attn", "varlen"} <= set(checks)
    assert "not installed: " in checks["megatron-core"].run().detail
    assert checks["pytest"].run().state == "fail"
    assert "NCCL" in checks["NCCL"].run().remedy


def test_every_part_checks_graphs_before_groups_and_names_a_remedy(gpu_parts: ModuleType) -> None:
    """Without a GPU each check fails by itself."""
    for part in gpu_parts.PARTS:
        for on_cpu in (False, True):
            assert all(check.remedy for check in gpu_parts.checks_of(part, on_cpu=on_cpu))
    for part in ("one", "graphs"):
        [*_, graphs] = gpu_parts.checks_of(part, on_cpu=False)
        finding = graphs.run()
        assert finding.state == "fail"
        assert 'decode_graphs="off"' in finding.remedy
        assert "--ppo.decode-graphs off" in finding.remedy


@pytest.mark.slow
def test_every_step_runs_in_small_on_a_cpu(gpu_check: ModuleType, tmp_path: Path) -> None:
    """But for its deadline, which a busy machine may miss: as `python scripts/gpu_check.py --cpu`."""
    outcomes = {}
    for step in gpu_check.steps(tmp_path, (), on_cpu=True):
        if not step.skipped:
            outcome = gpu_check.run(replace(step, deadline_s=PATIENCE_S), tmp_path)
            assert outcome.result == "passed", (tmp_path / outcome.log).read_text()[-4000:]
            gpu_check.tell(step, outcome, tmp_path)
            outcomes[step.name] = outcome
    for dtype in ("float32", "bfloat16"):
        calls = outcomes[f"PPO in {dtype}"].calls
        assert [call["call"] for call in calls][-2:] == ["critic_train_step", gpu_check.STEP]
        assert len(calls) == 7
        assert all(call[key] > 0 for call in calls for key in ("predicted_s", "measured_s", "measured_bytes"))
        assert calls[-1]["predicted_bytes"] > 0
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"training.json", "generation.json", "ppo-float32/metrics.jsonl", "ppo-bfloat16/logs/worker-0.log"} <= files
    assert sum('"layer_forward"' in path.read_text() for path in tmp_path.glob("*.json")) == 4  # two models, two dtypes
    assert not [name for name in files if "secret" in name or {"keys", "checkpoints"} & set(Path(name).parts)]
    assert json.loads((tmp_path / "training.json").read_text())["results"]
