"""What is wrong with the content of a planning problem file, whatever its version, for people."""

from collections.abc import Callable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from realhf.planning.problem.tables import MAX_INSTANCES

Complaints = Callable[[Any], Iterator[str]]


def complaints_of(file: Any, of_call: Complaints, of_transfer: Complaints) -> Iterator[str]:
    """What both versions refuse, and with it what `of_call` and `of_transfer` say of each of the file's own."""
    nodes = [*file.calls, *file.transfers]
    yield from _node_complaints(nodes, file.steps)
    for call in file.calls:
        yield from of_call(call)
        for i, option in enumerate(call.options):
            if sum(option.devices) > file.num_devices:
                where = f"{call.name!r}: options[{i}]"
                yield f"{where}: devices {list(option.devices)} reach beyond num_devices={file.num_devices}"
    calls = {call.name for call in file.calls}
    for transfer in file.transfers:
        on = [transfer.on] if isinstance(transfer.on, str) else transfer.on
        for field, name in (("from", transfer.source), ("to", transfer.target), *(("on", name) for name in on)):
            if name not in calls:
                yield f"transfer {transfer.name!r}: {field!r} is {name!r}, which is no call of the file"
        yield from of_transfer(transfer)
    try:
        TopologicalSorter({node.name: [name for name, back in node.parents if back == 0] for node in nodes}).prepare()
    except CycleError:
        yield "the nodes of a step wait for one another in a circle; parents must not form a cycle with 0 steps back"


def _node_complaints(nodes: Sequence[Any], steps: int) -> Iterator[str]:
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
