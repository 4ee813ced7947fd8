"""How commands show results: lines, tables, and files that they write."""

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from realhf.base.errors import UserError
from realhf.base.files import write_atomically


class Output(Console):
    """A console whose lines are neither broken nor coloured by what they contain."""

    def say(self, *lines: str) -> None:
        for line in lines:
            self.print(line, highlight=False, soft_wrap=True)

    def write(self, path: Path, content: bytes) -> None:
        """Writes a file and says so. Raises UserError if it cannot be written."""
        try:
            write_atomically(path, content)
        except OSError as error:
            raise UserError(f"{path}: cannot write ({error.strerror}); give a file in a folder that exists") from None
        self.say(f"written to {path}")

    def write_json(self, path: Path, content: Any) -> None:
        self.write(path, json.dumps(content, indent=2).encode() + b"\n")


def wide_output() -> Output:
    """An output whose tables are as wide as the terminal; 110 columns where there is none."""
    return Output(width=None if sys.stdout.isatty() else 110)


def table_of(title: str, *columns: str, words: int = 1, frame: box.Box = box.SIMPLE_HEAD) -> Table:
    """An empty table. The first `words` columns have words and begin at the left, the others numbers."""
    table = Table(title=title, title_justify="left", box=frame, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right", no_wrap=True)
    return table
