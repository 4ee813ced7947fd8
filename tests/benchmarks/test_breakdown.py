"""Where the devices' time of a simulated plan goes."""

import pytest
from lib.breakdown import DATA_TRANSFER, IDLE, REALLOCATION, device_time_shares

from realhf.planning.problem.native import native_problem, simulate
from realhf.planning.problem.tables import CallTable, OptionRow, Problem, TransferTable
from tests.unit.planning.graphs import random_problem


def call_table(name: str, devices: tuple[int, int], time_s: float, parents: list[tuple[str, int]]) -> CallTable:
    option = OptionRow(
        devices=devices, strategy="", micro_batches=1, time_s=time_s, static_bytes=0, dynamic_bytes=0, copy_bytes=0
    )
    return CallTable(name=name, model="model", trains=False, home=name, parents=parents, options=[option])


def transfer(name: str, seconds: float) -> TransferTable:
    return TransferTable(
        name=name,
        source="generate",
        target="score",
        on=["generate", "score"],
        parents=[("generate", 0)],
        rows=[0],
        columns=[0],
        num_columns=1,
        seconds=[seconds],
    )


def test_shares_worked_out_by_hand() -> None:
    # Devices 0-1 generate for 6 s; then both transfers occupy devices 0-2, 1 s and 3 s one after the other; then
    # device 2 scores for 10 s. 20 s on 4 devices are 80 device-seconds; device 3 never works.
    moves = [transfer("data: generate -> score", 1.0), transfer("actor: generate -> score", 3.0)]
    waits = [(move.name, 0) for move in moves]
    problem = Problem(
        num_devices=4,
        devices_per_node=4,
        device_memory_bytes=1.0,
        steps=1,
        max_steps_in_flight=1,
        calls=[call_table("generate", (0, 2), 6.0, []), call_table("score", (2, 1), 10.0, waits)],
        transfers=moves,
    )
    shares = device_time_shares(problem, [0, 0], simulate(native_problem(problem), [0, 0], 1))
    assert shares == {
        "generate": pytest.approx(12 / 80),
        "score": pytest.approx(10 / 80),
        REALLOCATION: pytest.approx(9 / 80),
        DATA_TRANSFER: pytest.approx(3 / 80),
        IDLE: pytest.approx(46 / 80),
    }
    assert list(shares) == ["generate", "score", REALLOCATION, DATA_TRANSFER, IDLE]


@pytest.mark.parametrize("seed", range(40))
def test_idle_time_is_that_between_the_events_of_each_device(seed: int) -> None:
    problem = random_problem(seed)
    choice = [len(call.options) - 1 for call in problem.calls]
    events = simulate(native_problem(problem), choice, problem.steps)
    makespan = max(event.end_s for event in events)
    if makespan == 0:
        with pytest.raises(AssertionError, match="nothing takes any time"):
            device_time_shares(problem, choice, events)
        return
    idle = 0.0
    for device in range(problem.num_devices):
        clock = 0.0
        for event in sorted(events, key=lambda event: (event.start_s, event.end_s)):
            if device in devices_of(problem, choice, event.node):
                assert event.start_s >= clock, "one thing at a time on a device"
                idle, clock = idle + event.start_s - clock, event.end_s
        idle += makespan - clock
    shares = device_time_shares(problem, choice, events)
    assert shares[IDLE] == pytest.approx(idle / makespan / problem.num_devices, abs=1e-9)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in shares.values())


def devices_of(problem: Problem, choice: list[int], node: int) -> set[int]:
    def of_call(index: int) -> set[int]:
        first, size = problem.calls[index].options[choice[index]].devices
        return set(range(first, first + size))

    if node < len(problem.calls):
        return of_call(node)
    table = problem.transfers[node - len(problem.calls)]
    return set().union(*(of_call(problem.numbers()[name]) for name in table.on))
