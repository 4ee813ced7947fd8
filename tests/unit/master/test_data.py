"""Every rank gets the samples that it works on, once; the sends are the receives."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master.data import DataDirectory, partition
from realhf.transport.messages import KeyMetadata


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_a_partition_has_every_sample_once(dp: int, mini_batches: int) -> None:
    parts = partition(32, mini_batches, dp)
    assert sorted(sample for rank in parts for ids in rank for sample in ids) == list(range(32))
    assert {len(ids) for rank in parts for ids in rank} == {32 // mini_batches // dp}


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_mini_batches_are_the_same_samples_under_every_dp(mini_batches: int) -> None:
    def contents(dp: int) -> list[list[int]]:
        parts = partition(32, mini_batches, dp)
        return [[sample for rank in parts for sample in rank[j]] for j in range(mini_batches)]

    assert contents(1) == contents(2) == contents(4) == contents(8)
    assert contents(1)[0] == list(range(32 // mini_batches))


def test_a_partition_by_hand() -> None:
    assert partition(8, 2, 2) == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


@dataclass
class Cluster:
    """Workers that hold (key, sample, length), and a directory that is told what a master is told."""

    held: dict[int, set[tuple[str, int]]]
    lengths: dict[tuple[str, int], int]
    directory: DataDirectory

    def produce(self, key: str, layout: Layout, mini_batches: int) -> None:
        """The output devices of a call on `layout` make `key`."""
        for dp, part in enumerate(partition(BATCH_SIZE, mini_batches, layout.strategy.dp)):
            ids = tuple(sample for mini_batch in part for sample in mini_batch)
            lengths = tuple(self.lengths[key, sample] for sample in ids)
            worker = layout.output_device(dp)
            self.held.setdefault(worker, set()).update((key, sample) for sample in ids)
            metadata = KeyMetadata(dtype="float32", trailing=(2,), ids=ids, lengths=lengths)
            self.directory.record(worker, {key: metadata})

    def deliver(self, layout: Layout, mini_batches: int, keys: list[str]) -> int:
        """Carries out the plan for a call on `layout`; returns how many samples were sent."""
        parts = partition(BATCH_SIZE, mini_batches, layout.strategy.dp)
        moves = self.directory.plan_transfer(layout, parts, keys)
        sent = [
            (worker, send.peer, send.key, sample)
            for worker, part in moves.items()
            for send in part.sends
            for sample in send.ids
        ]
        received = []
        for worker, part in moves.items():
            assert part.sends or part.receives, "workers with nothing to do are absent"
            for receive in part.receives:
                metadata = receive.metadata
                assert (metadata.dtype, metadata.trailing) == ("float32", (2,))
                assert metadata.lengths == tuple(self.lengths[receive.key, sample] for sample in metadata.ids)
                received += [(receive.peer, worker, receive.key, sample) for sample in metadata.ids]
        assert sorted(sent) == sorted(received)
        assert len(set(received)) == len(received), "nothing twice"
        for source, target, key, sample in sent:
            assert (key, sample) in self.held[source], "a source has what it sends"
            assert (key, sample) not in self.held.get(target, ()), "nobody gets what it has"
        for _, target, key, sample in sent:
            self.held.setdefault(target, set()).add((key, sample))
        for worker in layout.mesh.devices:
            dp = layout.coordinates(worker)[0]
            wanted = {(key, sample) for key in keys for ids in parts[dp] for sample in ids}
            assert wanted <= self.held.get(worker, set()), f"worker {worker} lacks data"
        return len(sent)


BATCH_SIZE = 16


def random_layout(random: Random) -> Layout:
    dp, tp, pp = (random.choice([1, 2, 4]) for _ in range(3))
    return Layout(DeviceMesh(random.randrange(6), dp * tp * pp), ParallelStrategy(dp, tp, pp))


def cluster(random: Random, keys: list[str]) -> Cluster:
    lengths = {(key, sample): random.randrange(1, 50) for key in keys for sample in range(BATCH_SIZE)}
    return Cluster({}, lengths, DataDirectory())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**62))
def test_every_rank_gets_its_samples_and_nothing_twice(seed: int) -> None:
    random = Random(seed)
    keys = ["seq", "logprob", "reward"]
    workers = cluster(random, keys)
    for key in keys:
        workers.produce(key, random_layout(random), random.choice([1, 2, 4]))
    for _ in range(4):
        layout, mini_batches = random_layout(random), random.choice([1, 2, 4])
        wanted = random.sample(keys, random.randint(1, 3))
        held_before = {worker: set(held) for worker, held in workers.held.items()}
        num_sent = workers.deliver(layout, mini_batches, wanted)
        grown = sum(len(held - held_before.get(worker, set())) for worker, held in workers.held.items())
        assert num_sent == grown
        assert workers.deliver(layout, mini_batches, wanted) == 0, "a second time nothing is missing"


def test_the_same_layout_with_outputs_on_every_rank_moves_nothing() -> None:
    workers = cluster(Random(0), ["seq"])
    layout = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=4))
    workers.produce("seq", layout, 1)
    assert workers.directory.plan_transfer(layout, partition(BATCH_SIZE, 1, 4), ["seq"]) == {}


def test_tensor_parallel_peers_get_a_copy_each() -> None:
    workers = cluster(Random(0), ["seq"])
    layout = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2))
    workers.produce("seq", layout, 1)
    assert workers.deliver(layout, 1, ["seq"]) == BATCH_SIZE
    assert {worker: len(held) for worker, held in workers.held.items()} == {0: 8, 1: 8, 2: 8, 3: 8}
