"""What a real model learns: four tasks of reasoning-gym by GRPO, and one of them from a teacher.

The model is SmolLM2-135M-Instruct from 4-bit weights (GGUF, Q4_1), trained in bfloat16 on two workers as `make real`
does it; `chain_sum` is that job. A row of a seed has the share of 500 held-out questions that the model answers right
after training, by its most likely tokens, in per cent; its baseline is that before training, and 15 points more are
asked. The time is that of a training run, its start included. Answers have at most 16 tokens, so that a model may learn
to end with the right number where it is cut off: the model of the first seed is asked again with room for 64, and a
task counts as raised if its gain is there then too. For distillation the model before training is the
student, and the model that has learned the sums is the teacher: within a third of the steps the student is to come
within two points of it.

`--root FOLDER` keeps every case that is done, and does not do it again as long as its code and data are the same.
`--case aiw` takes the cases of that name, with what they start from. `--quick` takes one step of one of them.
Command: python benchmarks/real_tasks.py --seeds 3 --root runs/real_tasks --json benchmarks/results/real_tasks.json
"""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from lib.common import ROOT, argument_parser, case, finish, realhf
from lib.pages import code_digest
from platformdirs import user_cache_path

from realhf.base.files import delete, file_digest, write_atomically

sys.path.insert(0, str(ROOT / "scripts"))
from real_job import STEPS, SUMS, Task, evaluation_words, fetched_model, training_words, write_questions

# As the output of `make real` on README.md.
MEASURES = (
    "scripts/real_job.py",
    "benchmarks/lib/real_rewards.py",
    "realhf/algorithms",
    "realhf/cpu",
    "realhf/engine",
    "realhf/gguf",
    "realhf/models",
    "realhf/parallel",
    "csrc/kernels",
)
TASKS = {
    "chain_sum": SUMS,
    "needle_haystack": Task(
        questions="reasoning-gym:needle_haystack:min_num_statements=3,max_num_statements=5",
        reward="benchmarks/lib/real_rewards.py:last_name",
    ),
    "basic_arithmetic": Task(
        questions="reasoning-gym:basic_arithmetic:min_terms=2,max_terms=2,min_digits=1,max_digits=1,operators=[+,-]",
        reward="ready:numeric",
    ),
    "aiw": Task(questions="reasoning-gym:aiw", reward="ready:numeric"),
}
DISTILLATION, TAUGHT = "distillation", "chain_sum"
DISTILL = (
    "--batch-size 256 --mini-batches 1 --actor.lr 5e-5 --actor.schedule linear --actor.warmup-steps 3 "
    "--distill.beta 0 --distill.max-new-tokens 16 --distill.temperature 0.7 --distill.epochs 2"
)
WORKERS = ("--num-workers", "2")
GAIN, NEAR, MINUTES, RAISED = 15, 2, 20, 3  # points, points, minutes, tasks
ROOM = 64  # tokens of an answer


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Right answers of the model before and after its training, in per cent."""

    before: float
    after: float


class Learned(Asked, frozen=True, kw_only=True):
    """What a training run has led to, and its minutes.

    depends_on: a digest of code, model, questions and settings.
    """

    depends_on: str
    minutes: float


@dataclass(frozen=True)
class Campaign:
    """Runs of `seed`, each in a folder of `root`; with `quick` of one step each."""

    root: Path
    model: Path
    quick: bool

    def learned(self, name: str, seed: int) -> Learned:
        """What the model has learned of a task by GRPO."""
        steps = 1 if self.quick else STEPS
        train, run = self._files(name, seed)
        words = training_words(TASKS[name], self.model, train, run, steps=steps, seed=seed)
        return self._kept(name, seed, TASKS[name], words, str(steps))

    def distilled(self, seed: int) -> Learned:
        """What the model has learned from its teacher, which is the one that has learned the sums."""
        steps = 1 if self.quick else STEPS // 3
        train, run = self._files(DISTILLATION, seed)
        self.learned(TAUGHT, seed)
        words = [
            *("run", "distill", "--model", str(self.model), "--teacher", str(self.root / f"{TAUGHT}-{seed}" / "model")),
            *("--data", str(train), "--as-chat", "--dtype", "bfloat16", "--run-dir", str(run)),
            *("--seed", str(seed), "--steps", str(steps), *DISTILL.split()),
        ]
        return self._kept(DISTILLATION, seed, TASKS[TAUGHT], words, str(steps), DISTILL)

    def with_room(self, name: str, seed: int) -> Asked:
        """What the models answer with room for `ROOM` tokens, for a task that one of them has learned."""
        folder = self._files(name, seed)[0].parent
        record = folder / f"room-{ROOM}.json"
        self.learned(name, seed)  # where that is made anew, nothing else is left in the folder
        if not record.is_file():
            evaluation, trained = folder / "evaluation_with_room", folder / "model"
            delete(evaluation)
            asked = self._asked(TASKS[name], trained, folder / "held_out.jsonl", evaluation, ROOM)
            write_atomically(record, msgspec.json.encode(asked))
        return msgspec.json.decode(record.read_bytes(), type=Asked)

    def _asked(self, task: Task, trained: Path, held_out: Path, run: Path, room: int | None = None) -> Asked:
        """Evaluates the model and what has become of it on held-out questions, in a run of its own."""
        words, figures = evaluation_words(task, [self.model, trained], held_out, run), run.with_suffix(".json")
        longer = ("--generation.max-new-tokens", str(room)) if room else ()  # of two the last one counts
        realhf(*words, *longer, *WORKERS, "--json", str(figures))
        shares = [100 * model["estimates"]["reward"]["mean"] for model in json.loads(figures.read_text())["models"]]
        return Asked(before=shares[0], after=shares[1])

    def _files(self, name: str, seed: int) -> tuple[Path, Path]:
        """The training questions and the run directory of a case."""
        folder = self.root / f"{name}-{seed}"
        return folder / "train.jsonl", folder / "run"

    def _kept(self, name: str, seed: int, task: Task, words: Sequence[str], *settings: str) -> Learned:
        """The record of a case; where there is none of the same code, model and settings, `words` are carried out."""
        train, run = self._files(name, seed)
        folder, record = train.parent, train.parent / "learned.json"
        known = repr((code_digest(MEASURES), file_digest(self.model), task, seed, settings))
        depends_on = hashlib.blake2b(known.encode(), digest_size=16).hexdigest()
        if record.is_file():
            learned = msgspec.json.decode(record.read_bytes(), type=Learned)
            if learned.depends_on == depends_on:
                return learned
        delete(folder)
        _, held_out = write_questions(folder, task)
        started = time.monotonic()
        realhf(*words, *WORKERS)
        minutes = (time.monotonic() - started) / 60
        asked = self._asked(task, run, held_out, folder / "evaluation")
        realhf("convert", str(run), str(folder / "model"))
        delete(run / "checkpoints")  # with the optimizer's state, seven times as large as the model
        learned = Learned(depends_on=depends_on, before=asked.before, after=asked.after, minutes=minutes)
        write_atomically(record, msgspec.json.encode(learned))
        said = f"{name}, seed {seed}: {asked.before:.1f} to {asked.after:.1f} % in {minutes:.1f} minutes"
        print(said, file=sys.stderr, flush=True)
        return learned


def rows_of(
    name: str, seeds: Sequence[Learned], targets: Sequence[float], with_room: Asked | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each seed and one for their mean, one for the first with room for longer answers, and the longest of
    their runs."""
    rows = {f"seed {n}": (one.after, one.before, targets[n]) for n, one in enumerate(seeds)}
    if len(seeds) > 1:
        rows["mean"] = tuple(map(mean, zip(*rows.values(), strict=True)))
    if with_room is not None:
        rows[f"seed 0, up to {ROOM} tokens"] = (with_room.after, with_room.before, with_room.before + GAIN)
    for words, (after, before, target) in rows.items():
        ratio, holds = after / max(before, 0.1), after >= target
        yield case(f"{name}, {words}", after, "%", baseline=before, ratio=ratio, target=target, holds=holds)
    longest = max(one.minutes for one in seeds)
    words, holds = f"{name}, longest run (at most)", longest <= MINUTES
    yield case(words, longest, "min", baseline=None, ratio=None, target=MINUTES, holds=holds)


def raised(learned: Sequence[Sequence[Learned]], with_room: Sequence[Asked]) -> dict[str, Any]:
    """How many tasks all seeds raise far enough and fast enough, and the first of them with room for longer answers
    too."""
    good = [
        all(one.after >= one.before + GAIN for one in (*seeds, asked)) and all(one.minutes <= MINUTES for one in seeds)
        for seeds, asked in zip(learned, with_room, strict=True)
    ]
    words, count = f"tasks raised by {GAIN} points in {MINUTES} minutes", sum(good)
    return case(words, count, "", baseline=None, ratio=None, target=RAISED, holds=count >= RAISED)


def main() -> None:
    parser = argument_parser(__doc__)
    named = "one alone; what the file has of others at this commit stays"
    parser.add_argument("--case", choices=[*TASKS, DISTILLATION], help=named)
    parser.add_argument("--seeds", type=int, choices=range(1, 11), default=1, help="how many, from 0 on (default 1)")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="keep what is done (default: a temporary folder)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="another one (default: that of `make real`)")
    arguments = parser.parse_args()
    if arguments.model and not arguments.model.is_file():
        parser.error(f"--model {arguments.model} is no file; name a GGUF file, or leave it out for that of `make real`")
    model = arguments.model or fetched_model(user_cache_path("realhf") / "models")
    chosen = [arguments.case] if arguments.case else [TAUGHT] if arguments.quick else [*TASKS, DISTILLATION]
    if chosen == [DISTILLATION]:
        chosen = [TAUGHT, DISTILLATION]
    results, seeds = [], range(arguments.seeds)
    learned: dict[str, list[Learned]] = {}
    with_room: dict[str, Asked] = {}
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(arguments.root or Path(folder), model, arguments.quick)
        for name in chosen:
            if name == DISTILLATION:
                students = [campaign.distilled(seed) for seed in seeds]
                results += rows_of(name, students, [one.after - NEAR for one in learned[TAUGHT]])
            else:
                learned[name] = [campaign.learned(name, seed) for seed in seeds]
                with_room[name] = campaign.with_room(name, 0)
                results += rows_of(name, learned[name], [one.before + GAIN for one in learned[name]], with_room[name])
    if set(TASKS) <= set(chosen):
        results.append(raised(list(learned.values()), list(with_room.values())))
    finish("real_tasks", results, arguments.json, is_part=bool(arguments.case))


if __name__ == "__main__":
    main()
