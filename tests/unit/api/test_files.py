"""Reading JSON without trust, and writing files that are old or new."""

import errno
from pathlib import Path

import pytest

from realhf.api import files
from realhf.api.files import BadContentError, decode_json, write_atomically


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


def test_what_was_written_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(files.os, "fsync", lambda handle: synced.append(path.exists()))
    write_atomically(path, b"new")
    assert synced == [False, True]  # the content first; then the folder, with the name
