"""Workers find the master through a file, or say what they waited for."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from realhf.base.errors import RunError
from realhf.transport import rendezvous
from realhf.transport.rendezvous import MasterAddress, publish_master, wait_for_master, withdraw_master

MASTER = MasterAddress(address="tcp://127.0.0.1:4321", public_key="k" * 40)


def test_a_worker_that_came_first_finds_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "rendezvous"
    pauses: list[float] = []

    def publish_in_the_third_pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            publish_master(directory, MASTER)

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=publish_in_the_third_pause))
    assert wait_for_master(directory, timeout_s=10, public_key=b"k" * 40) == MASTER
    assert pauses == [0.01, 0.02, 0.04]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in directory.iterdir()] == ["master.json"]


def test_a_later_address_replaces_the_earlier(tmp_path: Path) -> None:
    publish_master(tmp_path, MASTER)
    later = MasterAddress(address="tcp://127.0.0.1:9", public_key="k" * 40)
    publish_master(tmp_path, later)
    assert wait_for_master(tmp_path, timeout_s=1) == later


def test_waiting_ends_and_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"master\.json within 0\.1 s \(it was not written\)"):
        wait_for_master(tmp_path, timeout_s=0.1)
    publish_master(tmp_path, MASTER)
    withdraw_master(tmp_path, msgspec.structs.replace(MASTER, public_key="l" * 40))  # that of another start stays
    assert wait_for_master(tmp_path, timeout_s=1) == MASTER
    withdraw_master(tmp_path, MASTER)
    withdraw_master(tmp_path, MASTER)  # nothing left to take back
    with pytest.raises(RunError, match="it was not written"):
        wait_for_master(tmp_path, timeout_s=0.1)


def test_the_address_of_another_run_is_not_taken(tmp_path: Path) -> None:
    publish_master(tmp_path, MASTER)
    with pytest.raises(RunError, match="under a key other than this run's"):
        wait_for_master(tmp_path, timeout_s=0.1, public_key=b"o" * 40)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "master.json").write_text('{"address": 5}')
    with pytest.raises(RunError, match="its content is no address"):
        wait_for_master(tmp_path, timeout_s=0.1)
