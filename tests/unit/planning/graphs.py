"""Graphs, models and random problems for the planner's tests."""

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from msgspec import structs

from realhf.architecture.model import DecoderConfig, DType
from realhf.dataflow.graph import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    DataflowGraph,
    ModelFunctionCallDef,
    ModelInterfaceType,
)
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.call import CallModel, features_during
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import Keeps, Option, options_on, options_to_search, pool_meshes
from realhf.planning.problem.tables import CallTable, OptionRow, Problem, TransferTable
from realhf.planning.task import PlanningTask

TINY = DecoderConfig(hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=32)
LENGTHS = Workload(prompt_tokens=8, new_tokens=8)


@dataclass(frozen=True, kw_only=True)
class Stub(InterfaceConfig):
    implementation: ClassVar[str] = "nowhere:Nothing"


CPU = load_hardware("cpu")


def call(
    model: str,
    config: DecoderConfig | str,
    kind: ModelInterfaceType,
    reads: str,
    writes: str = "",
    mini_batches: int = 1,
) -> ModelFunctionCallDef:
    return ModelFunctionCallDef(
        model_name=model,
        model_type=config,
        interface_type=kind,
        interface_impl=Stub(),
        input_data=reads.split(),
        output_data=writes.split(),
        mini_batches=mini_batches,
    )


def ppo(
    actor: DecoderConfig | str = TINY, critic: DecoderConfig | str | None = None, mini_batches: int = 2
) -> DataflowGraph:
    """Six calls on four models."""
    critic = critic or TINY.with_head("scalar")
    rollouts = "seq logp rewards ref_logp values"
    return DataflowGraph(
        [
            call("actor", actor, GENERATE, "prompts", "seq logp"),
            call("reward", critic, INFERENCE, "seq", "rewards"),
            call("ref", actor, INFERENCE, "seq", "ref_logp"),
            call("critic", critic, INFERENCE, "seq", "values"),
            call("actor", actor, TRAIN_STEP, rollouts, "", mini_batches),
            call("critic", critic, TRAIN_STEP, rollouts, "", mini_batches),
        ],
        ["prompts"],
    )


def settings(
    graph: DataflowGraph, cluster: Cluster, batch_size: int = 16, workload: Workload = LENGTHS
) -> dict[str, Any]:
    """The keyword arguments that the planner's functions share."""
    return {
        "batch_size": batch_size,
        "workload": workload,
        "cluster": cluster,
        "costs": load_costs(graph.models, dtype="float32", hardware=cluster.hardware),
        "dtype": "float32",
    }


def task_of(graph: DataflowGraph, **arguments: Any) -> PlanningTask:
    """Two steps in flight, where the arguments do not say another number."""
    return PlanningTask(graph=graph, **{"max_steps_in_flight": 2, **arguments})


def call_model(*, call: ModelFunctionCallDef, **arguments: Any) -> CallModel:
    """Of a call that is alone in its graph."""
    return task_of(DataflowGraph([call], call.input_data), **arguments).call_models[call.name]


def work_of(
    call: ModelFunctionCallDef,
    strategy: ParallelStrategy,
    micro_batches: int,
    lengths: Workload = LENGTHS,
    dtype: DType = "float32",
    features: EngineFeatures = ENGINE,
) -> RankWork:
    """Of a batch of 16 samples."""
    return RankWork(
        call=call,
        samples=call.mini_batch_size(16) // strategy.dp,
        lengths=lengths,
        placed=PlacedModel(call.config, strategy, dtype, features_during(call, lengths, features)),
        micro_batches=micro_batches,
    )


def cpu_cluster(devices: int, num_nodes: int = 1, memory: int = 2**32) -> Cluster:
    return with_memory(Cluster(num_nodes=num_nodes, devices_per_node=devices, hardware=CPU), memory)


def with_memory(cluster: Cluster, device_memory_bytes: int) -> Cluster:
    return replace(cluster, hardware=structs.replace(cluster.hardware, device_memory_bytes=device_memory_bytes))


def random_problem(seed: int, num_calls: int = 3, max_options: int = 5) -> Problem:
    """Calls and transfers of any kind on 4 devices; whole seconds, so that equal times and ties occur."""
    rng = random.Random(seed)
    calls, transfers = [], []
    for i in range(num_calls):
        options = []
        for _ in range(rng.randint(1, max_options)):
            size = rng.choice([1, 1, 2, 3, 4])
            options.append(
                OptionRow(
                    devices=(rng.randrange(4 - size + 1), size),
                    strategy=rng.choice("ab"),
                    micro_batches=1,
                    time_s=float(rng.randint(0, 9)),
                    static_bytes=float(rng.randint(0, 30)),
                    dynamic_bytes=float(rng.randint(0, 30)),
                    copy_bytes=float(rng.randint(0, 20)),
                    # Labels that any two options may share, wherever they lie.
                    communicators=tuple(label for label in range(5) if label != 1 and rng.random() < 0.4),
                )
            )
        parents = [(f"call{j}", 0) for j in range(i) if rng.random() < 0.5]
        parents += [(f"call{j}", rng.randint(1, 2)) for j in range(num_calls) if rng.random() < 0.3]
        spared = [(home, copy, float((7 * seed + 3 * i + k) % 21)) for k, (home, copy) in enumerate(["ab", "ba"])]
        calls.append(
            CallTable(
                name=f"call{i}",
                model="model",
                trains=False,
                home=f"call{rng.randrange(i + 1)}",
                parents=parents,
                options=options,
                spared=spared,
                in_place_bytes=None if i % 2 else float(seed % 9),
            )
        )
    for number in range(rng.randint(0, 4)):
        source, target = rng.randrange(num_calls), rng.randrange(num_calls)
        back = 0 if source < target else 1
        rows, columns = len(calls[source].options), len(calls[target].options)
        transfers.append(
            TransferTable(
                name=f"transfer{number}",
                source=f"call{source}",
                target=f"call{target}",
                parents=[(f"call{source}", back)],
                rows=rng.sample(range(rows), rows),
                columns=rng.sample(range(columns), columns),
                num_columns=columns,
                seconds=[float(rng.randint(0, 3)) for _ in range(rows * columns)],
                on=[f"call{call}" for call in rng.choice([(source, target), (source,), (target,), ()])],
            )
        )
        calls[target].parents.append((f"transfer{number}", 0))
    return Problem(
        num_devices=4,
        devices_per_node=4,
        device_memory_bytes=float(rng.choice([60, 1000])),
        steps=rng.randint(1, 4),
        max_steps_in_flight=rng.randint(1, 3),
        calls=calls,
        transfers=transfers,
        communicator_bytes=float(seed % 3 * 2),
        sending_bytes=float(seed % 4 * 3),
    )


def call_options(
    call: ModelFunctionCallDef, batch_size: int, cluster: Cluster, pool: Pool | None = None
) -> list[Option]:
    """The options of a call on every mesh of the cluster or of a pool, without chunks, computed as it is set up."""
    return options_on(pool_meshes(cluster, pool), call, call.mini_batch_size(batch_size))


def all_options(task: PlanningTask, keeps: Keeps | None = None) -> dict[str, list[Option]]:
    """All that a search may choose, by the name of the call."""
    return {name: options_to_search(task, name, keeps) for name in task.graph.model_calls}
