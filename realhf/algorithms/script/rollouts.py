"""The calls that do not train: generation, log-probabilities, values, scores."""

import math
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from realhf.algorithms.responses import (
    by_sample,
    last_scores,
    response_distributions,
    response_logprobs,
    response_values,
    token_scores,
)
from realhf.algorithms.samples import sums_of
from realhf.algorithms.script.evaluate import Evaluation
from realhf.algorithms.script.rows import as_rollouts
from realhf.algorithms.statistics import mean_of
from realhf.algorithms.stop_strings import stop_strings
from realhf.api.script.config import Distributions, Generate, Logprobs, Rows, Score, ScriptCall, Values
from realhf.dataflow.interface import PREEMPTIONS
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, GenerationOutput, GenerationRequest, Model, Postprocess
from realhf.parallel.vocabulary import Logits, WholeLogits


def generate(model: Model, batch: Batch, context: Context, config: Generate) -> GenerationOutput:
    """Samples a response to every prompt; the key `forced_response` replaces the samples (replay)."""
    draw = zlib.crc32(config.name.encode()) if config.name else 0  # other random numbers for each call of a step
    request = GenerationRequest(
        config,
        sample_key=(context.seed ^ draw, context.step),
        prompt_key=dict(config.batch.columns).get("prompt", "prompt"),
        micro_batches=context.micro_batches,
        planned_graphs=context.decode_graphs,
        planned_room=context.kv_cache_tokens,
        forced=batch.data.get("forced_response"),
        return_logits="logits" in context.record,
        is_end=stop_strings(config.tokenizer, config.stop_strings) if config.stop_strings else None,
    )
    return model.generate(batch, request)


class GenerateInterface:
    """See `Generate`."""

    def __init__(self, config: Generate):
        self.config = config

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        out = generate(model, batch, context, self.config)
        if not context.holds_outputs:
            return CallResult()
        seq, logprob = self.config.output_data
        # Training computes log-probabilities of the untruncated distribution: the ratio is that of like with like.
        outputs = {
            seq: out.sequences,
            logprob: out.untruncated_logprobs,
            "drawn_logprob": out.logprobs,
            "margin": out.margins,
            "logits": out.logits,
        }
        lengths = (float(sum(map(len, out.logprobs))), float(len(batch)))
        stats = {self.config.statistic: lengths} if self.config.statistic else {}
        if self.config.kv_cache_tokens or context.kv_cache_tokens:
            stats[PREEMPTIONS] = (float(out.preemptions), 1.0)
        return CallResult(outputs={key: values for key, values in outputs.items() if values}, stats=stats)


class _Inference:
    """A pass without gradients over the rows of a view."""

    def __init__(self, config: ScriptCall):
        self.config = config

    def run(
        self, model: Model, batch: Batch, context: Context, postprocess: Postprocess, rows: Rows = "rollout"
    ) -> CallResult:
        """What `postprocess` gives of the rows, and the statistics of what was read."""
        evaluation = Evaluation(batch, context, self.config.reports)
        seen = as_rollouts(evaluation.batch(self.config.batch), rows)
        outputs = model.forward(seen, "seq", postprocess, context.micro_batches)
        return CallResult(outputs=outputs, stats=evaluation.stats) if context.holds_outputs else CallResult()


class LogprobsInterface(_Inference):
    """See `Logprobs`."""

    config: Logprobs

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config
        key, *others = c.output_data

        def logprobs(logits: Logits, part: Batch) -> dict[str, list[Tensor]]:
            each = by_sample(response_logprobs(logits, part, c.temperature), part)
            if c.rows == "pairs" and not c.per_token:
                # Copies: torch's kernel for GPUs may choose the order of a sum by where in memory its terms begin.
                each = [values.clone().sum().view(1) for values in each]
            return {key: each}

        result = self.run(model, batch, context, logprobs, c.rows)
        if not others or not result.outputs:
            return result
        both = result.outputs[key]
        return replace(result, outputs={key: both[::2], others[0]: both[1::2]})


class DistributionsInterface(_Inference):
    """See `Distributions`."""

    config: Distributions

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config

        def distributions(logits: Logits | WholeLogits, part: Batch) -> dict[str, list[Tensor]]:
            made: list[list[Tensor]] = [[] for _ in c.output_data]
            for logprob in response_distributions(logits, part, c.temperature):
                if context.holds_outputs:  # others have only helped to compute them
                    for column, value in zip(made, most_likely(logprob, c.top_k), strict=True):
                        column.append(value)
            return dict(zip(c.output_data, made, strict=True)) if context.holds_outputs else {}

        return self.run(model, batch, context, distributions)


def most_likely(logprob: Tensor, top_k: int) -> tuple[Tensor, ...]:
    """Of log-probabilities [n, vocab] those of the `top_k` most likely tokens and, at the end, of all others together
    [n, top_k + 1], and these tokens [n, top_k]; with `top_k` 0 the log-probabilities as they are, alone."""
    if not top_k:
        return (logprob,)
    best, tokens = logprob.topk(top_k)
    others = logprob.scatter(1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([best, others], dim=-1), tokens


class ValuesInterface(_Inference):
    """See `Values`."""

    config: Values

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        (key,) = self.config.output_data
        return self.run(model, batch, context, lambda head, part: {key: by_sample(response_values(head, part), part)})


class ScoreInterface(_Inference):
    """See `Score`."""

    config: Score

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        (key,) = self.config.output_data
        scores = token_scores if self.config.per_token else last_scores
        result = self.run(model, batch, context, lambda head, part: {key: scores(head, part)})
        if not result.outputs:
            return result
        given = sums_of([score.double() for score in result.outputs[key]])
        powers = {name: mean_of(given**power) for power, name in enumerate(self.config.statistics, 1)}
        return replace(result, stats=result.stats | powers)
