"""Rewards from a server: batches as JSON over HTTP, with timeouts and retries."""

import asyncio
import functools
import http.client
import json
import os
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from realhf.base.numbers import check_range
from realhf.rewards.signature import Function, asking_for, batch

_MAX_REPLY_BYTES = 64 * 2**20
_MAX_WAIT_S = 30.0
_TOO_MANY = 429
_SHOWN_CHARACTERS = 200


def server(
    url: str,
    *,
    columns: tuple[str, ...] = (),
    timeout_s: float = 30.0,
    retries: int = 3,
    concurrency: int = 16,
    token_variable: str = "",
) -> Function:
    """The rewards that a server gives to a batch of responses.

    The request is a POST of {"samples": [{"prompt": ..., "response": ..., COLUMN: ...}, ...]}; the reply is
    {"rewards": [number or null, ...]}, one a sample. An error of the connection, no reply within `timeout_s`, and the
    states 429 and 5xx are tried again `retries` times, after 0.5, 1, 2, ... seconds (at most 30); other states are
    errors. At most `concurrency` requests are under way at a time. `token_variable` names an environment variable whose
    value goes along as a bearer token.

    Raises (the reward): ServerError.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url!r} is no address; give http://HOST:PORT/PATH or https://...")
    check_range("timeout_s", timeout_s, 0.01, 3600, "s")
    check_range("retries", retries, 0, 100)
    check_range("concurrency", concurrency, 1, 1024)
    token = os.environ.get(token_variable, "") if token_variable else ""
    if token_variable and not token:
        raise ValueError(f"token_variable={token_variable!r}: the environment has no such variable; set it")
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    address = _Address(parts, timeout_s, token)
    threads: list[ThreadPoolExecutor] = []  # made at the first call: the launcher makes the function and calls nothing

    async def reward(prompt: list[str], response: list[str], **row: Any) -> list[Any]:
        if not threads:
            threads.append(ThreadPoolExecutor(concurrency))
        lists = {"prompt": prompt, "response": response, **{name: row[name] for name in names}}
        samples = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        body = json.dumps({"samples": samples}).encode()
        for attempt in range(retries + 1):
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(threads[0], functools.partial(_ask, address, body))
            except _AgainError as error:
                if attempt == retries:
                    raise ServerError(f"{url}: {error}, {retries + 1} times") from None
                await asyncio.sleep(min(_MAX_WAIT_S, 0.5 * 2**attempt))
        raise AssertionError("unreachable")

    return batch(asking_for(reward, "prompt", "response", *names))


class ServerError(Exception):
    """A server gave no rewards."""


class _AgainError(Exception):
    """What another attempt may mend."""


@dataclass(frozen=True)
class _Address:
    url: urllib.parse.SplitResult
    timeout_s: float
    token: str

    @property
    def headers(self) -> Mapping[str, str]:
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {"Content-Type": "application/json", **own}

    def connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        return kind(str(self.url.hostname), self.url.port, timeout=self.timeout_s)


def _ask(address: _Address, body: bytes) -> list[Any]:
    """One attempt, on a thread."""
    target = urllib.parse.urlunsplit(("", "", address.url.path or "/", address.url.query, ""))
    connection = address.connect()
    try:
        connection.request("POST", target, body, dict(address.headers))
        reply = connection.getresponse()
        content = reply.read(_MAX_REPLY_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise _AgainError(f"no reply ({type(error).__name__}: {error})") from None
    finally:
        connection.close()
    if reply.status == _TOO_MANY or reply.status >= 500:
        raise _AgainError(f"state {reply.status}")
    shown = content[:_SHOWN_CHARACTERS].decode(errors="replace")
    if reply.status != 200:
        raise ServerError(f"{address.url.geturl()}: state {reply.status}: {shown}")
    if len(content) > _MAX_REPLY_BYTES:
        raise ServerError(f"{address.url.geturl()}: a reply of more than {_MAX_REPLY_BYTES >> 20} MiB")
    try:
        rewards = json.loads(content)["rewards"]
    except (ValueError, KeyError, TypeError):
        rewards = None
    if not isinstance(rewards, list):
        raise ServerError(f'{address.url.geturl()}: the reply is no {{"rewards": [...]}}: {shown}')
    return rewards
