"""The execution plan: where and how every call runs, and in which order. People can edit its file."""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from realhf.architecture.compute import DataParallel, ModeRules, Recomputation
from realhf.architecture.decoding import GraphLife
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.base.files import decode_json, read_file, write_atomically
from realhf.base.numbers import CACHE_TOKENS, DEVICES, SECONDS, STALENESS, STEPS_IN_FLIGHT, check_fields, check_range
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.rationale import Rationale
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy

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
