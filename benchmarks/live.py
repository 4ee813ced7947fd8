"""A live program against the declared run of the same algorithm: seconds a step, under one plan.

PPO with four calls of models of 1.8 M parameters and a reward function on two workers; the two forms run in turns, and
each one's step is the median without the first two. The ratio is that of the declared run's step to the program's
(target 1 / 1.05). The numbers of both are compared as well: equal to 1e-5 in float32.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.common import ROOT, case, finish, parse_arguments, realhf
from msgspec.structs import replace

from realhf.data import sort_task
from realhf.dataflow.plan import load_plan, save_plan

MEASURES = (
    "realhf/api/script",
    "realhf/engine",
    "realhf/live",
    "realhf/master",
    "realhf/worker",
    "benchmarks/jobs/live_ppo.py",
)
MOST = 1.05
COMPARED = ("reward_mean", "actor_loss", "critic_loss", "response_length", "entropy")


def main() -> None:
    arguments = parse_arguments(__doc__)
    steps, turns = (8, 1) if arguments.quick else (20, 4)
    reward = f"{ROOT / 'benchmarks/lib/letters_reward.py'}:copied"
    found: dict[str, list[float]] = {"declared": [], "live": []}
    equal = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = sort_task.ensure(folder / "data")
        words = ["ppo", "--data", str(data / "prompts.jsonl"), "--tokenizer", str(data / "tokenizer.json")]
        words += ["--reward", reward, "--num-workers", "2", "--steps", str(steps), "--ppo.max-new-tokens", "16"]
        for model in ("actor", "critic"):
            words += [f"--{model}.schedule", "constant", f"--{model}.lr", "1e-4", f"--{model}.warmup-steps", "0"]
        plan = str(folder / "plan.json")
        realhf("plan", *words, "--output", plan)
        of_program = str(folder / "program.json")  # its calls beside the devices are others
        save_plan(replace(load_plan(plan), beside={}, order=()), of_program)
        for turn in range(turns):
            runs = {kind: folder / f"{kind}-{turn}" for kind in (list(found) if turn % 2 else reversed(found))}
            for kind, run_dir in runs.items():
                if kind == "declared":
                    realhf("run", *words, "--plan", plan, "--run-dir", str(run_dir))
                else:
                    program = str(ROOT / "benchmarks/jobs/live_ppo.py")
                    command = [sys.executable, program, str(run_dir), of_program, str(data), reward, str(steps)]
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found[kind].append(seconds(run_dir))
            equal = equal and are_equal(*map(lines_of, runs.values()))
            print({kind: values[-1] for kind, values in found.items()}, file=sys.stderr)
    declared, live = (statistics.median(found[kind]) for kind in ("declared", "live"))
    results = [
        case(
            "a step of PPO, live", live, "s", baseline=declared, ratio=declared / live, target=1 / MOST,
            holds=live <= MOST * declared,
        ),
        case("pairs with equal numbers", turns * equal, "", baseline=None, ratio=None, target=turns, holds=equal),
    ]  # fmt: skip
    finish("live", results, arguments.json)


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def seconds(run_dir: Path) -> float:
    return statistics.median(line["time_s"] for line in lines_of(run_dir)[2:])


def are_equal(ones: list[dict], others: list[dict]) -> bool:
    pairs = [(one[name], other[name]) for one, other in zip(ones, others, strict=True) for name in COMPARED]
    return all(math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5) for one, other in pairs)


if __name__ == "__main__":
    main()
