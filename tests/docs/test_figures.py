"""Figures that are kept name the code, the command and the machine they are from, and pages say what the files say."""

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.lib import pages
from tests.docs.blocks import ROOT

RESULTS = ROOT / "benchmarks/results"
FILES = sorted(RESULTS.glob("*.json"))


class Case(msgspec.Struct, kw_only=True):
    """One measured case; see `case` in `benchmarks/lib/common.py`."""

    case: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    target: float
    holds: bool


class Result(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A results file."""

    benchmark: str
    commit: str
    dirty: bool
    command: str
    hardware: str
    results: list[Case]


def read(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def whole_clone() -> None:
    """The commits of figures can be looked up here."""
    if git("rev-parse", "--git-dir").returncode:
        pytest.skip("not a git checkout: no commit can be looked up")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        pytest.fail("this clone is shallow and lacks the commits of older figures: run `git fetch --unshallow` first")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_results_file_says_what_its_figures_are_of(path: Path, whole_clone: None) -> None:
    result = read(path)
    assert path.stem == result.benchmark
    assert (ROOT / f"benchmarks/{result.benchmark}.py").is_file()
    assert result.command.startswith(f"python benchmarks/{result.benchmark}.py")
    assert result.hardware
    assert result.results
    assert not result.dirty, "measure it from a clean checkout"
    assert is_ancestor(result.commit), f"{result.commit} is not in the history of HEAD: measure at a landed commit"


def test_figures_are_newer_than_the_code_that_they_measure(whole_clone: None) -> None:
    """Anything else is to be measured anew or taken out, of the pages as well."""
    remedy = "measure again, or take it out: python -m benchmarks.lib.pages --drop-stale"
    assert not {name: pages.some(changed) for name, changed in pages.stale().items()}, remedy


def test_printed_outputs_are_newer_than_the_code_that_printed_them(whole_clone: None) -> None:
    assert not {name: pages.some(changed) for name, changed in pages.stale_outputs().items()}, "print it anew"


def test_commits_that_are_not_in_the_history_are_seen(whole_clone: None) -> None:
    assert is_ancestor("HEAD")
    assert not is_ancestor("29a7d33")


def test_what_benchmarks_write_is_what_is_read_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    common = importlib.import_module("lib.common")
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["/anywhere/benchmarks/osdp.py", "--json", str(file)])
    row = common.case("a", 2.0, "s", baseline=4.0, ratio=2.0, target=1.0, holds=True)
    common.finish("osdp", [row], file)
    assert read(file).command == f"python benchmarks/osdp.py --json {file}"
    assert read(file).results == [Case(**row)]


def test_a_changed_file_makes_a_checkout_dirty_and_a_result_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    common = importlib.import_module("lib.common")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "code.py").touch()
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/osdp.json").touch()
    assert not common.is_dirty.__wrapped__()
    (tmp_path / "code.py").write_text("1")
    assert common.is_dirty.__wrapped__()


def is_ancestor(commit: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


@pytest.mark.parametrize("page", list(pages.pages()), ids=lambda page: page.name)
def test_pages_say_what_the_files_say(page: Path) -> None:
    text = page.read_text()
    assert pages.rendered(text) == text, "write it anew: python -m benchmarks.lib.pages"


def test_the_command_leaves_pages_that_are_up_to_date_as_they_are() -> None:
    before = {page: page.stat().st_mtime_ns for page in pages.pages()}
    command = [sys.executable, "-m", "benchmarks.lib.pages"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert {page: page.stat().st_mtime_ns for page in pages.pages()} == before


def test_every_benchmark_is_on_a_page() -> None:
    """Whether it was measured or not."""
    shown = {name for page in pages.pages() for _, name, _, _, _ in pages.BLOCK.findall(page.read_text())}
    assert shown == {path.stem for path in measuring()} - {"papers"}  # which has a page of its own: test_papers.py


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "papers"], ids=lambda path: path.stem)
def test_every_missed_target_is_said_on_a_page(path: Path) -> None:
    lines = [line for page in pages.pages() for line in page.read_text().splitlines()]
    for row in read(path).results:
        said = [line for line in lines if line.startswith(f"| {row.case} |")]
        assert row.holds or said, row.case
        assert all(("**missed**" in line) != row.holds for line in said), row.case


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ratios_have_a_denominator(path: Path) -> None:
    for row in read(path).results:
        if row.ratio is not None:
            assert abs(row.ratio) < 1e6 or not row.value, row.case
    text = (ROOT / "docs/measurements.md").read_text()
    ratios = re.findall(r"^\|.*\| ([\d.]+) \|[^|]*\|$", text, re.MULTILINE)
    assert all(float(ratio) < 1e6 for ratio in ratios)


def test_what_benchmarks_measure_is_there() -> None:
    for path in measuring():
        for name in pages.measures(path.stem):
            found = list(ROOT.glob(name.removeprefix(":!")))
            assert found, f"{path.name} measures {name}, which is not there"


ROWS = [
    {"case": "a fast", "value": 2.0, "unit": "s", "baseline": 4.0, "ratio": 2.0, "target": 1.5, "holds": True},
    {"case": "a slow", "value": 1234.5, "unit": "", "baseline": None, "ratio": None, "target": 0.0, "holds": True},
    {"case": "b slow", "value": 3.0, "unit": "s", "baseline": 3.3, "ratio": 1.1, "target": 1.5, "holds": False},
    {"case": "b none", "value": 0.0, "unit": "s", "baseline": 3.3, "ratio": 3e10, "target": 1.5, "holds": True},
]


def page_of(*markers: str) -> str:
    return "before\n" + "".join(f"<!-- figures of one{words} -->\nold\n<!-- end figures -->\nx\n" for words in markers)


def test_a_block_has_the_rows_that_it_asks_for_and_every_miss(tmp_path: Path) -> None:
    result = {"commit": "abc", "command": "python benchmarks/one.py", "results": ROWS}
    (tmp_path / "one.json").write_text(json.dumps(result))
    made = pages.rendered(page_of(" | rows: ^a | beside: other | target: ratio, at least"), tmp_path)
    assert made.splitlines() == [
        "before",
        "<!-- figures of one | rows: ^a | beside: other | target: ratio, at least -->",
        "| case | measured | other | ratio | ratio, at least |",
        "|---|---|---|---|---|",
        "| a fast | 2 s | 4 | 2.00 | 1.5 |",
        "| a slow | 1,234 | - | - |  |",
        "| b slow | 3 s | 3.3 | 1.10 | **missed**: 1.5 |",
        "",
        "Measured at abc: `python benchmarks/one.py`.",
        "<!-- end figures -->",
        "x",
    ]
    assert pages.rendered(made, tmp_path) == made
    two = pages.rendered(page_of(" | rows: slow", " | rows: none"), tmp_path)
    assert two.count("b slow") == two.count("**missed**") == two.count("Measured at") == 1
    assert "| b none | 0 s | 3.3 | - | 1.5 |" in two
    assert "a fast" not in two
    assert pages.rendered(page_of(""), tmp_path).count("| b ") == 2


def test_a_block_without_results_says_so(tmp_path: Path) -> None:
    made = pages.rendered(page_of(" | rows: ^a"), tmp_path)
    assert "Not measured since the code changed. `python benchmarks/one.py --json FILE` measures it." in made
    assert "| case |" not in made
    with pytest.raises(ValueError, match="'row: a' is none of"):
        pages.rendered(page_of(" | row: a"), tmp_path)


@pytest.mark.parametrize(
    ("name", "before", "after", "same"),
    [
        ("a.py", '"""Old."""\nx = 1  # one\n', '"""New."""\n\n\nx = 1\n', True),
        ("a.py", 'def f():\n    """Old."""\n    return 1\n', "def f():\n    return 1\n", True),
        ("a.py", "x = 1\n", "x = 2\n", False),
        ("a.py", "x = 'one'\n", "x = 'two'\n", False),
        ("a.py", "def f(a, b):\n    return a < b\n", "def f(a, b):\n    return a <= b\n", False),
        ("a.py", 'MEASURES = ("a",)\nx = 1\n', 'MEASURES = ("b",)\nx = 1\n', True),
        ("a.pyi", "def f() -> int: ...\n", "def f() -> str: ...\n", False),
        ("a.cpp", "int x = 1;  // one\n", "/* a\n   b */ int x\n = 1;", True),
        ("a.cpp", 'auto s = "// a";', 'auto s = "// b";', False),
        ("a.h", "int x = 1;", "int x = 2;", False),
        ("a.yaml", "a: 1  # one\n", "a: 1\n", True),
        ("a.yaml", "a: 1\n", "a: 2\n", False),
        ("a.json", '{"a": 1}', '{\n "a": 1\n}', True),
        ("a.json", '{"a": 1}', '{"a": 2}', False),
        ("Makefile", "a:\n", "a: \n", False),
    ],
)
def test_what_counts_as_other_code(name: str, before: str, after: str, same: bool) -> None:
    assert pages.same_code(name, before, after) is same


class Repository:
    """A small one with a benchmark `one` that measures the folder `code`, but for `code/other.py`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.git("init", "-q")
        self.write("code/a.py", "x = 1\n")
        self.write("code/other.py", "y = 1\n")
        self.write("code/old.py", "z = 1\n")
        self.write("csrc/a.cpp", "int x;\n")
        self.write("benchmarks/one.py", 'MEASURES = ("code", ":!code/other.py", "csrc")\n')
        self.write("README.md", "")
        commit = self.commit()
        self.write("benchmarks/results/one.json", json.dumps({"benchmark": "one", "commit": commit}))
        self.write("docs/page.md", f"<!-- measured at {commit}: code/a.py code/other.py -->\n")
        self.commit()

    def git(self, *words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def commit(self) -> str:
        self.git("add", ".")
        self.git("commit", "-qm", "a")
        return self.git("rev-parse", "--short", "HEAD")


@pytest.mark.parametrize(
    ("name", "text", "older", "output_older"),
    [
        ("code/a.py", '"""Said."""\n\nx = 1  # one\n', False, False),
        ("code/a.py", "x = 2\n", True, True),
        ("code/new.py", "x = 2\n", True, False),
        ("code/old.py", None, True, False),
        ("code/other.py", "y = 2\n", False, True),
        ("csrc/a.cpp", "int y;\n", True, False),
        ("benchmarks/one.py", 'MEASURES = ("code", ":!code/other.py", "csrc")\nSTEPS = 2\n', True, False),
    ],
)
def test_results_are_stale_when_what_they_measure_changed(
    name: str, text: str | None, older: bool, output_older: bool, tmp_path: Path
) -> None:
    repository = Repository(tmp_path)
    assert pages.stale(tmp_path) == pages.stale_outputs(tmp_path) == {}
    if text is None:
        repository.git("rm", "-q", name)
    else:
        repository.write(name, text)
    repository.commit()
    assert pages.stale(tmp_path) == ({"one": [name]} if older else {})
    assert list(pages.stale_outputs(tmp_path).values()) == ([[name]] if output_older else [])


def test_a_change_that_is_not_committed_counts(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.write("code/a.py", "x = 2\n")
    assert pages.stale(tmp_path) == {"one": ["code/a.py"]}


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        ("code/a.py", '"""Said."""\n\nx = 1  # one\n', True),
        ("code/a.py", "x = 2\n", False),
        ("code/old.py", None, False),
        ("code/untracked.py", "x = 2\n", True),
        ("code/other.py", "y = 2\n", True),
    ],
)
def test_a_digest_is_that_of_the_tracked_code(name: str, text: str | None, same: bool, tmp_path: Path) -> None:
    repository, paths = Repository(tmp_path), ("code", ":!code/other.py")
    before = pages.code_digest(paths, tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        repository.write(name, text)
    assert (pages.code_digest(paths, tmp_path) == before) is same


def test_a_benchmark_that_lists_nothing_is_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.write("benchmarks/one.py", "x = 1\n")
    with pytest.raises(ValueError, match=r"benchmarks/one\.py has no constant MEASURES"):
        pages.stale(tmp_path)


def test_every_benchmark_ends_with_its_result() -> None:
    """Those that print one take `--quick` and write the file by the common functions, or have no result at all."""
    for path in benchmarks():
        text = path.read_text()
        assert f'finish("{path.stem}"' in text, path.name
        assert any(parser in text for parser in ("parse_arguments(", "argument_parser(", "case_parser(")), path.name
        assert "arguments.quick" in text, path.name


def test_what_benchmarks_import_is_there() -> None:
    """Nothing else of the default suite runs most of them. By the sources: to import them all takes long."""
    imported = {
        (node.module, name.name, path.name)
        for path in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    missing = [
        f"{script}: {module}.{name}"
        for module, name, script in sorted(imported)
        if ((names := names_of(module)) is None and str(module).split(".")[0] in ("realhf", "lib", "jobs"))
        or (names is not None and name not in names)
    ]
    assert not missing
    assert names_of("realhf.planning.presets")


@functools.cache
def names_of(module: str) -> set[str] | None:
    """What a module of this repository has to import, submodules included; None for others."""
    for root in (ROOT, ROOT / "benchmarks"):
        base = root / module.replace(".", "/")
        source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if base.is_dir() and not source.is_file():  # a folder of modules
            return {path.stem for path in base.glob("*.py")}
        if source.is_file():
            nodes = list(ast.walk(ast.parse(source.read_text())))
            names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
            return names | {alias.asname or alias.name for alias in aliases} | {path.stem for path in base.glob("*")}
    return None


def benchmarks() -> Iterator[Path]:
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        if "finish(" in path.read_text():
            yield path


def measuring() -> Iterator[Path]:
    """Those whose results are kept here. `scripts/gpu_check.py` keeps what `on_gpu.py` finds, where there is a GPU, and
    of mutations the survivors are read, not their number."""
    yield from (path for path in benchmarks() if path.stem not in ("on_gpu", "mutations"))
