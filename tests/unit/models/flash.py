"""flash-attn and torch's `varlen_attn` as their documentation describes them, one token at a time, on the CPU.

They stand for kernels that need a GPU: what is tested with them is what we ask of these, not the kernels.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from realhf.models.attention_kernels import Machine

HOPPER = Machine(device="cuda", compute_capability=(9, 0))
WITH_TRITON = Machine(device="cuda", compute_capability=(9, 0), triton=(3, 8))
IN_INTERPRETER = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs Triton's kernels on the device")


def attend(query: Tensor, key: Tensor, value: Tensor, window: tuple[int, int], *, causal: bool) -> Tensor:
    """query [q, heads, head_dim] over key, value [k, kv_heads, head_dim]; differentiable.

    The last query stands at the last key. Query i sees keys from i + k - q - window[0] to i + k - q + window[1], a
    border of -1 being none, and `causal` makes the second one 0.
    """
    left, right = window[0], 0 if causal else window[1]
    queries, keys = len(query), len(key)
    group = query.shape[1] // key.shape[1]
    rows = []
    for i in range(queries):
        place = i + keys - queries
        first = 0 if left < 0 else max(0, place - left)
        end = keys if right < 0 else min(keys, place + right + 1)
        heads = []
        for h in range(query.shape[1]):
            k, v = (x[first:end, h // group].double() for x in (key, value))
            heads.append((k @ query[i, h].double() / query.shape[2] ** 0.5).softmax(0) @ v)
        rows.append(torch.stack(heads))
    return torch.stack(rows).to(query.dtype)


def check_borders(cu_seqlens: Tensor, longest: int) -> list[int]:
    assert cu_seqlens.dtype == torch.int32
    lengths = cu_seqlens.diff().tolist()
    assert longest == max(lengths)
    return lengths


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, window_size, deterministic
):
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k
    assert deterministic, "the same seed must give the same gradients"
    lengths = check_borders(cu_seqlens_q, max_seqlen_q)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([attend(*part, window_size, causal=causal) for part in parts])


def reads_groups_once(q: Tensor, k: Tensor, window_size: tuple[int, int]) -> bool:
    """Whether flash-attn 2 takes the query heads of one key head as queries of it, in place of reading it for each."""
    return q.shape[1] == 1 and q.shape[2] > k.shape[2] and max(window_size) < 0 and q.shape[3] % 8 == 0


# What `flash_attn_with_kvcache` found in each of its calls.
groups_read_once: list[bool] = []


def flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *, cache_seqlens, block_table, causal, window_size):
    groups_read_once.append(reads_groups_once(q, k_cache, window_size))
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert k_cache.shape[1] % 256 == 0
    page, out = k_cache.shape[1], []
    for row, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[row, : length // page + 1].long()
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[pages[-1], length % page] = new[row, 0]
        keys, values = (x[pages].flatten(0, 1)[: length + 1] for x in (k_cache, v_cache))
        out.append(attend(q[row], keys, values, window_size, causal=causal))
    return torch.stack(out)


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    """Of torch 2.12 and later; `without_groups` before that."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return flash_attn_varlen_func(
        q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, causal=False, window_size=window_size, deterministic=True
    )


def without_groups(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    return varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


def install_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import flash_attn` find the functions above."""
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
