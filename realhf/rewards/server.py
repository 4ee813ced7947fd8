"""Rewards from a server: batches as JSON over HTTP, with timeouts and retries."""

import asyncio
import functools
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from realhf.base.files import BadContentError, decode_loose_json
from realhf.base.numbers import check_range
from realhf.base.shown import visible
from realhf.rewards.signature import Function, asking_for, batch

_MAX_REPLY_BYTES = 64 * 2**20
_MAX_WAIT_S = 30.0
_TOO_MANY = 429
_SHOWN_CHARACTERS = 200
_SECRET_NAMES = re.compile(r"token|key|secret|passw|auth|credential|signature|^sig$", re.IGNORECASE)


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
    {"rewards": [number or null, ...]}, one a sample. An error of the connection, no whole reply within `timeout_s`, and
    the states 429 and 5xx are tried again `retries` times, after 0.5, 1, 2, ... seconds (at most 30); other states are
    errors. At most `concurrency` requests are under way at a time. `token_variable` names an environment variable whose
    value goes along as a bearer token. The address has no secret: it stands in the run's files and in messages.

    Raises (the reward): ServerError.
    """
    parts = _checked(url)
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
        attempt = 0
        while True:
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(threads[0], functools.partial(_ask, address, body))
            except _AgainError as error:
                if attempt == retries:
                    raise ServerError(f"{address.shown}: {error}, {retries + 1} times") from None
                await asyncio.sleep(min(_MAX_WAIT_S, 0.5 * 2**attempt))
                attempt += 1

    return batch(asking_for(reward, "prompt", "response", *names))


def _checked(url: str) -> urllib.parse.SplitResult:
    """The parts of an address. Raises ValueError, whose text has no part of a secret."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        parts, is_address = urllib.parse.SplitResult("", "", "", "", ""), False
    if not is_address or not url.isascii() or not url.isprintable() or " " in url:
        shown = "" if "@" in url or "?" in url else f"={url!r}"
        raise ValueError(f"url{shown} is no address; give http://HOST:PORT/PATH or https://...")
    remedy = "put it into an environment variable and name that one with token_variable"
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"url names a user or a password, which the run's files would show; {remedy}")
    for name, _ in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
        if _SECRET_NAMES.search(name):
            raise ValueError(f"url has {name}=... in its query, a secret that the run's files would show; {remedy}")
    return parts


class ServerError(Exception):
    """A server gave no rewards."""


class _AgainError(Exception):
    """A failure that another attempt may not have."""


@dataclass(frozen=True)
class _Address:
    url: urllib.parse.SplitResult
    timeout_s: float
    token: str = field(repr=False)

    @property
    def headers(self) -> Mapping[str, str]:
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {"Content-Type": "application/json", **own}

    @property
    def shown(self) -> str:
        """For messages: without the query."""
        return urllib.parse.urlunsplit((self.url.scheme, self.url.netloc, self.url.path, "", ""))

    @contextmanager
    def connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection that breaks after `timeout_s`, however often something comes through it: a socket's own limit is
        for each piece."""
        deadline_s = time.monotonic() + self.timeout_s
        is_safe = self.url.scheme == "https"
        host, port = str(self.url.hostname), self.url.port or (443 if is_safe else 80)
        raw = socket.create_connection((host, port), timeout=self.timeout_s)
        is_over = threading.Event()
        limit = threading.Timer(max(0.0, deadline_s - time.monotonic()), _break, (raw, is_over))
        limit.daemon = True
        limit.start()
        connection = http.client.HTTPConnection(host, port)
        try:
            if is_safe:  # the handshake is within the limit, too
                context = ssl.create_default_context()
                handshaken = context.wrap_socket(raw.dup(), server_hostname=host)
                connection.sock = handshaken
            else:
                connection.sock = raw.dup()
            yield connection
            if is_over.is_set():  # a broken connection looks like the end of a reply without a length
                raise TimeoutError("it had begun, and did not end")
        finally:
            limit.cancel()
            connection.close()
            raw.close()


def _break(connection: socket.socket, is_over: threading.Event) -> None:
    is_over.set()
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def _ask(address: _Address, body: bytes) -> list[Any]:
    """One attempt, on a thread."""
    target = urllib.parse.urlunsplit(("", "", address.url.path or "/", address.url.query, ""))
    try:
        with address.connected() as connection:
            connection.request("POST", target, body, dict(address.headers))
            reply = connection.getresponse()
            content = reply.read(_MAX_REPLY_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise _AgainError(f"no whole reply within {address.timeout_s:g} s ({type(error).__name__}: {error})") from None
    if reply.status == _TOO_MANY or reply.status >= 500:
        raise _AgainError(f"state {reply.status}")
    shown = visible(content[:_SHOWN_CHARACTERS].decode(errors="replace"))
    if address.token:
        shown = shown.replace(address.token, "...")
    if reply.status != 200:
        raise ServerError(f"{address.shown}: state {reply.status}: {shown}")
    if len(content) > _MAX_REPLY_BYTES:
        raise ServerError(f"{address.shown}: a reply of more than {_MAX_REPLY_BYTES >> 20} MiB")
    try:
        rewards = decode_loose_json(content)["rewards"]
    except (BadContentError, KeyError, TypeError):
        rewards = None
    if not isinstance(rewards, list):
        raise ServerError(f'{address.shown}: the reply is no {{"rewards": [...]}}: {shown}')
    return rewards
