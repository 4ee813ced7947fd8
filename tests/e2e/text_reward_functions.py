"""Rewards of `text_reward_job.py`."""

import asyncio
import itertools


def in_order(prompt: str, response: str) -> float:
    """The share of neighbouring letters that are in order."""
    letters = response.split()
    pairs = list(itertools.pairwise(letters))
    return sum(a <= b for a, b in pairs) / max(1, len(pairs))


def long(response: str, response_length: int) -> float:
    return response_length / 10


async def judged(prompt: str, response: str) -> float:
    await asyncio.sleep(0)
    print("judging", prompt)
    return len(set(response)) / 100


def broken(response: str, response_length: int) -> float:
    if response_length % 2:
        raise ValueError("odd")
    return 1.0


def asks_for_more(response: str, solution: str) -> float: ...
