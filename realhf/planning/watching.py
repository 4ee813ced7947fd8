"""What a long computation says of itself while it goes on."""

from collections.abc import Callable

# Called with the phase that has begun, or goes on, and what is known of it by now ("" if nothing).
Watch = Callable[[str, str], None]


def unwatched(phase: str, detail: str) -> None:
    """Nobody looks."""
