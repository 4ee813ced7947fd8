"""Where a process is in its code: written by a thread of its own while the others are stuck."""

import faulthandler
from pathlib import Path

from realhf.base.files import open_regular


def write_stacks(path: Path, activity: str) -> None:
    """Writes the activity of the process and the Python stack of each thread; the file appears when it is whole."""
    part = path.with_name(f".{path.name}.part")
    with open_regular(part, "w") as file:
        file.write(f"{activity}\n\n")
        file.flush()  # faulthandler writes to the descriptor
        faulthandler.dump_traceback(file, all_threads=True)
    part.replace(path)
