"""The main job in miniature: profile this machine, fine-tune, train a reward model, then PPO; ends with a table."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.cli.output import table_of
from realhf.cli.progress import call_table
from realhf.machine.gpus import visible_gpus
from realhf.machine.host import read_host
from realhf.report.run_data import call_times, read_run
from realhf.rundir.lines import evaluation_line, read_lines
from realhf.rundir.paths import RunDirectory


def realhf(*words: str) -> None:
    """One `realhf` command; a failure ends this script with its exit code."""
    print(f"\n$ realhf {' '.join(words)}", flush=True)
    code = subprocess.call(python_command("realhf.cli", *words))
    if code:
        sys.exit(code)


def score_distribution(evaluation: dict) -> tuple[float, float]:
    """Mean and deviation of the reward model's scores of the fine-tuned model's samples."""
    mean, square = evaluation["sample_score"], evaluation["sample_score_square"]
    return mean, max(square - mean**2, 1e-6) ** 0.5


def default_workers() -> int:
    """Two, or one on a machine of one GPU, or of one core and no GPU."""
    try:
        return min(2, len(visible_gpus()) or read_host().cores)
    except UserError as error:
        sys.exit(f"error: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="where the run directories go (default runs/main-TIME)")
    parser.add_argument("--num-workers", type=int, help="default: 2, or 1 where there is but one GPU or core")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    root = arguments.root or Path("runs") / time.strftime("main-%Y%m%d-%H%M%S")
    workers = ["--num-workers", str(arguments.num_workers or default_workers())]
    common = [*workers, "--seed", str(arguments.seed)]
    started = time.monotonic()

    realhf("profile", "experiments/ppo.py", *workers)
    realhf("run", "experiments/sft.py", "--run-dir", str(root / "sft"), *common)
    sft = ["--model", str(root / "sft")]
    realhf("run", "experiments/reward.py", "--run-dir", str(root / "reward"), *common, *sft)
    mean, std = score_distribution(read_lines(root / "reward/evaluations.jsonl", evaluation_line).values[-1])
    reward = ["--reward-model", str(root / "reward")]
    standardise = ["--ppo.reward-mean", f"{mean:.6f}", "--ppo.reward-std", f"{std:.6f}"]
    realhf("run", "experiments/ppo.py", "--run-dir", str(root / "ppo"), *common, *sft, *reward, *standardise)
    print_result(root, time.monotonic() - started)


def print_result(root: Path, seconds: float) -> None:
    """What the job won, how fast it was, how well that was predicted, and where everything lies."""
    run = read_run(RunDirectory.open(root / "ppo"))
    before, *_, after = run.evaluations
    accuracy = table_of("held-out prompts answered right", "sampling", "after sft", "after ppo", "gain")
    for label, key in (("temperature 1", "accuracy"), ("greedy", "accuracy_greedy")):
        gain = 100 * (after[key] - before[key])
        accuracy.add_row(label, f"{before[key]:.1%}", f"{after[key]:.1%}", f"{gain:+.1f} points")
    tokens_per_s = sum(line["tokens"] for line in run.metrics) / sum(line["time_s"] for line in run.metrics)
    console = Console(highlight=False, soft_wrap=True)
    console.print("\nthe main job: fine-tuning, reward model, PPO")
    console.print(accuracy)
    assert run.plan is not None, "the run has just ended"
    console.print(call_table(call_times(run.plan, run.metrics)))
    console.print(f"PPO: {tokens_per_s:.0f} tokens/s; whole job: {seconds:.0f} s")
    console.print(f"run directories: {root}")
    console.print(f"report: {root / 'ppo/report.html'}")


if __name__ == "__main__":
    main()
