"""Keys: private files, each party with what it needs, never made twice."""

from pathlib import Path

import pytest
import zmq

from realhf.base.errors import UserError
from realhf.transport.keys import load_master_keys, load_worker_keys, make_run_keys


def test_the_two_sides_fit_and_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    make_run_keys(directory, num_workers=2)

    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    master = load_master_keys(directory, num_workers=2)
    for i in range(2):
        worker = load_worker_keys(directory, worker=i)
        assert worker.own.public == master.workers[i]
        assert worker.master == master.own.public
        assert zmq.curve_public(worker.own.secret) == worker.own.public
    assert len({master.own.public, *master.workers}) == 3


def test_secrets_do_not_show(tmp_path: Path) -> None:
    make_run_keys(tmp_path, num_workers=1)
    keys = load_worker_keys(tmp_path, worker=0)
    assert keys.own.secret.decode() not in repr(keys)
    assert repr(keys.own.secret) not in repr(keys)


def test_keys_are_not_overwritten(tmp_path: Path) -> None:
    make_run_keys(tmp_path, num_workers=1)
    with pytest.raises(UserError, match=r"master\.public exists: keys are made once per run"):
        make_run_keys(tmp_path, num_workers=1)


def test_an_exposed_key_is_refused(tmp_path: Path) -> None:
    make_run_keys(tmp_path, num_workers=1)
    (tmp_path / "worker-0.secret").chmod(0o640)
    with pytest.raises(UserError, match=r"worker-0\.secret has mode 0640.*must have mode 0600"):
        load_worker_keys(tmp_path, worker=0)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    make_run_keys(tmp_path, num_workers=1)
    with pytest.raises(UserError, match=r"worker-1\.public is missing"):
        load_worker_keys(tmp_path, worker=1)
