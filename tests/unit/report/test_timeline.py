"""Which steps the timeline shows, and what each worker did in them."""

from typing import Any

import msgspec
import pytest

from realhf.dataflow.plan import ExecutionPlan
from realhf.report.figures import timeline_figure
from realhf.report.run_data import TraceEvent
from realhf.report.timeline import Timeline, last_steps
from tests.unit.report.run_directories import PLAN, event, step_events

plan = msgspec.convert(PLAN, type=ExecutionPlan)


def timeline_of(events: list[dict[str, Any]]) -> Timeline:
    timeline = last_steps(plan, msgspec.convert(events, type=list[TraceEvent]))
    assert timeline is not None
    return timeline


def rows(timeline: Timeline, worker: int) -> list[tuple[str, float, float]]:
    return [(s.phase, round(s.start_s, 6), round(s.end_s, 6)) for s in timeline.segments if s.worker == worker]


def test_two_steps_with_the_waiting_between() -> None:
    timeline = timeline_of([e for step in range(4) for e in step_events(step, 10 + 2.0 * step)])
    assert timeline.steps == (3, 4)
    assert timeline.duration_s == pytest.approx(3.75)
    first = [("compute", 0, 0.5), ("reallocation", 0.5, 0.75), ("compute", 0.75, 1.5), ("waiting", 1.5, 2.0)]
    second = [("compute", 2, 2.5), ("reallocation", 2.5, 2.75), ("compute", 2.75, 3.5), ("waiting", 3.5, 3.75)]
    assert rows(timeline, 0) == first + second
    assert rows(timeline, 1)[1] == ("transfer", 0.4, 0.5)
    # Of 7.5 s: compute 2 x (1.25 + 1.4), reallocation 4 x 0.25, transfer 2 x 0.1, waiting 0.75 + 0.25.
    shares = {phase: timeline.share(phase) for phase in ("compute", "reallocation", "transfer", "waiting")}
    assert shares == pytest.approx(
        {"compute": 5.3 / 7.5, "reallocation": 1 / 7.5, "transfer": 0.2 / 7.5, "waiting": 1 / 7.5}
    )


def test_labels_count_steps_from_one() -> None:
    timeline = timeline_of(step_events(0, 0.0))
    assert timeline.steps == (1,)
    assert timeline.segments[0].label == "actor_generate, step 1"


def test_a_step_that_a_worker_has_not_ended_is_not_shown() -> None:
    unfinished = [e for e in step_events(2, 4.0) if not (e["name"].startswith("actor_train_step") and e["tid"] == 1)]
    timeline = timeline_of([*step_events(0, 0.0), *step_events(1, 2.0), *unfinished])
    assert timeline.steps == (1, 2)
    assert timeline.duration_s == pytest.approx(3.75)


def test_neighbouring_steps_only() -> None:
    timeline = timeline_of([*step_events(0, 0.0), *step_events(5, 10.0)])
    assert timeline.steps == (6,)
    assert timeline.duration_s == pytest.approx(1.75)


def test_other_steps_evaluations_and_checkpoints_in_the_time_shown() -> None:
    events = [*step_events(0, 0.0), *step_events(1, 2.0), event("critic_train_step", 7, 0, 3.6, 5.0)]
    of_set = {**event("actor_accuracy", 0, 0, 1.65, 1.7), "name": "actor_accuracy of evaluation/easy batch 1"}
    events += [
        event("actor_accuracy", 0, 0, 1.6, 1.65),
        of_set,
        event("actor_accuracy", 0, 0, 1.5, 1.6, "reallocation"),
    ]
    events += [{**event("x", 0, 0, 1.8, 2.0, "checkpoint"), "name": "checkpoints/step-1"}]
    events += [event("actor_generate", 0, 0, 0.1, 1.9, phase) for phase in ("writing", "sending")]  # beside the rest
    timeline = timeline_of(events)
    between = [("reallocation", 1.5, 1.6), ("evaluation", 1.6, 1.65), ("evaluation", 1.65, 1.7)]
    between += [("waiting", 1.7, 1.8), ("checkpoint", 1.8, 2.0)]
    assert rows(timeline, 0)[3:8] == between
    assert rows(timeline, 0)[-1] == ("compute", 3.6, 3.75)  # cut at the end of the steps shown
    assert [s.label for s in timeline.segments if s.phase == "checkpoint"] == ["checkpoints/step-1"]


def test_calls_beside_the_devices_have_rows_of_their_own() -> None:
    events = step_events(0, 0.0)
    events += [{**event("rule", 0, 1, 0.5, 1.0, "beside"), "name": "rule of step 1"}]
    events += [{**event("rule", 0, 0, 0.2, 9.0, "beside"), "name": "rule of step 8"}]
    timeline = timeline_of(events)
    assert rows(timeline, 1) == rows(timeline_of(step_events(0, 0.0)), 1), "which the devices' calls know nothing of"
    found = [(each.worker, each.label, each.start_s, each.end_s) for each in timeline.beside]
    assert found == [(1, "rule, step 1", 0.5, 1.0), (0, "rule, step 8", 0.2, 1.75)], "cut at the end"
    figure = timeline_figure(timeline)
    assert list(figure.layout.yaxis.categoryarray) == ["worker 0", "worker 0 beside", "worker 1", "worker 1 beside"]
    [bars] = [trace for trace in figure.data if trace.name.startswith("beside")]
    assert list(bars.y) == ["worker 1 beside", "worker 0 beside"]


def test_a_worker_without_work_waits() -> None:
    wider = msgspec.structs.replace(plan, num_devices=3)
    timeline = last_steps(wider, msgspec.convert(step_events(0, 5.0), type=list[TraceEvent]))
    assert timeline is not None
    assert rows(timeline, 2) == [("waiting", 0.0, 1.75)]


def test_nothing_to_show() -> None:
    assert last_steps(plan, []) is None
    assert last_steps(plan, msgspec.convert([event("actor_generate", 0, 0, 0.0, 1.0)], type=list[TraceEvent])) is None
