"""Digests: of files, which are inputs of a run or sources of a cache, and of weights."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from realhf.base.files import file_digest, open_regular

# From a larger file of weights, evenly spread parts of this total size are read: training changes nearly all numbers.
_SAMPLED_BYTES = 2**24
_PARTS = 64
# A file that was written less long ago may change once more without another time of its last change.
_SETTLED_S = 2.0


def content_digest(paths: Sequence[Path]) -> str:
    """The digest of the bytes of files, in this order: 64 hexadecimal digits. Raises OSError."""
    return hashlib.sha256("".join(map(known_digest, paths)).encode()).hexdigest()


def known_digest(path: Path, *, sampled: bool = False) -> str:
    """The hexadecimal SHA-256 of a file's content. A process reads a file once, until it changes. Raises OSError.

    sampled: reads only the beginning, the end and parts in between of a file above 16 MiB.
    """
    found = path.stat()
    is_settled = time.time() - max(found.st_mtime, found.st_ctime) > _SETTLED_S
    seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return _known(path, sampled, seen) if is_settled else _read(path, sampled)


@lru_cache(maxsize=4096)
def _known(path: Path, sampled: bool, seen: tuple[int, ...]) -> str:
    return _read(path, sampled)


def _read(path: Path, sampled: bool) -> str:
    if not sampled or path.stat().st_size <= _SAMPLED_BYTES:
        return file_digest(path)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        part_bytes = _SAMPLED_BYTES // _PARTS
        for part in range(_PARTS):
            file.seek((size - part_bytes) * part // (_PARTS - 1))
            digest.update(file.read(part_bytes))
        return digest.hexdigest()


def weights_digest(sums: Mapping[str, int]) -> str:
    """The digest of a model's weights, by parameter the bit sum of all its elements, modulo 2^64
    (`realhf.realloc.execute.checksum`): 16 hexadecimal digits, the same under every layout."""
    return hashlib.blake2b(msgspec.json.encode(sorted(sums.items())), digest_size=8).hexdigest()
