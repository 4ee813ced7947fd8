"""The health of workers, as the master sees it: the last message, the host, the last activity."""

from collections.abc import Callable, Mapping, Sequence

from realhf.base.errors import RunError
from realhf.master.loop import Dispatcher
from realhf.master.open_requests import NO_REQUEST, Clock
from realhf.rundir.paths import RunDirectory, worker_name
from realhf.transport.messages import Failure


class VitalSigns:
    """The last signs of each worker, and the errors for workers that are to blame.

    num_dropped: how many messages of a worker could not be read and were dropped.
    """

    def __init__(
        self, clock: Clock, dispatcher: Dispatcher, directory: RunDirectory, num_dropped: Callable[[int], int]
    ):
        self._clock, self._dispatcher, self._directory, self._num_dropped = clock, dispatcher, directory, num_dropped
        self._heard: dict[int, float] = {}
        self._hosts: dict[int, str] = {}
        self._activity: dict[int, str] = {}

    def heard(self, worker: int, *, host: str | None = None, activity: str | None = None) -> None:
        """Notes a message of a worker, with the host or the activity that it names."""
        self._heard[worker] = self._clock()
        if host is not None:
            self._hosts[worker] = host
        if activity is not None:
            self._activity[worker] = activity

    def activity(self, worker: int, otherwise: str) -> str:
        """The activity that a worker has reported last."""
        return self._activity.get(worker, otherwise)

    @property
    def num_heard(self) -> int:
        """How many workers have sent a message."""
        return len(self._heard)

    def silent(self, longer_than_s: float) -> list[int]:
        """The workers whose last message is older than that."""
        now = self._clock()
        return sorted(worker for worker, time_s in self._heard.items() if now - time_s > longer_than_s)

    def alive(self, silence_s: float) -> list[int]:
        """The workers whose last message is at most `silence_s` old."""
        return sorted(self._heard.keys() - set(self.silent(silence_s)))

    def silence(self, workers: Sequence[int]) -> RunError:
        """The error for workers that send no heartbeats."""
        now = self._clock()
        return RunError(
            "\n".join(
                f"worker {worker} has been silent for {now - self._heard[worker]:.0f} s; it was in "
                f"{self._what(worker)}; log: {self._log(worker)}"
                for worker in workers
            ),
            workers=workers,
        )

    def lateness(self, deadlines_s: dict[int, float]) -> RunError:
        """The error for workers that did not answer within their deadlines, in seconds."""
        who = ", ".join(f"worker {worker} in {self._what(worker)}" for worker in deadlines_s)
        logs = ", ".join(self._log(worker) for worker in deadlines_s)
        return RunError(
            f"no answer within {min(deadlines_s.values()):g} s from {who}; raise --call-timeout-s if this may take "
            f"longer; log: {logs}",
            workers=deadlines_s,
        )

    def failure(self, worker: int, failure: Failure) -> RunError:
        """The error for a worker that raised an exception."""
        text, what = failure.text, self._dispatcher.describe(worker, failure.request_id)
        if what == NO_REQUEST:
            what = self.activity(worker, "") or "its start"
        return RunError(
            f"worker {worker} failed in {what}; log: {self._log(worker)}\n{text.rstrip()}", workers=[worker]
        )

    def several_kinds(self, devices: Mapping[int, str]) -> RunError:
        """The error for devices of several kinds, by worker; a plan assumes equal devices."""
        kinds: dict[str, list[str]] = {}
        for worker, device in sorted(devices.items()):
            kinds.setdefault(device, []).append(f"{worker} (host {self._hosts.get(worker, 'unknown')})")
        found = "; ".join(f"{device}: worker {', '.join(workers)}" for device, workers in kinds.items())
        return RunError(
            f"a run needs devices of one kind, and its workers have several: {found}; choose nodes of one kind by "
            "--partition, --nodelist or --sbatch=--constraint=FEATURE"
        )

    def _what(self, worker: int) -> str:
        """The requests that a worker is busy with, and the activity that it has reported last."""
        dropped = self._num_dropped(worker)
        nonsense = f", {dropped} of whose messages made no sense and were dropped" if dropped else ""
        return f"{self._dispatcher.describe(worker)} ({self.activity(worker, 'no heartbeat yet')}){nonsense}"

    def _log(self, worker: int) -> str:
        """The log to read, and its host."""
        host = f" (host {self._hosts[worker]})" if worker in self._hosts else ""
        return f"{self._directory.log(worker_name(worker))}{host}"
