"""The run's store of keys and values, through which the workers' process groups find each other."""

from realhf.transport.messages import AddToKey, CheckKeys, SetKey, StoreReply, StoreRequest, WaitForKeys

# A key with its value, or the keys of a request. Gloo writes some 150 bytes for each rank of a group under one key.
MOST_BYTES = 2**20
# Keys and waits of a worker: a few for each of its groups.
MOST_ENTRIES = 10_000

Answer = tuple[int, StoreReply]  # with the worker that gets it


class KeyValueStore:
    """Values by key, and the waits of workers for keys that are missing. Operations do what those of torch's stores do.

    A wait has no deadline here: the worker that waits has one.
    """

    def __init__(self, num_workers: int):
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, WaitForKeys]]] = {}  # by one of their keys that is missing
        self._num_waiting = 0
        self._most_entries = MOST_ENTRIES * num_workers

    def answers(self, worker: int, request: StoreRequest) -> list[Answer]:
        """Carries out a worker's request. Returns the answers that are due now: to it, and to waits that it ends."""
        number, ended, error = 0, [], ""
        try:
            match request:
                case WaitForKeys(keys=keys):
                    self._admit(", ".join(keys), is_new=True)
                    return self._wait(worker, request)
                case CheckKeys(keys=keys):
                    number = int(all(key in self._values for key in keys))
                case SetKey(key=key, value=value):
                    ended = self._put(key, value)
                case AddToKey(key=key, amount=amount):
                    number = int(self._values.get(key) or 0) + amount
                    if number.bit_length() > 63:
                        raise ValueError(f"{key}: the sum has more than 64 bits")
                    ended = self._put(key, str(number).encode())
        except ValueError as refused:  # over a limit, or added to no number
            error = str(refused)
        return [(worker, StoreReply(request_id=request.request_id, number=number, error=error)), *ended]

    def _put(self, key: str, value: bytes) -> list[Answer]:
        self._admit(key, value, is_new=key not in self._values)
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

    def _admit(self, key: str, value: bytes = b"", *, is_new: bool) -> None:
        """Raises ValueError for an entry that is too large, or a new one in a full store."""
        size = len(key) + len(value)
        if size > MOST_BYTES:
            raise ValueError(f"{key[:80]}: {size} bytes are over the store's limit of {MOST_BYTES}")
        if is_new and len(self._values) + self._num_waiting >= self._most_entries:
            raise ValueError(f"the store is full: it takes {self._most_entries} keys and waits")
