"""Submission of a batch script: the job's number, found among whatever else is printed; or no job at all."""

import re
from collections.abc import Sequence
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.files import delete
from realhf.launch.process import Job
from realhf.launch.slurm.commands import output_of, slurm_command
from realhf.launch.slurm.offer import ask
from realhf.launch.slurm.refusal import refusal
from realhf.launch.slurm.script import SlurmOptions, rendered, sbatch_text

# `--parsable` prints "17" or "17;cluster" on a line of its own; wrappers of sbatch print more, or drop the option.
_NUMBER = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S*)?(?: on cluster \S+)?")
_LOOK_S = 10.0


def submit(options: SlurmOptions, job: Job) -> str:
    """The number of the job that SLURM has made of a run.

    Raises UserError where SLURM refuses it or does not say its number. Whatever is raised: no job is left.
    """
    write_script(options, job)
    return submit_script(job.directory.script, options, job)


def write_script(options: SlurmOptions, job: Job) -> str:
    """Leaves the batch script of a job in its run directory, and returns it."""
    if job.directory.exits.exists():  # from earlier starts, whose leftover processes must not write there
        delete(job.directory.exits)
    job.exits.mkdir(parents=True)
    text = sbatch_text(options, job)
    job.directory.script.write_text(text)
    return text


def array_text(texts: Sequence[str], scripts: Sequence[Path], at_most: int | None = None) -> str:
    """Task K runs `scripts[K]`, whose text is `texts[K]`; `at_most` tasks at a time. Raises UserError where the jobs
    ask SLURM for different things: the tasks of an array do not."""
    headers = [[line for line in text.splitlines() if line.startswith("#SBATCH ")] for text in texts]
    for header, script in zip(headers, scripts, strict=True):
        if other := sorted({*header} ^ {*headers[0]}):
            raise UserError(
                f"the runs of an array have one size, and {script.parent.parent.name} differs from "
                f"{scripts[0].parent.parent.name}: {', '.join(other)}; start them by themselves"
            )
    limit = f"%{at_most}" if at_most else ""
    header = [*headers[0], f"#SBATCH --array=0-{len(scripts) - 1}{limit}"]
    return rendered("array.sbatch.jinja", header=header, scripts=scripts)


def submit_script(script: Path, options: SlurmOptions, job: Job) -> str:
    """As `submit`, of a script that is written: that of `job`, or of several like it."""
    try:
        submitted = slurm_command("sbatch", "--parsable", str(script))
        if submitted.returncode == 0 and (job_id := job_number(submitted.stdout) or _only(_jobs_of(script))):
            return job_id
        said = output_of(submitted) or "no reason given"
        if "unable to contact slurm controller" in said.lower():
            raise UserError(f"SLURM's controller does not answer, and nothing was submitted ({said}); try again later")
        if submitted.returncode == 0:
            raise UserError(f"sbatch did not print the number of a job: {said}; `sbatch --parsable FILE` has to")
        raise UserError(refusal(said, options, job, ask()))
    except BaseException as error:
        if made := _jobs_of(script):
            slurm_command("scancel", *made, timeout_s=_LOOK_S)
            error.add_note(f"job {', '.join(made)}, submitted nevertheless, was cancelled")
        raise


def job_number(printed: str) -> str | None:
    """The number of a job in the output of sbatch; None without one. The last one counts: sbatch ends with it."""
    found = [match[1] for line in printed.splitlines() if (match := _NUMBER.fullmatch(line.strip()))]
    return found[-1] if found else None


def _jobs_of(script: Path) -> list[str]:
    """The numbers of jobs that wait or run with this batch script."""
    # None of an earlier start of the run: a launcher starts the next one when that job is over.
    try:
        shown = slurm_command("squeue", "--me", "--noheader", "--format=%i %o", timeout_s=_LOOK_S)
    except UserError:  # there is no SLURM
        return []
    lines = (line.partition(" ") for line in shown.stdout.splitlines()) if shown.returncode == 0 else ()
    return [number for number, _, command in lines if command.strip() == str(script)]


def _only(numbers: Sequence[str]) -> str | None:
    return numbers[0] if len(numbers) == 1 else None
