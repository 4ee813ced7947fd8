"""Whether tests fail when they should: one-line mutations of what computes or decides, drawn by a seed.

A mutant is one changed line (a comparison, a sign, a constant, a condition, a dropped statement; lib/mutants.py) in a
copy of the checkout. The default tests that execute the line run in the copy until one fails, quick ones first, for
`--budget` seconds of measured time at most; a hang is a failure. A mutant that no test fails for survives, and so does
one that no test executes. Survivors are printed with their lines. `mutations_equal.txt` lists those that break no
promise, each with its reason; they count apart.

The tests of a line are looked up in a map that is measured once, in instrumented copies (`--map FOLDER` keeps it; only
what has changed is measured again). The common tools do not fit: mutmut sees what runs in one process, while half of
this code runs in spawned and forked ones; cosmic-ray starts all tests anew for each mutant.

Command: python benchmarks/mutations.py --seed 1
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
from lib.common import ROOT, argument_parser, case, finish
from lib.equal_mutants import read_equal
from lib.mutants import Mutant, draw
from lib.mutation_copies import instrumented, make_copy, tree
from lib.mutation_map import TestMap, Worker, for_each, hits_of, measure, read_map, stale

MODULES = (
    "algorithms", "planning", "dataflow", "master", "rewards", "data", "engine/train", "engine/generate", "geometry",
    "realloc/plan", "launch",
)  # fmt: skip
EQUAL = ROOT / "benchmarks/mutations_equal.txt"
MOST_SURVIVORS = 0.05
_NEAREST = 3  # files of tests that run first
_OLD = 1_000_000_000  # a time before any file's: bytecode of a mutant is never taken for that of another


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--count", type=int, default=300, help="mutants; 0 makes the map alone")
    parser.add_argument("--modules", nargs="+", default=MODULES, metavar="PATH", help="folders of realhf/, or files")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="where tests are taken from")
    parser.add_argument("--budget", type=float, default=120.0, metavar="S", help="of tests' time for each mutant")
    parser.add_argument("--processes", type=int, default=2, help="mutants at a time")
    words = "keeps copies and the map of tests here"
    folder = Path(platformdirs.user_cache_dir("realhf")) / "mutations"
    parser.add_argument("--map", type=Path, default=folder, metavar="FOLDER", help=words)
    parser.add_argument("--keep-map", action="store_true", help="take the map as it is, however old")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.modules, arguments.tests, arguments.count = ["geometry"], ["tests/unit/geometry"], 6
    os.environ["OMP_NUM_THREADS"] = "1"
    files = tree()
    tests = _map(arguments, files)
    sources = {path: files[path] for path in files if path.endswith(".py") and _is_in(path, arguments.modules)}
    if not sources:
        sys.exit(f"--modules {' '.join(arguments.modules)}: no such folder or file in realhf/")
    equal = read_equal(EQUAL)
    for entry in equal:
        if entry.path not in files or not entry.matches(files[entry.path].decode()):
            _say(f"{EQUAL.name}:{entry.line}: no line of {entry.path} is `{entry.before}`: take the entry out")
    drawn = draw(sources, arguments.seed, arguments.count)
    listed = {key for entry in equal for key in entry.keys}
    survivors = _survivors([one for one in drawn if one.key not in listed], tests, files, arguments)
    finish("mutations", _rows(drawn, listed, survivors), arguments.json)


def _is_in(path: str, modules: Sequence[str]) -> bool:
    return any(path == f"realhf/{part}" or path.startswith(f"realhf/{part.rstrip('/')}/") for part in modules)


def _map(arguments: Any, files: Mapping[str, bytes]) -> TestMap:
    folder = arguments.map.resolve()
    old = [] if arguments.keep_map else stale(folder, files, arguments.tests)
    if old:
        _say(f"map: {len(old)} files of tests to measure")
        copies = [folder / f"instrumented-{index}" for index in range(arguments.processes)]
        for copy in copies:
            make_copy(copy, instrumented(dict(files), hits_of(copy)))
        measure(folder, files, old, copies, _say)
    return read_map(folder, files, arguments.tests)


def _survivors(
    mutants: Sequence[Mutant], tests: TestMap, files: Mapping[str, bytes], arguments: Any
) -> dict[Mutant, int]:
    """The mutants that no test failed for, with the number of tests that ran."""
    if not mutants:  # a map alone leaves the copies as they are: another draw may use them
        return {}
    folder, began = arguments.map.resolve(), time.monotonic()
    copies = [folder / f"copy-{index}" for index in range(arguments.processes)]
    for copy in copies:
        make_copy(copy, dict(files))
    survivors, done = {}, []

    def run(worker: Worker, mutant: Mutant) -> None:
        chosen, number = tests.of(mutant, arguments.budget)
        killed_by = _killed_by(worker, mutant, chosen, files[mutant.path], len(done)) if chosen else None
        done.append(mutant)
        about = f"[{len(done)}/{len(mutants)}, {time.monotonic() - began:.0f} s] {mutant.path}:{mutant.line}"
        if killed_by:
            _say(f"{about} ({mutant.kind}): killed by {killed_by}")
            return
        survivors[mutant] = len(chosen)
        where = ", ".join(f"{file} ({n})" for file, n in Counter(test.file for test in chosen).most_common())
        _say(f"{about} ({mutant.kind}): SURVIVES {len(chosen)} of {number} tests: {where or 'none executes it'}")
        print(
            f"{mutant.path}:{mutant.line}\n- {mutant.before}\n+ {mutant.after}\n  ran: {where or 'none'}\n", flush=True
        )

    for_each(mutants, copies, run)
    return survivors


def _killed_by(worker: Worker, mutant: Mutant, chosen: Sequence[Any], source: bytes, number: int) -> str | None:
    file = worker.copy / mutant.path
    before = file.stat()
    try:
        file.write_bytes(mutant.apply(source))
        os.utime(file, (_OLD + number, _OLD + number))
        paths = list(dict.fromkeys(test.file for test in chosen))
        for part in (paths[:_NEAREST], paths[_NEAREST:]):  # most need but few files, and all take time to import
            limits = {test.name: test.limit_s for test in chosen if test.file in part}
            if part and (killed_by := worker.run(files=part, tests=limits, hits=None, first=True)["killed_by"]):
                return str(killed_by)
        return None
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _rows(drawn: Sequence[Mutant], listed: set[tuple[str, str, str]], survivors: Mapping[Mutant, int]) -> list[dict]:
    """In per cent of what was drawn, for each folder and in all; beside it: how many of it are listed as equal."""
    groups: dict[str, list[Mutant]] = {"in all": list(drawn)} if drawn else {}
    for mutant in sorted(drawn, key=lambda mutant: mutant.path):
        group = next((name for name in MODULES if mutant.path.startswith(f"realhf/{name}/")), mutant.path)
        groups.setdefault(group, []).append(mutant)
    rows = []
    for group, mutants in groups.items():
        share = sum(mutant in survivors for mutant in mutants) / len(mutants)
        equal = sum(mutant.key in listed for mutant in mutants) / len(mutants)
        name = f"{group}: survivors of {len(mutants)} mutants, not listed (beside it: listed as equal)"
        rows.append(
            case(
                name,
                100 * share,
                "%",
                baseline=100 * equal,
                ratio=MOST_SURVIVORS / max(share, 1 / (2 * len(mutants))),
                target=1.0,
                holds=share <= MOST_SURVIVORS,
            )
        )
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
