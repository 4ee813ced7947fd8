"""Tokens and chats are those of transformers, for several families of tokenizers."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from realhf.api.data_options import DEFAULT_DATE
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.chat_template import ChatTemplate, TemplateError
from realhf.data.tokenizer import TextTokenizer
from realhf.data.tokenizer_file import TokenizerError, no_panic, why_without_end
from tests.unit.data.tokenizers_of_families import FORGETFUL_TEMPLATE, write_llama3, write_mistral, write_qwen

FAMILIES: dict[str, Callable[[Path], Path]] = {"llama3": write_llama3, "qwen": write_qwen, "mistral": write_mistral}

CHATS = [
    [{"role": "user", "content": "the thing & <b>"}],
    [{"role": "user", "content": "  hi\n"}, {"role": "assistant", "content": "the answer"}],
    [
        {"role": "user", "content": "é 漢字 🙂"},
        {"role": "assistant", "content": "an ", "tool_calls": None},
        {"role": "user", "content": "<|im_end|></s><|eot_id|>"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"wörd": {"type": "string", "x": [1, 2.5]}}}}]


@pytest.fixture(autouse=True)
def same_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' templates ask the clock for the date."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DEFAULT_DATE)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextTokenizer, AutoTokenizer]:
    folder = FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
    return TextTokenizer(folder), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(["the  other\n\n in", "</s> a<|im_end|>"])
)
def test_text_becomes_the_tokens_of_transformers_and_comes_back(pair, text: str) -> None:
    ours, theirs = pair
    for special in (True, False):
        tokens = ours.encode(text, special=special)
        assert tokens == theirs.encode(text, add_special_tokens=special)
        assert ours.encode_batch([text, "the"], special=special)[0] == tokens
        for skip in (True, False):
            assert ours.decode(tokens, skip_special=skip) == theirs.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40))
@example(text="é 漢字 🙂 the  other")
def test_the_pieces_of_a_text(pair, text: str) -> None:
    """Each token has one, and together they are the text; that of an end token is empty."""
    ours, _ = pair
    tokens = ours.encode(text, special=False)
    pieces = ours.pieces([*tokens, *ours.end_tokens])
    assert "".join(pieces) == ours.decode(tokens)
    assert pieces[len(tokens) :] == [""] * len(ours.end_tokens)


def test_pieces_are_characters_of_a_text(pair) -> None:
    """A character of several tokens is at its last one; a space is with what follows it."""
    ours, _ = pair
    found = [piece for piece in ours.pieces(ours.encode("the the🙂é", special=False)) if piece]
    assert found[0][0] == "t"
    assert [piece[1:2] for piece in found if piece[0] == " "] == ["t"]
    assert found[-2:] == ["🙂", "é"]


def test_bytes_that_are_no_character_end_after_four_tokens(pair) -> None:
    ours, _ = pair
    *_, part, _ = ours.encode("🙂", special=False)
    pieces = ours.pieces([part] * 9)
    assert [bool(piece) for piece in pieces] == [False] * 3 + [True] + [False] * 3 + [True, True]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generation", [True, False])
def test_chats_are_those_of_transformers(pair, chat, generation) -> None:
    ours, theirs = pair
    text = ours.template.render(chat, add_generation_prompt=generation)
    assert text == theirs.apply_chat_template(chat, add_generation_prompt=generation, tokenize=False)
    expected = theirs.apply_chat_template(chat, add_generation_prompt=generation, return_dict=False)
    assert ours.encode(text, special=False) == expected


def test_special_tokens_are_those_of_transformers(pair) -> None:
    ours, theirs = pair
    assert (ours.begin, ours.pad, ours.end_tokens[0]) == (theirs.bos_token_id, theirs.pad_token_id, theirs.eos_token_id)
    assert ours.largest_token == len(theirs) - 1


def test_tool_calls_loop_controls_and_reasoning(tmp_path: Path) -> None:
    call = {"function": {"name": "find", "arguments": {"q": "ü<>", "n": None}}}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "skipped", "content": "b"},
        {"role": "assistant", "tool_calls": [call], "content": None},
        {"role": "tool", "content": "c"},
    ]
    folder = write_qwen(tmp_path / "qwen")
    assert TextTokenizer(folder).template.render(chat) == (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
    )
    thinking = [{"role": "user", "content": "a"}, {"role": "assistant", "thinking": "hm", "content": "b"}]
    folder = write_qwen(tmp_path / "forgetful", FORGETFUL_TEMPLATE)
    text = TextTokenizer(folder).template.render(thinking)
    assert text == AutoTokenizer.from_pretrained(folder).apply_chat_template(thinking, tokenize=False)
    assert "<think>hm</think>b" in text


def test_what_a_template_marks_as_the_assistants(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path, FORGETFUL_TEMPLATE)
    chat = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    theirs = AutoTokenizer.from_pretrained(folder)
    text, spans = TextTokenizer(folder).template.render_marked(chat)
    assert text == theirs.apply_chat_template(chat, tokenize=False)
    assert [text[a:b] for a, b in spans] == ["b<|im_end|>", "d<|im_end|>"]
    masked = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ids, offsets = TextTokenizer(folder).offsets(text)
    assert ids == masked["input_ids"]
    assert [int(any(a < end <= b for a, b in spans)) for _, end in offsets] == masked["assistant_masks"]


def test_the_end_tokens(tmp_path: Path) -> None:
    ours = TextTokenizer(write_llama3(tmp_path / "a"))
    assert ours.end_tokens == (ours.token("<|eot_id|>"), ours.token("<|end_of_text|>"))
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    alone = TextTokenizer(tmp_path / "tokenizer.json")
    assert alone.end_tokens == (sort_task.EOS_TOKEN,), "a well-known name, where no file says more"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert TextTokenizer(tmp_path).end_tokens == (3,)


def test_a_token_that_only_the_configuration_has(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"pad_token": "<|pad|>", "additional_special_tokens": ["<|tool|>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = TextTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a<|tool|>b<|pad|>"
    assert ours.encode(text) == theirs.encode(text)
    assert (ours.pad, ours.largest_token) == (theirs.pad_token_id, len(theirs) - 1)


def test_padding_and_truncation_of_the_file_do_not_count(tmp_path: Path) -> None:
    tokenizer = sort_task.make_tokenizer()
    tokenizer.enable_padding(length=20)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer(tmp_path).encode("abc>") == [1, 4, 5, 6, 3]


def test_a_template_of_the_users(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path)
    chat = [{"role": "user", "content": "a"}]
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    for source in ("{{ messages[0].content }}!", str(tmp_path / "own.jinja")):
        assert TextTokenizer(folder, source).template.render(chat) == "a!"
    mistral = write_mistral(tmp_path / "mistral")
    assert TextTokenizer(mistral, "tool_use").template.render(chat).startswith("null<s>")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/brief.jinja").write_text("{{ messages[0].content }}?")
    assert TextTokenizer(folder, "brief").template.render(chat) == "a?"
    (folder / "additional_chat_templates/always.jinja").write_text("!")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match="it has the chat templates always, brief; name one with --chat-template"):
        _ = TextTokenizer(folder).template
    with pytest.raises(UserError, match=r"--chat-template 'nowhere\.jinja': no such file or directory; give a file"):
        _ = TextTokenizer(folder, "nowhere.jinja").template
    with pytest.raises(UserError, match=r"its chat template is broken \(.*\); correct it"):
        _ = TextTokenizer(folder, "{% if %}").template


def test_a_template_gets_no_further_than_its_values() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(TemplateError):
            ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


def test_errors_name_the_tokenizer_and_the_remedy(tmp_path: Path) -> None:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer .*tokenizer\.json: it has no chat template .* chat_template"):
        TextTokenizer(tmp_path).template.render([{"role": "user", "content": "a"}])
    with pytest.raises(UserError, match=r"date='tomorrow' is no date"):
        TextTokenizer(tmp_path, date="tomorrow")
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match=r"generation_config\.json: not JSON"):
        _ = TextTokenizer(tmp_path).end_tokens
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.model").touch()
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file; write one with transformers"):
        TextTokenizer(tmp_path / "old")
    with pytest.raises(ValueError, match=r"'A' in 'bA' has no token"):
        TextTokenizer(tmp_path / "tokenizer.json").encode("bA")
    with pytest.raises(ValueError, match=f"'A' in 'A{'b' * 78}…' has no token"):
        TextTokenizer(tmp_path / "tokenizer.json").encode("A" + 80 * "b")
    with pytest.raises(ValueError, match=f"'A' in 'A{'b' * 79}' has no token"):
        TextTokenizer(tmp_path / "tokenizer.json").encode("A" + 79 * "b")


GOOD_PATTERNS = [  # of GPT-2, Llama 3, GPT-4o, BLOOM, DeepSeek, XLM-R
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+",
    r" ?[^(\s|[.,!?…。、।،])]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r" {2,}",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"\((a*)\)+[)+]*(?:[+*](?i:x)){2}\(?\\",
]
ENDLESS_PATTERNS = {
    r"(a+)+$": "several ways",
    r"(x+x+)+y": "several ways",
    r"(a|a)*b": "several ways",
    r"(?:a|aa){2,}$": "several ways",
    r"(?:a?){30}a{30}": "several ways",
    r"((a*)b?)*c": "several ways",
    r"(?>a{2,3})+b": "several ways",
    r"(.*,){11}P": "several ways",
    r"a*b|a*a*a*a*b": "in a row",
    r"(a*a*)(a*a*)b": "in a row",
    r"(\w+) \1": "refers back",
    r"(?<w>\w+) \k<w>": "refers back",
    r"a{1001}": "times",
    r"a{2,1001}": "times",
}


@pytest.mark.parametrize("pattern", GOOD_PATTERNS)
def test_patterns_that_end_are_taken(pattern: str) -> None:
    assert why_without_end(pattern) == ""


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer", "decoder"])
def test_a_pattern_without_end_is_refused_wherever_it_stands(place: str, tmp_path: Path) -> None:
    path = write_qwen(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    for pattern, why in ENDLESS_PATTERNS.items():
        assert why in why_without_end(pattern), pattern
    kind = {"type": "Replace", "pattern": {"Regex": r"(a+)+$"}, "content": "b"}
    if place == "pre_tokenizer":
        kind = {"type": "Split", "pattern": {"Regex": r"(a+)+$"}, "behavior": "Isolated", "invert": False}
    several = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[place]
    for value in (kind, {"type": "Sequence", several: [kind]}):
        path.write_text(json.dumps(content | {place: value}))
        with pytest.raises(UserError, match=r"the pattern '\(a\+\)\+\$' repeats a group .* give a tokenizer"):
            TextTokenizer(path)


@pytest.mark.parametrize("value", ["x", -1, 10**6, 1.5, True, [0, "x"], [0, None], {"a": 1}, [[0]]])
def test_an_end_token_that_is_none_is_refused(value: object, tmp_path: Path) -> None:
    folder = write_qwen(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id has .* give numbers from 0 to"):
        _ = TextTokenizer(folder).end_tokens


def test_end_tokens_of_the_generation_configuration(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path)
    plain = TextTokenizer(folder)
    largest = plain.largest_token
    for value, others in ((None, []), ([], []), (0, [0]), ([largest, 0], [largest, 0])):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        first = plain.token(plain.special_tokens["eos_token"])
        assert TextTokenizer(folder).end_tokens == tuple(dict.fromkeys([first, *others])), value


@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_a_token_id_without_measure_is_refused(place: str, tmp_path: Path) -> None:
    path = write_qwen(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    if place == "vocab":
        content["model"]["vocab"]["new"] = 2**24 + 1
    else:
        content["added_tokens"][0]["id"] = 2**24 + 1
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer\.json: the token id 16777217 is above 16777216; give a tokenizer"):
        TextTokenizer(path)


def test_the_librarys_panics_are_errors_in_words(tmp_path: Path) -> None:
    class Panic(BaseException): ...

    with pytest.raises(TokenizerError, match="lost"), no_panic():
        raise Panic("lost")
    with pytest.raises(KeyboardInterrupt), no_panic():
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), no_panic():
        raise ZeroDivisionError
