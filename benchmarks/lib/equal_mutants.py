"""The file of mutations that change no behaviour which anything promises, each with its reason.

An entry is the path of a file; a line `- ` and one or more lines `+ `, as `benchmarks/mutations.py` prints them; and
lines of text, the reason. Entries have an empty line between them; lines that begin with # say something to the reader.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EqualMutants:
    """`before` became one of `after` in `path`; `line`: of the entry in its file."""

    path: str
    before: str
    after: tuple[str, ...]
    reason: str
    line: int

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        """See `Mutant.key`."""
        return [(self.path, self.before, after) for after in self.after]

    def matches(self, source: str) -> bool:
        """Whether the file still has the text."""
        return self.before in " ".join(source.split())


def read_equal(file: Path) -> list[EqualMutants]:
    """All entries; ends the program with the place of one that lacks something."""
    entries = []
    block: list[str] = []
    begins = 1
    for number, line in enumerate([*file.read_text().splitlines(), ""], 1):
        if line.startswith("#"):
            continue
        if line.strip():
            block.append(line)
            continue
        if block:
            entries.append(_entry(block, f"{file.name}:{begins}", begins))
        block, begins = [], number + 1
    return entries


def _entry(block: Sequence[str], where: str, line: int) -> EqualMutants:
    before = [text[2:] for text in block if text.startswith("- ")]
    after = [text[2:] for text in block if text.startswith("+ ")]
    reason = " ".join(text.strip() for text in block[1:] if not text.startswith(("- ", "+ ")))
    if len(before) != 1 or not after or not reason:
        sys.exit(f"{where}: an entry is a path, one line `- `, lines `+ `, and a reason")
    return EqualMutants(path=block[0], before=before[0], after=tuple(after), reason=reason, line=line)
