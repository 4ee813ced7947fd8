"""What a run leaves for people: names of statistics, times of steps, a trace that viewers open."""

import json
import logging
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from realhf.dataflow.interface import RESERVED_STATISTICS
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.master import records as records_module
from realhf.master.loop import CallRecord
from realhf.master.records import Trace, log_step, step_metrics
from realhf.master.state import Node
from realhf.rundir.lines import step_line
from realhf.transport.messages import Reply, Span


def record(call: str, start: float, end: float, tokens: int = 0, **stats: tuple[float, float]) -> CallRecord:
    """A call that two workers computed, the first from `start` and the second until `end`."""
    middle = (start + end) / 2
    first = Reply(
        request_id=0, span=Span("compute", call, start, middle), stats=dict(stats),
        peak_bytes=round(10 * (end - start)), sent_bytes={"all_gather": 8, "reduce_scatter": 4},
    )  # fmt: skip
    second = Reply(
        request_id=1, span=Span("compute", call, middle, end), tokens=tokens,
        peak_bytes=tokens, sent_bytes={"all_gather": tokens},
    )  # fmt: skip
    return CallRecord(Node(3, call), call.partition("_")[0], {0: first, 1: second})


PLAN = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), predicted_s=2.5),
        "actor_train_step": CallPlan(devices=(0, 2)),
        "critic_train_step": CallPlan(devices=(0, 2)),
    },
)


def test_preemptions_stand_beside_the_times_of_their_call() -> None:
    calls = [
        record(name, 1.0, 2.0, tokens=5, preemptions=(7.0, 2.0)) for name in ("actor_generate", "teacher_generate")
    ]
    line = step_metrics(1, [*calls, record("actor_train_step", 2.0, 3.0)], PLAN, 0.0)
    assert {name: call.get("preemptions") for name, call in line["calls"].items()} == {
        "actor_generate": 3.5, "teacher_generate": 3.5, "actor_train_step": None
    }  # fmt: skip
    assert not [name for name in line if "preemptions" in name]


def test_a_line_of_metrics() -> None:
    line = step_metrics(
        4,
        [
            record("actor_generate", 10.0, 12.0, tokens=900),
            record("actor_train_step", 12.0, 13.0, tokens=600, loss=(6.0, 4.0), kl=(1.0, 8.0)),
            record("critic_train_step", 12.0, 14.0, tokens=600, loss=(1.0, 4.0), nothing=(0.0, 0.0)),
        ],
        PLAN,
        previous_end=11.0,
    )
    assert step_line(msgspec.json.encode(line)) == line, "readers take it"
    calls = line.pop("calls")
    # Of each collective, what the worker that sent most sent.
    sent = {name: times.pop("sent_bytes") for name, times in calls.items()}
    assert sent == {name: {"all_gather": times["peak_bytes"], "reduce_scatter": 4} for name, times in calls.items()}
    assert calls == {
        "actor_generate": {"start": 10.0, "end": 12.0, "seconds": 2.0, "predicted_s": 2.5, "peak_bytes": 900},
        "actor_train_step": {"start": 12.0, "end": 13.0, "seconds": 1.0, "predicted_s": None, "peak_bytes": 600},
        "critic_train_step": {"start": 12.0, "end": 14.0, "seconds": 2.0, "predicted_s": None, "peak_bytes": 600},
    }
    assert line == {
        "step": 4,
        "time_s": 3.0,  # from the end of the step before, though this one had begun earlier
        "tokens": 900,
        "tokens_per_s": 300.0,
        "actor_loss": 1.5,  # two calls have a loss, so the models' names stand before it
        "critic_loss": 0.25,
        "kl": 0.125,
        "peak_bytes": [20, 900],  # of each worker, over its calls
    }


def test_a_step_without_time_has_no_speed() -> None:
    assert step_metrics(1, [record("actor_generate", 1.0, 1.0, tokens=5)], PLAN, 1.0)["tokens_per_s"] == 0.0
    assert step_metrics(1, [record("actor_generate", 1.0, 1.0, tokens=5)], PLAN, 2.0)["tokens_per_s"] == 0.0
    assert step_metrics(1, [record("actor_generate", 1.0, 1.5, tokens=5)], PLAN, 1.0)["tokens_per_s"] == 10.0


def test_a_call_of_which_nothing_was_measured_has_its_prediction_alone() -> None:
    """As one beside the devices has; and collectives are in one order whatever order workers name them in."""
    plan = msgspec.structs.replace(PLAN, beside={"judge": 0.25})
    judge = CallRecord(Node(3, "judge"), "judge", {0: Reply(request_id=0, span=Span("beside", "judge", 1.0, 2.0))})
    sent = {"reduce_scatter": 4, "all_gather": 8}
    reply = Reply(request_id=1, span=Span("compute", "", 1.0, 2.0), tokens=1, sent_bytes=sent)
    generate = CallRecord(Node(3, "actor_generate"), "actor", {0: reply})
    line = step_metrics(1, [judge, generate], plan, 0.0)
    assert line["calls"]["judge"] == {
        "start": 1.0, "end": 2.0, "seconds": 1.0, "predicted_s": 0.25, "peak_bytes": 0, "sent_bytes": {},
    }  # fmt: skip
    assert list(line["calls"]["actor_generate"]["sent_bytes"].items()) == [("all_gather", 8), ("reduce_scatter", 4)]
    assert line["peak_bytes"] == [0, 0]


def test_what_moved_of_a_copy_is_summed_over_workers() -> None:
    moves = [
        {"bytes": 10, "whole_bytes": 100, "changed": 1, "elements": 50, "parts": 1},
        {"bytes": 20, "whole_bytes": 100, "changed": 4, "elements": 50, "parts": 2},
        {},
    ]
    span = Span("compute", "", 1.0, 2.0)
    replies = {worker: Reply(request_id=worker, span=span, moved=moved) for worker, moved in enumerate(moves)}
    line = step_metrics(1, [CallRecord(Node(0, "actor_generate"), "actor", replies)], PLAN, 0.0)
    assert line["calls"]["actor_generate"]["moved"] == {"bytes": 30, "whole_bytes": 200, "changed_share": 0.05}
    nothing = Counter(bytes=0, whole_bytes=0, changed=0, elements=0)  # all of it is there
    replies = {0: Reply(request_id=0, span=span, moved=nothing)}
    line = step_metrics(1, [CallRecord(Node(0, "actor_generate"), "actor", replies)], PLAN, 0.0)
    assert "moved" not in line["calls"]["actor_generate"]


def test_the_log_has_a_step_s_calls_in_the_order_of_their_ends(caplog: pytest.LogCaptureFixture) -> None:
    records = [record("critic_train_step", 1.0, 4.0), record("actor_generate", 0.0, 3.5, tokens=60)]
    with caplog.at_level(logging.INFO):
        log_step(step_metrics(7, records, PLAN, 0.0))
    assert [(made.getMessage(), made.place) for made in caplog.records] == [
        ("took 3.500 s", "step=7 call=actor_generate "),
        ("took 3.000 s", "step=7 call=critic_train_step "),
        ("ended after 4.000 s, 15 tokens/s", "step=7 "),
    ]


def test_no_statistic_takes_the_place_of_what_every_line_has() -> None:
    line = step_metrics(1, [record("actor_generate", 1.0, 2.0)], PLAN, 1.0)
    assert {*line, "of_steps", "num_workers", "plan"} == RESERVED_STATISTICS


def test_the_trace_is_in_chromes_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "now_s", lambda: 90.0)
    trace = Trace(tmp_path / "trace.json", num_workers=2)
    first = Span("compute", 'a "quoted" call of step 0', 100.0, 100.25)
    trace.add(0, first)
    trace.add(1, Span("transfer", "b", 100.5, 101.0))
    trace.add(0, Span("sending", "c", 100.1, 100.2))
    trace.add(1, Span("beside", "d", 100.1, 100.2))
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert events[:2] == [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": f"worker-{i}"}} for i in range(2)
    ]
    rows = ["calls", "writing", "sending", "beside"]
    assert events[2:6] == [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in enumerate(rows)
    ]
    a, b, c, d = events[6:]
    assert (a["name"], a["cat"], a["ph"], a["pid"], a["tid"], a["dur"]) == (first.name, "compute", "X", 0, 0, 250_000)
    assert (b["tid"], b["dur"], b["ts"] - a["ts"]) == (1, 500_000, 500_000)
    assert a["ts"] == 10_000_000, "from the start of the run"
    assert (rows[a["pid"]], rows[c["pid"]], c["tid"]) == ("calls", "sending", 0), "which overlap"
    assert (rows[d["pid"]], d["tid"]) == ("beside", 1)


def test_a_trace_that_a_crash_cut_off_lacks_only_its_bracket(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", num_workers=1)
    trace.add(0, Span("compute", "a", 1.0, 2.0))
    trace.flush()
    text = (tmp_path / "trace.json").read_text()
    assert len(json.loads(text + "]")) == 6
    trace.close()
