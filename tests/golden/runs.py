"""Small runs on one machine: the statistics of their steps, what they drew, the parameters at the end.

In float64, where all layouts compute the same but for the last digits: two steps of tiny models, each run with another
way to divide or move them.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.golden.cases import PPO, REWARD, SFT
from tests.golden.commands import prepared, realhf
from tests.golden.contents import compact, digest

# Of a step's statistics these are of a clock or of the machine. What a call used is known by its weights' version.
MEASURED = {"time_s", "tokens_per_s", "calls", "peak_bytes", "plan"}

# The largest difference of a number of a float64 run: relative, and below it absolute (a KL divergence that is zero
# but for rounding). Another order of a sum changes some 1e-15 of a loss, and two steps keep that below 1e-12.
RELATIVE, ABSOLUTE = 1e-9, 1e-12

SIZES = "--batch-size 32 --architecture.hidden-size 32 --architecture.intermediate-size 48"
SIZES += " --architecture.num-heads 4 --architecture.num-kv-heads 4"
COMMON = f"--steps 2 --seed 7 --hardware cpu --memory-gb 2 --run-dir run {SIZES}"
DRAWN = "--no-evaluate --record seq logprob ref_logprob reward value"
SEARCH = "--num-workers 2 --evaluations 300"


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """`words` of `realhf run`, beside those that all runs have. `edits` change fields of `given`, one of tests/plans.

    `replan_s`: seconds that a call seems to have taken in ten further steps, with which the plan is searched again.
    """

    words: str
    given: str = ""
    edits: Mapping[str, Any] = field(default_factory=dict)
    replan_s: float | None = None
    slow: bool = True


RUNS: dict[str, GoldenRun] = {
    "sft_searched": GoldenRun(words=f"{SFT} {SEARCH}", replan_s=0.5, slow=False),
    "ppo_interleaved_sharded": GoldenRun(words=f"{PPO} {DRAWN} --compute.data-parallel fsdp", given="miniature"),
    "ppo_stale_following": GoldenRun(words=f"{PPO} {DRAWN} {SEARCH} --staleness 1 --reference-eta 0.3"),
    "reward_searched": GoldenRun(words=f"{REWARD} {SEARCH} --no-evaluate --record sample"),
    "ppo_one_worker": GoldenRun(words=f"{PPO} {DRAWN}", given="single", slow=False),
}


def carried_out(name: str, folder: Path) -> dict[str, Any]:
    """The digest of a run that the code of today makes."""
    run, folder = RUNS[name], prepared(folder / name, profiled=False)
    plan = ""
    if run.given:
        content = json.loads((folder / "plans" / f"{run.given}.json").read_bytes()) | run.edits
        (folder / "given.json").write_text(json.dumps(content))
        plan = "--plan given.json"
    _command(f"run {run.words} {plan} --dtype float64 {COMMON}", folder)
    found = {
        "plan": compact(_read(folder / "run" / "plan.json")),
        "steps": [_statistics(line) for line in _lines(folder / "run" / "metrics.jsonl")],
        "evaluations": _lines(folder / "run" / "evaluations.jsonl"),
        "rollouts": {path.name: _drawn(path) for path in _by_number(folder / "run" / "rollouts")},
        "parameters": _parameters(folder / "run" / "checkpoints" / "latest"),
    }
    if run.replan_s is not None:
        _pretend_steps(folder / "run" / "metrics.jsonl", run.replan_s)
        _command("replan run --evaluations 300 --json replanned.json", folder)
        found["replanned"] = compact(_read(folder / "replanned.json"))
    return found


def _command(words: str, folder: Path) -> None:
    done = realhf(words, folder)
    assert done.returncode == 0, done.stderr[-4000:]


def _read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _statistics(line: dict[str, Any]) -> dict[str, Any]:
    versions = {name: call.get("weights_version") for name, call in line["calls"].items()}
    return {key: value for key, value in line.items() if key not in MEASURED} | {"weights_version": versions}


def _by_number(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=lambda path: int(re.sub(r"\D", "", path.name)))


def _drawn(step: Path) -> dict[str, Any]:
    """By `call key` what all samples have, in their order: of floats sums, of tokens and the like a hash."""
    samples: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for path in sorted(step.glob("*.safetensors")):
        for name, value in load_file(path).items():
            key, _, sample = name.rpartition("/")
            samples[f"{path.stem.rpartition('-')[0]} {key}"][int(sample)] = value
    found = {}
    for key in sorted(samples):
        values = [samples[key][i] for i in sorted(samples[key])]
        found[key] = {"lengths": _hash(np.array([value.size for value in values]))}
        every = np.concatenate([value.ravel() for value in values])
        found[key] |= digest(every.tolist()) if every.dtype.kind == "f" else {"n": every.size, "sha256": _hash(every)}
    return found


def _hash(values: np.ndarray) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:16]


def _parameters(checkpoint: Path) -> dict[str, Any]:
    """Of each model how many numbers its checkpoint has, their sum and that of their squares."""
    found = {}
    for model in sorted(path for path in checkpoint.iterdir() if path.is_dir()):
        arrays = [value for path in sorted(model.glob("*.safetensors")) for value in load_file(path).values()]
        numbers = np.concatenate([value.ravel().astype(np.float64) for value in arrays])
        found[model.name] = {"n": numbers.size, "sum": float(numbers.sum()), "squares": float(numbers @ numbers)}
    return found


def _pretend_steps(metrics: Path, seconds: float) -> None:
    """Adds ten steps in which every call took `seconds`."""
    line = _lines(metrics)[-1]
    for step in range(line["step"] + 1, line["step"] + 11):
        calls = {name: call | {"seconds": seconds} for name, call in line["calls"].items()}
        line |= {"step": step, "calls": calls, "time_s": seconds}
        with metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
