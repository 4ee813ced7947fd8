"""Random numbers that belong to a sequence and a position, and the draw of a token with one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.cpu import fused
from realhf.parallel.ordered import row_sums

_WORD = 0xFFFFFFFF
# Multipliers and key increments of Philox-4x32 (Salmon et al., SC'11, section 3.3 and table 2).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BLOCK = 128  # tokens that a GPU adds up together; divides most vocabularies
_GRID = 2.0**52  # sums of probabilities on it have no rounding


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10, the counter-based generator of "Parallel random numbers: as easy as 1, 2, 3" (SC'11).

    `counter` is four int64 tensors of equal shape and `key` two integers, all holding 32-bit words;
    returns four words of random bits in the same form. For one key it is a bijection, so that
    different counters never share their four words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two words fills 64 bits; int64 keeps the same bits, and the mask undoes the sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + _KEY_INCREMENTS[0] & _WORD, k1 + _KEY_INCREMENTS[1] & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, step: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for every (seed, step, sample, position), whatever else is asked for with it.

    Args:
        seed: the run's, 0 <= seed < 2**64.
        step: the run's, 0 <= step < 2**32.
        sample_ids: int64, each in [0, 2**32).
        positions: int64, each in [0, 2**32); broadcasts against `sample_ids`.

    Returns:
        float64 of the broadcast shape, multiples of 2**-53.

    Raises:
        ValueError: seed or step is out of its range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} does not fit the random generator; choose 0 <= seed < 2**64")
    if not 0 <= step < 2**32:
        raise ValueError(f"step={step} does not fit the random generator; steps are 0 <= step < 2**32")
    sample_ids, positions = torch.broadcast_tensors(sample_ids, positions)
    zeros = torch.zeros_like(positions)
    high, low, _, _ = philox((positions, sample_ids, zeros + step, zeros), (seed & _WORD, seed >> 32))
    # 27 and 26 bits: every double in [0, 1) on the grid of 2**-53 is equally likely.
    return ((high >> 5) * 2**26 + (low >> 6)).double() / 2**53


@dataclass(frozen=True)
class Draw:
    """One token for every row.

    `tokens` [n] int64; `logprobs` [n], under the distribution drawn from, and `untruncated` [n], under the whole
    distribution of the same temperature (both at least float32); `margins` [n] float64.
    """

    tokens: Tensor
    logprobs: Tensor
    untruncated: Tensor
    margins: Tensor


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Which tokens are left out of a distribution before the draw.

    First `forbidden` [n] int64, one token of each row (-1: none). Then all but the `top_k` most likely tokens (0: all
    are kept; ties with the last one are kept too). Then all but the smallest set of most likely tokens whose
    renormalised probabilities sum to `top_p`.

    With `in_order`, on a GPU, no row's bits depend on the rows beside it, here and in the draw.
    """

    top_k: int = 0
    top_p: float = 1.0
    forbidden: Tensor | None = None
    in_order: bool = False

    def __call__(self, logprobs: Tensor) -> Tensor:
        """Log-probabilities [n, vocab] without the tokens left out, renormalised; the same tensor if none is left
        out."""
        logprobs = self.without_forbidden(logprobs)
        if 0 < self.top_k < logprobs.shape[-1]:
            least = logprobs.topk(self.top_k).values[:, -1:]
            logprobs = self.log_softmax(logprobs.masked_fill(logprobs < least, -torch.inf))
        if self.top_p < 1:
            in_order = logprobs.sort(descending=True, stable=True)
            probabilities = self.terms(in_order.values.double().exp())
            is_left = running_sums(probabilities) - probabilities < self.top_p  # by the sum of those before it
            is_kept = torch.zeros_like(is_left).scatter(-1, in_order.indices, is_left)
            logprobs = self.log_softmax(logprobs.masked_fill(~is_kept, -torch.inf))
        return logprobs

    @property
    def keeps_all(self) -> bool:
        return self.forbidden is None and not self.top_k and self.top_p >= 1

    def without_forbidden(self, logprobs: Tensor) -> Tensor:
        """[n, vocab], renormalised; the same tensor if none is forbidden."""
        if self.forbidden is None:
            return logprobs
        is_forbidden = torch.arange(logprobs.shape[-1], device=logprobs.device) == self.forbidden[:, None]
        return self.log_softmax(logprobs.masked_fill(is_forbidden, -torch.inf))

    def log_softmax(self, x: Tensor) -> Tensor:
        """[n, vocab] of x [n, vocab]."""
        if not self.in_order:
            return x.log_softmax(-1)
        x = x - x.amax(-1, keepdim=True)
        return x - row_sums(x.exp()).log()[:, None]

    def terms(self, probabilities: Tensor) -> Tensor:
        """Probabilities [n, vocab] as the terms of sums."""
        return (probabilities.double() * _GRID).round() / _GRID if self.in_order else probabilities


NO_TRUNCATION = Truncation()


def draw(logits: Tensor, uniforms: Tensor | None, temperature: float, truncation: Truncation = NO_TRUNCATION) -> Draw:
    """Draws from softmax(logits / temperature), truncated, by inverting its cumulative distribution.

    Args:
        logits: [n, vocab].
        uniforms: [n] float64 in [0, 1); unused at temperature 0.
        temperature: 0 takes the most likely token that is not forbidden, and reports log-probabilities of the
            untruncated distribution at temperature 1.

    Returns:
        tokens, their log-probabilities, and margins: by how much the random number missed the nearest other token's
        interval (1 at temperature 0, and where there is no other token). Whether a token is kept by top-k and top-p
        may depend on rounding too; the margin does not tell. A row that is no distribution (a logit is NaN or infinite,
        or all are -infinity) has the log-probability NaN, and some token.
    """
    if uniforms is not None and _is_fused(logits, temperature, truncation):
        tokens, logprobs, margins = fused.draw(logits, uniforms, temperature)
        return Draw(tokens, logprobs, logprobs, margins)
    whole = tempered_logprobs(logits, temperature, truncation)  # [n, vocab]
    if temperature == 0:
        return _certain(truncation.without_forbidden(whole).argmax(-1), whole, whole)
    logprobs = truncation(whole)
    assert uniforms is not None, "a draw at a temperature above 0 needs random numbers"
    find = _find if logits.device.type == "cpu" else _find_in_blocks
    tokens, margins = find(truncation.terms(logprobs.exp()), uniforms[:, None])
    untruncated = _pick(whole, tokens)
    return Draw(tokens, untruncated if truncation.keeps_all else _pick(logprobs, tokens), untruncated, margins)


def _find(probabilities: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [n] in whose intervals the `uniforms` [n, 1] of the total lie, and margins [n]; see `draw`."""
    borders = running_sums(probabilities)  # [n, vocab], upper border of every token's interval
    total = borders[:, -1:]  # 1 but for rounding
    point = _below(uniforms * total, total)
    tokens, lower, upper = _interval(borders, point)
    return tokens[:, 0], _margins(lower, point, upper, total)


def _find_in_blocks(probabilities: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """As `_find`, by sums of blocks of the vocabulary and then of tokens within a block: a GPU reads the probabilities
    once, and writes no float64 of the vocabulary's size."""
    vocab = probabilities.shape[-1]
    blocks = F.pad(probabilities, (0, -vocab % _BLOCK)) if vocab % _BLOCK else probabilities
    blocks = blocks.unflatten(-1, (-1, _BLOCK))  # [n, blocks, tokens]
    ends = running_sums(blocks.sum(-1, dtype=torch.float64))  # [n, blocks]
    total = ends[:, -1:]
    point = _below(uniforms * total, total)
    block, before, end = _interval(ends, point)
    borders = running_sums(blocks.take_along_dim(block[:, :, None], dim=1)[:, 0])  # [n, tokens], within the block
    last = borders[:, -1:]  # end - before but for rounding
    token, lower, upper = _interval(borders, _below(point - before, last))
    upper = torch.where(upper < last, before + upper, end)
    # A row of NaN is found behind its last token.
    return (block * _BLOCK + token).clamp_max(vocab - 1)[:, 0], _margins(before + lower, point, upper, total)


def running_sums(x: Tensor) -> Tensor:
    """The sums of x [n, m] along its rows, from the first element to each: float64, the same bits in every run."""
    # torch's kernel for a single row adds up in an order that depends on time (pytorch issue 75240); more rows take
    # another kernel.
    rows = x.expand(2, -1) if len(x) == 1 and x.device.type != "cpu" else x
    return rows.cumsum(-1, dtype=torch.float64)[: len(x)]


def _below(point: Tensor, total: Tensor) -> Tensor:
    """Rounding may lift a point to the total, which lies beyond the last interval."""
    return torch.minimum(point, total.nextafter(torch.zeros_like(total)))


def _interval(borders: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first interval whose upper border is above the point, which therefore is not empty, and its borders; [n, 1]
    each. `borders` [n, m] are the upper ones."""
    index = torch.searchsorted(borders, point, right=True)
    index = index.clamp_max(borders.shape[-1] - 1)  # a row of NaN gives m
    upper = borders.gather(-1, index)
    lower = torch.where(index > 0, borders.gather(-1, (index - 1).clamp_min(0)), 0.0)
    return index, lower, upper


def _margins(lower: Tensor, point: Tensor, upper: Tensor, total: Tensor) -> Tensor:
    # 0 and the total border no other token, so that no rounding moves a draw across them.
    return torch.minimum(
        torch.where(lower > 0, point - lower, 1.0),
        torch.where(upper < total, upper - point, 1.0),
    ).squeeze(-1)


def replay(logits: Tensor, tokens: Tensor, temperature: float, truncation: Truncation = NO_TRUNCATION) -> Draw:
    """The draw that would have given `tokens` [n]: their log-probabilities under logits [n, vocab], margins 1."""
    if _is_fused(logits, temperature, truncation):
        _, logprobs, margins = fused.draw(logits, None, temperature, tokens)
        return Draw(tokens, logprobs, logprobs, margins)
    whole = tempered_logprobs(logits, temperature, truncation)
    return _certain(tokens, whole if temperature == 0 else truncation(whole), whole)


def tempered_logprobs(logits: Tensor, temperature: float, truncation: Truncation = NO_TRUNCATION) -> Tensor:
    """log softmax(logits / temperature) in at least float32; temperature 0 reports temperature 1."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return truncation.log_softmax(logits if temperature in (0, 1) else logits / temperature)


def _is_fused(logits: Tensor, temperature: float, truncation: Truncation) -> bool:
    """Whether one kernel does it all."""
    return temperature > 0 and truncation.keeps_all and fused.takes(logits)


def _certain(tokens: Tensor, logprobs: Tensor, whole: Tensor) -> Draw:
    margins = torch.ones_like(tokens, dtype=torch.float64)
    untruncated = _pick(whole, tokens)
    return Draw(tokens, untruncated if logprobs is whole else _pick(logprobs, tokens), untruncated, margins)


def _pick(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1)  # [n]
