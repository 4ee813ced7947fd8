"""Rewards of `real_tasks.py`: which answers in words are right, in whatever sentence they stand."""

import re


def last_name(response: str, prompt: str, answer: str) -> float:
    """1 if the last name that a response has is the right one; names are the words that begin a statement."""
    names = set(re.findall(r"(?:\n|\. )([\w'-]+)", f"\n{prompt}"))
    found = [word for word in re.findall(r"[\w'-]+", response) if word in names]
    return float(found[-1:] == [answer])
