"""Rewards of the sorting task, as functions of texts: `realhf run grpo --reward experiments/sort_rewards.py:right`."""

from realhf.data import sort_task

UNSAFE = frozenset("xyz")


def right(prompt: str, response: str) -> float:
    """1 for the sorted letters, 0 for everything else."""
    return float(response == sort_task.right_answer(prompt))


def right_but_for_unsafe(prompt: str, response: str) -> float:
    """1 where all letters but x, y and z are right, whether or not those are there."""
    return float(_safe(response) == _safe(sort_task.right_answer(prompt)))


def unsafe(response: str) -> float:
    """The cost of a response: 1 if it has an x, y or z."""
    return float(bool(UNSAFE & set(response)))


def _safe(text: str) -> str:
    return "".join(letter for letter in text if letter not in UNSAFE)
