"""One-line mutations of Python code: a change that a person's slip could be, as an edit of the source text.

`mutants_of` lists those of one file, `draw` takes some by a seed. Text is left alone: strings, docstrings, annotations,
imports, decorators, what an error or a log says. So are numbers of a module's private constants: how large a limit is
that only one module knows, is a choice.
"""

import ast
import bisect
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: ("<", "<=", ">"),
    ast.LtE: ("<=", "<", ">="),
    ast.Gt: (">", ">=", "<"),
    ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_PAIRS = (
    ("min", "max"), ("any", "all"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("floor", "ceil"),
    ("sum", "mean"), ("zeros", "ones"), ("zeros_like", "ones_like"), ("append", "extend"), ("add", "discard"),
    ("startswith", "endswith"), ("bisect_left", "bisect_right"), ("update", "clear"), ("sqrt", "square"),
    ("exp", "log"), ("ceil_div", "floor_div"), ("cumsum", "cumprod"), ("isnan", "isinf"), ("first", "last"),
)  # fmt: skip
_SWAPPED = {name: other for pair in _PAIRS for name, other in (pair, pair[::-1])}
_COMMUTATIVE = frozenset(
    {"min", "max", "minimum", "maximum", "gcd", "lcm", "hypot", "isclose", "allclose", "logaddexp"}
)
_LOGS = re.compile(r"(log|logger|_log|_logger|logging|warnings|console)\.|print$|warn$")
# Keywords that hold text, and the one by which `zip` asserts.
_WORDS = frozenset({"help", "metavar", "description", "epilog", "message", "title", "unit", "strict"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_APART = (ast.Starred, ast.Lambda, ast.ListComp, ast.GeneratorExp)  # arguments that nobody mistakes for another


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """Bytes `start` to `end` of the source become `text`; `before` and `after` are the lines around, in one line each.

    `runs`: lines of statements that run where the mutated code does; none where it runs at import alone.
    `names`: what the code defines, if it runs at import: a constant, a field, a function whose default it is.
    """

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    text: str
    runs: tuple[int, ...]
    names: tuple[str, ...]

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for the same change of the same text, wherever in the file it stands."""
        return self.path, self.before, self.after


def draw(sources: Mapping[str, bytes], seed: int, count: int) -> list[Mutant]:
    """`count` mutants (fewer where there are not so many): a random line, a kind of change on it, a change."""
    random_numbers = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted(sources):
        for mutant in mutants_of(path, sources[path]):
            lines.setdefault((path, mutant.line), []).append(mutant)
    order = sorted(lines)
    random_numbers.shuffle(order)
    drawn = []
    for place in order:
        if len(drawn) == count:
            break
        kind = random_numbers.choice(sorted({mutant.kind for mutant in lines[place]}))
        of_kind = [mutant for mutant in lines[place] if mutant.kind == kind]
        random_numbers.shuffle(of_kind)
        drawn += [mutant for mutant in of_kind if changes(mutant, sources[mutant.path])][:1]
    return drawn


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All of a file, in the order of their places. Some may not compile or change nothing: see `changes`."""
    return sorted(set(_Finder(path, source).found()), key=lambda mutant: (mutant.start, mutant.end, mutant.text))


def changes(mutant: Mutant, source: bytes) -> bool:
    """Whether the mutated file is Python, and another program than before."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


@dataclass(frozen=True)
class _Place:
    """The statement around a node: the lines that run with it, the names that it defines, whether in a function, and
    there in a block."""

    runs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    in_function: bool = False
    in_block: bool = False


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        tree = ast.parse(self._source)
        for statement in tree.body:
            yield from self._statement(statement, _Place())

    # --- statements

    def _statement(self, node: ast.stmt, around: _Place) -> Iterator[Mutant]:
        if self._is_text(node):
            return
        if isinstance(node, _FUNCTIONS):
            yield from self._function(node)
            return
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                yield from self._statement(statement, _Place())
            return
        is_elif = self._text(node).startswith(b"elif")
        if around.in_function:
            place = around if is_elif else _Place((node.lineno,), (), True, True)
            yield from self._without(node, place, around)
        else:
            place = _Place((), tuple(_defined(node)))
        if isinstance(node, ast.Raise):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "msg") or (name == "targets" and isinstance(node, ast.Assign)):
                continue
            inner = place if around.in_function else (place if place.names else around)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._statement(child, inner)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    for statement in child.body:
                        yield from self._statement(statement, inner)
                elif isinstance(child, ast.withitem):
                    yield from self._expression(child.context_expr, inner)
                elif isinstance(child, ast.expr):
                    yield from self._expression(child, inner)
        yield from self._of_statement(node, place)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutant]:
        header = _Place(tuple(statement.lineno for statement in node.body[:2]), (node.name,))
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                yield from self._expression(default, header)
        for statement in node.body:
            yield from self._statement(statement, _Place((), (), True))
        assigned: list[str] = []
        for statement in ast.walk(node):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                assigned.append(statement.targets[0].id)
        for statement in ast.walk(node):
            if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Name):
                others = [name for name in assigned if name != statement.value.id]
                if others:
                    yield self._edit("return", statement.value, others[-1], _Place((statement.lineno,), (), True))

    def _without(self, node: ast.stmt, place: _Place, around: _Place) -> Iterator[Mutant]:
        """The statement dropped, where what follows can run without it."""
        match node:
            case ast.Raise() | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
                yield self._edit("dropped", node, "pass", place)
            case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield()):
                yield self._edit("dropped", node, "pass", place)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield self._edit("dropped", node, "pass", place)
            case ast.Return() if around.in_block or node.value is None:
                yield self._edit("dropped", node, "pass", place)

    def _of_statement(self, node: ast.stmt, place: _Place) -> Iterator[Mutant]:
        match node:
            case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
                yield from self._condition(test, place, ("True", "False") if isinstance(node, ast.If) else ("False",))
            case ast.AugAssign(op=op, target=target, value=value) if type(op) in _OPERATORS:
                yield from self._between("arithmetic", target, value, *_OPERATORS[type(op)], place)
            case ast.Return(value=ast.Tuple(elts=[first, second, *_])):
                yield from self._swapped(first, second, place)

    # --- expressions

    def _expression(self, node: ast.AST, place: _Place) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _LOGS.match(ast.unparse(node.func))):
            return
        yield from self._of_expression(node, place)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword):
                if child.arg not in _WORDS:
                    yield from self._expression(child.value, place)
            elif isinstance(child, ast.comprehension):
                yield from self._expression(child.iter, place)
                for test in child.ifs:
                    yield from self._condition(test, place, ("True",))
                    yield from self._expression(test, place)
            elif isinstance(child, ast.arguments):
                for default in (*child.defaults, *child.kw_defaults):
                    if default is not None:
                        yield from self._expression(default, place)
            elif isinstance(child, ast.expr):
                yield from self._expression(child, place)

    def _of_expression(self, node: ast.AST, place: _Place) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for one, operator, other in zip([left, *others], ops, others, strict=False):
                    old, *new = _COMPARISONS[type(operator)]
                    for text in new:
                        yield from self._between("comparison", one, other, old, text, place)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS and not (_is_str(left, right)):
                is_type = isinstance(op, ast.BitOr) and not place.in_function  # most likely
                if not (is_type or _is_private_constant(place)):
                    yield from self._between("arithmetic", left, right, *_OPERATORS[type(op)], place)
            case ast.BoolOp(op=op, values=values):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for one, other in itertools.pairwise(values):
                    yield from self._between("boolean", one, other, old, new, place)
                    yield self._cut("condition", one, other, place)
                yield self._cut("condition", values[-2], values[-1], place, last=True)
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
                kind = "sign" if isinstance(node.op, ast.USub) else "not"
                yield self._edit(kind, node, f"({self._text(operand).decode()})", place)
            case ast.IfExp(test=test):
                yield from self._condition(test, place, ("True", "False"))
            case ast.Constant(value=value) if not _is_private_constant(place):
                for text in _other_constants(value):
                    yield self._edit("constant", node, text, place)
            case ast.Call():
                yield from self._of_call(node, place)
            case ast.Slice(lower=lower, upper=upper):
                for end in (lower, upper):
                    if end is not None and not isinstance(end, ast.Constant):
                        for text in (" + 1", " - 1"):
                            yield self._edit("slice", end, self._text(end).decode() + text, place)
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _SWAPPED:
                start = self._offset(node.end_lineno, node.end_col_offset) - len(name)
                yield self._span("name", node, start, start + len(name), _SWAPPED[name], place)

    def _of_call(self, node: ast.Call, place: _Place) -> Iterator[Mutant]:
        name = ast.unparse(node.func).rpartition(".")[2]
        for one, other in itertools.pairwise(node.args) if name not in _COMMUTATIVE else ():
            if not isinstance(one, _APART) and not isinstance(other, _APART) and not _is_str(one, other):
                yield from self._swapped(one, other, place)
        arguments = [*node.args, *node.keywords]
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in _WORDS:
                index = arguments.index(keyword)
                if index:
                    before = arguments[index - 1]
                    start = self._offset(before.end_lineno, before.end_col_offset)
                    end = self._offset(keyword.end_lineno, keyword.end_col_offset)
                    yield self._span("keyword", keyword, start, end, "", place)
                else:
                    yield self._edit("keyword", keyword, "", place)
        if name == "sorted" and len(arguments) == 1:
            yield self._edit("name", node.func, "list", place)

    def _condition(self, test: ast.expr, place: _Place, values: tuple[str, ...]) -> Iterator[Mutant]:
        yield self._edit("not", test, f"not ({self._text(test).decode()})", place)
        for value in values:
            yield self._edit("condition", test, value, place)

    def _swapped(self, one: ast.expr, other: ast.expr, place: _Place) -> Iterator[Mutant]:
        start, middle = self._offset(one.lineno, one.col_offset), self._offset(one.end_lineno, one.end_col_offset)
        end = self._offset(other.end_lineno, other.end_col_offset)
        gap = self._source[middle : self._offset(other.lineno, other.col_offset)]
        text = self._text(other) + gap + self._text(one)
        yield self._span("order", one, start, end, text.decode(), place)

    def _between(
        self, kind: str, one: ast.expr, other: ast.expr, old: str, new: str, place: _Place
    ) -> Iterator[Mutant]:
        """The operator between two operands changed."""
        start = self._offset(one.end_lineno, one.end_col_offset)
        gap = self._source[start : self._offset(other.lineno, other.col_offset)].decode()
        found = re.search(rf"(?<![\w<>=!*/]){re.escape(old)}(?![\w<>!*/])", gap)
        if found and "#" not in gap:
            yield self._span(kind, one, start + found.start(), start + found.end(), new, place, to=other)

    def _cut(self, kind: str, one: ast.expr, other: ast.expr, place: _Place, *, last: bool = False) -> Mutant:
        """One of two operands left out, with the operator between them."""
        one_start, one_end = self._offset(one.lineno, one.col_offset), self._offset(one.end_lineno, one.end_col_offset)
        start, end = self._offset(other.lineno, other.col_offset), self._offset(other.end_lineno, other.end_col_offset)
        if last:
            return self._span(kind, one, one_end, end, "", place, to=other)
        return self._span(kind, one, one_start, start, "", place, to=other)

    # --- text

    def _edit(self, kind: str, node: ast.stmt | ast.expr | ast.keyword, text: str, place: _Place) -> Mutant:
        start = self._offset(node.lineno, node.col_offset)
        return self._span(kind, node, start, self._offset(node.end_lineno, node.end_col_offset), text, place)

    def _span(
        self, kind: str, node: ast.AST, start: int, end: int, text: str, place: _Place, *, to: ast.AST | None = None
    ) -> Mutant:
        first, last = self._line_of(start), self._line_of(max(start, end - 1))
        around = self._source[self._starts[first - 1] : self._starts[last]]
        offset = self._starts[first - 1]
        changed = around[: start - offset] + text.encode() + around[end - offset :]
        return Mutant(
            path=self._path,
            line=first,
            kind=kind,
            before=_in_one_line(around),
            after=_in_one_line(changed),
            start=start,
            end=end,
            text=text,
            runs=place.runs,
            names=place.names,
        )

    def _line_of(self, offset: int) -> int:
        return bisect.bisect_right(self._starts, offset)

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return self._starts[line - 1] + column

    def _text(self, node: ast.AST) -> bytes:
        start = self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return self._source[start : self._offset(node.end_lineno, node.end_col_offset)]  # type: ignore[attr-defined]

    def _is_text(self, node: ast.stmt) -> bool:
        """Whether a statement decides nothing: an import, a docstring, a log, an assertion."""
        match node:
            case ast.Raise(exc=ast.Name(id="NotImplementedError")):  # of a method that every subclass has
                return True
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Global() | ast.Nonlocal() | ast.Assert():
                return True
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Expr(value=ast.Call(func=function)):
                return _LOGS.match(ast.unparse(function)) is not None
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return True
            case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
                return True
        return False


def _in_one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module or a class assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        for inner in ast.walk(target) if target is not None else ():
            if isinstance(inner, ast.Name):
                yield inner.id


def _is_private_constant(place: _Place) -> bool:
    return bool(place.names) and all(re.fullmatch("_[A-Z0-9_]+", name) for name in place.names)


def _is_str(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", 0), str) for node in nodes)


def _other_constants(value: object) -> list[str]:
    match value:
        case bool():
            return [str(not value)]
        case int() if value >= 8:
            return [str(value + 1), str(value - 1), str(2 * value), str(value // 2)]
        case int():
            return [str(value + 1), str(value - 1)]
        case float():
            return [repr(value * 2), repr(value / 2)] if value else ["1.0"]
    return []
