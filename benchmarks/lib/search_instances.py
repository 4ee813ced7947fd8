"""Large planning problems out of the cost model, as planning-problem/1 files: what the search is measured on.

In benchmarks/: python -m lib.search_instances FOLDER
"""

import random
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lib.simple_problems import simple_problem
from msgspec.structs import replace

from realhf.api.computation import FIELDS
from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    DataflowGraph,
    ModelFunctionCallDef,
    ModelInterfaceType,
)
from realhf.dataflow.interface import InterfaceConfig
from realhf.geometry.layout import DeviceMesh, Layout
from realhf.geometry.shards import Placement
from realhf.planning.model.cluster import Cluster, device_meshes
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.reallocation import Reallocation
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import options_on
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.file import ProblemFile, problem_bytes
from realhf.planning.problem.tables import Problem
from realhf.planning.task import PlanningTask

STEPS = 3
DEVICES_PER_NODE = 8
BATCH_SIZE = 512
MINI_BATCHES = 8
LENGTHS = Workload(prompt_tokens=1024, new_tokens=1024)
LLAMA_7B = DecoderConfig(
    hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32, vocab_size=32000
)
LLAMA_34B = DecoderConfig(
    hidden_size=8192, intermediate_size=22016, num_layers=48, num_heads=64, num_kv_heads=8, vocab_size=32000
)
LLAMA_70B = DecoderConfig(
    hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8, vocab_size=32000
)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """PPO of an actor and a 7B critic; meshes are aligned powers of two of at least `smallest` devices.

    `uneven`: every option takes longer by a random part of itself, up to this, so that no two
    places of the cluster are alike and a proof has no symmetry to use.
    """

    actor: DecoderConfig
    num_nodes: int
    smallest: int
    uneven: float = 0.0


INSTANCES = {
    "34b_32": Instance(actor=LLAMA_34B, num_nodes=4, smallest=2),
    "34b_64": Instance(actor=LLAMA_34B, num_nodes=8, smallest=4),
    "70b_64": Instance(actor=LLAMA_70B, num_nodes=8, smallest=4),
    "70b_128": Instance(actor=LLAMA_70B, num_nodes=16, smallest=4),
    "34b_32_uneven": Instance(actor=LLAMA_34B, num_nodes=4, smallest=2, uneven=0.1),
    "70b_128_uneven": Instance(actor=LLAMA_70B, num_nodes=16, smallest=4, uneven=0.1),
    "70b_1024": Instance(actor=LLAMA_70B, num_nodes=128, smallest=8),
}


@dataclass(frozen=True, kw_only=True)
class _Interface(InterfaceConfig):
    implementation: ClassVar[str] = "none:none"


def instance(name: str) -> ProblemFile:
    """One of INSTANCES."""
    chosen = INSTANCES[name]
    cluster = Cluster(
        num_nodes=chosen.num_nodes,
        devices_per_node=DEVICES_PER_NODE,
        hardware=load_hardware("h100"),
    )
    graph = _ppo(chosen.actor, LLAMA_7B.with_head("scalar"))
    meshes = device_meshes(cluster)
    options = {
        call.name: [
            o for o in options_on(meshes, call, call.mini_batch_size(BATCH_SIZE)) if _is_aligned(o, chosen.smallest)
        ]
        for call in graph.calls.values()
    }
    task = PlanningTask(
        graph=graph,
        batch_size=BATCH_SIZE,
        workload=LENGTHS,
        cluster=cluster,
        costs=load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware),
        max_steps_in_flight=STEPS,
        dtype="bfloat16",
    )
    problem = _made_uneven(build_problem(task, options, reallocations=_broadcasts), chosen.uneven)
    return simple_problem(replace(problem, steps=STEPS), graph, label=lambda row: row.strategy)


def planning_task(
    num_nodes: int, actor: DecoderConfig = LLAMA_70B, critic: DecoderConfig = LLAMA_7B, hardware: str = "h100"
) -> PlanningTask:
    """PPO with all options, as `realhf plan` would plan it: it may choose how calls compute."""
    graph = _ppo(actor, critic.with_head("scalar"))
    cluster = Cluster(num_nodes=num_nodes, devices_per_node=DEVICES_PER_NODE, hardware=load_hardware(hardware))
    return PlanningTask(
        graph=graph,
        batch_size=BATCH_SIZE,
        workload=LENGTHS,
        cluster=cluster,
        costs=load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware),
        max_steps_in_flight=2,
        dtype="bfloat16",
        open_choices=dict.fromkeys(graph.models, FIELDS),
    )


def _ppo(actor: DecoderConfig, critic: DecoderConfig) -> DataflowGraph:
    def call(
        model: str, config: DecoderConfig, kind: ModelInterfaceType, reads: str, writes: str = ""
    ) -> ModelFunctionCallDef:
        return ModelFunctionCallDef(
            model_name=model,
            model_type=config,
            interface_type=kind,
            interface_impl=_Interface(),
            input_data=reads.split(),
            output_data=writes.split(),
            mini_batches=MINI_BATCHES if kind is TRAIN_STEP else 1,
        )

    rollouts = "seq logp rewards ref_logp values"
    return DataflowGraph(
        [
            call("actor", actor, GENERATE, "prompts", "seq logp"),
            call("reward", critic, INFERENCE, "seq", "rewards"),
            call("ref", actor, INFERENCE, "seq", "ref_logp"),
            call("critic", critic, INFERENCE, "seq", "values"),
            call("actor", actor, TRAIN_STEP, rollouts),
            call("critic", critic, TRAIN_STEP, rollouts),
        ],
        ["prompts"],
    )


def _is_aligned(mesh: DeviceMesh, smallest: int) -> bool:
    return mesh.size >= smallest and mesh.size & (mesh.size - 1) == 0 and mesh.first % mesh.size == 0


def _made_uneven(problem: Problem, uneven: float) -> Problem:
    rng = random.Random(0)
    calls = [
        replace(call, options=[replace(row, time_s=row.time_s * (1 + uneven * rng.random())) for row in call.options])
        for call in problem.calls
    ]
    return replace(problem, calls=calls)


def _broadcasts(move: Reallocation, sources: Sequence[Placement], targets: Sequence[Layout]) -> "array[float]":
    """Seconds of a parameter broadcast: a shard of the target at 40 GB/s, less with more sources; whole microseconds.
    Wherever the meshes lie, so that a file needs no more than strategies to say it."""
    model = move.model
    parameter_bytes = (
        2
        * model.num_layers
        * (4 * model.hidden_size * model.hidden_size + 3 * model.hidden_size * model.intermediate_size)
    )
    held = [parameter_bytes / (target.strategy.tp * target.strategy.pp) for target in targets]
    rows = {
        dp: array("d", [(round(size / 40e9 * 1e6 * (1 + 1 / dp) / 2) + 1000) / 1e6 for size in held])
        for dp in {source.layout.strategy.dp for source in sources}
    }
    table = array("d")
    for source in sources:
        table += rows[source.layout.strategy.dp]
    return table


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in INSTANCES:
        problem = instance(name)
        (folder / f"{name}.json").write_bytes(problem_bytes(problem))
        print(name, [len(call.options) for call in problem.calls], len({o.devices for o in problem.calls[0].options}))
