"""Samples for tests of rewards."""

from typing import Any

from realhf.rewards.signature import Sample


def sample(id: int = 0, response: str = "4", **fields: Any) -> Sample:
    return Sample(**{"id": id, "step": 2, "prompt": "What is 2 + 2?", "response": response, **fields})


def of(responses: str) -> list[Sample]:
    """A sample for each character."""
    return [sample(id, response) for id, response in enumerate(responses)]
