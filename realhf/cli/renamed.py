"""Options that had another name or place, and the words that take theirs."""

from collections.abc import Mapping, Sequence

from realhf.base.errors import UserError

# (command, old option) -> what to write now.
RENAMED: Mapping[tuple[str, str], str] = {
    ("plan", "--osdp"): "realhf osdp MODEL",
    ("plan", "--dump-version"): "realhf plan EXPERIMENT --dump-problem FILE",
    ("run", "--fields"): "realhf run EXPERIMENT --help-all",
    ("plan", "--fields"): "realhf plan EXPERIMENT --help-all",
    ("profile", "--fields"): "realhf profile EXPERIMENT --help-all",
}


def check_names(command: str, words: Sequence[str]) -> None:
    """Raises UserError for an old option among the words of a command."""
    for word in words:
        old = word.partition("=")[0]
        if (command, old) in RENAMED:
            raise UserError(f"`realhf {command} {old}` is no more; write: {RENAMED[command, old]}")
