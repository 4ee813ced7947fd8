"""The meaning of a file's columns: by an option, or by the name where that is unambiguous."""

from collections.abc import Mapping, Sequence

from realhf.base.errors import UserError

# The names by role. A column of the first name is taken whatever other columns there are.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "problem", "instruction", "query", "input"),
    "answer": ("answer", "response", "completion", "output", "solution"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "messages": ("messages", "conversations", "conversation"),
    "text": ("text",),
}


class Columns:
    """The columns of a file, and the options that name some of them.

    Args:
        path: the data set's, for messages.
        given: by option (`prompt_field`) the column that the user names, "" for none.

    Raises:
        UserError: an option names no column.
    """

    def __init__(self, path: str, columns: Sequence[str], given: Mapping[str, str]):
        self._path, self.names, self._given = path, tuple(columns), given
        for option, column in given.items():
            if column and column not in columns:
                raise UserError(
                    f"data set {path}: {flag_of(option)} {column!r} is none of its columns, which are {self}; name "
                    "one of these"
                )

    def __str__(self) -> str:
        return ", ".join(self.names) or "none"

    def find(self, role: str, option: str) -> str | None:
        """The column of a role; None if there is none. Raises UserError if several may be meant."""
        if self._given.get(option):
            return self._given[option]
        first, *others = NAMES[role]
        found = [first] if first in self.names else [name for name in others if name in self.names]
        if len(found) > 1:
            raise UserError(
                f"data set {self._path}: its columns {' and '.join(found)} may all be the {role}; name one with "
                f"{flag_of(option)}"
            )
        return found[0] if found else None

    def need(self, role: str, option: str) -> str:
        """As `find`. Raises UserError also if there is none."""
        found = self.find(role, option)
        if found is None:
            known = ", ".join(NAMES[role])
            raise UserError(
                f"data set {self._path}: none of its columns ({self}) is known as the {role} ({known}); name the "
                f"column with {flag_of(option)}, or add one"
            )
        return found

    def is_given(self, option: str) -> bool:
        return bool(self._given.get(option))

    def is_absent(self, role: str) -> bool:
        """Whether no column has a name of the role."""
        return not any(name in self.names for name in NAMES[role])


def flag_of(option: str) -> str:
    """An option of data sets as a command line has it."""
    return f"--{option.replace('_', '-')}"
