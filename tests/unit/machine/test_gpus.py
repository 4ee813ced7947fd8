import inspect
from dataclasses import replace

import psutil
import pynvml
import pytest

from realhf.base.errors import UserError
from realhf.machine.gpus import machine_gpus, visible_gpus
from tests.unit.machine.nvml import A100, H100, KINDS, RTX_4090, Nvml, stand_in, uuid_of

COUNTS = (1, 2, 8)
NUMBERS_BY_COUNT = {1: "0", 2: "1,0", 8: "6, 2,3"}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
counts = pytest.mark.parametrize("count", COUNTS)


def test_the_stand_in_is_called_as_pynvml_is():
    names = [name for name, _ in inspect.getmembers(Nvml, inspect.isfunction) if name.startswith("nvml")]
    assert len(names) > 10
    for name in names:
        own = list(inspect.signature(getattr(Nvml([]), name)).parameters.values())
        real = list(inspect.signature(getattr(pynvml, name)).parameters.values())
        assert [(p.name, p.default) for p in own] == [(p.name, p.default) for p in real], name


@kinds
@counts
def test_without_the_variable_all_gpus_are_visible_by_their_uuids(kind, count, monkeypatch, tmp_path):
    nvml = stand_in(monkeypatch, tmp_path, [kind] * count)
    gpus = visible_gpus()
    assert [gpu.token for gpu in gpus] == [uuid_of(index) for index in range(count)]
    assert {(gpu.name, gpu.memory_bytes, gpu.compute_capability) for gpu in gpus} == {
        (kind.name, kind.memory_mib * 2**20, kind.capability)
    }
    assert nvml.num_users == 0


@kinds
@counts
def test_numbers_choose_and_order(kind, count, monkeypatch, tmp_path):
    text = NUMBERS_BY_COUNT[count]
    stand_in(monkeypatch, tmp_path, [kind] * count, visible=text)
    tokens = [token.strip() for token in text.split(",")]
    assert [(gpu.token, gpu.uuid) for gpu in visible_gpus()] == [(token, uuid_of(int(token))) for token in tokens]


@kinds
@counts
def test_uuids_and_their_beginnings_choose_and_order(kind, count, monkeypatch, tmp_path):
    names = [uuid_of(count - 1), *(["GPU-0a"] if count > 1 else [])]
    stand_in(monkeypatch, tmp_path, [kind] * count, visible=",".join(names))
    expected = list(zip(names, [uuid_of(count - 1), uuid_of(0)], strict=False))
    assert [(gpu.token, gpu.uuid) for gpu in visible_gpus()] == expected


@counts
@pytest.mark.parametrize("text", ["", " ", "-1", "NoDevFiles"])
def test_an_empty_variable_leaves_none_and_asks_no_driver(text, count, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100] * count, text, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert visible_gpus() == ()


@kinds
@counts
def test_a_number_that_is_not_there_is_refused(kind, count, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [kind] * count, visible=f"0,{count}")
    with pytest.raises(
        UserError, match=rf"CUDA_VISIBLE_DEVICES=0,{count}: there is no GPU {count}; CUDA hides"
    ) as error:
        visible_gpus()
    assert f"0: {kind.name} ({uuid_of(0)})" in str(error.value)
    assert "set CUDA_VISIBLE_DEVICES= (to nothing)" in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0,-1,1", "'-1' is neither the number nor the UUID"),
        ("0,", "'' is neither"),
        ("cuda:0", "'cuda:0' is neither"),
        ("GPU-", "GPU- is the beginning of 2 UUIDs"),
        ("GPU-f", "GPU-f is the beginning of no UUID"),
        ("MIG-1", "MIG-1 is the beginning of no UUID"),
        ("1,1", "'1' names a device a second time"),
        ("1,GPU-1a", "'GPU-1a' names a device a second time"),
    ],
)
def test_what_cuda_would_silently_hide_is_refused(text, why, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [A100] * 2, visible=text)
    with pytest.raises(UserError, match=why):
        visible_gpus()


def test_a_number_on_a_machine_without_gpus_is_refused(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [], visible="0", init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(UserError, match=r"there is no GPU 0; .* This machine has no NVIDIA GPU"):
        visible_gpus()


def test_mixed_kinds_are_refused_with_a_choice_for_each(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [A100, RTX_4090, A100])
    with pytest.raises(UserError, match="a run needs GPUs of one kind, and 2 kinds are visible") as error:
        visible_gpus()
    assert f"2 x {A100.name} with CUDA_VISIBLE_DEVICES={uuid_of(0)},{uuid_of(2)}" in str(error.value)
    assert f"1 x {RTX_4090.name} with CUDA_VISIBLE_DEVICES={uuid_of(1)}" in str(error.value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuid_of(0)},{uuid_of(2)}")
    assert [gpu.name for gpu in visible_gpus()] == [A100.name] * 2


def test_numbers_among_mixed_kinds_mean_nothing_certain_unless_the_order_is_given(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [RTX_4090, A100, A100], visible="1,2")
    with pytest.raises(UserError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID besides, or name them by UUID"):
        visible_gpus()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.uuid for gpu in visible_gpus()] == [uuid_of(1), uuid_of(2)]


@pytest.mark.parametrize(
    ("kind", "terabytes_per_s"), [(H100, 3.352), (A100, 1.555), (RTX_4090, 1.008)], ids=lambda value: str(value)[:20]
)
def test_rates_are_those_of_the_data_sheets(kind, terabytes_per_s, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [kind])
    (gpu,) = visible_gpus()
    assert gpu.memory_bandwidth == pytest.approx(1e12 * terabytes_per_s, rel=1e-3)
    assert (gpu.num_cores, gpu.clock_hz) == (kind.cores, 1e6 * kind.sm_mhz)


def test_what_a_device_does_not_report_is_not_made_up(monkeypatch, tmp_path):
    unknown = frozenset({"cores", "sm_mhz", "memory_mhz", "mig_mode"})
    stand_in(monkeypatch, tmp_path, [replace(H100, name="NVIDIA Graphics Device", unknown=unknown)])
    (gpu,) = visible_gpus()
    assert gpu.name == "NVIDIA Graphics Device"
    assert (gpu.num_cores, gpu.clock_hz, gpu.memory_bandwidth) == (None, None, None)


def test_a_gpu_without_memory_of_its_own_has_its_host_s(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [replace(H100, name="NVIDIA GB10", unknown=frozenset({"memory_mib"}))])
    assert visible_gpus()[0].memory_bytes == psutil.virtual_memory().total


def divided():
    instances = tuple((f"MIG-{i}f", f"{A100.name} MIG 3g.20gb", 20_096) for i in range(2))
    return replace(A100, mig_mode=True, instances=instances)


def test_one_mig_instance_is_a_device_with_its_own_memory(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [divided()], visible="MIG-1f")
    (gpu,) = visible_gpus()
    assert (gpu.token, gpu.name, gpu.is_mig) == ("MIG-1f", f"{A100.name} MIG 3g.20gb", True)
    assert (gpu.memory_bytes, gpu.compute_capability) == (20_096 * 2**20, (8, 0))
    assert gpu.memory_bandwidth is None  # its share of the GPU's is not reported


@pytest.mark.parametrize(
    ("visible", "why"),
    [
        (None, "2 MIG instances are visible, but NCCL does not connect them; choose one with .*=MIG-0f"),
        ("MIG-0f,MIG-1f", "2 MIG instances are visible"),
        ("0", "GPU 0 is in MIG mode, where instances are to be named.* MIG 3g.20gb \\(MIG-1f\\)"),
        (uuid_of(0), "is the beginning of no UUID"),
    ],
)
def test_several_mig_instances_are_refused(visible, why, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [divided()], visible=visible)
    with pytest.raises(UserError, match=why):
        visible_gpus()


def test_gpus_in_mig_mode_without_instances_keep_their_numbers(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [replace(A100, mig_mode=True), A100], visible="1")
    assert [gpu.uuid for gpu in visible_gpus()] == [uuid_of(1)]


def test_gpus_that_the_job_was_not_given_do_not_count(monkeypatch, tmp_path):
    forbidden = replace(H100, error=pynvml.NVML_ERROR_NO_PERMISSION)
    stand_in(monkeypatch, tmp_path, [forbidden, H100], visible="0")
    assert [gpu.uuid for gpu in visible_gpus()] == [uuid_of(1)]


def test_a_gpu_that_fell_off_its_bus_is_named(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100, replace(H100, error=pynvml.NVML_ERROR_GPU_IS_LOST)])
    with pytest.raises(UserError, match=r"GPU 1 cannot be read \(GPU is lost\); see `nvidia-smi`"):
        visible_gpus()


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_a_driver_has_no_gpus(error, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [], init_error=error)
    assert visible_gpus() == machine_gpus() == ()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
    ],
)
def test_devices_without_a_working_driver_are_no_machine_without_gpus(code, text, monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, [H100], init_error=code)
    with pytest.raises(UserError, match=rf"this machine has .*nvidia0, but NVML.*{text}.*set CUDA_VISIBLE_DEVICES= "):
        visible_gpus()
