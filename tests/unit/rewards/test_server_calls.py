"""Rewards from a server: which addresses and options there may be, what is asked and how often, and one attempt."""

import asyncio
import http.client
import json
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.rewards import server as module
from realhf.rewards.server import ServerError, _Address, _AgainError, _ask, server
from realhf.rewards.signature import recognise

# --- addresses and options


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://x", "url='ftp://x' is no address; give http://HOST:PORT/PATH or https://..."),
        ("http://", "url='http://' is no address"),
        ("host/path", "url='host/path' is no address"),
        ("http://x:port", "url='http://x:port' is no address"),
        ("http://x:0", "url='http://x:0' is no address"),
        ("http://x:65536", "url='http://x:65536' is no address"),
        ("http://x/a b", "url='http://x/a b' is no address"),
        ("http://x/ä", "url='http://x/ä' is no address"),
        ("http://x/\x7f", "is no address"),
        ("http:// x?a", "url is no address"),
        ("http://@:x", "url is no address"),
        ("http://user@x", "url names a user or a password"),
        ("http://:word@x", "url names a user or a password"),
        ("http://x/?a=b&my_token=", "url has my_token=... in its query"),
        ("http://x/?sig=1", "url has sig=... in its query"),
    ],
)
def test_addresses_that_are_none_or_have_a_secret(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        server(url)


@pytest.mark.parametrize("url", ["http://x", "https://x:1/y?design=2", "http://[::1]:65535/"])
def test_addresses(url: str) -> None:
    assert callable(server(url))


@pytest.mark.parametrize(
    ("name", "low", "high", "below", "above"),
    [
        ("timeout_s", 0.01, 3600, 0.009, 3600.5),
        ("retries", 0, 100, -1, 101),
        ("concurrency", 1, 1024, 0, 1025),
    ],
)
def test_the_range_of_options(name: str, low: Any, high: Any, below: Any, above: Any) -> None:
    make: Callable[..., Any] = server
    for value in (low, high):
        assert callable(make("http://x", **{name: value}))
    for value in (below, above):
        with pytest.raises(UserError, match=name):
            make("http://x", **{name: value})


@pytest.mark.parametrize("value", [None, ""])
def test_a_token_that_is_not_there(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_TOKEN", value)
    with pytest.raises(ValueError, match=r"^token_variable='JUDGE_TOKEN': the environment has no such variable; set"):
        server("http://x", token_variable="JUDGE_TOKEN")
    assert callable(server("http://x"))


# --- what is asked, and how often


class Asked:
    """The attempts of reward functions, the rests between them, and the threads that there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any):
        self.answers = list(answers)
        self.requests: list[Any] = []
        self.rests: list[float] = []
        self.threads: list[int] = []
        made = self.threads

        class Threads(Executor):
            def __init__(self, count: int):
                made.append(count)

            def submit(self, function: Any, *words: Any) -> Any:  # type: ignore[override]
                done: Future[Any] = Future()
                try:
                    done.set_result(function(*words))
                except Exception as error:
                    done.set_exception(error)
                return done

        monkeypatch.setattr(module, "_ask", self._ask)
        monkeypatch.setattr(module, "ThreadPoolExecutor", Threads)
        self._monkeypatch = monkeypatch

    def _ask(self, address: Any, body: bytes) -> Any:
        self.requests.append((address, json.loads(body)))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _sleep(self, seconds: float) -> None:
        self.rests.append(seconds)

    def call(self, reward: Any, *calls: dict[str, Any]) -> list[Any]:
        async def run() -> list[Any]:
            return [await reward(**one) for one in calls]

        with self._monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", self._sleep)
            return asyncio.run(run())


LISTS: dict[str, list[Any]] = {"prompt": ["p", "q"], "response": ["a", "b"], "answer": [1, 2], "level": [3, 4]}


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ((), ()),
        ("answer", ("answer",)),
        (("answer",), ("answer",)),
        (["level", "answer"], ("level", "answer")),
    ],
)
def test_what_a_server_is_asked(columns: Any, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    asked = Asked(monkeypatch, [1, 2], [3, 4])
    reward = server("http://x/y", columns=columns, timeout_s=7.0, token_variable="JUDGE_TOKEN", concurrency=5)
    signature = recognise(reward, "f")
    assert (signature.is_batch, signature.is_async, signature.required) == (True, True, ("prompt", "response", *names))
    assert asked.threads == []
    assert asked.call(reward, LISTS, LISTS) == [[1, 2], [3, 4]]
    assert asked.threads == [5]
    samples = [{name: LISTS[name][i] for name in ("prompt", "response", *names)} for i in range(2)]
    address = _Address(urllib.parse.urlsplit("http://x/y"), 7.0, "abc")
    assert asked.requests == [(address, {"samples": samples})] * 2


def test_how_long_a_server_is_given_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, *[_AgainError("busy")] * 8, [1, 2])
    assert asked.call(server("http://x/y?z", retries=8), LISTS) == [[1, 2]]
    assert asked.rests == [0.5, 1, 2, 4, 8, 16, 30, 30]
    asked = Asked(monkeypatch, *[_AgainError("busy")] * 4)
    with pytest.raises(ServerError, match=r"^http://x/y: busy, 4 times$"):
        asked.call(server("http://x/y?z"), LISTS)
    assert asked.rests == [0.5, 1, 2]
    assert [one.timeout_s for one, _ in asked.requests] == [30.0] * 4


def test_what_holds_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, [1, 2])
    asked.call(server("http://x"), LISTS)
    assert asked.threads == [16]
    [(address, _)] = asked.requests
    assert address == _Address(urllib.parse.urlsplit("http://x"), 30.0, "")


# --- one attempt


PARTS = urllib.parse.urlsplit("http://x/y/z?a=b#c")


@dataclass
class Connected:
    """An address behind which a reply is ready."""

    status: int = 200
    content: bytes = b'{"rewards": [1]}'
    error: Exception | None = None
    token: str = "hidden"
    url: Any = PARTS
    timeout_s: float = 2.5
    shown: str = "http://x/y/z"

    def __post_init__(self) -> None:
        self.requests: list[Any] = []
        self.reads: list[int] = []
        self.headers = {"A": "b"}

    @contextmanager
    def connected(self) -> Iterator[Any]:
        yield self

    def request(self, *words: Any) -> None:
        if self.error is not None:
            raise self.error
        self.requests.append(words)

    def getresponse(self) -> Any:
        return self

    def read(self, size: int) -> bytes:
        self.reads.append(size)
        return self.content[:size]


@pytest.mark.parametrize(
    ("url", "target"), [("http://x/y/z?a=b#c", "/y/z?a=b"), ("http://x", "/"), ("http://x?a=b", "/?a=b")]
)
def test_a_request(url: str, target: str) -> None:
    address: Any = Connected(url=urllib.parse.urlsplit(url))
    assert _ask(address, b"{}") == [1]
    assert address.requests == [("POST", target, b"{}", {"A": "b"})]


AGAIN: list[tuple[Connected, str]] = [
    (Connected(429), "state 429"),
    (Connected(500), "state 500"),
    (Connected(599), "state 599"),
    (Connected(error=OSError("gone")), "no whole reply within 2.5 s (OSError: gone)"),
    (Connected(error=http.client.BadStatusLine("x")), "no whole reply within 2.5 s (BadStatusLine: x)"),
]
WRONG: list[tuple[Connected, str]] = [
    (Connected(499, b"no"), "http://x/y/z: state 499: no"),
    (Connected(201, b"no"), "http://x/y/z: state 201: no"),
    (Connected(428, b"is hidden"), "http://x/y/z: state 428: is ..."),
    (Connected(404, b"is hidden", token=""), "http://x/y/z: state 404: is hidden"),
    (Connected(404, b"x" * 201), "http://x/y/z: state 404: " + "x" * 200),
    (Connected(404, b"\xff"), "http://x/y/z: state 404: \ufffd"),
    (Connected(content=b'{"rewards": 1}'), 'http://x/y/z: the reply is no {"rewards": [...]}: {"rewards": 1}'),
    (Connected(content=b"{}"), 'http://x/y/z: the reply is no {"rewards": [...]}: {}'),
    (Connected(content=b"[1]"), 'http://x/y/z: the reply is no {"rewards": [...]}: [1]'),
]


@pytest.mark.parametrize(("address", "words"), AGAIN, ids=[words for _, words in AGAIN])
def test_what_another_attempt_may_mend(address: Any, words: str) -> None:
    with pytest.raises(_AgainError) as caught:
        _ask(address, b"{}")
    assert str(caught.value) == words


@pytest.mark.parametrize(("address", "words"), WRONG, ids=[words[:50] for _, words in WRONG])
def test_what_no_attempt_mends(address: Any, words: str) -> None:
    with pytest.raises(ServerError) as caught:
        _ask(address, b"{}")
    assert str(caught.value) == words


def test_how_long_a_reply_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._MAX_REPLY_BYTES == 64 * 2**20
    monkeypatch.setattr(module, "_MAX_REPLY_BYTES", 2**20)
    content = b'{"rewards": [1]' + b" " * (2**20 - 16) + b"}"
    address: Any = Connected(content=content)
    assert _ask(address, b"{}") == [1]
    assert address.reads == [2**20 + 1]  # one more tells that it is too long
    address = Connected(content=content + b" ")
    with pytest.raises(ServerError, match=r"^http://x/y/z: a reply of more than 1 MiB$"):
        _ask(address, b"{}")


@pytest.mark.parametrize(("token", "expected"), [("", {}), ("abc", {"Authorization": "Bearer abc"})])
def test_headers_and_what_is_shown_of_an_address(token: str, expected: dict[str, str]) -> None:
    address = _Address(urllib.parse.urlsplit("https://x:81/y?a=b#c"), 1.0, token)
    assert address.headers == {"Content-Type": "application/json", **expected}
    assert address.shown == "https://x:81/y"


class Line:
    """Of a connection: what it was made for, and what became of it."""

    def __init__(self, *words: Any, **options: Any):
        self.words, self.options, self.calls = words, options, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **options: Any) -> Any:
            self.calls.append((name, *words, *options.items()))
            return Line(name, *words, **options)

        return call


@pytest.mark.parametrize(
    ("url", "host", "port", "is_safe"),
    [
        ("http://x", "x", 80, False),
        ("https://x", "x", 443, True),
        ("https://x:80", "x", 80, True),
        ("http://[::1]:443", "::1", 443, False),
    ],
)
def test_a_connection(url: str, host: str, port: int, is_safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds from the start on, for the handshake too, and ends with the connection."""
    lines: dict[str, Line] = {}
    times = [100.0, 100.5]

    def note(name: str) -> Callable[..., Line]:
        return lambda *words, **options: lines.setdefault(name, Line(*words, **options))

    monkeypatch.setattr(module.time, "monotonic", lambda: times.pop(0) if len(times) > 1 else times[0])
    monkeypatch.setattr(socket, "create_connection", note("raw"))
    monkeypatch.setattr(threading, "Timer", note("limit"))
    monkeypatch.setattr(http.client, "HTTPConnection", note("connection"))
    monkeypatch.setattr(ssl, "create_default_context", note("context"))
    with _Address(urllib.parse.urlsplit(url), 2.0, "").connected() as used:
        connection: Any = used
        raw, limit = lines["raw"], lines["limit"]
        assert connection is lines["connection"]
        assert (raw.words, raw.options) == (((host, port),), {"timeout": 2.0})
        seconds, function, (broken, is_over) = limit.words
        assert (seconds, function, broken) == (1.5, module._break, raw)
        assert not is_over.is_set()
        assert vars(limit)["daemon"] is True
        assert limit.calls == [("start",)]
        assert connection.words == (host, port)
        assert raw.calls == [("dup",)]
        if is_safe:
            [(what, wrapped, name)] = lines["context"].calls
            assert (what, wrapped.words, name) == ("wrap_socket", ("dup",), ("server_hostname", host))
            assert connection.sock.words[:1] == ("wrap_socket",)
        else:
            assert connection.sock.words == ("dup",)
    assert limit.calls == [("start",), ("cancel",)]
    assert connection.calls == [("close",)]
    assert raw.calls == [("dup",), ("close",)]
    assert ("context" in lines) == is_safe


def test_a_limit_that_is_over_before_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Line] = []
    times = [100.0, 105.0]

    def note(*words: Any, **options: Any) -> Line:
        lines.append(Line(*words, **options))
        return lines[-1]

    monkeypatch.setattr(module.time, "monotonic", lambda: times.pop(0))
    for owner, name in ((socket, "create_connection"), (threading, "Timer"), (http.client, "HTTPConnection")):
        monkeypatch.setattr(owner, name, note)
    used = _Address(urllib.parse.urlsplit("http://x"), 2.0, "").connected()
    used.__enter__()
    seconds, function, words = lines[1].words
    assert seconds == 0.0
    function(*words)
    with pytest.raises(TimeoutError, match=r"^it had begun, and did not end$"):
        used.__exit__(None, None, None)
    assert lines[0].calls == [("dup",), ("shutdown", socket.SHUT_RDWR), ("close",)]


def test_a_connection_that_is_closed_is_broken_off_already() -> None:
    one, other = socket.socketpair()
    other.close()
    one.close()
    is_over = threading.Event()
    module._break(one, is_over)
    assert is_over.is_set()
