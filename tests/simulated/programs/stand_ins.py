"""Stand-ins for kernels that the simulator cannot launch, and for values that a program looks at on the host."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import realhf.engine.generate.paged_attention as paged_attention
import realhf.models.attention as attention
import realhf.models.attention_kernels as attention_kernels

HOPPER = attention_kernels.Machine(device="cuda", compute_capability=(9, 0), flash_attn=(2, 8))
_LIBRARY = torch.library.Library("aten", "IMPL")  # its operators live as long as it


class _Attention(torch.autograd.Function):
    """Takes and gives memory as flash-attn does; the values mean nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def _varlen(q: Tensor, k: Tensor, v: Tensor, *borders: object, **options: object) -> Tensor:
    return _Attention.apply(q, k, v)


def _with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **options: Tensor) -> Tensor:
    assert k_cache.shape[1] % 256 == 0
    assert options["cache_seqlens"].dtype == options["block_table"].dtype == torch.int32
    return torch.empty_like(q)


def _zero(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copied from the host, since no kernel fills memory."""
    return torch.zeros((), dtype=dtype).to(like.device)


# In place of kernels of CUB, which cannot be launched, and of those whose result the host looks at.
OPERATORS: dict[str, Callable[..., object]] = {
    "embedding_dense_backward": lambda gradient, indices, rows, *_: gradient.new_empty(rows, gradient.shape[-1]),
    "cumsum": lambda x, dim, *, dtype=None: torch.empty_like(x, dtype=dtype),
    "aminmax": lambda x, **_: (_zero(x, x.dtype), _zero(x, x.dtype)),
    "_index_put_impl_": lambda x, *_, **__: x,
    "nonzero": lambda x: torch.ones(x.shape).nonzero().to(x.device),
    "all": lambda x: torch.ones((), dtype=torch.bool).to(x.device),
}


def _in_one_order(post: Callable[[list[dist.P2POp]], object]) -> Callable[[list[dist.P2POp]], object]:
    """FakeGPU pairs messages of two ranks in the order in which both post them, and NCCL those of each direction."""

    def place(operation: dist.P2POp) -> tuple[int, bool]:
        is_from_lower = (operation.op is dist.isend) == (operation.peer > dist.get_rank())
        return operation.peer, not is_from_lower

    return lambda operations: post(sorted(operations, key=place))


def install() -> None:
    """Gives realhf a GPU with flash-attn, and torch the operators above."""
    flash = ModuleType("flash_attn")
    vars(flash).update(flash_attn_varlen_func=_varlen, flash_attn_with_kvcache=_with_kvcache)
    sys.modules["flash_attn"] = flash
    for module in (attention_kernels, attention, paged_attention):
        vars(module)["machine"] = lambda device: HOPPER
    for name, operator in OPERATORS.items():
        _LIBRARY.impl(name, operator, "CUDA")
    vars(dist)["batch_isend_irecv"] = _in_one_order(dist.batch_isend_irecv)
