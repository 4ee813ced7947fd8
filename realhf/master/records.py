"""Files of a run for people to read: the lines of metrics.jsonl, and trace.json."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from realhf.base.files import naming, open_regular
from realhf.dataflow.interface import PREEMPTIONS
from realhf.dataflow.plan import ExecutionPlan
from realhf.master.loop import CallRecord, means
from realhf.rundir.logs import at
from realhf.transport.clock import now_s
from realhf.transport.messages import Phase, Span

logger = logging.getLogger(__name__)


BESIDE: tuple[Phase, ...] = ("writing", "sending", "beside")  # phases that overlap with others on the same worker


class Trace:
    """`trace.json` in Chrome's trace event format, which Perfetto opens: one row a worker, times in microseconds.

    Phases that run on threads beside a worker's calls (sending parameters, writing checkpoints, calls beside the
    devices) have rows of their own. Events are appended as they come; the format allows a file without its closing
    bracket, as a crash leaves it.
    """

    def __init__(self, path: Path, num_workers: int):
        self._path, self._file = path, open_regular(path, "wb")
        self._start = now_s()
        self._file.write(b"[\n")
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": f"worker-{i}"}}
            for i in range(num_workers)
        ]
        names += [
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
            for pid, name in enumerate(("calls", *BESIDE))
        ]
        self._file.write(b",\n".join(msgspec.json.encode(name) for name in names))

    def add(self, worker: int, span: Span) -> None:
        event = {
            "name": span.name,
            "cat": span.phase,
            "ph": "X",
            "pid": BESIDE.index(span.phase) + 1 if span.phase in BESIDE else 0,
            "tid": worker,
            "ts": round((span.start - self._start) * 1e6),
            "dur": round((span.end - span.start) * 1e6),
        }
        with naming(self._path):
            self._file.write(b",\n" + msgspec.json.encode(event))

    def flush(self) -> None:
        with naming(self._path):
            self._file.flush()

    def close(self) -> None:
        self._file.write(b"\n]\n")
        self._file.close()


def statistics(records: Sequence[CallRecord]) -> dict[str, dict[str, float]]:
    """By node the statistics of a step: each keeps its name if one call has it; else the model's name stands before
    it."""
    counts = Counter(name for record in records for name in record.stats if name != PREEMPTIONS)
    return {
        record.node.call: {
            name if counts[name] == 1 else f"{record.model}_{name}": value
            for name, value in means(record.stats).items()
            if name != PREEMPTIONS
        }
        for record in records
    }


def step_metrics(step: int, records: Sequence[CallRecord], plan: ExecutionPlan, previous_end: float) -> dict[str, Any]:
    """One line of metrics.jsonl.

    time_s: from the end of the previous step (or the start of the run) to the end of this one. Overlapping steps thus
        add up to the time of the run.
    tokens: the tokens of the sequences of the global batch, each counted once.
    peak_bytes: for each worker the most that models and data took in one of the step's calls, 0 if it had none; in
        `calls`, the peak of the call's fullest worker.
    sent_bytes: in `calls`, by collective of data parallelism, the bytes of the worker that sent most.
    moved: in `calls`, of a copy that gets only what changed, the bytes that all workers received, those of all values,
        and the share of the elements that had changed (of parts that came as values, all).
    preemptions: in `calls`, of a generation whose KV cache has a given room, on average of its data-parallel ranks.
    """
    end = max(record.end for record in records)
    time_s = end - previous_end
    tokens = max(record.tokens for record in records)
    stats = {name: value for of_call in statistics(records).values() for name, value in of_call.items()}
    predictions = {name: call.predicted_s for name, call in plan.calls.items()} | plan.beside
    calls = {
        record.node.call: {
            "start": record.start,
            "end": record.end,
            "seconds": record.end - record.start,
            "predicted_s": predictions.get(record.node.call),
            "peak_bytes": max(reply.peak_bytes for reply in record.replies.values()),
            "sent_bytes": _most_sent(reply.sent_bytes for reply in record.replies.values()),
            **_moved(reply.moved for reply in record.replies.values()),
            **{name: value for name, value in means(record.stats).items() if name == PREEMPTIONS},
        }
        for record in records
    }
    return {
        "step": step,
        "time_s": time_s,
        "tokens": tokens,
        "tokens_per_s": tokens / time_s if time_s > 0 else 0.0,
        **stats,
        "calls": calls,
        "peak_bytes": [
            max((record.replies[worker].peak_bytes for record in records if worker in record.replies), default=0)
            for worker in range(plan.num_devices)
        ],
    }


def _most_sent(of_workers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    most: Counter[str] = Counter()
    for sent in of_workers:
        most |= Counter(sent)
    return dict(sorted(most.items()))


def _moved(of_workers: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    moved = sum(map(Counter, of_workers), Counter[str]())
    if not moved["elements"]:
        return {}
    share = moved["changed"] / moved["elements"]
    return {"moved": {"bytes": moved["bytes"], "whole_bytes": moved["whole_bytes"], "changed_share": share}}


def log_step(metrics: dict[str, Any]) -> None:
    """Logs the times of a line of metrics.jsonl: one record for each call and one for the step."""
    step = metrics["step"]
    for call, times in sorted(metrics["calls"].items(), key=lambda item: float(item[1]["end"])):
        logger.info("took %.3f s", times["seconds"], extra=at(step, call))
    logger.info("ended after %.3f s, %.0f tokens/s", metrics["time_s"], metrics["tokens_per_s"], extra=at(step))
