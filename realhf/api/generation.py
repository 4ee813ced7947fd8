"""How responses are drawn from a model: the options of a generate call."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from realhf.architecture.decoding import GraphLife
from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_range, check_ranges

_MAX_TOKENS = 2**31
RANGES = {
    "max_new_tokens": Range("max_new_tokens", 1, _MAX_TOKENS, "tokens"),
    "eos_token": Range("eos_token (-1: none)", -1, _MAX_TOKENS),
    "top_k": Range("top_k (0: all)", 0, _MAX_TOKENS, "tokens"),
    "top_p": Range("top_p", 1e-9, 1),
    "kv_cache_tokens": Range("kv_cache_tokens", 1, 2**40, "tokens"),
    "samples_per_prompt": Range("samples_per_prompt", 1, 2**20, "responses"),
}


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The distribution that tokens are drawn from, and the ends of a response.

    Tokens are drawn from softmax(logits / temperature), truncated by `top_k` and then by `top_p`. A response ends with
    the end token, with a stop sequence or a stop string (which stay in it), or after `max_new_tokens`.
    """

    max_new_tokens: int
    eos_token: int | None = None
    """The token that ends a response; -1: none does. None, in scripts alone: those of the model's tokenizer."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Draw from the k most likely tokens, and tokens as likely as the last of them; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens whose probabilities sum to at least this."""
    min_new_tokens: int = 0
    """Before a response has this many tokens, the end token is not drawn, and no stop sequence or string ends it."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Stop sequences as tokens. A text may be cut into tokens in several ways; prefer `stop_strings`."""
    stop_strings: tuple[str, ...] = ()
    """Stop strings as text, however it is cut into tokens: a response ends with the token that completes one of them in
    its text. String and token stay in the response, with any text that the token has after the string. Special tokens
    count as their text (`<|im_end|>`)."""
    tokenizer: str = ""
    """A `tokenizer.json`, which turns responses into text for stop strings and for comparing answers."""
    samples_per_prompt: int = 1
    """Responses to each prompt. The prompt is computed once, and each response has random numbers of its own. A step's
    batch_size counts responses: it has batch_size / samples_per_prompt prompts, and the responses to one of them are
    neighbours."""
    kv_cache_tokens: int | None = None
    """The size of the KV cache on a device, in tokens. If it is full, sequences wait, or are recomputed later. None:
    large enough for every need."""
    decode_graphs: GraphLife | None = None
    """CUDA graphs for decode steps on a GPU: "kept" from call to call with the KV cache, captured in each "call", or
    "off"; None: what the plan says, else "kept". The tokens are the same; kept graphs and cache take memory during
    training too."""

    @property
    def end_token(self) -> int:
        """`eos_token`, which has to be known. Raises UserError where it is not."""
        if self.eos_token is None:
            raise UserError("eos_token is not given; give the id of the tokenizer's end token, or -1 for none")
        return self.eos_token

    def __post_init__(self) -> None:
        if self.temperature != 0:
            check_range("temperature, where it is not 0 (the most likely token),", self.temperature, 1e-6, 1e6)
        check_ranges(vars(self), RANGES)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens} must be from 0 to max_new_tokens={self.max_new_tokens}"
            )
        if not all(self.stop_sequences):
            raise UserError(f"stop_sequences={self.stop_sequences}: an empty sequence stops nothing; leave it out")
        if not all(self.stop_strings):
            raise UserError(f"stop_strings={self.stop_strings}: an empty string is in every text; leave it out")
        if self.stop_strings and not Path(self.tokenizer).is_file():
            raise UserError(
                f"tokenizer={self.tokenizer!r}: no such file, and stop_strings={self.stop_strings} are looked for in "
                "the text of a response; give the path of the model's tokenizer.json"
            )
        if self.decode_graphs not in (None, *get_args(GraphLife)):
            known = ", ".join(get_args(GraphLife))
            raise UserError(f"decode_graphs={self.decode_graphs!r} is not known; choose one of {known}")
