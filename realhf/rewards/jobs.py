"""Samples on their way through reward processes: samples to score, results, and the samples to blame for failures."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from realhf.rewards.messages import Function, Kind, Value
from realhf.rewards.signature import Sample

_SHOWN_CHARACTERS = 60
# A process may be killed from outside (memory): a sample is blamed for its end when this many ended at it.
_ENDS = 2


@dataclass(frozen=True)
class Failure:
    """Why a sample has no reward from a function. `text` says it whole: function, step, sample, prompt and reason."""

    reward: str
    sample: Sample
    kind: Kind
    reason: str
    place: str

    @property
    def text(self) -> str:
        where = f"step {self.sample.step + 1}, sample {self.sample.id}, prompt {self.question!r}"
        return f"reward {self.place} of {where}: {self.reason}"

    @property
    def question(self) -> str:
        """The beginning of the row's own part of the prompt, on one line."""
        text = " ".join(self.sample.question.split())
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."

    @property
    def remedy(self) -> str:
        change = "return a number" if self.kind == "none" else "correct the function"
        return f"{change}, or let such samples count with --reward.on-error zero, or drop"


class RewardError(Exception):
    """A sample has no reward, and the policy is to fail; or no reward process can be started."""


class NoRewardError(RewardError):
    """A sample has no reward, and the policy is to fail."""

    def __init__(self, failure: Failure):
        super().__init__(f"{failure.text}; {failure.remedy}")
        self.failure = failure


class Job:
    """The scores of some samples by all functions; complete when no value is missing, or with the first error."""

    def __init__(self, rewards: Sequence[Function], samples: Sequence[Sample], *, is_strict: bool):
        self.samples = samples
        self.values: list[list[Value | Failure | None]] = [[None] * len(samples) for _ in rewards]
        self._rewards = rewards
        self._is_strict = is_strict
        self._missing = len(rewards) * len(samples)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        if not self._missing:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def put(self, reward: int, index: int, value: Value | Failure) -> None:
        """Notes the result of a sample; the first answer counts."""
        with self._lock:
            if self.values[reward][index] is None:
                self.values[reward][index] = value
                self._missing -= 1
            if not self._missing:
                self._done.set()
        if isinstance(value, Failure) and self._is_strict:
            self.fail(NoRewardError(value))

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done. Raises the error that ended it."""
        is_done = self._done.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return is_done

    def failure(self, reward: int, index: int, kind: Kind, reason: str) -> Failure:
        return Failure(self._rewards[reward].name, self.samples[index], kind, reason, self._rewards[reward].place)


@dataclass(frozen=True)
class Part:
    """Samples of a job (by their indices) for one call, or one run of calls, of a function.

    ends: how many processes have ended while they worked on it.
    """

    job: Job
    reward: int
    indices: tuple[int, ...]
    ends: int = 0


@dataclass
class Open:
    """A part that a process is working on, and those of its places that have no answer yet."""

    part: Part
    places: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = dict.fromkeys(range(len(self.part.indices)))

    def answer(self, places: Sequence[int]) -> list[int]:
        """Takes `places` out; the indices of their samples."""
        for place in places:
            if place not in self.places:
                raise RewardError(f"a reward process answered twice for sample {place} of its work")
            del self.places[place]
        return [self.part.indices[place] for place in places]

    @property
    def rest(self) -> Part:
        """The samples of the part that have no answer yet."""
        return replace(self.part, indices=tuple(self.part.indices[place] for place in self.places))


def after_end(open_parts: Sequence[Open], reason: str, kind: Kind, *, in_order: bool) -> list[Part]:
    """The parts to do again after a process has ended with unfinished ones; the sample to blame gets a failure.

    Args:
        in_order: the process took one sample after the other, so that it ended at the first one that is left.
    """
    suspects = [one.rest for one in open_parts if one.places]
    again: list[Part] = []
    if in_order and suspects:
        first, *again = suspects
        suspects = [replace(first, indices=first.indices[:1])]
        if innocent := first.indices[1:]:
            again.insert(0, replace(first, indices=innocent))
    for part in suspects:
        ended = replace(part, ends=part.ends + 1)
        if len(part.indices) > 1 or len(suspects) > 1:
            again += halves(ended)
        elif ended.ends >= _ENDS or kind == "time":
            [index] = part.indices
            part.job.put(part.reward, index, part.job.failure(part.reward, index, kind, reason))
        else:
            again.append(ended)
    return again


def halves(part: Part) -> list[Part]:
    """The part in two; one of a single sample as it is."""
    middle = (len(part.indices) + 1) // 2
    runs = [part.indices[:middle], part.indices[middle:]]
    return [replace(part, indices=run) for run in runs if run]
