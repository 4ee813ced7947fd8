"""Text to tokens and back, with the files that a Hugging Face model has for it. No torch here."""

import os
from collections.abc import Sequence
from datetime import date as calendar_date
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from realhf.api.data_options import DEFAULT_DATE
from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_loose_json, read_bytes, read_text
from realhf.data.chat_template import ChatTemplate, TemplateError
from realhf.data.tokenizer_file import TokenizerError, load_tokenizer, no_panic

Tokens = list[int]

TOKENIZER_FILE = "tokenizer.json"
_TEMPLATES = "additional_chat_templates"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
# Decoding has this in place of bytes that are no character; a character has at most four bytes.
_NO_CHARACTER, _MOST_BYTES = "\N{REPLACEMENT CHARACTER}", 4
# A tokenizer.json alone does not say which of its special tokens ends a text; these names do.
END_TOKENS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>")


def tokenizer_files(location: str, chat_template: str = "") -> list[Path]:
    """The files, among those that exist, that a tokenizer and its chat template are made from. Arguments: see
    `TextTokenizer`."""
    place = Path(location)
    folder, main = (place, place / TOKENIZER_FILE) if place.is_dir() else (place.parent, place)
    files = [main, *(folder / name for name in _BESIDE), *sorted((folder / _TEMPLATES).glob("*.jinja"))]
    files += [Path(chat_template)] if chat_template else []
    return [path for path in files if os.path.isfile(path)]  # a template's text may be too long for a name


class TextTokenizer:
    """A tokenizer as a model directory has it: tokenizer.json, and beside it, where there are any,
    tokenizer_config.json, special_tokens_map.json, generation_config.json, chat_template.jinja.

    It gives the same tokens and the same chats as transformers' `AutoTokenizer`.

    Args:
        location: the directory, or the path of its tokenizer.json.
        chat_template: takes the place of the tokenizer's: a Jinja text, a file of one, or the name of one of several
            templates that the tokenizer has.
        date: the date that templates write as today's, YYYY-MM-DD.

    Raises:
        UserError: a file is missing or broken.
    """

    def __init__(self, location: str | Path, chat_template: str = "", date: str = DEFAULT_DATE):
        path = Path(location)
        self.path = path / TOKENIZER_FILE if path.is_dir() else path
        self._given_template, self._date = chat_template, date
        self._tokenizer = self._load()
        self._config = self._json("tokenizer_config.json")
        self.special_tokens = self._special_tokens()
        try:
            with no_panic():
                self._add_tokens()
        except (KeyError, TypeError, ValueError, OverflowError, TokenizerError) as error:
            raise UserError(
                f"tokenizer {self.path}: its added tokens cannot be read ({type(error).__name__}: {error}); correct "
                "added_tokens_decoder and the special tokens of tokenizer_config.json, or take that file away"
            ) from None
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)
        try:
            calendar_date.fromisoformat(date)
        except ValueError:
            raise UserError(f"date={date!r} is no date; give one as {DEFAULT_DATE}") from None

    # --- Tokens of a meaning.

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response, each once: the end of a text (`eos_token`) first, then those that
        generation_config.json names beside it (the end of a turn, say). Empty: no file names one."""
        named = self._named("eos_token")
        found = [] if named is None else [named]
        found += self._generation_ends()
        if not found:
            found = [token for name in END_TOKENS if (token := self.token(name)) is not None][:1]
        return tuple(dict.fromkeys(found))

    def _generation_ends(self) -> Tokens:
        """`eos_token_id` of generation_config.json: a number, a list of numbers, or null."""
        given = self._json("generation_config.json").get("eos_token_id")
        listed = [] if given is None else given if isinstance(given, list) else [given]
        for token in listed:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= self.largest_token:
                raise UserError(
                    f"{self.path.parent / 'generation_config.json'}: eos_token_id has {str(token)[:40]!r}, which is no "
                    f"token of the tokenizer; give numbers from 0 to {self.largest_token}, or take it away"
                )
        return listed

    @property
    def begin(self) -> int | None:
        """The token that begins a text, if the tokenizer names one."""
        return self._named("bos_token")

    @property
    def pad(self) -> int | None:
        """The token that fills up short sequences, if the tokenizer names one."""
        return self._named("pad_token")

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, by their texts."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    @cached_property
    def largest_token(self) -> int:
        """The largest id of the tokenizer."""
        return max(self.vocabulary.values(), default=-1)

    def token(self, text: str) -> int | None:
        """The id of a token by its text; None where the tokenizer has no such token."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    # --- Text.

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        """The tokens of a text. `special` adds those that the tokenizer puts around a text (a begin token).

        Raises:
            ValueError: naming the character that the tokenizer cannot express.
        """
        tokens = self._try(text, special)
        if tokens is None:
            raise ValueError(self.unknown_character(text))
        return tokens

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[Tokens | None]:
        """The tokens of many texts, on all processors; None for a text that `encode` would refuse."""
        try:
            with no_panic():
                encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception:  # a word-level model without an unknown token raises plain Exception
            return [self._try(text, special) for text in texts]
        return [self._known(encoding.ids) for encoding in encodings]

    def offsets(self, text: str) -> tuple[Tokens, list[tuple[int, int]]]:
        """The tokens of a text without added ones, and for each the characters that it stands for: (begin, end).

        Raises:
            ValueError: as `encode`.
        """
        try:
            with no_panic():
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:
            raise ValueError(self.unknown_character(text)) from None
        if self._known(encoding.ids) is None:
            raise ValueError(self.unknown_character(text))
        return encoding.ids, encoding.offsets

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens, without special tokens or with them."""
        with no_panic():
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """By token the text that it adds: "" where it is special, or only begins a character. Joined they are the text
        that `decode` gives, if no character is broken off.

        Each token is decoded behind those of the last piece, because its text depends on them: a text begins without
        the space that its first token has.
        """
        found: list[str] = []
        begin = read = waiting = 0
        for end in range(1, len(tokens) + 1):
            before, text = self.decode(tokens[begin:read]), self.decode(tokens[begin:end])
            waiting = waiting + 1 if text.endswith(_NO_CHARACTER) else 0
            if len(text) > len(before) and (waiting in (0, _MOST_BYTES) or end == len(tokens)):
                found.append(text[len(before) :])
                begin, read, waiting = read, end, 0
            else:
                found.append("")
        return found

    # --- Chats.

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. It writes all special tokens itself: encode its texts with `special=False`.

        Raises:
            UserError: there is none, or it is broken.
        """
        found = self._template_texts()
        given = self._given_template
        if given and given not in found:
            found = {"default": _template_of(given)}
            given = ""
        if not found:
            raise UserError(
                f"tokenizer {self.path}: it has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json), and the data set has chats; give one with --chat-template (a file of Jinja "
                "text), use the tokenizer of an instruction-tuned model, or give rows of text"
            )
        if not given and "default" not in found:
            names = ", ".join(sorted(found))
            raise UserError(f"tokenizer {self.path}: it has the chat templates {names}; name one with --chat-template")
        try:
            return ChatTemplate(found[given or "default"], self.special_tokens, self._date)
        except TemplateError as error:
            raise UserError(
                f"tokenizer {self.path}: its chat template is broken ({error}); correct it, or give another one with "
                "--chat-template"
            ) from None

    def _template_texts(self) -> dict[str, str]:
        """By name; files take the place of the configuration's."""
        folder = self.path.parent
        files = {file.stem: file for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
        if (file := folder / "chat_template.jinja").is_file():
            files = {"default": file} | files
        if files:
            return {name: self._text(file) for name, file in files.items()}
        match self._config.get("chat_template"):
            case str(text):
                return {"default": text}
            case list(several):
                entries = [entry for entry in several if isinstance(entry, dict)]
                return {str(entry.get("name")): str(entry.get("template")) for entry in entries}
            case dict(several):
                return {str(name): str(text) for name, text in several.items()}
        return {}

    # --- Files.

    def _text(self, path: Path) -> str:
        try:
            return read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read as UTF-8 ({error}); correct it or take it away") from None

    def _load(self) -> Any:
        if not self.path.is_file():
            remedy = f"give the directory of a model that has one, or the path of a {TOKENIZER_FILE}"
            if any((self.path.parent / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
                remedy = "write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            raise UserError(
                f"tokenizer {self.path}: no such file; {remedy} (`python -m realhf.data.sort_task DIR` makes the data "
                "of the sorting task)"
            )
        return load_tokenizer(self.path)

    def _json(self, name: str) -> dict[str, Any]:
        """A file beside tokenizer.json; {} where there is none."""
        path = self.path.parent / name
        if not path.is_file():
            return {}
        try:
            content = decode_loose_json(read_bytes(path))
        except (OSError, BadContentError) as error:
            raise UserError(f"{path}: not JSON ({error}); correct it or take it away") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: a {type(content).__name__} instead of an object; correct it or take it away")
        return content

    def _special_tokens(self) -> dict[str, str]:
        """By name (`bos_token`), for templates; where the configuration lists its added tokens, the older
        special_tokens_map.json does not count."""
        given = self._config
        if "added_tokens_decoder" not in given:
            given = given | self._json("special_tokens_map.json")
        entries = {name: value for name, value in given.items() if name.endswith("_token")}
        for names in ("extra_special_tokens", "model_specific_special_tokens"):
            if isinstance(more := given.get(names), dict):
                entries |= more
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in entries.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def _add_tokens(self) -> None:
        """Tokens that the configuration has and tokenizer.json lacks."""
        there = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        listed = self._config.get("added_tokens_decoder")
        fields = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}
        if isinstance(listed, dict):
            for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
                if isinstance(entry, dict) and entry.get("content") not in there:
                    self._tokenizer.add_tokens([AddedToken(**{k: v for k, v in entry.items() if k in fields})])
        names = list(self.special_tokens.values())
        for extra in ("additional_special_tokens", "extra_special_tokens"):
            entries = self._config.get(extra)
            if isinstance(entries, list):
                names += [entry["content"] if isinstance(entry, dict) else entry for entry in entries]
        there = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        missing = [AddedToken(name, special=True, normalized=False) for name in names if name not in there]
        self._tokenizer.add_special_tokens(missing)

    def _named(self, name: str) -> int | None:
        return self.token(self.special_tokens[name]) if name in self.special_tokens else None

    def _try(self, text: str, special: bool) -> Tokens | None:
        try:
            with no_panic():
                ids: Tokens = self._tokenizer.encode(text, add_special_tokens=special).ids
        except Exception:  # as in `encode_batch`
            return None
        return self._known(ids)

    def _known(self, tokens: Tokens) -> Tokens | None:
        return None if self._unknown is not None and self._unknown in tokens else tokens

    def unknown_character(self, text: str) -> str:
        """Which character of a text that `encode` refuses the tokenizer cannot express, in words."""
        wrong = next((character for character in text if self._try(character, False) is None), text)
        return f"{wrong!r} in {_shortened(text)!r} has no token in the tokenizer"


def _template_of(given: str) -> str:
    """The Jinja text that an option gives: itself, or the name of a file."""
    if "{%" in given or "{{" in given:
        return given
    try:
        return read_text(given)
    except (OSError, ValueError) as error:
        what = error.strerror.lower() if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"--chat-template {given!r}: {what}; give a file of Jinja text, the text itself, or the name of one of the "
            "tokenizer's templates"
        ) from None


def _shortened(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
