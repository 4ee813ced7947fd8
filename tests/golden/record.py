"""The goldens: what `realhf plan`, `search`, `plan --osdp` and `run` answer, recorded so that no change is unseen.

`tests/golden/planning/CASE.json` holds the outcome of a case of `cases.py`, `tests/golden/digests/RUN.json` the digest
of a run of `runs.py`. The tests compare with these.

    python -m tests.golden.record                     shows what of the planning goldens changed
    python -m tests.golden.record ppo_stale osdp      of these alone
    python -m tests.golden.record --most 200          with more lines for each
    python -m tests.golden.record --write             and writes the files

Prose, clocks and paths are not recorded (`contents.py`, `commands.py`). Where a key is renamed and nothing else
changed, name it in `contents.RENAMED_KEYS`, or write the files anew.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.cases import CASES, Case
from tests.golden.commands import carried_out, prepared
from tests.golden.contents import Difference, differences, lines_of, renamed

PLANNING = Path(__file__).parent / "planning"


def planned(name: str, folder: Path) -> dict[str, Any]:
    """The outcome of a planning case as the code of today gives it."""
    case: Case = CASES[name]
    return carried_out(case.commands, prepared(folder / name, profiled=case.profiled), case.edits)


def changes(golden: Path, now: Any, relative: float | None = None) -> list[Difference]:
    """Where `now` differs from what a file holds; all of it where there is no file."""
    recorded = renamed(json.loads(golden.read_bytes())) if golden.exists() else {}
    return differences(recorded, now) if relative is None else differences(recorded, now, relative)


def show(name: str, found: list[Difference], most: int) -> None:
    print(f"{name}: {f'{len(found)} changed' if found else 'unchanged'}", flush=True)
    for difference in found[:most]:
        text = str(difference)
        print(f"  {text[:300]}{' ...' if len(text) > 300 else ''}", flush=True)
    if len(found) > most:
        print(f"  and {len(found) - most} more", flush=True)


def write(golden: Path, now: Any) -> None:
    golden.parent.mkdir(exist_ok=True)
    golden.write_text(lines_of(now) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of planning cases (default: all)")
    parser.add_argument("--most", type=int, default=20, metavar="N", help="lines to show of each (default 20)")
    parser.add_argument("--write", action="store_true", help="write the files")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    changed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or CASES:
            now = planned(name, Path(folder).resolve())
            golden = PLANNING / f"{name}.json"
            found = changes(golden, now)
            show(name, found, arguments.most)
            changed += bool(found)
            if arguments.write and found:
                write(golden, now)
    return 1 if changed and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
