"""The per-sample tensors that a worker holds."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from realhf.dataflow.interface import SampleDType
from realhf.engine.batch import Batch
from realhf.rundir.outputs import DIGEST_BYTES
from realhf.transport.messages import BatchKey, KeyMetadata


class SampleStore:
    """Tensors [length, ...] in host memory, by batch, key and sample id, until the batch is freed."""

    def __init__(self) -> None:
        self._batches: dict[BatchKey, dict[str, dict[int, Tensor]]] = {}

    def put(self, batch: BatchKey, key: str, ids: Iterable[int], values: Iterable[Tensor]) -> None:
        column = self._batches.setdefault(batch, {}).setdefault(key, {})
        column.update(zip(ids, values, strict=True))

    def get(self, batch: BatchKey, key: str, ids: Iterable[int]) -> list[Tensor]:
        column = self._batches[batch][key]
        return [column[sample] for sample in ids]

    def add_columns(self, batch: BatchKey, samples: Batch, keys: Iterable[str]) -> Batch:
        """`samples` with further columns from the store."""
        return samples.with_data(**{key: self.get(batch, key, samples.ids) for key in keys})

    def free(self, batch: BatchKey) -> None:
        self._batches.pop(batch, None)


def describe(ids: Sequence[int], values: Sequence[Tensor]) -> KeyMetadata:
    """The metadata of a checked column (`realhf.engine.returned`) that the master gets, with digests of its values."""
    first = values[0]
    return KeyMetadata(
        dtype=cast(SampleDType, str(first.dtype).removeprefix("torch.")),
        trailing=tuple(first.shape[1:]),
        ids=tuple(ids),
        lengths=tuple(len(value) for value in values),
        digests=b"".join(map(_digest, values)),
    )


def _digest(value: Tensor) -> bytes:
    """Of the bits of a tensor in host memory. A sample is small, and this takes half of what a bit sum would."""
    bits = value.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
    return hashlib.blake2b(bits.data, digest_size=DIGEST_BYTES).digest()
