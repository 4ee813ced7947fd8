"""The divergence of a language-model head's distributions from given ones, without ever holding all logits."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.parallel.gradients import before_use
from realhf.parallel.vocabulary import Gradients, Logits, Softmax, WholeLogits


@dataclass(frozen=True)
class Target:
    """The distributions that those of a head are compared with.

    logprob: [n, vocab]; with `tokens` [n, k + 1], of these tokens and, at the end, of all others together.
    tokens: [n, k] int64, no token twice in a row and fewer than the vocabulary has; None: all of it, in order.
    """

    logprob: Tensor
    tokens: Tensor | None = None

    def tile(self, at: slice, columns: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(log-probabilities [rows, columns], 0 where they are not named; which are named, None: all)."""
        if self.tokens is None:
            return self.logprob[at, columns].to(dtype), None
        width = columns.stop - columns.start
        local = self.tokens[at] - columns.start
        local = local.masked_fill((local < 0) | (local >= width), width)  # those elsewhere go to a column behind
        named = self.logprob[at, :-1].to(dtype)
        values = named.new_zeros((len(local), width + 1)).scatter_(1, local, named)
        is_named = torch.zeros_like(values, dtype=torch.bool).scatter_(1, local, True)
        return values[:, :width], is_named[:, :width]


def generalised_jsd(
    logits: Logits | WholeLogits, logsumexp: Tensor, target: Target, beta: float, temperature: float = 1.0
) -> Tensor:
    """With p = softmax(logits / temperature) and q the target, by row the generalised Jensen-Shannon divergence

        beta * KL(q || m) + (1 - beta) * KL(p || m),    m = beta * q + (1 - beta) * p,

    at beta = 0 and 1, where that is 0, KL(q || p) and KL(p || q), which it has the slopes of: [n], in nats, with
    gradient, in at least float32. A target of some tokens compares k + 1 outcomes, the last of which is any other
    token: that is at most the divergence of the whole distributions.

    Args:
        logsumexp: of logits / temperature, [n] (`realhf.parallel.vocabulary.TokenLogprobs`).

    Source: Agarwal et al., "On-policy distillation of language models" (2024), equation 1, which calls p there Q.
    """
    if isinstance(logits, Logits):
        divergence: Tensor = _Divergence.apply(
            logits.hidden, logsumexp, target, (logits.softmax(temperature), beta), *logits.slices
        )
        return divergence
    log_p = (logits.full().to(logsumexp.dtype) / temperature).log_softmax(-1)
    log_q = target.logprob.to(log_p.dtype)
    if target.tokens is not None:
        rest = log_p.scatter(1, target.tokens, -math.inf).logsumexp(-1, keepdim=True)
        log_p = torch.cat([log_p.gather(1, target.tokens), rest], dim=1)
    return _terms(log_p, log_q, beta)[0].sum(-1)


def _terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Element by element the terms of the divergence D, and h = d D / d log p but for a multiple of p: so that
    d D / d z = h - p * sum(h), where p = softmax(z)."""
    if beta == 0:
        q = log_q.exp()
        return q * (log_q - log_p), -q
    if beta == 1:
        terms = log_p.exp() * (log_p - log_q)
        return terms, terms
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    of_p = (1 - beta) * log_p.exp() * (log_p - log_m)
    return of_p + beta * log_q.exp() * (log_q - log_m), of_p


class _Divergence(torch.autograd.Function):
    """(hidden, logsumexp, target, slices of the weight) -> divergence [n]; each pass goes through the vocabulary once.

    Where the target names some tokens, the others' h is that of all of them together, by their share of it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, logsumexp: Tensor, target: Target, settings: tuple[Softmax, float], *weights: Tensor
    ) -> Tensor:
        (softmax, beta), rows = settings, len(hidden)
        parts: list[Tensor] = []
        first = 0 if softmax.group is None else dist.get_rank(softmax.group) * sum(map(len, weights))
        offset = first
        for weight in weights:
            before_use(weight)
            in_vocab, in_rows = softmax.tiles(rows, len(weight), logsumexp.dtype.itemsize)
            for columns in in_vocab:
                place = slice(offset + columns.start, offset + columns.stop)
                # Of this part of the vocabulary: the sum of the terms, that of h, and the log-probability of the tokens
                # that are not named.
                own = logsumexp.new_full((3, rows), -math.inf)
                for at in in_rows:
                    log_p = softmax.scaled(hidden[at], weight[columns]).sub_(logsumexp[at, None])
                    log_q, is_named = target.tile(at, place, log_p.dtype)
                    for total, terms in zip(own, _terms(log_p, log_q, beta), strict=False):
                        total[at] = (terms if is_named is None else terms.masked_fill(~is_named, 0.0)).sum(-1)
                    if is_named is not None:
                        own[2, at] = log_p.masked_fill_(is_named, -math.inf).logsumexp(-1)
                parts.append(own)
                if softmax.leaves is None:  # else all ranks add up the same parts
                    parts = [_joined(torch.stack(parts))]
            offset += len(weight)
        *sums, rest = _joined(softmax.of_all_ranks(parts))
        of_rest = torch.zeros_like(rest)
        if target.tokens is not None:
            terms, of_rest = _terms(rest, target.logprob[:, -1].to(rest.dtype), beta)
            sums = [sums[0] + terms, sums[1] + of_rest]
        divergence, slope = sums
        ctx.save_for_backward(hidden, logsumexp, slope, rest, of_rest, *(weights if len(weights) == 1 else ()))
        ctx.target, ctx.softmax, ctx.beta, ctx.slices, ctx.first = target, softmax, beta, weights, first
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, logsumexp, slope, rest, of_rest, *whole = ctx.saved_tensors
        given = _OfDivergence(
            ctx.softmax, hidden, logsumexp, ctx.target, ctx.beta, ctx.first, slope, rest, of_rest, grad
        )
        needs_hidden, _, _, _, *needs = ctx.needs_input_grad
        of_hidden, of_weights = given.through(ctx.slices, whole, needs_hidden, needs)
        return of_hidden, None, None, None, *of_weights


@dataclass(frozen=True)
class _OfDivergence(Gradients):
    """Those of `_Divergence`."""

    target: Target
    beta: float
    first: int  # the place of this rank's vocabulary in the whole
    slope: Tensor  # sum(h)
    rest: Tensor
    of_rest: Tensor  # h of the tokens that are not named, together
    grad: Tensor

    def of_logits(self, weight: Tensor, at: slice, columns: slice, kept: Tensor | None) -> Tensor:
        log_p = self.softmax.scaled(self.hidden[at], weight).sub_(self.logsumexp[at, None])
        place = slice(self.first + columns.start, self.first + columns.stop)
        log_q, is_named = self.target.tile(at, place, log_p.dtype)
        _, h = _terms(log_p, log_q, self.beta)
        if is_named is not None:
            h = torch.where(is_named, h, (log_p - self.rest[at, None]).exp() * self.of_rest[at, None])
        grad = (h - log_p.exp_() * self.slope[at, None]) * (self.grad[at, None] / self.softmax.temperature)
        return grad.to(self.hidden.dtype)


def _joined(parts: Tensor) -> Tensor:
    """The sums and the log-probability [3, n] of a vocabulary from those of its parts [parts, 3, n]."""
    return torch.cat([parts[:, :2].sum(0), parts[:, 2:].logsumexp(0)])
