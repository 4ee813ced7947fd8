"""The master's end: one socket for all workers, open to the keys of this run only."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Generic, TypeVar

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from realhf.base.errors import RunError, UserError
from realhf.transport.codec import Codec, UndecodableError
from realhf.transport.keys import MasterKeys

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

_DOMAIN = "realhf"
# A frame on the wire is a message plus CURVE's envelope.
_ENVELOPE_BYTES = 256
# Unread messages of one worker beyond this wait at its end.
_MAX_UNREAD = 1000
# A worker that has sent more invalid frames than this is ignored.
MAX_GARBAGE = 100


class GoneError(RunError):
    """A worker is not connected, so no message can be sent to it."""


class Server(Generic[Incoming, Outgoing]):
    """Receives from and sends to workers by index; made inside a running asyncio loop.

    It listens on the address of `host`, at a port that the system chooses (`address`, `tcp://host:port`). A peer
    without a listed key does not pass the handshake. A worker's index comes from its key, not from its messages. Frames
    that are no message of the incoming type are dropped and counted. After `MAX_GARBAGE` of them all frames of that
    worker are dropped.
    """

    def __init__(
        self,
        host: str,
        keys: MasterKeys,
        *,
        incoming: Codec[Incoming],
        outgoing: Codec[Outgoing],
    ) -> None:
        self._garbage = [0] * len(keys.workers)  # frames by worker
        self._incoming = incoming
        self._outgoing = outgoing
        self._num_workers = len(keys.workers)
        self._routes: dict[int, bytes] = {}  # worker -> the route of the connection it was last heard on
        self._refused: set[bytes] = set()  # routes
        # A context of its own, since libzmq has one authenticator per context.
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.BLOCKY, False)  # a process that ends without `close` must not hang
        self._authenticator = _Authenticator(self._context, keys.workers)
        self._authenticator.start()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self.address = self._bind(host, keys)
        except BaseException:
            self.close()
            raise

    def _bind(self, host: str, keys: MasterKeys) -> str:
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.own.secret
        self._socket.zap_domain = _DOMAIN.encode()
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator, no connection
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._incoming.max_bytes + _ENVELOPE_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a lost route is an error, not silence
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a send never waits: the requests in flight bound the queues
        self._socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        address = _one_address(host)
        if ":" in address:
            self._socket.setsockopt(zmq.IPV6, 1)
            address = f"[{address}]"
        try:
            port = self._socket.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise UserError(f"cannot listen on {host} ({address}): {error}; give an address of this machine") from error
        return f"tcp://{address}:{port}"

    @property
    def known_workers(self) -> frozenset[int]:
        """The workers that have sent a message, so messages can be sent to them."""
        return frozenset(self._routes)

    @property
    def num_dropped(self) -> int:
        """How many invalid frames all workers have sent."""
        return sum(self._garbage)

    @property
    def num_refused(self) -> int:
        """Handshakes of peers without a listed key; a peer may be refused several times."""
        return self._authenticator.num_refused

    def garbage(self, worker: int) -> int:
        """How many invalid frames a worker has sent."""
        return self._garbage[worker]

    def reject(self, worker: int) -> None:
        """Counts a message of a worker as invalid, because its content makes no sense."""
        self._garbage[worker] += 1

    def refuse(self, worker: int) -> None:
        """Ignores from now on the connection on which a worker was heard last, but not its next one."""
        self._refused.add(self._routes.pop(worker))

    async def recv(self) -> tuple[int, Incoming]:
        """The next message and the index of the worker it came from. Safe to cancel."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            worker = int(frames[-1].get("User-Id"))
            if len(frames) == 2 and self._garbage[worker] <= MAX_GARBAGE:
                with contextlib.suppress(UndecodableError):
                    message = self._incoming.decode(frames[1].buffer)
                    if frames[0].bytes in self._refused:
                        continue
                    self._routes[worker] = frames[0].bytes
                    return worker, message
            self._garbage[worker] += 1
            await asyncio.sleep(0)  # gives other tasks a turn

    async def send(self, worker: int, message: Outgoing) -> None:
        """Queues `message` for `worker`.

        Raises ValueError for a message over the size limit, GoneError where the worker has not
        been heard yet or its connection is gone.
        """
        assert 0 <= worker < self._num_workers, f"worker {worker} of {self._num_workers}"
        data = self._outgoing.encode(message)
        route = self._routes.get(worker)
        if route is None:
            raise GoneError(f"worker {worker} has not connected, so it cannot be sent a {type(message).__name__}")
        try:
            await self._socket.send_multipart((route, data))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise GoneError(
                f"the connection to worker {worker} is gone, so it cannot be sent a {type(message).__name__}"
            ) from error

    def close(self, *, flush_s: float = 10.0) -> None:
        """Closes the socket, after sending queued messages for at most `flush_s` seconds."""
        self._authenticator.stop()
        self._socket.close(linger=int(1000 * flush_s))
        self._context.term()


class _Authenticator(AsyncioAuthenticator):
    """Admits the listed keys and marks their connections with the worker's index (ZeroMQ RFC 27)."""

    def __init__(self, context: zmq.asyncio.Context, workers: Sequence[bytes]) -> None:
        super().__init__(context)
        self.num_refused = 0
        self._index_of_key = {z85.decode(key): i for i, key in enumerate(workers)}
        self.configure_curve_callback(_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        is_listed = z85.decode(key) in self._index_of_key
        self.num_refused += not is_listed
        return is_listed

    def curve_user_id(self, client_public_key: bytes) -> str:
        return str(self._index_of_key[client_public_key])


def _one_address(host: str) -> str:
    """The IP address of `host`. Raises UserError for a wildcard or a name that does not resolve."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise UserError(f"{host} means every interface; give the one address that the workers can reach")
        return host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"the host name {host!r} does not resolve ({error}); give an address of this machine"
        ) from error
    return str(found[0][4][0])
