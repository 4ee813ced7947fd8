"""The planning problems of which everything is recorded: small, and each of them new in some way.

A search's budget is a number of plans, so that its result depends on no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PPO, SFT, REWARD = ("experiments/ppo.py", "experiments/sft.py", "experiments/reward.py")
SEVEN = "--actor llama3-7b --critic llama3-7b"
OUT = "--evaluations 1500 --json out.json --output plan.json"
SOLVE = "--threads 2 --json"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Commands of `realhf` that run in one folder, one after the other.

    `profiled`: with the profiles of `inputs/profiles`. `edits`: fields that replace those of a JSON file.
    """

    commands: tuple[str, ...]
    profiled: bool = False
    edits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def plan(words: str, *more: str, profiled: bool = False, edits: Mapping[str, Mapping[str, Any]] | None = None) -> Case:
    return Case(commands=(f"plan {words}", *more), profiled=profiled, edits=edits or {})


def given(name: str, words: str, devices: int) -> str:
    return f"plan {PPO} --plan plans/{name}.json --hardware cpu --num-workers {devices} {words} --json {name}.out.json"


def osdp(name: str, words: str) -> str:
    """Its search ends with a proof long before the limit."""
    return f"plan --osdp {words} --seconds 1000 --json {name}.json"


def script(words: str) -> str:
    return f"run {PPO} --launcher slurm --dry-run --run-dir run --evaluations 200 {words}"


CASES: dict[str, Case] = {
    # On CPUs, by the analytic model and by profiles.
    "sft_cpu": plan(
        f"{SFT} --num-workers 2 --hardware cpu --memory-gb 4 {OUT} --dump-problem problem.json",
        f"search problem.json --evaluations 5000 --seed 1 {SOLVE} found.json",
    ),
    "reward_cpu": plan(
        f"{REWARD} --num-workers 4 --nodes 2 --hardware cpu {OUT} --compare --dump-problem simple.json "
        "--dump-version 1",
        f"search simple.json --evaluations 5000 --seed 2 {SOLVE} found.json",
        f"search simple.json --evaluations 5000 --seed 2 --moves single {SOLVE} single.json",
    ),
    "ppo_cpu_profiled": plan(f"{PPO} --num-workers 2 --hardware cpu {OUT} --compare", profiled=True),
    "ppo_cpu_profiled_offload": plan(
        f"{PPO} --num-workers 4 --nodes 2 --hardware cpu --offload reference,reward {OUT} --dump-problem problem.json",
        f"search problem.json --evaluations 5000 --seed 3 {SOLVE} found.json",
        profiled=True,
    ),
    "ppo_given_plans": Case(
        commands=(
            given("mixed_disjoint", "--compare", 4),
            given("interleaved", "", 4),
            given("grouped", "--nodes 2", 4),
            given("miniature", "--compute.data-parallel fsdp", 2),
        ),
    ),
    "ppo_given_plan_changed": plan(
        f"{PPO} --cluster h100-1x8 {SEVEN} --evaluations 500 --output plan.json",
        f"plan {PPO} --cluster h100-1x8 {SEVEN} --plan plan.json --json out.json",
        edits={"plan.json": {"max_steps_in_flight": 3, "offload": ["reference", "reward"], "order": []}},
    ),
    # On GPUs: sizes, lengths, dtypes, memory.
    "ppo_7b_h100_1x8": plan(
        f"{PPO} --cluster h100-1x8 {SEVEN} {OUT} --compare --dump-problem problem.json",
        f"search problem.json --evaluations 20000 --seed 1 {SOLVE} found.json",
    ),
    "ppo_34b_h100_4x8": plan(
        f"{PPO} --cluster h100-4x8 --actor llama3-34b --critic llama3-7b --batch-size 512 {OUT} --compare",
    ),
    "ppo_lengths_a100": plan(
        f"{PPO} --cluster a100-80g-2x8 --actor qwen3-8b --critic qwen2.5-7b --prompt-tokens 300 --new-tokens 2000 "
        f"--batch-size 96 {OUT} --dump-problem simple.json --dump-version 1",
        f"search simple.json --evaluations 5000 --seed 4 {SOLVE} found.json",
    ),
    "ppo_mixture_of_experts": plan(
        f"{PPO} --cluster h200-2x8 --actor inputs/mixtral.json --model-type critic=llama2-7b "
        f"--model-type reward=qwen2.5-1.5b {OUT} --compare",
    ),
    "ppo_float32": plan(
        f"{PPO} --cluster h200-1x4 --actor qwen3-1.7b --critic qwen3-0.6b --dtype float32 --mini-batches 4 {OUT}",
    ),
    "sft_cluster_file": plan(
        f"{SFT} --cluster inputs/cluster.yaml --model-type sft=llama2-34b --prompt-tokens 2048 --batch-size 64 {OUT} "
        "--compare",
    ),
    "reward_hardware_file": plan(
        f"{REWARD} --hardware inputs/slow-links.yaml --nodes 2 --gpus-per-node 4 --model-type reward=llama3-13b "
        f"--model-type sft=llama3-13b --prompt-tokens 700 {OUT} --compare",
    ),
    "clusters_compared": plan(
        f"{PPO} --cluster h100-2x4,h200-2x4,a100-80g-1x8 --actor llama3-13b --critic llama3-7b --evaluations 1000 "
        "--json out.json",
    ),
    # Two layers of choices: what is sharded, offloaded, recomputed, stale.
    "ppo_stalenesses_compared": plan(
        f"{PPO} --cluster h100-1x8 {SEVEN} --staleness 0,1,2 --evaluations 1000 --json out.json",
    ),
    "ppo_stale": plan(
        f"{PPO} --cluster h100-1x8 {SEVEN} --staleness 1 {OUT} --dump-problem problem.json",
        f"search problem.json --evaluations 5000 --seed 5 {SOLVE} found.json",
    ),
    "ppo_reference_follows": plan(f"{PPO} --num-workers 4 --hardware cpu --reference-eta 0.05 {OUT} --compare"),
    "ppo_offload_13b": plan(
        f"{PPO} --cluster h100-1x8 --actor llama3-13b --critic llama3-7b --offload reference,reward {OUT} "
        "--dump-problem problem.json",
        f"search problem.json --evaluations 5000 --seed 6 {SOLVE} found.json",
    ),
    "sharded_operators": plan(
        f"{SFT} --cluster h100-1x8 --model-type sft=llama3-7b --memory-gb 30 {OUT}",
        f"plan {PPO} --cluster h100-1x4 {SEVEN} "
        "--memory-gb 90 --evaluations 1500 --json ppo.json --dump-problem problem.json",
    ),
    "ppo_fully_sharded_recomputing": plan(
        f"{PPO} --cluster h100-2x4 --actor llama3-13b --critic llama3-7b --compute.data-parallel fsdp "
        f"--compute.recomputation full --compute.sequence-parallel True {OUT} --compare --dump-problem problem.json",
    ),
    "ppo_another_engine": plan(
        f"{PPO} --cluster h200-1x8 {SEVEN} --features no-zero1,no-fp32-gradients,"
        "selective-recomputation,no-cuda-graphs,no-sharded-logits,no-response-logits,no-chunked-logits,"
        f"sequence-parallel,no-overlapped-sends {OUT}",
    ),
    "ppo_nothing_fits": plan(
        f"{PPO} --cluster h100-1x2 {SEVEN} --evaluations 500",
        f"plan {PPO} --cluster h100-1x2,h100-1x8 {SEVEN} --evaluations 500 --json out.json",
    ),
    # Operators of one model, problems from elsewhere, batch scripts.
    "osdp": Case(
        commands=(
            osdp("seven", "llama3-7b --devices 8 --memory-gb 40"),
            osdp("recomputing", "llama3-7b --devices 64 --memory-gb 80 --batch 2 --recompute"),
            osdp(
                "critic",
                "llama3-13b-critic --devices 8 --memory-gb 60 --slices 8 --modes replicated,sharded --max-batch 16",
            ),
            osdp(
                "prefetching",
                "qwen3-1.7b --devices 4 --memory-gb 16 --sequence-length 512 --prefetch --max-batch 16 "
                "--hardware a100-80g --dtype float32 --launch-us 3",
            ),
            osdp("too_large", "llama3-70b --devices 8 --memory-gb 80"),
        ),
    ),
    "problems_of_version_1": Case(
        commands=tuple(
            f"search problems/{name}.json --evaluations {evaluations} --seed 1 {SOLVE} {name}.json"
            for name, evaluations in {"n1_steps3": 20000, "n2_steps1": 5000, "s2_steps3": 5000}.items()
        ),
    ),
    "batch_scripts": Case(
        commands=(
            script("--nodes 2 --gpus-per-node 8 --hardware h100"),
            script(
                "--nodes 4 --gpus-per-node 4 --hardware a100-80g --partition main --account lab "
                "--time-limit 1-00:00:00 --nodelist 'node[01-04]' "
                "--sbatch=--qos=high --sbatch=--exclusive"
            ),
            script("--nodes 2 --gpus-per-node 2 --cpu-only --network-interface eth0 --checkpoint-every 5"),
            script("--plan plans/grouped.json --hardware cpu --cpu-only --staleness 0"),
        )
    ),
}
