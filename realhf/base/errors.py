"""The two kinds of failure for users, and their exit codes."""

from collections.abc import Iterable


class UserError(Exception):
    """The user's input cannot work: the text names the value, the rule and the remedy.

    It is raised before any device is reserved. The command line prints it as one paragraph and exits with code 2.
    """


class RunError(Exception):
    """A started run failed: the text names the worker, the call and the log to read.

    The command line prints it and exits with `returncode`. `workers` has the indices of the workers to blame, if any.
    """

    def __init__(self, text: str, workers: Iterable[int] = (), returncode: int = 1):
        super().__init__(text)
        self.workers, self.returncode = frozenset(workers), returncode
