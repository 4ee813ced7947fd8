"""Stop strings against the definition: the whole response decoded anew after every token."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from realhf.algorithms.stop_strings import StopStrings, is_stopped
from realhf.api import GenerationOptions
from tests.unit.engine.texts import byte_level_tokenizer


def ends(tokenizer: Tokenizer, response: list[int], strings: list[str], least: int = 1) -> int:
    """After how many tokens a response ends: the first, from `least`, that makes one more of the strings."""
    texts = [tokenizer.decode(response[:n], skip_special_tokens=False) for n in range(len(response) + 1)]
    for n in range(least, len(response) + 1):
        if any(texts[n].count(string) > texts[n - 1].count(string) for string in strings):
            return n
    return len(response)


def found(stops: StopStrings, response: list[int], least: int = 1) -> int:
    tokens = np.array(response)
    return next((n for n in range(least, len(response) + 1) if stops(tokens[:n])), len(response))


@pytest.mark.parametrize("strings", [["ab"], ["é!"], ["bcab", "\n\n"], ["<|end|>"], ["🙂"], ["a" * 20]])
def test_byte_level_tokens(tmp_path, strings):
    tokenizer = byte_level_tokenizer()
    tokenizer.save(path := str(tmp_path / "tokenizer.json"))
    stops, chooser = StopStrings(path, strings), random.Random(0)
    # Tokens that the tokenizer does not know (24 more than it has) are no text; bytes alone are no characters.
    pieces = [tokenizer.encode(s, add_special_tokens=False).ids for s in ("ab", "c", "é", "!", "\n", "🙂", "<|end|>")]
    lengths = set()
    for least in itertools.islice(itertools.cycle((1, 1, 9)), 200):
        response = [token for _ in range(chooser.randint(1, 60)) for token in chooser.choice(pieces)]
        for _ in range(3):
            response.insert(chooser.randrange(len(response)), chooser.randrange(tokenizer.get_vocab_size() + 24))
        expected = ends(tokenizer, response, strings, least)
        assert found(stops, response, least) == expected
        lengths.add(expected == len(response))
    assert lengths == ({True} if strings == ["a" * 20] else {True, False})


def test_bytes_as_tokens_of_their_own(tmp_path):
    """What the vocabulary lacks is written as bytes (`<0xC3>`); a run of them is text only as a whole."""
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3, "!": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.save(path := str(tmp_path / "tokenizer.json"))
    strings = [" a", "好b", "é好"]
    stops, chooser = StopStrings(path, strings), random.Random(0)
    pieces = [[1], [2], [4], *([5 + byte for byte in character.encode()] for character in "é好")]
    seen = set()
    for _ in range(200):
        response = [token for _ in range(chooser.randint(1, 40)) for token in chooser.choice(pieces)]
        response.insert(chooser.randrange(len(response)), chooser.randrange(261))
        expected = ends(tokenizer, response, strings)
        assert found(stops, response) == expected
        seen.add(tokenizer.decode(response[:expected])[-2:])
    assert {" a", "好b", "é好"} <= seen


def test_enough_of_a_response_is_read_for_the_longest_string(tmp_path):
    """Tokens without a text between those of the string; and a last token that has more text than the string needs."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save(path := str(tmp_path / "tokenizer.json"))

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    c, end = tokens("c"), tokens("<|end|>")
    assert len(c) == len(end) == 1
    unknown = [tokenizer.get_vocab_size() + 9] * 8
    stops = StopStrings(path, ["c" * 20])
    assert stops(np.array(c * 10 + unknown + c * 10))
    assert not stops(np.array(c * 10 + unknown + c * 9))
    stops = StopStrings(path, ["x", "cccccc<"])
    assert stops(np.array(tokens("bb") + c * 6 + end))
    assert not stops(np.array(tokens("bb") + c * 5 + end))
    assert stops(np.array(tokens("x")))


def test_the_work_does_not_grow_with_the_response(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.save(path := str(tmp_path / "tokenizer.json"))
    stops, decoded = StopStrings(path, ["a!"]), []

    class Counting:
        def decode(self, tokens, skip_special_tokens):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    stops._tokenizer = Counting()
    assert not stops(np.array(tokenizer.encode("bc" * 500).ids))
    assert decoded == [6]


def test_a_response_is_stopped_by_what_its_options_name(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.save(path := str(tmp_path / "tokenizer.json"))

    def tokens(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids)

    a, b = tokens("a").tolist()[0], tokens("b").tolist()[0]
    options = GenerationOptions(
        max_new_tokens=9, eos_token=b, stop_sequences=((a, a),), stop_strings=("!é",), tokenizer=path
    )
    plain = replace(options, eos_token=-1, stop_sequences=(), stop_strings=())
    for response, expected in (([a, b], True), ([b, a], False), ([b, a, a], True), ([], False)):
        assert is_stopped(np.array(response, dtype=np.int64), options) is expected, response
        assert not is_stopped(np.array(response, dtype=np.int64), plain)
    assert is_stopped(tokens("c!é"), options)
    assert not is_stopped(tokens("!éc"), options)
