"""Which hardware a command line plans for, on stand-ins for the devices of this machine."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.cli import main
from realhf.data.sort_task import SORT_MODEL
from realhf.geometry.parameters import parameter_count
from realhf.launch.process import job_of
from realhf.lifecycle.new import checkpoint_lines, hardware_lines, new_run
from realhf.lifecycle.replan import planned_task
from realhf.machine import host
from realhf.planning.clusters import cluster_of, crowded_text, hardware_text
from realhf.planning.here import COUNTED_OF_GPU, cpu_hardware, divided, hardware_here
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import leave_description, load_hardware
from realhf.planning.model.hardware import GIB, in_gib
from realhf.planning.model.profile import profile_path
from realhf.planning.predict import predict
from realhf.planning.request import DevicesRequest, PlannedHardware
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import RunSpec
from tests.unit.lifecycle.requests import request_of
from tests.unit.machine.nvml import A100, H100, KINDS, RTX_4090, Device, stand_in
from tests.unit.planning.graphs import TINY

UNKNOWN = Device("NVIDIA B300 SXM7", 270_000, (10, 3), 20_480, 2000, 4000, 8192)
SINGLE = "tests/plans/single.json"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """8 cores, 33 GiB, no GPU; profiles lie in the folder that is returned."""
    stand_in(monkeypatch, tmp_path, [])
    monkeypatch.setattr(host, "_groups", lambda root, controller: iter(()))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(total=33 * GIB))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("realhf.planning.model.descriptions.profiles_root", lambda: tmp_path / "profiles")
    monkeypatch.setattr("realhf.planning.model.profile.profiles_root", lambda: tmp_path / "profiles")
    return tmp_path / "profiles"


def cluster_at(place: Literal["here", "nodes"] | None, **fields: Any) -> Cluster:
    return cluster_of(DevicesRequest(place=place, **fields))


def spec(**fields: object) -> RunSpec:
    base = {"num_workers": 2, "devices_per_node": 2, **fields}
    return RunSpec(experiment_file="", experiment_class="", values={}, working_directory="", **base)


@pytest.mark.parametrize("place", ["here", None])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("kind", [*KINDS, UNKNOWN], ids=lambda kind: kind.name)
def test_the_gpus_that_are_here(place, count, kind, monkeypatch, machine):
    stand_in(monkeypatch, machine.parent, [kind] * count)
    cluster = cluster_at(place)
    assert (cluster.num_devices, cluster.num_nodes) == (count, 1)
    assert cluster.device_memory_bytes == int(COUNTED_OF_GPU * kind.memory_mib * 2**20)
    folder = profile_path(TINY, "float32", cluster.hardware.name).parent
    assert folder == machine / kind.name.lower().replace(" ", "-")
    assert hardware_text(cluster.hardware, 1, count).startswith(f"1 x {count} {folder.name} with ")


@pytest.mark.parametrize(("place", "visible"), [("here", ""), (None, "-1")])
def test_without_visible_gpus_workers_share_the_cpu(place, visible, monkeypatch, machine):
    stand_in(monkeypatch, machine.parent, [H100] * 2, visible)
    assert cluster_at(place).num_devices == 8
    cluster = cluster_at(place, num_workers=2)
    assert cluster.hardware.name == "cpu-4-threads"
    assert cluster.device_memory_bytes == 16 * GIB - round(0.4 * GIB)
    text = "1 x 2 cpu-4-threads with 15.6 GiB each (this machine's 33.0 GiB and 8 cores)"
    assert hardware_text(cluster.hardware, 1, 2) == text


@pytest.mark.parametrize("place", ["here", None])
def test_gpus_of_several_kinds_are_refused(place, monkeypatch, machine):
    stand_in(monkeypatch, machine.parent, [H100, RTX_4090])
    with pytest.raises(UserError, match="a run needs GPUs of one kind"):
        cluster_at(place)


@pytest.mark.parametrize("place", ["here", None])
def test_the_memory_that_is_given(place):
    cluster = cluster_at(place, num_workers=2, memory_gb=3.5)
    assert cluster.device_memory_bytes == cluster.hardware.device_memory_bytes == int(3.5 * GIB)


def test_more_memory_than_a_gpu_has_is_refused(monkeypatch, machine):
    stand_in(monkeypatch, machine.parent, [A100] * 2)
    with pytest.raises(UserError, match=r"counts on 41.0 GiB a device, and NVIDIA A100-SXM4-40GB has 40.0 GiB"):
        cluster_at("here", memory_gb=41)
    assert cluster_at(None, memory_gb=41).device_memory_bytes == 41 * GIB


def test_nodes_of_one_machine_share_it():
    here = cluster_at("here", nodes=2, gpus_per_node=2)
    assert here.device_memory_bytes == 8 * GIB - round(0.4 * GIB)
    like_this = cluster_at(None, nodes=2, gpus_per_node=2)
    assert like_this.device_memory_bytes == 16 * GIB - round(0.4 * GIB)


def test_a_description_may_lie_anywhere_and_need_not_be_called_after_itself(machine):
    mine = structs.replace(load_hardware("cpu"), name="workstation", device_memory_bytes=5 * GIB)
    path = machine.parent / "elsewhere" / "mine.yaml"
    path.parent.mkdir()
    path.write_bytes(msgspec.yaml.encode(mine))
    for word in (str(path), os.path.relpath(path)):
        cluster = cluster_at("here", num_workers=2, hardware=word)
        assert (cluster.hardware, cluster.device_memory_bytes) == (mine, 5 * GIB)
    with pytest.raises(UserError, match=r"none.yaml: cannot read the hardware description \(No such file"):
        cluster_at("here", hardware="none.yaml")


def test_a_run_keeps_its_hardware_when_the_file_has_gone(machine):
    mine = structs.replace(load_hardware("cpu"), name="workstation", device_memory_bytes=5 * GIB)
    saved = spec(hardware=mine)
    assert msgspec.json.decode(msgspec.json.encode(saved), type=RunSpec) == saved
    planned = PlannedHardware(mine, 2)
    assert cluster_at("here", num_workers=2, planned=planned).hardware == mine
    assert cluster_at("here", num_workers=1, planned=planned).hardware == mine


def test_a_share_is_divided_anew_among_other_workers_and_kept_for_as_many(monkeypatch):
    first = cluster_at("here", num_workers=2)
    planned = PlannedHardware(first.hardware, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which would be another number of threads
    assert cluster_at("here", num_workers=2, planned=planned).hardware == first.hardware
    alone = cluster_at("here", num_workers=1, planned=planned)
    assert alone.device_memory_bytes == 32 * GIB - round(0.4 * GIB)
    given = cluster_at("here", num_workers=2, memory_gb=3)
    given_before = PlannedHardware(given.hardware, 2)
    alone = cluster_at("here", num_workers=1, planned=given_before)
    assert alone.device_memory_bytes == 3 * GIB


def test_a_run_records_what_it_was_planned_for():
    run = new_run(
        request_of("experiments/ppo.py", "--num-workers", "1", "--plan", SINGLE, "--memory-gb", "2", "--steps", "3")
    )
    assert run.spec.hardware is not None
    assert run.spec.hardware.device_memory_bytes == 2 * GIB
    assert run.plan.rationale is not None
    assert (run.plan.rationale.hardware, run.plan.rationale.device_memory_bytes) == ("cpu-8-threads", 2 * GIB)
    text = "planned for 1 x 1 cpu-8-threads with 2.0 GiB each (this machine's 33.0 GiB and 8 cores)"
    first, needs = hardware_lines(run, Path(SINGLE))
    assert first == text
    peak = max(memory.peak_bytes for memory in run.plan.rationale.memory)
    step = f"a step of {run.plan.predicted_step_s:.3g} s"
    assert re.fullmatch(rf"predicted: at most {in_gib(peak)} of the [0-9.]+ GiB of a device, {step}", needs)


def test_more_memory_than_the_machine_has_is_warned_of():
    run = new_run(
        request_of("experiments/ppo.py", "--num-workers", "2", "--plan", SINGLE, "--memory-gb", "17", "--steps", "3")
    )
    assert hardware_lines(run, None)[2:] == [
        "warning: 2 workers with 17.0 GiB each count on more than this machine's 33.0"
    ]


def test_more_workers_than_cores_are_warned_of_and_priced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By both commands, of the threads of all workers. 8 workers have a core each."""
    ends = "share 8 cores: calls are predicted to take 1.12 times as long as with a core for each thread"
    predicted = {}
    for num_workers in (8, 9):
        warned = [f"warning: 9 workers {ends}; give --num-workers 8 or fewer"][: num_workers - 8]
        words = ("experiments/ppo.py", "--num-workers", str(num_workers), "--plan", SINGLE)
        assert main(["plan", *words]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in printed if " share " in line] == warned
        run = new_run(request_of(*words, "--steps", "3"))
        assert hardware_lines(run, None)[2:] == warned
        predicted[num_workers] = run.plan.predicted_step_s
    assert predicted[9] == pytest.approx(predicted[8] * 9 / 8, rel=0.02), "but for the moves of data"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    shared = divided(cpu_hardware(host.read_host()), 3)
    assert crowded_text(shared, 3) == f"warning: 3 workers of 3 threads {ends}; give --num-workers 2 or fewer"
    assert crowded_text(load_hardware("h100"), 64) is None
    assert load_hardware("h100").crowding(64) == load_hardware("cpu").crowding(64) == 1, "the cores are not known"


def test_a_given_plan_that_does_not_fit_or_is_of_elsewhere_is_told(tmp_path):
    text = Path(SINGLE).read_text().rstrip().removesuffix("}") + ', "notes": {"hardware": "h100"}}'
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    run = new_run(
        request_of(
            "experiments/ppo.py", "--num-workers", "1", "--plan", str(plan), "--memory-gb", "0.01", "--steps", "3"
        )
    )
    _, _, note, warning = hardware_lines(run, plan)
    assert note == f"note: {plan} was made for h100; its times and memory are predicted anew"
    assert re.fullmatch(rf"warning: {plan} needs [0-9.]+ GiB on a device, and they have 0.0 GiB", warning)


def test_the_room_of_checkpoints_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes a parameter in float32: two trained models, an actor and a critic, that differ in their heads."""
    words = ("experiments/ppo.py", "--num-workers", "1", "--plan", SINGLE, "--steps", "25")
    each = 12 * (parameter_count(SORT_MODEL) + parameter_count(SORT_MODEL.with_head("scalar")))

    def told(*options: str) -> list[str]:
        return checkpoint_lines(new_run(request_of(*words, *options)), tmp_path)

    assert told() == [], "one alone, at the end"
    hint = "(--keep-checkpoints N keeps the newest N alone)"
    assert told("--checkpoint-every", "10") == [
        f"checkpoints: {in_gib(each)} each, 3 in all, {in_gib(3 * each)} {hint}"
    ]
    by_minutes = ("--checkpoint-every", "10", "--checkpoint-every-minutes", "30")
    assert told(*by_minutes) == [f"checkpoints: {in_gib(each)} each, one every 30 minutes {hint}"]
    keep = ("--checkpoint-every", "1", "--keep-checkpoints", "2")
    kept = f"checkpoints: {in_gib(each)} each, at most 3 at a time, {in_gib(3 * each)}"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * each))
    assert told(*keep) == [kept]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * each - 1))
    _, warning = told(*keep)
    assert warning.startswith("warning: checkpoints need more than the ")
    assert warning.endswith(f" that are free in {tmp_path}")


def test_workers_have_the_threads_that_were_planned(machine):
    run = new_run(request_of("experiments/ppo.py", "--num-workers", "2", "--plan", SINGLE, "--steps", "3"))
    workers = job_of(run, RunDirectory(machine), is_remote=False).workers
    assert {worker.env["OMP_NUM_THREADS"] for worker in workers} == {"4"}


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        (["--hardware", "h100"], [], "error: the plan is for h100 .* and there is no GPU on this machine; leave "),
        (["--hardware", "h100"], [A100], "the device is NVIDIA A100-SXM4-40GB on this machine; leave --hardware out"),
        (["--hardware", "cpu"], [A100], "set CUDA_VISIBLE_DEVICES= \\(to nothing\\) to run on the CPU"),
    ],
)
def test_a_run_on_other_hardware_is_refused(words, devices, message, monkeypatch, machine, capsys):
    stand_in(monkeypatch, machine.parent, devices)
    run_dir = machine.parent / "run"
    assert main(["run", "experiments/ppo.py", "--num-workers", "1", *words, "--run-dir", str(run_dir)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not run_dir.exists()
    assert cluster_at(None, num_workers=1, hardware=words[1]).hardware.name == words[1]


def test_the_hardware_of_nodes_that_cannot_be_seen(monkeypatch, machine):
    fields = {"nodes": 2, "gpus_per_node": 4}
    with pytest.raises(UserError, match=r"no profile of any, so that the kind .* --hardware .* or --cpu-only"):
        cluster_at("nodes", **fields)
    assert cluster_at("nodes", **fields, hardware="h100").hardware == load_hardware("h100")
    assert cluster_at("nodes", **fields, cpu_only=True).hardware == load_hardware("cpu")
    assert cluster_at("nodes", **fields, cpu_only=True, memory_gb=9).device_memory_bytes == 9 * GIB
    stand_in(monkeypatch, machine.parent, [A100])
    assert cluster_at("nodes", **fields).hardware.name == "nvidia-a100-sxm4-40gb"
    leave_description(hardware_here(), machine)
    stand_in(monkeypatch, machine.parent, [])
    assert cluster_at("nodes", **fields).hardware.name == "nvidia-a100-sxm4-40gb"
    assert load_hardware("nvidia-a100-sxm4-40gb").device_memory_bytes == int(COUNTED_OF_GPU * 40_960 * 2**20)
    stand_in(monkeypatch, machine.parent, [H100])
    leave_description(hardware_here(), machine)
    stand_in(monkeypatch, machine.parent, [])
    with pytest.raises(UserError, match="profiles of nvidia-a100-sxm4-40gb, nvidia-h100-80gb-hbm3, so that"):
        cluster_at("nodes", **fields)


@pytest.mark.parametrize("option", ["--checkpoint-every", "--checkpoint-every-minutes"])
def test_checkpoints_on_the_way_take_memory(option):
    """Training goes on while they are written, from a copy."""
    words = ("experiments/ppo.py", "--num-workers", "1", "--plan", SINGLE, "--steps", "3")
    without, saving = new_run(request_of(*words)), new_run(request_of(*words, option, "1"))
    peaks = [run.plan.rationale.memory[0].static_bytes for run in (without, saving)]
    trained = sum(parameter_count(run_model) for run_model in trained_models(saving))
    # Each parameter with AdamW's two states, all in float32.
    assert peaks[1] - peaks[0] == 12 * trained > 0
    again = predict(planned_task(saving, {}), saving.plan)
    assert max(again.device_bytes) == saving.plan.rationale.memory[0].peak_bytes


def trained_models(run):
    return [model for name, model in run.experiment.graph.models.items() if run.optimizer_steps(name)]


def test_half_a_billion_parameters_fit_a_machine_of_24_gigabytes(monkeypatch, capsys):
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(total=25_276_502_016))
    words = [
        "plan",
        "tests/e2e/memory_job/memory_job.py",
        "--size",
        "0.5B",
        "--num-workers",
        "2",
        "--evaluations",
        "50",
    ]
    assert main(words) == 0
    assert "with 10.9 GiB each" in capsys.readouterr().out
    assert main([*words, "--hardware", "cpu"]) == 2  # 3.73 GiB, whatever there is
    assert "no plan fits into memory" in capsys.readouterr().err
