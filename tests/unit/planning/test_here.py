"""The hardware of this machine, on stand-ins for its driver and its control groups."""

from dataclasses import replace

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.machine.gpus import VISIBLE, visible_gpus
from realhf.machine.host import Host
from realhf.planning.here import (
    COUNTED_OF_GPU,
    PROGRAM_BYTES,
    SYSTEM_BYTES,
    check_here,
    cpu_hardware,
    described,
    divided,
    gpu_hardware,
    hardware_here,
)
from realhf.planning.model.descriptions import load_hardware, presets
from realhf.planning.model.hardware import GIB, device_kind, mismatch
from tests.unit.machine.nvml import A100, H100, KINDS, RTX_4090, Device, stand_in, uuid_of

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
    assert found.memory_bandwidth == pytest.approx(preset.memory_bandwidth, rel=0.01)


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
