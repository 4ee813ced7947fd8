"""The kernel for attention within packed sequences, chosen by the machine and the tensors.

On a GPU it is flash-attn's (Dao, 2023) if it is installed, else torch's build of the same kernel
(`torch.nn.attention.varlen`). Both compute only in half precision; all other cases use torch's scaled dot products.
`machine` tells what there is, for attention over the KV cache too (`realhf.engine.generate.paged_attention`).
"""

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from realhf.architecture.decoding import takes_flash, takes_triton
from realhf.gpu.host_numbers import on_device
from realhf.machine.gpu_kernels import REMEDIES, WITHOUT, left_out

PackedKernel = Literal["flash-attn", "torch varlen", "scaled dot products"]

_LEAST_CAPABILITY = (8, 0)  # flash-attn 2 and torch's build of it need it; our kernels compile for it
# The first version with windows, pages and deterministic gradients.
_FLASH_ATTN_VERSION = (2, 6)


class Lack(NamedTuple):
    """A kernel that a machine is without (a word of `REALHF_WITHOUT`), why that is so, and the remedy."""

    name: str
    why: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of a machine that the choice of a kernel depends on.

    device: the device of the tensors, as torch calls it.
    compute_capability: of the GPU.
    triton: the version of Triton; None if there is none that works.
    flash_attn: the version of flash-attn; None if there is none that works.
    varlen: the options of torch's `varlen_attn`, which differ between versions; none if torch lacks it.
    lacks: those of the three that are not there.
    """

    device: str
    compute_capability: tuple[int, int] = (0, 0)
    triton: tuple[int, ...] | None = None
    flash_attn: tuple[int, ...] | None = None
    varlen: frozenset[str] = frozenset()
    lacks: tuple[Lack, ...] = ()

    @property
    def is_capable(self) -> bool:
        """Whether it is a GPU that runs the kernels of packages."""
        return self.device == "cuda" and self.compute_capability >= _LEAST_CAPABILITY

    def runs_triton(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether our kernels in Triton run here, and take heads of `head_dim` numbers of `dtype`."""
        return self.is_capable and self.triton is not None and takes_triton(_name(dtype), head_dim)

    def runs_flash(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether flash attention's kernels take heads of `head_dim` numbers of `dtype`."""
        return self.is_capable and takes_flash(_name(dtype), head_dim)


@lru_cache
def machine(device: str) -> Machine:
    """This machine, for tensors on `device`; inspected once. A kernel that does not work counts as missing.

    Raises:
        UserError: `REALHF_WITHOUT` has a word that is not known.
    """
    if device != "cuda":
        return Machine(device=device)
    lacks: list[Lack] = []
    return Machine(
        device=device,
        compute_capability=torch.cuda.get_device_capability(),
        triton=_found("triton", _triton_version, lacks),
        flash_attn=_found("flash-attn", _flash_attn_version, lacks),
        varlen=_found("varlen", _varlen_options, lacks) or frozenset(),
        lacks=tuple(lacks),
    )


def packed_kernel(machine: Machine, dtype: torch.dtype, head_dim: int, window: int | None) -> PackedKernel:
    """The kernel for attention within packed sequences, forward and backward."""
    if not machine.runs_flash(dtype, head_dim):
        return "scaled dot products"
    if machine.flash_attn is not None:
        return "flash-attn"
    return "torch varlen" if machine.varlen else "scaled dot products"


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


Found = TypeVar("Found")


class _LackError(Exception):
    """Why a kernel is not there; `remedy`: where it is not to install the kernel."""

    def __init__(self, why: str, remedy: str = ""):
        super().__init__(why)
        self.remedy = remedy


def _found(name: str, find: Callable[[], Found], lacks: list[Lack]) -> Found | None:
    """Returns the result of `find`; None where it raises, and then adds to `lacks`."""
    try:
        if name in left_out():
            raise _LackError(f"is left out by {WITHOUT}", f"take it out of {WITHOUT}")
        return find()
    except _LackError as error:
        lacks.append(Lack(name, str(error), error.remedy or REMEDIES[name]))
        return None


def _triton_version() -> tuple[int, ...]:
    """Triton compiles a part of itself when its driver is first asked for, by the machine's C compiler."""
    version = _installed("triton")
    try:
        importlib.import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:  # the compiler, the linker and the loader raise each their own
        raise _LackError(
            f"{version} does not work here ({_in_a_line(error)})",
            f"it needs a C compiler and Python's headers (apt-get install gcc python3-dev), or {WITHOUT}=triton",
        ) from error
    return _numbers(version)


def _flash_attn_version() -> tuple[int, ...]:
    version = _installed("flash-attn")  # flash-attn-4 has a folder of the same name
    try:
        importlib.import_module("flash_attn")
    except Exception as error:
        raise _LackError(
            f"{version} does not load with torch {torch.__version__} ({_in_a_line(error)})",
            f"install a build for this torch ({REMEDIES['flash-attn']}), or remove it",
        ) from error
    if _numbers(version) < _FLASH_ATTN_VERSION:
        raise _LackError(f"{version} is older than {'.'.join(map(str, _FLASH_ATTN_VERSION))}")
    return _numbers(version)


def _varlen_options() -> frozenset[str]:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        raise _LackError(f"is not in torch {torch.__version__}")
    from torch.nn.attention.varlen import varlen_attn

    options = frozenset(inspect.signature(varlen_attn).parameters)
    # A causal mask is a window that is open to the left, so a `varlen_attn` without windows has no causal mask.
    if "window_size" not in options:
        raise _LackError(f"has no windows in torch {torch.__version__}")
    return options


def _installed(package: str) -> str:
    """The version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise _LackError("is not installed") from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
