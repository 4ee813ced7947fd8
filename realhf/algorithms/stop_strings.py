"""Stop strings: the end of a response by its text, however the text is cut into tokens."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from realhf.api.generation import GenerationOptions
from realhf.data.tokenizer_file import load_tokenizer

# The decoder's text for bytes that are no complete character.
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
# Tokens decoded beyond those that can hold a stop string: a decoder may treat the first one otherwise (no space).
_CONTEXT_TOKENS = 4


class StopStrings:
    """Tells whether the last token of a response completes a stop string (`realhf.engine.interface.EndCheck`).

    The text is that of the whole response, with its special tokens. Only the last tokens are decoded until they contain
    a stop string, so the work does not grow with the response.

    Args:
        tokenizer: a `tokenizer.json`.
        strings: none of them empty.
    """

    def __init__(self, tokenizer: str, strings: Sequence[str]):
        self._tokenizer = load_tokenizer(Path(tokenizer))
        self._strings = tuple(strings)
        # Every token that the tokenizer knows has at least one byte of text.
        self._tail_tokens = max(len(string.encode()) for string in strings) + _CONTEXT_TOKENS
        self._tail_characters = max(map(len, strings))

    def __call__(self, response: np.ndarray) -> bool:
        """`response` [length] int64, all its tokens so far."""
        tail = self._tail(response)
        # A tail may begin within a character, or with a token whose text depends on earlier ones: all the text decides.
        if _NO_TEXT not in tail and not any(string in tail for string in self._strings):
            return False
        before, now = self._text(response[:-1]), self._text(response)
        return any(now.count(string) > before.count(string) for string in self._strings)

    def _tail(self, response: np.ndarray) -> str:
        """The text of the last tokens, enough of them to contain any stop string that the last one completes."""
        count = self._tail_tokens
        while True:
            text = self._text(response[-count:])
            if len(text) >= self._tail_characters + _CONTEXT_TOKENS or count >= len(response):
                return text
            count *= 2

    def _text(self, tokens: np.ndarray) -> str:
        text: str = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        return text


def is_stopped(response: np.ndarray, options: GenerationOptions) -> bool:
    """Whether the last token of a response, [length] int64, ends it: the end token, or the end of a stop sequence or
    string."""
    tokens = response.tolist()
    if tokens and tokens[-1] == options.end_token:
        return True
    if any(tuple(tokens[-len(stop) :]) == stop for stop in options.stop_sequences):
        return True
    return bool(options.stop_strings) and stop_strings(options.tokenizer, options.stop_strings)(response)


@lru_cache(maxsize=8)  # a tokenizer takes a second to read
def stop_strings(tokenizer: str, strings: tuple[str, ...]) -> StopStrings:
    """The check for these strings; one for all calls."""
    return StopStrings(tokenizer, strings)
