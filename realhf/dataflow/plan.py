"""The execution plan: where and how every call runs, and in which order. People can edit its file."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from realhf.architecture.compute import DataParallel, ModeRules, Recomputation
from realhf.architecture.decoding import GraphLife
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.base.files import decode_json, read_file, write_atomically
from realhf.base.numbers import CACHE_TOKENS, DEVICES, SECONDS, STALENESS, STEPS_IN_FLIGHT, check_fields, check_range
from realhf.dataflow.copies import with_copies
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.offload import check_offload
from realhf.dataflow.protocols import THREE_D_PROTO
from realhf.dataflow.rationale import Rationale
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy, chunk_layers
from realhf.geometry.micro_dp import contains, contains_home, grouped_like
from realhf.geometry.reproducible import gradient_parts, unordered, unordered_training
from realhf.geometry.shards import shard_boxes

FORMAT = "execution-plan/1"
DIGEST_LENGTH = 12  # characters of a plan's digest that people see


class CallCompute(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, cache_hash=True
):
    """How a call computes, where the plan decides; None: as the setup of its model says (`realhf.api.computation`).

    recomputation, recomputed_layers, sequence_parallel, offload_states: of a train_step call; see `Computation`.
    data_parallel, prefetch: of the call that is its model's home, for all of the model's calls.
    decode_graphs, kv_cache_tokens: of a generate call; see `GenerationOptions`.
    in_place: of a call whose copy of the parameters contains the home's on each device: the home's parameters give
        their memory to the copy, and are not there while the rest of it is filled. Where memory allows both, that costs
        time for nothing.
    """

    recomputation: Recomputation | None = None
    recomputed_layers: int | None = None
    sequence_parallel: bool | None = None
    data_parallel: DataParallel | None = None
    prefetch: bool | None = None
    offload_states: bool | None = None
    decode_graphs: GraphLife | None = None
    kv_cache_tokens: int | None = None
    in_place: bool | None = None

    @property
    def chosen(self) -> dict[str, str | int | ModeRules]:
        """The fields that say something, by name."""
        return {field: value for field in self.__struct_fields__ if (value := getattr(self, field)) is not None}

    def __str__(self) -> str:
        """For tables: `full recomputation, fsdp`; empty where nothing is said."""
        return ", ".join(_COMPUTE_TEXT[field](value) for field, value in self.chosen.items())


_COMPUTE_TEXT: dict[str, Callable[[Any], str]] = {
    "recomputation": lambda kind: f"{kind} recomputation" if kind != "off" else "no recomputation",
    "recomputed_layers": lambda number: f"in the first {number} layers of a stage only",
    "sequence_parallel": lambda on: "sequence parallel" if on else "not sequence parallel",
    "data_parallel": lambda way: way if isinstance(way, str) else "modes by operator",
    "prefetch": lambda on: "prefetch" if on else "no prefetch",
    "offload_states": lambda on: "states in host memory" if on else "states on the device",
    "in_place": lambda on: "copy filled in place" if on else "copy filled beside the home",
    "decode_graphs": lambda life: {"kept": "graphs kept", "call": "graphs of a call", "off": "no graphs"}[life],
    "kv_cache_tokens": lambda tokens: f"KV cache of {tokens:,} tokens",
}
AS_SET_UP = CallCompute()
_OF_HOMES = ("data_parallel", "prefetch")
_OF_GENERATIONS = ("decode_graphs", "kv_cache_tokens")


class CallPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how one call runs.

    devices: (first device, number of devices).
    chunks: model chunks of each pipeline stage; above 1 the pipeline is interleaved.
    micro_dp: groups the ranks so that each one's part of the model contains its part in the home (`ParallelStrategy`).
    micro_batches: forward passes into which each data-parallel rank divides its part of a mini-batch.
    compute: how it computes, where the plan decides.
    copy_from: another call of its model, whose copy of the parameters its own comes from (`realhf.dataflow.copies`);
        None: from the model's home.
    predicted_s: the planner's estimate of the call alone, without reallocation and transfer.
    """

    devices: tuple[int, int]
    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    micro_dp: tuple[int, int] = (1, 1)
    micro_batches: int = 1
    compute: CallCompute = AS_SET_UP
    copy_from: str | None = None
    predicted_s: float | None = None

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh(*self.devices)

    @property
    def strategy(self) -> ParallelStrategy:
        return ParallelStrategy(self.dp, self.tp, self.pp, self.chunks, self.micro_dp)

    @property
    def layout(self) -> Layout:
        return Layout(self.mesh, self.strategy)

    @property
    def way_text(self) -> str:
        """Micro-batches and computation, for sentences: `2 micro-batches, full recomputation`."""
        plural = "" if self.micro_batches == 1 else "es"
        parts = [f"{self.micro_batches} micro-batch{plural}", str(self.compute)]
        return ", ".join(part for part in parts if part)

    @property
    def replicas_text(self) -> str:
        """For tables: `4`, or `4 in 2 x 1` for micro data-parallel groups of two."""
        return str(self.dp) if self.micro_dp == (1, 1) else "{} in {} x {}".format(self.dp, *self.micro_dp)

    @property
    def stages_text(self) -> str:
        """For tables: `2`, or `2 x 3` for two stages of three chunks."""
        return str(self.pp) if self.chunks == 1 else f"{self.pp} x {self.chunks}"


class OrderEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of the steady-state order, a call or a model that follows another (`DataflowGraph.follows`): period t
    runs the node of step t - steps_back."""

    call: str
    steps_back: int = 0


class Intervals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The middle 90 % of the planner's draws, in seconds: of a step, and of calls by name; (least, most)."""

    step_s: tuple[float, float]
    call_s: dict[str, tuple[float, float]]


def interval_text(interval: tuple[float, float] | None) -> str:
    """In two digits, for tables: `0.21-0.29`; `-` where there is none."""
    return "-" if interval is None else "-".join(f"{end:.0f}" if end >= 10 else f"{end:.2g}" for end in interval)


def updates_text(staleness: int) -> str:
    """For sentences: `1 update`, `2 updates`."""
    return f"{staleness} update{'' if staleness == 1 else 's'}"


class ExecutionPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of one experiment on one cluster.

    beside: predicted seconds of the calls that run beside the devices. They have no layout of their own
        (`DataflowGraph.place_of`); a plan written by hand may leave them out.
    order: one period of the total order in which the master issues calls, every call once; empty: one step after the
        other.
    offload: models that wait in host memory while no call needs them.
    broadcasts: calls, and nodes of models that follow others, whose parameters come by collectives of process groups;
        all others come by chains of messages (docs/reallocation.md).
    changes: calls whose copies of the parameters keep their memory, and get only what changed since their last move
        (docs/reallocation.md).
    staleness: age in steps of the weights that make rollouts, in an experiment that leaves it to the plan
        (`realhf.api.resolved`).
    intervals: how sure the predictions are; in plans that were predicted.
    models: the architectures that the plan was made for; a plan written by hand may leave them out.
    rationale: why the planner chose it; in the plan of a run.
    """

    num_devices: int
    calls: dict[str, CallPlan]
    beside: dict[str, float] = {}
    devices_per_node: int | None = None
    order: tuple[OrderEntry, ...] = ()
    offload: tuple[str, ...] = ()
    broadcasts: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    staleness: int = 0
    max_steps_in_flight: int = 2
    predicted_step_s: float | None = None
    intervals: Intervals | None = None
    models: dict[str, DecoderConfig] = {}
    format: str = FORMAT
    notes: dict[str, str | int | float | bool] = {}
    rationale: Rationale | None = None

    def of_call(self, graph: DataflowGraph, name: str, batch_size: int) -> CallPlan:
        """Where and how a call of the graph runs, one beside the devices too (`beside_plan`)."""
        if name in self.calls:
            return self.calls[name]
        return beside_plan(self.calls[graph.place_of(name)], batch_size, self.beside.get(name))

    @property
    def copies(self) -> dict[str, str]:
        """By call whose copy of the parameters comes from another call's, that call."""
        return {name: call.copy_from for name, call in self.calls.items() if call.copy_from is not None}

    def takes_over(self, call: str) -> bool:
        """Whether a call's copy is another call's, in the same layout: nothing moves."""
        source = self.copies.get(call)
        return source is not None and self.layout(source) == self.layout(call)

    @property
    def copies_text(self) -> str:
        """For people: `greedy from the copy of rollout`, and so on."""
        return ", ".join(f"{name} from the copy of {source}" for name, source in self.copies.items())

    def layout(self, call: str) -> Layout:
        return self.calls[call].layout

    def home(self, graph: DataflowGraph, model: str) -> str:
        """The call in whose layout a model's parameters live between calls: the one that trains it, else its first."""
        calls = graph.calls_of(model)
        return next((call.name for call in calls if call.trains), calls[0].name)

    def unrolled(self, graph: DataflowGraph, steps: int) -> list[tuple[str, int]]:
        """All (call, step) of a run of `steps` steps in the order in which they are issued."""
        period = self.order or tuple(OrderEntry(call=name) for name in graph.order)
        depth = max(entry.steps_back for entry in period)
        return [
            (entry.call, t - entry.steps_back)
            for t in range(steps + depth)
            for entry in period
            if 0 <= t - entry.steps_back < steps
        ]


def beside_plan(place: CallPlan, batch_size: int, predicted_s: float | None = None) -> CallPlan:
    """How a call beside the devices runs, if it reads what a call with the plan `place` makes: a part of the batch on
    each of that call's devices, on as many of them as divide the batch."""
    first, count = place.devices
    parts = _beside_parts(batch_size, count)
    return CallPlan(devices=(first, parts), dp=parts, predicted_s=predicted_s)


def beside_s(config: InterfaceConfig, batch_size: int, num_devices: int) -> float:
    """Seconds of a call beside the devices where the call whose samples it reads has `num_devices` devices."""
    samples = batch_size // _beside_parts(batch_size, num_devices)
    return config.seconds_per_sample * samples / config.processes_per_worker


def _beside_parts(batch_size: int, num_devices: int) -> int:
    return max(parts for parts in range(1, num_devices + 1) if batch_size % parts == 0)


def plan_digest(plan: ExecutionPlan) -> str:
    """SHA-256, in hexadecimal, of what the plan executes: predictions, notes and reasons do not count."""
    calls = {name: msgspec.structs.replace(call, predicted_s=None) for name, call in plan.calls.items()}
    carried_out = msgspec.structs.replace(plan, calls=calls, predicted_step_s=None, models={}, notes={}, rationale=None)
    fields = msgspec.to_builtins(carried_out, order="deterministic")
    del fields["beside"], fields["intervals"]  # predictions
    if not plan.broadcasts:  # as in checkpoints of runs whose plans know none
        del fields["broadcasts"]
    if not plan.changes:  # as in checkpoints of runs whose plans know none
        del fields["changes"]
    if not plan.staleness:  # as in checkpoints of runs whose plans know none
        del fields["staleness"]
    for call in fields["calls"].values():
        if not call["compute"]:  # as in checkpoints of runs whose plans know no such choices
            del call["compute"]
        if call["copy_from"] is None:
            del call["copy_from"]
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()


def digest_in(path: Path) -> str | None:
    """The digest of the plan in a file, None where it cannot be read."""
    with contextlib.suppress(UserError):
        return plan_digest(load_plan(path))
    return None


def load_plan(path: str | Path) -> ExecutionPlan:
    """Reads a plan file.

    Raises:
        UserError: the file is missing, is not JSON, or holds an unknown or ill-typed field.
    """
    remedy = "write one with `realhf plan`"
    plan = read_file(path, lambda data: decode_json(data, ExecutionPlan), "plan", remedy)
    if plan.format != FORMAT:
        raise UserError(f"{path}: format {plan.format!r} is not {FORMAT!r}; make the plan again with `realhf plan`")
    try:
        _check_numbers(plan)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return plan


_CALL_RANGES = {
    **dict.fromkeys(("dp", "tp", "pp", "chunks", "micro_dp"), DEVICES),
    "devices": (0, DEVICES[1]),
    "micro_batches": (1, 2**20),
    "predicted_s": SECONDS,
}


def _check_numbers(plan: ExecutionPlan) -> None:
    """Raises UserError for a number out of range, before anything is computed with it."""
    ranges = {"num_devices": DEVICES, "devices_per_node": DEVICES, "max_steps_in_flight": STEPS_IN_FLIGHT}
    ranges["staleness"] = STALENESS
    check_fields("", plan, {**ranges, "predicted_step_s": SECONDS})
    for name, call in plan.calls.items():
        check_fields(f"calls.{name}.", call, _CALL_RANGES)
        check_fields(f"calls.{name}.compute.", call.compute, {"kv_cache_tokens": CACHE_TOKENS})
    for name, seconds in plan.beside.items():
        check_range(f"beside.{name}", seconds, *SECONDS)
    for entry in plan.order:
        check_range(f"order: steps_back of {entry.call}", entry.steps_back, 0, STEPS_IN_FLIGHT[1])


def save_plan(plan: ExecutionPlan, path: str | Path) -> None:
    """Writes a plan file atomically."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def check_plan(plan: ExecutionPlan, graph: DataflowGraph, batch_size: int) -> None:
    """Raises UserError when `plan` cannot run `graph` with `batch_size` samples a step."""
    if set(plan.calls) != set(graph.model_calls):
        needed = _names(graph.model_calls)
        raise UserError(
            f"the plan is for other calls: it has {_names(plan.calls)}, the experiment has {needed}; make a "
            "plan for this experiment with `realhf plan`"
        )
    if not set(plan.beside) <= set(graph.beside):
        raise UserError(
            f"the plan has calls beside the devices, {_names(plan.beside)}, that the experiment does not have; make a "
            "plan for this experiment with `realhf plan`"
        )
    for model, config in graph.models.items():
        if plan.models.get(model, config) != config:
            raise UserError(
                f"the plan is for another model: its {model!r} is {plan.models[model]}, the experiment's is {config}; "
                "make a plan for this experiment with `realhf plan`"
            )
    graph.rows_per_step(batch_size)
    for name, call in plan.calls.items():
        definition = graph.calls[name]
        first, count = call.devices
        if call.strategy.size != count:
            raise UserError(f"{name}: {call.strategy} needs {call.strategy.size} devices but devices={[first, count]}")
        if first + count > plan.num_devices:
            raise UserError(
                f"{name}: devices={[first, count]} do not lie within the {plan.num_devices} devices of the plan"
            )
        check_strategy(name, definition.config, call.strategy)
        if call.chunks > 1 and definition.generates:
            raise UserError(
                f"{name}: chunks={call.chunks} is for train_step and inference calls, and this one generates; leave "
                "chunks out here: the parameters are reallocated between layouts with chunks and without"
            )
        per_mini_batch = definition.mini_batch_size(batch_size)
        definition.check_protocol(call.layout)
        if definition.reproducible and definition.uses_model:
            _check_reproducible(name, definition, call, per_mini_batch)
        parts = definition.parts(call.layout)
        if per_mini_batch % (parts * call.micro_batches):
            what = "dp" if definition.protocol is THREE_D_PROTO else f"parts of {definition.protocol.name}"
            raise UserError(
                f"{name}: {what}={parts} x micro_batches={call.micro_batches} does not divide the mini-batch of "
                f"{per_mini_batch} samples; choose a product that divides {per_mini_batch}"
            )
    check_confined(plan, graph)
    _check_homes(plan, graph)
    _check_compute(plan, graph)
    _check_micro_dp(plan, graph)
    if (
        problem := problem_of_copies(plan, graph)
        or problem_of_order(plan, graph)
        or _problem_of_broadcasts(plan, graph)
        or _problem_of_changes(plan, graph)
    ):
        raise UserError(problem)
    check_offload(plan.offload, graph)


def _check_reproducible(name: str, definition: ModelFunctionCallDef, call: CallPlan, per_mini_batch: int) -> None:
    """Raises UserError for a layout under which the call's results would have other bits than under others."""
    problem = unordered(definition.config, call.strategy)
    if definition.trains:
        problem = problem or unordered_training(call.dp, call.micro_batches, gradient_parts(per_mini_batch))
    if problem:
        raise UserError(f"{name} under reproducible='layout': {problem}")


def check_confined(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Raises UserError for a call on devices beyond the pool of its model."""
    for name, call in plan.calls.items():
        model = graph.calls[name].model_name
        if (pool := graph.pools.get(model)) and call.mesh not in pool:
            raise UserError(
                f"{name}: devices={list(call.devices)} are not all of {pool}, to which model {model!r} is confined; "
                "choose devices of the pool, or change it"
            )


def problem_of_copies(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    """Why a call cannot take its copy of the parameters from where the plan says; empty where all can."""
    copies = plan.copies
    for name, source in copies.items():
        says, model = f"{name}: copy_from={source!r}", graph.model_calls[name].model_name
        calls = [call.name for call in graph.calls_of(model)]
        home = plan.layout(plan.home(graph, model))
        if source not in calls or source == name:
            copied = [call for call in calls if call != name and plan.layout(call) != home]
            remedy = f"choose from {', '.join(copied)}, or leave it out" if copied else "leave it out"
            return (
                f"{says} is no other call of its model {model!r} with a copy; {remedy}: the copy then comes from the "
                "model's home"
            )
        if plan.layout(name) == home:
            return f"{says}, but its layout is that of its model's home and needs no copy; leave it out"
        if plan.layout(source) == home:
            return f"{says}, which has no copy: it runs in the home of model {model!r}; leave it out"
        if root := copies.get(source):
            return f"{says}, whose own copy is from {root}; give copy_from={root!r} here, too"
        if model in plan.offload:
            return (
                f"{says}, but model {model!r} waits in host memory, from where all its copies come; leave copy_from "
                "out, or take the model out of offload"
            )
        if _versions(graph, name) != _versions(graph, source):
            return f"{says}, which uses another version of the parameters; leave it out"
        if graph.order.index(source) > graph.order.index(name):
            return f"{says}, which runs after it; leave it out, or give {source} copy_from={name!r}"
        for other in calls:
            if plan.layout(other) == plan.layout(source) and other != source and copies.get(other) != source:
                return (
                    f"{says}, whose copy is kept meanwhile, but {other} has the same layout and makes a copy of its "
                    f"own; give {other} copy_from={source!r} too, or another layout"
                )
    return ""


def moves_of(plan: ExecutionPlan, graph: DataflowGraph) -> list[str]:
    """The calls whose parameters come from another layout, and the nodes of models that follow others."""
    homes = {name: plan.layout(plan.home(graph, call.model_name)) for name, call in graph.model_calls.items()}
    away = [name for name, home in homes.items() if plan.layout(name) != home and not plan.takes_over(name)]
    return [*away, *graph.follows]


def _problem_of_broadcasts(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    moves = moves_of(plan, graph)
    if others := [name for name in plan.broadcasts if name not in moves]:
        which = f"choose from {', '.join(moves)}, or leave it out" if moves else "leave it out"
        return f"broadcasts: {others[0]!r} is no call or model whose parameters come from another layout; {which}"
    return ""


def keeping(plan: ExecutionPlan, graph: DataflowGraph) -> list[str]:
    """The calls whose copies may keep their memory, to get only what changed: they come from home, beside it, and serve
    no others."""
    copies, away = plan.copies, [name for name in moves_of(plan, graph) if name in graph.model_calls]
    of_others = {*copies, *copies.values(), *(name for name, call in plan.calls.items() if call.compute.in_place)}
    shared = {(graph.model_calls[name].model_name, plan.layout(name)) for name in of_others}
    return [name for name in away if (graph.model_calls[name].model_name, plan.layout(name)) not in shared]


def _problem_of_changes(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    calls = keeping(plan, graph)
    if others := [name for name in plan.changes if name not in calls]:
        which = f"choose from {', '.join(calls)}, or leave it out" if calls else "leave it out"
        return (
            f"changes: {others[0]!r} is no call that takes its parameters from home, not in place and for itself "
            f"alone; {which}"
        )
    return ""


def _versions(graph: DataflowGraph, name: str) -> set[tuple[str, int]]:
    """The calls that a call must wait for to have its version of the parameters."""
    return {(edge.parent, edge.steps_back) for edge in graph.parents(name) if edge.kind == "version"}


def _check_homes(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """A trained model's gradients and optimizer states stay in one place."""
    for call in graph.model_calls.values():
        home = plan.home(graph, call.model_name)
        if call.trains and plan.layout(call.name) != plan.layout(home):
            raise UserError(
                f"{call.name} is planned as {plan.layout(call.name)} but {home} trains the same model as "
                f"{plan.layout(home)}; give all train_step calls of one model the same devices, dp, tp, pp and chunks"
            )


def _check_compute(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Each call states only the parts of its computation that are its own."""
    for name, call in plan.calls.items():
        definition = graph.model_calls[name]
        home = plan.home(graph, definition.model_name)
        for field, value in call.compute.chosen.items():
            says = f"{name}: compute has {field}={value!r}, which is for"
            if field in _OF_HOMES and name != home and not definition.trains:
                raise UserError(
                    f"{says} the home of model {definition.model_name!r}; leave it out, or say it of {home}"
                )
            if field in _OF_GENERATIONS:
                _check_generation(definition, f"{says} generate calls", field, value)
                continue
            if field == "in_place":
                _check_in_place(plan, name, plan.calls[home], definition.config)
                continue
            if field not in _OF_HOMES and not definition.trains:
                raise UserError(f"{says} train_step calls, and this one trains nothing; leave it out")
        if isinstance(rules := call.compute.data_parallel, tuple):
            _check_modes(name, call.layout, rules, definition.config)
        if (number := call.compute.recomputed_layers) is not None:
            _check_recomputed(name, call, number, definition.config)
        if definition.trains and call.compute != plan.calls[home].compute:
            raise UserError(
                f"{name} is planned with compute={call.compute.chosen} but {home} trains the same model with "
                f"compute={plan.calls[home].compute.chosen}; give all train_step calls of one model the same compute"
            )


def _check_in_place(plan: ExecutionPlan, name: str, home: CallPlan, config: DecoderConfig) -> None:
    """Raises UserError where the home's parameters cannot go into a call's copy before the rest of it comes."""
    call, copies = plan.calls[name], plan.copies
    says = f"{name}: compute has in_place={call.compute.in_place}, which is for"
    if not contains_home(config.num_layers, home.layout, call.layout):
        raise UserError(
            f"{says} copies on the home's devices that contain its part on each; {call.layout} has another part than "
            f"{home.layout}, or is the home: leave it out"
        )
    if name in copies or name in copies.values():
        raise UserError(
            f"{says} copies that come from the home, and are kept for no other call; leave it out, or copy_from"
        )


def _check_modes(name: str, layout: Layout, rules: ModeRules, config: DecoderConfig) -> None:
    try:
        for stage in range(layout.strategy.pp):  # each has other operators
            shard_boxes(config, layout, layout.device(0, 0, stage), rules)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _check_recomputed(name: str, call: CallPlan, number: int, config: DecoderConfig) -> None:
    most = len(chunk_layers(config.num_layers, call.strategy, 0)[0])
    if not 0 <= number <= most:
        raise UserError(
            f"{name}: compute has recomputed_layers={number}, and each stage of this model (each of its chunks) has at "
            f"most {most} layers; choose 0 to {most}, or leave it out for all"
        )
    if call.compute.recomputation in (None, "off"):
        raise UserError(
            f"{name}: compute has recomputed_layers={number} without the kind of recomputation; add "
            'recomputation "selective" or "full", or leave it out'
        )


def _check_generation(definition: ModelFunctionCallDef, says: str, field: str, value: object) -> None:
    fixed = getattr(definition.interface_impl, field, None)
    if not definition.generates:
        raise UserError(f"{says}, and this one generates nothing; leave it out")
    if fixed not in (None, value):
        raise UserError(
            f"{says} that leave it open, and the experiment fixes {field}={fixed!r}; leave it out of the plan, "
            "or out of the experiment"
        )


def _check_micro_dp(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Micro data-parallel groups are those of a home on the same devices."""
    for name, call in plan.calls.items():
        if call.micro_dp == (1, 1):
            continue
        definition = graph.calls[name]
        home_call = plan.home(graph, definition.model_name)
        home, num_layers = plan.layout(home_call), definition.config.num_layers
        if name == home_call:
            raise UserError(f"{name}: micro_dp={list(call.micro_dp)} in the home of its model; leave it out here")
        if call.mesh != home.mesh or not contains(call.layout, home, num_layers):
            fitting = grouped_like(home, call.layout, num_layers)
            remedy = f"set it to {list(fitting.strategy.micro_dp)}" if fitting else "leave it out"
            raise UserError(
                f"{name}: with micro_dp={list(call.micro_dp)}, {call.strategy} does not contain the home's part on "
                f"every device; the home is {home} of {home_call}; {remedy}"
            )


def problem_of_order(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    """Why calls cannot be issued in the plan's order; empty where they can."""
    if not plan.order:
        return ""
    place = {entry.call: (entry.steps_back, i) for i, entry in enumerate(plan.order)}
    if sorted(entry.call for entry in plan.order) != sorted(graph.nodes):
        return f"order must name every call once; the calls are {_names(graph.nodes)}"
    for entry in plan.order:
        if not 0 <= entry.steps_back < plan.max_steps_in_flight:
            return (
                f"order: steps_back={entry.steps_back} of {entry.call} must be from 0 to "
                f"{plan.max_steps_in_flight - 1}, since max_steps_in_flight={plan.max_steps_in_flight}"
            )
    for edge in with_copies(graph, plan.copies).edges:
        parent_back, parent_place = place[edge.parent]
        child_back, child_place = place[edge.child]
        # The parent of step t - edge.steps_back is issued in period t - edge.steps_back + parent_back.
        if (parent_back - edge.steps_back, parent_place) >= (child_back, child_place):
            return (
                f"order: {edge.child} needs the result of {edge.parent} but is scheduled before it; move {edge.child} "
                f"after {edge.parent}"
            )
    return ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
