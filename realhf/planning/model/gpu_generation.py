"""Bytes that a decode step takes on a GPU beside the KV cache and activations: counted from the tensors of the engine
(`tests/unit/engine/test_traced_generation.py` compares them with a trace of it)."""

import math
from dataclasses import dataclass

from realhf.architecture.decoding import PAGE_TOKENS, power_of_two, rows_bucket, takes_triton
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType

_SPLIT_TOKENS = 512  # a program of our kernel reads these of a sequence (`realhf.gpu.paged_attention`)
_BLOCK_TOKENS = 128  # whose probabilities a draw adds up together (`realhf.engine.generate.sampling`)
_ROW_BYTES = 4096  # a draw has for each row: one block in float32 and float64, and numbers


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """The options of a generation that its draws depend on; see `GenerationOptions`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0

    @classmethod
    def of(cls, options: object) -> "DrawOptions":
        """Those that `options`, of a call, has; else the defaults."""
        return cls(**{name: getattr(options, name) for name in cls.__dataclass_fields__ if hasattr(options, name)})

    def drawing_bytes(self, rows: int, vocab: int, dtype: DType) -> float:
        """The most while tokens are drawn from logits [rows, vocab], which are there meanwhile.

        Arrays of the logits' size, in float32 at least: a copy of the logits, at temperatures of their own their
        quotient, and log-probabilities; then, beside these, what each truncation makes and the probabilities, padded to
        whole blocks.
        """
        item, wide = DTYPE_BYTES[dtype], max(DTYPE_BYTES[dtype], 4)
        kept, others = item + wide, 0  # logits and log-probabilities; truncated ones
        moments: list[float] = [kept + (wide if item < wide else 0) + (wide if self.temperature not in (0, 1) else 0)]
        if self.min_new_tokens:  # with a mask, as it was and renormalised
            moments.append(kept + 1 + 2 * wide)
            others = wide
        if self.temperature:
            if self.top_k:
                moments.append(kept + others + 2 * wide)
                others = wide
            if self.top_p < 1:  # sorted with places; in float64 probabilities, their sums, and the sums before each
                moments.append(kept + others + (wide + 8) + 3 * 8)
                others = wide
            padded = wide if vocab % _BLOCK_TOKENS else 0
            moments.append(kept + others + wide + padded + 2 * 8 / _BLOCK_TOKENS)
        return rows * (vocab * max(moments) + _ROW_BYTES)


def split_bytes(model: DecoderConfig, dtype: DType, tp: int, rows: int, tokens: int, *, is_graph: bool) -> float:
    """The sums of our attention kernel, where it reads sequences of `tokens` tokens in splits: for each split and head
    a mean and a number in float32."""
    pages = math.ceil(tokens / PAGE_TOKENS)
    if is_graph:
        rows, pages = rows_bucket(rows), power_of_two(pages)
    splits = math.ceil(pages * PAGE_TOKENS / _SPLIT_TOKENS)
    if splits == 1 or not takes_triton(dtype, model.head_dim):
        return 0.0
    return 4.0 * rows * model.num_heads / tp * splits * (model.head_dim + 1)
