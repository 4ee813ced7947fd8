"""Clusters by name and from files; each mistake is named with its field."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.machine.host import Host
from realhf.planning import clusters
from realhf.planning.clusters import (
    MEMORY_GB,
    UnknownNodesError,
    cluster_of,
    clusters_of,
    devices_per_node,
    is_unknown_here,
    parse_cluster,
    with_memory,
)
from realhf.planning.here import cpu_hardware, divided, hardware_here
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.request import DevicesRequest, PlannedHardware
from tests.unit.machine.nvml import A100, stand_in

H100 = Cluster(num_nodes=16, devices_per_node=8, hardware=load_hardware("h100"))
MIG = f"{A100.name} MIG 3g.20gb"


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


def test_as_many_devices_share_the_network_of_a_node_as_the_cluster_has(tmp_path: Path) -> None:
    path = tmp_path / "shared.yaml"
    path.write_bytes(msgspec.yaml.encode(structs.replace(load_hardware("h100"), inter_node_shared_bandwidth=4e9)))
    request = DevicesRequest(hardware=str(path), nodes=2, gpus_per_node=4)
    group = clusters.NodeGroup(hardware=str(path), nodes=2, devices_per_node=4)
    for cluster in (cluster_of(request), group.cluster()):
        assert cluster.hardware.link(True, 1)[1] == cluster.hardware.send_bandwidth == 1e9
    assert parse_cluster("h100-2x4").hardware == load_hardware("h100")


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


def test_the_memory_of_a_device_is_the_users_and_no_share() -> None:
    shared = cpu_hardware(Host(cores=4, memory_bytes=2**36))
    given = with_memory(shared, 1.5)
    assert (given.device_memory_bytes, given.host_memory_bytes) == (3 * 2**29, None)
    assert MEMORY_GB == (1e-6, 1_048_576)
    assert with_memory(shared, 1e-6).device_memory_bytes == 1073
    for memory_gb in (0.9e-6, 1_048_577):
        with pytest.raises(UserError, match=r"--memory-gb .* is not from"):
            with_memory(shared, memory_gb)


def test_numbers_with_many_digits_are_too_large(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nodes 9{20} is not from 1 to 4,096"):
        parse_cluster(f"h100-{'9' * 5000}x8")


def machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0, hardware: Any = None) -> None:
    """So many GPUs of this hardware, or 6 cores."""
    monkeypatch.setattr(clusters, "visible_gpus", lambda: range(gpus))
    monkeypatch.setattr(clusters, "read_host", lambda: Host(cores=6, memory_bytes=2**36))
    monkeypatch.setattr(clusters, "gpus_here", lambda kind=None: hardware if kind is None else None)
    monkeypatch.setattr(clusters, "hardware_here", lambda: hardware or load_hardware("cpu"))


@pytest.mark.parametrize(("gpus", "devices"), [(0, 6), (2, 2)])
def test_where_nobody_says_a_number_devices_are_those_of_this_machine(
    gpus: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, gpus=gpus)
    assert cluster_of(DevicesRequest()).devices_per_node == devices
    assert cluster_of(DevicesRequest(), num_devices=3).devices_per_node == 3
    nodes = cluster_of(DevicesRequest(nodes=2, memory_gb=3))
    assert (nodes.num_nodes, nodes.devices_per_node, nodes.device_memory_bytes) == (2, devices // 2, 3 * 2**30)


@pytest.mark.parametrize(("place", "sharing"), [("here", 4), (None, 2)])
def test_workers_here_share_the_machine_whatever_their_nodes(
    place: Any, sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run was planned for is divided anew among other workers, and only then."""
    asked: list[Any] = []
    whole = cpu_hardware(Host(cores=8, memory_bytes=2**36))
    machine(monkeypatch, hardware=whole)
    monkeypatch.setattr(clusters, "check_here", lambda *words, **more: asked.append((*words, more)))
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    found = cluster_of(DevicesRequest(nodes=2, gpus_per_node=2, place=place))
    expected = divided(whole, sharing)
    assert found == Cluster(num_nodes=2, devices_per_node=2, hardware=expected)
    assert asked == ([(expected, {"is_given": False})] if place else [])
    planned = PlannedHardware(expected, sharing)
    again = DevicesRequest(nodes=2, gpus_per_node=2, place=place, planned=planned)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cluster_of(again).hardware == expected
    fewer = DevicesRequest(nodes=1, gpus_per_node=1, place=place, planned=planned)
    assert cluster_of(fewer).hardware == divided(expected, 1) != expected


def test_the_hardware_that_is_given_is_checked_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    machine(monkeypatch)
    monkeypatch.setattr(clusters, "check_here", lambda hardware, *, is_given: asked.append((hardware.name, is_given)))
    cluster_of(DevicesRequest(hardware="h100", place="here"))
    assert asked == [("h100", True)]


def test_hardware_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the GPUs here are, where they have it; else by its description."""
    stand_in(monkeypatch, tmp_path, [A100])
    for name, found in (
        ("nvidia-a100-sxm4-40gb", hardware_here()),
        ("cpu", load_hardware("cpu")),
        ("h100", H100.hardware),
    ):
        assert cluster_of(DevicesRequest(hardware=name, num_workers=1)).hardware == found


@pytest.mark.parametrize("device_names", [(MIG,), ()])
def test_a_description_stands_for_a_device_that_cannot_be_described(
    device_names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A MIG instance tells neither its cores nor its memory bus."""
    stand_in(monkeypatch, tmp_path, [replace(A100, mig_mode=True, instances=(("MIG-0", MIG, 20_096),))])
    with pytest.raises(UserError, match=f"{MIG}: no description is of it, .* give it with --hardware FILE.yaml"):
        cluster_of(DevicesRequest(place="here"))
    slice_of_one = structs.replace(
        load_hardware("a100-80g"), name="slice", device_names=device_names, device_memory_bytes=18 * 2**30
    )
    file = tmp_path / "slice.yaml"
    file.write_bytes(msgspec.yaml.encode(slice_of_one))
    for place in ("here", "nodes", None):
        request = DevicesRequest(hardware=str(file), gpus_per_node=1, place=place)  # type: ignore[arg-type]
        assert cluster_of(request).hardware == slice_of_one


@pytest.mark.parametrize(
    ("fields", "is_unknown"),
    [
        ({"place": "nodes"}, True),
        ({"place": "here"}, False),
        ({}, False),
        ({"place": "nodes", "hardware": "h100"}, False),
        ({"place": "nodes", "planned": PlannedHardware(H100.hardware, 1)}, False),
        ({"place": "nodes", "cpu_only": True}, False),
    ],
)
def test_whether_anything_tells_what_nodes_are(
    fields: dict[str, Any], is_unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(clusters, "left_descriptions", lambda: [])
    assert is_unknown_here(DevicesRequest(**fields)) is is_unknown
    machine(monkeypatch, hardware=H100.hardware)
    assert is_unknown_here(DevicesRequest(**fields)) is False


@pytest.mark.parametrize(
    ("left", "found"),
    [([], "no profile of any"), (["cpu"], "no profile of any"), (["h100"], None), (["cpu", "h100"], None),
     (["h100", "h200"], "profiles of h100, h200")],
)  # fmt: skip
def test_profiles_of_one_kind_of_gpu_tell_it(
    left: list[str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(clusters, "left_descriptions", lambda: left)
    request = DevicesRequest(place="nodes", num_workers=2)
    if found is None:
        assert cluster_of(request).hardware == H100.hardware
        return
    with pytest.raises(UnknownNodesError, match=f"this machine has no GPU and {found}, so that"):
        cluster_of(request)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"nodes": 2}, "--nodes"),
        ({"gpus_per_node": 2, "num_workers": 4}, "--gpus-per-node and --num-workers"),
        ({"hardware": "h100"}, "--hardware"),
    ],
)
def test_a_cluster_by_name_says_it_all(fields: dict[str, Any], options: str) -> None:
    with pytest.raises(UserError, match=f"--cluster h100-1x2 says it all; leave out {options}$"):
        clusters_of(DevicesRequest(**fields), "h100-1x2")


def test_clusters_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    found = clusters_of(DevicesRequest(memory_gb=3), " h100-1x2 ,a100-80g-1x2")
    assert {name: cluster.device_memory_bytes for name, cluster in found.items()} == {
        "h100-1x2": 3 * 2**30,
        "a100-80g-1x2": 3 * 2**30,
    }
    [(name, cluster)] = clusters_of(DevicesRequest(), None, 5).items()
    assert (name, cluster.devices_per_node) == ("", 5)


def test_the_memory_of_a_file_and_the_users(tmp_path: Path) -> None:
    """The user's goes first. Devices of a node share its host."""
    text = "groups: [{hardware: h100, nodes: 1, devices_per_node: 2, device_memory_gb: 40}]"
    assert parse_cluster(write(tmp_path, text), 30).device_memory_bytes == 30 * 2**30
    unknown = "groups: [{hardware: tpu, nodes: 1, devices_per_node: 2}]"
    with pytest.raises(UserError, match=r"cluster.yaml: hardware='tpu' is not known"):
        parse_cluster(write(tmp_path, unknown))
    with pytest.MonkeyPatch.context() as patch:
        whole = cpu_hardware(Host(cores=8, memory_bytes=2**36))
        patch.setattr(clusters, "load_hardware", lambda name: whole)
        patch.setenv("OMP_NUM_THREADS", "")
        group = clusters.NodeGroup(hardware="cpu", nodes=3, devices_per_node=2)
        assert group.cluster().hardware == divided(whole, 2)
