"""Data between workers: everybody gets what the plan says, also what others send on, and nobody waits to post."""

from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.dataflow.protocols import ALL_TO_ALL, ONE_TO_ALL, THREE_D_PP_AS_DP, THREE_D_PROTO
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master.data import DataDirectory, partition
from realhf.transport.messages import BatchKey, KeyMetadata, Receive, Send
from realhf.worker.mailbox import Mailbox
from realhf.worker.store import SampleStore, describe
from tests.distributed.pool import run_distributed
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed

BATCH = BatchKey("train", 0)
COLUMN = KeyMetadata(dtype="int64", trailing=(), ids=(0, 1), lengths=(3, 1))
VALUES = {key: [torch.tensor([1, 2, 3]) + start, torch.tensor([start])] for key, start in (("seq", 10), ("own", 50))}


def pass_on(rank: int) -> list[list[int]]:
    """`seq` goes from 0 over 1 and 2 to 3. All but 0 post that first, and 1 sends 2 something of its own."""
    store = SampleStore()
    mailbox = Mailbox(store, PATIENCE_S)
    if rank == 0:
        dist.recv(torch.empty(1), 2)  # the others have posted
        store.put(BATCH, "seq", (0, 1), VALUES["seq"])
    if rank == 1:
        store.put(BATCH, "own", (0, 1), VALUES["own"])
    for key, sender in (("seq", 0), ("seq", 1), ("seq", 2), ("own", 1)):
        sends = [Send(peer=sender + 1, key=key, ids=(0, 1))] if rank == sender else []
        receives = [Receive(peer=sender, key=key, metadata=COLUMN)] if rank == sender + 1 else []
        mailbox.post(BATCH, sends, receives)
    if rank == 2:
        mailbox.collect(BATCH, ["own"])  # has overtaken what worker 1 cannot send on yet
        dist.send(torch.ones(1), 0)  # beside the mailbox's messages
    mailbox.collect(BATCH, ["seq", "own"])
    held = [value.tolist() for key in ("seq", "own") if rank or key == "seq" for value in held_by(store, key)]
    mailbox.free(BATCH)
    mailbox.close()
    return held


def held_by(store: SampleStore, key: str) -> list[Tensor]:
    try:
        return store.get(BATCH, key, (0, 1))
    except KeyError:
        return []


def test_what_is_sent_on_is_waited_for_by_nobody_else() -> None:
    seq, own = ([value.tolist() for value in VALUES[key]] for key in ("seq", "own"))
    assert run_distributed(pass_on, 4) == [seq, seq + own, seq + own, seq]


PROTOCOLS = (THREE_D_PROTO, THREE_D_PP_AS_DP, ALL_TO_ALL, ONE_TO_ALL)
KEYS = {"seq": torch.int64, "logprob": torch.float64, "is_pad": torch.bool}
SAMPLES = 8


def value(key: str, sample: int) -> Tensor:
    rows = torch.arange(2 * (sample + 1)).view(-1, 2) + 100 * sample
    return (rows % 2 == 0) if KEYS[key] is torch.bool else rows.to(KEYS[key])


def random_layout(random: Random) -> Layout:
    strategies = [ParallelStrategy(d, t, p) for d in (1, 2, 4) for t in (1, 2, 4) for p in (1, 2, 4) if d * t * p <= 4]
    strategy = random.choice(strategies)
    return Layout(DeviceMesh(random.randrange(0, 4, strategy.size), strategy.size), strategy)


def random_steps(rank: int, seeds: range) -> int:
    """Every rank plans alike and does its part; what calls find must be what was made. Returns the rounds behind the
    first ones, in which data is sent on."""
    store, later_rounds = SampleStore(), 0
    mailbox = Mailbox(store, PATIENCE_S)
    for seed in seeds:
        random, batch = Random(seed), BatchKey("train", seed)
        directory = DataDirectory(devices_per_node=random.choice([1, 2, None]))
        for key in KEYS:
            made_by = random_layout(random)
            for dp, (ids,) in enumerate(partition(SAMPLES, 1, made_by.strategy.dp)):
                values, worker = [value(key, sample) for sample in ids], made_by.output_device(dp)
                directory.record(worker, {key: describe(ids, values)})
                if worker == rank:
                    store.put(batch, key, ids, values)
        calls = []
        for _ in range(4):
            protocol, layout = random.choice(PROTOCOLS), random_layout(random)
            division = protocol.distribute(layout)
            parts = partition(SAMPLES, 1, division.parts)
            keys = random.sample(sorted(KEYS), random.randint(1, 3))
            rounds = directory.plan_transfer(layout, parts, keys, protocol)
            later_rounds += len(rounds[1:])
            for moves in (of_round[rank] for of_round in rounds if rank in of_round):
                mailbox.post(batch, moves.sends, moves.receives)
            if rank in division.part_of:
                calls.append((keys, parts[division.part_of[rank]][0]))
        for keys, ids in random.sample(calls, len(calls)):  # in another order than they were planned
            mailbox.collect(batch, keys)
            for key in keys:
                for sample, found in zip(ids, store.get(batch, key, ids), strict=True):
                    assert torch.equal(found, value(key, sample)), (seed, key, sample)
        mailbox.free(batch)
        store.free(batch)
    mailbox.close()
    return later_rounds


def test_random_transfers_bring_what_was_made() -> None:
    later_rounds = run_distributed(random_steps, 4, range(40))
    assert min(later_rounds) > 15, "something must be sent on"
