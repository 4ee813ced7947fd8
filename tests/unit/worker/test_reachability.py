"""Workers' hosts try each other before groups are made; whoever fails names both ends."""

import threading
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from realhf.base.errors import RunError
from realhf.worker import reachability
from realhf.worker.reachability import Place, check_reachability, others_to_reach, unreached


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
