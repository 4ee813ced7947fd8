"""The shape of the code: short functions of few parameters, all typed; parsed command lines in one room."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import realhf

ROOT = Path(realhf.__file__).parent
MAX_PARAMETERS = 7
MAX_LINES = 60


@dataclass(frozen=True)
class Function:
    """A function of the package; `name` is `file::Class.method`."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_method: bool
    lines: list[str]

    @property
    def parameters(self) -> list[ast.arg]:
        """All of them but self or cls."""
        spec = self.node.args
        positional = [*spec.posonlyargs, *spec.args][1 if self.is_method else 0 :]
        return [*positional, *filter(None, [spec.vararg]), *spec.kwonlyargs, *filter(None, [spec.kwarg])]

    @property
    def is_kernel(self) -> bool:
        """Whether Triton compiles it, which takes neither objects nor their types."""
        return any("triton.jit" in ast.unparse(decorator) for decorator in self.node.decorator_list)

    @property
    def num_lines(self) -> int:
        return (self.node.end_lineno or 0) - self.node.lineno + 1

    @property
    def gives_reason(self) -> bool:
        """Whether a comment stands right above the first statement behind the docstring: why the function is long."""
        body = self.node.body
        is_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        first = body[1] if is_docstring and len(body) > 1 else body[0]
        return self.lines[first.lineno - 2].lstrip().startswith("#")


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def functions() -> Iterator[Function]:
    for path in files():
        text = path.read_text()
        yield from _functions(str(path.relative_to(ROOT)) + "::", ast.parse(text), text.splitlines())


def _functions(prefix: str, node: ast.AST, lines: list[str]) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name):
                yield from _functions(f"{prefix}{name}.", child, lines)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in child.decorator_list)
                yield Function(prefix + name, child, isinstance(node, ast.ClassDef) and not is_static, lines)
                yield from _functions(f"{prefix}{name}.", child, lines)
            case _:
                yield from _functions(prefix, child, lines)


def has_many_parameters(function: Function) -> bool:
    is_script = function.name.startswith("experiments/")  # its parameters are the models of an algorithm
    return len(function.parameters) > MAX_PARAMETERS and not is_script and not function.is_kernel


def is_long(function: Function) -> bool:
    return function.num_lines > MAX_LINES and not function.gives_reason


def is_untyped(function: Function) -> bool:
    """As mypy counts: `__init__` returns None without saying so."""
    is_open = function.node.returns is None and function.node.name != "__init__"
    if function.is_kernel:
        return is_open
    return is_open or any(parameter.annotation is None for parameter in function.parameters)


@pytest.mark.parametrize(
    ("breaks", "remedy"),
    [
        (has_many_parameters, "give it one object that says what is asked"),
        (is_long, "divide it, or give the reason in a comment above its first statement"),
        (is_untyped, "annotate all parameters and the result"),
    ],
)
def test_functions(breaks: Callable[[Function], bool], remedy: str) -> None:
    found = sorted(function.name for function in functions() if breaks(function))
    assert not found, f"{found}: {remedy}"


def test_parsed_command_lines_stay_in_cli() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.alias | ast.Name)
        and "Namespace" in (getattr(node, "attr", ""), getattr(node, "name", ""), getattr(node, "id", ""))
    }
    outside = sorted(file for file in found if not file.startswith("cli/"))
    assert not outside, f"{outside}: parse in realhf/cli, pass a typed request"


def test_every_folder_of_code_is_a_package() -> None:
    lacking = {str(path.parent) for path in files() if not (path.parent / "__init__.py").is_file()}
    assert not lacking, f"{sorted(lacking)}: add an empty __init__.py"
