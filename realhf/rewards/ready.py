"""Ready reward functions: each entry of `READY` makes one from its options (`ready:exact_match(column="answer")`)."""

import importlib.util
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from realhf.base.errors import UserError
from realhf.rewards.numbers_in_text import answer_number
from realhf.rewards.reasoning import reasoning_gym
from realhf.rewards.server import server
from realhf.rewards.signature import Function, asking_for
from realhf.rewards.unit_tests import unit_tests


def exact_match(
    column: str = "answer", *, strip: bool = True, collapse_spaces: bool = False, ignore_case: bool = False
) -> Function:
    """1 if the response is the text of `column`, else 0.

    strip: white space at both ends does not count. collapse_spaces: nor does its amount elsewhere.
    """

    def normal(text: str) -> str:
        text = " ".join(text.split()) if collapse_spaces else text
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    def reward(response: str, **row: Any) -> float:
        return float(normal(response) == normal(str(row[column])))

    return asking_for(reward, "response", column)


def numeric(column: str = "answer", *, tolerance: float = 1e-6) -> Function:
    """1 if the number that the response gives as its answer is that of `column` (see `answer_number`), else 0.

    tolerance: the largest difference, as a part of the right number where that is above 1.

    Raises (the reward): ValueError if `column` has no number.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance={tolerance} must be finite and at least 0")

    def reward(response: str, **row: Any) -> float:
        value = row[column]
        right = float(value) if isinstance(value, int | float) else answer_number(str(value))
        if right is None:
            raise ValueError(f"column {column!r} has no number: {value!r}")
        given = answer_number(response)
        return float(given is not None and abs(given - right) <= tolerance * max(1.0, abs(right)))

    return asking_for(reward, "response", column)


def regex(pattern: str, *, whole: bool = True) -> Function:
    """1 if the pattern matches the response, else 0. whole: all of it, or any part; `(?s)` lets `.` match line ends."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from None

    def reward(response: str) -> float:
        return float((compiled.fullmatch if whole else compiled.search)(response) is not None)

    return reward


def math_verify(column: str = "answer") -> Function:
    """1 if the mathematics of the response equals that of `column` by the library math-verify, else 0.

    Raises (the reward): ValueError if `column` has none.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise UserError('ready:math_verify needs the library math-verify; install it: pip install "realhf[math]"')

    def reward(response: str, **row: Any) -> float:
        from math_verify import parse, verify  # a second to import, and the launcher needs none of it

        # The library warns at each call that its own time limits are off. The reward processes have limits, and report
        # them.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        value = str(row[column])
        right = parse(value if "$" in value or "\\boxed" in value else f"${value}$", parsing_timeout=None)
        if not right:
            raise ValueError(f"column {column!r} has no mathematics: {value!r}")
        return float(verify(right, parse(response, parsing_timeout=None), timeout_seconds=None))

    return asking_for(reward, "response", column)


def overlong(max_tokens: int, cache_tokens: int) -> Function:
    """DAPO's punishment of long responses, see `soft_overlong_punishment`."""
    soft_overlong_punishment(max_tokens, max_tokens, cache_tokens)  # which looks at the two

    def reward(response: str, response_length: int) -> float:
        return soft_overlong_punishment(response_length, max_tokens, cache_tokens)

    return reward


def soft_overlong_punishment(length: int, max_tokens: int, cache_tokens: int) -> float:
    """From 0 to -1: 0 up to `max_tokens - cache_tokens` tokens, falling in a line to -1 at `max_tokens`, -1 beyond
    (DAPO, arXiv:2503.14476, equation 13).

    Raises:
        ValueError: not 0 < cache_tokens <= max_tokens.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"cache_tokens={cache_tokens} must be from 1 to max_tokens={max_tokens}")
    return min(0.0, max(-1.0, (max_tokens - cache_tokens - length) / cache_tokens))


READY: Mapping[str, Callable[..., Function]] = {
    maker.__name__: maker
    for maker in (exact_match, numeric, regex, math_verify, unit_tests, reasoning_gym, server, overlong)
}
