"""Clusters by name and from files; each mistake is named with its field."""

from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.planning.clusters import clusters_of, devices_per_node, parse_cluster, with_memory
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.request import DevicesRequest

H100 = Cluster(num_nodes=16, devices_per_node=8, hardware=load_hardware("h100"))


@pytest.mark.parametrize(
    ("workers", "nodes", "given", "planned", "expected"),
    [
        (8, 2, None, None, 4), (None, 2, None, 6, 3), (8, 2, None, 6, 4), (None, 3, 4, None, 4), (12, 3, 4, None, 4),
        (None, 2, None, None, None),
    ],
)  # fmt: skip
def test_devices_of_a_node(
    workers: int | None, nodes: int, given: int | None, planned: int | None, expected: int | None
) -> None:
    request = DevicesRequest(num_workers=workers, nodes=nodes, gpus_per_node=given)
    assert devices_per_node(request, planned) == expected


@pytest.mark.parametrize(("workers", "nodes", "given"), [(7, 2, None), (1, 2, None), (9, 2, 4)])
def test_numbers_of_devices_that_contradict_each_other(workers: int, nodes: int, given: int | None) -> None:
    with pytest.raises(UserError, match=f"--num-workers {workers} is not --nodes {nodes} x --gpus-per-node"):
        devices_per_node(DevicesRequest(num_workers=workers, nodes=nodes, gpus_per_node=given), None)


def test_names() -> None:
    assert parse_cluster("h100-16x8") == H100
    assert parse_cluster("a100-80g-2x4").hardware.name == "a100-80g"
    assert list(clusters_of(DevicesRequest(), "h100-4x8, h200-8x8")) == ["h100-4x8", "h200-8x8"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "h100",
            "cluster 'h100' is neither HARDWARE-NODESxDEVICES (h100-16x8: 16 nodes of 8 devices) nor a .yaml file",
        ),
        ("h100-0x8", "cluster 'h100-0x8': nodes 0 is not from 1 to 4,096"),
        ("h100--2x8", "hardware='h100-' is not known; choose one of "),
        ("tpu-2x8", "hardware='tpu' is not known; choose one of "),
        ("h100-2x8,h100-2x8", "--cluster: 'h100-2x8' is given twice"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        clusters_of(DevicesRequest(), name)
    assert str(error.value).startswith(message)


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_a_file(tmp_path: Path) -> None:
    assert parse_cluster(write(tmp_path, "groups:\n- {hardware: h100, nodes: 16, devices_per_node: 8}\n")) == H100
    text = "groups: [{hardware: h100, nodes: 1, devices_per_node: 2, device_memory_gb: 40}]"
    assert parse_cluster(write(tmp_path, text)).device_memory_bytes == 40 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups: [{hardware: h100, nodes: 16}]", "missing required field `devices_per_node` - at `$.groups[0]`"),
        ("groups: [{hardware: h100, nodes: 2, devices_per_node: 8, nics: 4}]", "unknown field `nics`"),
        ("groups: [{hardware: h100, nodes: two, devices_per_node: 8}]", "`$.groups[0].nodes`"),
        ("groups: [{hardware: h100, nodes: 2, devices_per_node: 0}]", "devices_per_node 0 is not from 1 to 4,096"),
        (
            "groups: [{hardware: h100, nodes: 2, devices_per_node: 8, device_memory_gb: -1}]",
            "device_memory_gb -1.0 is not from 1e-06 to 1,048,576",
        ),
        ("groups: []", "groups is empty"),
        ("groups: [", "not a cluster"),
        (
            "groups:\n- {hardware: h100, nodes: 2, devices_per_node: 8}\n"
            "- {hardware: h200, nodes: 1, devices_per_node: 8}\n",
            "2 groups (2 x h100, 1 x h200); plans are made for one group",
        ),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        parse_cluster(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_a_file_that_is_missing() -> None:
    with pytest.raises(UserError, match=r"nowhere.yaml: cannot read the cluster \(No such file or directory\)"):
        parse_cluster("nowhere.yaml")


def test_another_memory() -> None:
    assert with_memory(H100.hardware, None) == H100.hardware
    assert with_memory(H100.hardware, 40).device_memory_bytes == 40 * 2**30
    assert parse_cluster("h100-16x8", memory_gb=40).device_memory_bytes == 40 * 2**30
    with pytest.raises(UserError, match="--memory-gb -1 is not from"):
        with_memory(H100.hardware, -1)
