"""The trees along which a run adds up what ranks divide, if its bits are to be equal under every layout
(`reproducible="layout"`): the model and the batch define them, and a layout only cuts them."""

from math import gcd

from realhf.architecture.decoding import TRITON_HEAD_DIM
from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import ParallelStrategy

# The first of these that divides all that tensor parallelism divides is the number of a model's leaves.
_LEAVES = (4, 2, 3)
# Parts of a mini-batch whose gradients are computed one by one.
_PARTS = 4


def tensor_leaves(model: DecoderConfig) -> int:
    """Parts into which the inputs of row-parallel products are cut, and the outputs of column-parallel ones for the
    gradient of their input. Sums over them are made part by part, whichever ranks have them."""
    divided = gcd(model.num_kv_heads, model.intermediate_size, model.vocab_size)
    return next((leaves for leaves in _LEAVES if divided % leaves == 0), 1)


def lacks_gpu_kernels(model: DecoderConfig) -> str | None:
    """Why GPUs have no kernels for a model whose sums have one order, with the remedy; None where they have."""
    remedy = "leave reproducible='layout' out, or run on a CPU"
    if model.experts.count:
        return f"experts={model.experts.count} have no kernels for GPUs whose sums have one order; {remedy}"
    if model.head_dim > TRITON_HEAD_DIM:
        return f"no kernel takes heads of {model.head_dim} numbers, but of up to {TRITON_HEAD_DIM}; {remedy}"
    return None


def gradient_parts(mini_batch: int) -> int:
    """The number of parts of a mini-batch with so many samples: a power of two, so that all have equally many
    neighbours. Each rank of data parallelism computes some, one after the other."""
    return gcd(_PARTS, mini_batch)


def unordered(model: DecoderConfig, strategy: ParallelStrategy) -> str | None:
    """Why the trees cannot be cut by `strategy`, with the remedy; None where they can."""
    leaves = tensor_leaves(model)
    if leaves % strategy.tp:
        legal = ", ".join(str(tp) for tp in range(1, leaves + 1) if leaves % tp == 0)
        return f"tp={strategy.tp} does not divide the {leaves} parts that the model's sums have; choose tp from {legal}"
    if strategy.chunks > 1:
        return f"chunks={strategy.chunks} mixes the gradients of several parts of a batch; leave chunks out"
    return None


def unordered_training(dp: int, micro_batches: int, parts: int) -> str | None:
    """As `unordered`, for a training whose mini-batch has `parts` (`gradient_parts`)."""
    if dp * micro_batches == parts:
        return None
    legal = ", ".join(f"{each} x {parts // each}" for each in (1, 2, 4) if parts % each == 0)
    return (
        f"dp={dp} x micro_batches={micro_batches} is not {parts}, the parts in which the gradient of a mini-batch is "
        f"added up; choose dp x micro_batches from {legal}"
    )
