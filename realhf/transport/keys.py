"""CURVE key pairs of one run: each worker proves by its own that it may talk to the master, and which worker it is."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from realhf.base.errors import UserError
from realhf.base.files import open_regular

_FILE_BYTES = 100  # more than a key has


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """One party's keys in Z85 (40 ASCII bytes each). The secret one never shows in a repr."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class MasterKeys:
    """The keys that the master reads: its own pair, and the public keys of the workers by index."""

    own: KeyPair
    workers: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerKeys:
    """The keys that a worker reads: its own pair and the master's public key."""

    own: KeyPair
    master: bytes


def make_run_keys(directory: Path, *, num_workers: int) -> None:
    """Writes new pairs for the master and every worker to `directory` (0700; its files 0600).

    Raises UserError if there are keys already: keys belong to one run.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    for name in ("master", *(f"worker-{i}" for i in range(num_workers))):
        public, secret = zmq.curve_keypair()
        _write_new(directory / f"{name}.public", public)
        _write_new(directory / f"{name}.secret", secret)


def load_master_keys(directory: Path, *, num_workers: int) -> MasterKeys:
    """The master's keys of `make_run_keys`. Raises UserError for missing or exposed files."""
    return MasterKeys(
        own=_read_pair(directory, "master"),
        workers=tuple(_read(directory / f"worker-{i}.public") for i in range(num_workers)),
    )


def load_worker_keys(directory: Path, *, worker: int) -> WorkerKeys:
    """One worker's keys of `make_run_keys`. Raises UserError for missing or exposed files."""
    return WorkerKeys(own=_read_pair(directory, f"worker-{worker}"), master=_read(directory / "master.public"))


def _read_pair(directory: Path, name: str) -> KeyPair:
    return KeyPair(public=_read(directory / f"{name}.public"), secret=_read(directory / f"{name}.secret"))


def _write_new(path: Path, key: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists: keys are made once per run; use a new run directory") from None
    with os.fdopen(handle, "wb") as file:
        file.write(key)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            key: bytes = file.read(_FILE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: was the run directory made for this number of workers?") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); start the run anew") from None
    if mode & 0o077:
        raise UserError(
            f"{path} has mode {mode:04o}, so others could read or replace this run's keys; a key file must have "
            "mode 0600: check the file system's permissions and start the run anew"
        )
    if len(key) != 40:
        raise UserError(f"{path} holds {len(key)} bytes instead of a key of 40; start the run anew")
    return key
