"""Bytes that the passes of a micro-batch take on a GPU, at the moments that may take the most: counted from the tensors
of the engine (`tests/unit/engine/test_traced_memory.py` compares them with a trace of it).

Of i bytes an element: w = max(i, 4). The CPU's are in `realhf.planning.model.activations`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from realhf.architecture.chunks import logits_tile
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.planning.model.activations import (
    InFlight,
    flash_attends,
    kept_bytes,
    kept_layer_bytes,
    mlp_kept_bytes,
    norm_bytes,
)
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.sizes import largest_weight, model_sizes

# Numbers of 8 bytes: of a token its id, position, places and what the loss reads; of a row of logits the statistics.
_TOKEN_NUMBERS, _ROW_NUMBERS = 6, 10
# Rows that flash attention's accumulators have behind each sequence, and multiples of its heads' width.
_FLASH_ROWS, _FLASH_WIDTH = 128, 32


@dataclass(frozen=True)
class GpuPass:
    """The forward and backward pass of a micro-batch on one rank.

    tokens, sequences: of the micro-batch, at their most. rows: its tokens that get logits.
    """

    model: DecoderConfig
    dtype: DType
    tp: int
    features: EngineFeatures
    tokens: float
    sequences: int
    rows: float

    @property
    def item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        return max(self.item, 4)

    @property
    def own(self) -> float:
        """The part of the tokens that lie on this rank between tensor-parallel products."""
        return 1 / self.tp if self.features.sequence_parallel else 1.0

    @property
    def summed(self) -> int:
        """Bytes of an element of a gradient on its way into the sum: as the product gives it, and as it is added."""
        gradient = self.features.gradient_bytes(self.dtype)
        return self.item + (gradient if gradient != self.item else 0)

    def training_bytes(
        self, in_flight: Sequence[InFlight], chunks: Sequence[int], *, is_first: bool, is_last: bool
    ) -> float:
        """The most on a stage with chunks of these numbers of layers, of which so many wait for their backward pass."""
        return max(self._training_bytes(layers, min(chunks), is_first, is_last) for layers in in_flight)

    def _training_bytes(self, layers: InFlight, chunk: int, is_first: bool, is_last: bool) -> float:
        kept, again = self._kept(layers), self.features.recomputed.count(chunk)
        whole = InFlight(chunk - again, 0)
        moments = [0.0]
        if is_last:
            moments.append(kept + self._head())
        if again < chunk:
            moments.append(kept + self._layer())
        if again:  # the layers behind it are freed, and this one runs again
            moments.append(kept - self._kept(whole) + self._run_again() + self._layer())
        if is_first:
            moments.append(kept - self._kept(InFlight(whole.whole, again)) + self._embedding())
        tables = 2 * self.model.head_dim * self.item if self.model.positions == "rotary" else 0
        return max(moments) + self.tokens * (8 * _TOKEN_NUMBERS + tables)

    def _kept(self, layers: InFlight) -> float:
        return self.tokens * kept_bytes(self.model, self.dtype, self.tp, layers, self.features)

    def _run_again(self) -> float:
        """What a layer keeps once it has run again, beside the input that it had kept; with selective recomputation its
        last output is kept as well, and what the others gave is taken over."""
        again = self.tokens * kept_layer_bytes(self.model, self.dtype, self.tp, self.features)
        if self.features.recomputation == "selective":
            input_and_output = (self.own + 1) * self.model.hidden_size * self.item
            again += self.tokens * input_and_output - self._kept(InFlight(0, 1))
        return again

    def _layer(self) -> float:
        """A layer's backward pass beyond all that it kept: the gradient of its output, and

        - of both factors of the MLP's product; or of this product and a weight, with the gathered gradient of the
          output; or of this weight in both dtypes, when the product is freed;
        - of the second norm, five arrays in w, when what the MLP kept is freed;
        - of attention, when that norm is too.
        """
        model, item = self.model, self.item
        inner, weight = model.active_intermediate_size / self.tp * item, largest_weight(model, self.tp)
        gathered = model.hidden_size * item if self.features.sequence_parallel else 0
        mlp = max(self.tokens * 2 * inner, self.tokens * (gathered + inner) + weight * item, weight * self.summed)
        freed = mlp_kept_bytes(model, self.dtype, self.features) / self.tp
        norm, wide = norm_bytes(model, self.dtype, self.tp, self.features), model.hidden_size * self.wide * self.own
        of_norm = self.tokens * (5 * wide - freed - max(norm - wide, 0))
        attention = self._attention() - self.tokens * (freed + norm)
        return self.tokens * self.own * model.hidden_size * item + max(mlp, of_norm, attention)

    def _attention(self) -> float:
        """The gradients of attention's output, of queries, keys and values; those of keys and values for each query
        head where heads are grouped; the accumulator of the queries' gradient and a number a head.

        Flash attention, asked for the same gradients in every run, has an accumulator for each part of the keys that
        it computes at once: as many as keep all multiprocessors busy (Dao, 2023).
        """
        model, heads = self.model, self.model.num_heads / self.tp
        queries, kv = model.query_size / self.tp, model.kv_size / self.tp
        gradients = 2 * queries + 2 * kv + (2 * queries if model.num_kv_heads != model.num_heads else 0)
        rows, splits, width = self.tokens, 1, model.head_dim
        if flash_attends(model, self.dtype, self.features):
            rows += _FLASH_ROWS * self.sequences
            splits = math.ceil(self.features.multiprocessors / (self.sequences * heads))
            width = math.ceil(width / _FLASH_WIDTH) * _FLASH_WIDTH
        return self.tokens * gradients * self.item + rows * heads * (splits * width + 1) * self.wide

    def _head(self) -> float:
        """The final norm's six arrays in w; or what it keeps, the rows of its output that get logits, their gradient,
        and the head's tiles."""
        model = self.model
        norm = 6 * model.hidden_size * self.wide * self.own
        if model.head == "scalar":
            return self.tokens * norm
        kept = norm_bytes(model, self.dtype, self.tp, self.features) - model.hidden_size * self.item
        selected = self.rows * (2 * model.hidden_size * self.item + 8 * _ROW_NUMBERS)
        return max(self.tokens * norm, self.tokens * kept + selected + self._tiles())

    def _tiles(self) -> float:
        """The logits of the tile whose turn it is, their logarithms and their gradient, with the last tile's logits,
        which the forward pass keeps. Tiles of several rows add up the gradient of their weight in w; the tile before
        leaves its gradient and its product behind, until those of this one are made."""
        model, features, tp = self.model, self.features, self.tp
        vocab, rows = model.vocab_size // (1 if features.full_logits else tp), math.ceil(self.rows)
        chunk = None if features.full_logits else features.logits_chunk_bytes
        if chunk is None:  # whole: logits, their logarithms and their gradient
            return 3.0 * rows * vocab * self.wide
        at_once, columns = logits_tile(rows, vocab, self.wide, chunk)
        number = math.ceil(rows / at_once)
        array, last = (n * columns * self.wide for n in (at_once, rows - (number - 1) * at_once))
        narrow = self.item / self.wide  # the gradient's part of an array
        product, total = columns * model.hidden_size * self.item, columns * model.hidden_size * self.wide
        copied = product if self.item < self.wide else 0.0
        beside = 0 if columns == vocab else rows * model.hidden_size * self.wide  # the sum over parts of the vocabulary
        if number == 1:
            logarithms = array if self.item < self.wide else 0.0
            return beside + array + narrow * array + max(logarithms, product)
        moments = [
            (2 + narrow) * array + last,
            narrow * array + last + copied + total,
            (1 + narrow) * last + 2 * total + copied,
            2 * last + narrow * (last + array) + total * min(number - 1, 2),
        ]
        if number > 2:
            moments += [
                narrow * array + last + 2 * total + copied,
                (2 + 2 * narrow) * array + last + total * min(number - 2, 2),
            ]
        return beside + max(moments)

    def _embedding(self) -> float:
        """The gradient of the embedding, with all of its rows, when all layers of the chunk are done."""
        sizes = model_sizes(self.model)
        elements = max(sizes.embedding_sharded / self.tp, sizes.embedding_replicated)
        return self.tokens * self.model.hidden_size * self.item + elements * self.summed
