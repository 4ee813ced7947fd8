"""What a tokenizer takes from the files beside it, by hand: `<pad>` is 0, `<bos>` 1, `<eos>` 2, `>` 3, `a` 4."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.tokenizer import TextTokenizer, tokenizer_files

CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configured(folder: Path, **config: Any) -> TextTokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TextTokenizer(folder)


def refusal(folder: Path, **config: Any) -> str:
    with pytest.raises(UserError) as error:
        configured(folder, **config)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- Files.


def test_the_files_of_a_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order that does not depend on the disk."""
    (folder / "additional_chat_templates").mkdir()
    beside = ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"]
    templates = [f"additional_chat_templates/{name}.jinja" for name in ("a", "b", "c")]
    for name in (*beside, *templates, "additional_chat_templates/notes.txt", "own.jinja"):
        (folder / name).touch()
    glob = Path.glob

    def backwards(self: Path, pattern: str) -> Iterator[Path]:
        return iter(sorted(glob(self, pattern), reverse=True))

    monkeypatch.setattr(Path, "glob", backwards)
    expected = [folder / name for name in ("tokenizer.json", *beside, *templates)]
    assert tokenizer_files(str(folder)) == tokenizer_files(str(folder / "tokenizer.json")) == expected
    own = str(folder / "own.jinja")
    assert tokenizer_files(str(folder), own) == [*expected, Path(own)]
    for no_file in ("no such file", "{{ messages }}" * 1000, "default"):
        assert tokenizer_files(str(folder), no_file) == expected
    (folder / "generation_config.json").unlink()
    assert folder / "generation_config.json" not in tokenizer_files(str(folder))
    assert tokenizer_files(str(folder / "nowhere" / "tokenizer.json")) == []


@pytest.mark.parametrize("beside", ["tokenizer.model", "vocab.json", "vocab.txt", "other.bin"])
def test_a_folder_without_a_tokenizer(beside: str, tmp_path: Path) -> None:
    (tmp_path / beside).touch()
    remedy = "write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    if beside == "other.bin":
        remedy = "give the directory of a model that has one, or the path of a tokenizer.json"
    with pytest.raises(UserError) as error:
        TextTokenizer(tmp_path)
    assert str(error.value) == (
        f"tokenizer {tmp_path}/tokenizer.json: no such file; {remedy} (`python -m realhf.data.sort_task DIR` makes the "
        "data of the sorting task)"
    )


def test_files_beside_it_that_are_broken(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    for content, says in (
        (b"{", "not JSON (.*); correct it or take it away"),
        (b"\xff", "not JSON (.*); correct it or take it away"),
        (b"[1]", "a list instead of an object; correct it or take it away"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(f"{path}: ") + re.escape(says).replace(r"\.\*", ".*")):
            TextTokenizer(folder)
    path.unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    says = (
        rf"^{re.escape(str(folder))}/chat_template\.jinja: cannot be read as UTF-8 \(.*\); correct it or take it away$"
    )
    with pytest.raises(UserError, match=says):
        _ = TextTokenizer(folder).template


# --- Special tokens.


def test_special_tokens_are_texts_or_objects_with_a_name_that_says_so(folder: Path) -> None:
    found = configured(
        folder,
        bos_token="<bos>",
        pad_token={"content": "<pad>", "lstrip": False},
        eos_token=None,
        add_bos_token=True,
        mask_token={"text": "*"},
        chat_template="{{ x }}",
    )
    assert found.special_tokens == {"bos_token": "<bos>", "pad_token": "<pad>"}
    assert (found.begin, found.pad) == (1, 0)
    bare = configured(folder)
    assert (bare.special_tokens, bare.begin, bare.pad) == ({}, None, None)


def test_the_older_map_of_special_tokens(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<bos>", "eos_token": ">"}')
    assert configured(folder, bos_token="*").special_tokens == {"bos_token": "<bos>", "eos_token": ">"}
    newer = configured(folder, bos_token="*", added_tokens_decoder={})
    assert newer.special_tokens == {"bos_token": "*"}


@pytest.mark.parametrize("name", ["extra_special_tokens", "model_specific_special_tokens"])
def test_further_special_tokens_by_name(name: str, folder: Path) -> None:
    found = configured(folder, bos_token="*", **{name: {"image": "<image>", "bos_token": "<bos>"}})
    assert found.special_tokens == {"bos_token": "<bos>", "image": "<image>"}
    assert found.encode("a<image>") == [1, 4, 32]
    assert found.decode([4, 32]) == "a"


@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_a_list_of_further_special_tokens(name: str, folder: Path) -> None:
    found = configured(folder, **{name: ["<x>", {"content": "<y>"}, "<bos>"]})
    assert found.special_tokens == {}
    assert found.encode("<y>a<x><bos>", special=False) == [33, 4, 32, 1]
    assert found.decode([33, 4, 32]) == "a"
    assert found.largest_token == 33


def test_added_tokens_have_the_order_of_their_numbers_and_their_flags(folder: Path) -> None:
    added = {
        "100": {"content": "<c>", "special": False, "lstrip": True},
        "99": {"content": "<b>", "special": True, "rstrip": True, "unknown": 1},
        "9": {"content": "<bos>", "special": True},
        "8": "no object",
    }
    found = configured(folder, added_tokens_decoder=added, bos_token="<bos>")
    assert (found.token("<b>"), found.token("<c>"), found.token("<bos>")) == (32, 33, 1)
    assert found.encode("a  <c>a", special=False) == [4, 33, 4]
    assert found.encode("a<b>  a", special=False) == [4, 32, 4]
    assert found.decode([4, 32, 33]) == "a<c>"
    assert found.largest_token == 33
    assert configured(folder, added_tokens_decoder=["<d>"]).largest_token == 31


def test_special_tokens_are_not_normalized(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    found = configured(folder, pad_token="<PAD>")
    assert found.encode("A<PAD>", special=False) == [4, 32]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, "ValueError: "),
        ({"added_tokens_decoder": {"40": {"content": 7}}}, "TypeError: "),
        ({"additional_special_tokens": [{}]}, "KeyError: 'content'"),
        ({"additional_special_tokens": [7]}, "TypeError: "),
    ],
)
def test_added_tokens_that_are_none(config: dict[str, Any], why: str, folder: Path) -> None:
    says = refusal(folder, **config)
    assert says.startswith(f"tokenizer {folder}/tokenizer.json: its added tokens cannot be read ({why}")
    assert says.endswith(
        "); correct added_tokens_decoder and the special tokens of tokenizer_config.json, or take that file away"
    )


def test_the_first_of_the_well_known_end_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"</s>": 0, "<|im_end|>": 1, "<eos>": 2}))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer(tmp_path).end_tokens == (2,)
    assert configured(tmp_path, eos_token="</s>").end_tokens == (0,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 0, 1]}')
    assert TextTokenizer(tmp_path).end_tokens == (0, 1)
    assert configured(tmp_path, eos_token="<lost>").end_tokens == (3, 1, 0)
    (tmp_path / "tokenizer_config.json").unlink()
    assert TextTokenizer(tmp_path).end_tokens == (1, 0)


def test_a_tokenizer_of_no_tokens(tmp_path: Path) -> None:
    Tokenizer(WordLevel({})).save(str(tmp_path / "tokenizer.json"))
    assert (TextTokenizer(tmp_path).largest_token, TextTokenizer(tmp_path).end_tokens) == (-1, ())


# --- Text.


def test_texts_have_the_tokens_around_them_unless_they_are_not_wanted(folder: Path) -> None:
    found = TextTokenizer(folder)
    assert found.encode("a") == found.encode("a", special=True) == [1, 4]
    assert found.encode("a", special=False) == [4]
    assert found.encode_batch(["a", "A", ""]) == [[1, 4], None, [1]]
    assert found.encode_batch(["a", "A", ""], special=False) == [[4], None, []]
    assert found.encode_batch(["a", ""]) == [[1, 4], [1]]
    assert found.encode_batch(["a", ""], special=False) == [[4], []]
    assert found.decode([1, 4]) == found.decode((1, 4), skip_special=True) == "a"
    assert found.decode([1, 4], skip_special=False) == "<bos>a"
    assert found.offsets("a<eos>") == ([4, 2], [(0, 1), (1, 6)])
    assert (found.token("a"), found.token("A")) == (4, None)


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_text_that_a_tokenizer_cannot_express(unknown: str | None, tmp_path: Path) -> None:
    """Whether it has a token for what it does not know, or refuses it."""
    words = {"unk_token": unknown} if unknown else {}
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "<unk>": 2}, **words))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = TextTokenizer(tmp_path)
    assert found.encode("ab") == [0, 1]
    says = "^'x' in 'axyb' has no token in the tokenizer$"
    for call in (found.encode, found.offsets):
        with pytest.raises(ValueError, match=says):
            call("axyb")
    assert found.encode_batch(["axyb", "b"]) == [None, [1]]
    assert found.unknown_character("ab") == "'ab' in 'ab' has no token in the tokenizer"
    tokenizer.post_processor = TemplateProcessing(single="<unk> $A", pair=None, special_tokens=[("<unk>", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"^'x' in 'ax' has no token"):  # what is put around a text does not count
        TextTokenizer(tmp_path).encode("ax", special=False)


# --- Templates.


def test_templates_by_name(folder: Path) -> None:
    """The default, or the one that is named."""
    (folder / "additional_chat_templates").mkdir()
    texts = {"default": "plain", "tool_use": "with tools", "brief": "brief"}
    for config in (texts, [{"name": name, "template": text} for name, text in texts.items()] + ["no object"]):
        found = configured(folder, chat_template=config)
        assert found.template.source == found.template.render(CHAT) == "plain"
        assert TextTokenizer(folder, "tool_use").template.render(CHAT) == "with tools"
        assert TextTokenizer(folder, "brief").template.render(CHAT) == "brief"
        assert TextTokenizer(folder, "default").template.render(CHAT) == "plain"
        assert TextTokenizer(folder, "{{ 'given' }}").template.render(CHAT) == "given"
    assert configured(folder, chat_template="one").template.render(CHAT) == "one"
    with pytest.raises(UserError, match=r"it has the chat templates a, b; name one with --chat-template$"):
        _ = configured(folder, chat_template={"b": "x", "a": "y"}).template
    (folder / "chat_template.jinja").write_text("of a file")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of another")
    found = configured(folder, chat_template=texts)
    assert found.template.source == "of a file"
    assert TextTokenizer(folder, "tool_use").template.source == "of another"
    with pytest.raises(UserError, match=r"^--chat-template 'brief': no such file or directory; give a file of Jinja"):
        _ = TextTokenizer(folder, "brief").template


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": 7}, {"chat_template": {}}])
def test_no_template(config: dict[str, Any], folder: Path) -> None:
    assert TextTokenizer(folder, "{{ 1 }}").template.render(CHAT) == "1"
    with pytest.raises(UserError, match=re.escape(f"tokenizer {folder}/tokenizer.json: it has no chat template (neit")):
        _ = configured(folder, **config).template


def test_a_template_gets_what_it_asks_for(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ tools }}{{ strftime_now('%Y-%m-%d') }}"
    )
    found = configured(folder, bos_token="<bos>")
    assert found.template.render(CHAT) == "<bos>aFalseNone2024-07-26"
    assert found.template.render(CHAT, add_generation_prompt=True) == "<bos>aTrueNone2024-07-26"
    assert TextTokenizer(folder, date="2025-01-02").template.render(CHAT) == "<bos>aFalseNone2025-01-02"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("a\0b", "embedded null byte"),
        ("FILE", "'utf-8' codec .*"),
        ("DIR", "is a directory"),
        ("/dev/zero", "it is a device instead of a regular file"),
    ],
)
def test_a_template_that_cannot_be_read(given: str, why: str, folder: Path) -> None:
    (folder / "bytes").write_bytes(b"\xff")
    given = {"FILE": str(folder / "bytes"), "DIR": str(folder)}.get(given, given)
    remedy = "give a file of Jinja text, the text itself, or the name of one of the tokenizer's templates"
    with pytest.raises(UserError, match=f"^{re.escape(f'--chat-template {given!r}: ')}{why}; {remedy}$"):
        _ = TextTokenizer(folder, given).template


def test_a_given_template_is_a_text_where_it_has_marks_of_one(folder: Path) -> None:
    assert TextTokenizer(folder, "{% if 1 %}x{% endif %}").template.render(CHAT) == "x"
    assert TextTokenizer(folder, "{{ 2 }}").template.render(CHAT) == "2"
    (folder / "x").write_text("of a file")
    assert TextTokenizer(folder, str(folder / "x")).template.render(CHAT) == "of a file"


@pytest.mark.parametrize("date", ["tomorrow", "2024-02-30", ""])
def test_a_date_that_is_none(date: str, folder: Path) -> None:
    with pytest.raises(UserError, match=f"^date='{date}' is no date; give one as 2024-07-26$"):
        TextTokenizer(folder, date=date)
