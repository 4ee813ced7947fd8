"""Run directories as a master leaves them, written line by line without the code that writes real ones."""

import json
from pathlib import Path
from typing import Any

PLAN = {
    "num_devices": 2,
    "calls": {
        "actor_generate": {"devices": [0, 2], "dp": 2, "predicted_s": 0.5},
        "actor_train_step": {"devices": [0, 2], "tp": 2, "micro_batches": 4, "predicted_s": 1.0},
        "critic_train_step": {"devices": [1, 1], "predicted_s": None},
    },
    "order": [{"call": "actor_generate"}, {"call": "actor_train_step"}, {"call": "critic_train_step", "steps_back": 1}],
    "max_steps_in_flight": 2,
    "predicted_step_s": 2.0,
    "intervals": {"step_s": [1.6, 2.8], "call_s": {"actor_generate": [0.4, 0.7]}},
    "notes": {"search": "<seeded>", "evaluations": 20000},
}

RATIONALE = {
    "origin": "the best of 20,000 plans that a search looked at, out of 4 x 4 x 2 options",
    "hardware": "cpu",
    "profiled": True,
    "certificate": "optimal: no plan takes less than 2 s a step",
    "limits": "the longest chain of calls (actor_generate 60%)",
    "heuristic_step_s": 3.0,
    "heuristic_fits": False,
    "device_memory_bytes": 800 * 2**20,
    "memory": [{"devices": [0, 2], "static_bytes": 100 * 2**20, "peak_bytes": 300 * 2**20}],
    "instead": [
        {"call": "actor_generate", "layout": "dp1 tp2 pp1", "slower_by": 0.25, "num_too_large": 1, "num_others": 4},
        {"call": "critic_train_step", "layout": "", "num_too_large": 2, "num_others": 2},
    ],
}


def metrics_line(step: int, **statistics: Any) -> dict[str, Any]:
    seconds = {"actor_generate": 0.6 * step, "actor_train_step": 1.0 + step / 10, "critic_train_step": 0.25}
    calls = {name: {"start": 1e9, "end": 1e9 + s, "seconds": s, "predicted_s": None} for name, s in seconds.items()}
    return {
        "step": step,
        "time_s": 2.0,
        "tokens": 1000 * step,
        "tokens_per_s": 500.0 * step,
        **statistics,
        "calls": calls,
        "peak_bytes": [400 * 2**20, (200 + step) * 2**20],
    }


def event(call: str, step: int, worker: int, start_s: float, end_s: float, phase: str = "compute") -> dict[str, Any]:
    """A trace event; `step` counts from 0, the event's name from 1."""
    is_evaluation = call not in PLAN["calls"]
    name = f"{call} of evaluation batch {step + 1}" if is_evaluation else f"{call} of step {step + 1}"
    times = {"ts": round(start_s * 1e6), "dur": round((end_s - start_s) * 1e6)}
    return {"name": name, "cat": phase, "ph": "X", "pid": 0, "tid": worker, **times}


def step_events(step: int, start_s: float) -> list[dict[str, Any]]:
    """One step of PLAN, 2 s long; worker 0 waits from 1.5 to 2 s, worker 1 from 1.75 to 2 s."""
    t = start_s
    return [
        event("actor_generate", step, 0, t, t + 0.5),
        event("actor_generate", step, 1, t, t + 0.4),
        event("actor_train_step", step, 1, t + 0.4, t + 0.5, "transfer"),
        event("actor_train_step", step, 0, t + 0.5, t + 0.75, "reallocation"),
        event("actor_train_step", step, 1, t + 0.5, t + 0.75, "reallocation"),
        event("actor_train_step", step, 0, t + 0.75, t + 1.5),
        event("actor_train_step", step, 1, t + 0.75, t + 1.5),
        event("critic_train_step", step, 1, t + 1.5, t + 1.75),
    ]


def write_run(
    path: Path,
    *,
    state: str | None = "done",
    message: str = "",
    plan: dict[str, Any] = PLAN,
    metrics: list[dict[str, Any]] | None = None,
    evaluations: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    happened: list[dict[str, Any]] | None = None,
    values: dict[str, Any] | None = None,
    samples: list[dict[str, Any]] | None = None,
    cut_off: str = "\n]\n",
) -> Path:
    """Writes a run directory; None leaves a file out, `cut_off` is what stands behind the last trace event."""
    path.mkdir()
    (path / "plan.json").write_text(json.dumps(plan))
    experiment = {"experiment_class": "PPOExperiment", "values": values or {"steps": 4}, "format": "run/2"}
    (path / "experiment.json").write_text(json.dumps(experiment))
    if state is not None:
        status = {"state": state, "step": len(metrics or ()), "steps": 4, "message": message, "updated": 1e9}
        status["format"] = "run-status/1"
        (path / "status.json").write_text(json.dumps(status))
    files = {"metrics": metrics, "evaluations": evaluations, "events": happened, "samples": samples}
    for name, lines in files.items():
        if lines is not None:
            (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if events is not None:
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": f"worker-{i}"}} for i in (0, 1)
        ]
        (path / "trace.json").write_text("[\n" + ",\n".join(json.dumps(e) for e in [*names, *events]) + cut_off)
    return path


def sample(step: int, place: int = 0, **changes: Any) -> dict[str, Any]:
    texts = {"prompt": f"sort: b{step}a", "response": f"ab{step}"}
    return {"step": step, "sample": place, "split": "train", **texts, "reward": 0.5} | changes


def good_run(path: Path, **changes: Any) -> Path:
    """Four steps with curves, two evaluations and a whole trace."""
    contents: dict[str, Any] = {
        "metrics": [
            metrics_line(i, reward_mean=i / 4, kl=0.01 * i, actor_loss=-0.1, entropy=3.0) for i in (1, 2, 3, 4)
        ],
        "plan": PLAN | {"rationale": RATIONALE},
        "happened": [
            {"time_s": 1e9, "event": "started", "step": 0, "message": "2 workers"},
            {"time_s": 1e9 + 60, "event": "failed", "step": 2, "message": "<killed>"},
            {"time_s": 1e9 + 90, "event": "restarted", "step": 2},
        ],
        "evaluations": [{"step": 0, "accuracy": 0.25}, {"step": 4, "accuracy": 0.75}],
        "samples": [sample(step, place) for step in (1, 2, 3, 4) for place in (0, 7)],
        "events": [e for step in range(4) for e in step_events(step, 10 + 2.0 * step)],
    }
    return write_run(path, **(contents | changes))
