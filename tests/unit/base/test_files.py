"""Reading JSON without trust, and writing files that are old or new."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.base import files
from realhf.base.errors import RunError
from realhf.base.files import BadContentError, decode_json, write_atomically, writing_a_run


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": "\xff"}', b"[" * 100_000, b'{"a": 1e999999}', b'["a"]', b'{"a": "1"}'], ids=range(7)
)
def test_content_that_is_not_what_was_expected_is_bad_content(content: bytes) -> None:
    with pytest.raises(BadContentError, match=r"."):
        decode_json(content, dict[str, int])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_system_refuses_to_write_is_said_with_file_reason_and_remedy(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from realhf.base.errors import RunError; from realhf.base.files import write_atomically, writing_a_run\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n  with writing_a_run(): write_atomically(Path(sys.argv[1]), bytes(1000))\n"
        "except RunError as error: print(error)"
    )
    path = tmp_path / "status.json"
    found = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout == (
        f"{path} cannot be written (File too large): allow larger files (ulimit -f), then go on with --resume\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, r"f cannot be written \(No space left on device\): make room there, then go on with --resume"),
        (errno.EROFS, r"f cannot be written \(Read-only file system\): mount it writable, then"),
        (errno.EACCES, r"f cannot be written \(Permission denied\): let this user write there, then"),
    ],
)
def test_every_reason_has_its_remedy(number: int, text: str) -> None:
    with pytest.raises(RunError, match=text), writing_a_run():
        raise OSError(number, os.strerror(number), "f")


def test_a_network_and_a_deadline_are_no_files() -> None:
    for error in (TimeoutError(), ConnectionResetError(errno.ECONNRESET, "reset")):
        with pytest.raises(type(error)), writing_a_run():
            raise error


def test_what_was_written_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(files.os, "fsync", lambda handle: synced.append(path.exists()))
    write_atomically(path, b"new")
    assert synced == [False, True]  # the content first; then the folder, with the name
