"""What algorithms reach: each of them on the sorting task from one fine-tuned model, GRPO on the reversal task, and the
main job.

A row's value is what held-out prompts that are answered right make up at the end, in per cent; its baseline is that
before the first step. The evaluation samples one response a prompt; for a row with "greedy" ReMax measures the model,
a step of which also takes the most likely tokens. Targets lie below what runs reach by more than seeds differ.
`--case "dpo"` takes the cases of that name, with what they start from. `--quick` takes the first steps of one of them.
Command: python benchmarks/learning.py --json benchmarks/results/learning.json
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import reverse_task
from lib.common import ROOT, argument_parser, case, finish, realhf
from lib.pages import RUNS

from realhf.data import sort_task
from realhf.rundir.lines import evaluation_line, read_lines

MEASURES = (
    *RUNS,
    "realhf/algorithms",
    "realhf/data",
    "realhf/experiments",
    "realhf/rewards",
    "experiments",
    "scripts/main_job.py",
    "benchmarks/lib/reverse_task.py",
)
RIGHT = "experiments/sort_rewards.py:right"
CRITIC = ("--critic.lr", "3e-4", "--mini-batches", "2")
REVERSAL = (
    "--architecture.vocab-size 512 --architecture.hidden-size 256 --architecture.intermediate-size 704 --actor.lr 1e-3 "
    "--batch-size 128 --steps 180"
)
REVERSAL_GRPO = "--actor.lr 2e-4 --actor.beta2 0.99 --batch-size 1024 --grpo.beta 0.001 --steps 80"
WORKERS = ("--num-workers", "2")
SAMPLED = ("--eval-temperature", "1", "--eval-batch-size", "256")
Evaluation = dict[str, Any]
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """Runs in `folder`; with `quick` of two steps each."""

    folder: Path
    quick: bool

    def run(self, run: str, name: str, *words: str | Path) -> tuple[Evaluation, Evaluation]:
        """The first and the last evaluation of `realhf run NAME`, which is made once."""
        few = ("--steps", "2") if self.quick else ()
        if not (self.folder / run).exists():
            realhf("run", name, "--run-dir", str(self.folder / run), *WORKERS, *map(str, words), *few)
        evaluations = read_lines(self.folder / run / "evaluations.jsonl", evaluation_line).values
        return evaluations[0], evaluations[-1]

    def greedy(self, run: str, name: str, *words: str | Path) -> tuple[float, float]:
        """How many of a model's answers are right, sampled and by its most likely tokens."""
        more = ("--batch-size", "16", "--steps", "1", *SAMPLED)
        before, _ = self.run(run, "remax", "--model", self.folder / name, *words, *more)
        return before["reward_total"], before["greedy_reward_total"]


class Sorting(Task):
    """The sorting task, from a fine-tuned model and with a reward model of its preference pairs."""

    @property
    def data(self) -> Path:
        return sort_task.ensure(self.folder / "data")

    def tune(self) -> tuple[Evaluation, Evaluation]:
        return self.run("sft", "experiments/sft.py", "--data-dir", self.data)

    def judge(self) -> tuple[Evaluation, Evaluation]:
        words = ("--judge.lr", "3e-4", "--steps", "150", "--batch-size", "64", *self.pairs)
        return self.of_tuned("judge", "reward", *words)

    @property
    def pairs(self) -> tuple[str | Path, ...]:
        return ("--data", self.data / "preferences.jsonl", "--eval-data", self.data / "preferences_held_out.jsonl")

    @property
    def prompts(self) -> tuple[str | Path, ...]:
        return ("--data", self.data / "prompts.jsonl", "--eval-data", self.data / "evaluation.jsonl")

    def of_tuned(self, run: str, name: str, *words: str | Path) -> tuple[Evaluation, Evaluation]:
        self.tune()
        return self.run(run, name, "--model", self.folder / "sft", "--tokenizer", self.data, *words)

    def rl(self, run: str, name: str, options: str, *words: str | Path) -> tuple[Evaluation, Evaluation]:
        """60 steps; `options` is the name of the experiment's hyperparameters."""
        more = ("--steps", "60", "--actor.lr", "1e-4", *SAMPLED)
        most = (f"--{options}.max-new-tokens", str(sort_task.MAX_NEW_TOKENS))
        return self.of_tuned(run, name, *self.prompts, *more, *most, *words)

    def measured(self, run: str) -> tuple[float, float]:
        most = ("--remax.max-new-tokens", str(sort_task.MAX_NEW_TOKENS))
        return self.greedy(f"{run}-measured", run, "--tokenizer", self.data, *self.prompts, *most, "--reward", RIGHT)


def row(name: str, before: float, after: float, target: float, *, less: bool = False) -> dict[str, Any]:
    """In per cent; with `less` a smaller value is a better one."""
    ratio = before / max(after, 1e-4) if less else after / max(before, 1e-4)
    holds = after < target if less else after > target
    return case(name, 100 * after, "%", baseline=100 * before, ratio=ratio, target=100 * target, holds=holds)


def fine_tuning(task: Sorting) -> Rows:
    before, after = task.tune()
    yield row("fine-tuning", before["accuracy"], after["accuracy"], 0.35)


def by_rule(name: str, options: str, target: float, *words: str) -> Any:
    def measure(task: Sorting) -> Rows:
        examples = ("--examples.data", task.data / "sft.jsonl") if name == "ppo-ptx" else ()
        before, after = task.rl(name, name, options, "--reward", RIGHT, *words, *examples)
        yield row(name, before["reward_right"], after["reward_right"], target)

    return measure


def safe_rlhf(task: Sorting) -> Rows:
    judges = ("--reward", f"{RIGHT}_but_for_unsafe", "--cost", "experiments/sort_rewards.py:unsafe")
    critics = (*CRITIC, "--cost-critic.lr", "3e-4", "--safe.cost-limit", "0.05")
    before, after = task.rl("safe-rlhf", "safe-rlhf", "safe", *judges, *critics)
    key = "reward_right_but_for_unsafe"
    yield row("safe-rlhf", before[key], after[key], 0.7)
    yield row("safe-rlhf, unsafe answers (at most)", before["reward_unsafe"], after["reward_unsafe"], 0.05, less=True)


def reward_model(task: Sorting) -> Rows:
    before, after = task.judge()
    yield row("reward model, of pairs", before["pair_accuracy"], after["pair_accuracy"], 0.95)


def by_model(task: Sorting) -> Rows:
    task.judge()
    judge = str(task.folder / "judge")
    task.rl("ppo-by-model", "ppo", "ppo", "--reward.model", judge, "--critic.model", judge, *CRITIC)
    yield from with_greedy("ppo, reward model", task.measured("sft"), task.measured("ppo-by-model"), (0.75, 0.85))


def dpo(task: Sorting) -> Rows:
    words = ("--actor.lr", "1e-5", "--dpo.beta", "0.3", "--steps", "80", "--batch-size", "64")
    task.of_tuned("dpo", "dpo", *task.pairs, *words)
    yield row("dpo", task.measured("sft")[0], task.measured("dpo")[0], 0.65)


def with_greedy(
    name: str, before: tuple[float, float], after: tuple[float, float], targets: tuple[float, float]
) -> Rows:
    for suffix, *numbers in zip(("", ", greedy"), before, after, targets, strict=True):
        yield row(f"{name}{suffix}", *numbers)


def reversal(task: Sorting) -> Rows:
    """Tokens of several letters, answers of one to five tokens, a reward on texts."""
    data = reverse_task.ensure(task.folder / "reversal")
    tokenizer = ("--tokenizer", data / "tokenizer")
    task.run("reversal-sft", "sft", "--data", data / "sft.jsonl", *tokenizer, *REVERSAL.split())
    files = ("--data", data / "train.jsonl", "--eval-data", data / "evaluation.jsonl", *tokenizer)
    words = (*files, "--reward", f"{data / 'rewards.py'}:exact")
    most = (*SAMPLED, "--grpo.max-new-tokens", "12", *REVERSAL_GRPO.split())
    task.run("reversal-grpo", "grpo", "--model", task.folder / "reversal-sft", *words, *most)
    before, after = (
        task.greedy(f"{run}-measured", run, *words, "--remax.max-new-tokens", "12")
        for run in ("reversal-sft", "reversal-grpo")
    )
    yield from with_greedy("reversal by grpo", before, after, (0.48, 0.68))


def main_job(task: Sorting) -> Rows:
    """What `make run` does; twenty points more are asked."""
    words = [sys.executable, "scripts/main_job.py", "--root", str(task.folder / "main"), *WORKERS]
    subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    first, *_, last = read_lines(task.folder / "main/ppo/evaluations.jsonl", evaluation_line).values
    for name, key in (("main job", "accuracy"), ("main job, greedy", "accuracy_greedy")):
        yield row(name, first[key], last[key], first[key] + 0.2)


CASES = {
    "fine-tuning": fine_tuning,
    "grpo": by_rule("grpo", "grpo", 0.8),
    "rloo": by_rule("rloo", "rloo", 0.8),
    "reinforce++": by_rule("reinforce++", "reinforce", 0.8),
    "remax": by_rule("remax", "remax", 0.78),
    "ppo": by_rule("ppo", "ppo", 0.75, *CRITIC),
    "reward model": reward_model,
    "ppo, reward model": by_model,
    "ppo-ptx": by_rule("ppo-ptx", "ppo", 0.7, *CRITIC),
    "safe-rlhf": safe_rlhf,
    "dpo": dpo,
    "reversal": reversal,
    "main job": main_job,
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="one alone; what the file has of others at this commit stays")
    arguments = parser.parse_args()
    chosen = [arguments.case] if arguments.case else ["grpo"] if arguments.quick else list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        task = Sorting(Path(folder), arguments.quick)
        results = []
        for name in chosen:
            results += CASES[name](task)
            print(f"{name}: {results[-1]['value']:.0f} %", file=sys.stderr, flush=True)
    finish("learning", results, arguments.json, is_part=bool(arguments.case))


if __name__ == "__main__":
    main()
