"""The checks of `realhf doctor` and their findings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from realhf.base.errors import UserError

State = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. A failure and a warning have a remedy."""

    state: State
    detail: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.state in ("ok", "info"), f"no remedy for {self.detail!r}"


@dataclass(frozen=True)
class Check:
    """`find` returns a text if all is well, or a finding with its own state. Any exception is a failure."""

    name: str
    find: Callable[[], str | Finding]
    remedy: str

    def run(self) -> Finding:
        try:
            found = self.find()
        except UserError as error:
            return Finding("fail", str(error), self.remedy)
        except Exception as error:  # the command is to say whatever is wrong with the machine
            text = str(error).strip() or "no message"
            return Finding("fail", f"{type(error).__name__}: {text}", self.remedy)
        return Finding("ok", found) if isinstance(found, str) else found
