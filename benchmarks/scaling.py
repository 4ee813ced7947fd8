"""Simulated scaling of the published models: tokens/s and where device time goes, from 8 to 1,024 H100s.

Strong scaling keeps the batch, weak scaling the samples of a device, the study of contexts the tokens of a step.
Every point is searched anew, and beside it stands the heuristic plan. `benchmarks/scaling_plots.py` draws the result.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from lib.breakdown import device_time_shares
from lib.common import case, finish, parse_arguments

from realhf.architecture.model import model_type
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.cluster import Cluster, device_meshes
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.timings import Costs, load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import Option, legal_strategies, micro_batch_counts
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import Found, SearchRequest, native_problem, search_problem
from realhf.planning.problem.simulation import simulate
from realhf.planning.problem.tables import Problem
from realhf.planning.request import SearchBudget
from realhf.planning.task import PlanningTask

HARDWARE, DTYPE, DEVICES_PER_NODE = "h100", "bfloat16", 8
# Of the published measurement (tests/data/published_step_times.yaml), generation with CUDA graphs.
FEATURES = EngineFeatures(
    zero1=True,
    fp32_gradients=False,
    recomputation="full",
    cuda_graphs=True,
    full_logits=False,
    response_logits=False,
    gathers_drawn_logits=False,
    logits_chunk_bytes=None,
    sequence_parallel=True,
    blocking_sends=True,
).on(load_hardware(HARDWARE))
MODELS = {"7B": ("llama7b", "llama7b-critic"), "70B + 7B": ("llama70b", "llama7b-critic")}  # actor, critic
MINI_BATCHES, STEPS_IN_FLIGHT = 8, 2
PROMPT_TOKENS, CONTEXT = 1024, 2048
STRONG_BATCH, WEAK_BATCH = 4096, 32  # samples in all; samples a device: both published measurements have 32
CONTEXTS, CONTEXT_DEVICES = (2048, 4096, 8192), 128
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
PARTS = 16  # the smallest device mesh is this part of the cluster
EVALUATIONS, QUICK_EVALUATIONS, SEED = 200_000, 5_000, 0
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Point:
    """One simulated run."""

    study: str
    models: str
    num_devices: int
    batch_size: int
    context: int
    evaluations: int

    @property
    def name(self) -> str:
        what = f"context {self.context}" if self.study == "context" else f"{self.num_devices} devices"
        return f"{self.study}, {self.models}, {what}"

    @property
    def workload(self) -> Workload:
        # As measured: nothing of generation is kept while models are trained.
        return Workload(prompt_tokens=PROMPT_TOKENS, new_tokens=self.context - PROMPT_TOKENS, decode_graphs="call")

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            num_nodes=self.num_devices // DEVICES_PER_NODE,
            devices_per_node=DEVICES_PER_NODE,
            hardware=load_hardware(HARDWARE),
        )


@dataclass(frozen=True, kw_only=True)
class _Interface(InterfaceConfig):
    implementation: ClassVar[str] = "none:none"


def points(quick: bool) -> Iterator[Point]:
    """All of the study, or a few small ones of each kind."""
    devices = (8, 16) if quick else DEVICES
    evaluations = QUICK_EVALUATIONS if quick else EVALUATIONS
    for models in list(MODELS)[: 1 if quick else None]:
        for n in devices:
            for study, batch in (("strong", STRONG_BATCH), ("weak", WEAK_BATCH * n)):
                yield Point(
                    study=study, models=models, num_devices=n, batch_size=batch, context=CONTEXT,
                    evaluations=evaluations,
                )  # fmt: skip
        n = devices[-1] if quick else CONTEXT_DEVICES
        for context in CONTEXTS:
            batch = WEAK_BATCH * n * CONTEXTS[0] // context
            yield Point(
                study="context", models=models, num_devices=n, batch_size=batch, context=context,
                evaluations=evaluations,
            )  # fmt: skip


def ppo(actor: str, critic: str) -> DataflowGraph:
    rollouts = ["seq", "logp", "rewards", "ref_logp", "values"]
    rows = [
        ("actor", actor, GENERATE, ["prompts"], ["seq", "logp"]),
        ("reward", critic, INFERENCE, ["seq"], ["rewards"]),
        ("ref", actor, INFERENCE, ["seq"], ["ref_logp"]),
        ("critic", critic, INFERENCE, ["seq"], ["values"]),
        ("actor", actor, TRAIN_STEP, rollouts, []),
        ("critic", critic, TRAIN_STEP, rollouts, []),
    ]
    calls = [
        ModelFunctionCallDef(
            model_name=name,
            model_type=model_type(model),
            interface_type=kind,
            interface_impl=_Interface(),
            input_data=reads,
            output_data=writes,
            mini_batches=MINI_BATCHES if kind is TRAIN_STEP else 1,
        )
        for name, model, kind, reads, writes in rows
    ]
    return DataflowGraph(calls, ["prompts"])


class Study:
    """The planning problem of a point."""

    def __init__(self, point: Point):
        self.point, self.cluster, self.workload = point, point.cluster, point.workload
        self.graph = ppo(*MODELS[point.models])
        self.costs: Costs = load_costs(
            self.graph.models, dtype=DTYPE, hardware=load_hardware(HARDWARE), features=FEATURES
        )
        self.task = PlanningTask(
            graph=self.graph, batch_size=point.batch_size, workload=self.workload, cluster=self.cluster,
            costs=self.costs, max_steps_in_flight=STEPS_IN_FLIGHT, dtype=DTYPE,
        )  # fmt: skip

    def options(self, call: ModelFunctionCallDef, meshes: Iterable[DeviceMesh]) -> list[Option]:
        """Of every mesh and strategy, the numbers of micro-batches that fit and of which none is better in all."""
        by_size: dict[int, list[tuple[ParallelStrategy, int]]] = {}
        result = []
        for mesh in meshes:
            if mesh.size not in by_size:
                strategies = legal_strategies(call.config, mesh.size)
                by_size[mesh.size] = [(s, count) for s in strategies for count in self._useful_counts(call, s, mesh)]
            result += [Option(Layout(mesh, strategy), count) for strategy, count in by_size[mesh.size]]
        return result

    def _useful_counts(self, call: ModelFunctionCallDef, strategy: ParallelStrategy, mesh: DeviceMesh) -> list[int]:
        model = self.task.call_models[call.name]
        static, _ = self.bytes_of(call, Option(Layout(mesh, strategy), 1))
        if static > self.cluster.device_memory_bytes:
            return []
        counts = micro_batch_counts(strategy, model.samples)
        needs = {count: self.bytes_of(call, Option(Layout(mesh, strategy), count))[1] for count in counts}
        fitting = [count for count in counts if static + needs[count] <= self.cluster.device_memory_bytes]
        rows = sorted((needs[count], model.seconds(strategy, count), count) for count in fitting)
        return [count for i, (_, seconds, count) in enumerate(rows) if all(seconds < row[1] for row in rows[:i])]

    def bytes_of(self, call: ModelFunctionCallDef, option: Option) -> tuple[float, float]:
        """(static, dynamic) bytes on a device; a model lives with its training, or with its only call."""
        model, at_home = self.task.call_models[call.name], self.task.homes[call.name] == call.name
        static = float(model.static_bytes(option.layout.strategy)) if at_home else 0.0
        return static, model.work(*option.shape).dynamic_bytes()

    def searched(self) -> dict[str, Any]:
        meshes = [mesh for mesh in device_meshes(self.cluster) if self._is_offered(mesh)]
        return self._best({call.name: self.options(call, meshes) for call in self.graph.calls.values()})

    def heuristic(self) -> dict[str, Any]:
        """All calls on all devices with one strategy: tp over a node, and pp, a power of two, of the fastest step."""
        everything = [DeviceMesh(0, self.cluster.num_devices)]
        options = {call.name: self.options(call, everything) for call in self.graph.calls.values()}
        plans = []
        pp = 1
        while pp <= self.cluster.num_nodes:
            strategy = ParallelStrategy(self.cluster.num_nodes // pp, DEVICES_PER_NODE, pp)
            same = {name: [o for o in rows if o.layout.strategy == strategy] for name, rows in options.items()}
            plans.append(self._best(same))
            pp *= 2
        return min(plans, key=lambda plan: plan.get("step_s", math.inf))

    def _is_offered(self, mesh: DeviceMesh) -> bool:
        """Aligned powers of two of at least 1 / PARTS of the cluster: the same 31 meshes at every size."""
        aligned = mesh.size & (mesh.size - 1) == 0 and mesh.first % mesh.size == 0
        return aligned and mesh.size * PARTS >= self.cluster.num_devices

    def _best(self, options: Mapping[str, Sequence[Option]]) -> dict[str, Any]:
        """The best plan found among the options, or why there is none."""
        lacking = [name for name, rows in options.items() if not rows]
        if lacking:
            return {"infeasible": f"{lacking[0]} does not fit by itself"}
        problem = build_problem(self.task, options)
        native = native_problem(problem)
        budget = SearchBudget(evaluations=self.point.evaluations)
        found = search_problem(native, SearchRequest(budget=budget, seed=SEED))
        if not found.feasible:
            smallest = native.evaluate(native.smallest_plan(SEED))["peak_bytes"]
            why = f"the smallest plan found needs {smallest / GIB:.1f} GiB a device"
            return {"infeasible": why, "proven": found.proven}
        return self._described(problem, options, found)

    def _described(self, problem: Problem, options: Mapping[str, Sequence[Option]], found: Found) -> dict[str, Any]:
        events = simulate(problem, found.choice, problem.steps)
        shares = device_time_shares(problem, found.choice, events)
        chosen = {name: rows[index] for (name, rows), index in zip(options.items(), found.choice, strict=True)}
        return {
            "step_s": round(found.step_s, 3),
            "tokens_per_s": round(self.point.batch_size * self.point.context / found.step_s, 1),
            "peak_gib": round(found.peak_bytes / GIB, 1),
            "gap": round(1 - found.lower_bound_s / found.step_s, 4),
            "evaluations": found.evaluations,
            "num_options": sum(len(rows) for rows in options.values()),
            "shares": {name: round(share, 4) for name, share in shares.items()},
            "plan": {name: _words(option) for name, option in chosen.items()},
        }


def _words(option: Option) -> str:
    mesh = option.layout.mesh
    return f"{mesh.first}-{mesh.devices[-1]}: {option.layout.strategy}, {option.micro_batches} micro-batches"


def measure(point: Point) -> dict[str, Any]:
    """A row of the result: tokens/s of the searched plan beside the heuristic one; 0 for none that fits."""
    start = time.perf_counter()
    study = Study(point)
    searched, heuristic = study.searched(), study.heuristic()
    value, baseline = (plan.get("tokens_per_s", 0.0) for plan in (searched, heuristic))
    row = case(
        point.name if value else f"{point.name}: does not fit",
        value,
        "tokens/s",
        baseline=baseline,
        ratio=value / baseline if baseline else 0.0,
        target=baseline,
        holds=value >= baseline,
    )
    return {
        **row,
        "study": point.study,
        "models": point.models,
        "devices": point.num_devices,
        "batch_size": point.batch_size,
        "context": point.context,
        "searched": searched,
        "heuristic": heuristic,
        "planning_s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    arguments = parse_arguments(__doc__)
    with ProcessPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(measure, points(arguments.quick)))
    finish("scaling", results, arguments.json)


if __name__ == "__main__":
    main()
