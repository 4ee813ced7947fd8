"""The rows that a data set's limits leave, on the disk, so that the processes of a run find them once.

A file's name is the digest of all that they depend on: the bytes of the data and of the tokenizer's files, and the
options. A process that cannot read or write such a file finds the rows itself.
"""

import contextlib
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from platformdirs import user_cache_path

from realhf.base.digest import content_digest
from realhf.base.files import read_bytes, write_atomically
from realhf.data.files.opening import data_files
from realhf.data.tokenizer import tokenizer_files

Options = dict[str, Any]
# Raise it when the same files and options give other rows than before.
_FORMAT_VERSION = 1


def kept_on_disk(kind: str, options: Options) -> np.ndarray | None:
    """The rows [rows], from 0, that another process has found for a data set; None if none has.

    kind: the name of the data set's class, whose fields are `options`.
    """
    try:
        content = read_bytes(_path(kind, options))
        return np.frombuffer(content, np.dtype("<i8"))
    except (OSError, ValueError):
        return None


def keep_on_disk(kind: str, options: Options, rows: np.ndarray) -> None:
    """Keeps rows for other processes, where the disk allows."""
    with contextlib.suppress(OSError):
        path = _path(kind, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, rows.astype("<i8").tobytes())


def _path(kind: str, options: Options) -> Path:
    files = tokenizer_files(options["tokenizer"], options["chat_template"])
    known = [_FORMAT_VERSION, kind, options | {"path": "", "tokenizer": ""}, version("tokenizers")]
    known += [content_digest(data_files(options["path"])), [path.name for path in files], content_digest(files)]
    digest = hashlib.blake2b(msgspec.json.encode(known), digest_size=16).hexdigest()
    return user_cache_path("realhf") / "data" / f"{digest}.rows"
