"""Counts the lines of code of realhf and csrc: no blank lines, comments or docstrings.

Command: python scripts/count_lines.py [FOLDER]
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pygments.lexers.c_cpp import CppLexer
from pygments.token import Comment, Token, _TokenType

ROOT = Path(__file__).parents[1]
FOLDERS = ("realhf", "csrc")
CPP = (".cpp", ".h")
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def sources(root: Path) -> Iterator[Path]:
    """The source files below `FOLDERS` of a checkout."""
    for folder in FOLDERS:
        yield from sorted(path for path in (root / folder).rglob("*.*") if path.suffix in (".py", ".pyi", *CPP))


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The nodes of all docstrings of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str()) as docstring), *_]:
                    yield docstring


def cpp_tokens(text: str) -> Iterator[tuple[int, _TokenType, str]]:
    """Line, kind and text of each token of C++."""
    line = 1
    for kind, value in CppLexer(stripnl=False, ensurenl=False).get_tokens(text):
        yield line, kind, value
        line += value.count("\n")


def python_lines(text: str) -> set[int]:
    """The numbers of the lines of code in Python."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings(ast.parse(text)):
        lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def is_comment(kind: _TokenType) -> bool:
    """Whether a token of C++ is a comment; directives of the preprocessor are none, whatever their name."""
    return kind in Comment and kind not in (Comment.Preproc, Comment.PreprocFile)


def cpp_lines(text: str) -> set[int]:
    """The numbers of the lines of code in C++; directives of the preprocessor are code."""
    lines: set[int] = set()
    for line, kind, value in cpp_tokens(text):
        if not is_comment(kind) and kind not in Token.Text and value.strip():
            lines.update(range(line, line + value.rstrip("\n").count("\n") + 1))
    return lines


def count(path: Path) -> int:
    """The lines of code of one file."""
    text = path.read_text()
    return len(cpp_lines(text) if path.suffix in CPP else python_lines(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)")
    root = parser.parse_args().root
    totals: Counter[str] = Counter()
    for path in sources(root):
        room = path.relative_to(root).parts[:2]
        totals["/".join(room) if len(room) > 1 and (root / "/".join(room)).is_dir() else room[0]] += count(path)
    for folder, lines in sorted(totals.items()):
        print(f"{lines:7,} {folder}")
    print(f"{totals.total():7,} together")


if __name__ == "__main__":
    main()
