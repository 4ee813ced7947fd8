"""A simulated setting of a paper, and the dataflow graphs of the algorithms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

from msgspec import structs

from realhf.architecture.named import architecture
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.graph import ModelInterfaceType as Kind
from realhf.dataflow.interface import InterfaceConfig
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.task import PlanningTask

DEVICES_PER_NODE = 8
# ReaL and HybridFlow print 200 Gb/s between nodes; on a DGX A100, which `a100-80g` describes, each GPU has as much.
A100, A100_PRINTED = "a100-80g", "a100-80g, 200 Gb/s a node"
EVALUATIONS = 400_000
OPEN = ("recomputation", "sequence_parallel", "data_parallel", "offload_states")  # choices of `PlanningTask`

# ReaL's engine (tests/data/published_step_times.yaml has the same but for sequence parallelism, which trainings have
# whose replica no other call shares), and HybridFlow's: Megatron-LM with fp32 gradients.
REAL_ENGINE = EngineFeatures(
    fp32_gradients=False, recomputation="full", response_logits=False, logits_chunk_bytes=None, sequence_parallel=True,
    blocking_sends=True, drains_pipelines=True,
)  # fmt: skip
HYBRIDFLOW_ENGINE = replace(REAL_ENGINE, fp32_gradients=True, blocking_sends=False, drains_pipelines=False)


@dataclass(frozen=True, kw_only=True)
class _Interface(InterfaceConfig):
    implementation: ClassVar[str] = "none:none"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A setting; `systems`: plans besides the searched one, by rule (`realhf.planning.presets`) or of other
    systems (`lib.papers.systems`). `large`: searched among fewer options (`lib.papers.large`). `opens`: the search may
    choose how trainings compute, too. `scaled`: constants of the hardware, and what they are multiplied with."""

    algorithm: str
    actor: str
    critic: str
    num_devices: int
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    mini_batches: int
    hardware: str
    engine: EngineFeatures
    steps_in_flight: int = 1
    searches: bool = True
    large: bool = False
    systems: tuple[str, ...] = ()
    evaluations: int = EVALUATIONS
    opens: bool = True
    scaled: tuple[tuple[str, float], ...] = ()

    @property
    def tokens(self) -> int:
        """Of a step, prompts and responses."""
        return self.batch_size * (self.prompt_tokens + self.new_tokens)

    @property
    def described(self) -> Hardware:
        hardware = described(self.hardware)
        return hardware.with_constants({name: by * hardware.constant(name) for name, by in self.scaled})

    @cached_property
    def calls(self) -> list[ModelFunctionCallDef]:
        return list(ALGORITHMS[self.algorithm](self))

    def task(
        self,
        hardware: Hardware | None = None,
        engine: EngineFeatures | None = None,
        calls: Sequence[ModelFunctionCallDef] = (),
    ) -> PlanningTask:
        """On `hardware`, for `engine` and of `calls`, if they are given, in place of the cell's own."""
        hardware = hardware or self.described
        cluster = Cluster(
            num_nodes=-(-self.num_devices // DEVICES_PER_NODE),
            devices_per_node=min(self.num_devices, DEVICES_PER_NODE),
            hardware=hardware,
        )
        features, graph = (engine or self.engine).on(hardware), DataflowGraph(list(calls or self.calls), ["prompts"])
        return PlanningTask(
            graph=graph,
            batch_size=self.batch_size,
            # As measured: nothing of generation is kept while models are trained.
            workload=Workload(
                prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, decode_graphs="call"
            ),
            cluster=cluster,
            costs=load_costs(graph.models, dtype="bfloat16", hardware=hardware, features=features),
            max_steps_in_flight=self.steps_in_flight,
            dtype="bfloat16",
        )  # fmt: skip


@lru_cache
def described(name: str) -> Hardware:
    """The description of a cell's hardware."""
    if name != A100_PRINTED:
        return load_hardware(name)
    hardware = load_hardware(A100)
    return structs.replace(hardware, inter_node_shared_bandwidth=hardware.inter_node_bandwidth)


def _calls(rows: Sequence[tuple[str, str, Kind, str, str]], mini_batches: int) -> Sequence[ModelFunctionCallDef]:
    """From (name of the call, architecture, kind, keys that it reads, keys that it writes); a name begins with its
    model's."""
    return [
        ModelFunctionCallDef(
            name=name,
            model_name=name.split("_")[0],
            model_type=architecture(model),
            interface_type=kind,
            interface_impl=_Interface(),
            input_data=reads.split(),
            output_data=writes.split(),
            mini_batches=mini_batches if kind is TRAIN_STEP else 1,
        )
        for name, model, kind, reads, writes in rows
    ]


def ppo(cell: Cell) -> Sequence[ModelFunctionCallDef]:
    actor, critic = cell.actor, cell.critic + "-critic"
    rows = [
        ("actor_generate", actor, GENERATE, "prompts", "seq logp"),
        ("reward_inference", critic, INFERENCE, "seq", "rewards"),
        ("reference_inference", actor, INFERENCE, "seq", "ref_logp"),
        ("critic_inference", critic, INFERENCE, "seq", "values"),
        ("actor_train_step", actor, TRAIN_STEP, "seq logp rewards ref_logp values", ""),
        ("critic_train_step", critic, TRAIN_STEP, "seq logp rewards ref_logp values", ""),
    ]
    return _calls(rows, cell.mini_batches)


def remax(cell: Cell) -> Sequence[ModelFunctionCallDef]:
    """Without a critic, with a second, greedy generation that is scored, too."""
    actor, critic = cell.actor, cell.critic + "-critic"
    rows = [
        ("actor_generate", actor, GENERATE, "prompts", "seq logp"),
        ("actor_generate_greedy", actor, GENERATE, "prompts", "greedy"),
        ("reward_inference", critic, INFERENCE, "seq", "rewards"),
        ("reward_inference_greedy", critic, INFERENCE, "greedy", "baseline"),
        ("reference_inference", actor, INFERENCE, "seq", "ref_logp"),
        ("actor_train_step", actor, TRAIN_STEP, "seq logp rewards baseline ref_logp", ""),
    ]
    return _calls(rows, cell.mini_batches)


def safe_rlhf(cell: Cell) -> Sequence[ModelFunctionCallDef]:
    """PPO with a cost model as large as the reward model; the loss on pretraining data is left out."""
    critic = cell.critic + "-critic"
    cost = ("cost_inference", critic, INFERENCE, "seq", "costs")
    return [*ppo(cell), *_calls([cost], 1)]


ALGORITHMS: dict[str, Callable[[Cell], Sequence[ModelFunctionCallDef]]] = {
    "PPO": ppo,
    "ReMax": remax,
    "Safe-RLHF": safe_rlhf,
}
