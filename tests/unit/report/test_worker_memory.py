"""The memory of workers in a report: the most over the steps, beside the prediction of the right device."""

from typing import Any

import msgspec

from realhf.dataflow.plan import ExecutionPlan
from realhf.report.worker_memory import MAX_ROWS, memory_figure, memory_section, worker_memory
from tests.unit.report.run_directories import PLAN, RATIONALE

GIB = 2**30


def plan_of(num_devices: int, **rationale: Any) -> ExecutionPlan:
    why = RATIONALE | rationale
    return msgspec.convert(PLAN | {"num_devices": num_devices, "rationale": why}, type=ExecutionPlan)


def line(step: int, *peaks: float) -> dict[str, Any]:
    return {"step": step, "peak_bytes": [round(peak * GIB) for peak in peaks]}


MEMORY = [
    {"devices": [0, 2], "static_bytes": GIB, "peak_bytes": 3 * GIB},
    {"devices": [2, 1], "static_bytes": 2 * GIB, "peak_bytes": 4 * GIB},
]


def test_the_most_over_the_steps_beside_the_prediction() -> None:
    rows = worker_memory(plan_of(3, memory=MEMORY), [line(1, 1, 5, 0), line(2, 2, 4, 0)])
    assert [row.measured_bytes / GIB for row in rows] == [2, 5, 0]
    assert [row.predicted and row.predicted.peak_bytes / GIB for row in rows] == [3, 3, 4]


def test_bars_are_as_long_as_they_say() -> None:
    figure = memory_figure(worker_memory(plan_of(3, memory=MEMORY), [line(1, 1, 2, 3)]), limit_bytes=8 * GIB)
    measured, static, dynamic = figure.data
    assert list(measured.x) == [1, 2, 3]
    assert list(static.x) == [1, 1, 2]
    assert list(dynamic.x) == [2, 2, 2]
    assert list(dynamic.base) == list(static.x)  # one behind the other
    assert measured.text[2] == "3.00 GiB, 38% of the limit"
    assert [shape.x0 for shape in figure.layout.shapes] == [8]  # the limit


def test_communicators_are_said_where_there_are_any() -> None:
    memory = [MEMORY[0], MEMORY[1] | {"communicator_bytes": GIB // 2}]
    text = memory_section(plan_of(3, memory=memory), [line(1, 1, 2, 3)])
    assert "Up to 512 MiB of it are for NCCL's communicators" in text
    assert "communicators" not in memory_section(plan_of(3, memory=MEMORY), [line(1, 1, 2, 3)])


def test_a_far_limit_is_said_and_not_drawn() -> None:
    figure = memory_figure(worker_memory(plan_of(3, memory=MEMORY), [line(1, 1, 1, 1)]), limit_bytes=80 * GIB)
    assert not figure.layout.shapes
    text = memory_section(plan_of(3, memory=MEMORY, device_memory_bytes=80 * GIB), [line(1, 1, 1, 1), line(7, 1, 2, 1)])
    assert "limit is 80.00 GiB a worker" in text
    assert "measured 1.00 GiB in step 1 and 2.00 GiB in step 7" in text


def test_of_many_workers_the_fullest_are_shown() -> None:
    many = plan_of(100, memory=[{"devices": [0, 100], "static_bytes": 0, "peak_bytes": 0}])
    text = memory_section(many, [line(1, *range(1, 101))])
    assert f"The {MAX_ROWS} fullest of 100 workers are shown." in text
    assert '"worker 99"' in text
    assert '"worker 67"' not in text


def test_no_prediction_and_no_measurement() -> None:
    plan = msgspec.convert(PLAN, type=ExecutionPlan)
    assert worker_memory(plan, [{"step": 1}]) == []
    assert len(memory_figure(worker_memory(plan, [line(1, 1, 2)]), None).data) == 1
