"""Every rank gets the samples that it works on, once; the sends are the receives."""

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.interface import SampleDType
from realhf.dataflow.protocols import (
    ALL_TO_ALL,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Division,
    TransferProtocol,
)
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master.data import DataDirectory, Partition, Round, _item_bytes, dataset_sequences, length_key, partition
from realhf.transport.messages import KeyMetadata
from tests.unit.api.calls import Nothing, call


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


def worst_rank(parts: Partition, lengths: dict[int, int], mini_batch: int) -> int:
    return max(sum(lengths[sample] for sample in rank[mini_batch]) for rank in parts)


def least_possible(samples: list[int], dp: int, lengths: dict[int, int]) -> int:
    """Tokens of the worst rank in the best of all divisions into equal numbers."""
    if not samples:
        return 0
    first, *rest = samples
    return min(
        max(
            lengths[first] + sum(lengths[sample] for sample in others),
            least_possible([s for s in rest if s not in others], dp - 1, lengths),
        )
        for others in combinations(rest, len(samples) // dp - 1)
    )


@pytest.mark.parametrize(("dp", "samples"), [(2, 8), (3, 9), (4, 8)])
def test_the_worst_rank_has_few_more_tokens_than_it_must(dp: int, samples: int) -> None:
    random, ratios, runs = Random(dp), [], []
    for _ in range(30):
        lengths = {sample: random.randint(1, random.choice([20, 200])) for sample in range(samples)}
        parts = partition(samples, 1, dp, lengths)
        assert sorted(sample for rank in parts for sample in rank[0]) == list(range(samples))
        assert {len(rank[0]) for rank in parts} == {samples // dp}
        least = least_possible(list(range(samples)), dp, lengths)
        ratios.append(worst_rank(parts, lengths, 0) / least)
        runs.append(worst_rank(partition(samples, 1, dp), lengths, 0) / least)
    assert max(ratios) < 1.2
    assert sum(ratios) / len(ratios) < 1.03
    assert sum(runs) / len(runs) > 1.15  # what the lengths are good for


def test_a_partition_by_tokens_by_hand() -> None:
    # 9 and 1, 7 and 2 (10 and 9 tokens); 5 and 5, 5 and 5, as they stand.
    lengths = dict(enumerate([9, 7, 2, 1, 5, 5, 5, 5]))
    assert partition(8, 2, 2, lengths) == [[(0, 3), (4, 5)], [(1, 2), (6, 7)]]
    # The longest come first, and a rank has its samples in their order all the same: 9 and 1, 7 and 2.
    assert partition(4, 1, 2, dict(enumerate([1, 2, 7, 9]))) == [[(0, 3)], [(1, 2)]]
    # One sample a rank: nothing to gain.
    assert partition(4, 1, 4, lengths) == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_samples_of_a_prompt_stay_together_where_they_can() -> None:
    # Groups of 2 with 13, 11, 5 and 6 tokens: 13 + 5 and 11 + 6; single samples would be balanced otherwise.
    lengths = dict(enumerate([9, 4, 8, 3, 1, 4, 5, 1]))
    assert partition(8, 1, 2, lengths, 2) == [[(0, 1, 4, 5)], [(2, 3, 6, 7)]]
    assert partition(8, 1, 2, lengths) != partition(8, 1, 2, lengths, 2)
    # Four ranks have a half of a group each; six samples a rank have groups of four in pairs.
    assert partition(8, 1, 4, None, 4) == [[(0, 1)], [(2, 3)], [(4, 5)], [(6, 7)]]
    for rank in partition(12, 1, 2, {i: 1 + i % 5 for i in range(12)}, 4):
        assert all(sample ^ 1 in rank[0] for sample in rank[0])
    # A mini-batch may begin within a group.
    assert partition(8, 2, 2, None, 8) == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize(("prompts", "group", "dp"), [(7, 1, 2), (7, 1, 4), (5, 3, 2), (5, 3, 4), (3, 4, 8), (2, 3, 4)])
def test_a_batch_of_an_evaluation_that_dp_does_not_divide(
    prompts: int, group: int, dp: int, with_lengths: bool
) -> None:
    samples = prompts * group
    for seed in range(20):
        random = Random(seed)
        lengths = {i: random.choice([1, 2, 90]) for i in range(samples)} if with_lengths else None
        parts = [ids for (ids,) in partition(samples, 1, dp, lengths, group)]
        assert sorted(sample for ids in parts for sample in ids) == list(range(samples))
        together = group if prompts >= dp else 1
        most = -(-samples // together // dp) * together
        assert all(0 < len(ids) <= most and len(ids) % together == 0 for ids in parts)
        assert all({i // together * together + k for i in ids for k in range(together)} == {*ids} for ids in parts)


@pytest.mark.parametrize("samples_per_prompt", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("mini_batches", "dp"), [(1, 2), (2, 2), (1, 4), (4, 2), (2, 8)])
def test_whole_groups_where_their_number_allows_it(samples_per_prompt: int, mini_batches: int, dp: int) -> None:
    random = Random(samples_per_prompt)
    parts = partition(32, mini_batches, dp, {i: random.randint(1, 50) for i in range(32)}, samples_per_prompt)
    assert sorted(sample for rank in parts for ids in rank for sample in ids) == list(range(32))
    size = 32 // mini_batches // dp
    assert {len(ids) for rank in parts for ids in rank} == {size}
    if size % samples_per_prompt == 0:
        for ids in (ids for rank in parts for ids in rank):
            groups = {sample // samples_per_prompt for sample in ids}
            assert len(groups) == size // samples_per_prompt


def test_the_lengths_of_the_first_sequence_that_is_made_divide() -> None:
    class Pairs(Nothing):
        sequence_keys = ("chosen", "sample")

    graph = DataflowGraph(
        [
            call("policy", GENERATE, ["prompt"], ["score", "sample"]),
            call("reward", TRAIN_STEP, ["score", "chosen", "sample"], interface_impl=Pairs()),
            call("other", INFERENCE, ["prompt", "score"]),
        ],
        ["prompt", "chosen"],
    )
    keys = {name: length_key(graph, made) for name, made in graph.calls.items()}
    assert keys == {"policy_generate": None, "reward_train_step": "sample", "other_inference": "score"}


def test_the_first_input_is_the_sequence_of_a_call_that_names_none() -> None:
    class Pairs(Nothing):
        sequence_keys = ("chosen", "sample")

    assert dataset_sequences(call("m", TRAIN_STEP, ["first", "second"])) == ("first",)
    assert dataset_sequences(call("m", TRAIN_STEP, ["first"], interface_impl=Pairs())) == ("chosen", "sample")


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

    def deliver(
        self, layout: Layout, mini_batches: int, keys: list[str], protocol: TransferProtocol = THREE_D_PROTO
    ) -> list[tuple[int, int, str, int]]:
        """Carries out the plan for a call on `layout`; returns (sender, receiver, key, sample) of all that was sent."""
        division = protocol.distribute(layout)
        parts = partition(BATCH_SIZE, mini_batches, division.parts)
        all_sent = []
        for moves in self.directory.plan_transfer(layout, parts, keys, protocol):
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
            all_sent += sent
        for worker, of_worker in division.part_of.items():
            wanted = {(key, sample) for key in keys for ids in parts[of_worker] for sample in ids}
            assert wanted <= self.held.get(worker, set()), f"worker {worker} lacks data"
        return all_sent


BATCH_SIZE = 16


def random_layout(random: Random) -> Layout:
    dp, tp, pp = (random.choice([1, 2, 4]) for _ in range(3))
    return Layout(DeviceMesh(random.randrange(6), dp * tp * pp), ParallelStrategy(dp, tp, pp))


def cluster(random: Random, keys: list[str], devices_per_node: int | None = None) -> Cluster:
    lengths = {(key, sample): random.randrange(1, 50) for key in keys for sample in range(BATCH_SIZE)}
    return Cluster({}, lengths, DataDirectory(devices_per_node))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**62))
def test_every_rank_gets_its_samples_and_nothing_twice(seed: int) -> None:
    """Into each node that lacks a sample it comes once, into others never, whoever needed it before."""
    random = Random(seed)
    keys = ["seq", "logprob", "reward"]
    per_node = random.choice([1, 2, 4, 8, None])
    workers = cluster(random, keys, per_node)

    def nodes_by_sample() -> dict[tuple[str, int], set[int]]:
        nodes: dict[tuple[str, int], set[int]] = {}
        for worker, held in workers.held.items():
            for sample in held:
                nodes.setdefault(sample, set()).add(worker // per_node if per_node else 0)
        return nodes

    for key in keys:
        workers.produce(key, random_layout(random), random.choice([1, 2, 4]))
    for _ in range(4):
        layout, mini_batches = random_layout(random), random.choice([1, 2, 4])
        wanted = random.sample(keys, random.randint(1, 3))
        held_before = {worker: set(held) for worker, held in workers.held.items()}
        nodes_before = nodes_by_sample()
        sent = workers.deliver(layout, mini_batches, wanted)
        grown = sum(len(held - held_before.get(worker, set())) for worker, held in workers.held.items())
        assert len(sent) == grown
        # The least that must cross milestones of nodes: one copy for each node that did not have it.
        crossed = sum(per_node is not None and sender // per_node != to // per_node for sender, to, _, _ in sent)
        assert crossed == sum(len(nodes - nodes_before[sample]) for sample, nodes in nodes_by_sample().items())
        assert not workers.deliver(layout, mini_batches, wanted), "a second time nothing is missing"


@pytest.mark.parametrize("protocol", [ONE_TO_ALL, RANK_ZERO, ALL_TO_ALL, THREE_D_PP_ONLY, THREE_D_PP_AS_DP])
def test_data_moves_as_any_protocol_says(protocol: TransferProtocol) -> None:
    for seed in range(20):
        random = Random(seed)
        workers = cluster(random, ["seq"])
        workers.produce("seq", random_layout(random), 1)
        layout = Layout(DeviceMesh(random.randrange(6), 8), ParallelStrategy(dp=2, tp=2, pp=2))
        workers.deliver(layout, random.choice([1, 2]), ["seq"], protocol)


def test_the_same_layout_with_outputs_on_every_rank_moves_nothing() -> None:
    workers = cluster(Random(0), ["seq"])
    layout = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=4))
    workers.produce("seq", layout, 1)
    assert workers.directory.plan_transfer(layout, partition(BATCH_SIZE, 1, 4), ["seq"]) == []


def test_tensor_parallel_peers_get_a_copy_each() -> None:
    workers = cluster(Random(0), ["seq"])
    layout = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2))
    workers.produce("seq", layout, 1)
    assert len(workers.deliver(layout, 1, ["seq"])) == BATCH_SIZE
    assert {worker: len(held) for worker, held in workers.held.items()} == {0: 8, 1: 8, 2: 8, 3: 8}


def test_eight_tensor_parallel_peers_on_another_node_by_hand() -> None:
    """Both producers' samples cross to the other node once, over different devices, and spread there."""
    workers = cluster(Random(0), ["seq"], devices_per_node=8)
    workers.lengths = dict.fromkeys(workers.lengths, 10)
    workers.produce("seq", Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2)), 1)
    sent = workers.deliver(Layout(DeviceMesh(8, 8), ParallelStrategy(tp=8)), 1, ["seq"])
    across = {(sender, receiver) for sender, receiver, _, _ in sent if sender < 8}
    assert len(across) == 2
    assert len({receiver for _, receiver in across}) == 2
    received = Counter(receiver for _, receiver, _, _ in sent)
    assert received == dict.fromkeys(range(8, 16), BATCH_SIZE)
    # A half at a time: who has one first sends it to three, in a tree of eight, and may send the other half once.
    assert max(Counter(sender for sender, _, _, _ in sent).values()) <= 2 * BATCH_SIZE, "nobody sends to all of them"


def test_who_got_a_sample_for_one_call_has_it_for_others() -> None:
    """Device 4 fetched what device 7 wants later, from its own node; device 0 need not send it again."""
    workers = cluster(Random(0), ["seq"], devices_per_node=4)
    workers.produce("seq", Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)
    assert {(s, r) for s, r, _, _ in workers.deliver(Layout(DeviceMesh(4, 1), ParallelStrategy()), 1, ["seq"])} == {
        (0, 4)
    }
    assert {(s, r) for s, r, _, _ in workers.deliver(Layout(DeviceMesh(7, 1), ParallelStrategy()), 1, ["seq"])} == {
        (4, 7)
    }


def test_sizes_count_in_bytes() -> None:
    """Who has to send what nobody else has does not send what another one has, too."""
    directory = DataDirectory()
    for worker in (0, 1):
        column = KeyMetadata(dtype="bool", trailing=(), ids=(0, 1), lengths=(30, 30))
        directory.record(worker, {"is_pad": column})
    directory.record(0, {"logits": KeyMetadata(dtype="float64", trailing=(100,), ids=(0, 1), lengths=(1, 1))})
    layout = Layout(DeviceMesh(2, 1), ParallelStrategy())
    (moves,) = directory.plan_transfer(layout, [[(0, 1)]], ["is_pad", "logits"])
    assert [send.key for send in moves[0].sends] == ["logits"]
    assert [send.key for send in moves[1].sends] == ["is_pad"]


@pytest.mark.parametrize(("peers", "rounds"), [(2, 1), (4, 2), (8, 3)])
def test_peers_in_a_node_get_a_sample_by_a_tree(peers: int, rounds: int) -> None:
    """In each round all who have it send it to one more."""
    workers = cluster(Random(0), ["seq"], devices_per_node=8)
    workers.produce("seq", Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)
    layout = Layout(DeviceMesh(0, peers), ParallelStrategy(tp=peers))
    moves = workers.directory.plan_transfer(layout, partition(BATCH_SIZE, 1, 1), ["seq"])
    assert len(moves) <= rounds
    assert max(sum(len(of_round[w].sends) for of_round in moves if w in of_round) for w in range(peers)) == rounds


@pytest.mark.parametrize("dtype", get_args(SampleDType))
def test_a_number_has_the_bytes_that_it_has_in_torch(dtype: SampleDType) -> None:
    assert _item_bytes(dtype) == getattr(torch, dtype).itemsize


def column(*ids: int, dtype: SampleDType = "uint8", trailing: tuple[int, ...] = (), length: int = 1) -> KeyMetadata:
    return KeyMetadata(dtype=dtype, trailing=trailing, ids=ids, lengths=(length,) * len(ids))


def directory_of(*held: tuple[int, str, KeyMetadata]) -> DataDirectory:
    directory = DataDirectory()
    for worker, key, metadata in held:
        directory.record(worker, {key: metadata})
    return directory


def sent(rounds: list[Round]) -> list[list[tuple[int, int, str, tuple[int, ...]]]]:
    """(sender, receiver, key, samples) of each round, in the order in which they are sent."""
    return [
        [(worker, send.peer, send.key, send.ids) for worker, moves in of_round.items() for send in moves.sends]
        for of_round in rounds
    ]


def mine(part_of: dict[int, int]) -> TransferProtocol:
    """Gives each device the part that it says; nothing is collected."""
    division = Division(1 + max(part_of.values()), part_of)
    return TransferProtocol(name="MINE", distribute=lambda _: division, collect=lambda _: ())


THREE = Layout(DeviceMesh(0, 3), ParallelStrategy(dp=3))


def test_the_largest_goes_first_and_the_next_ones_from_whoever_is_free_sooner() -> None:
    """In bytes: 80 from worker 0, then 60 from worker 1, which is free first for the last 15."""
    columns = {
        "few_wide": column(0, dtype="int64", trailing=(5, 2)),
        "many": column(0, dtype="float32", length=15),
        "marks": column(0, dtype="bool", length=15),
    }
    directory = directory_of(*((worker, key, made) for worker in (0, 1) for key, made in columns.items()))
    rounds = directory.plan_transfer(THREE, [[(0,)]], columns, mine({2: 0}))
    assert sent(rounds) == [[(0, 2, "few_wide", (0,)), (1, 2, "many", (0,)), (1, 2, "marks", (0,))]]
    lengths = {"long": column(0, length=100), "short": column(0, dtype="int64", length=5), "wide": column(0, length=30)}
    directory = directory_of(*((worker, key, made) for worker in (0, 1) for key, made in lengths.items()))
    rounds = directory.plan_transfer(THREE, [[(0,)]], lengths, mine({2: 0}))
    assert sent(rounds) == [[(0, 2, "long", (0,)), (1, 2, "short", (0,)), (1, 2, "wide", (0,))]]


def test_a_plan_depends_on_no_order_in_which_things_are_named() -> None:
    """Not on that of keys, of workers, or of a worker's samples."""
    held = [(worker, key, column(0, 5)) for worker in (0, 3) for key in ("a", "b")]
    first = directory_of(*held).plan_transfer(THREE, [[(0, 5)]], ["a", "b"], mine({1: 0, 2: 0}))
    other = directory_of(*held[::-1]).plan_transfer(THREE, [[(5, 0)]], ["b", "a"], mine({2: 0, 1: 0}))
    assert first == other
    assert sent(first) == [[(sender, to, key, (0, 5)) for sender, to in ((0, 1), (3, 2)) for key in ("a", "b")]]
    # Of samples that others lack: the first one from the first worker.
    rounds = directory_of((0, "a", column(0, 5)), (3, "a", column(0, 5))).plan_transfer(
        THREE, [[(5,)], [(0,)]], ["a"], mine({1: 0, 2: 1})
    )
    assert sent(rounds) == [[(0, 2, "a", (0,)), (3, 1, "a", (5,))]]


def test_a_message_has_its_samples_in_order_and_a_worker_its_messages() -> None:
    """Sample 1, which is longer, is planned first, and the key `b` before `a`."""
    lengths = KeyMetadata(dtype="uint8", trailing=(), ids=(0, 1), lengths=(3, 100))
    directory = directory_of((0, "a", lengths), (0, "b", column(0, 1, length=500)))
    rounds = directory.plan_transfer(THREE, [[(0, 1)], [(0,)]], ["a", "b"], mine({1: 0, 2: 1}))
    to_one = [(key, ids) for sender, receiver, key, ids in sent(rounds)[0] if (sender, receiver) == (0, 1)]
    assert to_one == [("a", (0, 1)), ("b", (0, 1))]


def test_of_several_holders_that_are_free_the_first_by_number_sends() -> None:
    directory = directory_of((8, "a", column(0)), (1, "a", column(0)))
    assert sent(directory.plan_transfer(THREE, [[(0,)]], ["a"], mine({2: 0}))) == [[(1, 2, "a", (0,))]]
