"""What `realhf doctor` checks and finds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found. What fails or is to be warned of has a remedy."""

    state: State
    detail: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.state in ("ok", "info"), f"no remedy for {self.detail!r}"


@dataclass(frozen=True)
class Check:
    """A name for the line, and what to do for it. What `find` raises counts as a failure with `remedy`."""

    name: str
    find: Callable[[], Finding]
    remedy: str

    def run(self) -> Finding:
        try:
            return self.find()
        except Exception as error:  # whatever is wrong with the machine is what this command is to say
            text = str(error).strip() or "no message"
            return Finding(state="fail", detail=f"{type(error).__name__}: {text}", remedy=self.remedy)
