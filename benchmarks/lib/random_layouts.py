"""Jobs and plans drawn from a seed, for `reproducible="layout"`: small models of every kind, each under two plans."""

import random
from dataclasses import dataclass
from pathlib import Path

from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.experiments import ready_file
from realhf.lifecycle.request import experiment_of

STEPS, BATCH, MINI_BATCHES = 6, 16, 2
_PARTS = 4  # dp x micro-batches of a training

# Options of an architecture of 32 hidden numbers; tensor parallelism divides it by as many as it has key heads.
_KINDS = {
    "plain": (),
    "tied": ("--architecture.tied-embeddings",),
    "biases": ("--architecture.qkv-bias", "--architecture.tied-embeddings"),
    "head norms": ("--architecture.qk-norm",),
    "experts": ("--architecture.experts.count", "4", "--architecture.experts.per-token", "2"),
    "windows": ("--architecture.sliding-window", "5"),
    "plain MLP": (
        *("--architecture.mlp", "plain", "--architecture.activation", "gelu_tanh", "--architecture.norm", "layer"),
        *("--architecture.positions", "learned", "--architecture.max-positions", "64", "--architecture.mlp-bias"),
    ),
    "Gemma": (
        "--architecture.norm",
        "rms_plus_one",
        "--architecture.activation",
        "gelu_tanh",
        "--architecture.tied-embeddings",
    ),
}


@dataclass(frozen=True)
class Drawn:
    """A job, as an experiment and its words but for the plan, and two plans."""

    name: str
    experiment: str
    words: tuple[str, ...]
    plans: tuple[ExecutionPlan, ExecutionPlan]


def draw(seed: int, data: Path, largest: int = 4) -> Drawn:
    """The job of a seed, on the sorting task's `data`, on at most `largest` workers."""
    chance = random.Random(seed)
    experiment, dtype = chance.choice(("ppo", "grpo")), chance.choice(("float32", "bfloat16"))
    kind, kv_heads, layers = chance.choice(list(_KINDS)), chance.choice((1, 2, 3, 4)), chance.randint(2, 4)
    heads = kv_heads * chance.choice([group for group in (1, 2, 3) if kv_heads * group <= 6])
    sizes = {"hidden-size": 8 * heads, "intermediate-size": 12 * kv_heads * chance.randint(1, 3), "num-layers": layers}
    sizes |= {"num-heads": heads, "num-kv-heads": kv_heads, "vocab-size": 36}
    words = [f"--architecture.{name}={number}" for name, number in sizes.items()]
    words += [*_KINDS[kind], "--dtype", dtype, "--reproducible", "layout", "--seed", str(seed), "--steps", str(STEPS)]
    words += ["--batch-size", str(BATCH), "--mini-batches", str(MINI_BATCHES), "--actor.lr", "2e-3"]
    words += ["--data", str(data / "prompts.jsonl"), "--tokenizer", str(data / "tokenizer.json")]
    words += [
        "--reward",
        f"{Path(__file__).with_name('letters_reward.py')}:copied",
        f"--{experiment}.max-new-tokens",
        "9",
    ]
    graph = experiment_of(ready_file(experiment), tuple(words)).graph
    plans = _plan(chance, graph, largest), _plan(chance, graph, largest)
    name = f"{seed}: {experiment} {dtype}, {kind}, {heads}/{kv_heads} heads, {layers} layers"
    return Drawn(name, ready_file(experiment), tuple(words), plans)


def _plan(chance: random.Random, graph: DataflowGraph, largest: int) -> ExecutionPlan:
    workers = chance.randint(1, largest)
    calls = {}
    for name, call in graph.model_calls.items():
        leaves = call.config.num_kv_heads
        found = [
            (dp, tp, pp)
            for dp in (1, 2, 4)
            for tp in range(1, leaves + 1)
            for pp in range(1, call.config.num_layers + 1)
            if dp * tp * pp <= workers and leaves % tp == 0
        ]
        dp, tp, pp = chance.choice(found)
        first = chance.randint(0, workers - dp * tp * pp)
        micro_batches = (
            _PARTS // dp if call.trains else chance.choice([count for count in (1, 2, 4) if BATCH % (dp * count) == 0])
        )
        calls[name] = CallPlan(devices=(first, dp * tp * pp), dp=dp, tp=tp, pp=pp, micro_batches=micro_batches)
    return ExecutionPlan(num_devices=workers, calls=calls, max_steps_in_flight=1)
