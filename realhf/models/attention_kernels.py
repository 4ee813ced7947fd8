"""The kernel for attention within packed sequences, chosen by the machine and the tensors.

On a GPU it is flash-attn's (Dao, 2023) if it is installed, else torch's build of the same kernel
(`torch.nn.attention.varlen`). Both compute only in half precision; all other cases use torch's scaled dot products.
"""

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from realhf.architecture.decoding import takes_flash
from realhf.base.errors import UserError
from realhf.gpu.host_numbers import on_device

PackedKernel = Literal["flash-attn", "torch varlen", "scaled dot products"]

_FLASH_CAPABILITY = (8, 0)  # needed by flash-attn 2, and by torch's build of it
# The first version with windows, pages and deterministic gradients.
_FLASH_ATTN_VERSION = (2, 6)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of a machine that the choice of a kernel depends on.

    device: the device of the tensors, as torch calls it.
    compute_capability: of the GPU.
    flash_attn: the version of flash-attn; None if it is not installed or too old.
    varlen: the options of torch's `varlen_attn`, which differ between versions; none if torch lacks it.
    """

    device: str
    compute_capability: tuple[int, int] = (0, 0)
    flash_attn: tuple[int, ...] | None = None
    varlen: frozenset[str] = frozenset()

    def runs_flash(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether flash attention's kernels take heads of `head_dim` numbers of `dtype`."""
        is_capable = self.device == "cuda" and self.compute_capability >= _FLASH_CAPABILITY
        return is_capable and takes_flash(str(dtype).removeprefix("torch."), head_dim)


@lru_cache
def machine(device: str) -> Machine:
    """This machine, for tensors on `device`; inspected once.

    Raises:
        UserError: flash-attn is installed for another torch.
    """
    if device != "cuda":
        return Machine(device=device)
    return Machine(
        device=device,
        compute_capability=torch.cuda.get_device_capability(),
        flash_attn=_flash_attn_version(),
        varlen=_varlen_options(),
    )


def packed_kernel(machine: Machine, dtype: torch.dtype, head_dim: int, window: int | None) -> PackedKernel:
    """The kernel for attention within packed sequences, forward and backward."""
    if not machine.runs_flash(dtype, head_dim):
        return "scaled dot products"
    if machine.flash_attn is not None:
        return "flash-attn"
    # A causal mask is a window that is open to the left, so a `varlen_attn` without windows has no causal mask.
    return "torch varlen" if "window_size" in machine.varlen else "scaled dot products"


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, window: int | None
) -> Tensor:
    """Causal attention within each sequence by flash-attn, [tokens, heads, head_dim] as `query`.

    Args:
        query: [tokens, heads, head_dim].
        key, value: [tokens, kv_heads, head_dim].
        cu_seqlens: [sequences + 1] int32 on the device, where each sequence starts.
        longest: tokens of the longest sequence.
        window: see `realhf.models.attention.Attention`.
    """
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest,
        causal=True, window_size=window_borders(window), deterministic=True,
    )  # fmt: skip


def torch_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    window: int | None,
    options: frozenset[str],
) -> Tensor:
    """As `flash_attention`, by torch's `varlen_attn`, which has `options`."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = {}
    group = query.shape[1] // key.shape[1]
    if group > 1 and "enable_gqa" in options:
        grouped = {"enable_gqa": True}
    elif group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    attend: Callable[..., Any] = varlen_attn  # its options differ from version to version
    return attend(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=window_borders(window), **grouped
    )


def window_borders(window: int | None) -> tuple[int, int]:
    """How many tokens before and after its own a query attends to, as flash attention counts; -1: all."""
    return (-1 if window is None else window - 1, 0)


def last_token_borders(window: int | None) -> tuple[int, int]:
    """As `window_borders`, for one query a sequence, at its last token. Without a window both sides are open, since no
    token follows; only then does flash-attn read the keys of grouped heads once."""
    return (-1, -1) if window is None else window_borders(window)


def boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    """cu_seqlens [sequences + 1] int32 of sequences laid end to end."""
    return on_device(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), device)


def _flash_attn_version() -> tuple[int, ...] | None:
    try:
        version = importlib.metadata.version("flash-attn")  # flash-attn-4 has a folder of the same name
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:
        raise UserError(
            f"flash-attn {version} does not load with torch {torch.__version__} ({error}); install a build for this "
            "torch (pip install flash-attn --no-build-isolation), or remove it: torch's own kernel then takes its place"
        ) from error
    numbers = tuple(int(part) for part in version.split(".")[:2])
    return numbers if numbers >= _FLASH_ATTN_VERSION else None


def _varlen_options() -> frozenset[str]:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
