"""Attention of the new tokens of a step over pages of keys and values: the kernels there are, and which is taken."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.architecture.decoding import FLASH_PAGE_TOKENS, PAGE_TOKENS
from realhf.cpu import paged_attention as cpu
from realhf.cpu.native import kernels as _kernels
from realhf.models.attention_kernels import Machine, last_token_borders, machine, packed_kernel

PagedKernel = Literal["C++", "Triton", "flash-attn", "gathered pages"]

_USUAL_HEAD_DIM = 128
# The cost of each kernel where it takes the place of a missing one.
_COSTS = {
    "flash-attn": f"in pages of {FLASH_PAGE_TOKENS} tokens, where plans count on pages of {PAGE_TOKENS}",
    "gathered pages": "so that each step first copies its keys and values, which takes memory and many times as long",
    "torch varlen": "whose gradients may differ in their last bits from run to run",
    "scaled dot products": "with a launch for each length and gradients that may differ from run to run",
}


@dataclass(frozen=True)
class DecodeRows:
    """The sequences that get one more token.

    `table` [rows, pages] int32 lists the pages of each in order (entries behind the last page are not read) and
    `lengths` [rows] the tokens in the cache, without the new one, in the kernels' `lengths_dtype`.
    """

    table: Tensor
    lengths: Tensor


class LayerPages(NamedTuple):
    """One layer's pages: keys and values, each [pages, ...] of a shape in `PagedKernels.page_shapes`."""

    keys: Tensor
    values: Tensor


class PagedKernels(Protocol):
    """The layout of keys and values in pages, and the kernels that work on them.

    page: tokens in a page.
    lengths_dtype: of `DecodeRows.lengths`.
    reads_behind: numbers in a page behind its sequence's end are read, and must be finite.
    gathers: the work grows with the width of the table, not with the lengths of the sequences.
    """

    page: int
    lengths_dtype: torch.dtype
    reads_behind: bool
    gathers: bool

    def page_shapes(self, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the keys and of the values in a page."""

    def write(self, pages: LayerPages, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Puts `key` and `value` [tokens, kv_heads, head_dim] at `places` [tokens] int64, page * `page` + place."""

    def attend(
        self, pages: LayerPages, rows: DecodeRows, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        """Writes `key` and `value` of the new tokens behind their sequences, and attends to these with `query`.

        Makes nothing wait for the device, and its launches depend on shapes alone. See `realhf.models.attention`.
        """


def paged_kernel(machine: Machine, dtype: torch.dtype, head_dim: int, *, has_cpp: bool) -> PagedKernel:
    """The kernel that attends over pages on such a machine."""
    if machine.device == "cpu" and has_cpp and dtype in (torch.float32, torch.float64, torch.bfloat16):
        return "C++"
    if machine.runs_triton(dtype, head_dim):
        return "Triton"
    if machine.flash_attn is not None and machine.runs_flash(dtype, head_dim):
        return "flash-attn"
    return "gathered pages"


def paged_kernels(like: Tensor, head_dim: int) -> PagedKernels:
    """Those for heads of the dtype and on the device of `like`."""
    match paged_kernel(machine(like.device.type), like.dtype, head_dim, has_cpp=_kernels is not None):
        case "C++":
            return CppKernels()
        case "Triton":
            return TritonKernels()
        case "flash-attn":
            return FlashKernels()
        case "gathered pages":
            return TorchKernels()


def describe_attention(device: str) -> list[str]:
    """Which kernels models of each dtype take on `device`, a line for each choice."""
    here, choices = machine(device), dict[str, list[str]]()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        packed = packed_kernel(here, dtype, _USUAL_HEAD_DIM, None)
        paged = paged_kernel(here, dtype, _USUAL_HEAD_DIM, has_cpp=_kernels is not None)
        choice = f"{packed} over packed sequences, {paged} over the KV cache"
        choices.setdefault(choice, []).append(str(dtype).removeprefix("torch."))
    return [f"{', '.join(dtypes)}: {choice}" for choice, dtypes in choices.items()]


def missing_kernels(device: str) -> dict[str, tuple[str, str]]:
    """The kernels that a GPU is without, by the words of `REALHF_WITHOUT`: why that is so, what takes their place and
    what that costs; and the remedy. Only those that a model in bfloat16 would take."""
    here = machine(device)
    packed = packed_kernel(here, torch.bfloat16, _USUAL_HEAD_DIM, None)
    paged = paged_kernel(here, torch.bfloat16, _USUAL_HEAD_DIM, has_cpp=_kernels is not None)
    missing = {}
    for name, why, remedy in here.lacks if here.is_capable else ():
        taken, place = (paged, "the KV cache") if name == "triton" else (packed, "packed sequences")
        if name != "varlen" or packed != "flash-attn":
            missing[name] = f"{name} {why}: over {place} {taken} takes its place, {_COSTS[taken]}", remedy
    return missing


class CppKernels:
    """Our kernel on the CPU (`realhf.cpu.paged_attention`)."""

    page, lengths_dtype, reads_behind, gathers = PAGE_TOKENS, torch.int64, False, False

    def page_shapes(self, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return cpu.page_shapes(kv_heads, head_dim)

    def write(self, pages: LayerPages, places: Tensor, key: Tensor, value: Tensor) -> None:
        cpu.write(*pages, places, key, value)

    def attend(
        self, pages: LayerPages, rows: DecodeRows, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        return cpu.attend(pages, (rows.table, rows.lengths), query, key, value, window)


class TritonKernels:
    """A kernel of our own on GPUs (`realhf.gpu.paged_attention`), in float32 and half precision.

    It cuts the keys of a sequence into parts of a constant size: a row's numbers depend on its own sequence alone, and
    launches on the numbers of rows and pages.
    """

    page, lengths_dtype, reads_behind, gathers = PAGE_TOKENS, torch.int32, False, False

    def page_shapes(self, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (kv_heads, PAGE_TOKENS, head_dim), (kv_heads, PAGE_TOKENS, head_dim)

    def write(self, pages: LayerPages, places: Tensor, key: Tensor, value: Tensor) -> None:
        page, within = places // PAGE_TOKENS, places % PAGE_TOKENS
        for store, new in zip(pages, (key, value), strict=True):
            store[page, :, within] = new

    def attend(
        self, pages: LayerPages, rows: DecodeRows, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        from realhf.gpu.paged_attention import attend

        return attend(pages, rows.table, rows.lengths, query, key, value, window)


class FlashKernels:
    """flash-attn's kernel, which finds the pages by itself; half precision on a GPU."""

    page, lengths_dtype, reads_behind, gathers = FLASH_PAGE_TOKENS, torch.int32, False, False

    def page_shapes(self, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (FLASH_PAGE_TOKENS, kv_heads, head_dim), (FLASH_PAGE_TOKENS, kv_heads, head_dim)

    def write(self, pages: LayerPages, places: Tensor, key: Tensor, value: Tensor) -> None:
        for store, new in zip(pages, (key, value), strict=True):
            store.flatten(0, 1)[places] = new

    def attend(
        self, pages: LayerPages, rows: DecodeRows, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        out = flash_attn_with_kvcache(
            query[:, None], *pages, key[:, None], value[:, None],
            cache_seqlens=rows.lengths, block_table=rows.table, causal=True, window_size=last_token_borders(window),
        )  # fmt: skip
        return out.squeeze(1)  # [rows, heads, head_dim]


class TorchKernels:
    """The same on any device in any dtype: the pages of a sequence are copied together, and shorter ones masked."""

    lengths_dtype, reads_behind, gathers = torch.int64, True, True

    def __init__(self, page: int = PAGE_TOKENS):
        self.page = page

    def page_shapes(self, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (kv_heads, head_dim, self.page), (kv_heads, self.page, head_dim)

    def write(self, pages: LayerPages, places: Tensor, key: Tensor, value: Tensor) -> None:
        page, within = places // self.page, places % self.page
        pages.keys[page, :, :, within] = key
        pages.values[page, :, within] = value

    def attend(
        self, pages: LayerPages, rows: DecodeRows, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        own = rows.lengths // self.page  # each row's last page, by its place in the table
        last = rows.table.gather(1, own[:, None])[:, 0]
        self.write(pages, last * self.page + rows.lengths % self.page, key, value)
        # Behind its last page a row of the table may hold anything.
        is_used = torch.arange(rows.table.shape[1], device=query.device) <= own[:, None]
        table = rows.table.long().where(is_used, 0)
        own_keys = pages.keys[table].permute(0, 2, 3, 1, 4).flatten(3)  # [rows, kv_heads, head_dim, tokens]
        own_values = pages.values[table].transpose(1, 2).flatten(2, 3)  # [rows, kv_heads, tokens, head_dim]
        places = torch.arange(own_values.shape[2], device=query.device)
        is_seen = places <= rows.lengths[:, None]
        if window is not None:
            is_seen &= places > rows.lengths[:, None] - window
        # Query heads that share a kv head stand where the query length would: no key is repeated.
        grouped = query.unflatten(1, (key.shape[1], -1))  # [rows, kv_heads, group, head_dim]
        out = F.scaled_dot_product_attention(
            grouped, own_keys.transpose(-1, -2), own_values, attn_mask=is_seen[:, None, None]
        )
        return out.flatten(1, 2)  # [rows, heads, head_dim]
