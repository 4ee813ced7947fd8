"""Reward functions that do something wrong with the response "x", and some that do not."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOREVER_S = 1e6


def fine(response: str) -> float:
    return float(ord(response))


def of_tokens(response: str, response_ids: list[int]) -> list[float]:
    return [float(token) for token in response_ids][: -1 if response == "x" else None]


def raises(response: str) -> float:
    if response == "x":
        raise ValueError("no x please")
    return 1


def hangs(response: str) -> float:
    if response == "x":
        time.sleep(FOREVER_S)
    return 1


def ends(response: str) -> float:
    if response == "x":
        os._exit(3)
    return 1


def is_killed(response: str) -> float:
    if response == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1


def exits(response: str) -> float:
    if response == "x":
        sys.exit("done")
    return 1


def not_finite(response: str) -> float:
    return float("nan") if response == "x" else 1


def no_number(response: str) -> Any:
    return "good" if response == "x" else 1


def without(response: str) -> float | None:
    return None if response == "x" else 1


def batch_raises(completions: list[str], **kwargs: Any) -> list[float]:
    if "x" in completions:
        raise KeyError("x")
    return [1.0] * len(completions)


def batch_hangs(completions: list[str], **kwargs: Any) -> list[float]:
    if "x" in completions:
        time.sleep(FOREVER_S)
    return [1.0] * len(completions)


def batch_ends(completions: list[str], **kwargs: Any) -> list[float]:
    if "x" in completions:
        os._exit(3)
    return [1.0] * len(completions)


def batch_not_finite(completions: list[str], **kwargs: Any) -> list[float]:
    return [float("inf") if response == "x" else 1.0 for response in completions]


def too_few(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


async def async_raises(response: str) -> float:
    await asyncio.sleep(0)
    return raises(response)


async def async_hangs(response: str) -> float:
    if response == "x":
        await asyncio.sleep(FOREVER_S)
    return 1


async def async_blocks(response: str) -> float:
    await asyncio.sleep(0)
    return hangs(response)


async def async_ends(response: str) -> float:
    await asyncio.sleep(0)
    return ends(response)


async def async_batch_raises(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return batch_raises(completions)


async def never_cancelled(response: str) -> float:
    while response == "x":
        try:
            await asyncio.sleep(FOREVER_S)
        except asyncio.CancelledError:
            continue
    return 1


def holds_everything(response: str) -> float:
    """A call that lets no other thread of its process run."""
    if response == "x":
        pow(3, 10**9)
    return 1


def prints(response: str) -> float:
    print(f"scoring {response}")
    print(f"warning of {response}", file=sys.stderr)
    os.write(1, b"written below Python\n")
    assert sys.stdin.read() == ""
    return 1


def floods(response: str) -> float:
    for _ in range(40):
        os.write(1, b"x" * 2**20)
    return 1


def rows(response: str, number: int, nested: dict[str, Any], large: int) -> float:
    assert large == 10**40
    assert nested == {"a": [1, None, -(10**30)]}
    return number


_together = 0


async def meets(response: str, all: int) -> float:
    """Goes on when all calls are under way."""
    global _together
    _together += 1
    while _together < all:
        await asyncio.sleep(0.001)
    return 1


_inside = 0


async def alone(response: str) -> float:
    """How many calls are under way."""
    global _inside
    _inside += 1
    await asyncio.sleep(0.01)
    count = _inside
    await asyncio.sleep(0.01)
    _inside -= 1
    return count


def is_main_thread(response: str) -> float:
    return threading.current_thread() is threading.main_thread()


def waits_in(response: str, folder: str) -> float:
    """Says that it has come, and waits until the file `go` is there."""
    path = Path(folder)
    (path / f"pid-{os.getpid()}").touch()
    while not (path / "go").exists():
        time.sleep(0.01)
    return 1


def holds_in(response: str, folder: str) -> float:
    """Says that it has come, and lets no other thread run."""
    (Path(folder) / f"pid-{os.getpid()}").touch()
    pow(3, 10**9)
    return 1


def child_process(response: str, folder: str) -> float:
    """Leaves a child behind, and waits for ever."""
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    (Path(folder) / f"child-{child.pid}").touch()
    time.sleep(FOREVER_S)
    return 1


def environment(response: str) -> float:
    return float(os.environ["CUDA_VISIBLE_DEVICES"] == "")
