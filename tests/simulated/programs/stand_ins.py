"""Stand-ins for kernels that the simulator cannot launch, and for values that a program looks at on the host."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import realhf.engine.generate.paged_attention as paged_attention
import realhf.gpu.paged_attention as triton_kernels
import realhf.models.attention as attention
import realhf.models.attention_kernels as attention_kernels
from realhf.machine.gpu_kernels import left_out

HOPPER = attention_kernels.Machine(
    device="cuda", compute_capability=(9, 0), flash_attn=(2, 8), triton=None if "triton" in left_out() else (3, 8)
)
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


class _Launched:
    """In place of a kernel in Triton: looks at what it is launched with."""

    def __init__(self, kernel: Any):
        self._signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, num_warps: int = 4, num_stages: int = 3, **constants: object) -> None:
            given = self._signature.bind(*arguments, **constants).arguments
            tensors = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
            assert all(tensor.is_cuda for tensor in tensors.values())
            rows, heads, head_dim = given["parts"].shape[:2] + given["parts"].shape[-1:]
            assert grid[0] == rows == len(given["lengths"])
            assert given["lengths"].dtype == torch.int32
            assert given["HEAD_DIM"] == head_dim
            if "table" not in given:
                assert grid[1:] == (heads,)
                return
            kv_heads, page = given["keys"].shape[1:3]
            assert given["keys"].shape == given["values"].shape == (len(given["keys"]), kv_heads, page, head_dim)
            assert given["key"].shape == given["value"].shape == (rows, kv_heads, head_dim)
            assert given["query"].shape == (rows, heads, head_dim)
            assert len({given[name].dtype for name in ("query", "key", "value", "keys", "values")}) == 1
            assert grid[1:] == (kv_heads, -(-given["table"].shape[1] * page // given["SPLIT"]))
            for name in ("query", "key", "value", "table"):
                assert given[name].stride(0) == given[f"{name}_row"]

        return launch


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
    """Gives realhf a GPU with Triton, unless `REALHF_WITHOUT` says otherwise, and flash-attn, and torch the operators
    above."""
    flash = ModuleType("flash_attn")
    vars(flash).update(flash_attn_varlen_func=_varlen, flash_attn_with_kvcache=_with_kvcache)
    sys.modules["flash_attn"] = flash
    for name in ("attend_split", "join_splits"):
        vars(triton_kernels)[name] = _Launched(vars(triton_kernels)[name])
    for module in (attention_kernels, attention, paged_attention):
        vars(module)["machine"] = lambda device: HOPPER
    for name, operator in OPERATORS.items():
        _LIBRARY.impl(name, operator, "CUDA")
    vars(dist)["batch_isend_irecv"] = _in_one_order(dist.batch_isend_irecv)
