"""How long the sequences of an experiment are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from realhf.api.generation import DECODE_GRAPHS, DecodeGraphs
from realhf.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens of a sample.

    Generate calls read `prompt_tokens` and write `new_tokens`; inference and train_step calls see
    both as one sequence (for an experiment without generation, put the whole sequence into
    `prompt_tokens`). `kv_cache_tokens` is the room for keys and values on a device that a generate call was given, if
    it was, and `decode_graphs` how long graphs of its decode steps live, where there are any. The means give times,
    the maxima memory and the number of decode steps; a maximum left out equals the mean, rounded up. `calls` overrides
    the lengths for single calls by name.
    """

    prompt_tokens: float
    new_tokens: float = 0
    max_prompt_tokens: int = 0
    max_new_tokens: int = 0
    kv_cache_tokens: int | None = None
    decode_graphs: DecodeGraphs = DECODE_GRAPHS
    calls: Mapping[str, "Workload"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_tokens <= 0 or self.new_tokens < 0:
            raise UserError(
                f"workload: prompt_tokens={self.prompt_tokens} must be above 0 and "
                f"new_tokens={self.new_tokens} at least 0"
            )
        for name in ("prompt_tokens", "new_tokens"):
            mean, maximum = getattr(self, name), getattr(self, f"max_{name}")
            if not maximum:
                object.__setattr__(self, f"max_{name}", -int(-mean // 1))
            elif maximum < mean:
                raise UserError(f"workload: max_{name}={maximum} is below the mean {name}={mean}")

    def of(self, call: str) -> "Workload":
        """The lengths that hold for one call."""
        return self.calls.get(call, self)

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.new_tokens

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens
