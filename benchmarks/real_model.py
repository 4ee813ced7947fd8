"""GRPO on a real model beside TRL 1.16 on the CPU: seconds of a step, and the rewards of the same steps.

The recipe of `make real`: SmolLM2-135M-Instruct (its 4-bit weights, GGUF Q4_1), 256 responses of at most 16 tokens to
32 questions a step, the last number right, bfloat16. Both sides get the same questions in the same order, the same
learning rates and two threads: ours two workers with a thread each, which divide the samples (the plan that the search
finds, given here, so that no planning is measured), TRL one process (`benchmarks/lib/trl_real.py` says how it is set).
Sides take turns; a turn is a run with a seed of its own, whose first step is not timed, and a ratio is the median over
the turns of the ratios of the medians of their steps. All responses are trained on, as TRL does; beside it stands the
recipe itself, which leaves out groups whose answers are all right or all wrong. A reward is the mean over the last
steps and all turns.

TRL 1.16 needs an environment of its own:

    python -m venv runs/trl
    runs/trl/bin/pip install -c constraints.txt torch trl==1.16.0

`--picture FILE.svg` draws the rewards of all steps, means over the turns. `--quick` makes two steps of 8 responses.
Command: python benchmarks/real_model.py --trl-python runs/trl/bin/python --json benchmarks/results/real_model.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from lib.common import ROOT, argument_parser, case, finish, realhf
from lib.pages import RUNS
from lib.papers.svg import Lines
from platformdirs import user_cache_path

from realhf.base.files import write_atomically
from realhf.data.rows import rows_of
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.engine.train.optimizer import learning_rate
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import load_run

sys.path.insert(0, str(ROOT / "scripts"))

from real_job import SUMS, fetched_model, training_words, write_questions

MEASURES = (
    *RUNS,
    ":!realhf/planning",
    ":!realhf/profiling",
    ":!csrc/search",
    "realhf/algorithms/grpo",
    "realhf/algorithms/script",
    "realhf/gguf",
    "scripts/real_job.py",
    "benchmarks/lib/trl_real.py",
)
TRL = Path(__file__).parent / "lib" / "trl_real.py"
TRL_VERSION = "1.16"
THREADS = 2
MICRO_BATCH = 32
CALLS = ("actor_generate", "actor_train_step")
PLAN = ExecutionPlan(num_devices=THREADS, calls={name: CallPlan(devices=(0, THREADS), dp=THREADS) for name in CALLS})
TARGET = 3.0
LAST_STEPS = 5
QUICK = ("--batch-size", "8", "--actor.warmup-steps", "1")
OURS = {"realhf": ("--grpo.no-drop-uniform-groups", "--grpo.groups-per-step", "0"), "realhf, informative groups": ()}


@dataclass(frozen=True)
class Run:
    """Seconds of the steps after the first one, and the mean reward of every step."""

    step_s: list[float]
    rewards: list[float]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--trl-python", type=Path, required=True, help="the Python of an environment with TRL 1.16")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw the rewards into this file")
    arguments = parser.parse_args()
    trl = f"TRL {trl_version(arguments.trl_python)}"
    with tempfile.TemporaryDirectory() as folder:
        turns = list(made_turns(Path(folder), trl, arguments))
    if arguments.picture:
        picture(turns).write(arguments.picture)
    finish("real_model", [row for name in OURS for row in cases(turns, name, trl)], arguments.json)


def trl_version(python: Path) -> str:
    """Ends the benchmark unless it is 1.16."""
    words = [str(python), "-c", "from importlib.metadata import version; print(version('trl'))"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"error: --trl-python {python}: {error.strerror}; see --help for how to make the environment")
    found = done.stdout.strip()
    if not found.startswith(f"{TRL_VERSION}."):
        sys.exit(
            f"error: --trl-python {python} has {f'TRL {found}' if found else 'no TRL'}, and TRL {TRL_VERSION} is "
            "compared; see --help for how to make its environment"
        )
    return found


def made_turns(folder: Path, trl: str, arguments: argparse.Namespace) -> Iterator[dict[str, Run]]:
    """The runs of each turn by the name of their side."""
    model = fetched_model(user_cache_path("realhf") / "models")
    train, _ = write_questions(folder, SUMS)
    steps, more = (2, QUICK) if arguments.quick else (arguments.steps, ())
    for turn in range(1 if arguments.quick else arguments.turns):
        runs = {}
        for number, (name, words) in enumerate(OURS.items()):
            run_dir = folder / f"{turn}-{number}"
            words = (*training_words(SUMS, model, train, run_dir, steps=steps, seed=turn), *more, *words)
            runs[name] = our_run(words, run_dir)
            if not number:
                runs[trl] = trl_run(arguments.trl_python, trl_settings(run_dir), folder / "settings.json")
        for name, run in runs.items():
            print(f"turn {turn}: {name}: {statistics.median(run.step_s):.1f} s a step", file=sys.stderr, flush=True)
        yield runs


def our_run(words: Sequence[str], run_dir: Path) -> Run:
    plan = run_dir.with_suffix(".plan.json")
    write_atomically(plan, msgspec.json.encode(PLAN))
    realhf(*words, "--num-workers", str(THREADS), "--plan", str(plan), threads=1)
    steps = read_lines(run_dir / "metrics.jsonl", step_line).values
    ends = [max(call["end"] for call in step["calls"].values()) for step in steps]
    return Run([after - before for before, after in pairwise(ends)], [step["reward_total"] for step in steps])


def trl_settings(run_dir: Path) -> dict[str, Any]:
    """The questions and the settings of a run of ours, in TRL's words; what is not here are defaults of both."""
    run = load_run(RunDirectory.open(run_dir))
    experiment, batch_size, rows = run.experiment, run.batch_size("train"), rows_of(run, "train")
    setup, generate = experiment.setups["actor"], experiment.graph.calls["actor_generate"].interface_impl
    group, micro_batch = generate.samples_per_prompt, min(MICRO_BATCH, batch_size)
    optimizer, firsts = setup.optimizer, range(0, batch_size, group)
    samples = [
        {"prompt": rows.text(tokens["prompt"]), "answer": record["answer"]}
        for step in range(experiment.steps)
        for tokens, record in zip(rows.tokens(step, firsts), rows.records(step, firsts), strict=True)
    ]
    return {
        "model": setup.checkpoint,
        "threads": THREADS,
        "rows": samples,
        "rates": [learning_rate(optimizer, step, experiment.steps) for step in range(experiment.steps)],
        "config": {
            "bf16": setup.dtype == "bfloat16",
            "seed": experiment.seed,
            "max_steps": experiment.steps,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": batch_size // micro_batch,
            "num_generations": group,
            "max_completion_length": generate.max_new_tokens,
            "temperature": generate.temperature,
            "adam_beta2": optimizer.beta2,
        },
    }


def trl_run(python: Path, settings: dict[str, Any], file: Path) -> Run:
    file.write_text(json.dumps(settings))
    # Threads that spin while they wait hold cores: beside other work TRL takes longer then.
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [str(python), str(TRL), str(file)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{python} {TRL} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Run(found["step_s"][1:], found["rewards"])


def cases(turns: Sequence[dict[str, Run]], name: str, trl: str) -> Iterator[dict]:
    ours_s, theirs_s = ([statistics.median(turn[side].step_s) for turn in turns] for side in (name, trl))
    ratio = statistics.median(theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True))
    yield case(
        f"{name}: a step, beside {trl}",
        statistics.median(ours_s),
        "s",
        baseline=statistics.median(theirs_s),
        ratio=ratio,
        target=TARGET,
        holds=ratio >= TARGET,
    )
    ours, theirs = (statistics.mean(mean_rewards(turns, side)[-LAST_STEPS:]) for side in (name, trl))
    ratio = ours / theirs if theirs else None
    yield case(f"{name}: reward, beside {trl}", ours, "", baseline=theirs, ratio=ratio, target=0.0, holds=True)


def mean_rewards(turns: Sequence[dict[str, Run]], name: str) -> list[float]:
    """Of every step, over the turns."""
    return [statistics.mean(rewards) for rewards in zip(*(turn[name].rewards for turn in turns), strict=True)]


def picture(turns: Sequence[dict[str, Run]]) -> Lines:
    made = Lines(title="GRPO on SmolLM2-135M-Instruct (Q4_1)", x="step", y="mean reward of a step's responses")
    for name in turns[0]:
        made.add(name, list(enumerate(mean_rewards(turns, name), 1)))
    return made


if __name__ == "__main__":
    main()
