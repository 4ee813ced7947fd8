"""A worker's connection to the master: a thread serves the network, so heartbeats flow while the worker computes."""

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import zmq

from realhf.transport.clock import ListeningClock
from realhf.transport.codec import Codec, UndecodableError
from realhf.transport.keys import WorkerKeys

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

_ENVELOPE_BYTES = 256


@dataclass(frozen=True)
class Silence:
    """Limits on the silence of the master, before and after its first message, and the function to call when one is
    passed. The function gets the seconds of silence, and whether the master was ever heard. Time in which this process
    did not run does not count."""

    first_s: float
    later_s: float
    call: Callable[[float, bool], object]


class Client(Generic[Incoming, Outgoing]):
    """One connection to the master; `send` and `receive` may be called from any thread.

    Every `heartbeat_s` the network thread calls `heartbeat`, which must be quick, and sends its result. That thread
    passes each message to `urgent` first, so that some are handled while the main thread computes; if `urgent` returns
    True, `receive` does not return the message. A broken connection is restored automatically; messages that were
    under way may be lost.
    """

    def __init__(
        self,
        address: str,
        keys: WorkerKeys,
        *,
        incoming: Codec[Incoming],
        outgoing: Codec[Outgoing],
        heartbeat: Callable[[], Outgoing],
        heartbeat_s: float = 1.0,
        urgent: Callable[[Incoming], bool] = lambda _: False,
    ) -> None:
        self.num_dropped = 0
        self.address = address
        self._incoming = incoming
        self._outgoing = outgoing
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._urgent = urgent
        self._ended: _Ended | None = None
        self._tell_end: Callable[[BaseException | None], object] = lambda _: None
        self._silence: Silence | None = None
        self._clock = ListeningClock(heartbeat_s)
        self._heard_s: float | None = None
        self._outbox: deque[bytes] = deque()
        self._inbox: queue.SimpleQueue[Incoming | _Ended] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._context = zmq.Context()
        self._context.set(zmq.BLOCKY, False)  # a process that ends without `close` must not hang
        self._socket = self._connect(keys)
        self._thread = threading.Thread(target=self._serve, name="transport", daemon=True)
        self._thread.start()

    def _connect(self, keys: WorkerKeys) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = keys.master
        socket.curve_publickey = keys.own.public
        socket.curve_secretkey = keys.own.secret
        socket.setsockopt(zmq.MAXMSGSIZE, self._incoming.max_bytes + _ENVELOPE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)  # the thread never waits in a send
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if "[" in self.address:
            socket.setsockopt(zmq.IPV6, 1)
        socket.connect(self.address)
        return socket

    def send(self, message: Outgoing) -> None:
        """Queues `message`. Raises ValueError if it is over the size limit."""
        data = self._outgoing.encode(message)
        if self._closing.is_set():
            raise RuntimeError(f"the connection to {self.address} was closed")
        self._outbox.append(data)
        self._wake()

    def receive(self, timeout_s: float) -> Incoming | None:
        """The next message of the master, or None after `timeout_s` without one.

        Raises RuntimeError if the connection was closed or its thread failed.
        """
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, _Ended):
            self._inbox.put(message)  # for the next call
            raise RuntimeError(f"the connection to {self.address} has ended") from message.cause
        return message

    def watch(self, silence: Silence) -> None:
        """From now on the network thread watches for silence of the master."""
        self._silence = silence

    def when_ended(self, tell: Callable[[BaseException | None], object]) -> None:
        """The network thread calls `tell` when it ends, at least once: with its error, or None after `close`."""
        self._tell_end = tell
        if self._ended is not None:
            tell(self._ended.cause)

    def close(self, *, flush_s: float = 10.0) -> None:
        """Ends the connection, after sending queued messages for at most `flush_s` seconds."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join()
        self._socket.close(linger=int(1000 * flush_s))
        self._context.term()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_writer, b"\0")

    def _serve(self) -> None:
        cause: BaseException | None = None
        try:
            self._exchange()
        except BaseException as error:  # the main thread must learn of it: it waits for messages
            cause = error
        finally:
            self._ended = _Ended(cause)
            self._inbox.put(self._ended)
            self._tell_end(cause)

    def _exchange(self) -> None:
        socket = self._socket
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        next_beat_s = time.monotonic() + self._heartbeat_s
        while True:
            closing = self._closing.is_set()  # read first: all that was queued before is then sent below
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                next_beat_s = now_s + self._heartbeat_s
                self._clock.tick()
                self._check_silence()
                self._send(self._outgoing.encode(self._heartbeat()))
            while self._outbox:
                self._send(self._outbox.popleft())
            if closing:
                return
            ready = dict(poller.poll(max(0, math.ceil(1000 * (next_beat_s - time.monotonic())))))
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
            if socket in ready:
                self._drain()

    def _send(self, data: bytes) -> None:
        """Without waiting: queues have no limit, and a connection that is being restored has one. Only a refused one,
        which libzmq does not try again, has none, and to wait for it would be for ever."""
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            raise ConnectionRefusedError(
                f"{self.address} refused this worker's key: another run's master listens there, or the keys in the "
                "run directory are of another start"
            ) from None

    def _check_silence(self) -> None:
        if self._silence is None:
            return
        silent_s = self._clock.now() - (self._heard_s or 0.0)
        has_heard = self._heard_s is not None
        if silent_s > (self._silence.later_s if has_heard else self._silence.first_s):
            self._silence.call(silent_s, has_heard)

    def _drain(self) -> None:
        self._heard_s = self._clock.now()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 1:
                self.num_dropped += 1
                continue
            try:
                message = self._incoming.decode(frames[0])
            except UndecodableError:
                self.num_dropped += 1
                continue
            if not self._urgent(message):
                self._inbox.put(message)


def host_of(address: str) -> str:
    """The host in `tcp://host:port`."""
    return urlsplit(address).hostname or ""


class _Ended:
    """Put into the inbox when the network thread ends, with the error that ended it, if any."""

    def __init__(self, cause: BaseException | None) -> None:
        self.cause = cause
