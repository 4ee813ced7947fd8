"""What the in-process launcher runs in the places of master and worker: a module that behaves as a test asks."""

import logging
from collections.abc import Generator
from pathlib import Path

from realhf.rundir.logs import logging_to
from realhf.rundir.paths import RunDirectory

logger = logging.getLogger("stand_in")


def in_process(path: str, name: str, behaviour: str) -> Generator[None, None, int]:
    directory = RunDirectory(Path(path))
    with logging_to(directory.log(name), name):
        yield
        match behaviour:
            case "ends":
                logger.info("%s of %s", name, path)
                return 0
            case "fails":
                logger.info("no such file: prompts.jsonl")
                return 3
            case _:
                (directory.path / f"up-{name}").write_text("up\n")
                try:
                    while True:
                        yield
                finally:
                    (directory.path / f"asked-{name}").write_text("asked\n")
