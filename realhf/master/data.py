"""Where the data of the steps in flight lies, and which transfers a call needs. No data is here: only metadata."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from realhf.api.layout import Layout
from realhf.transport.messages import KeyMetadata, Receive, Send

# mini_batches[dp][j]: the ids of mini-batch j that data-parallel rank dp works on.
Partition = list[list[tuple[int, ...]]]


def partition(batch_size: int, mini_batches: int, dp: int) -> Partition:
    """Divides the samples of a global batch: mini-batches first, each then evenly over dp.

    The mini-batches are the same samples under every layout, so that the optimizer's steps are.
    """
    per_mini_batch = batch_size // mini_batches
    per_rank = per_mini_batch // dp
    assert per_rank * dp * mini_batches == batch_size, "checked when the plan was"
    return [
        [
            tuple(range(j * per_mini_batch + d * per_rank, j * per_mini_batch + (d + 1) * per_rank))
            for j in range(mini_batches)
        ]
        for d in range(dp)
    ]


@dataclass
class WorkerMoves:
    """One worker's part in a transfer."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)


@dataclass
class _Column:
    """Where the samples of one key are. `owner[id]` produced the sample; `holders[id]` have it."""

    dtype: str
    trailing: tuple[int, ...]
    length: dict[int, int] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)
    holders: dict[int, set[int]] = field(default_factory=dict)


class DataDirectory:
    """The columns of one batch."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def record(self, worker: int, outputs: Mapping[str, KeyMetadata]) -> None:
        """Notes what a worker's reply says it now holds."""
        for key, metadata in outputs.items():
            column = self._columns.setdefault(key, _Column(metadata.dtype, metadata.trailing))
            for sample, length in zip(metadata.ids, metadata.lengths, strict=True):
                column.length[sample] = length
                column.owner[sample] = worker
                column.holders.setdefault(sample, set()).add(worker)

    def plan_transfer(self, layout: Layout, parts: Partition, keys: Iterable[str]) -> dict[int, WorkerMoves]:
        """What moves so that every rank of `layout` has `keys` of its samples, and notes it as done.

        Every sample comes from the worker that produced it and goes to each worker that lacks it
        once. Workers with nothing to do are absent.
        """
        moves: dict[int, WorkerMoves] = {}
        for key in sorted(keys):
            column = self._columns[key]
            for worker in layout.mesh.devices:
                dp = layout.coordinates(worker)[0]
                lacking: dict[int, list[int]] = {}
                for sample in (sample for ids in parts[dp] for sample in ids):
                    if worker not in column.holders[sample]:
                        lacking.setdefault(column.owner[sample], []).append(sample)
                        column.holders[sample].add(worker)
                for source, ids in lacking.items():
                    lengths = tuple(column.length[sample] for sample in ids)
                    metadata = KeyMetadata(
                        dtype=column.dtype, trailing=column.trailing, ids=tuple(ids), lengths=lengths
                    )
                    moves.setdefault(source, WorkerMoves()).sends.append(Send(peer=worker, key=key, ids=tuple(ids)))
                    moves.setdefault(worker, WorkerMoves()).receives.append(
                        Receive(peer=source, key=key, metadata=metadata)
                    )
        return moves
