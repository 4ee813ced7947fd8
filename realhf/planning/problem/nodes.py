"""What the nodes of a planning problem file, calls and transfers, may be whatever the version of the format."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Protocol

import msgspec

# The limits are those of csrc/search/problem.h.
MAX_CALLS, MAX_TRANSFERS = 64, 4096
MAX_INSTANCES = 8192  # calls and transfers x steps
MOST = 10**18  # of times and bytes
MAX_DEVICES = 2**20

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
NumDevices = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]
Steps = Annotated[int, msgspec.Meta(ge=1, le=MAX_INSTANCES)]
StepsBack = Annotated[int, msgspec.Meta(ge=0, le=MAX_INSTANCES)]
Parents = Annotated[list[tuple[str, StepsBack]], msgspec.Meta(max_length=1024)]  # (call or transfer, steps back)
Devices = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_DEVICES)], NumDevices]  # (first, number)
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
Label = Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class Node(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def parents(self) -> Parents: ...


def numbers(names: Sequence[str]) -> dict[str, int]:
    """Numbers the distinct names in the order of their first appearance."""
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def node_complaints(nodes: Sequence[Node], steps: int) -> Iterator[str]:
    """More of them than can be simulated; names that are given twice or to nobody."""
    if len(nodes) * steps > MAX_INSTANCES:
        yield f"steps={steps} of {len(nodes)} calls and transfers are more than {MAX_INSTANCES:,} in all; lower steps"
    names = [node.name for node in nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield f"two nodes have the name {twice!r}; names of calls and transfers must differ"
    for node in nodes:
        for parent, _ in node.parents:
            if parent not in names:
                yield f"{node.name!r}: parents names {parent!r}, which is no call and no transfer of the file"


def cycle_complaints(nodes: Sequence[Node]) -> Iterator[str]:
    waiting = {node.name: {parent for parent, back in node.parents if back == 0} for node in nodes}
    while waiting:
        done = {name for name, parents in waiting.items() if not parents & waiting.keys()}
        if not done:
            yield (
                "the nodes of a step wait for one another in a circle; parents must not form a cycle with 0 steps back"
            )
            return
        waiting = {name: parents for name, parents in waiting.items() if name not in done}
