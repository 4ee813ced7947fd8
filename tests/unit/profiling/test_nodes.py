"""A profile on nodes whose GPUs the login node does not know: what a worker finds there, and what comes back."""

from pathlib import Path

import msgspec
import pytest
import torch

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import RunError, UserError
from realhf.base.files import decode_json
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import Job
from realhf.planning.clusters import cluster_of
from realhf.planning.model.descriptions import LEFT_FILE, load_hardware, read_hardware
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import (
    CONSTANTS_FILE,
    MeasuredConstant,
    MeasuredConstants,
    constants_path,
    load_constants,
    save_constants,
)
from realhf.planning.model.profile import load_profile, profile_path, save_profile
from realhf.planning.request import DevicesRequest, unwatched
from realhf.profiling.job import JOB_FILE, RESULTS, ProfileJob, ProfileTarget
from realhf.profiling.measure import Place, measure, measured_before
from realhf.profiling.nodes import on_found
from tests.unit.machine.nvml import H100, stand_in
from tests.unit.planning.test_profile import profile, tensor

NAME = "nvidia-h100-80gb-hbm3"
MODELS = tuple(
    DecoderConfig(hidden_size=64, intermediate_size=256, num_layers=layers, num_heads=2, num_kv_heads=2, vocab_size=64)
    for layers in (1, 2)
)
CPU = torch.device("cpu")


def job(hardware: Hardware | None = None) -> ProfileJob:
    return ProfileJob(
        hardware=hardware,
        targets=tuple(ProfileTarget(model=one, dtype="bfloat16") for one in MODELS),
        num_workers=8,
        num_nodes=2,
        batch_size=8,
        sequence_length=16,
        length_spread=0,
        max_tokens=64,
        max_sequences=8,
        repetitions=1,
        timeout_s=60.0,
        constants=("network",),
    )


def test_a_worker_finds_what_its_node_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It sees one of the node's eight GPUs; the description is of all of them."""
    stand_in(monkeypatch, tmp_path, [H100])
    asked = job()
    kept = f"{NAME}/{asked.targets[0].file}"
    found = on_found(msgspec.structs.replace(asked, kept=(kept, "other/x.json")), tmp_path, 0, CPU)
    assert found.hardware is not None
    assert (found.hardware.name, found.targets) == (NAME, asked.targets[1:])
    description = read_hardware(tmp_path / "hardware.yaml")
    assert (description.name, description.devices_per_node) == (NAME, 8)
    (tmp_path / "hardware.yaml").unlink()
    assert on_found(asked, tmp_path, 3, CPU) == msgspec.structs.replace(asked, hardware=found.hardware)
    assert not (tmp_path / "hardware.yaml").exists(), "the first worker writes it"


def test_a_worker_on_other_hardware_than_was_described_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the plan is for h100 .* and there is no GPU"):
        on_found(job(load_hardware("h100")), tmp_path, 0, CPU)


class Nodes(Launcher):
    """Nodes that have measured as soon as they are started; what they write lies in the job's directory alone."""

    def __init__(self, returncode: int = 0) -> None:
        self.returncode = returncode

    def start(self, job: Job) -> None:
        self.job = job
        asked = decode_json((job.directory.path / JOB_FILE).read_bytes(), ProfileJob)
        hardware = msgspec.structs.replace(load_hardware("h100"), name=NAME)
        results = job.directory.path / RESULTS
        (results / LEFT_FILE).write_bytes(msgspec.yaml.encode(hardware))
        constants = {"inter_node_bandwidth": MeasuredConstant(value=4.2e10, spread=0.01)}
        save_constants(MeasuredConstants(hardware=NAME, constants=constants), results / CONSTANTS_FILE)
        last = asked.targets[-1]  # the others were kept
        save_profile(
            msgspec.structs.replace(profile(tensor(1, 1.0)), model=last.model, dtype=last.dtype, hardware=NAME),
            results / last.file,
        )

    def poll(self) -> list[Exit]:
        return [Exit(name=process.name, returncode=self.returncode) for process in self.job.processes]

    def stop(self, *, grace_s: float = 5.0) -> None: ...


def measured(folder: Path, launcher: Launcher, root: Path | None) -> tuple[Hardware, tuple[Path, ...]]:
    place = Place(launcher=launcher, num_nodes=2, num_workers=8, hardware=None)
    return measure(job(), place, folder, root, unwatched, lambda: None)


def test_what_nodes_have_measured_comes_to_where_plans_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also the description, so that a plan on this machine, which has no GPU, is for these nodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    before = {"memory_bandwidth": MeasuredConstant(value=2e12, spread=0.01)}
    save_constants(MeasuredConstants(hardware=NAME, constants=before), constants_path(NAME))
    nodes = Nodes()
    found, profiles = measured(tmp_path / "runs/job", nodes, None)
    assert found.name == NAME
    assert profiles == (profile_path(MODELS[1], "bfloat16", NAME),)
    assert load_profile(profiles[0]).model == MODELS[1]
    assert set(load_constants(constants_path(NAME)).constants) == {"memory_bandwidth", "inter_node_bandwidth"}
    assert [process.name for process in nodes.job.processes] == [f"worker-{index}" for index in range(16)]
    assert nodes.job.workers_per_node == 8
    assert not (tmp_path / "runs").exists()
    assert set(measured_before(None)) == {f"{NAME}/{profiles[0].name}", f"{NAME}/constants.json"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cluster = cluster_of(DevicesRequest(nodes=2, gpus_per_node=8, place="nodes"))
    assert cluster.hardware.name == NAME


def test_nodes_that_fail_leave_their_logs(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        measured(tmp_path / "runs/job", Nodes(returncode=1), tmp_path / "profiles")
    assert raised.value.__notes__ == [f"logs of the job are kept in {tmp_path / 'runs/job'}"]
    assert (tmp_path / "runs/job/logs").is_dir()
    assert not (tmp_path / "profiles").exists()
