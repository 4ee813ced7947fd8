"""Entry of the master process: `python -m realhf.master RUN_DIR [HOST]`; it listens on HOST, else as the run says."""

import asyncio
import contextlib
import contextvars
import logging
import signal
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.base.files import writing_a_run
from realhf.machine.network import own_address
from realhf.master.live import ProgramQueue
from realhf.master.master import Master
from realhf.rundir.logs import logging_to, start_logging
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.run import Run, load_run
from realhf.rundir.starts import check_start, current_start, own_start
from realhf.transport.codec import Codec
from realhf.transport.keys import load_master_keys
from realhf.transport.messages import ToMaster, ToWorker
from realhf.transport.rendezvous import MasterAddress, publish_master, withdraw_master
from realhf.transport.server import Server

logger = logging.getLogger("realhf.master")

# A shared file system may take a while to notice that the node of an earlier master is gone.
_LOCK_WAIT_S = 120.0
_ONCE_MORE_S = 0.1  # between tries to cancel
TERMINATED = 128 + signal.SIGTERM


Begun = Callable[[asyncio.Task[None]], None]


async def serve(
    directory: RunDirectory, run: Run, host: str, begun: Begun, program: ProgramQueue | None = None
) -> None:
    """Runs the experiment, or what a live `program` asks for, listening on `host`. `begun` gets the task; cancelling it
    ends the run."""
    start_id = own_start() if program is None else current_start(directory)
    keys = load_master_keys(directory.keys, num_workers=run.spec.num_workers)
    check_start(directory, start_id)  # so that these are not the keys of another
    server: Server[ToMaster, ToWorker] = Server(
        host, keys, incoming=Codec[ToMaster](ToMaster), outgoing=Codec[ToWorker](ToWorker)
    )
    address = MasterAddress(address=server.address, public_key=keys.own.public.decode())
    try:
        publish_master(directory.rendezvous, address)
        master = Master(run, directory, server, start_id, program)
        task = asyncio.ensure_future(master.run())
        begun(task)
        try:
            await task
        except asyncio.CancelledError:
            master.interrupted()
            raise
    finally:
        withdraw_master(directory.rendezvous, address)
        server.close()


def carry_out(directory: RunDirectory, run: Run, host: str, begun: Begun) -> int:
    """Runs the experiment to its end; returns the exit code. `begun`: see `serve`."""
    try:
        with writing_a_run(), directory.lock(MASTER, wait_s=_LOCK_WAIT_S):
            asyncio.run(serve(directory, run, host, begun))
    except (RunError, UserError) as error:
        logger.error("%s", error)
        return 1
    except asyncio.CancelledError:
        logger.error("terminated")
        return TERMINATED
    return 0


def in_process(path: str, host: str) -> Generator[None, None, int]:
    """The master on a thread of its own, without deadlines, beside a worker in this process; returns the exit code."""
    directory = RunDirectory.open(Path(path))
    run = load_run(directory).without_deadlines()
    codes: list[int] = []
    cancels: list[Callable[[], object]] = []

    def begun(task: asyncio.Task[None]) -> None:
        cancels.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))

    with logging_to(directory.log(MASTER), MASTER):
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=lambda: codes.append(context.run(carry_out, directory, run, host, begun)), name=MASTER, daemon=True
        )
        thread.start()
        try:
            while thread.is_alive():
                yield
        finally:
            while thread.is_alive():  # it may have begun only now
                for cancel in cancels:
                    with contextlib.suppress(RuntimeError):  # it has ended
                        cancel()
                thread.join(_ONCE_MORE_S)
    return codes.pop() if codes else 1


def main() -> int:
    directory = RunDirectory.open(Path(sys.argv[1]))
    start_logging(MASTER)
    try:
        run = load_run(directory)
        host = sys.argv[2] if len(sys.argv) > 2 else run.spec.master_address or own_address(run.spec.network_interface)
    except UserError as error:
        logger.error("%s", error)
        return 1
    return carry_out(directory, run, host, _ends_at_signals)


def _ends_at_signals(task: asyncio.Task[None]) -> None:
    """SIGTERM ends the run, unless it is ignored, as in a SLURM job, where it may be a notice; there SIGUSR2 does."""
    is_ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    for number in (signal.SIGUSR2, *([] if is_ignored else [signal.SIGTERM])):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


if __name__ == "__main__":
    sys.exit(main())
