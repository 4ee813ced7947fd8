"""Faults that change values and stop nothing: drawn by a seed, injected into a small run, and what tells of them."""

import contextlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jobs.value_fault_job import FAULT_VARIABLE

from realhf import cli
from realhf.data import sort_task
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.lifecycle.verify import VerifyRequest, verify

JOB = Path(__file__).parents[1] / "jobs/value_fault_job.py"
STEPS = 3
SMALL = ("--architecture.hidden-size", "32", "--architecture.intermediate-size", "48")
SMALL = (*SMALL, "--architecture.num-heads", "4", "--architecture.num-kv-heads", "4")
# By kind the call whose values are first wrong, and the steps after that of the fault in which it is.
EXPECTED: Mapping[str, tuple[tuple[str, ...], int]] = {
    "bit of the actor": (("actor_generate", "actor_train_step"), 1),
    "bit of the reference": (("reference_inference",), 1),
    "bit of gradients": (("actor_train_step",), 0),
    "bit of a message": (("actor_train_step",), 0),
    "skipped layer": (("reference_inference", "actor_train_step"), 0),
    "stale copy": (("actor_generate",), 0),
    "seed reused": (("actor_generate",), 0),
    "swapped mini batches": (("actor_train_step",), 0),
    "reward of another": (("actor_train_step",), 0),
    "optimizer step left out": (("actor_train_step",), 0),
}
Seen = Literal["as it happened", "by verify", "no bit changed", "elsewhere"]


@dataclass(frozen=True, kw_only=True)
class ValueFault:
    """`step` counts from 0; `worker`: which has the fault, -1: all alike."""

    kind: str
    step: int
    worker: int
    seed: int


@dataclass(frozen=True)
class Told:
    """How a fault was seen, and the words that told of it."""

    fault: ValueFault
    seen: Seen
    words: str


def drawn(number: int, seed: int) -> Iterator[ValueFault]:
    """Faults of all kinds in turn."""
    at_random = random.Random(seed)
    for i in range(number):
        kind = [*EXPECTED][i % len(EXPECTED)]
        yield fault_of(kind, at_random)


def fault_of(kind: str, at_random: random.Random) -> ValueFault:
    steps = {"stale copy": (1, 2), "bit of the actor": (0, 1), "bit of the reference": (0, 1)}.get(kind, (0, 1, 2))
    worker = at_random.choice((0, 1, -1))
    if kind in ("bit of the reference", "reward of another", "skipped layer", "seed reused"):
        worker = -1  # ranks of a pass skip it together; the others are on one worker
    return ValueFault(kind=kind, step=at_random.choice(steps), worker=worker, seed=at_random.randrange(2**31))


class Campaign:
    """Runs with faults in `folder`, on two workers that `launcher` starts."""

    def __init__(self, folder: Path, launcher: type, dtype: str = "float32"):
        self._folder, self._launcher, self._dtype = folder, launcher, dtype
        calls = {
            "actor_generate": CallPlan(devices=(0, 2), tp=2),
            "reference_inference": CallPlan(devices=(1, 1)),
            "actor_train_step": CallPlan(devices=(0, 2), dp=2),
        }
        save_plan(ExecutionPlan(num_devices=2, calls=calls, max_steps_in_flight=1), folder / "plan.json")

    def run(self, path: Path, fault: ValueFault | None, *more: str) -> tuple[int, str]:
        """The exit code and the words of a run with the fault."""
        data = sort_task.ensure(self._folder / "data")
        words = ["--data", str(data / "prompts.jsonl"), "--tokenizer", str(data / "tokenizer.json"), *SMALL]
        words += ["--dtype", self._dtype, "--verify-reallocations-every", "1"]
        launcher = f"{self._launcher.__module__}:{self._launcher.__name__}"
        words += ["--plan", str(self._folder / "plan.json"), "--launcher", launcher, *more]
        with (
            _environ(json.dumps(asdict(fault)) if fault else ""),
            contextlib.redirect_stderr(io.StringIO()) as said,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            code = cli.main(["run", str(JOB), "--run-dir", str(path), *words])
        return code, said.getvalue()

    def told(self, fault: ValueFault) -> Told:
        """What a run with the fault, and then `realhf verify`, say of it."""
        path = self._folder / "faulty"
        shutil.rmtree(path, ignore_errors=True)
        code, said = self.run(path, fault)
        calls, later = EXPECTED[fault.kind]
        step = fault.step + later + 1
        if code:
            words = said.partition("error: ")[2].partition("\n")[0]
            found = re.search(r"(\S+) of step (\d+)", words)
            is_right = found is not None and found[1] in calls and int(found[2]) == step
            return Told(fault, "as it happened" if is_right else "elsewhere", words)
        with _environ(""):
            verdict = verify(VerifyRequest(run_dir=path, step=STEPS, launcher=self._launcher), lambda _: None)
        if not verdict.found:
            return Told(fault, "no bit changed", "")
        first = verdict.found[0]
        is_right = any(call in first.call for call in calls) and first.step == step
        return Told(fault, "by verify" if is_right else "elsewhere", str(first))


@contextlib.contextmanager
def _environ(fault: str) -> Iterator[None]:
    os.environ[FAULT_VARIABLE] = fault
    try:
        yield
    finally:
        del os.environ[FAULT_VARIABLE]


def as_row(told: Told) -> dict[str, Any]:
    return asdict(told.fault) | {"seen": told.seen, "words": told.words}
