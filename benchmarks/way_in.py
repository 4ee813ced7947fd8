"""How long the way into a run is: functions and files that a reader passes, and facts that are derived on it.

Two ways, each in a process of its own under `sys.setprofile`: from `realhf run grpo --model ... --data ...
--reward ...` to the written run directory, where the launcher would start processes; and from `realhf plan` of the same
to the first table in the solver's memory. Functions count once, by file and name, without comprehensions: all, with
what reads data and computes costs, and those that have a part of the request among their arguments, or what it becomes
(`TYPES`). The baseline is commit 596c38e, counted in the same way; at most half of its functions and files is the
target. The dataflow graph, the setups of models and the settings of `@auto` are derived once, and a plan is checked
once. `--quick` goes the way of the plan alone, `--tree FOLDER` counts in another checkout, and `--list` shows the
functions on standard error.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.common import ROOT, argument_parser, case, finish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

MEASURES = ("realhf", ":!realhf/engine", ":!realhf/worker", ":!realhf/master", ":!realhf/wrapping")
REWARD = "def correct(response: str, answer: str) -> float:\n    return float(response.strip().endswith(answer))\n"
END = "<end>"
# What derives a fact, or checks one, by the names of functions: those of the baseline too.
DERIVED = {
    "graph": ("DataflowGraph.__init__",),
    "setups": ("setups_of", "ResolvedExperiment.setups"),
    "models": ("models_of", "_setups"),
    "settings": ("auto_settings", "ResolvedExperiment.settings"),
    "check of a plan": ("check_plan", "check_computations"),
}


# A request, and what it becomes on the way; `grpo` is the class of the experiment.
TYPES = frozenset(
    [
        "Namespace",
        "RunRequest",
        "PlanRequest",
        "DevicesRequest",
        "SearchBudget",
        "grpo",
        "ResolvedExperiment",
        "DataflowGraph",
        "Cluster",
        "PlanningTask",
        "SearchResult",
        "ExecutionPlan",
        "RunSpec",
        "Run",
    ]
)
Entered = Mapping[str, tuple[int, list[str]]]


@dataclass(frozen=True)
class Way:
    """`end`: where it ends; `before`: functions and files of the baseline, and of these those that have `TYPES`."""

    command: str
    end: str
    before: tuple[int, int, int, int]


WAYS = (
    Way("plan", "planning/problem/native.py:native_problem", (577, 98, 94, 25)),
    Way("run", "launch/local.py:LocalLauncher.start", (934, 141, 188, 46)),
)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="count in this checkout")
    parser.add_argument("--list", action="store_true", help="show the functions")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        for way in WAYS[: 1 if arguments.quick else None]:
            entered = counted(way, arguments.tree, Path(folder))
            if arguments.list:
                print(way.command, *sorted(entered), sep="\n  ", file=sys.stderr)
            rows += rows_of(way, entered)
    finish("way_in", rows, arguments.json)


def make_inputs(folder: Path) -> None:
    """A tiny model with a tokenizer of bytes, sixteen prompts, and a reward."""
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    tokenizer = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(signs))).save_pretrained(folder / "model")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "rewards.py").write_text(REWARD)
    rows = ({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(16))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def counted(way: Way, tree: Path, folder: Path) -> Entered:
    """By function on a way how often it was entered, and the types of its arguments."""
    options = {
        "--model": "model",
        "--data": "train.jsonl",
        "--reward": "rewards.py:correct",
        "--batch-size": "8",
        "--num-workers": "1",
        "--evaluations": "100",
    }
    words = [way.command, "grpo", *(word for pair in options.items() for word in pair)]
    child = [sys.executable, str(ROOT / "benchmarks/lib/entered.py"), str(tree.resolve() / "realhf"), way.end, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_DATA_HOME": str(folder)}
    done = subprocess.run(child, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"realhf {' '.join(words)} failed:\n{done.stderr}")
    entered: Entered = json.loads(done.stdout.splitlines()[-1])
    return entered


def rows_of(way: Way, entered: Entered) -> list[dict]:
    """Functions and files beside those of the baseline, and how often each fact was derived."""
    handing = [name for name, (_, types) in entered.items() if TYPES.intersection(types)]
    counts = {
        "all functions": len(entered),
        "all files": len({name.partition(":")[0] for name in entered}),
        "functions with the request": len(handing),
        "files with the request": len({name.partition(":")[0] for name in handing}),
    }
    rows = [
        case(
            f"{way.command}: {what}",
            count,
            what.split()[1 if what.startswith("all") else 0],
            baseline=before,
            ratio=before / count,
            target=before // 2,
            holds=count <= before // 2,
        )
        for (what, count), before in zip(counts.items(), way.before, strict=True)
    ]
    for what, functions in DERIVED.items():
        times = sum(number for name, (number, _) in entered.items() if name.partition(":")[2] in functions)
        rows.append(
            case(f"{way.command}: {what}", times, "times", baseline=None, ratio=None, target=1, holds=times <= 1)
        )
    return rows


if __name__ == "__main__":
    main()
