"""How long tests wait for what has to happen: as long as it takes, so that only a hang runs into the deadline."""

import time
from collections.abc import Callable

# Of everything that succeeds. A machine may be busy with other work, and stop all of a test's processes for minutes.
PATIENCE_S = 1500.0


def wait_until(is_so: Callable[[], bool], what: str | Callable[[], str] = "what was waited for") -> None:
    """Returns as soon as `is_so()`; fails with `what` after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        text = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {text}"
        time.sleep(0.02)
