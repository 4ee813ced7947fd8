"""Which workers hold the samples of the steps in flight, and which transfers a call needs: metadata alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from math import gcd, prod
from string import ascii_letters

from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import SampleDType
from realhf.dataflow.protocols import THREE_D_PROTO, Division, TransferProtocol
from realhf.geometry.layout import Layout
from realhf.master.broadcast_tree import BroadcastTrees
from realhf.transport.messages import KeyMetadata, Receive, Send

# partition[part][j]: the sample ids of mini-batch j in one part of the batch, usually that of a data-parallel rank.
Partition = list[list[tuple[int, ...]]]


@lru_cache(maxsize=256)
def division(layout: Layout, protocol: TransferProtocol = THREE_D_PROTO) -> Division:
    """The part of the batch that each device of a call gets."""
    return protocol.distribute(layout)


def partition(
    batch_size: int, mini_batches: int, dp: int, lengths: Mapping[int, int] | None = None, samples_per_prompt: int = 1
) -> Partition:
    """Divides a global batch into mini-batches, and each mini-batch over `dp` ranks, with equal numbers of samples.
    In an evaluation `dp` may not divide the batch: then no rank has more than that share rounded up, and each has some.

    A mini-batch has the same samples under every layout, so optimizer steps do not depend on the layout. If the
    `lengths` of the samples are known, the ranks of a mini-batch also get about equal numbers of tokens. The numbers of
    samples stay equal because memory, micro-batches and the KV cache are planned for them. The samples of a prompt,
    which are neighbours, stay together on a rank where their number divides that of a rank; else as many as divide
    both do, for a rank computes a prompt once for those that it has.
    """
    per_mini_batch = batch_size // mini_batches
    assert per_mini_batch * mini_batches == batch_size, "checked when the plan was"
    mini = [range(j * per_mini_batch, (j + 1) * per_mini_batch) for j in range(mini_batches)]
    together = gcd(per_mini_batch // dp, samples_per_prompt)
    if per_mini_batch % dp:
        together = samples_per_prompt if per_mini_batch // samples_per_prompt >= dp else 1
    return [list(of_rank) for of_rank in zip(*(_shares(ids, dp, lengths, together) for ids in mini), strict=True)]


def _shares(ids: range, dp: int, lengths: Mapping[int, int] | None, together: int) -> list[tuple[int, ...]]:
    """The sample ids of each rank, ascending: consecutive ids, unless balancing by tokens lowers the maximum. Each
    `together` neighbours go to one rank."""
    units = [ids[i : i + together] for i in range(0, len(ids), together)]
    bounds = [len(units) * d // dp * together for d in range(dp + 1)]
    runs = [tuple(ids[first:end]) for first, end in pairwise(bounds)]
    if lengths is None:
        return runs

    def worst(shares: list[tuple[int, ...]]) -> int:
        return max(sum(lengths[sample] for sample in share) for share in shares)

    return min(runs, _by_tokens(units, dp, lengths), key=worst)  # consecutive ids win a tie


def _by_tokens(units: Sequence[range], dp: int, lengths: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Gives units of samples, the longest first, to the rank with the fewest tokens that may still take one.

    This is Graham's LPT rule (1969) with equal numbers of units, or where `dp` does not divide theirs
    with at most that share rounded up.
    """
    tokens_of = {unit: sum(lengths[sample] for sample in unit) for unit in units}
    shares: list[list[range]] = [[] for _ in range(dp)]
    open_ranks = [(0, rank) for rank in range(dp)]  # a heap of (tokens, rank)
    for unit in sorted(units, key=lambda unit: (-tokens_of[unit], unit.start)):
        tokens, rank = heappop(open_ranks)
        shares[rank].append(unit)
        if len(shares[rank]) < -(-len(units) // dp):
            heappush(open_ranks, (tokens + tokens_of[unit], rank))
    return [tuple(sorted(sample for unit in share for sample in unit)) for share in shares]


def length_key(graph: DataflowGraph, call: ModelFunctionCallDef) -> str | None:
    """The input whose lengths decide how a call's samples are divided over its ranks.

    It is the first of the call's sequences, else of its inputs, that another call produces. None: all inputs come from
    the data set, and the lengths of `dataset_sequences` decide.
    """
    keys = (*call.interface_impl.sequence_keys, *call.input_data)
    return next((key for key in keys if key in graph.producers and key in call.input_data), None)


def dataset_sequences(call: ModelFunctionCallDef) -> Sequence[str]:
    """The sequences of a call that reads only the data set: those that its interface names, else its first input."""
    return call.interface_impl.sequence_keys or call.input_data[:1]


@dataclass
class WorkerMoves:
    """One worker's part of a transfer: the messages that it sends and receives."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)


Round = dict[int, WorkerMoves]  # by worker; workers with nothing to do are absent


@dataclass
class _Column:
    """Where the samples of one key are.

    holders: by sample id, the workers that hold the sample or get it by a transfer that was planned, ascending.
    """

    dtype: SampleDType
    trailing: tuple[int, ...]
    length: dict[int, int] = field(default_factory=dict)
    holders: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def metadata(self, ids: Sequence[int]) -> KeyMetadata:
        lengths = tuple(self.length[sample] for sample in ids)
        return KeyMetadata(dtype=self.dtype, trailing=self.trailing, ids=tuple(ids), lengths=lengths)


@dataclass(frozen=True)
class _Group:
    """Samples of a key that the same workers hold and the same workers lack: they travel together."""

    key: str
    ids: Sequence[int]
    size_bytes: int
    holders: tuple[int, ...]
    lacking: tuple[int, ...]


class DataDirectory:
    """The columns of one batch. `devices_per_node`: None if all devices are on one node."""

    def __init__(self, devices_per_node: int | None = None) -> None:
        self._columns: dict[str, _Column] = {}
        self._trees = BroadcastTrees(devices_per_node)

    def lengths(self, key: str, count: int) -> Mapping[int, int] | None:
        """The length of every sample of a key; None until all `count` samples have been produced."""
        column = self._columns.get(key)
        return column.length if column is not None and len(column.length) == count else None

    def record(self, worker: int, outputs: Mapping[str, KeyMetadata]) -> None:
        """Notes the samples that a worker holds, by its reply."""
        for key, metadata in outputs.items():
            column = self._columns.setdefault(key, _Column(metadata.dtype, metadata.trailing))
            for sample, length in zip(metadata.ids, metadata.lengths, strict=True):
                column.length[sample] = length
                column.holders[sample] = _ascending((*column.holders.get(sample, ()), worker))

    def plan_transfer(
        self, layout: Layout, parts: Partition, keys: Iterable[str], protocol: TransferProtocol = THREE_D_PROTO
    ) -> list[Round]:
        """Plans the messages that bring `keys` of its samples to every rank of `layout`, and notes them as done.

        A worker that lacks a sample gets it once, if possible from its own node, so a sample enters each node once.
        Sending is shared evenly among all holders, also those that have just received the sample (`BroadcastTrees`).

        Returns:
            rounds, to be sent in their order: a worker sends samples that it holds, or has received in an earlier
            round.
        """
        lacking: dict[int, list[int]] = {}
        for worker, part in sorted(division(layout, protocol).part_of.items()):
            for sample in (sample for ids in parts[part] for sample in ids):
                lacking.setdefault(sample, []).append(worker)
        groups = [group for key in sorted(keys) for group in self._groups(key, lacking)]
        groups.sort(key=lambda group: (len(group.holders), -group.size_bytes))  # the least choice of senders first
        ids: dict[tuple[int, str, int, int], list[int]] = {}  # by round, key, sender and receiver: one message
        for group in groups:
            round_of = dict.fromkeys(group.holders, -1)
            for sender, receiver in self._trees.hops(group.size_bytes, group.holders, group.lacking):
                round_of[receiver] = round_of[sender] + 1
                ids.setdefault((round_of[receiver], group.key, sender, receiver), []).extend(group.ids)
            holders = _ascending(round_of)
            self._columns[group.key].holders.update(dict.fromkeys(group.ids, holders))
        rounds: list[Round] = [{} for _ in range(1 + max((number for number, *_ in ids), default=-1))]
        for (number, key, sender, receiver), samples in sorted(ids.items()):
            metadata = self._columns[key].metadata(sorted(samples))
            send = Send(peer=receiver, key=key, ids=metadata.ids)
            rounds[number].setdefault(sender, WorkerMoves()).sends.append(send)
            receive = Receive(peer=sender, key=key, metadata=metadata)
            rounds[number].setdefault(receiver, WorkerMoves()).receives.append(receive)
        return rounds

    def _groups(self, key: str, wanted_by: Mapping[int, Sequence[int]]) -> list[_Group]:
        """The samples of a key that a worker lacks. `wanted_by`: the workers that need a sample, ascending."""
        column = self._columns[key]
        ids: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for sample, workers in sorted(wanted_by.items()):
            holders = column.holders[sample]
            lacking = tuple(worker for worker in workers if worker not in holders)
            if lacking:
                ids.setdefault((holders, lacking), []).append(sample)
        row_bytes = _item_bytes(column.dtype) * prod(column.trailing)
        return [
            _Group(key, samples, row_bytes * sum(column.length[sample] for sample in samples), holders, lacking)
            for (holders, lacking), samples in ids.items()
        ]


def _ascending(workers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(workers)))


def _item_bytes(dtype: SampleDType) -> int:
    bits = dtype.strip(ascii_letters)
    return int(bits) // 8 if bits else 1  # bool
