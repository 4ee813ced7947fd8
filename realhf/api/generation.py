"""How responses are drawn from a model: the options of a generate call."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from realhf.architecture.decoding import GraphLife
from realhf.base.errors import UserError
from realhf.base.numbers import CACHE_TOKENS, check_range
from realhf.base.options import GENERATION, Common, Option, Settings

_MAX_TOKENS = 2**31


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Settings):
    """The distribution that tokens are drawn from, and the ends of a response.

    Tokens are drawn from softmax(logits / temperature), truncated by `top_k` and then by `top_p`. A response ends with
    the end token, with a stop sequence or a stop string (which stay in it), or after `max_new_tokens`. A text may be
    cut into tokens in several ways, so prefer `stop_strings` to `stop_sequences`: a response ends with the token that
    completes a stop string in its text, however it is cut. The token stays in the response, with any text that it has
    after the string. Special tokens count as their text (`<|im_end|>`).

    `eos_token` of -1: no token ends a response; None, in scripts alone: those of the model's tokenizer. With `top_k`
    tokens as likely as the last of the k count too. A step's batch_size counts responses: it has
    batch_size / samples_per_prompt prompts, each of which is computed once, and the responses to one of them are
    neighbours. Graphs of decode steps give the same tokens; kept graphs and cache take memory during training too.
    """

    HEADING = GENERATION

    max_new_tokens: Annotated[int, Common("most tokens of a response", range=(1, _MAX_TOKENS), unit="tokens")]
    eos_token: Annotated[
        int | None,
        Option("token that ends a response (-1: none; default: those of the tokenizer)", range=(-1, _MAX_TOKENS)),
    ] = None
    temperature: Annotated[float, Common("temperature that tokens are drawn at (0: the most likely token)")] = 1.0
    top_k: Annotated[
        int, Option("draw from the K most likely tokens (0: all)", range=(0, _MAX_TOKENS), unit="tokens")
    ] = 0
    top_p: Annotated[
        float, Option("draw from the fewest most likely tokens whose probabilities sum to this", range=(1e-9, 1))
    ] = 1.0
    min_new_tokens: Annotated[int, Option("least tokens before the end token or a stop string ends a response")] = 0
    stop_sequences: Annotated[tuple[tuple[int, ...], ...], Option("sequences of tokens that end a response")] = ()
    stop_strings: Annotated[tuple[str, ...], Option("texts that end a response, however they are cut into tokens")] = ()
    tokenizer: Annotated[
        str, Option("tokenizer.json that turns responses into text for stop strings and answers", metavar="FILE")
    ] = ""
    samples_per_prompt: Annotated[
        int,
        Common(
            "responses to each prompt, its group; a step has --batch-size / N prompts",
            range=(1, 2**20),
            unit="responses",
        ),
    ] = 1
    mean_new_tokens: Annotated[
        float,
        Option(
            "tokens that responses are expected to have on average, for the plan's seconds (0: --max-new-tokens)",
            range=(0, _MAX_TOKENS),
        ),
    ] = 0.0
    kv_cache_tokens: Annotated[
        int | None,
        Option(
            "tokens of a device's KV cache; sequences wait while it is full (default: enough for all)",
            range=CACHE_TOKENS,
            unit="tokens",
        ),
    ] = None
    decode_graphs: Annotated[
        GraphLife | None,
        Option("CUDA graphs of decode steps are kept, made in each call, or off (default: as the plan says)"),
    ] = None

    @property
    def end_token(self) -> int:
        """`eos_token`, which has to be known. Raises UserError where it is not."""
        if self.eos_token is None:
            raise UserError("eos_token is not given; give the id of the tokenizer's end token, or -1 for none")
        return self.eos_token

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 0:
            check_range("temperature", self.temperature, 1e-6, 1e6, "or 0 (the most likely token)")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens} must be from 0 to max_new_tokens={self.max_new_tokens}"
            )
        if self.mean_new_tokens and not 1 <= self.mean_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"mean_new_tokens={self.mean_new_tokens:g} must be from 1 to max_new_tokens={self.max_new_tokens}, or "
                "0 where it is not known"
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
