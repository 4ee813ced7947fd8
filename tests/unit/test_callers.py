"""What the package has is used in it, or documented for users: what only tests or benchmarks call lies with them."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import realhf

PACKAGE = Path(realhf.__file__).parent
ROOT = PACKAGE.parent
# Commands, ready experiments and processes are found by the names of their files.
ENTRY_POINTS = ("cli/", "experiments/", "__main__.py")


@cache
def trees() -> dict[Path, ast.Module]:
    """The package, and the examples that users copy."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    return {path: ast.parse(path.read_text()) for path in sorted(files)}


@cache
def nodes() -> list[ast.AST]:
    return [node for tree in trees().values() for node in ast.walk(tree)]


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imported() -> set[tuple[str, str]]:
    """(module, name) of what is imported, or read from an imported module."""
    found = set()
    for tree in trees().values():
        parts = list(ast.walk(tree))
        aliases = {}
        for node in parts:
            if isinstance(node, ast.ImportFrom):
                found |= {(node.module or "", each.name) for each in node.names}
                aliases |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        for node in parts:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                found.add((aliases[node.value.id], node.attr))
    return found


@cache
def attributes() -> set[str]:
    """The attributes that are read of any object."""
    return {node.attr for node in nodes() if isinstance(node, ast.Attribute)}


@cache
def named() -> set[str]:
    """The names in strings: `module:name`, or the name alone."""
    values = (node.value for node in nodes() if isinstance(node, ast.Constant))
    return {value.rpartition(":")[2] for value in values if isinstance(value, str)}


@cache
def documented() -> set[str]:
    """The words of code in README.md and docs/."""
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(code)))


@cache
def classes() -> set[str]:
    return {node.name for node in nodes() if isinstance(node, ast.ClassDef)}


def unused(path: Path, tree: ast.Module) -> Iterator[str]:
    """The public names of a file that nothing else in the package reads."""
    reads = [{part.id for part in ast.walk(node) if isinstance(part, ast.Name)} for node in tree.body]
    readers = Counter(name for names in reads for name in names)
    for node, own in zip(tree.body, reads, strict=True):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                continue
        alone = (name for name in names if readers[name] == (name in own))
        yield from (name for name in alone if name not in named() and (module(path), name) not in imported())
        if isinstance(node, ast.ClassDef) and all(isinstance(b, ast.Name) and b.id in classes() for b in node.bases):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from (
                f"{node.name}.{method}" for method in methods if method not in attributes() and method not in named()
            )


def test_public_names_are_used_in_the_package_or_documented() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in trees().items():
        file = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""
        if file and not any(part in file for part in ENTRY_POINTS):
            for name in unused(path, tree):
                last = name.rpartition(".")[2]
                if not last.startswith("_") and last not in documented():
                    found.setdefault(file, set()).add(name)
    assert found == {}, "move it to the tests or benchmarks that call it, or say in docs/ what users have of it"
