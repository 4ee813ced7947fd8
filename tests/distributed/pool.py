"""Runs a function on every rank of a gloo world of new processes, and gives back what each rank returned."""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

# Imported once, in a process that the ranks are forked from: importing torch takes longer than most tests compute.
PRELOADED = [
    "pytest",
    "hypothesis",
    "numpy.testing",
    "realhf.engine.model",
    "realhf.parallel.groups",
    "realhf.realloc.execute.executor",
    "realhf.master.__main__",
    "realhf.worker.__main__",
]


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = PATIENCE_S, killed: int | None = None
) -> list[Any]:
    """Calls `function(rank, *args)` in `world_size` processes that share a gloo default group.

    `function` is a top-level function of an importable module (the processes are new); `args` and what it
    returns are plain values: numbers, strings, lists, dataclasses, numpy arrays, no tensors. Rank `killed` is expected
    to kill itself; its entry is None.

    Returns:
        What the function returned, one entry a rank.

    Raises:
        RuntimeError: a rank raised (its traceback is the message) or died.
        TimeoutError: some rank was not done after `timeout_s`. No process is left behind in any of these cases.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="realhf-test-") as directory:
        store = str(Path(directory) / "store")
        readers: dict[Any, int] = {}
        processes = []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(function, rank, world_size, store, timeout_s, writer, dict(os.environ), args),
                    daemon=True,
                )
                process.start()
                writer.close()  # so that the death of the child is an EOFError here
                readers[reader] = rank
                processes.append(process)
            while readers:
                ready = wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(readers.values())} were not done after {timeout_s:g} s")
                for reader in ready:
                    rank = readers.pop(reader)
                    results[rank] = None if rank == killed else _receive(rank, reader, processes[rank])
        finally:
            for process in processes:
                if len(results) < world_size or killed is not None:
                    process.kill()
                process.join(timeout=10)
                process.kill()  # its result is here, or not wanted
                process.join()
    return [results[rank] for rank in range(world_size)]


def _receive(rank: int, reader: Any, process: Any) -> Any:
    try:
        is_ok, value = reader.recv()
    except EOFError:
        process.join(timeout=PATIENCE_S)  # it has closed its end, so it is ending
        raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from None
    if not is_ok:
        raise RuntimeError(f"rank {rank} raised:\n{value}")
    return value


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    writer: Connection,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()  # that of the process it was forked from is older
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    import torch  # not by who only starts ranks

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(rank, *args)
        writer.send((True, value))
        with contextlib.suppress(RuntimeError):  # no rank leaves while another still talks to it
            torch.distributed.barrier()
    except BaseException:
        writer.send((False, traceback.format_exc()))
    finally:
        writer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
