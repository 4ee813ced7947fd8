"""Writes measured figures into the pages, and says which results are older than the code that they measure.

    python -m benchmarks.lib.pages                # the blocks of README.md and docs/, from benchmarks/results
    python -m benchmarks.lib.pages --drop-stale   # the same, after removing results that are older than their code

A block of a page begins with `<!-- figures of NAME | rows: REGEX | beside: WORDS | target: WORDS -->` and ends with
`<!-- end figures -->`. It shows the cases of `results/NAME.json` that the expression finds (all without one), and every
case that misses its target, whatever the expression. `beside` and `target` head the columns of the baseline and of the
target. Without a results file the block says so.

A benchmark lists what it measures in a constant, `MEASURES`: files and folders, as git takes them (`:!` leaves out);
`*RUNS` stands for what every planned run executes.
Results are older than their code if one of these, or the benchmark itself, differs from the results' commit by more
than comments, docstrings and blank lines.

`<!-- measured at COMMIT: PATHS -->` above a printed output on a page says the same of that output.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = ("README.md", "docs")
# What every planned run of reinforcement learning executes here.
RUNS = (
    "realhf/algorithms/functional",
    "realhf/algorithms/ppo",
    "realhf/cpu",
    "realhf/dataflow",
    "realhf/engine",
    ":!realhf/engine/megatron_*.py",
    ":!realhf/engine/transformers_backend.py",
    "realhf/geometry",
    "realhf/master",
    "realhf/models",
    "realhf/parallel",
    "realhf/planning",
    ":!realhf/planning/explain",
    ":!realhf/planning/mapping.py",
    ":!realhf/planning/model/osdp/request.py",
    ":!realhf/planning/what_if.py",
    "realhf/profiling",
    "realhf/realloc",
    "realhf/transport",
    "realhf/worker",
    "csrc",
)

BLOCK = re.compile(r"(<!-- figures of (\w+)(.*?) -->\n)(.*?)(<!-- end figures -->)", re.DOTALL)
OUTPUT = re.compile(r"<!-- measured at (\w+): (.*?) -->")
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a marker of a page asks for."""

    benchmark: str
    rows: str = ""
    beside: str = "beside"
    target: str = "target"

    def shows(self, row: Mapping[str, Any]) -> bool:
        return re.search(self.rows, row["case"]) is not None


def block_of(benchmark: str, words: str) -> Block:
    """Raises ValueError for a field that a block does not have."""
    fields = {}
    for part in filter(None, map(str.strip, words.split(" | "))):
        name, found, value = part.lstrip("| ").partition(": ")
        if not found or name not in ("rows", "beside", "target"):
            raise ValueError(f"figures of {benchmark}: {part!r} is none of 'rows: ', 'beside: ' and 'target: '")
        fields[name] = value
    return Block(benchmark=benchmark, **fields)


def rendered(text: str, results: Path = RESULTS) -> str:
    """A page with all its blocks as the results say them."""
    blocks = [block_of(benchmark, words) for _, benchmark, words, _, _ in BLOCK.findall(text)]
    numbers = iter(range(len(blocks)))

    def made(match: re.Match[str]) -> str:
        number = next(numbers)
        block = blocks[number]
        others = [other for other in blocks if other.benchmark == block.benchmark]
        return f"{match[1]}{table(block, others, results)}{match[5]}"

    return BLOCK.sub(made, text)


def table(block: Block, blocks: Sequence[Block], results: Path) -> str:
    """The lines between the markers of a block; `blocks` are all of its benchmark on the page."""
    file = results / f"{block.benchmark}.json"
    if not file.is_file():
        command = f"python benchmarks/{block.benchmark}.py --json FILE"
        return f"Not measured since the code changed. `{command}` measures it.\n"
    result = json.loads(file.read_text())
    rows = [row for row in result["results"] if block.shows(row)]
    origin = []
    if block is blocks[-1]:  # what misses its target and no block shows; and where all of it is from
        rows += [row for row in result["results"] if not row["holds"] and not any(b.shows(row) for b in blocks)]
        origin = ["", f"Measured at {result['commit']}: `{result['command']}`."]
    head = f"| case | measured | {block.beside} | ratio | {block.target} |"
    return "\n".join([head, "|---|---|---|---|---|", *map(line, rows), *origin]) + "\n"


def line(row: Mapping[str, Any]) -> str:
    """A case: value and unit, the value beside it, their ratio, its target and whether it misses that."""
    ratio = f"{row['ratio']:.2f}" if row["ratio"] and row["value"] and row["baseline"] else "-"
    target = number(row["target"]) if row["target"] else ""
    if not row["holds"]:
        target = f"**missed**: {target}".removesuffix(": ")
    value = f"{number(row['value'])} {row['unit']}".strip()
    return f"| {row['case']} | {value} | {number(row['baseline'])} | {ratio} | {target} |"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def pages(root: Path = ROOT) -> Iterator[Path]:
    for name in PAGES:
        path = root / name
        yield from [path] if path.is_file() else sorted(path.glob("**/*.md"))


def measures(benchmark: str, root: Path = ROOT) -> tuple[str, ...]:
    """What a benchmark says that it measures, and the benchmark itself."""
    script = f"benchmarks/{benchmark}.py"
    for node in ast.parse((root / script).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MEASURES":
            assert isinstance(node.value, ast.Tuple)
            listed = [RUNS if ast.unparse(each) == "*RUNS" else (ast.literal_eval(each),) for each in node.value.elts]
            return (*chain.from_iterable(listed), script)
    raise ValueError(f"{script} has no constant MEASURES, which lists the files that it measures")


def changed_since(commit: str, paths: Sequence[str], root: Path = ROOT) -> list[str]:
    """The files among `paths` whose code is not that of `commit`."""
    names = _git(root, "diff", "--name-only", "--no-renames", commit, "--", *paths).splitlines()
    return [name for name in names if not _is_same(name, commit, root)]


def _is_same(name: str, commit: str, root: Path) -> bool:
    path = root / name
    try:
        before = _git(root, "show", f"{commit}:{name}")
    except subprocess.CalledProcessError:  # it is new
        return False
    return path.is_file() and same_code(name, before, path.read_text())


def same_code(name: str, before: str, after: str) -> bool:
    """Whether two texts of a file differ in nothing that is executed."""
    return bool(_code(name, before) == _code(name, after))


def code_digest(paths: Sequence[str], root: Path = ROOT) -> str:
    """Equal for equal code of the tracked files among `paths`, in the sense of `same_code`."""
    names = _git(root, "ls-files", "--", *paths).splitlines()
    code = [(name, _code(name, (root / name).read_text())) for name in names if (root / name).is_file()]
    return hashlib.blake2b(repr(code).encode(), digest_size=16).hexdigest()


def _code(name: str, text: str) -> Any:
    """What of a file's text is executed."""
    match Path(name).suffix:
        case ".py" | ".pyi":
            return _python(text)
        case ".cpp" | ".h":
            return _cpp(text)
        case ".yaml":
            return msgspec.yaml.decode(text)
        case ".json":
            return json.loads(text)
    return text


def _python(text: str) -> str:
    """The syntax tree without docstrings and without the list of what a benchmark measures."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
            if isinstance(node, ast.Module):
                node.body = [each for each in node.body if not ast.unparse(each).startswith("MEASURES =")]
    return ast.dump(tree)


def _cpp(text: str) -> list[str]:
    return _COMMENT.sub(lambda match: match[1] or " ", text).split()


def stale(root: Path = ROOT) -> dict[str, list[str]]:
    """By name of a results file that is older than its code: the files that changed since."""
    found = {}
    for file in sorted((root / "benchmarks/results").glob("*.json")):
        result = json.loads(file.read_text())
        if changed := changed_since(result["commit"], measures(result["benchmark"], root), root):
            found[file.stem] = changed
    return found


def stale_outputs(root: Path = ROOT) -> dict[str, list[str]]:
    """By page and commit: the files that changed since an output on the page was printed."""
    found = {}
    for page in pages(root):
        for commit, paths in OUTPUT.findall(page.read_text()):
            if changed := changed_since(commit, paths.split(), root):
                found[f"{page.relative_to(root)}, {commit}"] = changed
    return found


def some(files: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(files[:3]) + more


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drop-stale", action="store_true", help="remove results that are older than their code")
    arguments = parser.parse_args()
    if arguments.drop_stale:
        for name, changed in stale().items():
            print(f"{name} is older than {some(changed)}", file=sys.stderr)
            (RESULTS / f"{name}.json").unlink()
        if not (RESULTS / "papers.json").is_file():  # its page has no blocks
            subprocess.run([sys.executable, "benchmarks/papers.py", "--page"], cwd=ROOT, check=True)
    for page in pages():
        text = page.read_text()
        if (made := rendered(text)) != text:
            page.write_text(made)
            print(f"{page.relative_to(ROOT)} is written anew", file=sys.stderr)


if __name__ == "__main__":
    main()
