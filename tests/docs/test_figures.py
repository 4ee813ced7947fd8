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
from typing import Any

import msgspec
import pytest

from tests.docs.blocks import ROOT

RESULTS = ROOT / "benchmarks/results"
FILES = sorted(RESULTS.glob("*.json"))
# Older than the mark: whether the checkout was clean was not written down, and the command is that of the script's
# page. A file that is measured again leaves this set.
BEFORE_THE_MARK = {
    "estimator", "generation", "generation_busy_host",
    "reallocation", "search", "training",
}  # fmt: skip


class Case(msgspec.Struct, kw_only=True):
    """One measured case; see `case` in `benchmarks/lib/common.py`."""

    case: str
    value: float
    unit: str
    baseline: float
    ratio: float
    target: float
    holds: bool
    commit: str | None = None  # of a case that is older than its file


class Result(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A results file; `dirty` is None in those of `BEFORE_THE_MARK`. `note`: what else is to be said of the file."""

    benchmark: str
    commit: str
    dirty: bool | None
    command: str
    hardware: str
    results: list[Case]
    note: str = ""


def read(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)


def rows_of_faults() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / "faults.jsonl").read_text().splitlines()]


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
    assert path.stem.startswith(result.benchmark)
    assert (ROOT / f"benchmarks/{result.benchmark}.py").is_file()
    assert result.command.startswith(f"python benchmarks/{result.benchmark}.py")
    assert result.hardware
    assert result.results
    assert result.dirty is (None if path.stem in BEFORE_THE_MARK else False), "measure it from a clean checkout"
    for commit in {result.commit, *(row.commit for row in result.results if row.commit)}:
        assert is_ancestor(commit), f"{commit} is not in the history of HEAD: measure it again from a landed commit"


def test_the_fault_campaign_is_of_one_commit(whole_clone: None) -> None:
    """The table, its rows and the sums."""
    result, rows = read(RESULTS / "faults.json"), rows_of_faults()
    assert {row["commit"] for row in rows} == {result.commit}
    assert result.results[0].baseline == len(rows)
    assert result.results[0].value == sum(row["holds"] for row in rows)
    table = (RESULTS / "faults.md").read_text()
    assert table.count(f"| {result.commit} |") == len(rows)
    assert f"{sum(row['holds'] for row in rows)} of {len(rows)} runs hold." in table


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


def test_no_file_is_listed_as_older_than_the_mark_without_need() -> None:
    assert {path.stem for path in FILES} >= BEFORE_THE_MARK


def is_ancestor(commit: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def test_the_measurements_page_says_what_the_files_say() -> None:
    """Every row of its tables is a case of the file that stands above the table; every file stands on the page."""
    file, named = "", set()
    for block in (ROOT / "docs/measurements.md").read_text().split("\n\n"):
        files = re.findall(r"benchmarks/results/(\w+)\.json", block)
        named.update(files)
        file = files[0] if files else file
        if block.startswith("| case |"):
            known = {measurements_row(case) for case in read(RESULTS / f"{file}.json").results}
            assert not [row for row in block.splitlines()[2:] if row not in known], f"not what {file}.json says"
    assert named == {path.stem for path in FILES}


def measurements_row(case: Case) -> str:
    """A case as `docs/measurements.md` shows it: value and unit, the value beside it, their ratio."""
    value, baseline = (
        f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}" for number in (case.value, case.baseline)
    )
    return f"| {case.case} | {f'{value} {case.unit}'.strip()} | {baseline} | {case.ratio:.2f} |"


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
