"""The kinds of data sets: JSONL files of text, which give calls token sequences. No torch here."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer

from realhf.api.experiment import DatasetExtent, KeyExtent
from realhf.base.errors import UserError

Tokens = list[int]

MAKE_DATA = "`python -m realhf.data.sort_task DIR` makes the data of the sorting task"


class Encoder:
    """Turns text into tokens; refuses text that the tokenizer cannot express.

    Args:
        path: a `tokenizer.json` of Hugging Face's `tokenizers`.
        end_token: the token that ends an answer.

    Raises:
        UserError: the file is missing or broken, or has no such token.
    """

    def __init__(self, path: str, end_token: str):
        if not Path(path).is_file():
            raise UserError(f"tokenizer {path}: no such file; give the path of a tokenizer.json ({MAKE_DATA})")
        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer {path}: {error}; give a tokenizer.json of Hugging Face's tokenizers") from None
        end = self._tokenizer.token_to_id(end_token)
        if end is None:
            raise UserError(f"tokenizer {path}: it has no token {end_token!r}; set end_token to one that it has")
        self.end_token: int = end
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)

    @property
    def largest_token(self) -> int:
        """The largest id of the tokenizer."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def prompt(self, text: str) -> Tokens:
        """The tokens of a prompt, with the tokenizer's special tokens (a begin token)."""
        return self._encode(text, add_special_tokens=True)

    def answer(self, text: str) -> Tokens:
        """The tokens of an answer, the end token last."""
        return [*self._encode(text, add_special_tokens=False), self.end_token]

    def _encode(self, text: str, add_special_tokens: bool) -> Tokens:
        """Raises ValueError, naming the character, if the tokenizer cannot express the text."""
        tokens = self._try(text, add_special_tokens)
        if tokens is None:
            wrong = next((character for character in text if self._try(character, False) is None), text)
            raise ValueError(f"{wrong!r} in {text!r} has no token in the tokenizer")
        return tokens

    def _try(self, text: str, add_special_tokens: bool) -> Tokens | None:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception:  # a word-level model without an unknown token raises plain Exception
            return None
        ids: Tokens = encoding.ids
        return None if self._unknown is not None and self._unknown in ids else ids


@dataclass(frozen=True, kw_only=True)
class JSONLDataset(ABC):
    """A file of one JSON object a line, read with a tokenizer; every worker must see both files.

    Every text field must be present, have at least one character, and have only characters that the tokenizer knows. A
    prompt may have at most `max_prompt_tokens` tokens, its begin token included.
    """

    FIELDS: ClassVar[tuple[str, ...]]

    path: str
    tokenizer: str
    max_prompt_tokens: int
    end_token: str = "<eos>"

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1:
            raise UserError(f"max_prompt_tokens={self.max_prompt_tokens} must be at least 1")

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The keys that every row has."""

    @property
    def token_keys(self) -> tuple[str, ...]:
        """The keys that are tokens; the others are numbers, one a row."""
        return self.keys

    @abstractmethod
    def columns(self, prompt: Tokens, texts: dict[str, str], encoder: Encoder) -> dict[str, Tokens]:
        """The value of every key, from the encoded prompt and the fields of a line."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a line must have."""
        return self.FIELDS

    def check(self) -> DatasetExtent:
        """Reads every line once; returns the number of lines, their lengths and their largest tokens.

        Raises:
            UserError: naming the file, the line and the remedy.
        """
        encoder = self.encoder()
        rows = [self.encode(line, number, encoder) for number, line in enumerate(self.lines(), 1)]
        return DatasetExtent(
            path=self.path,
            rows=len(rows),
            keys={key: _extent(rows, key) for key in self.token_keys},
            tokenizer=self.tokenizer,
            largest_token=encoder.largest_token,
        )

    def lengths(self) -> dict[str, tuple[float, int]]:
        """Mean and largest number of tokens of every key, for the planner.

        Raises:
            UserError: as `check`.
        """
        found = self.check().keys
        return {key: (found[key].mean, found[key].longest) if key in found else (1.0, 1) for key in self.keys}

    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.end_token)

    def lines(self) -> list[bytes]:
        """The lines of the file, undecoded, so that a broken one can be named by its number."""
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            what = (error.strerror or str(error)).lower()
            raise UserError(f"data set {self.path}: {what}; correct the path or make the file ({MAKE_DATA})") from None
        lines = content.split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        if not lines:
            raise UserError(f"data set {self.path}: the file is empty; it needs at least one line")
        return lines

    def encode(self, line: bytes, number: int, encoder: Encoder) -> dict[str, Tokens]:
        """The tokens of every key of one line; `number` counts from 1.

        Raises:
            UserError: naming the file, the line and the remedy.
        """
        texts = self._texts(line, number)
        try:
            prompt = encoder.prompt(texts["prompt"])
            columns = self.columns(prompt, texts, encoder)
        except ValueError as error:
            raise self._error(number, f"{error}; correct the line, or use a tokenizer that has it") from None
        if len(prompt) > self.max_prompt_tokens:
            raise self._error(
                number,
                f"the prompt has {len(prompt)} tokens, more than max_prompt_tokens={self.max_prompt_tokens}; "
                "shorten it, delete the line, or raise max_prompt_tokens",
            )
        return columns

    def record(self, line: bytes, number: int) -> dict[str, Any]:
        """All fields of one line; `number` counts from 1.

        Raises:
            UserError: it is no JSON object; naming the file, the line and the remedy.
        """
        form = f"every line is a JSON object with the text fields {', '.join(self.fields)}"
        try:
            record: Any = json.loads(line)
        except UnicodeDecodeError:
            raise self._error(number, "it is not UTF-8; save the file as UTF-8") from None
        except json.JSONDecodeError as error:
            what = f"broken JSON ({error.msg} at column {error.colno})" if line.strip() else "the line is empty"
            raise self._error(number, f"{what}; {form}; correct the line or delete it") from None
        if not isinstance(record, dict):
            raise self._error(number, f"a {type(record).__name__} instead of an object; {form}; correct the line")
        return record

    def _texts(self, line: bytes, number: int) -> dict[str, str]:
        record = self.record(line, number)
        form = f"every line is a JSON object with the text fields {', '.join(self.fields)}"
        for field in self.fields:
            if field not in record:
                raise self._error(number, f"field {field!r} is missing; {form}; add it or delete the line")
            if not isinstance(record[field], str) or not record[field]:
                raise self._error(
                    number,
                    f"field {field!r} is {record[field]!r}, not a text of at least one character; "
                    "correct it or delete the line",
                )
        return {field: record[field] for field in self.fields}

    def _error(self, number: int, what: str) -> UserError:
        return UserError(f"{self.path}, line {number}: {what}")


@dataclass(frozen=True, kw_only=True)
class PromptDataset(JSONLDataset):
    """Lines {"prompt"}: `prompt`; with `with_answer` lines {"prompt", "answer"}: also `answer` and the end token."""

    FIELDS: ClassVar[tuple[str, ...]] = ("prompt",)

    with_answer: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return self.fields

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.FIELDS, "answer") if self.with_answer else self.FIELDS

    def columns(self, prompt: Tokens, texts: dict[str, str], encoder: Encoder) -> dict[str, Tokens]:
        return {"prompt": prompt} | ({"answer": encoder.answer(texts["answer"])} if self.with_answer else {})


@dataclass(frozen=True, kw_only=True)
class SFTDataset(JSONLDataset):
    """Lines {"prompt", "answer"}: `tokens` (prompt, answer, end token) and `prompt_length` [1]."""

    FIELDS: ClassVar[tuple[str, ...]] = ("prompt", "answer")

    @property
    def keys(self) -> tuple[str, ...]:
        return ("tokens", "prompt_length")

    @property
    def token_keys(self) -> tuple[str, ...]:
        return ("tokens",)

    def columns(self, prompt: Tokens, texts: dict[str, str], encoder: Encoder) -> dict[str, Tokens]:
        return {"tokens": prompt + encoder.answer(texts["answer"]), "prompt_length": [len(prompt)]}


@dataclass(frozen=True, kw_only=True)
class PreferenceDataset(JSONLDataset):
    """Lines {"prompt", "chosen", "rejected"}: `prompt`, and `chosen`, `rejected` as whole sequences (prompt,
    answer, end token)."""

    FIELDS: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")

    @property
    def keys(self) -> tuple[str, ...]:
        return self.FIELDS

    def columns(self, prompt: Tokens, texts: dict[str, str], encoder: Encoder) -> dict[str, Tokens]:
        whole = {key: prompt + encoder.answer(texts[key]) for key in ("chosen", "rejected")}
        return {"prompt": prompt, **whole}


def _extent(rows: list[dict[str, Tokens]], key: str) -> KeyExtent:
    lengths, largest = [len(row[key]) for row in rows], [max(row[key], default=0) for row in rows]
    return KeyExtent(
        mean=sum(lengths) / len(rows),
        longest=max(lengths),
        longest_line=lengths.index(max(lengths)) + 1,
        largest=max(largest),
        largest_line=largest.index(max(largest)) + 1,
    )
