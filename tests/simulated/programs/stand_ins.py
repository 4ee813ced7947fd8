"""Stand-ins for kernels that the simulator cannot launch, and for values that a program looks at on the host."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

import realhf.engine.generate.paged_attention as paged_attention
import realhf.models.attention as attention
from realhf.models.attention_kernels import Machine, machine

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


@lru_cache
def _machine(device: str) -> Machine:
    """This one, as if flash-attn were installed: torch's own `varlen_attn` cannot be launched."""
    here = machine(device)
    return replace(here, flash_attn=(2, 8), lacks=tuple(lack for lack in here.lacks if lack.name != "flash-attn"))


def _launch_triton() -> None:
    """FakeGPU takes no threads for a kernel that it has loaded, where a GPU takes 1,024. Prints what is loaded."""
    utils = triton.runtime.driver.active.utils
    load = utils.load_binary

    def loaded(name: str, *binary: object) -> tuple[object, ...]:
        print(f"loaded {name}", flush=True)
        return (*load(name, *binary)[:-1], 1024)

    utils.load_binary = loaded


def _zero(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copied from the host, since no kernel fills memory."""
    return torch.zeros((), dtype=dtype).to(like.device)


# In place of kernels of CUB, which cannot be launched, and of those whose result the host looks at.
OPERATORS: dict[str, Callable[..., object]] = {
    "embedding_dense_backward": lambda gradient, indices, rows, *_: gradient.new_empty(rows, gradient.shape[-1]),
    "sort.stable": lambda x, **_: (x, torch.arange(x.numel()).view(x.shape).to(x.device)),
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
    """Gives realhf flash-attn, and torch the operators above. Triton's kernels are compiled and launched."""
    flash = ModuleType("flash_attn")
    vars(flash).update(flash_attn_varlen_func=_varlen, flash_attn_with_kvcache=_with_kvcache)
    sys.modules["flash_attn"] = flash
    for module in (attention, paged_attention):
        vars(module)["machine"] = _machine
    _launch_triton()
    for name, operator in OPERATORS.items():
        _LIBRARY.impl(name, operator, "CUDA")
    vars(dist)["batch_isend_irecv"] = _in_one_order(dist.batch_isend_irecv)
