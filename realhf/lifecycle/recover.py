"""How a run goes on from its newest good checkpoint, after a failure or under another plan; its events say so."""

import msgspec

from realhf.dataflow.plan import DIGEST_LENGTH, plan_digest
from realhf.rundir.checkpoints import Choice, newest_good
from realhf.rundir.events import EventKind, note
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run


def restarted(before: Run, run: Run, directory: RunDirectory, reason: str) -> Run:
    """`run` as it goes on where `before` broke for a reason, and its directory made ready."""
    note(directory.events, "failed", last_step(directory), reason)
    choice = newest_good(directory.checkpoints)
    run = going_on_under(before, run, directory, choice)
    note_start(run, directory, "restarted", choice)
    return run


def going_on_under(before: Run, run: Run, directory: RunDirectory, choice: Choice) -> Run:
    """`run` as it goes on from this checkpoint or the beginning, its directory made ready. Notes what differs from
    `before`: the number of workers, places, the plan."""
    step = 0 if choice.state is None else choice.state.step
    run = Run(msgspec.structs.replace(run.spec, resume_step=step), run.experiment, run.plan)
    prepare(run, directory)
    old, new = (plan_digest(one.plan)[:DIGEST_LENGTH] for one in (before, run))
    texts = []
    if run.spec.num_workers != before.spec.num_workers:
        texts.append(f"{_workers(run)} instead of {before.spec.num_workers}")
    if gone := set(run.spec.avoided) - set(before.spec.avoided):
        texts.append(f"without {', '.join(sorted(gone))}")
    if new != old:
        prediction = f", {run.plan.predicted_step_s:.3g} s a step predicted" if run.plan.predicted_step_s else ""
        texts.append(f"plan {new} instead of {old}{prediction}")
    if texts:
        note(directory.events, "replanned", step, "; ".join(texts))
    return run


def note_start(run: Run, directory: RunDirectory, event: EventKind, choice: Choice | None = None) -> None:
    """Notes from where the run starts, and which checkpoints were passed over."""
    step = run.spec.resume_step
    texts = [f"{_workers(run)}, " + (f"from checkpoints/step-{step}" if step else "from the beginning")]
    texts += [f"step {bad} is not good: {reason}" for bad, reason in (choice.damaged if choice else {}).items()]
    note(directory.events, event, step, "; ".join(texts))


def _workers(run: Run) -> str:
    return "1 worker" if run.spec.num_workers == 1 else f"{run.spec.num_workers} workers"


def last_step(directory: RunDirectory) -> int:
    """The number of steps that the metrics tell of."""
    steps = read_lines(directory.metrics, step_line).values
    return int(steps[-1]["step"]) if steps else 0
