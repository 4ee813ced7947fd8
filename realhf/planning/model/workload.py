"""How many tokens the calls of an experiment read and write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from realhf.api.experiment import KeyLengths
from realhf.architecture.decoding import DECODE_GRAPHS, GraphLife
from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.planning.model.lengths import LengthDistribution


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens of a sample.

    Generate calls read `prompt_tokens` and write `new_tokens`; inference and train_step calls see both as one sequence
    (without generation, all of it is in `prompt_tokens`). `samples_per_prompt` neighbouring samples have one prompt. Of
    a generate call `kv_cache_tokens` is the room for keys and values on a device that it was given, if it was, and
    `decode_graphs` how long graphs of its decode steps live. The means give times, the maxima memory and the number of
    decode steps; a maximum left out equals the mean, rounded up. `calls` overrides the lengths for single calls by
    name.

    Sequences may differ: `prompt_variance` is the variance of the prompts' lengths, and `responses` the distribution of
    the responses', whose mean is `new_tokens` (None: all are alike). Where a call reads several `sequences` for a
    sample, the lengths are their sums, and the variance is the sum of squares of what they differ from equal parts by.

    `wide_bytes` are those of a response token in columns with many numbers for each, which the call makes or reads.
    """

    prompt_tokens: float
    new_tokens: float = 0
    max_prompt_tokens: int = 0
    max_new_tokens: int = 0
    prompt_variance: float = 0.0
    sequences: int = 1
    responses: LengthDistribution | None = None
    samples_per_prompt: int = 1
    kv_cache_tokens: int | None = None
    decode_graphs: GraphLife = DECODE_GRAPHS
    wide_bytes: int = 0
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
    def attended_prompt(self) -> float:
        """As `attended`, of the prompts of a generation."""
        return self.prompt_tokens + self.prompt_variance / self.prompt_tokens

    @property
    def attended(self) -> float:
        """Tokens of the sequence that a token is in, on average over tokens, which its attention grows with: as many as
        a sequence has where all are alike, and more where they differ. Prompt and response are independent."""
        variance = self.prompt_variance + (self.responses.variance if self.responses else 0.0)
        return self.tokens / self.sequences + variance / self.tokens

    def longest_response(self, samples: int) -> float:
        """Tokens of the longest of the responses of `samples`, expected."""
        return self.responses.expected_longest(samples) if self.responses else float(self.max_new_tokens)

    def text(self, samples: int) -> str:
        """The lengths of prompts and responses in a step of `samples`, in words."""
        if not self.new_tokens:
            return f"{self.prompt_tokens:.4g}"
        longest = f" (longest {self.longest_response(samples):.4g})" if self.responses else ""
        return f"{self.prompt_tokens:.4g} + {self.new_tokens:.4g}{longest}"

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens


def workload_of(
    graph: DataflowGraph,
    lengths: Mapping[str, KeyLengths],
    new_tokens: int | None = None,
    responses: LengthDistribution | None = None,
) -> Workload:
    """How many tokens each call reads and writes, from the data set's `lengths` by key, and the limits of generation,
    which `new_tokens` replaces. `responses` are cut there; None: all responses are as long as the limit, or on average
    as the calls say (`GenerationOptions.mean_new_tokens`)."""
    generate = [call for call in graph.model_calls.values() if call.generates]
    rollout = _generation(generate[0], lengths, new_tokens, responses) if generate else None
    calls = {}
    for call in graph.model_calls.values():
        if call.generates:
            calls[call.name] = _generation(call, lengths, new_tokens, responses)
        elif call.interface_impl.sequence_keys or rollout is None:
            calls[call.name] = _reading(call, lengths, rollout)
    base = replace(rollout or next(iter(calls.values())), kv_cache_tokens=None, decode_graphs=DECODE_GRAPHS)
    for call in graph.model_calls.values():
        keys = {*call.input_data, *call.output_data}
        wide_bytes = sum(maker.wide_bytes(keys) for maker in graph.model_calls.values())
        if wide_bytes:
            calls[call.name] = replace(calls.get(call.name, base), wide_bytes=wide_bytes)
    return replace(base, calls=calls)


def _generation(
    call: ModelFunctionCallDef,
    lengths: Mapping[str, KeyLengths],
    new_tokens: int | None,
    responses: LengthDistribution | None,
) -> Workload:
    prompts = lengths[call.input_data[0]]
    mean = 0.0 if new_tokens or responses else getattr(call.interface_impl, "mean_new_tokens", 0.0)
    new_tokens = new_tokens or getattr(call.interface_impl, "max_new_tokens", None)
    if not isinstance(new_tokens, int):
        raise UserError(
            f"{call.name}: {type(call.interface_impl).__name__} has no max_new_tokens, so that the planner does not "
            "know how long it generates; add a field or property of that name"
        )
    responses = responses.capped(new_tokens) if responses else None
    return Workload(
        prompt_tokens=prompts.mean,
        new_tokens=responses.mean if responses else mean or new_tokens,
        max_prompt_tokens=prompts.longest,
        max_new_tokens=new_tokens,
        prompt_variance=max(prompts.mean_square - prompts.mean**2, 0.0),
        responses=responses,
        samples_per_prompt=call.interface_impl.samples_per_prompt,
        kv_cache_tokens=getattr(call.interface_impl, "kv_cache_tokens", None),
        decode_graphs=getattr(call.interface_impl, "decode_graphs", None) or DECODE_GRAPHS,
    )


def _reading(call: ModelFunctionCallDef, lengths: Mapping[str, KeyLengths], rollout: Workload | None) -> Workload:
    """The sum over the sequences that the call reads for one sample; what was generated counts as a rollout."""
    generated = KeyLengths(0.0, 0, 0.0)
    if rollout:
        mean_square = rollout.tokens * rollout.attended
        generated = KeyLengths(rollout.tokens, rollout.max_tokens, mean_square)
    keys = call.interface_impl.sequence_keys or call.input_data[:1]
    means, longest, squares = zip(*(lengths.get(key, generated) for key in keys), strict=True)
    tokens = sum(means)
    return Workload(
        prompt_tokens=tokens,
        max_prompt_tokens=sum(longest),
        prompt_variance=max(sum(squares) - tokens**2 / len(keys), 0.0),
        sequences=len(keys),
    )
