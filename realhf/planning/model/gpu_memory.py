"""Bytes that the passes of a micro-batch take on a GPU, at the moments that may take the most: counted from the tensors
of the engine (`tests/unit/engine/test_traced_memory.py` compares them with a trace of it).

An element has i bytes; w = max(i, 4). The CPU's are in `realhf.planning.model.activations`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from realhf.architecture.chunks import logits_tile
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.planning.model.activations import (
    InFlight,
    feed_forward_bytes,
    flash_attends,
    kept_bytes,
    kept_layer_bytes,
    norm_bytes,
)
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.sizes import largest_weight, model_sizes

# Numbers of 8 bytes: each micro-batch's tokens have ids and positions; the present one's also places and inputs of the
# loss; a row of logits has statistics.
_PACKED_NUMBERS, _TOKEN_NUMBERS, _ROW_NUMBERS = 2, 4, 10
# Rows that flash attention's accumulators have behind each sequence, and multiples of its heads' width.
_FLASH_ROWS, _FLASH_WIDTH = 128, 32


@dataclass(frozen=True)
class GpuPass:
    """The passes of a micro-batch on one rank.

    tokens, sequences: of the micro-batch, at their most. rows: its tokens that get logits. micro_batches: all of them
        wait on the device.
    """

    model: DecoderConfig
    dtype: DType
    tp: int
    features: EngineFeatures
    tokens: float
    sequences: int
    rows: float
    micro_batches: int

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
        self, in_flight: Sequence[InFlight], chunks: Sequence[int], *, is_first: bool, is_last: bool, sent: int
    ) -> float:
        """The most on a stage with chunks of these numbers of layers; those `in_flight` wait for their backward pass.
        `sent`: messages to other stages, hidden states or their gradients, that it holds until they have come."""
        receives, chunk = not is_first or len(chunks) > 1, min(chunks)

        def of_all(layers: InFlight) -> float:
            """Forward passes that wait have rotary tables; with several chunks outputs that have been sent;
            inputs, unless the first layer keeps its own to be run again. One more message is being received."""
            waiting = math.ceil((layers.whole + layers.recomputed) / chunk)
            messages = sent + waiting * (len(chunks) > 1) + waiting * (receives and not layers.recomputed) + 1
            of_messages = self.own * messages * self.model.hidden_size * self.item if sent else 0
            tables = 2 * self.model.head_dim * self.item if self.model.positions == "rotary" else 0
            numbers = 8 * (_TOKEN_NUMBERS + _PACKED_NUMBERS * self.micro_batches)
            most = self._training_bytes(layers, chunk, is_first, is_last)
            return most + self.tokens * (of_messages + waiting * (tables + 8) + numbers)

        return max(map(of_all, in_flight))

    def inference_bytes(self, *, is_last: bool, messages: int) -> float:
        """The most of a forward pass without gradients: in a layer behind a norm, in attention or in the MLP; or in the
        head. `messages`: hidden states that the stage sends or receives meanwhile."""
        model, item = self.model, self.item
        hidden, tables = model.hidden_size * item, 2 * model.head_dim * item if model.positions == "rotary" else 0
        norm = {"rms": 2 * self.wide, "rms_plus_one": 2 * self.wide + item, "layer": item}[model.norm]
        layer = max(2 * hidden + norm * model.hidden_size, 2 * hidden + self._attends(), 3 * hidden + self._feeds())
        head = hidden
        if model.head == "scalar":
            layer, head = layer + self.wide, 0
        most = max(self.tokens * layer, self.tokens * head + self._forward_head() if is_last else 0.0)
        of_norms = 2 * model.hidden_size * self.wide if model.norm == "rms_plus_one" else 0
        numbers = 8 * (_TOKEN_NUMBERS + (_PACKED_NUMBERS + 1) * self.micro_batches)
        return most + of_norms + self.tokens * (messages * hidden + tables + numbers)

    def _attends(self) -> float:
        """Bytes a token: queries, keys and values, one product, with the rotated queries and what rotates them or the
        keys, or with both and attention's output; or with both arrays in w of the norm of either."""
        model = self.model
        queries, kv = model.query_size / self.tp, model.kv_size / self.tp
        beyond = max(2 * queries + kv, queries + 2 * kv) * self.item
        if model.qk_norm:
            beyond = max(beyond, 2 * queries * self.wide, queries * self.item + 2 * kv * self.wide)
        return (queries + 2 * kv) * self.item + beyond + model.head_dim * self.item

    def _feeds(self) -> float:
        """Bytes a token of an MLP: gate, up, the activation and the product. With experts: the rows, and the results of
        all but the last one, which computes, at most for all tokens; or the rows, the results in four orders and their
        sum."""
        model = self.model
        inner = (4 if model.mlp == "gated" else 2) * model.intermediate_size / self.tp * self.item
        if not model.experts.count:
            return inner
        hidden = model.hidden_size * self.item
        rows = model.experts.per_token * hidden
        return (
            max(2 * rows - hidden + inner, 5 * rows + hidden)
            + self.item * model.experts.count
            + 40 * model.experts.per_token
        )

    def _forward_head(self) -> float:
        """The rows that get logits; a tile's logits and an array for its statistics, beside the tile before."""
        model, features = self.model, self.features
        if model.head == "scalar":
            return 0.0
        selected = self.rows * (model.hidden_size * self.item + 8 * _ROW_NUMBERS)
        vocab, rows = model.vocab_size // (1 if features.full_logits else self.tp), math.ceil(self.rows)
        if features.full_logits or features.logits_chunk_bytes is None:
            return selected + 2.0 * rows * vocab * self.wide
        at_once, columns = logits_tile(rows, vocab, self.wide, features.logits_chunk_bytes)
        tiles = [  # a third of the same size takes no more
            some_rows * some_columns * self.wide
            for some_columns in _parts(vocab, columns)[-3:]
            for some_rows in _parts(rows, at_once)[-3:]
        ]
        return selected + max(before + 2.0 * tile for before, tile in pairwise([0, *tiles]))

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
        of_norms = 2 * (layers.whole + 2) if self.model.norm == "rms_plus_one" else 0  # each computes 1 + weight
        return max(moments) + of_norms * self.model.hidden_size * self.wide

    def _kept(self, layers: InFlight) -> float:
        return self.tokens * kept_bytes(self.model, self.dtype, self.tp, layers, self.features)

    def _run_again(self) -> float:
        """The bytes of a layer that has run again, beside the input that it had kept; with selective recomputation its
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
        - of the experts' outputs, as they are and by their weights; or, when the layer runs again, these outputs twice,
          the residual, and the gathered input and gradient. Then one expert after the other has what an MLP has, at
          most for all tokens;
        - of the second norm, five arrays in w, when what the MLP kept is freed;
        - of attention, when that norm is too.
        """
        model, item = self.model, self.item
        inner, weight = model.intermediate_size / self.tp * item, largest_weight(model, self.tp)
        gathered = model.hidden_size * item if self.features.sequence_parallel else 0
        mlp = max(self.tokens * 2 * inner, self.tokens * (gathered + inner) + weight * item, weight * self.summed)
        if model.experts.count:
            given = (2 * model.experts.per_token + self.own) * model.hidden_size * item
            mlp = max(mlp, self.tokens * (2 * gathered + given))
        freed = feed_forward_bytes(model, self.dtype, self.tp, self.features)
        norm = norm_bytes(model, self.dtype, self.tp, self.features, of_mlp=True)
        wide = model.hidden_size * self.wide * self.own
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
        """A tile's logits and their gradient. The forward pass keeps those of the last tile, and while it
        makes the statistics of a tile, those of the one before, with an array of its own. Parts of the vocabulary add
        up the gradient of hidden states in w; the gradient of a part's weight is there until that of the next is."""
        model, features, wide = self.model, self.features, self.wide
        vocab, rows = model.vocab_size // (1 if features.full_logits else self.tp), math.ceil(self.rows)
        chunk = None if features.full_logits else features.logits_chunk_bytes
        if chunk is None:  # whole: logits, their logarithms and their gradient
            return 3.0 * rows * vocab * wide
        at_once, columns = logits_tile(rows, vocab, wide, chunk)
        number, parts = math.ceil(rows / at_once), math.ceil(vocab / columns)
        last_rows, last_columns = rows - (number - 1) * at_once, vocab - (parts - 1) * columns
        forward = 3.0 * at_once * columns * wide if number > 2 else 0.0
        kept, gradient = (
            last_rows * last_columns * wide,
            columns * model.hidden_size * (wide if number > 1 else self.item),
        )
        made = [self._part(last_columns, at_once, number, last_rows, keeps_last=True) + gradient * (parts > 1)]
        if parts > 1:
            made.append(self._part(columns, at_once, number, last_rows, keeps_last=False) + gradient * (parts > 2))
        summed = 0 if parts == 1 else rows * model.hidden_size * wide
        return summed + max(forward, kept + max(made))

    def _part(self, columns: int, at_once: int, number: int, last_rows: int, *, keeps_last: bool) -> float:
        """Going backward through a part of the vocabulary in tiles of rows: of one tile the logits, their logarithms,
        and their gradient in i; or this gradient with the product for the weight's, which several tiles add up in w."""
        array, last = (rows * columns * self.wide for rows in (at_once, last_rows))
        narrow, is_copied = self.item / self.wide, self.item < self.wide
        logarithms = 1 + narrow if is_copied else 1.0  # arrays, with the gradient
        logits = (0 if keeps_last else 1) + logarithms  # of the last tile
        product, total = (columns * self.model.hidden_size * item for item in (self.item, self.wide))
        if number == 1:
            return max(logits * last, narrow * last + product)
        added = total + (product if is_copied else 0)
        first = max((1 + logarithms) * array, narrow * array + added)
        return max(first + total * (number > 2), total + max(logits * last, narrow * last + added))

    def _embedding(self) -> float:
        """The gradient of the embedding, with all of its rows, when all layers of the chunk are done."""
        sizes = model_sizes(self.model)
        elements = max(sizes.embedding_sharded / self.tp, sizes.embedding_replicated)
        return self.tokens * self.model.hidden_size * self.item + elements * self.summed


def _parts(whole: int, part: int) -> list[int]:
    """The sizes of the parts; the last one may be smaller."""
    return [min(part, whole - start) for start in range(0, whole, part)]
