"""Copies of the checkout in which mutants run, each with an environment whose `realhf` is the copy's.

Tests start processes by `sys.executable`, some of them with `-P`: the copy's Python finds the copy, the packages of the
checkout's environment, and nothing of the checkout.
"""

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lib.common import ROOT

PACKAGE = "realhf"


def tree() -> dict[str, bytes]:
    """What a copy consists of: the files that git has or would take, and the package's binaries."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [*filter(None, listed), *(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).rglob("*.so"))]
    return {path: (ROOT / path).read_bytes() for path in sorted(paths) if (ROOT / path).is_file()}


def make_copy(folder: Path, files: dict[str, bytes]) -> None:
    """`folder` has these files and no others, and an environment; what has not changed keeps its bytecode."""
    for path in list(_files_in(folder)):
        if path not in files:
            (folder / path).unlink()
    for path, content in files.items():
        file = folder / path
        if not file.is_file() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            if (ROOT / path).is_file():
                shutil.copymode(ROOT / path, file)
    _make_environment(folder)
    _check_environment(folder)


def python_of(folder: Path) -> Path:
    return folder / ".venv/bin/python"


def instrumented(files: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    """The files, whose statements in functions of the package note that they run: each sets its byte in
    `folder`/hits, which all processes share; `folder`/statements.json has the file and line of each byte."""
    statements: list[tuple[str, int]] = []
    changed = {}
    for path, source in files.items():
        if path.startswith(f"{PACKAGE}/") and path.endswith(".py"):
            changed[path] = _instrument(path, source.decode(), statements, folder / "hits").encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hits").write_bytes(bytes(len(statements)))
    (folder / "statements.json").write_text(json.dumps(statements))
    return {**files, **changed}


_HEADER = """\
import sys as __sys__
if not hasattr(__sys__, "_hits"):
    import mmap as __mmap__
    try:
        with open({hits!r}, "r+b") as __file__of_hits__: __sys__._hits = __mmap__.mmap(__file__of_hits__.fileno(), 0)
    except OSError: __sys__._hits = bytearray({most})
__hits__ = __sys__._hits
"""


def _instrument(path: str, source: str, statements: list[tuple[str, int]], hits: Path) -> str:
    parsed, lines = ast.parse(source), source.splitlines(keepends=True)
    marks = sorted({line for node in parsed.body for line in _statement_lines(node, lines)})
    index = {line: len(statements) + place for place, line in enumerate(marks)}
    statements += [(path, line) for line in marks]
    first = 1
    for node in parsed.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            first = (node.end_lineno or 0) + 1
    written = []
    for number, line in enumerate([*lines, ""], 1):
        if number == first and marks:
            written.append(_HEADER.format(hits=str(hits), most=1 << 20))
        if number in index:
            indent = line[: len(line) - len(line.lstrip())]
            written.append(f"{indent}__hits__[{index[number]}] = 1\n")
        written.append(line)
    return "".join(written)


def _statement_lines(node: ast.AST, lines: list[str], in_function: bool = False) -> Iterator[int]:
    """The first lines of statements in functions that another statement can stand before."""
    if in_function and isinstance(node, ast.stmt):
        decorators = getattr(node, "decorator_list", [])
        number = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        begins = lines[number - 1][: node.col_offset].isspace() and not lines[number - 1].lstrip().startswith("elif")
        if begins and not is_docstring:
            yield number
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.ClassDef):
        inside = False
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from _statement_lines(child, lines, inside)


def _files_in(folder: Path) -> Iterator[str]:
    kept = (".venv/", ".hypothesis/", ".pytest_cache/")
    for file in sorted(folder.rglob("*")):
        path = str(file.relative_to(folder))
        if not path.startswith(kept) and "__pycache__" not in path and not file.is_dir():
            yield path


def _make_environment(folder: Path) -> None:
    """A virtual environment without packages of its own: it sees those of the checkout, but the copy's `realhf`."""
    own, packages = Path(sys.prefix), Path(sysconfig.get_path("purelib"))
    copied = folder / ".venv" / packages.relative_to(own)
    copied.mkdir(parents=True, exist_ok=True)
    shutil.copy(own / "pyvenv.cfg", folder / ".venv/pyvenv.cfg")
    (folder / ".venv/bin").mkdir(exist_ok=True)
    for file in (own / "bin").iterdir():
        link = folder / ".venv/bin" / file.name
        if link.is_symlink() or link.is_file():
            continue
        if file.is_symlink():
            link.symlink_to(file.readlink())
        elif file.read_bytes().startswith(b"#!"):
            link.write_bytes(file.read_bytes().replace(str(own).encode(), str(folder / ".venv").encode()))
            link.chmod(0o755)
    finder = _FINDER.format(package=PACKAGE, folder=str(folder / PACKAGE))
    (copied / "_copy_of_checkout.py").write_text(finder)
    (copied / "copy.pth").write_text(f"import _copy_of_checkout\n{packages}\n")


_FINDER = """\
import importlib.util, sys

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == {package!r}:
            folder = {folder!r}
            return importlib.util.spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder])

sys.meta_path.insert(0, Finder)
"""


def _check_environment(folder: Path) -> None:
    """A process that tests start imports the copy, wherever it is."""
    words = [str(python_of(folder)), "-P", "-c", f"import {PACKAGE}, pytest; print({PACKAGE}.__file__)"]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=False)
    if done.stdout.strip() != str(folder / PACKAGE / "__init__.py"):
        sys.exit(f"{' '.join(words)}: not the copy, but {done.stdout or done.stderr}")
