"""How workers find the master: one small file in the run directory, written atomically."""

import contextlib
import time
from pathlib import Path

import msgspec

from realhf.base.errors import RunError
from realhf.base.files import BadContentError, decode_json, read_bytes, write_atomically

_FILE = "master.json"


class MasterAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the master of this run listens (`tcp://host:port`) and its public key (Z85)."""

    address: str
    public_key: str


def publish_master(directory: Path, master: MasterAddress) -> None:
    """Writes the master's address for the workers, replacing that of an earlier start of the run."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(directory / _FILE, msgspec.json.encode(master))


def withdraw_master(directory: Path, master: MasterAddress) -> None:
    """Removes this master's address, so that workers of the next start do not connect to the port of a dead master.
    Another master's address stays."""
    with contextlib.suppress(OSError, BadContentError):
        if decode_json(read_bytes(directory / _FILE), MasterAddress) == master:
            (directory / _FILE).unlink()


def wait_for_master(directory: Path, *, timeout_s: float, public_key: bytes | None = None) -> MasterAddress:
    """Waits for the master's address and returns it.

    With `public_key`, an address under another key is ignored: it belongs to another run's master. Raises RunError
    after `timeout_s`, naming the file.
    """
    path = directory / _FILE
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while True:
        seen = "it was not written"
        try:
            master = decode_json(read_bytes(path), MasterAddress)
        except FileNotFoundError:
            pass
        except BadContentError as error:
            seen = f"its content is no address: {error}"
        else:
            if public_key is None or master.public_key.encode() == public_key:
                return master
            seen = "it was published under a key other than this run's"
        if time.monotonic() + pause_s > deadline:
            raise RunError(
                f"the master did not publish its address in {path} within {timeout_s:g} s ({seen}); "
                "look into the master's log, and check that the run directory is on a file system that all nodes share"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)  # a thousand workers must not hammer a shared file system
