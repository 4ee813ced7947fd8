"""How decode steps run: pages of the KV cache, and graphs. The engine follows these rules, and the planner counts on
them."""

from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig

PAGE_TOKENS = 16  # of a page of the KV cache; a test holds the C++ kernels to it
FLASH_PAGE_TOKENS = 256  # flash-attn 2 takes multiples of this

# The dtypes and head dimensions that flash-attn 2, and torch's build of it, take.
FLASH_DTYPES = ("bfloat16", "float16")
FLASH_HEAD_DIM, FLASH_HEAD_MULTIPLE = 256, 8


def takes_flash(dtype: str, head_dim: int) -> bool:
    """Whether flash attention's kernels take heads of `head_dim` numbers of `dtype`, on a GPU that runs them."""
    return dtype in FLASH_DTYPES and head_dim <= FLASH_HEAD_DIM and head_dim % FLASH_HEAD_MULTIPLE == 0


def page_tokens(dtype: str, head_dim: int, *, has_flash: bool) -> int:
    """Tokens in a page of the KV cache, with flash-attn's kernel at hand or without."""
    return FLASH_PAGE_TOKENS if has_flash and takes_flash(dtype, head_dim) else PAGE_TOKENS


def graphs_refusal(config: DecoderConfig, *, on_gpu: bool) -> str | None:
    """The reason why decode steps of such a model are not captured as graphs; None: they are captured."""
    if not on_gpu:
        return "a CPU has no graphs"
    if isinstance(config, TransformersConfig):
        return "transformers computes the model"
    if config.experts.count:
        return "how many tokens an expert gets is read on the host"
    return None
