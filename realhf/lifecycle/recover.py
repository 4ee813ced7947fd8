"""How a run goes on from its newest good checkpoint, after a failure or under another plan; its events say so."""

from realhf.dataflow.plan import DIGEST_LENGTH, plan_digest
from realhf.rundir.checkpoints import Choice, newest_good
from realhf.rundir.events import EventKind, note
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory, workers_in_words
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run


def gone_on(before: Run, run: Run, directory: RunDirectory, failure: str | None = None) -> Run:
    """`run` as it goes on from its newest good checkpoint or the beginning, its directory made ready. Notes what
    differs from `before`: the number of workers, places, the plan. After a failure, notes it and the restart too."""
    if failure is not None:
        note(directory.events, "failed", last_step(directory), failure)
    choice = newest_good(directory.checkpoints)
    step = choice.state.step if choice.state else 0
    run = run.changed(resume_step=step)
    prepare(run, directory)
    old, new = (plan_digest(one.plan)[:DIGEST_LENGTH] for one in (before, run))
    texts = []
    if run.spec.num_workers != before.spec.num_workers:
        texts.append(f"{workers_in_words(run.spec.num_workers)} instead of {before.spec.num_workers}")
    if gone := set(run.spec.avoided) - set(before.spec.avoided):
        texts.append(f"without {', '.join(sorted(gone))}")
    if new != old:
        prediction = f", {run.plan.predicted_step_s:.3g} s a step predicted" if run.plan.predicted_step_s else ""
        texts.append(f"plan {new} instead of {old}{prediction}")
    if texts:
        note(directory.events, "replanned", step, "; ".join(texts))
    if failure is not None:
        note_start(run, directory, "restarted", choice)
    return run


def note_start(run: Run, directory: RunDirectory, event: EventKind, choice: Choice | None = None) -> None:
    """Notes from where the run starts, and which checkpoints were passed over."""
    step = run.spec.resume_step
    begin = f"checkpoints/step-{step}" if step else "the beginning"
    texts = [f"{workers_in_words(run.spec.num_workers)}, from {begin}"]
    texts += [f"step {bad} is not good: {reason}" for bad, reason in (choice.damaged if choice else {}).items()]
    note(directory.events, event, step, "; ".join(texts))


def last_step(directory: RunDirectory) -> int:
    """The number of steps that the metrics tell of."""
    steps = read_lines(directory.metrics, step_line).values
    return int(steps[-1]["step"]) if steps else 0
