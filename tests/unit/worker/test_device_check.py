"""A worker that is on other hardware than its run was planned for says so before anything is computed."""

import pytest
import torch
from msgspec import structs

from realhf.base.errors import UserError
from realhf.planning.model.descriptions import load_hardware
from realhf.worker import device as device_module
from realhf.worker.device import check_device, found_device

GPU = torch.device("cuda", 0)
H100_BYTES = 84_900_000_000


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is an H100."""
    monkeypatch.setattr(device_module, "found_device", lambda device: ("NVIDIA H100 80GB HBM3", H100_BYTES))
    monkeypatch.setattr(device_module.socket, "gethostname", lambda: "node07")


@pytest.mark.usefixtures("found")
def test_what_was_planned_for() -> None:
    check_device(load_hardware("h100"), 3, GPU)
    check_device(None, 3, GPU)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("planned", "message"),
    [
        (load_hardware("h200"), "worker 3 on node07: the plan is for h200 .* device is NVIDIA H100 80GB HBM3; run on"),
        (load_hardware("cpu"), "worker 3 on node07: the plan is for cpu .* the device is NVIDIA H100 80GB HBM3"),
        (
            structs.replace(load_hardware("h100"), device_memory_bytes=2**37),
            "counts on 128.0 GiB a device, and NVIDIA H100 80GB HBM3 has 79.1 GiB; .* --hardware NAME",
        ),
    ],
)  # fmt: skip
def test_other_devices(planned, message) -> None:
    with pytest.raises(UserError, match=message):
        check_device(planned, 3, GPU)


def test_the_cpu_in_place_of_a_gpu() -> None:
    with pytest.raises(UserError, match=r"worker 0 on .*: the plan is for h100 .*, and there is no GPU; run on"):
        check_device(load_hardware("h100"), 0, torch.device("cpu"))


def test_memory_of_a_host_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    name, memory_bytes = found_device(torch.device("cpu"))
    assert name is None
    check_device(load_hardware("cpu"), 0, torch.device("cpu"))
    assert not caplog.messages
    check_device(structs.replace(load_hardware("cpu"), device_memory_bytes=2 * memory_bytes), 0, torch.device("cpu"))
    assert caplog.messages[0].startswith("the plan counts on ")
