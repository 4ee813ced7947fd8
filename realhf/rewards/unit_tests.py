"""The reward of a program that a model has written: its unit tests, in a sandbox."""

import contextlib
import json
import logging
import re
from functools import cache
from typing import Any

from realhf.rewards.confined import missing_protections
from realhf.rewards.sandbox import Limits, run_tests
from realhf.rewards.signature import Function, asking_for

logger = logging.getLogger("realhf.rewards")

_BLOCK = re.compile(r"```[ \t]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)```", re.DOTALL)


def unit_tests(
    column: str = "tests",
    *,
    before: str = "",
    share: bool = False,
    timeout_s: float = 10.0,
    memory_mb: int = 1024,
    files_mb: int = 16,
) -> Function:
    """1 if the program in the response passes all tests of `column`, else 0; with `share` the share of tests passed.

    The program is the last block of Python in the response (```python), the last block without a language, or else the
    whole response. The column has Python code (`assert add(1, 2) == 3`): a text, a list of texts, or such a list as
    JSON; each is one test. Program and tests run in a sandbox: without a network, without other processes, and with
    limits on time, memory and files, see `realhf.rewards.sandbox`. The tests run in a process that never executes code
    of the program.

    before: a column of code that the program follows, such as imports and the head of a function with its docstring. A
        response without a block whose first line is indented goes on with it, up to its first line that is not.

    Raises (the reward): ValueError if the column has no tests.
    """
    limits = Limits(time_s=timeout_s, memory_mb=memory_mb, files_mb=files_mb)

    def reward(response: str, **row: Any) -> float:
        _warn_of_missing_protections()
        tests = listed_tests(row[column])
        if not tests:
            raise ValueError(f"column {column!r} has no tests: {row[column]!r}")
        program = f"{row[before]}{continuation_of(response)}" if before else program_of(response)
        outcomes = run_tests(program, tests, limits)
        passed = 0 if outcomes is None else outcomes.count("")
        return passed / len(tests) if share else float(passed == len(tests))

    return asking_for(reward, "response", column, *([before] if before else []))


def program_of(response: str) -> str:
    """The program in a response, see `unit_tests`."""
    blocks = [(found["language"].lower(), found["code"]) for found in _BLOCK.finditer(response)]
    for wanted in (("python", "py", "python3"), ("",)):
        if codes := [code for language, code in blocks if language in wanted]:
            return codes[-1]
    return response


def continuation_of(response: str) -> str:
    """The part of a response that goes on with code before it, see `unit_tests`."""
    program = program_of(response)
    if program != response or not response[:1].isspace():
        return f"\n{program}"
    lines = response.splitlines(keepends=True)
    end = next((place for place, line in enumerate(lines) if not line[0].isspace()), len(lines))
    return "".join(lines[:end])


def listed_tests(value: Any) -> list[str]:
    """The tests of a column's value, see `unit_tests`."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # it is a test that begins with a list
            value = json.loads(value)
    tests = value if isinstance(value, list) else [value]
    return [test for test in tests if isinstance(test, str) and test.strip()]


@cache
def _warn_of_missing_protections() -> None:
    for lack in missing_protections():
        logger.warning("unit tests: %s", lack)
