"""The hardware of this machine, on stand-ins for its driver and its control groups."""

from dataclasses import replace

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.machine.gpus import VISIBLE, Gpu, visible_gpus
from realhf.machine.host import Host
from realhf.planning.here import (
    COUNTED_OF_GPU,
    FLOP_PER_CORE,
    PROGRAM_BYTES,
    SYSTEM_BYTES,
    check_here,
    cpu_hardware,
    described,
    divided,
    gpu_hardware,
    hardware_here,
)
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware, presets
from realhf.planning.model.hardware import GIB, device_kind, mismatch
from realhf.planning.planner import search_for
from realhf.planning.request import SearchBudget
from tests.unit.machine.nvml import A100, H100, KINDS, RTX_4090, Device, stand_in, uuid_of
from tests.unit.planning.graphs import ppo, settings, task_of

UNKNOWN = Device("NVIDIA B300 SXM7", 270_000, (10, 3), 20_480, 2000, 4000, 8192)
HOST = Host(cores=16, memory_bytes=65 * GIB)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("kind", [*KINDS, UNKNOWN], ids=lambda kind: kind.name)
def test_gpus_are_planned_for_as_they_report_themselves(kind, count, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [kind] * count)
    hardware = hardware_here()
    assert hardware.name == device_kind(kind.name)
    assert hardware.device_memory_bytes == int(COUNTED_OF_GPU * kind.memory_mib * 2**20)
    assert hardware.devices_per_node == count
    assert hardware.is_gpu
    assert divided(hardware, count) == hardware
    assert kind.name in hardware.description
    assert ("no preset knows it" in hardware.description) == (kind is not H100)


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("3,0", 2), (uuid_of(2), 1)])
def test_only_visible_gpus_count(visible, count, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [A100] * 4, visible)
    assert hardware_here().devices_per_node == count


def test_a_choice_among_several_kinds_is_of_that_kind(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100, RTX_4090], uuid_of(1))
    assert hardware_here().name == "nvidia-geforce-rtx-4090"
    monkeypatch.delenv(VISIBLE)
    with pytest.raises(UserError, match="2 kinds are visible"):
        hardware_here()


def test_an_empty_choice_is_the_cpu(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100] * 2, "")
    hardware = hardware_here()
    assert (hardware.name, hardware.is_gpu) == ("cpu", False)
    assert hardware.host_memory_bytes


def test_a_device_of_a_description_has_its_rates_and_its_own_memory(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100])
    found, preset = hardware_here(), load_hardware("h100")
    own = ("name", "description", "device_names", "device_memory_bytes", "devices_per_node")
    assert structs.replace(found, **{name: getattr(preset, name) for name in own}) == preset
    # Descriptions count a device with as much of its memory as this does.
    assert found.device_memory_bytes == pytest.approx(preset.device_memory_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-40GB", "NVIDIA H20"])
def test_relatives_of_a_known_device_are_not_taken_for_it(name):
    assert not any(preset.device_names and preset.describes(name) for preset in presets())


def test_older_drivers_leave_the_vendor_out():
    assert load_hardware("a100-80g").describes("A100-SXM4-80GB")
    assert device_kind("A100-SXM4-80GB") == device_kind("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


def gpus_of(device, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [device])
    [gpu] = visible_gpus()
    return gpu


def test_a_described_h100_is_the_fitted_one(monkeypatch, tmp_path):
    preset = load_hardware("h100")
    found = described(gpus_of(H100, monkeypatch, tmp_path), preset)
    assert found.flops("bfloat16") == pytest.approx(preset.flops("bfloat16"))
    assert found.memory_bandwidth == pytest.approx(preset.memory_bandwidth)


# The vendor's dense peaks of bfloat16 with float32 sums, and of memory. Cards reach more than the clock of their data
# sheet, and report the highest.
@pytest.mark.parametrize(
    ("device", "flops", "bandwidth"),
    [
        (A100, 312e12, 1.555e12),
        (RTX_4090, 165e12 * 3105 / 2520, 1.008e12),
        (Device("NVIDIA L40S", 46_068, (8, 9), 18_176, 2520, 9001, 384), 362e12, 0.864e12),
        (Device("NVIDIA A10", 23_028, (8, 6), 9216, 1695, 6251, 384), 125e12, 0.600e12),
        (Device("NVIDIA GeForce RTX 3090", 24_576, (8, 6), 10_496, 1695, 9751, 384), 71e12, 0.936e12),
        (Device("NVIDIA B200", 183_359, (10, 0), 18_944, 1965, 3996, 8192), 2250e12, 8.0e12),
        (Device("NVIDIA GeForce RTX 5090", 32_607, (12, 0), 21_760, 2407, 14_001, 512), 209.5e12, 1.792e12),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else "",
)
def test_unknown_devices_reach_the_same_part_of_their_peaks(device, flops, bandwidth, monkeypatch, tmp_path):
    found = described(gpus_of(device, monkeypatch, tmp_path), load_hardware("h100"))
    h100 = load_hardware("h100")
    of_products = h100.flops("bfloat16") / (989e12 * 1980 / 1830)
    of_memory = h100.memory_bandwidth / 3.352e12
    assert found.flops("bfloat16") == pytest.approx(of_products * flops, rel=0.07)
    assert found.memory_bandwidth == pytest.approx(of_memory * bandwidth, rel=0.03)
    assert found.flops("bfloat16") > found.flops("float32") >= found.flops("float64")


# Multiply-adds of a multiprocessor in a cycle, by NVIDIA's whitepapers: of its tensor cores in bfloat16 (0: it has none
# for it) and in float64, and its cores.
@pytest.mark.parametrize(
    ("capability", "of_bfloat16", "of_float64", "cores"),
    [
        ((0, 0), 0, 4, 128),
        ((7, 0), 0, 32, 64),
        ((7, 5), 0, 2, 64),
        ((8, 0), 1024, 64, 64),
        ((8, 6), 512, 2, 128),
        ((9, 0), 2048, 128, 128),
        ((10, 0), 4096, 64, 128),
        ((12, 0), 512, 2, 128),
    ],
)
def test_operations_of_a_core_in_a_cycle(capability, of_bfloat16, of_float64, cores):
    float32 = 2  # a multiply-add of each core
    bfloat16 = 2 * of_bfloat16 / cores or float32
    assert FLOP_PER_CORE[capability] == {
        "bfloat16": bfloat16, "float32": float32, "float64": 2 * of_float64 / cores
    }  # fmt: skip


def gpu(name="NVIDIA Some", capability=(9, 0), **unknown):
    fields = {"memory_bytes": 2**36, "num_cores": 1000, "clock_hz": 1e9, "memory_bandwidth": 1e12}
    return Gpu(token="0", uuid="GPU-0", name=name, compute_capability=capability, **fields | unknown)


@pytest.mark.parametrize(
    ("name", "capability", "operations"),
    [
        ("NVIDIA Some", (6, 1), 2),
        ("NVIDIA Some", (7, 2), 2),
        ("NVIDIA GeForce RTX 2080", (7, 5), 2),
        ("NVIDIA Some", (8, 6), 8),
        ("NVIDIA GeForce RTX 3090", (8, 6), 4),
        ("NVIDIA GeForce RTX 5090", (12, 0), 4),
        ("NVIDIA GeForce imagined", (9, 0), 32),
        ("NVIDIA Some", (11, 0), 64),
    ],
)
def test_a_device_has_the_rates_of_its_generation(name, capability, operations):
    """Of the newest one that is not newer. GeForces sum products of bfloat16 at half the rate of their chips."""
    base = load_hardware("h100")
    found = described(gpu(name, capability), base)
    of_h100 = 16_896 * 1.98e9 * 32
    assert found.flops("bfloat16") == pytest.approx(base.flops("bfloat16") * 1e12 * operations / of_h100)
    assert found.memory_bandwidth == pytest.approx(base.memory_bandwidth * 1e12 / (2 * 2.619e9 * 640))


def test_nothing_is_known_of_the_links_of_a_described_device():
    base = structs.replace(load_hardware("h100"), inter_node_send_bandwidth=1.0)
    found = described(gpu(), base)
    assert (found.intra_node_bandwidth, found.intra_node_latency_s, found.host_bandwidth) == (1e10, 1e-5, 2.4e10)
    assert (found.inter_node_send_bandwidth, found.uncertainty) == (None, None)
    assert found.layer_launch_s == base.layer_launch_s


@pytest.mark.parametrize("field", ["num_cores", "clock_hz", "memory_bandwidth"])
def test_whatever_a_device_does_not_report_is_needed(field):
    with pytest.raises(UserError, match="does not report its cores, clock and memory bus"):
        gpu_hardware(gpu(**{field: None}))
    assert gpu_hardware(gpu()).devices_per_node == 1


def test_the_words_of_a_device():
    unknown = "; no preset knows it: described from what it reports, `realhf profile` measures it"
    assert gpu_hardware(gpu()).description == f"NVIDIA Some, 64.0 GiB reported{unknown}"
    known = gpu_hardware(gpu(H100.name))
    assert known.description == "NVIDIA H100 80GB HBM3, 64.0 GiB reported, else as h100"


def test_a_device_that_reports_too_little_needs_a_description(monkeypatch, tmp_path):
    silent = replace(UNKNOWN, unknown=frozenset({"bus_width"}))
    with pytest.raises(UserError, match=r"NVIDIA B300 SXM7: no description .* --hardware FILE.yaml"):
        gpu_hardware(gpus_of(silent, monkeypatch, tmp_path))


def test_workers_share_memory_and_cores():
    hardware = divided(cpu_hardware(HOST), 2, environ={})
    assert hardware.device_memory_bytes == (65 * GIB - SYSTEM_BYTES) // 2 - PROGRAM_BYTES
    assert (hardware.threads, hardware.name) == (8, "cpu-8-threads")
    assert hardware.flops("float32") == 8 * load_hardware("cpu").flops("float32")
    assert hardware.memory_bandwidth == load_hardware("cpu").memory_bandwidth
    alone = divided(hardware, 1, environ={})  # the other worker is lost
    assert (alone.threads, alone.name) == (16, "cpu-16-threads")
    assert alone.device_memory_bytes == 64 * GIB - PROGRAM_BYTES
    many = divided(hardware, 32, environ={})
    assert (many.threads, many.name) == (1, "cpu")
    assert many.flops("float32") == load_hardware("cpu").flops("float32")


def test_more_workers_than_cores_make_no_step_shorter():
    graph, steps = ppo(), {}
    for count in (1, 2, 4, 8):
        hardware = divided(cpu_hardware(Host(cores=2, memory_bytes=65 * GIB)), count, environ={"OMP_NUM_THREADS": "1"})
        of = Cluster(devices_per_node=count, hardware=hardware)
        found = search_for(task_of(graph, **settings(graph, of)), SearchBudget(evaluations=2000))
        steps[count] = found.prediction.step_s
    assert steps[2] < steps[1]
    assert steps[2] <= steps[4] <= steps[8]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host(cores=1, memory_bytes=2 * GIB), "this machine's 2.0 GiB and 1 core"),
        (Host(cores=2, memory_bytes=2 * GIB, cores_limit="a"), "this machine's 2.0 GiB and 2 cores, limited by a"),
        (
            Host(cores=2, memory_bytes=2 * GIB, cores_limit="a", memory_limit="b"),
            "this machine's 2.0 GiB and 2 cores, limited by b and a",
        ),
        (
            Host(cores=2, memory_bytes=2 * GIB, cores_limit="a", memory_limit="a"),
            "this machine's 2.0 GiB and 2 cores, limited by a",
        ),
    ],
)
def test_the_words_of_a_machine(host, words):
    hardware = cpu_hardware(host)
    assert hardware.description == words
    assert (hardware.host_memory_bytes, hardware.host_cores, hardware.name) == (2 * GIB, host.cores, "cpu")


@pytest.mark.parametrize(
    ("given", "threads"),
    [("3", 3), ("5,2", 5), ("", 8), ("0", 8), ("many", 8), ("-1", 8), ("1", 1)],
)
def test_the_number_of_threads_is_a_number_above_0(given, threads):
    assert divided(cpu_hardware(HOST), 2, environ={"OMP_NUM_THREADS": given}).threads == threads


def test_threads_are_divided_anew():
    """From four threads to one, in the name and the rates."""
    host = Host(cores=5, memory_bytes=65 * GIB)
    four = divided(cpu_hardware(host), 1, environ={"OMP_NUM_THREADS": "4"})
    one = divided(four, 3, environ={})
    assert (four.name, one.name, one.threads) == ("cpu-4-threads", "cpu", 1)
    assert four.flops("float64") == 4 * one.flops("float64") == 4 * load_hardware("cpu").flops("float64")
    assert divided(cpu_hardware(host), 2, environ={}).threads == 2
    cores = structs.replace(four, host_memory_bytes=None)
    assert divided(cores, 1, environ={}).device_memory_bytes == four.device_memory_bytes


def test_the_least_memory_that_a_worker_can_have():
    least = SYSTEM_BYTES + 2 * PROGRAM_BYTES
    assert (SYSTEM_BYTES, PROGRAM_BYTES) == (2**30, 429_496_730)
    enough = cpu_hardware(Host(cores=2, memory_bytes=least + 2))
    assert divided(enough, 2, environ={}).device_memory_bytes == 1
    with pytest.raises(UserError, match=r"models of 2 workers, whose programs take 0\.4 GiB each beside 1\.0 GiB"):
        divided(structs.replace(enough, host_memory_bytes=least + 1), 2, environ={})


def test_the_users_number_of_threads_goes_first():
    assert divided(cpu_hardware(HOST), 2, environ={"OMP_NUM_THREADS": "3"}).threads == 3
    assert divided(cpu_hardware(HOST), 2, environ={"OMP_NUM_THREADS": "1"}).name == "cpu"


def test_too_many_workers_for_the_memory():
    small = Host(cores=2, memory_bytes=2 * GIB, memory_limit="/sys/fs/cgroup/memory.max")
    assert divided(cpu_hardware(small), 2, environ={}).device_memory_bytes < GIB
    with pytest.raises(UserError, match=r"2.0 GiB and 2 cores, limited by /sys/fs/cgroup/memory.max .*--memory-gb"):
        divided(cpu_hardware(small), 8, environ={})


@pytest.mark.parametrize(
    ("planned", "devices", "message"),
    [
        ("h100", [], "the plan is for h100 .* and there is no GPU on this machine; leave --hardware out"),
        ("h100", [A100], "the device is NVIDIA A100-SXM4-40GB on this machine; leave --hardware out"),
        ("cpu", [A100], "the device is NVIDIA A100-SXM4-40GB .*set CUDA_VISIBLE_DEVICES="),
        ("h100", [H100], ""),
        ("cpu", [], ""),
    ],
)
def test_planning_for_what_is_not_here_is_refused(planned, devices, message, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, devices)
    if not message:
        check_here(load_hardware(planned), is_given=True)
        return
    with pytest.raises(UserError, match=message):
        check_here(load_hardware(planned), is_given=True)


@pytest.mark.parametrize(
    ("planned", "devices", "is_given", "remedy"),
    [
        ("h100", [], True, "leave --hardware out, or predict only, with `realhf plan`"),
        ("h100", [], False, "give --hardware cpu, or predict only, with `realhf plan`"),
        (
            "cpu",
            [A100],
            True,
            "leave --hardware out, or set CUDA_VISIBLE_DEVICES= (to nothing) to run on the CPU, or predict only, with "
            "`realhf plan`",
        ),
        ("h100", [A100], False, "give --hardware nvidia-a100-sxm4-40gb, or predict only, with `realhf plan`"),
    ],
)
def test_what_to_do_where_the_hardware_is_not_here(planned, devices, is_given, remedy, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, devices)
    with pytest.raises(UserError) as error:
        check_here(load_hardware(planned), is_given=is_given)
    assert str(error.value).endswith(f" on this machine; {remedy}")


def test_a_run_that_was_planned_for_other_devices_says_how_to_plan_it_again(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [A100])
    with pytest.raises(UserError, match="give --hardware nvidia-a100-sxm4-40gb, or predict only"):
        check_here(load_hardware("h100"), is_given=False)


def test_memory_that_a_device_does_not_have():
    h100 = load_hardware("h100")
    assert mismatch(h100, H100.name, H100.memory_mib * 2**20) == ""
    text = mismatch(structs.replace(h100, device_memory_bytes=90 * GIB), H100.name, H100.memory_mib * 2**20)
    assert text.endswith("counts on 90.0 GiB a device, and NVIDIA H100 80GB HBM3 has 79.6 GiB")
    # A description of the user's that names no device may be of any.
    assert mismatch(structs.replace(h100, device_names=()), A100.name, 80 * GIB) == ""
