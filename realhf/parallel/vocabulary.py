"""Log-probabilities from a language-model head, without ever holding all logits.

Each tensor-parallel rank has a part of the vocabulary (Megatron-LM, Shoeybi et al., 2020, section 3). Logits exist for
one tile at a time: some tokens and some of the vocabulary. Their memory depends neither on the batch nor on the length
of sequences. The backward pass computes each tile again.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.cpu import fused
from realhf.parallel.gradients import gradient_sink
from realhf.parallel.linear import Packed, linear, weight_gradient
from realhf.parallel.regions import gather_last_dim

# The size of a tile's logits in the precision of the softmax. On a CPU a tile should stay in or near a core's cache,
# and still be large enough for efficient products. A GPU's kernels need far more rows and columns at once.
CHUNK_BYTES, GPU_CHUNK_BYTES = 4 << 20, 512 << 20
# Products with fewer rows in a tile are not efficient.
_FEWEST_ROWS = 512


@dataclass(frozen=True)
class TokenLogprobs:
    """Statistics of given tokens, [n] each, in at least float32.

    logprob: log softmax(logits / temperature) at the token, with gradient.
    is_top: True where no other token is more likely.
    entropy: of the distribution, in nats, with gradient; None unless asked for.
    """

    logprob: Tensor
    is_top: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class Logits:
    """The logits [n, vocab] of a head, as its input and its weight; `logits[rows]` selects rows.

    hidden: [n, hidden], after the final norm, equal on all ranks of `group`. Its gradient is the part that comes
        through this rank's vocabulary; `realhf.parallel.sequence.enter` sums it over the group.
    weight: [vocab / tp, hidden], this rank's rows.
    packed: see `realhf.parallel.linear.pack`; `full` uses it.
    chunk_bytes: the size of a tile's logits; None: a size that suits the device.
    """

    hidden: Tensor
    weight: Tensor
    group: dist.ProcessGroup | None = None
    packed: Packed | None = None
    chunk_bytes: int | None = None

    def __getitem__(self, rows: Tensor) -> "Logits":
        """`rows`: indices [m] int64, or a mask [n] bool."""
        return replace(self, hidden=self.hidden[rows])

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def full(self) -> Tensor:
        """All logits [n, vocab] in the dtype of the weights, equal on every rank; they take their full memory."""
        return gather_last_dim(linear(self.hidden, self.weight, packed=self.packed), self.group)

    def of_tokens(self, tokens: Tensor, temperature: float = 1.0, *, with_entropy: bool = False) -> TokenLogprobs:
        """Log-probabilities of `tokens` [n] int64, without holding all logits.

        Ranks exchange a few numbers a token, in one all-gather, and all get the same bits.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        assert tokens.shape == self.hidden.shape[:1], f"{tuple(tokens.shape)} tokens for {len(self)} rows of logits"
        self._check(tokens)
        keeps = torch.is_grad_enabled() and (self.hidden.requires_grad or self.weight.requires_grad)
        chunk_bytes = self.chunk_bytes or (CHUNK_BYTES if self.device.type == "cpu" else GPU_CHUNK_BYTES)
        logprob, entropy, is_top = _TokenLogprobs.apply(
            self.hidden, self.weight, tokens, _Softmax(temperature, self.group, chunk_bytes, with_entropy), keeps
        )
        return TokenLogprobs(logprob, is_top, entropy if with_entropy else None)

    def _check(self, tokens: Tensor) -> None:
        if not len(tokens):
            return
        vocab_size = len(self.weight) * (1 if self.group is None else dist.get_world_size(self.group))
        least, most = (int(bound) for bound in tokens.aminmax())
        if not 0 <= least <= most < vocab_size:
            wrong = least if least < 0 else most
            row = int((tokens == wrong).nonzero()[0])
            raise ValueError(
                f"log-probabilities of tokens: row {row} asks for the id {wrong}, and vocab_size={vocab_size} has ids "
                f"from 0 to {vocab_size - 1}; select the rows that have a token (`logits[rows]`) before asking"
            )


@dataclass(frozen=True)
class WholeLogits:
    """Logits [n, vocab] that are in memory, with the surface of `Logits`: for heads that are not one product."""

    logits: Tensor

    def __getitem__(self, rows: Tensor) -> "WholeLogits":
        return WholeLogits(self.logits[rows])

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def full(self) -> Tensor:
        """[n, vocab]."""
        return self.logits

    def of_tokens(self, tokens: Tensor, temperature: float = 1.0, *, with_entropy: bool = False) -> TokenLogprobs:
        """Log-probabilities of `tokens` [n] int64."""
        scaled = self.logits.to(_wide(self.logits.dtype)) / temperature
        picked = scaled.gather(-1, tokens[:, None])[:, 0]
        entropy = torch.distributions.Categorical(logits=scaled).entropy() if with_entropy else None
        return TokenLogprobs(picked - scaled.logsumexp(-1), picked >= scaled.amax(-1), entropy)


@dataclass(frozen=True)
class _Softmax:
    """The settings that all tiles have in common."""

    temperature: float
    group: dist.ProcessGroup | None
    chunk_bytes: int
    with_entropy: bool

    def tiles(self, rows: int, vocab: int, item: int) -> tuple[list[slice], list[slice]]:
        """(parts of the vocabulary, parts of the rows); each pair is a tile.

        A tile has the whole vocabulary if it still has enough rows then: each tile reads its weight once.
        """
        tile_rows = min(rows, max(self.chunk_bytes // (vocab * item), _FEWEST_ROWS))
        tile_vocab = min(vocab, max(1, self.chunk_bytes // (max(1, tile_rows) * item)))
        tile_rows = max(1, min(tile_rows, self.chunk_bytes // (tile_vocab * item)))
        return _slices(vocab, tile_vocab), _slices(rows, tile_rows)

    def scaled(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """logits / temperature of some rows and some of the vocabulary, in at least float32, a new tensor."""
        logits = linear(hidden, weight).to(_wide(hidden.dtype))
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)


class _TokenLogprobs(torch.autograd.Function):
    """(hidden, weight, tokens) -> (log-probability, entropy or zeros, is_top), each [n].

    With p = softmax(z), z = logits / temperature, the gradients of z are, Kronecker's delta at the token t,

        d log p_t / d z_j = delta_jt - p_j
        d H / d z_j       = -p_j (z_j - logsumexp(z) + H)

    Both passes go through the vocabulary once, and through all rows for each part of it. So the weight is read once and
    its gradient written once. With a vocabulary of 76,000 and 512 tokens, a pass over the whole weight for every 13
    tokens took a third of a step.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, softmax: _Softmax, keeps: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, rows, vocab = _wide(hidden.dtype), len(hidden), len(weight)
        rank = 0 if softmax.group is None else dist.get_rank(softmax.group)
        local = tokens - rank * vocab
        is_fused = fused.trains(hidden, weight) if keeps else fused.takes(hidden, weight)
        in_vocab, in_rows = softmax.tiles(rows, vocab, wide.itemsize)
        asked = 4 if softmax.with_entropy else 3
        total = kept = None
        for columns in in_vocab:
            # For this part of the vocabulary: logsumexp, greatest logit, the token's logit (0 if it is elsewhere), mean
            # logit under the softmax.
            own = hidden.new_zeros((4, rows), dtype=wide)
            there, is_there = _within(local, columns)
            for at in in_rows:
                if is_fused:
                    kept = linear(hidden[at], weight[columns])
                    fused.vocabulary_statistics(kept, there[at], softmax.temperature, own[:asked, at])
                    continue
                z = softmax.scaled(hidden[at], weight[columns])
                torch.logsumexp(z, -1, out=own[0, at])
                torch.amax(z, -1, out=own[1, at])
                own[2, at] = z.gather(-1, there[at, None])[:, 0]
                if softmax.with_entropy:
                    own[3, at] = ((z - own[0, at, None]).exp_() * z).sum(-1)
                kept = z
            own[2].masked_fill_(~is_there, 0.0)
            total = own if total is None else _joined(torch.stack([total, own]))
        assert total is not None, "a vocabulary has parts"
        logsumexp, greatest, picked, mean = _over_ranks(total, softmax.group)
        entropy = logsumexp - mean if softmax.with_entropy else torch.zeros_like(logsumexp)
        if keeps:
            # The last tile's logits are kept, so a batch of one tile is projected once.
            ctx.save_for_backward(hidden, weight, local, logsumexp, entropy, kept)
            ctx.softmax, ctx.is_fused, ctx.sink = softmax, is_fused, gradient_sink(weight)
        is_top = picked >= greatest
        ctx.mark_non_differentiable(is_top)
        return picked - logsumexp, entropy, is_top

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, local, logsumexp, entropy, kept = ctx.saved_tensors
        softmax, rows, vocab = ctx.softmax, len(hidden), len(weight)
        in_vocab, in_rows = softmax.tiles(rows, vocab, logsumexp.dtype.itemsize)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # Parts of the vocabulary add up in float32 at least.
        sum_dtype = hidden.dtype if len(in_vocab) == 1 else logsumexp.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=sum_dtype) if needs_hidden else None
        sink = ctx.sink if needs_weight else None
        grad_weight = torch.empty_like(weight) if needs_weight and sink is None else None
        for columns in in_vocab:
            there, is_there = _within(local, columns)
            at_token = grad_logprob * is_there
            of_columns: Tensor | None = None  # the gradient of these rows of the weight
            for at in in_rows:
                is_last = columns is in_vocab[-1] and at is in_rows[-1]
                if ctx.is_fused:
                    logits = kept if is_last else linear(hidden[at], weight[columns])
                    of_rows = (logsumexp[at], grad_logprob[at], at_token[at])
                    entropies = (entropy[at], grad_entropy[at]) if softmax.with_entropy else None
                    grad = fused.logprob_gradient(logits, there[at], softmax.temperature, *of_rows, entropies)
                else:
                    z = kept if is_last else softmax.scaled(hidden[at], weight[columns])
                    log_p = z - logsumexp[at, None]
                    scale = grad_logprob[at, None]
                    if softmax.with_entropy:
                        scale = scale + grad_entropy[at, None] * (log_p + entropy[at, None])
                    grad = log_p.exp_().mul_(scale).neg_()  # [rows, vocab / tp], of a tile
                    grad.scatter_add_(-1, there[at, None], at_token[at, None])
                    if softmax.temperature != 1.0:
                        grad.div_(softmax.temperature)
                    grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[at] += linear(grad, weight[columns].T)
                if needs_weight:
                    product = weight_gradient(grad, hidden[at])
                    if len(in_rows) > 1:
                        product = product.to(logsumexp.dtype)  # rows add up in float32 at least too
                    of_columns = product if of_columns is None else of_columns.add_(product)
            if of_columns is None:
                continue
            if sink is not None:
                sink[columns] += of_columns
            elif grad_weight is not None:
                grad_weight[columns] = of_columns
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _within(local: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(indices of the tokens within `columns` of the vocabulary, 0 for tokens outside; which tokens are inside)."""
    is_there = (local >= columns.start) & (local < columns.stop)
    return (local - columns.start).masked_fill_(~is_there, 0), is_there


def _over_ranks(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The statistics [4, n] of the whole vocabulary from those of every rank (see `_TokenLogprobs.forward`)."""
    if group is None:
        return own
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return _joined(torch.stack(parts))


def _joined(parts: Tensor) -> Tensor:
    """The statistics [4, n] of a vocabulary from those of its parts [parts, 4, n]."""
    logsumexp, greatest, picked, mean = parts.unbind(1)  # [parts, n] each
    whole = logsumexp.logsumexp(0)
    share = (logsumexp - whole).exp()  # of the probability that lies in a part
    return torch.stack([whole, greatest.amax(0), picked.sum(0), (share * mean).sum(0)])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
