"""The header of a safetensors file, for writers that give the tensors one after the other."""

import math
from collections.abc import Mapping

import msgspec

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def safetensors_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """The bytes before the tensors, and the order in which their elements follow, without gaps.

    The format (https://huggingface.co/docs/safetensors): see `realhf.models.checkpoint_index.read_header`. The widest
    dtype comes first, as in the library, so every tensor starts at a multiple of its elements' size.

    Args:
        tensors: dtype (a key of `ITEM_BYTES`) and shape of each, by name.
    """
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][0]], name))
    entries, end = {}, 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order
