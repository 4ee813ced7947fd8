"""Entry of the master process: `python -m realhf.master RUN_DIR [HOST]`; it listens on HOST, else on this host."""

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.base.files import writing_a_run
from realhf.master.master import Master
from realhf.rundir.logs import start_logging
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.run import load_run
from realhf.transport.codec import Codec
from realhf.transport.keys import load_master_keys
from realhf.transport.messages import ToMaster, ToWorker
from realhf.transport.rendezvous import MasterAddress, publish_master, withdraw_master
from realhf.transport.server import Server

logger = logging.getLogger("realhf.master")

# A shared file system may take a while to notice that the node of an earlier master is gone.
LOCK_WAIT_S = 120.0


async def serve(directory: RunDirectory, host: str) -> None:
    """Runs the experiment that the run directory describes, listening on `host`."""
    run = load_run(directory.experiment, directory.plan)
    keys = load_master_keys(directory.keys, num_workers=run.spec.num_workers)
    server: Server[ToMaster, ToWorker] = Server(
        host, keys, incoming=Codec[ToMaster](ToMaster), outgoing=Codec[ToWorker](ToWorker)
    )
    try:
        publish_master(directory.rendezvous, MasterAddress(address=server.address, public_key=keys.own.public.decode()))
        master = Master(run, directory, server)
        task = asyncio.ensure_future(master.run())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            master.interrupted()
            raise
    finally:
        withdraw_master(directory.rendezvous)
        server.close()


def main() -> int:
    directory = RunDirectory.open(Path(sys.argv[1]))
    start_logging(MASTER)
    host = sys.argv[2] if len(sys.argv) > 2 else socket.gethostname()
    try:
        with writing_a_run(), directory.lock("master", wait_s=LOCK_WAIT_S):
            asyncio.run(serve(directory, host))
    except (RunError, UserError) as error:
        logger.error("%s", error)
        return 1
    except asyncio.CancelledError:
        logger.error("terminated")
        return 143
    return 0


if __name__ == "__main__":
    sys.exit(main())
