"""Six planning problems with recorded answers: small, and as different from each other as they can be.

A search's budget is a number of plans, so that its result depends on no clock.
"""

from dataclasses import dataclass

PPO, SFT, REWARD = ("experiments/ppo.py", "experiments/sft.py", "experiments/reward.py")
SEVEN = "--actor llama3-7b --critic llama3-7b"
OUT = "--evaluations 1500 --json out.json"
SOLVE = "--threads 2 --json"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Commands of `realhf` that run in one folder, one after the other.

    `profiled`: with the profiles of `inputs/profiles`.
    """

    commands: tuple[str, ...]
    profiled: bool = False


def plan(words: str, *more: str, profiled: bool = False) -> Case:
    return Case(commands=(f"plan {words}", *more), profiled=profiled)


def osdp(name: str, words: str) -> str:
    """Its search ends with a proof long before the limit."""
    return f"osdp {words} --seconds 1000 --json {name}.json"


def script(words: str) -> str:
    return f"run {PPO} --launcher slurm --dry-run --run-dir run --evaluations 200 {words}"


CASES: dict[str, Case] = {
    # Measured layers, nodes with a link between them, models that rest in host memory.
    "ppo_cpu_profiled_offload": plan(
        f"{PPO} --num-workers 4 --nodes 2 --hardware cpu --offload reference,reward {OUT} --dump-problem problem.json",
        f"search problem.json --evaluations 5000 --seed 3 {SOLVE} found.json",
        profiled=True,
    ),
    # GPUs by the analytic model, steps that overlap.
    "ppo_stale": plan(
        f"{PPO} --cluster h100-1x8 {SEVEN} --staleness 1 {OUT}",
    ),
    # Several sizes of models, one of experts.
    "ppo_mixture_of_experts": plan(
        f"{PPO} --cluster h200-2x8 --actor inputs/mixtral.json --model-type critic=llama2-7b "
        f"--model-type reward=qwen2.5-1.5b {OUT}",
    ),
    # What fits only with operators sharded.
    "sharded_operators": plan(
        f"{SFT} --cluster h100-1x8 --model-type sft=llama3-7b --memory-gb 30 {OUT}",
        f"plan {PPO} --cluster h100-1x4 {SEVEN} --memory-gb 90 --evaluations 1500 --json ppo.json",
    ),
    # Operators of one model.
    "osdp": Case(
        commands=(
            osdp("recomputing", "llama3-7b --devices 64 --memory-gb 80 --batch 2 --recompute"),
            osdp(
                "critic",
                "llama3-13b-critic --devices 8 --memory-gb 60 --slices 8 --modes replicated,sharded --max-batch 16",
            ),
            osdp("too_large", "llama3-70b --devices 8 --memory-gb 80"),
        ),
    ),
    "batch_scripts": Case(
        commands=(
            script(
                "--nodes 4 --gpus-per-node 4 --hardware a100-80g --partition main --account lab "
                "--time-limit 1-00:00:00 --nodelist 'node[01-04]' "
                "--sbatch=--qos=high --sbatch=--exclusive"
            ),
            script("--plan plans/grouped.json --hardware cpu --cpu-only --staleness 0 --checkpoint-every 5"),
        )
    ),
}
