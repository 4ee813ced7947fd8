"""Tokenizers for tests, of which texts can be cut into tokens in several ways."""

from collections.abc import Sequence
from itertools import product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level_tokenizer() -> Tokenizer:
    """All bytes, some pairs of letters, and a special token `<|end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("b", "c"), ("Ã", "©"), ("ab", "c")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def two_letter_tokenizer(vocab_size: int) -> Tokenizer:
    """Every token is a word of the letters a and b, the shortest first: a, b, aa, ab, ba, bb, aaa, ..."""
    words = ["".join(letters) for length in range(1, 6) for letters in product("ab", repeat=length)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words[:vocab_size])}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def first_end(tokenizer: Tokenizer, response: list[int], strings: Sequence[str], eos: int) -> int:
    """After how many of its tokens a response ends with `eos`, or because its text has one of `strings`."""
    for n in range(1, len(response) + 1):
        text = tokenizer.decode(response[:n], skip_special_tokens=False)
        if response[n - 1] == eos or any(string in text for string in strings):
            return n
    return len(response)
