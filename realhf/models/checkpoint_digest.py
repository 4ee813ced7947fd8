"""Checks that the files of a checkpoint are as they were written: their digests against those of the index."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.reading import open_regular
from realhf.models.checkpoint_index import CheckpointIndex, SavedFile

_THREADS = 8  # hashing is bound by one core a file


def file_digest(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's content."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_content(directory: Path, index: CheckpointIndex) -> None:
    """Reads all files of the checkpoint whose digest is in its index.

    Raises:
        UserError: naming a file that has other content, or cannot be read.
    """

    def check(saved: SavedFile) -> None:
        path = directory / saved.file
        try:
            found = file_digest(path)
        except OSError as error:
            raise UserError(f"checkpoint file {path} cannot be read ({error}); use another checkpoint") from error
        if found != saved.sha256:
            raise UserError(
                f"checkpoint file {path} has other content than when it was saved (sha256 {found}, not "
                f"{saved.sha256}); restore it or use another checkpoint"
            )

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(check, (saved for saved in index.files if saved.sha256)))
