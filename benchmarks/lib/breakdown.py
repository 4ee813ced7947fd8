"""What the devices of a simulated plan spend their time on: each call, reallocation, data transfer, idling."""

from collections.abc import Sequence

from realhf.planning.explain.analysis import occupied
from realhf.planning.problem.native import Event
from realhf.planning.problem.tables import Problem

REALLOCATION, DATA_TRANSFER, IDLE = "reallocation", "data transfer", "idle"
DATA = "data: "  # what the name of a data transfer begins with (`realhf.planning.problem.transfers`)


def device_time_shares(problem: Problem, choice: Sequence[int], events: Sequence[Event]) -> dict[str, float]:
    """Parts of all device-seconds of a simulation, in [0, 1]; they add up to 1.

    One entry a call by name, in the order of the problem, then REALLOCATION, DATA_TRANSFER and IDLE. A
    node takes its duration on every device that it occupies; the whole is the makespan of `events`
    (what `simulate` returned for `choice`) on all devices, so that devices without work idle.
    """
    devices = occupied(problem, choice)
    shares = {call.name: 0.0 for call in problem.calls} | {REALLOCATION: 0.0, DATA_TRANSFER: 0.0}
    whole = problem.num_devices * max(event.end_s for event in events)
    assert whole > 0, "nothing takes any time"
    for event in events:
        shares[_kind(problem, event.node)] += (event.end_s - event.start_s) * len(devices[event.node]) / whole
    return shares | {IDLE: max(0.0, 1.0 - sum(shares.values()))}


def _kind(problem: Problem, node: int) -> str:
    name = problem.nodes[node].name
    if node < len(problem.calls):
        return name
    return DATA_TRANSFER if name.startswith(DATA) else REALLOCATION
