"""Workers' hosts try each other before groups are made; whoever fails names both ends."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from realhf.base.errors import RunError
from realhf.rundir.run import Deadlines
from realhf.worker import __main__ as worker_main
from realhf.worker import reachability
from realhf.worker.reachability import Place, check_reachability, join_network, others_to_reach, unreached


def place(rank: int, identity: int) -> Place:
    return Place(
        rank=rank, host=f"h{identity}", identity=identity, interface="ib0", address="10.0.0.9", port=4000 + rank
    )


def test_one_worker_of_each_other_host_is_tried() -> None:
    places = [place(rank, rank // 2) for rank in range(6)]
    assert [other.rank for other in others_to_reach(places[0], places)] == [2, 4]
    assert [other.rank for other in others_to_reach(places[3], places)] == [1, 5]


def test_the_error_names_both_ends_and_few_of_many() -> None:
    error = unreached(place(0, 0), {place(i, i): "Connection refused" for i in range(1, 6)})
    lines = str(error).splitlines()
    assert lines[0] == (
        "worker 0 on h0 (10.0.0.9, ib0) cannot reach worker 1 on h1 at 10.0.0.9 port 4001 (ib0): Connection refused"
    )
    assert lines[3] == "2 more hosts cannot be reached"
    assert "--network-interface" in lines[-1]


def check(folder: Path, rank: int, failed: list[BaseException]) -> None:
    try:
        check_reachability(dist.FileStore(str(folder / "store"), 2), rank, 2, identity=rank, interface="lo")
    except RunError as error:
        failed.append(error)


def both(folder: Path) -> list[BaseException]:
    failed: list[BaseException] = []
    threads = [threading.Thread(target=check, args=(folder, rank, failed)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_hosts_that_reach_each_other_go_on(tmp_path: Path) -> None:
    assert both(tmp_path) == []


def test_a_port_that_nobody_opens_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(own: Place, places: list[Place]) -> list[Place]:
        return [msgspec.structs.replace(places[1 - own.rank], port=1)]

    monkeypatch.setattr(reachability, "others_to_reach", closed)
    failed = both(tmp_path)
    assert {str(error).partition(" on ")[0] for error in failed} == {"worker 0", "worker 1"}
    assert all("port 1 (lo): " in str(error) for error in failed)


@pytest.mark.parametrize(
    ("kind", "named", "found", "own", "gloo", "nccl", "checked"),
    [
        ("cpu", None, "", None, None, None, None),
        ("cpu", None, "eth0", None, "eth0", None, "eth0"),
        ("cpu", None, "lo", None, "lo", None, None),
        ("cpu", None, "gone0", None, "gone0", None, None),
        ("cuda", None, "eth0", None, "eth0", None, None),
        ("cuda", "ib0", "eth0", None, "ib0", "ib0", "ib0"),
        ("cpu", "ib0", "eth0", "eth0", "eth0", "ib0", "eth0"),
    ],
)
def test_a_network_is_chosen_and_tried(
    kind: str,
    named: str | None,
    found: str,
    own: str | None,
    gloo: str | None,
    nccl: str | None,
    checked: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`own`: what the user's environment says of gloo, which goes before all. Which one NCCL finds is not known."""
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": own} if own else {})
    monkeypatch.setattr(reachability, "addresses", lambda: {name: ["10.0.0.9"] for name in ("lo", "eth0", "ib0")})
    tried: list[str] = []
    monkeypatch.setattr(reachability, "check_reachability", lambda *given: tried.append(given[-1]))
    join_network(dist.HashStore(), 0, 2, torch.device(kind), named, found)
    chosen = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
    assert os.environ == {name: interface for name, interface in chosen.items() if interface}
    assert tried == ([checked] if checked else [])


@pytest.mark.parametrize(("kind", "first_use_s"), [("cpu", 20.0), ("cuda", 1800.0)])
def test_the_start_has_its_deadline_and_ranks_that_come_to_a_group_later_have_theirs(
    kind: str, first_use_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    def wait_in(store: dist.Store, *_: object) -> None:
        waits_s.append(store.timeout.total_seconds())

    monkeypatch.setattr(worker_main, "join_network", wait_in)
    monkeypatch.setattr(worker_main, "make_world", wait_in)
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    spec = SimpleNamespace(num_workers=2, setup_timeout_s=20.0, network_interface=None)
    run: Any = SimpleNamespace(spec=spec, deadlines=Deadlines(floor_s=900.0))
    worker_main.join_world(dist.HashStore(), run, 0, torch.device(kind), "eth0")
    assert waits_s == [20.0, first_use_s]
