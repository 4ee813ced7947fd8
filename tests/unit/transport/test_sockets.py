"""Server and clients over real sockets: identity, silence towards strangers, garbage, heartbeats."""

import asyncio
import queue
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from realhf.base.errors import RunError, UserError
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.transport import server as server_module
from realhf.transport.client import Client, Silence
from realhf.transport.codec import Codec
from realhf.transport.keys import WorkerKeys, load_master_keys, load_worker_keys, make_run_keys
from realhf.transport.messages import (
    Alive,
    DumpStacks,
    Failure,
    Heartbeat,
    Hello,
    Ready,
    Release,
    Shutdown,
    ToMaster,
    ToWorker,
)
from realhf.transport.server import Server
from tests.waiting import PATIENCE_S

MasterEnd = Server[ToMaster, ToWorker]
WorkerEnd = Client[ToWorker, ToMaster]
NUM_WORKERS = 3
SILENCE_S = 0.5


class Echo(msgspec.Struct, frozen=True, tag=True):
    """A message to a worker with a body, for order and size."""

    number: int


def make_keys(directory: Path) -> Path:
    make_run_keys(directory, num_workers=NUM_WORKERS)
    return directory


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


def serve(keys: Path, host: str = "127.0.0.1", max_bytes: int = 10_000) -> MasterEnd:
    return Server(
        host,
        load_master_keys(keys, num_workers=NUM_WORKERS),
        incoming=Codec(ToMaster, max_bytes=max_bytes),
        outgoing=Codec(ToWorker | Echo),
    )


def connect(
    server: MasterEnd,
    keys: WorkerKeys,
    *,
    heartbeat: Callable[[], ToMaster] = lambda: Heartbeat(activity="idle"),
    heartbeat_s: float = 60.0,
    max_bytes: int = 10_000,
) -> WorkerEnd:
    return Client(
        server.address,
        keys,
        incoming=Codec(ToWorker | Echo),
        outgoing=Codec(ToMaster, max_bytes=max_bytes),
        heartbeat=heartbeat,
        heartbeat_s=heartbeat_s,
    )


def raw_dealer(server: MasterEnd, keys: WorkerKeys | None) -> "zmq.Socket[bytes]":
    """A socket that can send what a Client never would."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndhwm = 0
    if keys is not None:
        dealer.curve_serverkey = keys.master
        dealer.curve_publickey = keys.own.public
        dealer.curve_secretkey = keys.own.secret
    dealer.connect(server.address)
    return dealer


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


async def recv(server: MasterEnd) -> tuple[int, ToMaster]:
    return await asyncio.wait_for(server.recv(), PATIENCE_S)


async def send_for_ever(server: MasterEnd, worker: int) -> None:
    while True:
        await server.send(worker, Shutdown())
        await asyncio.sleep(0.02)


async def hears_nothing(server: MasterEnd) -> bool:
    try:
        await asyncio.wait_for(server.recv(), timeout=SILENCE_S)
    except TimeoutError:
        return True
    return False


def test_messages_go_both_ways_in_order(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys)
        clients = [connect(server, load_worker_keys(keys, worker=i)) for i in range(NUM_WORKERS)]
        for i, client in enumerate(clients):
            client.send(Hello(worker=i, pid=100 + i, host="here"))
        heard = dict([await recv(server) for _ in clients])
        assert heard == {i: Hello(worker=i, pid=100 + i, host="here") for i in range(NUM_WORKERS)}
        assert server.known_workers == {0, 1, 2}

        for number in range(100):
            for i in range(NUM_WORKERS):
                await server.send(i, Echo(number * 10 + i))  # type: ignore[arg-type]
        for i, client in enumerate(clients):
            got = [await asyncio.to_thread(client.receive, PATIENCE_S) for _ in range(100)]
            assert got == [Echo(number * 10 + i) for number in range(100)]
            assert client.receive(0.01) is None
            client.close()
        server.close()
        assert server.num_dropped == 0

    run(scenario())


def test_the_identity_comes_from_the_key(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys)
        client = connect(server, load_worker_keys(keys, worker=2))
        client.send(Hello(worker=0, pid=1, host="liar"))
        assert await recv(server) == (2, Hello(worker=0, pid=1, host="liar"))
        assert server.known_workers == {2}
        client.close()
        server.close()

    run(scenario())


def test_a_refused_connection_is_not_heard_and_the_next_one_is(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys)
        stale, present = (connect(server, load_worker_keys(keys, worker=0)) for _ in range(2))
        stale.send(Hello(worker=0, pid=1, host="here", start_id="old"))
        assert await recv(server) == (0, Hello(worker=0, pid=1, host="here", start_id="old"))
        server.refuse(0)
        assert server.known_workers == frozenset()
        stale.send(Hello(worker=0, pid=1, host="here", start_id="old"))
        present.send(Hello(worker=0, pid=2, host="here", start_id="new"))
        assert await recv(server) == (0, Hello(worker=0, pid=2, host="here", start_id="new"))
        await server.send(0, Echo(7))  # type: ignore[arg-type]
        assert await asyncio.to_thread(present.receive, PATIENCE_S) == Echo(7)
        stale.close()
        present.close()
        server.close()

    run(scenario())


def test_a_master_that_is_not_heard_is_told(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys)
        told: queue.SimpleQueue[tuple[float, bool]] = queue.SimpleQueue()
        silence = Silence(0.3, 0.6, lambda silent_s, has_heard: told.put((silent_s, has_heard)))
        client: WorkerEnd = Client(
            server.address,
            load_worker_keys(keys, worker=0),
            incoming=Codec[ToWorker](ToWorker),
            outgoing=Codec[ToMaster](ToMaster),
            heartbeat=lambda: Heartbeat(activity="waiting"),
            heartbeat_s=0.05,
        )
        client.watch(silence)
        silent_s, has_heard = await asyncio.to_thread(told.get, timeout=PATIENCE_S)
        assert (silent_s > 0.3, has_heard) == (True, False)
        assert await recv(server) == (0, Heartbeat(activity="waiting"))
        await server.send(0, Alive())
        assert await asyncio.to_thread(client.receive, PATIENCE_S) == Alive()
        while not has_heard:  # what was told before it came
            silent_s, has_heard = await asyncio.to_thread(told.get, timeout=PATIENCE_S)
        assert silent_s > 0.6
        client.close()
        server.close()

    run(scenario())


def test_strangers_get_no_answer_and_change_nothing(keys: Path, tmp_path: Path) -> None:
    other_run = make_keys(tmp_path / "other")
    mine, theirs = load_worker_keys(keys, worker=1), load_worker_keys(other_run, worker=1)

    async def scenario() -> None:
        server = serve(keys)
        honest = connect(server, load_worker_keys(keys, worker=0))
        honest.send(Ready(device="CPU"))
        assert await recv(server) == (0, Ready(device="CPU"))

        valid = Codec[ToMaster](ToMaster).encode(Ready(device="CPU"))
        strangers = {
            "no key at all": raw_dealer(server, None),
            "the key of another run, for both ends": raw_dealer(server, theirs),
            "the right master, an unlisted key": raw_dealer(server, replace(theirs, master=mine.master)),
            "a listed public key without its secret": raw_dealer(
                server, replace(mine, own=replace(theirs.own, public=mine.own.public))
            ),
        }
        for stranger in strangers.values():
            for _ in range(50):
                stranger.send(valid)
        plain = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
        plain.sendall(random.Random(0).randbytes(5000))

        assert await hears_nothing(server)
        while server.num_refused == 0:
            assert await hears_nothing(server)
        assert server.known_workers == {0}
        for name, stranger in strangers.items():
            assert stranger.poll(0) == 0, name
            stranger.close()
        with pytest.raises(RunError, match="worker 1 has not connected, so it cannot be sent a Shutdown"):
            await server.send(1, Shutdown())

        honest.send(Ready(device="CPU"))  # and the honest one is still served
        assert await recv(server) == (0, Ready(device="CPU"))
        await server.send(0, Shutdown())
        assert await asyncio.to_thread(honest.receive, PATIENCE_S) == Shutdown()
        plain.close()
        honest.close()
        server.close()

    run(scenario())


def test_a_worker_that_was_refused_is_told_and_can_be_closed(keys: Path, tmp_path: Path) -> None:
    theirs = load_worker_keys(make_keys(tmp_path / "other"), worker=1)
    theirs = replace(theirs, master=load_worker_keys(keys, worker=1).master)

    async def scenario() -> None:
        server = serve(keys)
        told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        stranger = connect(server, theirs)
        stranger.when_ended(told.put)
        while server.num_refused == 0:
            await asyncio.sleep(0.01)
        for _ in range(3):  # its end hears of it a little later
            stranger.send(Ready(device="CPU"))
            await asyncio.sleep(SILENCE_S)
        with pytest.raises(RuntimeError, match="has ended") as ended:
            stranger.receive(PATIENCE_S)
        assert "refused this worker's key" in str(ended.value.__cause__)
        assert told.get(timeout=PATIENCE_S) is ended.value.__cause__
        stranger.when_ended(told.put)  # who asks later is told at once
        assert told.get_nowait() is ended.value.__cause__
        await asyncio.to_thread(stranger.close)
        server.close()

    run(scenario())


def garbage(valid: bytes, count: int) -> list[list[bytes]]:
    """Frames of chance, of changed bits, too many or empty ones; a few of the changed ones may be messages."""
    dice = random.Random(7)
    made = []
    for _ in range(count):
        flipped = bytearray(valid)
        flipped[dice.randrange(len(valid))] ^= 1 << dice.randrange(8)
        noise = dice.randbytes(dice.randrange(100))
        made.append(dice.choice([[noise], [bytes(flipped)], [valid, b"more"], [b""], [b"", b"", b""]]))
    return made


def test_garbage_is_dropped_and_counted_and_then_its_sender_is(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_GARBAGE", 300)

    async def scenario() -> None:
        server = serve(keys)
        dealer = raw_dealer(server, load_worker_keys(keys, worker=1))
        honest = connect(server, load_worker_keys(keys, worker=2))
        last = Failure(request_id=1, text="the end")
        frames = garbage(Codec[ToMaster](ToMaster).encode(Hello(worker=1, pid=2, host="h")), 300)
        for frame in frames:
            dealer.send_multipart(frame)
        dealer.send(Codec[ToMaster](ToMaster).encode(last))
        num_heard = 0  # a flipped bit may leave a valid message
        while await recv(server) != (1, last):
            num_heard += 1
        assert server.garbage(1) == server.num_dropped == len(frames) - num_heard
        assert num_heard < len(frames) / 4

        while server.garbage(1) <= 300:  # as a receiver that finds no sense in a message
            server.reject(1)
        dealer.send(Codec[ToMaster](ToMaster).encode(last))
        while server.garbage(1) < 302:
            assert await hears_nothing(server)
        assert server.garbage(1) == 302
        honest.send(Ready(device="CPU"))
        assert await recv(server) == (2, Ready(device="CPU"))
        assert server.garbage(2) == 0
        dealer.close()
        honest.close()
        server.close()

    run(scenario())


def test_a_worker_drops_and_counts_what_is_no_request(keys: Path) -> None:
    """From a master whose key it trusts, so nothing else is in the way of the frames."""
    master = load_master_keys(keys, num_workers=NUM_WORKERS)
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger, socket.curve_server, socket.curve_secretkey = 0, True, master.own.secret
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    client: WorkerEnd = Client(
        f"tcp://127.0.0.1:{port}",
        load_worker_keys(keys, worker=0),
        incoming=Codec[ToWorker](ToWorker),
        outgoing=Codec[ToMaster](ToMaster),
        heartbeat=lambda: Ready(device="CPU"),
        heartbeat_s=0.05,
    )
    assert socket.poll(1000 * PATIENCE_S)
    route, _ = socket.recv_multipart()
    valid = Codec[ToWorker](ToWorker).encode(
        Release(model="actor", layout=Layout(DeviceMesh(0, 2), ParallelStrategy()))
    )
    frames = garbage(valid, 300)
    for frame in frames:
        socket.send_multipart([route, *frame])
    socket.send_multipart([route, Codec[ToWorker](ToWorker).encode(Shutdown())])
    heard = [client.receive(PATIENCE_S)]
    while heard[-1] != Shutdown():
        heard.append(client.receive(PATIENCE_S))
        assert heard[-1] is not None
    assert client.num_dropped == len(frames) - (len(heard) - 1)
    assert socket.poll(1000 * PATIENCE_S), "its heartbeats go on"
    client.close()
    socket.close()


def test_a_message_over_the_limit_never_arrives(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys, max_bytes=1000)
        polite = connect(server, load_worker_keys(keys, worker=0), max_bytes=1000)
        with pytest.raises(ValueError, match="over the limit of 1000 bytes"):
            polite.send(Heartbeat(activity="x" * 2000))
        rude = connect(server, load_worker_keys(keys, worker=1), max_bytes=10**8)
        rude.send(Heartbeat(activity="x" * 10**7))
        assert await hears_nothing(server)
        polite.send(Ready(device="CPU"))
        assert await recv(server) == (0, Ready(device="CPU"))
        polite.close()
        rude.close(flush_s=0.1)
        server.close()

    run(scenario())


def test_heartbeats_flow_while_the_main_thread_is_busy(keys: Path, tmp_path: Path) -> None:
    worker = """
import sys
from pathlib import Path
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.transport import server as server_module
from realhf.transport.client import Client, Silence
from realhf.transport.codec import Codec
from realhf.transport.keys import load_worker_keys
from realhf.transport.messages import Heartbeat, Ready, ToMaster, ToWorker
client = Client(sys.argv[1], load_worker_keys(Path(sys.argv[2]), worker=1), incoming=Codec(ToWorker),
                outgoing=Codec(ToMaster), heartbeat=lambda: Heartbeat(activity="counting"), heartbeat_s=0.1)
enough = Path(sys.argv[3])
while not enough.exists():
    sum(range(1000))
client.send(Ready(device="CPU"))
client.close(flush_s=600)
"""

    async def scenario() -> None:
        server = serve(keys)
        enough = tmp_path / "enough"
        process = subprocess.Popen([sys.executable, "-c", worker, server.address, str(keys), str(enough)])
        try:
            for _ in range(8):
                assert await recv(server) == (1, Heartbeat(activity="counting"))
            enough.touch()
            while (message := await recv(server))[1] != Ready(device="CPU"):
                assert message == (1, Heartbeat(activity="counting"))
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            server.close()

    run(scenario())


def test_what_is_urgent_does_not_wait_for_the_main_thread(keys: Path) -> None:
    seen: list[ToWorker] = []
    done = threading.Event()

    def urgent(message: ToWorker) -> bool:
        if isinstance(message, DumpStacks):
            seen.append(message)
            done.set()
        return isinstance(message, DumpStacks)

    async def scenario() -> None:
        server = serve(keys)
        client: WorkerEnd = Client(
            server.address,
            load_worker_keys(keys, worker=0),
            incoming=Codec[ToWorker](ToWorker),
            outgoing=Codec[ToMaster](ToMaster),
            heartbeat=lambda: Heartbeat(activity="idle"),
            heartbeat_s=60.0,
            urgent=urgent,
        )
        client.send(Ready(device="CPU"))
        assert await recv(server) == (0, Ready(device="CPU"))
        await server.send(0, DumpStacks())
        assert await asyncio.to_thread(done.wait, PATIENCE_S), "nobody called receive"
        await server.send(0, Shutdown())
        assert await asyncio.to_thread(client.receive, PATIENCE_S) == Shutdown()
        assert seen == [DumpStacks()]
        client.close()
        server.close()

    run(scenario())


def test_a_failing_heartbeat_reaches_the_main_thread(keys: Path) -> None:
    def broken() -> ToMaster:
        raise OSError("no activity file")

    async def scenario() -> None:
        server = serve(keys)
        client = connect(server, load_worker_keys(keys, worker=0), heartbeat=broken, heartbeat_s=0.05)
        for _ in range(2):  # not only the first time
            with pytest.raises(RuntimeError, match="has ended") as raised:
                await asyncio.to_thread(client.receive, PATIENCE_S)
            assert isinstance(raised.value.__cause__, OSError)
        client.close()
        server.close()

    run(scenario())


def test_closing_sends_what_is_queued_and_ends_in_time(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys)
        client = connect(server, load_worker_keys(keys, worker=0))
        for i in range(500):
            client.send(Failure(request_id=i, text="last words"))
        closing = asyncio.create_task(asyncio.to_thread(client.close, flush_s=PATIENCE_S))
        assert [(await recv(server))[1].request_id for _ in range(500)] == list(range(500))  # type: ignore[union-attr]
        await closing
        with pytest.raises(RuntimeError, match="was closed"):
            client.send(Ready(device="CPU"))
        with pytest.raises(RuntimeError, match="has ended"):
            client.receive(PATIENCE_S)
        address = server.address
        server.close()

        nobody = Client(
            address,
            load_worker_keys(keys, worker=0),
            incoming=Codec[ToWorker](ToWorker),
            outgoing=Codec[ToMaster](ToMaster),
            heartbeat=lambda: Ready(device="CPU"),
        )
        nobody.send(Ready(device="CPU"))
        nobody.close(flush_s=0.3)  # else it would wait for ever

    run(scenario())


def test_a_worker_that_starts_anew_takes_its_place_and_a_gone_one_is_named(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys)
        for pid in (1, 2):
            client = connect(server, load_worker_keys(keys, worker=0))
            client.send(Hello(worker=0, pid=pid, host="h"))
            assert await recv(server) == (0, Hello(worker=0, pid=pid, host="h"))
            await server.send(0, Shutdown())
            assert await asyncio.to_thread(client.receive, PATIENCE_S) == Shutdown()
            client.close()
        with pytest.raises(RunError, match="the connection to worker 0 is gone, so it cannot be sent a Shutdown"):
            await send_for_ever(server, 0)  # until the server's end has noticed
        server.close()

    run(scenario())


def test_servers_never_collide_and_listen_on_one_address(keys: Path) -> None:
    async def scenario() -> None:
        servers = [serve(keys) for _ in range(20)]
        assert len({server.address for server in servers}) == 20
        port = int(servers[0].address.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), PATIENCE_S)
        for server in servers:
            server.close()

    run(scenario())


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("0.0.0.0", "means every interface"),
        ("::", "means every interface"),
        ("no-such-host.invalid", "does not resolve"),
        ("192.0.2.1", "give an address of this machine"),
    ],
)
def test_an_address_that_is_not_ones_own_is_refused(keys: Path, host: str, problem: str) -> None:
    async def scenario() -> None:
        with pytest.raises(UserError, match=problem):
            serve(keys, host)

    run(scenario())


def test_ipv6_works_where_the_machine_has_it(keys: Path) -> None:
    async def scenario() -> None:
        server = serve(keys, "::1")
        client = connect(server, load_worker_keys(keys, worker=0))
        client.send(Ready(device="CPU"))
        assert await recv(server) == (0, Ready(device="CPU"))
        client.close()
        server.close()

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback")
    run(scenario())
