"""Collectives and messages over host memory against what one process knows, and what a missing rank leads to."""

import multiprocessing
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.chunks import RING_BYTES
from realhf.cpu import _host, host_group
from realhf.cpu.host_group import Parts
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel import groups
from realhf.parallel.groups import GroupTable
from tests.distributed.pool import run_distributed
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed

# Below and above what is summed directly, and more than fits into a slot; none divides by 3 or 4.
COUNTS = (1, 1_001, 50_003, 400_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def contribution(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """[count]"""
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(count, generator=generator)).to(dtype)


def summed(terms: list[Tensor]) -> Tensor:
    """In the order of the ranks; bfloat16 in float32, rounded once."""
    wide = [term.float() if term.dtype == torch.bfloat16 else term for term in terms]
    total = wide[0].clone()
    for term in wide[1:]:
        total += term
    return total.to(terms[0].dtype)


def new_group(size: int, timeout_s: float = PATIENCE_S) -> dist.ProcessGroup:
    return dist.new_group(list(range(size)), backend=host_group.BACKEND, timeout=timedelta(seconds=timeout_s))


def all_collectives(rank: int) -> None:
    for size in (2, 3, 4):
        group = new_group(size)
        if rank < size:
            check_collectives(rank, size, group)


def check_collectives(rank: int, size: int, group: dist.ProcessGroup) -> None:
    for count in COUNTS:
        for dtype in DTYPES:
            terms = [contribution(r, count, dtype) for r in range(size)]
            total = terms[rank].clone()
            dist.all_reduce(total, group=group)
            assert torch.equal(total, summed(terms)), (count, dtype)
            greatest = terms[rank].clone()
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
            assert torch.equal(greatest, torch.stack(terms).amax(0)), (count, dtype)
            copies = [torch.empty_like(total) for _ in range(size)]
            dist.all_gather(copies, terms[rank], group=group)
            assert all(map(torch.equal, copies, terms)), (count, dtype)
            whole = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, terms[rank], group=group)
            assert torch.equal(whole, torch.cat(terms)), (count, dtype)
            sent = terms[rank].clone()
            dist.broadcast(sent, size - 1, group=group)
            assert torch.equal(sent, terms[-1]), (count, dtype)
            parts = [contribution(10 + r, size * count, dtype) for r in range(size)]
            part = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, parts[rank], group=group)
            assert torch.equal(part, summed(parts)[rank * count : (rank + 1) * count]), (count, dtype)
    dist.barrier(group=group)


def test_collectives_of_two_to_four_ranks_are_right_to_the_bit():
    run_distributed(all_collectives, 4)


def strided_then_late(rank: int) -> str:
    group, impatient = new_group(2), new_group(2, timeout_s=0.5)
    column = torch.full((3, 2), float(rank + 1))[:, 0]
    dist.all_reduce(column, group=group)
    assert column.tolist() == [3.0, 3.0, 3.0]
    dist.all_reduce(torch.empty(0), group=group)
    with pytest.raises(NotImplementedError, match="SUM and MAX"):
        dist.all_reduce(column, dist.ReduceOp.PRODUCT, group=group)
    if rank == 1:
        return ""  # it stays until both are done
    with pytest.raises(host_group.PeerError) as raised:
        dist.all_reduce(column, group=impatient)
    return str(raised.value)


def test_odd_tensors_and_a_rank_that_does_not_come():
    """Tensors that are not contiguous or empty, an operation that is not there, and a late rank, which is named."""
    message = run_distributed(strided_then_late, 2)[0]
    assert "rank 1 of the group (process " in message
    assert "did not come in 0.5" in message


def out_of_step(rank: int, size: int) -> None:
    """Ranks come at different times, and rounds of all kinds follow each other without a pause."""
    group = new_group(size)
    sums = []
    for step in range(200):
        if step % 50 == rank:
            time.sleep(0.03)
        value = torch.full((1 + step * 97,), float(rank + step))
        dist.all_reduce(value, group=group)
        other = torch.tensor([float(rank * step)])
        dist.broadcast(other, step % size, group=group)
        sums.append((value[0].item(), other.item()))
    assert sums == [(sum(r + step for r in range(size)), (step % size) * step) for step in range(200)]


def test_ranks_that_are_out_of_step():
    run_distributed(out_of_step, 3, 3)


@dataclass(frozen=True)
class Memory:
    """Of a group of two; its owner keeps the file open."""

    process: int
    descriptor: int

    @staticmethod
    def make() -> "Memory":
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, _host.HostGroup.required_bytes(2, 64))
        return Memory(os.getpid(), descriptor)

    def join(self, rank: int) -> _host.HostGroup:
        return _host.HostGroup(
            os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDWR), rank, 2, 64, PATIENCE_S
        )


def come_once(memory: Memory) -> None:
    memory.join(1).barrier()


def test_a_rank_that_ended_is_named_long_before_the_deadline():
    memory = Memory.make()
    peer = multiprocessing.get_context("spawn").Process(target=come_once, args=(memory,))
    peer.start()
    group = memory.join(0)
    group.barrier()
    with pytest.raises(host_group.PeerError, match=rf"rank 1 of the group \(process {peer.pid}\) has ended"):
        group.barrier()
    peer.join()


def message(number: int, sender: int, count: int) -> Tensor:
    """[count] int32; every receiver knows it too."""
    return torch.arange(count, dtype=torch.int32) + 1_000_003 * number + sender


RING = RING_BYTES


def exchange_many(rank: int) -> None:
    """Both ranks send before they receive, up to twice what a ring holds, hundreds of messages in flight."""
    group, peer = new_group(2), 1 - rank
    random = torch.Generator().manual_seed(5)
    for number, limit in enumerate((3, 70_000, RING // 2)):
        # [sender, message] counts
        counts = torch.randint(limit, (2, 200 if limit < 100_000 else 4), generator=random).tolist()
        for sender in range(2):
            counts[sender][1] = 0
            counts[sender][-1] = limit
        sends = [dist.isend(message(number, rank, n), peer, group) for n in counts[rank]]
        received = [torch.full((n,), -1, dtype=torch.int32) for n in counts[peer]]
        receives = [dist.irecv(tensor, peer, group) for tensor in received]
        for work in (*receives[::-1], *sends) if number % 2 == rank else (*sends, *receives):
            assert work.wait()
            assert work.is_completed()
        for tensor, n in zip(received, counts[peer], strict=True):
            assert torch.equal(tensor, message(number, peer, n)), (number, n)


def test_messages_both_ways_at_once_arrive_whole_and_in_order():
    run_distributed(exchange_many, 2)


def pass_around(rank: int, size: int) -> int:
    """A batch of a send and a receive a round: what every rank began with goes around and grows by each rank."""
    group = new_group(size)
    held = torch.tensor([rank, rank])
    for step in range(300):
        if step % 50 == rank:
            time.sleep(0.02)
        arriving = torch.empty(2, 3, dtype=torch.int64)[:, 0]  # not contiguous
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, arriving, (rank - 1) % size, group),
                dist.P2POp(dist.isend, held, (rank + 1) % size, group),
            ]
        )
        assert len(works) == 2
        for work in works:
            work.wait()
        held = arriving + rank
    assert held[0] == held[1]
    return int(held[0])


def test_three_ranks_pass_messages_around():
    # 300 is divisible by 3: every message is back where it began, after 100 visits of each rank.
    assert run_distributed(pass_around, 3, 3) == [rank + 100 * (0 + 1 + 2) for rank in range(3)]


def wrong_size_then_late(rank: int) -> list[str]:
    wrong, late = new_group(2), new_group(2, timeout_s=0.3)
    if rank == 1:
        dist.send(torch.zeros(3), 0, wrong)
        dist.barrier()
        return []
    calls = (
        lambda: dist.recv(torch.zeros(2), 1, wrong),
        lambda: dist.recv(torch.zeros(2), 1, late),
        lambda: dist.send(torch.zeros(RING // 4 + 1), 1, late),
        lambda: dist.irecv(torch.zeros(2), 1, late).wait(timedelta(seconds=0.1)),
    )
    errors = []
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        errors.append(f"{raised.type.__name__}: {raised.value}")
    dist.barrier()
    return errors


def test_a_message_of_another_size_and_ones_that_do_not_come():
    wrong, received, sent, sooner = run_distributed(wrong_size_then_late, 2)[0]
    assert wrong == "RuntimeError: rank 1 of the group sent 12 bytes where rank 0 receives 8"
    for error, seconds in ((received, "0.3"), (sent, "0.3"), (sooner, "0.1")):
        assert error.startswith("PeerError: rank 1 of the group (process ")
        assert f"did not come in {seconds}" in error


SMALL_RING = 64


def join_channels(process: int, descriptor: int, rank: int) -> _host.Channels:
    return _host.Channels(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR), rank, 2, SMALL_RING)


def echo(process: int, descriptor: int, sizes: list[int]) -> None:
    """Sends back every message, then one that is never asked for, and ends."""
    channels = join_channels(process, descriptor, 1)
    for size in sizes:
        held = torch.zeros(size, dtype=torch.uint8)
        channels.wait_received(channels.receive(Parts.of([held]).rows, 0), 0, PATIENCE_S)
        channels.wait_sent(channels.send(Parts.of([held]).rows, 0), 0, PATIENCE_S)
    last = torch.full((10,), 7, dtype=torch.uint8)
    channels.send(Parts.of([last]).rows, 0)


def test_small_rings_and_a_rank_that_ended():
    """Every remainder at the end of the ring; what a rank sent before it ended arrives, then it is named."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, _host.Channels.required_bytes(2, SMALL_RING))
    sizes = [*range(3 * SMALL_RING), 5_003]
    arguments = (os.getpid(), descriptor, sizes)
    peer = multiprocessing.get_context("spawn").Process(target=echo, args=arguments)
    peer.start()
    channels = join_channels(os.getpid(), descriptor, 0)
    sent = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    back = [torch.zeros_like(tensor) for tensor in sent]
    receives = [channels.receive(Parts.of([tensor]).rows, 1) for tensor in back]
    sends = [channels.send(Parts.of([tensor]).rows, 1) for tensor in sent]
    channels.wait_sent(sends[-1], 1, PATIENCE_S)
    channels.wait_received(receives[-1], 1, PATIENCE_S)
    assert all(map(torch.equal, back, sent))
    peer.join()
    last, never = torch.zeros(10, dtype=torch.uint8), torch.zeros(1)
    channels.wait_received(channels.receive(Parts.of([last]).rows, 1), 1, PATIENCE_S)
    assert last.tolist() == [7] * 10
    ended = rf"rank 1 of the group \(process {peer.pid}\) has ended"
    with pytest.raises(host_group.PeerError, match=ended):
        channels.wait_received(channels.receive(Parts.of([never]).rows, 1), 1, PATIENCE_S)
    with pytest.raises(host_group.PeerError, match=ended):
        channels.wait_sent(channels.send(Parts.of([sent[-1]]).rows, 1), 1, PATIENCE_S)


def exchange_parts(rank: int) -> None:
    """Both ranks send at once, more than a ring holds, and cut the message into other parts than are received."""
    group, peer = new_group(2), 1 - rank
    whole = torch.arange(3 * 700 * 400, dtype=torch.float32) + 0.5 * rank
    cube = whole.view(3, 700, 400).transpose(0, 1).contiguous().transpose(0, 1)  # of these strides, in this order
    sent = group.send_parts(Parts.of([cube[:2], whole[:0], cube[2, :, 100:300], whole[7], whole[1:20:3]]), peer)
    wide, rest = torch.zeros(2, 700, 800), torch.zeros(140_008)
    received = group.receive_parts(Parts.of([wide[..., 100:500], rest]), peer)
    assert received.wait()
    assert sent.wait()
    whole += 0.5 * peer - 0.5 * rank
    assert torch.equal(wide[..., 100:500], whole.view(3, 700, 400)[:2])
    assert not wide[..., :100].any()
    assert not wide[..., 500:].any()
    expected = [whole.view(3, 700, 400)[2, :, 100:300].flatten(), whole[7:8], whole[1:20:3]]
    assert torch.equal(rest, torch.cat(expected))


def test_messages_in_parts_of_any_strides():
    run_distributed(exchange_parts, 2)


def exchange_large_parts(rank: int) -> None:
    """8 MiB, which are written past the caches, to the peer and to itself; rows begin and end anywhere in a line."""
    group, peer = new_group(2), 1 - rank
    own, others = (torch.arange(2**21, dtype=torch.float32).view(2048, 1024) * (at + 1) for at in (rank, peer))
    for to, expected in ((peer, others), (rank, own)):
        wide = torch.full((2048, 1031), -1.0)
        received = group.receive_parts(Parts.of([wide[:, 3:1027]]), to)
        sent = group.send_parts(Parts.of([own[:, :7].t(), own[:, 7:].t()]), to)
        assert received.wait()
        assert sent.wait()
        assert torch.equal(wide[:, 3:1027].flatten(), expected.t().flatten())
        assert (wide[:, :3] == -1).all()
        assert (wide[:, 1027:] == -1).all()
    # To itself, with the message sent first: it is on its way in the ring when it is asked for.
    there = torch.zeros(2**21)
    sent = group.send_parts(Parts.of([own]), rank)
    assert group.receive_parts(Parts.of([there]), rank).wait()
    assert sent.wait()
    assert torch.equal(there, own.flatten())


def test_large_messages_in_parts():
    run_distributed(exchange_large_parts, 2)


def hosts_of_tables(rank: int) -> list[list[int] | None]:
    """Which ranks the group of a host has, by the devices that must be on it."""
    found = []
    for hosts, devices in (([1] * 4, [0, 3]), ([1, 2, 1, 2], [1, 3]), ([1, 2, 1, 2], [0, 1]), ([1, 2, 3, 3], [0])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(groups, "_hosts", lambda hosts=hosts: hosts)
            group = GroupTable([], rank).of_host(devices)
        found.append(group and dist.get_process_group_ranks(group))
    return found


def test_the_group_of_a_host_is_found_by_devices():
    everywhere, second = [0, 1, 2, 3], [1, 3]
    for rank, found in enumerate(run_distributed(hosts_of_tables, 4)):
        assert found[0] == everywhere
        assert found[2:] == [None, None]
        if rank in second:
            assert found[1] == second


def pipeline_backends(rank: int) -> list[str | None]:
    """In a layout whose pipelines are on one host each, and after half of the ranks have moved to another."""
    layout, found = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=2, pp=2)), []
    for hosts in ([1] * 4, [1, 2, 1, 2], [1, 1, 2, 2]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(groups, "_hosts", lambda hosts=hosts: hosts)
            pipeline = GroupTable([layout], rank).groups(layout).pipeline
        found.append(pipeline and dist.get_backend(pipeline))
    return found


def test_pipelines_of_one_host_use_its_memory_others_the_world():
    memory = host_group.BACKEND
    assert run_distributed(pipeline_backends, 4) == [[memory, memory, None]] * 4


def table_backends(rank: int, size: int) -> list[str]:
    layout = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2))
    made = GroupTable([layout], rank).groups(layout)
    return [dist.get_backend(group) for group in (made.tensor, made.data, made.model)]


def test_groups_of_one_host_use_its_memory():
    assert run_distributed(table_backends, 4, 4) == [[host_group.BACKEND] * 3] * 4
    assert not list(Path("/dev/shm").glob(f"*{host_group.BACKEND}*"))
