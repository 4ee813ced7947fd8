"""Log-probabilities from a language-model head, without ever holding all logits.

Each tensor-parallel rank has a part of the vocabulary (Megatron-LM, Shoeybi et al., 2020, section 3). Logits exist for
one tile at a time: some tokens and some of the vocabulary. Their memory depends neither on the batch nor on the length
of sequences. The backward pass computes each tile again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.chunks import GPU_LOGITS_BYTES, LOGITS_BYTES, logits_tile
from realhf.cpu import fused
from realhf.cpu.products import PackedWeight
from realhf.parallel import ordered
from realhf.parallel.collectives import gathered
from realhf.parallel.gradients import before_use, gradient_sink
from realhf.parallel.linear import linear, weight_gradient
from realhf.parallel.ordered import Leaves
from realhf.parallel.regions import gather_last_dim

_MANY_ROWS = 2**40  # more than a tile has


@dataclass(frozen=True)
class TokenLogprobs:
    """Statistics of given tokens, [n] each, in at least float32.

    logprob: log softmax(logits / temperature) at the token, with gradient.
    is_top: True where no other token is more likely.
    logsumexp: of logits / temperature, without gradient.
    entropy: of the distribution, in nats, with gradient; None unless asked for.
    """

    logprob: Tensor
    is_top: Tensor
    logsumexp: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class Logits:
    """The logits [n, vocab] of a head, as its input and its weight; `logits[rows]` selects rows.

    hidden: [n, hidden], after the final norm, equal on all ranks of `group`. Its gradient is the part that comes
        through this rank's vocabulary; `realhf.parallel.sequence.enter` sums it over the group.
    weight: [vocab / tp, hidden], this rank's rows; or slices of these, which are used one after the other.
    packed: see `realhf.parallel.linear.pack`; `full` uses it.
    chunk_bytes: the size of a tile's logits; None: a size that suits the device.
    leaves: the parts of sums over the vocabulary, where their bits must not depend on the layout. The gradient of
        `hidden` then comes through the vocabulary of all ranks.
    """

    hidden: Tensor
    weight: Tensor | Sequence[Tensor]
    group: dist.ProcessGroup | None = None
    packed: PackedWeight | None = None
    chunk_bytes: int | None = None
    leaves: Leaves | None = None

    def __getitem__(self, rows: Tensor) -> "Logits":
        """`rows`: indices [m] int64, or a mask [n] bool."""
        return replace(self, hidden=self.hidden[rows])

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def slices(self) -> list[Tensor]:
        """Slices of this rank's rows of the weight; one where the weight is whole."""
        return [self.weight] if isinstance(self.weight, Tensor) else list(self.weight)

    def full(self) -> Tensor:
        """All logits [n, vocab] in the dtype of the weights, equal on every rank; they take their full memory."""
        parts = []
        for weight in self.slices:
            before_use(weight)
            if self.leaves is None:
                parts.append(linear(self.hidden, weight, packed=self.packed))
            else:
                parts.append(self.leaves.packed.product(self.hidden, weight))
        return gather_last_dim(torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0], self.group)

    def of_tokens(self, tokens: Tensor, temperature: float = 1.0, *, with_entropy: bool = False) -> TokenLogprobs:
        """Log-probabilities of `tokens` [n] int64, without holding all logits.

        Ranks exchange a few numbers a token, in one all-gather, and all get the same bits.

        Raises:
            ValueError: a token is not in the vocabulary. On a GPU its log-probability is NaN instead, so that the host
                need not wait.
        """
        assert tokens.shape == self.hidden.shape[:1], f"{tuple(tokens.shape)} tokens for {len(self)} rows of logits"
        if self.device.type == "cpu":
            self._check(tokens)
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (self.hidden, *self.slices))
        softmax = self.softmax(temperature, with_entropy=with_entropy)
        logprob, entropy, is_top, logsumexp = _TokenLogprobs.apply(self.hidden, tokens, softmax, keeps, *self.slices)
        if self.device.type != "cpu":
            logprob = logprob.masked_fill((tokens < 0) | (tokens >= self._vocab_size), torch.nan)
        return TokenLogprobs(logprob, is_top, logsumexp, entropy if with_entropy else None)

    def softmax(self, temperature: float, *, with_entropy: bool = False) -> "Softmax":
        """The settings of the tiles."""
        chunk_bytes = self.chunk_bytes or _chunk_bytes(self.hidden)
        return Softmax(temperature, self.group, chunk_bytes, with_entropy, self.leaves)

    @property
    def _vocab_size(self) -> int:
        return sum(map(len, self.slices)) * (1 if self.group is None else dist.get_world_size(self.group))

    def _check(self, tokens: Tensor) -> None:
        if not len(tokens):
            return
        vocab_size = self._vocab_size
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
        scaled = self.logits.to(at_least_float32(self.logits.dtype)) / temperature
        picked = scaled.gather(-1, tokens[:, None])[:, 0]
        entropy = torch.distributions.Categorical(logits=scaled).entropy() if with_entropy else None
        logsumexp = scaled.logsumexp(-1)
        return TokenLogprobs(picked - logsumexp, picked >= scaled.amax(-1), logsumexp.detach(), entropy)


@dataclass(frozen=True)
class Softmax:
    """The settings that all tiles have in common."""

    temperature: float
    group: dist.ProcessGroup | None
    chunk_bytes: int
    with_entropy: bool
    leaves: Leaves | None = None

    def tiles(self, rows: int, vocab: int, item: int) -> tuple[list[slice], list[slice]]:
        """(parts of the vocabulary, parts of the rows); each pair is a tile. With `leaves` the first are the model's,
        however many rows and ranks there are."""
        if self.leaves is None:
            tile_rows, tile_vocab = logits_tile(rows, vocab, item, self.chunk_bytes)
            return _slices(vocab, tile_vocab), _slices(rows, tile_rows)
        leaf = vocab // self.leaves.own
        _, tile_vocab = logits_tile(_MANY_ROWS, leaf, item, self.chunk_bytes)
        parts = [
            slice(first + part.start, first + part.stop)
            for first in range(0, vocab, leaf)
            for part in _slices(leaf, tile_vocab)
        ]
        return parts, _slices(rows, max(1, self.chunk_bytes // (tile_vocab * item)))

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""
        return linear(x, weight) if self.leaves is None else ordered.product(x, weight)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The statistics [4, n] of the whole vocabulary, by those of this rank's parts of it, or of all of them
        together (see `_TokenLogprobs.forward`)."""
        of_parts = self.of_all_ranks(parts)
        return _joined(of_parts) if self.leaves is None else _joined_in_order(of_parts)

    def of_all_ranks(self, parts: Sequence[Tensor]) -> Tensor:
        """[parts, ...]: those of this rank's parts of the vocabulary (or of all of them together) behind those of lower
        ranks."""
        own = parts[0][None] if len(parts) == 1 else torch.stack(list(parts))
        return own if self.group is None else gathered(own, self.group).flatten(0, 1)

    def scaled(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """logits / temperature of some rows and some of the vocabulary, in at least float32, a new tensor."""
        logits = self.product(hidden, weight).to(at_least_float32(hidden.dtype))
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def statistics(self, z: Tensor, tokens: Tensor, out: Tensor) -> None:
        """Writes those of a tile's z = logits / temperature [rows, vocab] to `out` [3 or 4, rows]: logsumexp, the
        largest, that of `tokens` [rows], and the mean under the softmax."""
        torch.amax(z, -1, out=out[1])
        if self.leaves is None:
            torch.logsumexp(z, -1, out=out[0])
        else:
            out[0] = out[1] + ordered.row_sums((z - out[1][:, None]).exp_()).log_()
        out[2] = z.gather(-1, tokens[:, None])[:, 0]
        if len(out) > 3:
            terms = (z - out[0][:, None]).exp_() * z
            out[3] = terms.sum(-1) if self.leaves is None else ordered.row_sums(terms)


class _TokenLogprobs(torch.autograd.Function):
    """(hidden, tokens, slices of the weight) -> (log-probability, entropy or zeros, is_top, logsumexp), each [n].

    With p = softmax(z), z = logits / temperature, the gradients of z are, Kronecker's delta at the token t,

        d log p_t / d z_j = delta_jt - p_j
        d H / d z_j       = -p_j (z_j - logsumexp(z) + H)

    Both passes go through the vocabulary once, and through all rows for each part of it. So the weight is read once and
    its gradient written once. With a vocabulary of 76,000 and 512 tokens, a pass over the whole weight for every 13
    tokens took a third of a step. Slices
    that are there for their use alone are used one after the other, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, tokens: Tensor, softmax: Softmax, keeps: bool, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide, rows = at_least_float32(hidden.dtype), len(hidden)
        rank = 0 if softmax.group is None else dist.get_rank(softmax.group)
        local = tokens - rank * sum(map(len, weights))
        is_fused = fused.trains(hidden, *weights) if keeps else fused.takes(hidden, *weights)
        asked = 4 if softmax.with_entropy else 3
        parts: list[Tensor] = []
        kept, first = None, 0
        for weight in weights:
            before_use(weight)
            in_vocab, in_rows = softmax.tiles(rows, len(weight), wide.itemsize)
            for columns in in_vocab:
                # For this part of the vocabulary: logsumexp, greatest logit, the token's logit (0 if it is elsewhere),
                # mean logit under the softmax.
                own = hidden.new_zeros((4, rows), dtype=wide)
                there, is_there = _within(local - first, columns)
                for at in in_rows:
                    if is_fused:
                        kept = softmax.product(hidden[at], weight[columns])
                        fused.vocabulary_statistics(kept, there[at], softmax.temperature, own[:asked, at])
                        continue
                    z = softmax.scaled(hidden[at], weight[columns])
                    softmax.statistics(z, there[at], own[:asked, at])
                    kept = z
                own[2].masked_fill_(~is_there, 0.0)
                parts.append(own)
                if softmax.leaves is None and len(parts) > 1:
                    parts = [_joined(torch.stack(parts))]
            first += len(weight)
        logsumexp, greatest, picked, mean = softmax.joined(parts)
        entropy = logsumexp - mean if softmax.with_entropy else torch.zeros_like(logsumexp)
        if keeps:
            # The last tile's logits are kept, so a batch of one tile is projected once. Slices that are there for their
            # use alone are not saved as tensors, which would all be asked for at once.
            ctx.save_for_backward(hidden, local, logsumexp, entropy, kept, *(weights if len(weights) == 1 else ()))
            ctx.softmax, ctx.is_fused, ctx.slices = softmax, is_fused, weights
        is_top = picked >= greatest
        ctx.mark_non_differentiable(is_top, logsumexp)
        return picked - logsumexp, entropy, is_top, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, local, logsumexp, entropy, kept, *whole = ctx.saved_tensors
        given = _OfTokens(ctx.softmax, hidden, logsumexp, ctx.is_fused, local, entropy, grad_logprob, grad_entropy)
        needs_hidden, _, _, _, *needs = ctx.needs_input_grad
        of_hidden, of_weights = given.through(ctx.slices, whole, needs_hidden, needs, kept)
        return of_hidden, None, None, None, *of_weights


@dataclass(frozen=True)
class Gradients(ABC):
    """The backward pass of a function of the logits: what its tiles share, and the gradient of each tile's logits."""

    softmax: Softmax
    hidden: Tensor
    logsumexp: Tensor

    @abstractmethod
    def of_logits(self, weight: Tensor, at: slice, columns: slice, kept: Tensor | None) -> Tensor:
        """The gradient of a tile's logits, [rows, vocabulary of the tile], in the dtype of `hidden`.

        Args:
            weight: the tile's rows of the weight.
            columns: the tile's part of this rank's vocabulary.
            kept: the tile's logits, where the forward pass has kept them.
        """

    def through(
        self,
        slices: Sequence[Tensor],
        whole: Sequence[Tensor],
        needs_hidden: bool,
        needs: Sequence[bool],
        kept: Tensor | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of `hidden` and of the slices of the weight, as far as they are needed.

        Args:
            whole: the weight as it was saved, if it is one slice; else none.
            kept: the logits of the last tile.
        """
        hidden, weights = self.hidden, whole or slices
        of_weights: list[Tensor | None] = []
        # Parts of the vocabulary add up in float32 at least.
        is_one = len(weights) == 1 and len(self._tiles(weights[0])[0]) == 1 and self.softmax.leaves is None
        grad_hidden: Tensor | None = None  # [leaves, rows, hidden]
        if needs_hidden:
            own = 1 if self.softmax.leaves is None else self.softmax.leaves.own
            grad_hidden = hidden.new_zeros((own, *hidden.shape), dtype=hidden.dtype if is_one else self.logsumexp.dtype)
        first = sum(map(len, weights))
        for weight, leaf, is_needed in reversed(list(zip(weights, slices, needs, strict=True))):
            first -= len(weight)
            before_use(leaf)
            sink = gradient_sink(leaf) if is_needed else None
            grad_weight = None
            if is_needed and sink is None:  # without rows no part of it is written below
                grad_weight = torch.empty_like(weight) if len(hidden) else torch.zeros_like(weight)
            last = kept if leaf is slices[-1] else None
            for columns, of_columns in self._of_slice(weight, first, grad_hidden, is_needed, last):
                if sink is not None:
                    sink[columns] += of_columns
                elif grad_weight is not None:
                    grad_weight[columns] = of_columns
            of_weights.insert(0, grad_weight)
        if grad_hidden is None:
            return None, of_weights
        leaves = self.softmax.leaves
        return (grad_hidden[0] if leaves is None else leaves.sum(grad_hidden)).to(hidden.dtype), of_weights

    def _tiles(self, weight: Tensor) -> tuple[list[slice], list[slice]]:
        return self.softmax.tiles(len(self.hidden), len(weight), self.logsumexp.dtype.itemsize)

    def _of_slice(
        self, weight: Tensor, first: int, grad_hidden: Tensor | None, needs_weight: bool, kept: Tensor | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Adds to the gradient of `hidden` the part that comes through a slice of the weight; gives the slice's own,
        part by part, if that is needed. `first`: its first row; `kept`: the logits of its last tile."""
        hidden = self.hidden
        in_vocab, in_rows = self._tiles(weight)
        for columns in in_vocab:
            of_columns: Tensor | None = None  # the gradient of these rows of the weight
            place = slice(first + columns.start, first + columns.stop)
            for at in in_rows:
                is_last = columns is in_vocab[-1] and at is in_rows[-1]
                grad = self.of_logits(weight[columns], at, place, kept if is_last else None)
                if grad_hidden is not None:
                    leaf = columns.start * len(grad_hidden) // len(weight)
                    grad_hidden[leaf, at] += self.softmax.product(grad, weight[columns].T)
                if needs_weight:
                    of_weight = weight_gradient if self.softmax.leaves is None else ordered.weight_gradient
                    product = of_weight(grad, hidden[at])
                    if len(in_rows) > 1:
                        product = product.to(self.logsumexp.dtype)  # rows add up in float32 at least too
                    of_columns = product if of_columns is None else of_columns.add_(product)
                    del product
                del grad  # gone before the next tile takes its memory
            if of_columns is not None:
                yield columns, of_columns


@dataclass(frozen=True)
class _OfTokens(Gradients):
    """Those of `_TokenLogprobs`."""

    is_fused: bool
    local: Tensor  # the tokens' places in this rank's vocabulary
    entropy: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor

    def of_logits(self, weight: Tensor, at: slice, columns: slice, kept: Tensor | None) -> Tensor:
        softmax, hidden = self.softmax, self.hidden[at]
        there, is_there = _within(self.local[at], columns)
        at_token = self.grad_logprob[at] * is_there
        if self.is_fused:
            logits = softmax.product(hidden, weight) if kept is None else kept
            of_rows = (self.logsumexp[at], self.grad_logprob[at], at_token)
            entropies = (self.entropy[at], self.grad_entropy[at]) if softmax.with_entropy else None
            return fused.logprob_gradient(logits, there, softmax.temperature, *of_rows, entropies)
        z = softmax.scaled(hidden, weight) if kept is None else kept
        log_p = z - self.logsumexp[at, None]
        scale = self.grad_logprob[at, None]
        if softmax.with_entropy:
            scale = scale + self.grad_entropy[at, None] * (log_p + self.entropy[at, None])
        grad = log_p.exp_().mul_(scale).neg_()
        grad.scatter_add_(-1, there[:, None], at_token[:, None])
        if softmax.temperature != 1.0:
            grad.div_(softmax.temperature)
        return grad.to(hidden.dtype)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _within(local: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(indices of the tokens within `columns` of the vocabulary, 0 for tokens outside; which tokens are inside)."""
    is_there = (local >= columns.start) & (local < columns.stop)
    return (local - columns.start).masked_fill_(~is_there, 0), is_there


def _joined(parts: Tensor) -> Tensor:
    """The statistics [4, n] of a vocabulary from those of its parts [parts, 4, n]."""
    logsumexp, greatest, picked, mean = parts.unbind(1)  # [parts, n] each
    whole = logsumexp.logsumexp(0)
    share = (logsumexp - whole).exp()  # each part's share of the probability
    return torch.stack([whole, greatest.amax(0), picked.sum(0), (share * mean).sum(0)])


def _joined_in_order(parts: Tensor) -> Tensor:
    """As `_joined`; a row's bits do not depend on the other rows."""
    logsumexp, greatest, picked, mean = parts.unbind(1)
    most = logsumexp.amax(0)
    whole = most + ordered.tree_sum((logsumexp - most).exp()).log()
    share = (logsumexp - whole).exp()
    return torch.stack([whole, greatest.amax(0), ordered.tree_sum(picked), ordered.tree_sum(share * mean)])


def logprobs_in_order(logits: Tensor, tokens: Tensor, temperature: float, leaves: int) -> Tensor:
    """Log-probabilities [n] of `tokens` under softmax(logits / temperature) of whole logits [n, vocab]: the bits of
    `Logits.of_tokens` under any layout of a model with so many leaves."""
    is_on_gpu = ordered.on_gpu(logits)
    softmax = Softmax(temperature, None, _chunk_bytes(logits), False, Leaves(leaves))
    wide = at_least_float32(logits.dtype)
    parts = []
    for columns in softmax.tiles(len(logits), logits.shape[1], wide.itemsize)[0]:
        own = logits.new_zeros((4, len(logits)), dtype=wide)
        there, is_there = _within(tokens, columns)
        if is_on_gpu:
            z = logits[:, columns].to(wide)
            softmax.statistics(z if temperature == 1.0 else z / temperature, there, own[:3])
        else:
            fused.vocabulary_statistics(logits[:, columns].contiguous(), there, temperature, own[:3])
        own[2].masked_fill_(~is_there, 0.0)
        parts.append(own)
    logsumexp, _, picked, _ = softmax.joined(parts)
    return picked - logsumexp


def _chunk_bytes(x: Tensor) -> int:
    return LOGITS_BYTES if x.device.type == "cpu" else GPU_LOGITS_BYTES


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
