"""Writes a safetensors file in one pass, together with its digest.

The library's writer copies all tensors to bytes first and holds Python's lock; this writer runs beside training.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from realhf.base.files import open_regular
from realhf.base.safetensors_header import safetensors_header

DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
_CHUNK_BYTES = 2**24


def write_safetensors(path: Path, content: Mapping[str, Tensor]) -> str:
    """Writes contiguous tensors in host memory to `path`; the file is on the disk when this returns.

    Returns:
        the hexadecimal SHA-256 of the file.

    Raises:
        OSError: the disk is full, or fails.
    """
    kinds = {key: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in content.items()}
    header, order = safetensors_header(kinds)
    digest = hashlib.sha256()
    parts = chain([memoryview(header)], *(_parts(content[key]) for key in order))
    with open_regular(path, "wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    assert tensor.is_contiguous(), "the bytes of a view are not its elements"
    content = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]
