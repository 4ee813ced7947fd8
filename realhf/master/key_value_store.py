"""The run's store, through which the workers' process groups find each other. Operations do what those of torch do."""

from realhf.transport.messages import (
    AddToKey,
    CheckKeys,
    CompareSetKey,
    CountKeys,
    DeleteKey,
    SetKey,
    StoreReply,
    StoreRequest,
    WaitForKeys,
)

# gloo writes some 150 bytes for each rank of a group under one key.
MOST_VALUE_BYTES = 2**20
# Keys and waits of a worker: a few for each of its groups.
MOST_ENTRIES = 10_000

Answer = tuple[int, StoreReply]  # with the worker that gets it


class KeyValueStore:
    """Values by key, and the waits of workers for keys that are missing. A wait has no deadline here: the worker that
    waits has one."""

    def __init__(self, num_workers: int):
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, WaitForKeys]]] = {}  # by one of their keys that is missing
        self._num_waiting = 0
        self._most_entries = MOST_ENTRIES * num_workers

    def answers(self, worker: int, request: StoreRequest) -> list[Answer]:
        """Carries out a worker's request. Returns the answers that are due now: to it, and to waits that it ends."""
        try:
            return self._carry_out(worker, request)
        except ValueError as error:  # of a limit, or of a number that is none
            return [(worker, StoreReply(request_id=request.request_id, error=str(error)))]

    def _carry_out(self, worker: int, request: StoreRequest) -> list[Answer]:
        value, number, ended = b"", 0, []
        match request:
            case WaitForKeys():
                self._check_entries()
                return self._wait(worker, request)
            case SetKey(key=key, value=new):
                ended = self._put(key, new)
            case AddToKey(key=key, amount=amount):
                number = int(self._values.get(key) or 0) + amount
                if number.bit_length() > 63:
                    raise ValueError(f"{key}: the sum has more than 64 bits")
                ended = self._put(key, str(number).encode())
            case CompareSetKey(key=key, expected=expected, desired=desired):
                if self._values.get(key, b"") == expected:
                    ended = self._put(key, desired)
                value = self._values.get(key, expected)
            case CheckKeys(keys=keys):
                number = int(all(key in self._values for key in keys))
            case DeleteKey(key=key):
                number = int(self._values.pop(key, None) is not None)
            case CountKeys():
                number = len(self._values)
        return [(worker, StoreReply(request_id=request.request_id, value=value, number=number)), *ended]

    def _put(self, key: str, value: bytes) -> list[Answer]:
        if len(key) + len(value) > MOST_VALUE_BYTES:
            raise ValueError(f"{key[:80]}: {len(value)} bytes are over the store's limit of {MOST_VALUE_BYTES}")
        if key not in self._values:
            self._check_entries()
        self._values[key] = value
        waits = self._waiting.pop(key, [])
        self._num_waiting -= len(waits)
        return [answer for worker, wait in waits for answer in self._wait(worker, wait)]

    def _wait(self, worker: int, wait: WaitForKeys) -> list[Answer]:
        missing = next((key for key in wait.keys if key not in self._values), None)
        if missing is None:
            value = self._values[wait.keys[-1]] if wait.keys else b""
            return [(worker, StoreReply(request_id=wait.request_id, value=value))]
        self._waiting.setdefault(missing, []).append((worker, wait))
        self._num_waiting += 1
        return []

    def _check_entries(self) -> None:
        if len(self._values) + self._num_waiting >= self._most_entries:
            raise ValueError(f"the store is full: it takes {self._most_entries} keys and waits")
