"""What a run tells while it goes on, to whoever listens."""

from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run


class Listener:
    """Hears of a run, and does nothing with it: a listener overrides what it wants to hear."""

    def say(self, text: str) -> None:
        """A sentence for people."""

    def search(self, phase: str, detail: str) -> None:
        """A search for a plan goes on (`realhf.planning.request.Watch`)."""

    def starting(self, run: Run, directory: RunDirectory, reason: str | None) -> None:
        """The processes of the run are about to be started; its directory is ready.

        `reason`: why once more: the run broke, or "" for a change of plan. None: the first start of this command.
        """

    def watched(self, job: str) -> None:
        """Another look was taken: the run directory may have news. `job`: the state of a cluster's job, "" for none."""
