"""The distribution of the lengths of responses, and what it says of a generation: how long it lasts, and how its batch
shrinks as responses end."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, read_file
from realhf.base.kept import kept
from realhf.base.numbers import TOKENS

REMEDY = "give a file with the tokens of one response a line, such as 417"


@dataclass(frozen=True)
class DecodePhase:
    """Decode steps between which the batch shrinks to half, taken together.

    steps: expected number. share: of the sequences that began those that run in one of them, on average. tokens: of a
    running sequence's response, on average.
    """

    steps: float
    share: float
    tokens: float


@dataclass(frozen=True)
class LengthDistribution:
    """Responses are drawn independently: `lengths` in tokens, ascending, each with its share of all (they sum to 1)."""

    lengths: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "LengthDistribution":
        """The distribution of these lengths, all equally probable. Raises UserError for one out of range."""
        counts = sorted(Counter(lengths).items())
        for length in (counts[0][0], counts[-1][0]):
            if not 1 <= length <= TOKENS[1]:
                raise UserError(f"a response of {length} tokens: it must have 1 to {TOKENS[1]}; {REMEDY}")
        total = sum(count for _, count in counts)
        return cls(tuple(length for length, _ in counts), tuple(count / total for _, count in counts))

    def capped(self, limit: int) -> "LengthDistribution":
        """The distribution after generation cuts every length at `limit` tokens."""
        if self.longest <= limit:
            return self
        within = [(length, share) for length, share in zip(self.lengths, self.shares, strict=True) if length < limit]
        kept = tuple(share for _, share in within)
        return LengthDistribution((*(length for length, _ in within), limit), (*kept, 1 - math.fsum(kept)))

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @cached_property
    def mean(self) -> float:
        return self._moment(1)

    @cached_property
    def mean_square(self) -> float:
        return self._moment(2)

    @property
    def variance(self) -> float:
        return max(self.mean_square - self.mean**2, 0.0)

    def expected_longest(self, sequences: float) -> float:
        """Tokens of the longest of `sequences` responses: the sum over all tokens t of the probability that any of them
        has t (an order statistic)."""
        return 1 + math.fsum(phase.steps for phase in self.decode_phases(sequences))

    @kept
    def decode_phases(self, sequences: float) -> tuple[DecodePhase, ...]:
        """The steps after the first token until the last of `sequences` responses has ended.

        A step takes place if any response is longer, and has on average those that are: steps, sequences and tokens
        add up to the expected ones. A phase ends where the share of running sequences halves, at the latest where one
        of all is expected to run.
        """
        last = math.ceil(math.log2(max(sequences, 1)))
        sums: dict[int, tuple[float, float, float]] = {}
        before, survives = 1, 1.0  # tokens that all responses have so far, and the share that has more
        for length, share in zip(self.lengths, self.shares, strict=True):
            steps = length - before
            # log1p and expm1 are exact where few survive of many.
            any_runs = 1.0 if survives >= 1 else -math.expm1(sequences * math.log1p(-survives))
            phase = min(int(-math.log2(survives)), last)
            old = sums.get(phase, (0.0, 0.0, 0.0))
            running = steps * survives
            more = (steps * any_runs, running, running * (before + length - 1) / 2)
            sums[phase] = (old[0] + more[0], old[1] + more[1], old[2] + more[2])
            before, survives = length, survives - share
        return tuple(
            DecodePhase(steps, running / steps, tokens / running) for steps, running, tokens in sums.values() if steps
        )

    def _moment(self, power: int) -> float:
        return math.fsum(share * length**power for length, share in zip(self.lengths, self.shares, strict=True))


def read_lengths(path: Path) -> LengthDistribution:
    """The distribution in a file with the tokens of one response a line. Raises UserError if it is another."""

    def decode(content: bytes) -> LengthDistribution:
        lines = content.decode(errors="replace").split()
        if not lines:
            raise BadContentError("it is empty")
        for number, line in enumerate(lines, 1):
            if not (line.isascii() and line.isdigit() and len(line) <= 9 and TOKENS[0] <= int(line) <= TOKENS[1]):
                raise BadContentError(f"value {number} is {line[:20]!r}, not a number from {TOKENS[0]} to {TOKENS[1]}")
        return LengthDistribution.of(map(int, lines))

    return read_file(path, decode, "file of the lengths of responses", REMEDY)
