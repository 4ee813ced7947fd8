"""From which staleness on generation and training on devices of their own win, where it is known by hand."""

import msgspec
import pytest

from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.problem.tables import Problem
from realhf.planning.request import SearchBudget
from realhf.planning.task import PlanningTask, with_staleness
from tests.unit.planning import graphs
from tests.unit.planning.graphs import call_options

Places = dict[str, dict[tuple[int, int], float]]  # call -> devices (first, number) -> seconds


def searched(staleness: int, num_devices: int, places: Places) -> tuple[float, dict[str, tuple[int, int]]]:
    """(seconds a step, devices of each call) of the best plan, if calls take these seconds and moves take none."""
    graph = with_staleness(
        DataflowGraph(
            [
                graphs.call("actor", graphs.TINY, GENERATE, "prompts", "seq"),
                graphs.call("reward", graphs.TINY.with_head("scalar"), INFERENCE, "seq", "rewards"),
                graphs.call("actor", graphs.TINY, TRAIN_STEP, "seq rewards"),
            ],
            ["prompts"],
        ),
        staleness,
    )
    cluster = graphs.cpu_cluster(num_devices)
    task = PlanningTask(graph=graph, max_steps_in_flight=4, **graphs.settings(graph, cluster))
    problem = build_problem(task, {c.name: call_options(c, task.batch_size, cluster) for c in graph.calls.values()})
    native = native_problem(timed(problem, places))
    found = search_problem(native, SearchRequest(budget=SearchBudget(evaluations=3000), seed=0))
    tables = timed(problem, places).calls
    return found.step_s, {c.name: c.options[i].devices for c, i in zip(tables, found.choice, strict=True)}


def timed(problem: Problem, places: Places) -> Problem:
    """One option a place, with its seconds; all transfers are free and keep what they occupy and wait for."""
    kept = []
    for call in problem.calls:
        by_place = {row.devices: row for row in call.options}
        rows = [
            msgspec.structs.replace(by_place[devices], time_s=seconds) for devices, seconds in places[call.name].items()
        ]
        kept.append(msgspec.structs.replace(call, options=rows))
    options = {call.name: len(call.options) for call in kept}
    transfers = [
        msgspec.structs.replace(
            transfer,
            rows=[0] * options[transfer.source],
            columns=[0] * options[transfer.target],
            num_columns=1,
            seconds=[0.0],
        )
        for transfer in problem.transfers
    ]
    return msgspec.structs.replace(problem, calls=kept, transfers=transfers)


def apart(devices: dict[str, tuple[int, int]]) -> bool:
    (a, m), (b, n) = devices["actor_generate"], devices["actor_train_step"]
    return a + m <= b or b + n <= a


def test_generation_that_does_not_scale_leaves_from_one_step_on() -> None:
    """Generation takes 6 s on one device or two, training 3 s on two and 6 s on one, inference 2 s on device 1.

    On-policy: 6 + 2 + 3 = 11 s a step with training on both devices, 6 + 2 + 6 = 14 s with generation and
    training apart. One step stale: device 0 is busy for 6 + 3 = 9 s a step if training is on both, and apart device 1
    for 2 + 6 = 8 s, which hides generation but for the first step's 6 s.
    """
    places: Places = {
        "actor_generate": {(0, 1): 6.0, (0, 2): 6.0},
        "reward_inference": {(1, 1): 2.0},
        "actor_train_step": {(1, 1): 6.0, (0, 2): 3.0},
    }
    step_s, devices = searched(0, 2, places)
    assert not apart(devices)
    assert step_s == pytest.approx(11.0)
    step_s, devices = searched(1, 2, places)
    assert apart(devices)
    assert step_s == pytest.approx(8 + 6 / 16)
    assert apart(searched(2, 2, places)[1])


def test_three_stages_need_two_steps() -> None:
    """Generation and inference take 6 s on a device each; training 2 s beside generation, 5 s on a third device.

    A step's way is 14 s with training beside generation and 17 s with it apart, and k + 1 steps can be on their
    way at once. On-policy: 14 against 17. One step stale: device 0 is busy for 6 + 2 = 8, against 17 / 2 = 8.5.
    Two steps stale: 8 against the longest stage's 6, with the last step's 6 + 5 s that nothing hides.
    """
    places: Places = {
        "actor_generate": {(0, 1): 6.0},
        "reward_inference": {(1, 1): 6.0},
        "actor_train_step": {(0, 1): 2.0, (2, 1): 5.0},
    }
    assert [apart(searched(k, 4, places)[1]) for k in (0, 1, 2)] == [False, False, True]
    assert searched(0, 4, places)[0] == pytest.approx(14.0)
    assert searched(2, 4, places)[0] == pytest.approx(6 + 11 / 16)
