"""Entry of a sandbox: a script, run with `python -I`, that becomes two confined processes.

The child runs the program; it has the pipes to the tests, and does not know the tests. The parent runs the tests, and
writes their results for `realhf.rewards.sandbox`. Neither imports more than it needs, since they start for each
program.
"""

import json
import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])
sys.path.insert(0, _ROOT)
from realhf.rewards import confined, program, tests_of_program, wire  # noqa: E402

sys.path.remove(_ROOT)

NO_NAMESPACE = 65
_FILE = "program.py"


def main(request_file: int, tests_file: int, outcomes_file: int) -> None:
    """Carries out the request (JSON).

    Args:
        request_file, tests_file, outcomes_file: open descriptors. The program's process closes the last two before it
            has read them.
    """
    with open(request_file, "rb") as file:
        request = json.load(file)
    confined.end_with(request["parent"])
    folder, code = request["folder"], request["program"].encode("utf-8", "surrogatepass")
    if request["own_files"]:
        try:
            confined.mount_own_files(folder, request["files_bytes"], request["entries"])
        except confined.NoNamespaceError:
            os._exit(NO_NAMESPACE)
        confined.end_with(request["parent"])  # a new namespace has undone it
    os.chdir(folder)
    Path(_FILE).write_bytes(code)
    to_program, to_tests = os.pipe(), os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        _close_all_but(to_program[0], to_tests[1])
        confined.end_with(parent)
        confined.confine(folder, request["readable"], request["limits"])
        try:
            program.serve_program(to_program[0], to_tests[1], str(Path(folder, _FILE)))
        finally:
            os._exit(0)
    os.close(to_program[0])
    os.close(to_tests[1])
    confined.confine(folder, request["readable"], request["limits"], has_child=True)
    with open(tests_file, "rb") as file:
        tests = json.load(file)
    try:
        found = tests_of_program.outcomes(tests, to_tests[0], to_program[1])
    except wire.WireError:
        os._exit(1)
    with open(outcomes_file, "wb") as file:
        file.write(json.dumps(found).encode())
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
