"""Runs a command of `realhf` until it enters one function, and prints as JSON what was entered before.

    python benchmarks/lib/entered.py FOLDER END WORDS...

FOLDER is the folder of the package `realhf` that runs, END a function such as `launch/local.py:LocalLauncher.start`,
WORDS the command line. By such a name the object has how often each function was entered, and the names of its
arguments' types. Comprehensions and what dataclasses generate do not count: a reader does not go there.
"""

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType


class Reached(BaseException):
    """No handler of the package catches it."""


def main() -> None:
    package, end, *words = sys.argv[1:]
    sys.path.insert(0, str(Path(package).parent))
    from realhf.cli import main as command

    entered: Counter[str] = Counter()
    types: dict[str, set[str]] = {}
    prefix = f"{Path(package).resolve()}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & 2 and not code.co_name.startswith("<")  # 2: not the body of a module or a class
        if event != "call" or not is_function or not code.co_filename.startswith(prefix):
            return
        name = f"{code.co_filename.removeprefix(prefix)}:{code.co_qualname}"
        if name == end:
            raise Reached
        entered[name] += 1
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        types.setdefault(name, set()).update(type(frame.f_locals.get(one)).__name__ for one in arguments)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        code: object = command(words)
    except Reached:
        sys.setprofile(None)
        print(json.dumps({name: (times, sorted(types[name])) for name, times in entered.items()}))
    else:
        sys.exit(f"the command has ended with {code}, and {end} was not entered")


if __name__ == "__main__":
    main()
