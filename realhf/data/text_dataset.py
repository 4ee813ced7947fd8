"""A data set of text: options, the check of all rows, and their reader. No torch here.

A row of a file becomes a draft (texts, `realhf.data.drafts`), a draft becomes tokens (`realhf.data.encoding`), and
tokens become the keys that calls read. `realhf.data.datasets` has the kinds.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import count
from typing import ClassVar

import msgspec
import numpy as np

from realhf.api.data_options import DataOptions
from realhf.api.experiment import DatasetExtent, KeyExtent, KeyLengths
from realhf.base.errors import UserError
from realhf.data.chat_template import TemplateError
from realhf.data.drafts import ChatWriter, Draft
from realhf.data.encoding import DraftEncoder, EncodedRow
from realhf.data.fields import Columns, flag_of
from realhf.data.files.opening import data_files, open_rows
from realhf.data.files.rows import Record
from realhf.data.kept_rows import keep_on_disk, kept_on_disk
from realhf.data.tokenizer import TextTokenizer, Tokens, tokenizer_files
from realhf.dataflow.interface import Nulls


@dataclass(frozen=True, kw_only=True)
class TextDataset(DataOptions, ABC):
    """Rows of text with a tokenizer; every worker must see the files of both.

    path: JSONL or parquet, a folder or a pattern (`data/train-*.parquet`) of such files, or a folder saved by
        `datasets`.
    tokenizer: the directory of a model, or a tokenizer.json.
    """

    joins: ClassVar[bool] = True
    """Whether responses follow the prompt in one sequence."""

    path: str
    tokenizer: str

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The keys that every row has."""

    @property
    def token_keys(self) -> tuple[str, ...]:
        """The keys that are tokens; the others are numbers."""
        return self.keys

    @abstractmethod
    def roles(self, columns: Columns) -> dict[str, str]:
        """The column of each role that rows are read by. Raises UserError if the columns leave a question."""

    @abstractmethod
    def draft(self, record: Record, roles: Mapping[str, str], writer: ChatWriter) -> Draft:
        """The texts of a row. Raises ValueError naming the fault, and TemplateError."""

    @abstractmethod
    def columns(self, row: EncodedRow) -> dict[str, Tokens]:
        """The value of every key."""

    def open(self) -> "OpenDataset":
        """The rows with their reader. Raises UserError for any fault before the first row."""
        return OpenDataset(self)

    def check(self) -> DatasetExtent:
        """Reads every row once; returns their number, lengths and largest tokens, without those that are left out.

        Raises:
            UserError: naming the file, the line and the remedy.
        """
        return self._scan().extent

    def lengths(self) -> dict[str, KeyLengths]:
        """The tokens of every key, for the planner.

        Raises:
            UserError: as `check`.
        """
        found = self.check().keys
        return {
            key: KeyLengths(extent.mean, extent.longest, extent.mean_square)
            if (extent := found.get(key))
            else KeyLengths.constant(1)
            for key in self.keys
        }

    def kept_rows(self) -> np.ndarray | None:
        """The rows [rows] of the file, from 0, that are not left out, in order; None: all.

        Other processes on the machine read the rows that one has found, under a digest of all that they depend on.

        Raises:
            UserError: as `check`.
        """
        if not self.may_drop:
            return None
        kept = kept_on_disk(type(self).__name__, msgspec.to_builtins(self))
        return self._scan().kept if kept is None else kept

    def describe(self) -> str:
        """One line about the rows that are read: file, number, columns, template, lengths, rows left out.

        Raises:
            UserError: as `check`.
        """
        return self._scan().text

    @property
    def parts(self) -> "tuple[TextDataset, ...]":
        """The data set itself: see `MergedDataset`."""
        return (self,)

    def field_options(self) -> dict[str, str]:
        """By option (`prompt_field`) the column that the user names, "" for none."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name.endswith("_field")}

    def _scan(self) -> "_Scan":
        try:
            files = [*data_files(self.path), *tokenizer_files(self.tokenizer, self.chat_template)]
            stats = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
        except OSError:
            stats = ()  # `open` says so
        return _scan(self, stats)


class OpenDataset:
    """The file of a data set, its tokenizer, and the columns that are read.

    Raises:
        UserError: a file is missing, or columns or the end token are not known.
    """

    def __init__(self, dataset: TextDataset):
        self.dataset = dataset
        self.tokenizer = TextTokenizer(dataset.tokenizer, dataset.chat_template, dataset.chat_date)
        self.file = open_rows(dataset.path)
        columns = Columns(dataset.path, self.file.columns(), dataset.field_options())
        self.roles = dataset.roles(columns)
        self.writer = ChatWriter(self.tokenizer, dataset.system)
        self._encoder = DraftEncoder(self.tokenizer, self._end_token(), dataset, joins=dataset.joins)

    def row(self, row: int) -> dict[str, Tokens]:
        """The tokens of every key of a row that is not left out; `row` counts from 0. Raises as `encode`."""
        [found] = self.encode(row, [self.file.row(row)])
        assert found is not None, f"{self.file.place(row)} is left out"
        return self.dataset.columns(found)

    def encode(self, first: int, records: Sequence[Record]) -> list[EncodedRow | None]:
        """The tokens of some rows, `first` and those behind it; None for one that is left out.

        Raises:
            UserError: naming the file, the line and the remedy.
        """
        drafts = [self._draft(first + i, record) for i, record in enumerate(records)]
        found: list[EncodedRow | None] = []
        try:
            for row in self._encoder.encode(drafts):
                found.append(row)
        except ValueError as error:
            remedy = "; correct the line, or use a tokenizer that has it" if "has no token" in str(error) else ""
            raise UserError(f"{self.file.place(first + len(found))}: {error}{remedy}") from None
        return found

    def rows(self) -> Iterator[tuple[int, Record, EncodedRow | None]]:
        """All rows in order: number from 0, columns, tokens. Raises as `encode`."""
        for first, records in self.file.batches():
            yield from zip(count(first), records, self.encode(first, records), strict=False)

    def _draft(self, row: int, record: Record) -> Draft:
        if missing := [column for column in self.roles.values() if column not in record]:
            raise UserError(
                f"{self.file.place(row)}: field {missing[0]!r} is missing; every row has the fields "
                f"{', '.join(self.roles.values())}; add it or delete the line"
            )
        try:
            return self.dataset.draft(record, self.roles, self.writer)
        except TemplateError as error:
            raise UserError(
                f"{self.file.place(row)}: the chat template refuses the chat ({error}); correct the chat, or give "
                "another template with --chat-template"
            ) from None
        except ValueError as error:
            remedy = "" if ";" in str(error) else "; correct it or delete the line"
            raise UserError(f"{self.file.place(row)}: {error}{remedy}") from None

    def _end_token(self) -> int:
        named, tokenizer = self.dataset.end_token, self.tokenizer
        if named:
            found = tokenizer.token(named)
            if found is None:
                raise UserError(
                    f"tokenizer {tokenizer.path}: it has no token {named!r}; set --end-token to one that it has"
                )
            return found
        if not tokenizer.end_tokens:
            raise UserError(
                f"tokenizer {tokenizer.path}: no file beside it names the token that ends a text (eos_token in "
                "tokenizer_config.json); set --end-token"
            )
        return tokenizer.end_tokens[0]


# --- Facts of all rows.


@dataclass(frozen=True)
class _Scan:
    extent: DatasetExtent
    kept: np.ndarray  # [rows] of the file, from 0
    text: str


@lru_cache(maxsize=8)
def _scan(dataset: TextDataset, stats: tuple[tuple[str, int, int], ...]) -> _Scan:
    """Reads a data set whose files have these sizes and times; several parts of the launcher ask for it."""
    opened = dataset.open()
    seen = {key: (array("q"), array("q")) for key in dataset.token_keys}  # of each row: tokens, largest token
    kept, cut = array("q"), 0
    without = {column: array("q") for column in opened.file.columns()}  # the rows in which it is null
    for number, record, row in opened.rows():
        if row is None:
            continue
        kept.append(number)
        for column, missing in without.items():
            if record.get(column) is None:
                missing.append(number)
        cut += row.is_cut
        values = dataset.columns(row)
        for key, (lengths, largest) in seen.items():
            lengths.append(len(values[key]))
            largest.append(max(values[key], default=0))
    dropped = len(opened.file) - len(kept)
    if not kept:
        limits = ", ".join(f"{flag_of(name)} {getattr(dataset, name)}" for name in ("max_prompt_tokens", "max_tokens"))
        raise UserError(
            f"data set {dataset.path}: all of its {dropped} rows are too long for {limits}, so that none is left; "
            "raise these limits"
        )
    extent = DatasetExtent(
        path=dataset.path,
        rows=len(kept),
        keys={
            key: KeyExtent(
                mean=lengths.sum().item() / len(kept),
                mean_square=(lengths**2).sum().item() / len(kept),
                longest=lengths.max().item(),
                longest_at=opened.file.place(kept[lengths.argmax()]),
                largest=largest.max().item(),
                largest_at=opened.file.place(kept[largest.argmax()]),
            )
            for key, (lengths, largest) in ((key, map(np.asarray, columns)) for key, columns in seen.items())
        },
        tokenizer=str(opened.tokenizer.path),
        largest_token=opened.tokenizer.largest_token,
        dropped=dropped,
        truncated=cut,
        first=(opened.file.row(kept[0]), opened.row(kept[0])),
        columns=tuple(without),
        nulls={
            column: Nulls(len(missing), len(kept), opened.file.place(missing[0]) if missing else "")
            for column, missing in without.items()
        },
    )
    rows = np.frombuffer(kept, np.int64)
    if dataset.may_drop:
        keep_on_disk(type(dataset).__name__, msgspec.to_builtins(dataset), rows)
    return _Scan(extent, rows, _description(opened, extent))


def _description(opened: OpenDataset, extent: DatasetExtent) -> str:
    roles = ", ".join(role if role == column else f"{role} from {column!r}" for role, column in opened.roles.items())
    lengths = ", ".join(
        f"{key}: {found.mean:.1f} tokens on average, at most {found.longest}" for key, found in extent.keys.items()
    )
    parts = [f"data set {extent.path}: {extent.rows:,} row{'s' * (extent.rows != 1)}", f"columns {roles}", lengths]
    if opened.writer.has_written:
        parts.append(
            "chats by " + ("the chat_template given" if opened.dataset.chat_template else "the tokenizer's template")
        )
    if extent.dropped:
        parts.append(f"{extent.dropped:,} too long and dropped")
    if extent.truncated:
        parts.append(f"{extent.truncated:,} prompts cut on the left")
    return "; ".join(parts)
