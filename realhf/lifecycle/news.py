"""What a run tells while it goes on, to whoever listens."""

from collections.abc import Callable
from dataclasses import dataclass

from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run


@dataclass(frozen=True)
class Said:
    """A sentence for people."""

    text: str


@dataclass(frozen=True)
class Searching:
    """A search for a plan is in this phase, and `detail` is known of it by now."""

    phase: str
    detail: str


@dataclass(frozen=True)
class Starting:
    """The processes of the run are about to be started. `directory` is ready for them.

    `reason`: why once more: the run broke, or "" for a change of plan. None: the first start of this command.
    """

    run: Run
    directory: RunDirectory
    reason: str | None = None


@dataclass(frozen=True)
class Watched:
    """Another look at the processes was taken; there may be news in the run directory.

    `job`: the state of the cluster's job, "" where there is none.
    """

    job: str = ""


News = Said | Searching | Starting | Watched
Listener = Callable[[News], None]


def unheard(news: News) -> None:
    """Nobody listens."""
