"""The interface of an algorithm's code: the model that it is called on, the call's context, and the result of a
call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from realhf.api.generation import GenerationOptions
from realhf.architecture.decoding import DECODE_GRAPHS, GraphLife
from realhf.architecture.model import DecoderConfig
from realhf.engine.batch import Batch
from realhf.rewards.details import RewardDetails

# A statistic is (weighted sum, weight): parts from several ranks add up, and sum / weight is the mean. In what a
# callback returns, scalar tensors may stand for numbers; they are read together at the end.
Stats = dict[str, tuple[float, float]]

# The output of a model's head: values [tokens], or `realhf.parallel.vocabulary.Logits` [tokens, vocab], which are
# computed only where they are read. Callbacks know which of the two their model has.
Head = Any

# (output of the model's head on a micro-batch, packed; the micro-batch)
#   -> per-sample tensors by key, each [length, ...]
Postprocess = Callable[[Head, Batch], dict[str, list[Tensor]]]

# (output of the model's head on a micro-batch, packed; the micro-batch)
#   -> (loss summed over its terms, a scalar with gradient; statistics)
LossFunction = Callable[[Head, Batch], tuple[Tensor, Stats]]

# (tokens of a response so far, [length] int64) -> whether it ends with the last of them. A pure function: all ranks of
# a data-parallel group ask it about every token, and must decide alike.
EndCheck = Callable[[np.ndarray], bool]


@dataclass(frozen=True)
class GenerationRequest:
    """A request to generate responses for the samples of a batch.

    options: how tokens are drawn.
    sample_key: (seed, step). With the sample's id and the token's position it determines every random number.
    prompt_key: `batch.data[prompt_key][i]` is the prompt of sample i, [length] int64.
    micro_batches: at most 1 / micro_batches of the samples are computed together; the others wait and take the places
        of those that end.
    forced: responses [length] int64 to replay, in the order of the batch. They replace the draws; their
        log-probabilities are computed.
    limits: the longest response of each sample, where it is below `options.max_new_tokens`.
    return_logits: whether to give back the logits of every drawn token.
    is_end: finds `options.stop_strings` in a response, because the engine knows no text.
    planned_graphs, planned_room: how long graphs of decode steps live, and the tokens of the KV cache, by the plan;
        where the options leave it open.
    """

    options: GenerationOptions
    sample_key: tuple[int, int] = field(kw_only=True)
    prompt_key: str = field(default="prompt", kw_only=True)
    micro_batches: int = field(default=1, kw_only=True)
    forced: Sequence[Tensor] | None = field(default=None, kw_only=True)
    limits: Sequence[int] | None = field(default=None, kw_only=True)
    return_logits: bool = field(default=False, kw_only=True)
    is_end: EndCheck | None = field(default=None, kw_only=True)
    planned_graphs: GraphLife | None = field(default=None, kw_only=True)
    planned_room: int | None = field(default=None, kw_only=True)

    @property
    def decode_graphs(self) -> GraphLife:
        """The life of graphs of decode steps."""
        return self.options.decode_graphs or self.planned_graphs or DECODE_GRAPHS

    @property
    def room(self) -> int | None:
        """Tokens of the KV cache on a device; None: enough for all sequences."""
        given = self.options.kv_cache_tokens
        return self.planned_room if given is None else given

    def of_samples(self, samples: range) -> "GenerationRequest":
        """The same request for a run of the samples."""
        run = slice(samples.start, samples.stop)
        forced = None if self.forced is None else self.forced[run]
        return replace(self, forced=forced, limits=None if self.limits is None else self.limits[run])


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """The rollouts of a batch, in the order of its samples; empty on ranks that hold no outputs.

    sequences[i]: [prompt + response], int64, the end token included where one was drawn;
    logprobs[i]: [response], of the drawn tokens under the distribution they were drawn from;
    untruncated_logprobs[i]: [response], under the whole distribution of the same temperature;
    margins[i]: [response] float64, by how much the random number missed the nearest other
    token's interval of the cumulative distribution (1 where the choice was forced or greedy).
    logits[i]: [response, vocab], only if asked for.
    preemptions: how often a sequence lost its place in the KV cache, and was computed again later.
    """

    sequences: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    untruncated_logprobs: list[Tensor] = field(default_factory=list)
    margins: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    preemptions: int = 0


class Model(Protocol):
    """One rank's part of a model, laid out for the call. All ranks of the mesh call the same methods."""

    config: DecoderConfig

    def forward(
        self, batch: Batch, tokens_key: str, postprocess: Postprocess, micro_batches: int
    ) -> dict[str, list[Tensor]]:
        """Runs the model without gradients on `batch.data[tokens_key]`.

        Returns the results of `postprocess`, concatenated over the micro-batches, on the ranks of the last pipeline
        stage; {} elsewhere. The head's output is the same on all ranks there.
        """

    def train_step(
        self, batch: Batch, tokens_key: str, loss: LossFunction, weight: Callable[[Batch], float], micro_batches: int
    ) -> Stats:
        """One optimizer step on one mini-batch.

        The gradient is that of sum(loss) / sum(weight) over all micro-batches of all
        data-parallel ranks. Returns this data-parallel rank's statistics plus `loss`, and
        `grad_norm`, `lr` (weight 1), on the last stage; {} elsewhere.
        """

    def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
        """Samples a response for every prompt of the batch."""


class Context(Protocol):
    """The run and the step around a call."""

    seed: int
    step: int
    """Counts from 0; in an evaluation, its batches."""
    steps_made: int
    """Training steps that the run has made before the call: in training, `step`."""
    steps: int
    """Training steps of the whole run."""
    micro_batches: int
    gradient_parts: int
    """Parts of a mini-batch on this rank, of equal numbers of samples, whose gradients are computed apart; 0: they may
    be computed together."""
    decode_graphs: GraphLife | None
    """How long graphs of decode steps live, by the plan."""
    kv_cache_tokens: int | None
    """The room for keys and values on a device that the plan gives; None: enough for all sequences."""
    holds_outputs: bool
    """True on the one rank of each data-parallel group whose outputs and statistics are taken."""
    record: frozenset[str]
    """Keys that the run records although no call consumes them, such as `logits` or `margin`."""
    batch_size: int
    """Samples of the step on all data-parallel ranks together; in an evaluation, of its batch."""
    samples_per_prompt: int
    """Samples i * samples_per_prompt to (i + 1) * samples_per_prompt - 1 are responses to one prompt, for every i."""
    state: dict[str, float]
    """Numbers that the call keeps from step to step, such as an adaptive coefficient: none in the first step, then
    those that the step before has left. Checkpoints have them, so a resumed run goes on with them. All ranks have to
    leave the same ones: at most 64, finite. Calls of an evaluation keep none."""

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of the data set that the samples `ids` have, with all their fields: answers, test cases and whatever
        else a rule on texts reads."""

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        """The element-wise sum over the data-parallel ranks, the same bits on every rank."""

    def sum_over_outputs(self, values: Tensor) -> Tensor:
        """The element-wise sum over the ranks that hold outputs, the same bits on every rank of the call, whatever the
        others give: for decisions by statistics of a pass, which the last pipeline stage alone has."""

    def in_order(self, ids: Sequence[int], values: Tensor) -> Tensor:
        """`values` of all samples of the step, in the order of their ids: [batch_size, ...].

        Every rank gets the same bits, and the same under every layout. So a statistic of a group of responses is one
        of neighbouring rows, wherever the samples lie: `in_order(ids, reward).view(-1, samples_per_prompt).mean(1)`.
        All data-parallel ranks have to call it. Samples that no rank gives have zeros.

        Args:
            ids: the ids of this rank's samples (`Batch.ids`); for statistics of the whole step, of all its
                mini-batches.
            values: [len(ids), ...], of one dtype on all ranks.

        Raises:
            InterfaceError: there are not as many values as ids.
        """


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """Outputs by key, one tensor [length, ...] a sample in the order of the call's batch, and statistics.

    Taken only from ranks where `holds_outputs` is true; others return an empty one.

    All samples of a key have one dtype (bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64)
    and one shape after the length. Every key of the call's `output_data` must be there, all of its values finite. A
    statistic is a pair (sum, weight) of finite numbers, the weight at least 0. `realhf.engine.returned` checks this
    where the result is taken. `details` are by sample, for people to read;
    samples may lack them.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    stats: Stats = field(default_factory=dict)
    details: dict[int, RewardDetails] = field(default_factory=dict)
