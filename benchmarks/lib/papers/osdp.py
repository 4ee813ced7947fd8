"""OSDP: data, tensor, pipeline parallelism and sharding on the paper's hardware, by operators.

The cost of a strategy is that of `realhf.planning.model.osdp.problem` (the paper's alpha-beta-gamma model), with
Megatron-LM's all-reduces (two a layer each way) for tp, and GPipe's bubble with micro-batches of one sample for pp.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lib.papers.rows import Row, side_by_side
from lib.papers.svg import Bars, Lines

from realhf.architecture.compute import Mode
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.geometry.layout import divisors
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import GIB, Hardware
from realhf.planning.model.osdp.decoder import OUTSIDE, decoder_problem
from realhf.planning.model.osdp.problem import (
    Links,
    Operator,
    OsdpPlan,
    OsdpProblem,
    sliced,
    solve,
    uniform_plan,
)

HARDWARE = Path(__file__).parents[2] / "published/hardware"
CLUSTERS = {8: "titan-rtx", 16: "a100-100gb"}
MEMORY_GIB = (8, 16)
PAPER_MODES: tuple[Mode, ...] = ("replicated", "sharded")
VOCABULARY, SEQUENCE, ITEM, HEAD_SIZE = 50304, 512, 4, 64  # fp32
BATCHES = range(1, 257)
TRIED_BATCHES = sorted({m * 2**power for power in range(9) for m in (1, 3) if m * 2**power in BATCHES})
SLICES, FEW_SLICES = (1, 2, 4), (1, 4)  # of data parallelism alone, and as a dimension of 3D
COLUMNS = ("DP", "PP", "TP", "FSDP", "3D", "OSDP-base", "OSDP", "3D+OSDP")
ROUNDING = 1e-6
PURE = ("DP", "PP", "TP", "FSDP")
GRANULARITIES, HIDDEN = (0, 4, 6, 8, 16), (768, 1024, 8192, 12288)

QUICK_MODELS = {"N&D": (((24, 1024),),), "W&S": (((3, 6144),),), "I&C": (((12, 1024), (3, 2048)),)}
# (layers, hidden size) of the parts of each model.
MODELS: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "N&D": (((96, 1024),), ((48, 1536),), ((64, 1536),), ((96, 1536),)),
    "W&S": (((3, 6144),), ((4, 6144),), ((3, 8192),), ((2, 12288),)),
    "I&C": (((24, 1024), (6, 2048)), ((24, 1024), (24, 2048)), ((64, 1024), (6, 4096))),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on `num_devices` devices with `memory_gib` each."""

    family: str
    parts: tuple[tuple[int, int], ...]
    num_devices: int
    memory_gib: int
    recompute: bool = False

    @property
    def model(self) -> str:
        return f"{self.family} " + " + ".join(f"{layers} x {hidden}" for layers, hidden in self.parts)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.num_devices} GPUs, {self.memory_gib} GB"

    @property
    def hardware(self) -> Hardware:
        return load_hardware(str(HARDWARE / f"{CLUSTERS[self.num_devices]}.yaml"))

    @cached_property
    def whole(self) -> OsdpProblem:
        """All operators, in the order of the layers, on one device."""
        given = OsdpProblem(
            operators=(), links=Links(num_devices=1, latency_s=0.0, seconds_per_byte=0.0), modes=PAPER_MODES,
            memory_bytes=self.memory_gib * GIB, recompute=self.recompute,
        )  # fmt: skip
        flops = self.hardware.flops("float32")
        problems = [
            decoder_problem(decoder(*part), given, sequence_length=SEQUENCE, flops=flops, dtype="float32")
            for part in self.parts
        ]
        operators = [
            replace(op, name=f"{i}.{op.name}")
            for i, problem in enumerate(problems)
            for op in problem.operators
            if (op.kind != "embedding" or i == 0) and (op.kind != "head" or i == len(problems) - 1)
        ]
        return replace(
            problems[0],
            operators=tuple(operators),
            extra_bytes_per_sample=max(problem.extra_bytes_per_sample for problem in problems),
        )

    @property
    def parameters(self) -> float:
        return sum(op.parameter_bytes for op in self.whole.operators) / ITEM

    @property
    def num_layers(self) -> int:
        return sum(layers for layers, _ in self.parts)


def decoder(layers: int, hidden: int) -> DecoderConfig:
    heads = hidden // HEAD_SIZE
    return DecoderConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        vocab_size=VOCABULARY, mlp="plain",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage under (dp, tp, pp): its data-parallel problem, and what a batch takes beside that."""

    problem: OsdpProblem
    hidden: tuple[int, ...]  # of its layers
    tp: int
    pp: int
    hardware: Hardware

    def work_s(self, batch: int) -> float:
        """Compute, all-reduces over tp and messages between stages for `batch` samples at once."""
        reduces = 6 if self.problem.recompute else 4
        per_node, size_bytes = self.hardware.devices_per_node, batch * SEQUENCE * ITEM
        crosses = self.tp > per_node
        tensor_s = sum(
            reduces * self.hardware.all_reduce_s(hidden * size_bytes, self.tp, crosses_nodes=crosses, per_node=per_node)
            for hidden in self.hidden
        )
        messages_s = 0.0
        if self.pp > 1:
            between = self.problem.links.num_devices * self.tp * self.pp > self.hardware.devices_per_node
            messages_s = 2 * self.hardware.send_s(self.hidden[0] * size_bytes, crosses_nodes=between)
        return batch * self.problem.seconds_per_sample + tensor_s + messages_s


def stages(setting: Setting, dp: int, tp: int, pp: int) -> list[Stage]:
    """Equal numbers of layers; data-parallel ranks are `tp` apart; the GPUs of a server share its network."""
    hardware = setting.hardware
    per_node = max(hardware.devices_per_node // tp, 1)
    latency_s, bandwidth = hardware.link(dp * tp > hardware.devices_per_node, per_node)
    links = Links(num_devices=dp, latency_s=latency_s, seconds_per_byte=1 / bandwidth)
    hidden = [size for layers, size in setting.parts for _ in range(layers)]
    bounds = [stage * len(hidden) // pp for stage in range(pp + 1)]
    found: list[list[Operator]] = [[] for _ in range(pp)]
    layer_of: dict[str, int] = {}
    for op in setting.whole.operators:
        if op.kind in OUTSIDE:
            layer = 0 if op.kind == "embedding" else len(hidden) - 1
        else:
            layer = layer_of.setdefault(op.name.rpartition(".")[0], len(layer_of))
        found[bisect_right(bounds, layer) - 1].append(_divided(op, hidden[layer], tp))
    return [
        Stage(
            problem=replace(setting.whole, operators=tuple(operators), links=links),
            hidden=tuple(hidden[bounds[s] : bounds[s + 1]]), tp=tp, pp=pp, hardware=hardware,
        )
        for s, operators in enumerate(found)
    ]  # fmt: skip


def _divided(op: Operator, hidden: int, tp: int) -> Operator:
    """A tensor-parallel rank's part; what a norm keeps, the hidden states before and behind it, is whole on each."""
    whole = min(2 * SEQUENCE * hidden * ITEM, op.activation_bytes) if op.kind in ("q", "up") else 0
    return replace(
        op,
        parameter_bytes=op.parameter_bytes // tp,
        gradient_bytes=op.gradient_bytes // tp,
        optimizer_bytes=op.optimizer_bytes // tp,
        activation_bytes=whole + (op.activation_bytes - whole) // tp,
        compute_s=op.compute_s / tp,
    )


@dataclass(frozen=True, kw_only=True)
class Best:
    """Samples a second of all devices; `plan` of the first stage."""

    samples_per_s: float
    plan: OsdpPlan


def rate(every: Sequence[Stage], plans: Sequence[OsdpPlan], batch: int) -> float:
    """Samples a second with these plans of one batch: without pp all at once, else GPipe with samples one by one."""
    dp, pp = every[0].problem.links.num_devices, every[0].pp
    work_s = every[0].work_s(batch) if pp == 1 else (batch + pp - 1) * max(stage.work_s(1) for stage in every)
    return dp * batch / (work_s + max(plan.communication_s for plan in plans))


def uniform(setting: Setting, mode: Mode, dp: int, tp: int, pp: int) -> Best | None:
    """All operators in one mode, with the largest batch that fits on every stage; None if none does."""
    every = stages(setting, dp, tp, pp)
    plans = [uniform_plan(stage.problem, mode, BATCHES) for stage in every]
    fitting = [plan for plan in plans if plan]
    if len(fitting) < len(plans):
        return None
    batch = min(plan.batch for plan in fitting)
    first = replace(fitting[0], batch=batch)
    return Best(samples_per_s=rate(every, fitting, batch), plan=first)


def chosen(setting: Setting, dp: int, tp: int, pp: int, slices: Sequence[int] = SLICES) -> Best | None:
    """The best modes and batch: exact for data parallelism alone, else of `TRIED_BATCHES` and the largest batches that
    one mode for all operators allows."""
    every, batches = stages(setting, dp, tp, pp), [BATCHES]
    if tp * pp > 1:
        alike = [best.plan.batch for mode in PAPER_MODES if (best := uniform(setting, mode, dp, tp, pp))]
        batches = [range(batch, batch + 1) for batch in sorted({*TRIED_BATCHES, *alike})]
    best: Best | None = None
    for each in batches:
        try:
            plans = [solve([sliced(stage.problem, s) for s in slices], each) for stage in every]
        except UserError:  # nor does a larger batch fit
            break
        found = Best(samples_per_s=rate(every, plans, plans[0].batch), plan=plans[0])
        best = found if best is None or found.samples_per_s > best.samples_per_s else best
    return best


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The strategies of a setting by name; None: out of memory, or not applicable."""

    best: Mapping[str, Best | None]

    def gain(self, one: str, other: str) -> float | None:
        """By what percentage the throughput of `one` is higher; None where one of them does not fit."""
        ours, theirs = self.best.get(one), self.best.get(other)
        return 100 * (ours.samples_per_s / theirs.samples_per_s - 1) if ours and theirs else None


def run(setting: Setting) -> Columns:
    """With recomputation FSDP and OSDP alone, as in the paper's Figure 9."""
    n = setting.num_devices
    best: dict[str, Best | None] = {"FSDP": uniform(setting, "sharded", n, 1, 1), "OSDP": chosen(setting, n, 1, 1)}
    if setting.recompute:
        return Columns(best=best)
    strategies = [(n // tp // pp, tp, pp) for tp in divisors(n) for pp in divisors(n // tp) if pp <= setting.num_layers]
    best |= {
        "DP": uniform(setting, "replicated", n, 1, 1),
        "TP": uniform(setting, "replicated", 1, n, 1),
        "PP": uniform(setting, "replicated", 1, 1, n) if n <= setting.num_layers else None,
        "OSDP-base": chosen(setting, n, 1, 1, slices=(1,)),
        "3D": _fastest([uniform(setting, "replicated", *each) for each in strategies]),
        "3D+OSDP": _fastest([chosen(setting, *each, slices=FEW_SLICES) for each in strategies]),
    }
    return Columns(best=best)


def _fastest(found: Sequence[Best | None]) -> Best | None:
    return max((best for best in found if best), key=lambda best: best.samples_per_s, default=None)


def settings(quick: bool) -> list[Setting]:
    return [
        Setting(family=family, parts=parts, num_devices=n, memory_gib=memory, recompute=recompute)
        for family, models in (QUICK_MODELS if quick else MODELS).items()
        for parts in models
        for memory in (MEMORY_GIB[1:] if quick else MEMORY_GIB)
        for n, recompute in ((8, False), (16, False), (8, True))
    ]


Found = Mapping[Setting, Columns]


def rows(found: Found) -> Iterator[Row]:
    gpt_3 = replace(next(iter(found)), parts=((1, 12288),))
    matmul = next(op for op in gpt_3.whole.operators if op.kind == "up")
    yield Row(figure="osdp-matmul", case="parameters", value=matmul.parameter_bytes / GIB, unit="GiB")
    for family in MODELS:
        sizes = [setting.parameters / 1e9 for setting in found if setting.family == family]
        yield Row(figure="osdp-table1", case=f"{family}, least", value=min(sizes), unit="billions")
        yield Row(figure="osdp-table1", case=f"{family}, most", value=max(sizes), unit="billions")
    for family, figure in (("N&D", "nd"), ("W&S", "ws"), ("I&C", "ic")):
        of_8 = {s: c for s, c in found.items() if s.family == family and s.num_devices == 8 and not s.recompute}
        yield from gains(f"osdp-fig5-{figure}", "over pure strategies", of_8, "OSDP", PURE)
        if family == "N&D":
            yield from gains("osdp-fig5-nd", "over FSDP", of_8, "OSDP", ("FSDP",))
    plain = {s: c for s, c in found.items() if not s.recompute}
    of_16 = {s: c for s, c in plain.items() if s.num_devices == 16}
    yield from gains("osdp-fig6", "over FSDP", of_16, "OSDP", ("FSDP",))
    yield from gains("osdp-3d", "over 3D", plain, "3D+OSDP", ("3D",))
    yield from gains("osdp-3d", "over the other baselines", plain, "3D+OSDP", PURE)
    compared = [[columns.gain("3D+OSDP", other) for other in COLUMNS[:-1]] for columns in plain.values()]
    first = [all(gain is None or gain > -ROUNDING for gain in each) for each in compared]
    yield Row(figure="osdp-3d", case="columns where 3D+OSDP is first", value=100 * statistics.mean(first), unit="%")
    for setting, columns in plain.items():
        each = {name: (best := columns.best[name]) and best.samples_per_s for name in COLUMNS}
        yield from side_by_side("osdp-grid", setting.name, each, "samples/s")
    yield from slices()
    yield from splitting({s: c for s, c in plain.items() if s.num_devices == 8})
    recomputed = {s: c for s, c in found.items() if s.recompute}
    yield from gains("osdp-fig9", "over FSDP", recomputed, "OSDP", ("FSDP",))
    compute = [s.whole.seconds_per_sample / replace(s, recompute=False).whole.seconds_per_sample for s in recomputed]
    yield Row(figure="osdp-fig9", case="compute of recomputation", value=100 * (statistics.mean(compute) - 1), unit="%")


def gains(figure: str, case: str, found: Found, ours: str, others: Sequence[str]) -> Iterator[Row]:
    """The greatest gain and the mean, over all settings and other strategies that fit."""
    each = [gain for columns in found.values() for other in others if (gain := columns.gain(ours, other)) is not None]
    yield Row(figure=figure, case=f"{case}, greatest", value=max(each, default=None), unit="%")
    yield Row(figure=figure, case=f"{case}, mean", value=statistics.mean(each) if each else None, unit="%")


def sliced_matmul(hidden: int, granularity: int) -> OsdpPlan:
    """ZDP of one MatMul on 8 GPUs, a sample of its activations; granularity 0 is whole."""
    hardware = load_hardware(str(HARDWARE / f"{CLUSTERS[8]}.yaml"))
    size = hidden * 4 * hidden * ITEM
    op = Operator(
        name="matmul", kind="matmul", parameter_bytes=size, gradient_bytes=size, optimizer_bytes=2 * size,
        slices=granularity or 1,
    )  # fmt: skip
    links = Links.ring(hardware, 8)
    problem = OsdpProblem(operators=(op,), links=links, memory_bytes=2**40, modes=("sharded",))
    return OsdpPlan(problem=problem, batch=1, slices=((op.slices,),))


def slices() -> Iterator[Row]:
    """Figure 7."""
    reductions = []
    for hidden in HIDDEN:
        whole = sliced_matmul(hidden, 0)
        for granularity in GRANULARITIES:
            plan = sliced_matmul(hidden, granularity)
            reductions.append(100 * (1 - plan.memory_bytes / whole.memory_bytes))
            columns = {"MB": plan.memory_bytes / 1e6, "ms": 1000 * plan.communication_s}
            yield from side_by_side("osdp-fig7", f"hidden {hidden:,}, granularity {granularity}", columns, "")
    yield Row(figure="osdp-fig7", case="greatest reduction of memory", value=max(reductions), unit="%")


def splitting(found: Found) -> Iterator[Row]:
    """Figure 8."""
    each = [gain for columns in found.values() if (gain := columns.gain("OSDP", "OSDP-base")) is not None]
    yield Row(figure="osdp-fig8", case="least gain", value=min(each), unit="%")
    yield Row(figure="osdp-fig8", case="greatest gain", value=max(each), unit="%")
    for family in MODELS:
        parts = []
        for setting, columns in found.items():
            best = columns.best["OSDP"]
            if setting.family == family and best:
                operators = best.plan.problem.operators
                modes = best.plan.counts()
                split = {op.name for op, mode, count in modes if op.slices > 1 and mode == "sharded" and count}
                parts.append(100 * len(split) / len(operators))
        value = statistics.mean(parts) if parts else None
        yield Row(figure="osdp-fig8", case=f"operators split, {family}", value=value, unit="%")


def pictures(found: Found, folder: Path) -> None:
    bars = Bars(title="8 GPUs, 16 GB: throughput beside FSDP's", axis="samples/s over FSDP's")
    for setting, columns in found.items():
        if (setting.num_devices, setting.memory_gib, setting.recompute) == (8, 16, False):
            fsdp = columns.best["FSDP"]
            for name in COLUMNS:
                best = columns.best[name]
                value = best.samples_per_s / fsdp.samples_per_s if best and fsdp else None
                bars.add(setting.model, name, value)
    bars.write(folder / "osdp_throughput.svg")
    lines = Lines(title="ZDP of one MatMul", x="granularity", y="communication over the whole operator's")
    for hidden in HIDDEN:
        whole_s = sliced_matmul(hidden, 0).communication_s
        points = [(float(g), sliced_matmul(hidden, g).communication_s / whole_s) for g in GRANULARITIES]
        lines.add(f"hidden {hidden:,}", points)
    lines.write(folder / "osdp_slices.svg")
