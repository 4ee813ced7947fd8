"""The update: optimizer steps on the sum of one or several losses."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from realhf.algorithms.functional import at_least_fp32, kl_k3, last_positions, token_statistics
from realhf.algorithms.responses import response_lengths, response_positions
from realhf.algorithms.samples import of_responses, rollout_stats
from realhf.algorithms.script.evaluate import Evaluation, split_stats
from realhf.algorithms.script.rows import as_rollouts, divided, pairs_of
from realhf.algorithms.statistics import add_stats, mean_of, prefixed
from realhf.api.script.config import Measure, Term, Update
from realhf.api.script.functions import Reduction, load_function
from realhf.engine.batch import PART, Batch, concatenate
from realhf.engine.interface import CallResult, Context, Head, Model, Stats
from realhf.engine.returned import InterfaceError
from realhf.gpu.host_numbers import on_device
from realhf.parallel.divergence import Target, generalised_jsd

# For every row of a mini-batch the term that it is for, or _LEFT_OUT; on the host.
_TERM = " term"
_SEQUENCES = ("prompt", "seq")
_LEFT_OUT = -1
KL_STATISTIC = "kl_from_rollout"

MiniBatch = TypeVar("MiniBatch")

# (distributions for the response tokens of a micro-batch, beta) -> how far the model's are from them: [responses], with
# gradient, at the temperature of the rollout; see `realhf.parallel.divergence.generalised_jsd`.
Divergence = Callable[[Target, float], Tensor]


class UpdateInterface:
    """See `Update`."""

    def __init__(self, config: Update):
        self.config = config
        self._losses = [_Loss(term) for term in config.terms]

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        c = self.config
        evaluation = Evaluation(concatenate(mini_batches), context, c.reports)
        sizes = [len(batch) for batch in mini_batches]
        terms = [divided(evaluation.batch(term.batch), sizes) for term in c.terms]
        rows = [
            _merged(
                [as_rollouts(batch, term.rows) for term, batch in zip(c.terms, batches, strict=True)],
                context.gradient_parts,
            )
            for batches in zip(*terms, strict=True)
        ]
        weights, micro_batches = self._agreed(rows, context)
        # A policy alone moves away from the one that drew its rollouts.
        max_kl = c.max_kl if c.rows == "rollout" and model.config.head == "lm" else None
        stats = optimizer_steps(
            lambda each: self._step(model, *each, with_kl=max_kl is not None),
            list(zip(rows, weights, micro_batches, strict=True)),
            context,
            _device_of(rows),
            epochs=c.epochs,
            max_kl=max_kl,
        )
        if not context.holds_outputs:
            return CallResult()
        own = ("loss", "grad_norm", "lr", "skipped_mini_batches", "stopped_after", KL_STATISTIC)
        named = prefixed(c.prefix, {name: stats.pop(name) for name in own if name in stats})
        return CallResult(stats={**_of_rollouts(c, terms[0]), **stats, **named, **evaluation.stats})

    def _agreed(self, mini_batches: Sequence[Batch], context: Context) -> tuple[list[list[float]], list[int]]:
        """By mini-batch what the losses are divided by, of all ranks, and micro-batches: those of the plan, times as
        many as it takes for no rank to compute more samples in one than the plan counts on. Which samples are left out
        is known to their own rank alone, so the ranks always add up."""
        own, needs = [], []
        for batch in mini_batches:
            dp = context.batch_size // (len(mini_batches) * len(batch))
            at_once = self.config.computed_samples(len(batch), dp, len(mini_batches))
            counted = sum(term != _LEFT_OUT for term in _terms_of(batch))
            own.append(self._weights(batch))
            # Each number of times that is too small for this rank; all ranks have as many of them.
            needs.append([float(counted > times * at_once) for times in range(1, -(-len(batch) // at_once))])
        values = torch.tensor([*chain(*own, *needs)], dtype=torch.float64, device=_device_of(mini_batches))
        sums = iter(context.sum_over_data_parallel(values).tolist())
        weights = [[next(sums) for _ in one] for one in own]
        micro_batches = []
        for batch, need in zip(mini_batches, needs, strict=True):
            times = 1 + sum(next(sums) > 0 for _ in need)
            most = len(batch) // batch.together // context.micro_batches
            micro_batches.append(context.micro_batches * max(1, min(times, most)))
        return weights, micro_batches

    def _step(
        self, model: Model, batch: Batch, weights: Sequence[float], micro_batches: int, *, with_kl: bool
    ) -> Stats:
        """The statistics of one optimizer step. None is made where every sample of the first loss is left out.

        weights: by term, of the mini-batch on all ranks.
        """
        if not weights[0]:
            return {"skipped_mini_batches": (1.0, 1.0)}
        return model.train_step(
            _computed(batch, 1 if PART in batch.data else micro_batches),
            "seq",
            lambda head, part: self._loss(head, part, weights, with_kl=with_kl),
            lambda part: self._weights(part)[0],
            micro_batches,
        )

    def _weights(self, batch: Batch) -> list[float]:
        """By term, what the loss of these rows is divided by."""
        places = _terms_of(batch)
        return [
            loss.weight(_of_term(batch, [i for i, place in enumerate(places) if place == number], number))
            for number, loss in enumerate(self._losses)
        ]

    def _loss(self, head: Head, part: Batch, weights: Sequence[float], *, with_kl: bool) -> tuple[Tensor, Stats]:
        """The sum of the terms of a micro-batch, in units of the first one's weight."""
        places = _terms_of(part)
        total: Tensor | None = None
        stats: Stats = {}
        for number, (term, loss) in enumerate(zip(self.config.terms, self._losses, strict=True)):
            rows = [i for i, place in enumerate(places) if place == number]
            if not rows:
                continue
            seen = _of_term(part, rows, number)
            value, made = loss(head, part, rows, seen, with_kl=with_kl and number == 0)
            if number:  # a term whose rows have no token in the loss adds nothing
                value = value * (term.coef * weights[0] / weights[number] if weights[number] else 0.0)
            total = value if total is None else total + value
            stats |= made
        if total is None:  # all are left out: a loss of zero that still takes part in the backward pass
            total = self._losses[0].quantity(head, part, list(range(len(part))))[0].sum() * 0
        return total, stats


def optimizer_steps(
    step: Callable[[MiniBatch], Stats],
    mini_batches: Sequence[MiniBatch],
    context: Context,
    device: torch.device,
    *,
    epochs: int,
    max_kl: float | None,
) -> Stats:
    """The statistics of `epochs` passes over the mini-batches, in their order, with one optimizer step on each.

    The update ends after a step in whose pass the mean of the statistic `kl_from_rollout` was above `max_kl`, if there
    is one; the statistic `stopped_after` then counts the steps. All ranks of the call end alike: `step` gives
    statistics on the last pipeline stage alone, and their sum, made on `device`, reaches all.
    """
    steps = list(mini_batches) * epochs
    stats: Stats = {}
    for number, batch in enumerate(steps, start=1):
        made = step(batch)
        stats = add_stats([stats, made])
        if max_kl is not None and number < len(steps):
            moved = torch.tensor(made.get(KL_STATISTIC, (0.0, 0.0)), dtype=torch.float64, device=device)
            kl, tokens = context.sum_over_outputs(moved).tolist()
            if kl > max_kl * tokens:
                return stats | {"stopped_after": (float(number), 1.0)}
    return stats


class MeasureInterface:
    """See `Measure`."""

    def __init__(self, config: Measure):
        self.config = config
        self._loss = _Loss(config)

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config
        evaluation = Evaluation(batch, context, c.reports)
        read = evaluation.batch(c.batch)
        rows = _with_term(as_rollouts(read, c.rows), 0)
        parts: list[Stats] = []

        def measure(head: Head, part: Batch) -> dict[str, list[Tensor]]:
            counted = [i for i, term in enumerate(_terms_of(part)) if term != _LEFT_OUT]
            if counted:
                seen = part.select(counted)
                loss, stats = self._loss(head, part, counted, seen, with_kl=False)
                parts.append(stats | prefixed(c.prefix, {"loss": (float(loss), self._loss.weight(seen))}))
            return {}

        model.forward(rows, "seq", measure, context.micro_batches)
        if not context.holds_outputs:
            return CallResult()
        stats = {**_of_rollouts(c, [read]), **add_stats(parts), **evaluation.stats}
        return CallResult(stats=prefixed(c.name, stats))


class _Loss:
    """One term: the quantity that its loss is of, the loss, and its reduction."""

    def __init__(self, term: Term):
        self.term = term
        self._function = load_function(term.loss.function)
        self._names = inspect.signature(self._function).parameters

    def __call__(self, head: Head, part: Batch, rows: list[int], seen: Batch, *, with_kl: bool) -> tuple[Tensor, Stats]:
        """The sum over the losses of `rows`, which are `seen` with the columns of this term, to be divided by the sum
        of `weight`."""
        bound = self.term.loss
        quantity, details = self.quantity(head, part, rows)
        keywords = dict(bound.keywords) | {name: each for name, each in details.items() if name in self._names}
        if self.term.rows == "pairs":
            counts = [1] * len(rows) if _is_scalar(head) else response_lengths(seen)
            sides = torch.stack([side.sum() for side in quantity.split(counts)])  # [2 x pairs]
            result = self._function(*sides.view(-1, 2).unbind(1), pairs_of(seen), *bound.arguments, **keywords)
        else:
            result = self._function(quantity, seen, *bound.arguments, **keywords)
        losses, stats = split_stats(result)
        count = len(rows) // 2 if self.term.rows == "pairs" else len(quantity)
        if not isinstance(losses, Tensor) or losses.shape != (count,):
            shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise InterfaceError(
                f"the loss {bound.name} returned {shape}, must be [{count}]: one number for each "
                f"{'pair' if self.term.rows == 'pairs' else 'response token'}, not reduced; its `reduction` does that"
            )
        if with_kl and "logprob" in seen.data:
            stats = {**stats, KL_STATISTIC: mean_of(kl_k3(seen.packed("logprob").values, quantity.detach()))}
        factors = self._factors(seen)
        return (losses if factors is None else losses * factors).sum(), stats

    def quantity(
        self, head: Head, part: Batch, rows: list[int]
    ) -> tuple[Tensor, dict[str, Tensor | Divergence | None]]:
        """Of the tokens of the responses of `rows`: values, or log-probabilities and by name what a loss may ask for
        beside them (see `loss_function`); of pairs with a scalar head, one score a sequence."""
        if _is_scalar(head) and self.term.rows == "pairs":
            lengths = [len(sequence) for sequence in part.data["seq"]]
            return at_least_fp32(head)[last_positions(lengths, head.device)[rows]], {}
        each = response_positions(part, head.device).split(response_lengths(part))
        positions = torch.cat([each[row] for row in rows])
        if _is_scalar(head):
            return at_least_fp32(head)[positions], {}
        tokens = part.packed("seq").values[positions + 1]
        logits, temperature = head[positions], self.term.temperature
        found = token_statistics(logits, tokens, temperature, with_entropy="entropy" in self._names)

        def divergence(target: Target, beta: float) -> Tensor:
            return generalised_jsd(logits, found.logsumexp, target, beta, temperature)

        return found.logprob, {"entropy": found.entropy, "is_top": found.is_top, "divergence": divergence}

    def weight(self, rows: Batch) -> float:
        """What the loss is divided by, of these rows."""
        if not len(rows):
            return 0.0
        if self.term.rows == "pairs":
            return len(rows) / 2
        if self._is_by_sequence:
            return float(len(rows))
        return float(torch.cat(rows.data["in_loss"]).sum() if "in_loss" in rows.data else sum(response_lengths(rows)))

    @cached_property
    def _is_by_sequence(self) -> bool:
        return self.term.loss.reduction.kind != "token_mean"

    def _factors(self, rows: Batch) -> Tensor | None:
        """What the losses of tokens are multiplied by, [responses]; None: by 1."""
        if self.term.rows == "pairs":
            return None
        factors = [rows.packed(name).values for name in ("weight", "in_loss") if name in rows.data]
        if self._is_by_sequence:
            factors.append(_of_tokens(rows, self.term.loss.reduction))
        return math.prod(factors, start=torch.ones_like(factors[0])) if factors else None


def _of_rollouts(config: Update | Measure, batches: Sequence[Batch]) -> Stats:
    """The statistics of rollouts, where the call reads and reports them."""
    is_reported = config.reports is None or "rollout" in config.reports
    return add_stats(rollout_stats(batch.data) for batch in batches) if is_reported and config.rows == "rollout" else {}


def _device_of(batches: Sequence[Batch]) -> torch.device:
    """Where their sequences are."""
    return batches[0].data["seq"][0].device


def _is_scalar(head: Head) -> bool:
    return isinstance(head, Tensor) and head.dim() == 1


def _of_tokens(rows: Batch, reduction: Reduction) -> Tensor:
    """By token of the responses the factor of a reduction by sequences: [responses]."""
    device = _device_of([rows])
    lengths = response_lengths(rows)
    if reduction.kind == "sequence_sum_over":
        return torch.full((sum(lengths),), 1 / reduction.over, dtype=torch.float64, device=device)
    each = on_device(torch.tensor(lengths), device)
    counts = each if "in_loss" not in rows.data else torch.stack([mask.sum() for mask in rows.data["in_loss"]])
    return (1 / counts.double().clamp(min=1)).repeat_interleave(each, output_size=sum(lengths))


def _merged(terms: Sequence[Batch], gradient_parts: int) -> Batch:
    """The rows of all terms in one batch, each with its term, for `_of_term`; what a row has no value for is empty."""
    marked = []
    for number, batch in enumerate(terms):
        row = _with_term(batch, number)
        shared = {name: row.data[name] for name in (*_SEQUENCES, _TERM)}
        if gradient_parts:
            parts = [place * gradient_parts // len(row) for place in range(len(row))]
            shared[PART] = [torch.tensor([part, gradient_parts]) for part in parts]
        own = {f"{number} {name}": column for name, column in row.data.items() if name not in shared}
        marked.append(replace(row, data=shared | own))
    if len(marked) == 1:  # two rows of a pair stay together
        return marked[0]
    keys = dict.fromkeys(key for batch in marked for key in batch.data)
    nothing = torch.empty(0, device=_device_of(terms))
    return concatenate(
        [replace(batch, data={key: batch.data.get(key, [nothing] * len(batch)) for key in keys}) for batch in marked]
    )


def _of_term(merged: Batch, rows: Sequence[int], number: int) -> Batch:
    """Rows of one term, with the columns that they had."""
    own = f"{number} "
    data = {
        name.removeprefix(own): column
        for name, column in merged.data.items()
        if name in _SEQUENCES or name.startswith(own)
    }
    return Batch(merged.ids, data).select(rows)


def _with_term(batch: Batch, number: int) -> Batch:
    counts = [True] * len(batch)
    if "valid" in batch.data:
        counts = (of_responses("valid", batch.data["valid"], batch.ids) > 0).tolist()
    terms = [torch.tensor([number if is_counted else _LEFT_OUT]) for is_counted in counts]
    return batch.with_data(**{_TERM: terms})


def _computed(batch: Batch, micro_batches: int) -> Batch:
    """The rows that are in a loss, and as many others as give every micro-batch a row: all ranks have equally many
    micro-batches."""
    runs = [range(first, first + batch.together) for first in range(0, len(batch), batch.together)]
    terms = _terms_of(batch)
    left_out = [run for run in runs if all(terms[row] == _LEFT_OUT for row in run)]
    spared = set(left_out[max(0, micro_batches - (len(runs) - len(left_out))) :])
    return replace(batch.select([row for run in runs if run not in spared for row in run]), together=batch.together)


def _terms_of(batch: Batch) -> list[int]:
    return [int(term) for term in batch.data[_TERM]]
