"""The two kinds of failure a user can meet, and the exit code of each."""

from collections.abc import Iterable


class UserError(Exception):
    """Something the user wrote cannot work: the text names the value, the rule and the remedy.

    Raised before any device is reserved; the command line prints it as one paragraph and
    exits with code 2.
    """


class RunError(Exception):
    """A run that had started failed: the text names the worker, the call and the log to read.

    The command line prints it and exits with code 1. `workers` are those to blame, by index; none where nobody is.
    """

    def __init__(self, text: str, workers: Iterable[int] = ()):
        super().__init__(text)
        self.workers = frozenset(workers)
