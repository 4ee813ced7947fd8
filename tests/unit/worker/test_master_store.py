"""The store at the master does what torch's own stores do, has deadlines, and ends with the master."""

import asyncio
import multiprocessing
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from realhf.launch.process import MASTERLESS_RETURNCODE
from realhf.master.key_value_store import MOST_BYTES, KeyValueStore
from realhf.rundir.flight_recorder import ActivityWriter, read_activity
from realhf.rundir.paths import RunDirectory
from realhf.transport.codec import Codec
from realhf.transport.keys import load_master_keys, make_run_keys
from realhf.transport.messages import Alive, Hello, OnStore, StoreReply, StoreRequest, ToMaster, ToWorker
from realhf.transport.rendezvous import MasterAddress, publish_master
from realhf.transport.server import Server
from realhf.worker import __main__ as worker_main
from realhf.worker.__main__ import _connected, blames_peer
from realhf.worker.master_store import MasterStore
from tests.waiting import PATIENCE_S, wait_until

PROCESSES, THREADS = 2, 3


def local(timeout_s: float) -> MasterStore:
    """A worker's store whose master is at hand; messages take their form on the wire."""
    kept, to_master, to_worker = KeyValueStore(1), Codec[OnStore](OnStore), Codec[StoreReply](StoreReply)

    def send(request: OnStore) -> None:
        for _, reply in kept.answers(0, to_master.decode(to_master.encode(request))):
            store.take(to_worker.decode(to_worker.encode(reply)))

    store = MasterStore(send)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


keys, values = st.sampled_from(["a", "b", "c"]), st.sampled_from(["", "1", "22"])
several = st.lists(keys, max_size=3)
operations = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("add"), keys, st.integers(-5, 5)),
    st.tuples(st.just("check"), several),
    st.tuples(st.just("wait"), several),
    st.tuples(st.just("wait"), several, st.just(timedelta(milliseconds=2))),
    st.tuples(st.just("multi_get"), several),
    st.tuples(st.just("multi_set"), several, st.lists(values, min_size=3, max_size=3)),
)


def result(store: dist.Store, name: str, *arguments: Any) -> Any:
    try:
        return getattr(store, name)(*arguments)
    except (dist.DistStoreError, ValueError) as error:  # torch: the sum with what is no number
        return "refused" if isinstance(error, dist.DistStoreError) or "stoll" in str(error) else error


@given(st.lists(operations, max_size=20), st.booleans())
def test_every_operation_gives_what_it_does_in_torchs_hash_store(
    asked: list[tuple[Any, ...]], through_torch: bool
) -> None:
    """Called from Python or, through a `PrefixStore`, from C++."""
    kept, torchs = local(0.001), dist.HashStore()
    torchs.set_timeout(timedelta(milliseconds=1))
    ours = dist.PrefixStore("p", kept).clone() if through_torch else kept
    theirs = dist.PrefixStore("p", torchs) if through_torch else torchs
    for name, *arguments in asked:
        if name == "multi_set":
            arguments[1] = arguments[1][: len(arguments[0])]
        assert result(ours, name, *arguments) == result(theirs, name, *arguments), (name, arguments)


def test_a_wait_has_a_deadline_and_a_late_answer_is_dropped() -> None:
    store = local(0.05)
    with pytest.raises(dist.DistStoreError, match=r"timed out after 0\.05 s in the run's store, .*'missing'") as error:
        store.get("missing")
    assert blames_peer(error.value)
    with pytest.raises(dist.DistStoreError, match=r"timed out after 0\.01 s"):
        store.wait(["missing"], timedelta(seconds=0.01))
    store.set("missing", "there")
    assert store.get("missing") == b"there"


def test_what_the_master_refuses_is_told() -> None:
    with pytest.raises(dist.DistStoreError, match="large: 1048583 bytes are over the store's limit of 1048576"):
        dist.PrefixStore("p", local(1)).set("large", "x" * MOST_BYTES)


def test_nothing_waits_in_a_store_that_has_ended() -> None:
    store, told = local(PATIENCE_S), queue.SimpleQueue[str]()

    def wait() -> None:
        with pytest.raises(dist.DistStoreError) as error:
            dist.PrefixStore("p", store).get("missing")
        told.put(str(error.value))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    threads[0].start()
    wait_until(lambda: bool(store._answers))
    store.end("this worker ends")
    threads[1].start()
    for thread in threads:
        thread.join()
    assert [told.get(), told.get()] == ["this worker ends"] * 2


def test_a_worker_that_ends_waits_for_no_thread_that_is_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of NCCL's monitor, which asks the store from a thread of its own, and for which the end of groups waits."""
    store = MasterStore(lambda _: None)  # the master has ended
    monitor = threading.Thread(target=lambda: result(dist.PrefixStore("p", store), "check", ["dump"]))
    client = SimpleNamespace(address="tcp://127.0.0.1:9", send=lambda _: None, close=lambda: None)
    ended: list[bool] = []

    def destroy() -> None:
        monitor.join(PATIENCE_S)
        ended.append(not monitor.is_alive())

    for name in ("check_device", "Channels", "_requests"):
        monkeypatch.setattr(worker_main, name, lambda *_: ())
    monkeypatch.setattr(worker_main, "_connected", lambda *_: (client, store))
    monkeypatch.setattr(worker_main, "own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        worker_main, "join_world", lambda *_: (monitor.start(), wait_until(lambda: bool(store._answers)))
    )
    monkeypatch.setattr(worker_main, "ModelWorker", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    run: Any = SimpleNamespace(spec=SimpleNamespace(hardware=None))
    activity = ActivityWriter(tmp_path / "activity")
    assert list(worker_main.carry_out(RunDirectory(tmp_path), run, 0, activity, lambda *_: None, 1.0)) == []
    assert ended == [True]


class Master:
    """Keeps the store of the workers of `directory`, until it is closed."""

    def __init__(self, directory: RunDirectory, num_workers: int):
        make_run_keys(directory.keys, num_workers=num_workers)
        self._directory, self._num_workers = directory, num_workers
        self._loop, self._end, self.waits = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    async def _serve(self) -> None:
        keys = load_master_keys(self._directory.keys, num_workers=self._num_workers)
        server: Server[ToMaster, ToWorker] = Server(
            "127.0.0.1", keys, incoming=Codec[ToMaster](ToMaster), outgoing=Codec[ToWorker](ToWorker)
        )
        address = MasterAddress(address=server.address, public_key=keys.own.public.decode())
        publish_master(self._directory.rendezvous, address)
        kept = KeyValueStore(self._num_workers)

        async def receive() -> None:
            while True:
                worker, message = await server.recv()
                if isinstance(message, Hello):
                    await server.send(worker, Alive())
                if isinstance(message, StoreRequest):
                    answers = kept.answers(worker, message)
                    for other, answer in answers:
                        await server.send(other, answer)
                    if not answers:
                        self.waits.set()

        receiver = asyncio.create_task(receive())
        await self._end.wait()
        receiver.cancel()
        server.close(flush_s=0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


@contextmanager
def connected(path: Path, worker: int, master_timeout_s: float = PATIENCE_S) -> Iterator[MasterStore]:
    directory = RunDirectory(path)
    run: Any = SimpleNamespace(spec=SimpleNamespace(setup_timeout_s=PATIENCE_S, master_timeout_s=master_timeout_s))
    activity, moves = ActivityWriter(directory.activity(f"worker-{worker}")), SimpleNamespace()
    client, store = _connected(directory, run, worker, activity, moves)  # type: ignore[arg-type]
    client.send(Hello(worker=worker, pid=0, host="h"))
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    yield store
    client.close()


def take_part(store: dist.Store, number: int) -> tuple[list[bytes], int, bytes, bool]:
    """One of all threads of all processes: what it finds does not hang on who is first, except its place."""
    store.set(f"own {number}", f"of {number}")
    everyone = [f"own {other}" for other in range(PROCESSES * THREADS)]
    store.wait(everyone)
    place = store.add("count", 1)
    store.set(f"done {number}", "")
    store.wait([f"done {other}" for other in range(PROCESSES * THREADS)])
    return [store.get(key) for key in everyone], place, store.get("count"), store.check(["nothing"])


def take_part_in_threads(path: Path, kind: str, process: int) -> list[Any]:
    def in_threads(store: dist.Store) -> list[Any]:
        through_torch = dist.PrefixStore("p", store)
        numbers = range(process * THREADS, (process + 1) * THREADS)
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(partial(take_part, through_torch), numbers))

    if kind == "file":
        return in_threads(dist.FileStore(str(path / "store"), PROCESSES))
    with connected(path, process) as store:
        return in_threads(store)


def spawned(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return pool.starmap_async(function, [(*arguments, process) for process in range(PROCESSES)]).get(PATIENCE_S)


@pytest.mark.distributed
def test_threads_of_several_processes_find_what_they_do_in_torchs_file_store(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    master = Master(directory, PROCESSES)
    try:
        found = {kind: spawned(take_part_in_threads, directory.path, kind) for kind in ("master", "file")}
    finally:
        master.close()
    for parts in ([part for parts in of_kind for part in parts] for of_kind in found.values()):
        assert {(*map(bytes.decode, part[0]), part[2], part[3]) for part in parts} == {
            (*(f"of {number}" for number in range(PROCESSES * THREADS)), b"6", False)
        }
        assert sorted(part[1] for part in parts) == [1, 2, 3, 4, 5, 6]


def wait_for_nothing(path: Path) -> None:
    with connected(path, 0, master_timeout_s=1.0) as store:
        store.get("nothing")


@pytest.mark.distributed
def test_a_worker_that_waits_when_the_master_dies_ends_and_names_it(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    master = Master(directory, 1)
    worker = multiprocessing.get_context("spawn").Process(target=partial(wait_for_nothing, directory.path))
    worker.start()
    assert master.waits.wait(PATIENCE_S)
    master.close()
    worker.join(PATIENCE_S)
    assert worker.exitcode == MASTERLESS_RETURNCODE
    found = read_activity(directory.activity("worker-0"))
    assert found is not None
    assert "nothing was heard of the master at tcp://127.0.0.1:" in found.text
