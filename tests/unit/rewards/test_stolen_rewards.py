"""Programs that try to pass tests that they fail, and what tests may do with programs that pass them."""

# ruff: noqa: E501 (programs on one line)

import textwrap

import pytest

from realhf.rewards.sandbox import Limits, run_tests
from tests.waiting import PATIENCE_S

LONG = Limits(time_s=PATIENCE_S)
WRONG = "def add(a, b): return 0\n"
FAILS = "assert add(1, 2) == 3"
# A comparison that is always true, as an object and as a kind of number, text or list.
AGREES = """
class Agrees:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return self
    def __bool__(self): return True
    def __hash__(self): return 1
    def __getattr__(self, name): return lambda *args: True
"""

# Each is the whole program; the tests are `FAILS` and one that is true of it where it can be loaded.
STEALS: dict[str, str] = {
    "ends well": WRONG + "import sys\nsys.exit(0)",
    "ends well in the call": "def add(a, b): raise SystemExit(0)",
    "ends the process": "import os\ndef add(a, b): os._exit(0)",
    "ends the process later": WRONG + "import os, atexit\natexit.register(os._exit, 0)",
    "writes to every descriptor": WRONG
    + """
import os
for fd in range(200):
    for text in (b'[""]', b'["", ""]', b'2', b'passed'):
        try: os.write(fd, text)
        except OSError: pass
""",
    "writes in a thread": WRONG
    + """
import os, threading
def write():
    while True:
        for fd in range(3, 64):
            try: os.write(fd, b'[""]')
            except OSError: pass
threading.Thread(target=write, daemon=True).start()
""",
    "closes every descriptor": "import os\ndef add(a, b): os.closerange(0, 200)",
    "replaces exec and compile": WRONG
    + """
import builtins
builtins.exec = builtins.eval = lambda *a, **k: None
builtins.compile = lambda *a, **k: "pass"
builtins.__import__ = lambda *a, **k: None
""",
    "replaces what tests use": WRONG
    + """
import builtins, unittest, operator
class AssertionError(Exception):
    def __new__(cls, *a): raise SystemExit(0)
builtins.AssertionError = AssertionError
builtins.Exception = builtins.BaseException = AssertionError
unittest.TestCase.assertEqual = lambda *a: None
operator.eq = lambda *a: True
""",
    "replaces pytest": WRONG + "import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')",
    "equals everything": AGREES + "def add(a, b): return Agrees()",
    "equals everything as a number": AGREES.replace("Agrees:", "Agrees(int):") + "def add(a, b): return Agrees()",
    "equals everything as a number with a fraction": AGREES.replace("Agrees:", "Agrees(float):")
    + "def add(a, b): return Agrees()",
    "equals everything within": AGREES + "def add(a, b): return [Agrees()]",
    "looks for the tests in memory": WRONG
    + """
import gc, sys
backwards = ')2 ,1(dda tressa'  # else it finds itself
for one in gc.get_objects():
    if isinstance(one, (list, dict, tuple)) and backwards[::-1] in repr(one)[:10000]:
        def add(a, b): return 3
""",
    "looks for the tests in frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for name, value in list(scope.items()):
                if type(value).__name__ == '_ProgramPeer':
                    continue
                if isinstance(value, (str, list)) and 'assert' in str(value):
                    return 3
        frame = frame.f_back
""",
    "answers every question with yes": WRONG
    + """
import gc, sys
peer = sys.modules['realhf.rewards.peer']
peer.Peer.perform = lambda *a: True
for one in gc.get_objects():
    if isinstance(one, peer.Peer):
        type(one).perform = lambda *a: True
""",
    "answers with other messages": """
import gc, sys
peer = sys.modules['realhf.rewards.peer']
def add(a, b):
    one = next(o for o in gc.get_objects() if isinstance(o, peer.Peer))
    for message in (['passed'], ['value'], [], None, ['value', ['x'], ''], ['ask', 'special', 0, [None, []], '']):
        one._send(message) if isinstance(message, list) else None
""",
    "asks the tests' process for its objects": """
import gc, sys
peer = sys.modules['realhf.rewards.peer']
def add(a, b):
    one = next(o for o in gc.get_objects() if isinstance(o, peer.Peer))
    found = None
    for what, subject, args in (
        ('get', 0, ('__globals__',)), ('get', 0, ('names',)), ('name', 'add', ()), ('special', 0, ('__call__',)),
        ('load', None, ()), ('await', 0, ()), ('data', 0, ('str',)), ('set', 0, ('names', 1)),
    ):
        try: one.ask(what, subject, *args)
        except Exception: continue
        found = 3
    return found
""",
    "ends the tests' process": "import os, signal\ndef add(a, b):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 0",
    "raises what tests pass over": "class Skipped(BaseException): pass\ndef add(a, b): raise Skipped",
    "raises the error of the wire": "import sys\ndef add(a, b): raise sys.modules['realhf.rewards.wire'].WireError('x')",
    "stops the generator": "def add(a, b): raise GeneratorExit",
    "hides behind names of Python": WRONG
    + "def all(x): return True\nany = bool = abs = isinstance = len = print = all\n",
    "makes its own loop of events": WRONG + "import asyncio\nasyncio.run = lambda *a: True",
    "recurses": "def add(a, b): return add(a, b)",
    "nests deeply": "def add(a, b):\n    x = ()\n    for _ in range(100000): x = (x,)\n    return x",
}


@pytest.mark.parametrize("how", STEALS)
def test_no_program_passes_a_test_that_it_fails(how: str) -> None:
    outcomes = run_tests(STEALS[how], [FAILS], LONG)
    assert outcomes is None or outcomes[0] != ""


OBJECTS = (
    AGREES
    + """
def f(x): return Agrees()
class Whole(int):
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *a: True
    __sub__ = __rsub__ = lambda *a: 0.0
    __hash__ = int.__hash__
def g(x): return Whole(7)
class Every(list):
    __contains__ = __eq__ = lambda *a: True
def h(x): return Every([7])
class Sized:
    def __len__(self): return 1
    def __iter__(self): return iter([7])
    __contains__ = lambda *a: True
def s(x): return Sized()
class Spoils:
    def __rsub__(self, other): other.clear(); other.append(1); return self
    __sub__ = __rsub__
def spoils(x): return Spoils()
class math:
    isclose = staticmethod(lambda *a, **k: True)
def abs(x): return 0
def all(x): return True
def isinstance(x, y): return True
"""
)
FAILING = [
    "assert f(1) == 3",
    "assert 3 == f(1)",
    "assert not f(1) != 3",
    "assert f(1) <= 3",
    "assert 3 >= f(1)",
    "assert abs(f(2) - 1.414) < 1e-6",
    "assert abs(1.414 - f(2)) < 1e-6",
    "assert f(2) - 1.414 == 0",
    "assert 3 in f(1)",
    "assert [1, f(1)] == [1, 2]",
    "assert {1: f(1)} == {1: 2}",
    "assert f(1) == [1, 2]",
    "assert f(1) in (1, 2)",
    "assert f(1) == Agrees()",
    "import math\nassert math.isclose(f(1), 3)",
    "assert math.isclose(s(1), 3)",
    "assert all([f(1) == 3])",
    "assert isinstance(f(1), int)",
    "assert g(1) == 8",
    "assert g(1) < 7",
    "assert g(1) > 7",
    "assert g(1) <= 6",
    "assert abs(g(1) - 1.414) < 1e-6",
    "assert abs(1.414 - g(1)) < 1e-6",
    "assert h(1) == [8]",
    "assert 8 in h(1)",
    "assert 8 in s(1)",
    "expected = [5]\nspoils(1) - expected\nassert expected == [1]",
    "import pytest\nassert f(1) == pytest.approx(3)",
    "import pytest\nwith pytest.raises(ValueError): f(1)",
    "import unittest\nunittest.TestCase().assertEqual(f(1), 3)",
    "import numpy as np\nnp.testing.assert_allclose(f(1), 3)",
]


def test_no_object_of_a_program_decides_what_it_equals() -> None:
    found = run_tests(OBJECTS, FAILING, LONG)
    assert found is not None
    assert [test for test, outcome in zip(FAILING, found, strict=True) if outcome == ""] == []


CAREFUL = """
import builtins, gc, sys
seen = []
def run(f, *args):
    for name in ('__globals__', '__code__', '__closure__', '__self__', '__class__', 'gi_frame', 'cr_frame', '__dict__'):
        try: seen.append((name, getattr(f, name)))
        except (AttributeError, TypeError): pass
    return [name for name, _ in seen if name not in ('__class__',)]
def rename(x): x.name = 'new'; return x.name
def change(x): x.size = 1
"""
NOTHING_SEEN = [
    "assert run(lambda: 1) == []",
    "def gen(): yield 1\nassert run(gen()) == []",
    "class T:\n    def m(self): return 1\nassert run(T().m) == []\nassert run(T()) == []",
    "class N: pass\nn = N()\nassert rename(n) == 'new' and n.name == 'new'",
    "import io\ntry: change(io.StringIO())\nexcept TypeError: pass\nelse: assert False",
    "import sys\ntry: run(sys._getframe())\nexcept TypeError: pass\nelse: assert False",
    "try: run(globals())\nexcept TypeError: pass\nelse: assert False",
]


def test_a_program_sees_nothing_behind_what_tests_give_it() -> None:
    assert run_tests(CAREFUL, NOTHING_SEEN, LONG) == [""] * len(NOTHING_SEEN)


PROGRAM = """
import collections, datetime, decimal, enum, fractions, functools, json, math
from dataclasses import dataclass
import numpy as np

count = 0
def add(a, b):
    global count
    count += 1
    return a + b
def ident(x): return x
def is_a(x, kind): return isinstance(x, kind)
def sort(items): items.sort()
def rotate(rows): rows[0][0], rows[:] = 9, rows[::-1]
def grow(table, **more): table.update(more); table['self'] = table; return table
def apply(f, *args, **kwargs): return f(*args, **kwargs)
def negative(x):
    if x < 0: raise ValueError(f'{x} is negative')
    return math.sqrt(x)
class TooLarge(ValueError):
    def __init__(self, size): super().__init__('too large', size); self.size = size
    def __str__(self): return f'size {self.size}'
class Larger(TooLarge): pass
def large(): raise Larger(5)
def parse(text): return json.loads(text)
@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __lt__(self, other): return self.x < other.x
class Stack:
    kind = 'stack'
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __delitem__(self, i): del self.items[i]
    def __iter__(self): return iter(self.items)
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear(); return True
    @staticmethod
    def of(*items): s = Stack(); s.items = [*items]; return s
class Color(enum.Enum):
    RED = 1
class Level(enum.IntEnum):
    LOW = 1
Pair = collections.namedtuple('Pair', 'a b')
class Text(str): pass
def numbers():
    yield 1
    yield 2
async def later(x): return x + 1
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def reverse(node):
    before = None
    while node: node.next, before, node = before, node, node.next
    return before
def ask(): print(int(input('n? ')) * 2)
def lines():
    import sys
    return [line.strip() for line in sys.stdin]
def sum(a, b): return a * b
class Vector:
    def __init__(self, *xs): self.xs = xs
    def __eq__(self, other): return self.xs == other.xs
    def __mul__(self, k): return Vector(*(x * k for x in self.xs))
    __rmul__ = __mul__
    def __matmul__(self, other): return builtin_sum(a * b for a, b in zip(self.xs, other.xs))
    def __neg__(self): return self * -1
    def __bool__(self): return any(self.xs)
    def __float__(self): return 0.5
    def __str__(self): return f'<{self.xs}>'
import builtins
builtin_sum = builtins.sum
nan = float('nan')
queue = string = Stack()
"""
PASSING = [
    "assert add(1, 2) == 3 and add('a', b='b') == 'ab'",
    "before = count\nadd(1, 1)\nassert count == before + 1",
    "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
    "class Mine: pass\nassert is_a(Mine(), Mine) is True and is_a(3, Mine) is False and is_a(True, int)",
    # Of two objects with the name of a module, the module is meant where it has what the test takes from it.
    "queue.push(3)\nassert queue.pop() == 3 and not queue.items",
    "assert string.digits == '0123456789'",
    "result = add(2, 2)",
    "assert result == 4",
    "for x in (None, True, 0, -1, 2**63, -2**70, 10**5000, 1.5, 1e300, '', '\\ud800', b'\\xff', 1j, ...):\n"
    "    assert ident(x) == x and type(ident(x)) is type(x)",
    "for x in ((), (1, (2,)), [1, [2]], {'a': [1]}, {1, 2}, frozenset({1}), range(1, 9, 2), slice(1, 2), bytearray(b'a')):\n"
    "    assert ident(x) == x and type(ident(x)) is type(x)",
    "import collections as c\n"
    "for x in (c.deque([1], 3), c.OrderedDict(a=1), c.Counter('aab'), c.defaultdict(int, a=1)):\n"
    "    assert ident(x) == x and type(ident(x)) is type(x)\n"
    "assert ident(c.deque([1], 3)).maxlen == 3 and ident(c.defaultdict(int)).default_factory is int",
    "import datetime as d, decimal, fractions\n"
    "for x in (d.datetime(2020, 1, 2, 3), d.date(2020, 1, 2), d.time(1, 2), d.timedelta(1, 2, 3), decimal.Decimal('1.10'),\n"
    "          fractions.Fraction(1, 3)):\n    assert ident(x) == x and type(ident(x)) is type(x)",
    "assert ident(0.0) == 0 and str(ident(-0.0)) == '-0.0' and nan != nan and ident(float('inf')) == float('inf')",
    "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
    "rows = [[1], [2]]\nfirst = rows[0]\nrotate(rows)\nassert rows == [[2], [9]] and rows[1] is first",
    "table = {}\nassert grow(table, a=1) is table and table['self'] is table and table['a'] == 1",
    "same = [[1]] * 2\nassert ident(same)[0] is ident(same)[0] or True\nfound = ident(same)\nassert found is same",
    "assert apply(lambda x, y=0: x - y, 3, y=1) == 2 and apply(max, [1, 5]) == 5 and apply(int, '3') == 3",
    "def boom(): raise KeyError('k')\ntry: apply(boom)\nexcept KeyError as e: assert e.args == ('k',)\nelse: assert False",
    "assert apply(apply, ident, 3) == 3 and apply(lambda: Point(1)) == Point(1)",
    "import pytest\nwith pytest.raises(ValueError, match='-1 is negative'): negative(-1)",
    "try: negative(-1)\nexcept ValueError as e: assert str(e) == '-1 is negative'\nelse: assert False",
    "import math\nassert math.isclose(negative(2), 1.41421356, rel_tol=1e-6) and abs(negative(2) - 1.4142) < 1e-3",
    "try: large()\nexcept TooLarge as e: assert (e.size, str(e), e.args) == (5, 'size 5', ('too large', 5))\nelse: assert 0",
    "try: large()\nexcept Larger: pass\nelse: assert False",
    "import json\nassert issubclass(TooLarge, ValueError)\ntry: parse('{')\nexcept json.JSONDecodeError: pass\nelse: assert 0",
    "assert Point(1, 2) + Point(3, 4) == Point(4, 6) and Point(1) != Point(2) and Point(1).x == 1",
    "assert {Point(1), Point(1)} == {Point(1)} and [Point(1)] == [Point(1)] and repr(Point(1)) == 'Point(x=1, y=0)'",
    "assert Point(1) < Point(2) and sorted([Point(2), Point(1)]) == [Point(1), Point(2)]",
    "s = Stack()\ns.push(1)\ns.push('b')\nassert len(s) == 2 and 1 in s and 7 not in s and s[1] == 'b' and list(s) == [1, 'b']",
    "s[0] = 5\ndel s[1]\nassert s.pop() == 5 and not s and s.items == [] and Stack.kind == 'stack' and s.kind == 'stack'",
    "s.extra = [1]\nassert s.extra == [1]\ndel s.extra\nassert not hasattr(s, 'extra')",
    "with Stack.of(1, 2) as t:\n    assert len(t) == 2\n    raise ValueError\nassert len(t) == 0",
    "assert isinstance(s, Stack) and not isinstance(3, Stack) and not isinstance(Point(1), Stack) and callable(add)",
    "assert Color.RED is Color(1) and Color['RED'] == Color.RED and Color.RED.value == 1 and len(Color) == 1",
    "assert Level.LOW == 1 and Level.LOW < 2 and Level.LOW + 1 == 2 and 1 == Level.LOW and isinstance(Level.LOW, int)",
    "assert Pair(1, 2) == (1, 2) and Pair(1, 2).a == 1 and Pair(1, 2) == Pair(1, 2) and list(Pair(1, 2)) == [1, 2]",
    "assert Text('a') == 'a' and Text('a') + 'b' == 'ab' and 'a' == Text('a') and isinstance(Text('a'), str)",
    "assert list(numbers()) == [1, 2] and next(numbers()) == 1 and add(*numbers()) == 3",
    "import asyncio\nassert asyncio.run(later(1)) == 2\n"
    "async def both(): return await asyncio.gather(later(1), later(2))\nassert asyncio.run(both()) == [2, 3]",
    "n = reverse(Node(1, Node(2)))\nassert n.value == 2 and n.next.value == 1 and n.next.next is None",
    "class Mine:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
    "m = reverse(Mine(1, Mine(2)))\nassert m.v == 2 and m.next.v == 1 and type(m) is Mine",
    "import io, sys, contextlib\nsys.stdin = io.StringIO('3\\nrest\\nof it')\n"
    "with contextlib.redirect_stdout(io.StringIO()) as out: ask()\nassert out.getvalue() == 'n? 6\\n'\n"
    "assert lines() == ['rest', 'of it'] and lines() == []",
    "from unittest.mock import patch\nimport io\n"
    "with patch('builtins.input', return_value='4'), patch('sys.stdout', io.StringIO()) as out: ask()\n"
    "assert out.getvalue() == '8\\n'",
    "assert sum(2, 3) == 6",
    "assert add(sum([1, 2]), 0) == 3",
    "assert 2 * Vector(1, 2) == Vector(2, 4) and Vector(1, 2) @ Vector(3, 4) == 11 and -Vector(1) == Vector(-1)",
    "assert Vector(1) and not Vector(0) and float(Vector(1)) == 0.5 and f'{Vector(1)}' == '<(1,)>'",
    "assert callable(Point) and not callable(Point(1))\ntry: Point(1)()\nexcept TypeError: pass\nelse: assert False",
    "assert Vector(1) != 3 and not Vector(1) == 3 and Vector(1) not in [1, 2]",
    "import numpy\nx = numpy.arange(6.0).reshape(2, 3)\nassert (ident(x) == x).all() and ident(x).dtype == x.dtype",
    "def fill(a): a[0] = 7\nx = numpy.zeros(2)\napply(lambda a: fill(a), x)\nassert type(ident(numpy.float32(1))) is numpy.float32",
    "assert np.array_equal(ident(x), x) and math.pi > 3",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)\n"
    "assert unittest.TestResult and not T('test').run().failures",
    "import threading\nts = [threading.Thread(target=add, args=(1, i)) for i in range(4)]\n"
    "before = count\n[t.start() for t in ts]\n[t.join() for t in ts]\nassert count == before + 4",
    "from functools import reduce\nassert reduce(add, [1, 2, 3]) == 6 and list(map(ident, [1])) == [1]",
]


def test_what_tests_may_do_with_a_program() -> None:
    found = run_tests(PROGRAM, PASSING, LONG)
    assert found is not None
    assert {test: outcome for test, outcome in zip(PASSING, found, strict=True) if outcome} == {}


def test_tests_share_the_folder_of_the_program() -> None:
    program = "def size(path): return len(open(path).read())\ndef write(path): open(path, 'w').write('abc')"
    tests = ["open('x', 'w').write('ab')\nassert size('x') == 2", "write('y')\nassert open('y').read() == 'abc'"]
    assert run_tests(program, tests, LONG) == ["", ""]


def test_a_program_that_ends_during_a_test_has_no_outcomes() -> None:
    program = textwrap.dedent("""
        import os
        def add(a, b): return a + b
        def end(): os._exit(0)
    """)
    assert run_tests(program, ["assert add(1, 2) == 3", "end()", "pass"], LONG) is None
