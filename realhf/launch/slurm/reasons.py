"""Why a job cannot run on its nodes, as its batch script leaves it in the job's comment (`stop` in `script.py`)."""

import base64
import binascii

from realhf.launch.process import Job

_ON_ALL = "all nodes of the job must see it at the same path"


def cannot_run(comment: str, job: Job) -> str:
    """For the user; "" where the comment tells no reason."""
    kind, _, code = comment.partition(":")
    try:
        what = base64.b64decode(code).decode(errors="replace").strip()
    except binascii.Error:
        return ""
    match kind:
        case "realhf-directory":
            return (
                f"the run directory {job.directory.path} is not there on {what}; {_ON_ALL}: give --run-dir on a file "
                "system that they share"
            )
        case "realhf-interpreter":
            return (
                f"the program {job.workers[0].argv[0]} is not there on {what}; {_ON_ALL}: install realhf on a file "
                "system that they share, and run it from there"
            )
        case "realhf-setup":
            return f"--setup-line {what!r} failed on its first node; try it on a node (srun --pty bash)"
        case _:
            return ""
