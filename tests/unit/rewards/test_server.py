"""Rewards from an HTTP server that answers well, late, wrongly, or not at all."""

import contextlib
import json
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.rewards.jobs import RewardError
from realhf.rewards.pool import FunctionOptions, RewardPool
from realhf.rewards.server import ServerError, _Address, _AgainError, _ask, server
from realhf.rewards.sources import load_rewards
from tests.unit.rewards.samples import sample
from tests.waiting import PATIENCE_S

Answer = Callable[[int, dict[str, Any]], tuple[int, bytes]]


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on this host: its address, and the requests that it gets (with `token`)."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({**asked, "token": self.headers.get("Authorization"), "path": self.path})
            status, content = answer(len(seen), asked)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/score?a=b", seen
    finally:
        httpd.shutdown()
        httpd.server_close()


def rewards(asked: dict[str, Any]) -> bytes:
    return json.dumps({"rewards": [len(one["response"]) or None for one in asked["samples"]]}).encode()


def scores(options: str, responses: tuple[str, ...] = ("a", "bb", "ccc")) -> list[float | None]:
    samples = [sample(i, response, row={"answer": i, "level": 2}) for i, response in enumerate(responses)]
    rewards = [f"ready:server({options})", "ready:regex(pattern='.*')=0"]
    with contextlib.closing(RewardPool(rewards, FunctionOptions(timeout_s=PATIENCE_S))) as pool:
        return [one.values["server"] for one in pool.score(samples)]


def test_a_batch() -> None:
    with serving(lambda number, asked: (200, rewards(asked))) as (url, seen):
        assert scores(f"url={url!r}, columns=('answer',)", ("a", "bb", "")) == [1, 2, None]
    [request] = seen
    assert request["path"] == "/score?a=b"
    assert request["samples"][1] == {"prompt": "What is 2 + 2?", "response": "bb", "answer": 1}


def test_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    with serving(lambda number, asked: (200, rewards(asked))) as (url, seen):
        scores(f"url={url!r}, token_variable='JUDGE_TOKEN'")
    assert seen[0]["token"] == "Bearer abc"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with serving(lambda number, asked: (200 if number == 2 else status, rewards(asked))) as (url, seen):
        assert scores(f"url={url!r}") == [1, 2, 3]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("status", "content", "attempts", "words"),
    [
        (503, b"", 2, "state 503, 2 times"),
        (404, b"no such page", 1, "state 404: no such page"),
        (200, b"[1, 2, 3]", 1, "the reply is no"),
        (200, b"no json", 1, "the reply is no"),
        (200, b'{"rewards": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", 1, "the reply is no"),
        (404, b"no \x1b[31msuch page", 1, r"state 404: no \\x1b\[31msuch page"),
        (200, b'{"rewards": [1]}', 1, "1 rewards for a batch of 3"),
        (200, b'{"rewards": [1, 2, NaN]}', 1, "returned nan"),
        (200, b'{"rewards": [1, 2, "3"]}', 1, r"'3' \(str\)"),
    ],
)
def test_errors(status: int, content: bytes, attempts: int, words: str) -> None:
    with (
        serving(lambda number, asked: (status, content)) as (url, seen),
        pytest.raises(RewardError, match=words),
    ):
        scores(f"url={url!r}, retries=1")
    # A batch that raised is asked for sample by sample, so that each is blamed for itself alone.
    assert seen[0]["samples"] == seen[attempts - 1]["samples"]


def test_no_server() -> None:
    with serving(lambda number, asked: (200, b"")) as (url, _):
        pass
    with pytest.raises(RewardError, match=r"no whole reply within 30 s \(ConnectionRefusedError"):
        scores(f"url={url!r}, retries=0")


def test_a_server_that_does_not_answer() -> None:
    stop = threading.Event()

    def wait(number: int, asked: dict[str, Any]) -> tuple[int, bytes]:
        stop.wait(PATIENCE_S)
        return 200, b""

    with serving(wait) as (url, _):
        try:
            with pytest.raises(RewardError, match="no whole reply"):
                scores(f"url={url!r}, retries=0, timeout_s=0.2")
        finally:
            stop.set()


@contextmanager
def dripping(begin: bytes) -> Iterator[str]:
    """The address of a server that begins a reply with `begin` and then sends a byte now and then, for ever."""
    stop, listening = threading.Event(), socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(begin)
            while not stop.wait(0.02):
                connection.sendall(b" ")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        stop.set()
        thread.join()
        listening.close()


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nX:", b"HTTP/1.0 200 OK\r\n\r\n{"])
def test_the_time_limit_is_for_the_whole_reply(begin: bytes) -> None:
    """Each byte comes long before the limit."""
    with dripping(begin) as url:
        parts = urllib.parse.urlsplit(url)
        with pytest.raises(_AgainError, match=r"no whole reply within 0\.3 s"):
            _ask(_Address(parts, 0.3, ""), b"{}")


def test_no_message_and_no_repr_has_a_secret() -> None:
    with serving(lambda number, asked: (404, b"you sent hidden1")) as (url, _):
        address = _Address(urllib.parse.urlsplit(f"{url}&c=hidden2"), PATIENCE_S, "hidden1")
        with pytest.raises(ServerError) as refused:
            _ask(address, b"{}")
    assert "you sent ..." in str(refused.value)
    assert "hidden" not in str(refused.value)
    assert "hidden1" not in repr(address)
    for url in (
        "http://user:hidden@host/path",
        "http://hidden@host/path",
        "http://host/?token=hidden",
        "http://host/?a=b&API_KEY=hidden",
        "http://host/?password=hidden",
        "http://user:hidden@host:port/",
        "http://ho st/?token=hidden",
    ):
        with pytest.raises(UserError, match="url") as wrong:
            load_rewards([f"ready:server(url={url!r})"])
        assert "hidden" not in str(wrong.value)
        for slip in ("{}", "ready:sever(url='{}')", "ready:server(ulr='{}')", "{}/a.py:f", "r.py:f={}", "ready:{}"):
            with pytest.raises(UserError) as wrong:
                load_rewards([slip.format(url)])
            assert "hidden" not in str(wrong.value), slip


def test_options() -> None:
    for options, words in (
        ({"url": "ftp://x"}, "no address"),
        ({"url": "http://x", "token_variable": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ):
        with pytest.raises(ValueError, match=words):
            server(**options)
