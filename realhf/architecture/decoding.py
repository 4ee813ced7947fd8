"""How decode steps run: pages of the KV cache, and graphs. The engine follows these rules, and the planner counts on
them."""

from functools import lru_cache
from typing import Literal

from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig

GraphLife = Literal["kept", "call", "off"]  # how long graphs of decode steps live (`GenerationOptions.decode_graphs`)
DECODE_GRAPHS: GraphLife = "kept"  # the default

# Per page of the KV cache, of all kernels but flash-attn's. Plans count on it; a test compares the C++ kernels with it.
PAGE_TOKENS = 16
FLASH_PAGE_TOKENS = 256  # flash-attn 2 takes multiples of this, where it takes the place of our kernel

# Where decode steps are graphs: newcomers by those that run, at least. A step with prompts is launched kernel by
# kernel, which may take longer than four graphs, and one with room for a part of a group computes the prompt for that
# part alone. So a few places stay empty for a while: that makes 2 % more steps, and a tenth of those with prompts.
LEAST_SHARE = 1 / 16

# The dtypes and head dimensions that flash-attn 2, and torch's build of it, take.
FLASH_DTYPES = ("bfloat16", "float16")
FLASH_HEAD_DIM, FLASH_HEAD_MULTIPLE = 256, 8
# Those of our kernel for GPUs (`realhf.gpu.paged_attention`).
TRITON_DTYPES = ("bfloat16", "float16", "float32")
TRITON_HEAD_DIM = 256


def takes_flash(dtype: str, head_dim: int) -> bool:
    """Whether flash attention's kernels take heads of `head_dim` numbers of `dtype`, on a GPU that runs them."""
    return dtype in FLASH_DTYPES and head_dim <= FLASH_HEAD_DIM and head_dim % FLASH_HEAD_MULTIPLE == 0


def takes_triton(dtype: str, head_dim: int) -> bool:
    """Whether our kernel for GPUs takes heads of `head_dim` numbers of `dtype`."""
    return dtype in TRITON_DTYPES and head_dim <= TRITON_HEAD_DIM


def rows_bucket(rows: int) -> int:
    """The rows to which a recorded step of `rows` is padded: 1, 2, 4, 8, then multiples of 8, above 128 of 32."""
    if rows <= 8:
        return power_of_two(rows)
    multiple = 8 if rows <= 128 else 32
    return -(-rows // multiple) * multiple


@lru_cache(maxsize=4096)
def num_buckets(rows: int) -> int:
    """The most graphs that a batch of `rows` rows needs while its responses end."""
    return len({rows_bucket(number) for number in range(1, rows + 1)})


def power_of_two(number: int) -> int:
    """The least one that is not below `number`."""
    return 1 << (number - 1).bit_length()


def graphs_refusal(config: DecoderConfig, *, on_gpu: bool) -> str | None:
    """The reason why decode steps of such a model are not captured as graphs; None: they are captured."""
    if not on_gpu:
        return "a CPU has no graphs"
    if isinstance(config, TransformersConfig):
        return "transformers computes the model"
    if config.experts.count:
        return "how many tokens an expert gets is read on the host"
    return None
