"""OSDP within the plan search: where the states of a training do not fit, parameters and gradients of some operators
are sharded over dp and gathered for each use.

Only with the engine feature `sharded_operators`, which this project's engine has not: such plans are what-ifs.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from realhf.base.errors import UserError
from realhf.geometry.layout import held_layers
from realhf.geometry.parameters import decoder_parameters
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.operator_modes import Links, Mode, Operator, OsdpPlan, OsdpProblem, sliced, solve
from realhf.planning.model.operators import operator_of
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.sizes import model_sizes

SLICES = 4  # of large operators, if that is better than whole ones: then less is gathered at a time
SHARED_PART = 0.5  # of a device, for the states of a call that is not alone


@dataclass(frozen=True)
class Sharding:
    """The modes of the operators on the fullest device of a train call, and what they change. `plan` is of one
    mini-batch, its links those of `added_links`; `links` are the group's own."""

    plan: OsdpPlan
    links: Links

    @property
    def regather_s(self) -> float:
        """Gathers all that is sharded once more: for a copy that another call of the model takes."""
        return self.links.pass_s(self.sharded_bytes)

    @cached_property
    def gather_bytes(self) -> int:
        """Whole parameters of the largest sharded slice, while it is in use."""
        return max((self.plan.problem.gather_bytes(op) for op, _ in self.sharded), default=0)

    @property
    def sharded_bytes(self) -> float:
        """Of the parameters before they were sharded."""
        return sum(op.parameter_bytes * count / op.slices for op, count in self.sharded)

    @property
    def static_bytes(self) -> int:
        """Parameters, gradients and optimizer states that stay on the device."""
        return self.plan.memory_bytes - self.gather_bytes

    def __str__(self) -> str:
        operators = self.plan.problem.operators
        part = self.sharded_bytes / sum(op.parameter_bytes for op in operators)
        return (
            f"{len(self.sharded)} of {len(operators)} operators of a device sharded over "
            f"dp={self.links.num_devices}, {part:.0%} of its parameters"
        )

    @cached_property
    def sharded(self) -> list[tuple[Operator, int]]:
        """Operators of which something is sharded, and how many slices of each."""
        return [(op, count) for op, mode, count in self.plan.counts() if mode == "sharded" and count]


def rooms(dynamic_bytes: float, memory_bytes: float, *, shares_devices: bool) -> list[int]:
    """Bytes that states may take, in the order in which they are tried: the first that holds a choice is taken.

    A call that is alone (supervised training) gets what its activations leave, since sharding more only costs time.
    Where other calls share the devices, states that fill them would rule out every such plan for a few seconds less:
    they get half of a device at most, and only if no choice is that small all that is left. What the others need is not
    known before a plan is chosen, and every further level would multiply the options.
    """
    left = memory_bytes - dynamic_bytes
    levels = [min(SHARED_PART * memory_bytes, left), left] if shares_devices else [left]
    return [int(level) for level in dict.fromkeys(levels) if level >= 1]


def added_links(work: RankWork, link: tuple[float, float]) -> Links:
    """Links by which one pass of an operator takes as long as sharding adds to a mini-batch of it. `link`: (latency,
    bandwidth) of the group's ring.

    Sharded has one pass more than ZeRO-1 or replication (OSDP: ZDP to DP is 3 to 2). It stands for what this engine
    would do: parameters gathered forward and backward (and for recomputation) and gradients reduce-scattered for every
    micro-batch, in place of the bytes of one all-reduce a mini-batch, whose latency stays.
    """
    latency_s, bandwidth = link
    item, features = work.placed.item, work.placed.features
    gradient = features.gradient_bytes(work.placed.dtype)
    gathers = 3 if features.recomputation == "full" else 2
    before = (item if features.zero1 else gradient) + gradient
    added = work.micro_batches * (gathers * item + gradient) - before
    return Links(
        num_devices=work.placed.strategy.dp,
        latency_s=work.micro_batches * (gathers + 1) * latency_s,
        seconds_per_byte=added / item / bandwidth,
    )


def shard(work: RankWork, memory_bytes: int, link: tuple[float, float], *, shares_devices: bool) -> Sharding | None:
    """What a training shards over dp to fit into `memory_bytes`; None if it fits as it is, or no choice of modes fits.
    `link`: of the ring of a data-parallel group (`Hardware.link`)."""
    dynamic = work.dynamic_bytes()
    if work.placed.static_bytes(trained=True) + dynamic <= memory_bytes:
        return None
    links = added_links(work, link)
    for room in rooms(dynamic, memory_bytes, shares_devices=shares_devices):
        plan = choose_modes(work.placed, links, room)
        if plan is not None:
            return Sharding(plan, replace(links, latency_s=link[0], seconds_per_byte=1 / link[1]))
    return None


@lru_cache(maxsize=4096)
def choose_modes(placed: PlacedModel, links: Links, room_bytes: int) -> OsdpPlan | None:
    """The modes, ZeRO-1 (replicated without it) or sharded, that add the least time with states in `room_bytes`: exact,
    of the pipeline stage that holds the most; None if nothing fits."""
    modes: tuple[Mode, ...] = ("zero1" if placed.features.zero1 else "replicated", "sharded")
    problem = OsdpProblem(operators=stage_operators(placed), links=links, memory_bytes=room_bytes, modes=modes)
    plans = []
    for slicing in (problem, sliced(problem, SLICES)):
        with contextlib.suppress(UserError):  # nothing fits
            plans.append(solve([slicing], range(1, 2)))
    # Not by their communication: what is not sharded is one message in this engine, however it is sliced.
    return min(plans, key=lambda plan: plan.added_s, default=None)


@lru_cache(maxsize=256)
def stage_operators(placed: PlacedModel) -> tuple[Operator, ...]:
    """What a device holds of each operator, on the pipeline stage that holds the most (`ModelSizes.largest`)."""
    model, tp, pp = placed.model, placed.strategy.tp, placed.strategy.pp
    sizes = model_sizes(model)
    stage = max((0, pp - 1), key=lambda number: sizes.on_stage(tp, pp, number))
    layers = held_layers(model.num_layers, placed.strategy, stage)
    elements: Counter[tuple[str, str]] = Counter()
    for spec in decoder_parameters(model):
        if spec.is_on_stage(layers, stage, pp):
            elements[operator_of(spec, model)] += spec.size if spec.shard_dim is None else spec.size // tp
    return tuple(
        Operator(
            name=name,
            kind=kind,
            parameter_bytes=size * placed.item,
            gradient_bytes=size * placed.features.gradient_bytes(placed.dtype),
            optimizer_bytes=size * placed.features.state_bytes(placed.dtype),
        )
        for (name, kind), size in elements.items()
    )
