"""The goldens: what `realhf plan`, `search`, `osdp` and `run` answer, recorded so that no change is unseen.

`tests/golden/planning/CASE.json` holds the outcome of a case of `cases.py`, and `tests/golden/digests/RUN.json` the
digest of a float64 run of `runs.py`.

    python -m tests.golden.record                     shows what of the planning goldens changed
    python -m tests.golden.record ppo_stale osdp      of these cases or runs alone
    python -m tests.golden.record --runs              what of the runs changed
    python -m tests.golden.record --most 200          with more lines for each
    python -m tests.golden.record --write             and writes the files that changed

It ends with 1 where something changed and is not written. Prose, clocks and paths are not recorded (`contents.py`,
`commands.py`). Where a key is renamed and nothing else changed, name it in `contents.RENAMED_KEYS`, or write the files
anew.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import commands, runs
from tests.golden.cases import CASES
from tests.golden.contents import Difference, differences, lines_of, renamed

HERE = Path(__file__).parent
PLANNING, DIGESTS = HERE / "planning", HERE / "digests"


def changed_plans(name: str, folder: Path) -> tuple[Any, list[Difference]]:
    """The outcome of a planning case as the code of today gives it, and where it is not as recorded."""
    case = CASES[name]
    prepared = commands.prepared(folder / name, profiled=case.profiled)
    now = commands.carried_out(case.commands, prepared)
    return now, differences(_recorded(PLANNING, name), now)


def changed_run(name: str, folder: Path) -> tuple[Any, list[Difference]]:
    """The same of a run in float64, where rounding is no difference."""
    now = runs.carried_out(name, folder)
    return now, differences(_recorded(DIGESTS, name), now, runs.RELATIVE, runs.ABSOLUTE)


def _recorded(folder: Path, name: str) -> Any:
    path = folder / f"{name}.json"
    return renamed(json.loads(path.read_bytes())) if path.exists() else {}


def shown(name: str, found: list[Difference], most: int) -> None:
    """Prints what changed, `most` lines of it."""
    print(f"{name}: {f'{len(found)} changed' if found else 'unchanged'}", flush=True)
    for difference in found[:most]:
        text = str(difference)
        print(f"  {text[:300]}{' ...' if len(text) > 300 else ''}", flush=True)
    if len(found) > most:
        print(f"  and {len(found) - most} more", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of cases or runs (default: all of the kind)")
    parser.add_argument("--runs", action="store_true", help="the runs in float64")
    parser.add_argument("--most", type=int, default=20, metavar="N", help="lines to show of each (default 20)")
    parser.add_argument("--write", action="store_true", help="write the files that changed")
    arguments = parser.parse_args()
    if arguments.runs:
        target, known, make = DIGESTS, list(runs.RUNS), changed_run
    else:
        target, known, make = PLANNING, list(CASES), changed_plans
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(known)}")
    any_left = False
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or known:
            now, found = make(name, Path(folder).resolve())
            shown(name, found, arguments.most)
            any_left |= bool(found) and not arguments.write
            if found and arguments.write:
                target.mkdir(exist_ok=True)
                (target / f"{name}.json").write_text(lines_of(now) + "\n")
    return int(any_left)


if __name__ == "__main__":
    sys.exit(main())
