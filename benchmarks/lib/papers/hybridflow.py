"""HybridFlow: placements, other systems, and the transition to generation."""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lib.hybridflow_transition import Engine, transition
from lib.papers.cells import A100_PRINTED, HYBRIDFLOW_ENGINE, Cell, described
from lib.papers.plans import fastest
from lib.papers.rows import Row, side_by_side
from lib.papers.simulated import SEARCHED, Done, Simulated
from lib.papers.svg import Bars, Lines

from realhf.architecture.named import architecture
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.planning.options import options_on

HARDWARE, ITEM = A100_PRINTED, 2
# The numbers of GPUs of Figures 9 and 12; the first is the least on which all four models fit.
CLUSTERS = {"7b": (8, 16, 32, 64, 128), "13b": (16, 32, 64, 96, 128), "34b": (32, 64, 96, 128), "70b": (64, 96, 128)}
MIXED = (64, 96, 128)  # of Figure 13
MAPPING, OWN_MAPPING, DEEPSPEED, OPENRLHF = "hybridflow", "mapping", "DeepSpeed-Chat", "OpenRLHF"
PLAIN = ("colocate", "split", "standalone")
PLACEMENTS = (SEARCHED, OWN_MAPPING, MAPPING, *PLAIN)
# The placement that the paper has first, by size and devices.
FIRST = {
    **{("13b", n): "colocate" for n in (16, 32, 64)}, ("13b", 96): "split", ("13b", 128): "standalone",
    **{("34b", n): "colocate" for n in (32, 64)}, ("34b", 96): "split", ("34b", 128): "split",
}  # fmt: skip
FIRST_MIXED = {64: "colocate", 96: "split"}
# (p, t) of training, and of generation.
TRANSITIONS = {"7b": ((1, 8), (1, 2)), "13b": ((1, 8), (1, 4)), "34b": ((2, 8), (1, 4)), "70b": ((4, 8), (1, 8))}
ENGINES: dict[Engine, str] = {
    "deepspeed-chat": "DeepSpeed-Chat", "hybridflow-v": "HybridFlow-V", "hybridflow": "HybridFlow"
}  # fmt: skip


def setting(algorithm: str, actor: str, critic: str, num_devices: int) -> Cell:
    """PPO is searched and has all placements; of the others there is the paper's mapping beside OpenRLHF."""
    is_ppo = algorithm == "PPO"
    return Cell(
        algorithm=algorithm, actor=f"llama2-{actor}", critic=f"llama2-{critic}", num_devices=num_devices,
        batch_size=1024, prompt_tokens=1024, new_tokens=1024, mini_batches=8, hardware=HARDWARE,
        engine=HYBRIDFLOW_ENGINE, searches=is_ppo,
        systems=(*PLACEMENTS[1:], DEEPSPEED, OPENRLHF) if is_ppo else (MAPPING, OWN_MAPPING, OPENRLHF),
    )  # fmt: skip


def clusters(quick: bool) -> dict[str, tuple[int, ...]]:
    return {"7b": (8, 16)} if quick else CLUSTERS


def ppo(quick: bool) -> dict[tuple[str, int], Cell]:
    return {(size, n): setting("PPO", size, size, n) for size, each in clusters(quick).items() for n in each}


def mixed(quick: bool) -> dict[int, Cell]:
    return {16: setting("PPO", "7b", "7b", 16)} if quick else {n: setting("PPO", "13b", "70b", n) for n in MIXED}


def ends(algorithm: str, quick: bool) -> dict[str, tuple[Cell, Cell]]:
    """By size the smallest and the largest cluster."""
    return {
        size: (setting(algorithm, size, size, each[0]), setting(algorithm, size, size, each[-1]))
        for size, each in clusters(quick).items()
    }


ALGORITHMS = ("PPO", "ReMax", "Safe-RLHF")


def cells(quick: bool) -> list[Cell]:
    others = [cell for name in ALGORITHMS for pair in ends(name, quick).values() for cell in pair]
    return [*ppo(quick).values(), *mixed(quick).values(), *others]


def rows(done: Done, quick: bool) -> Iterator[Row]:
    yield from speed_ups(done, quick)
    yield from throughput("hf-fig9", {f"{s.upper()}, {n} GPUs": c for (s, n), c in ppo(quick).items()}, done,
                          (SEARCHED, OWN_MAPPING, MAPPING, DEEPSPEED, OPENRLHF))  # fmt: skip
    sizes = ("7b",) if quick else ("13b", "34b")
    chosen = {f"{s.upper()}, {n} GPUs": cell for (s, n), cell in ppo(quick).items() if s in sizes}
    yield from placements(done, quick)
    yield from throughput("hf-fig12", chosen, done, PLACEMENTS)
    yield from throughput("hf-fig13", {f"{n} GPUs": cell for n, cell in mixed(quick).items()}, done, PLACEMENTS)
    yield from shares(done, quick)
    yield from table_2()
    yield from transitions(quick)
    yield from tensor_parallelism(quick)


def tokens_per_s(cell: Cell, found: Simulated, name: str) -> float | None:
    step_s = found.step_s(name)
    return cell.tokens / step_s if step_s else None


def throughput(figure: str, chosen: dict[str, Cell], done: Done, plans: tuple[str, ...]) -> Iterator[Row]:
    for case, cell in chosen.items():
        each = {name: tokens_per_s(cell, done[cell], name) for name in plans}
        columns = {name: value and value / 1000 for name, value in each.items()}
        yield from side_by_side(figure, case, columns, "1000 tokens/s")


def placements(done: Done, quick: bool) -> Iterator[Row]:
    """Figures 12 and 13: whether the placement that the paper has first is no slower than the other two, and its
    algorithm than all three; and the devices that the paper prints."""
    for (size, n), cell in ppo(quick).items():
        found, case = done[cell], f"{size.upper()}, {n} GPUs"
        if first := FIRST.get((size, n)):
            for name in (first, MAPPING):
                yield Row(figure="hf-fig12", case=f"{case}: {name} over the others", value=over(found, name), unit="x")
    if not quick:
        yield from devices("hf-fig12", "13B, 128 GPUs", done[ppo(quick)["13b", 128]], "standalone")
    gains = []
    for n, cell in mixed(quick).items():
        if first := FIRST_MIXED.get(n):
            value = over(done[cell], first)
            yield Row(figure="hf-fig13", case=f"{n} GPUs: {first} over the others", value=value, unit="x")
        if n <= 64:
            each = [gain for other in PLAIN[1:] if (gain := done[cell].gain("colocate", other))]
            gains += [100 * (gain - 1) for gain in each]
    mean = statistics.mean(gains) if gains else None
    yield Row(figure="hf-fig13", case="up to 64 GPUs: colocate over the others, mean gain", value=mean, unit="%")
    if not quick:
        yield from devices("hf-fig13", "128 GPUs", done[mixed(quick)[128]], MAPPING)


def devices(figure: str, case: str, found: Simulated, name: str) -> Iterator[Row]:
    """Those of each model in a plan, if it fits."""
    for call in plan.calls if (plan := found.plans[name]) else ():
        if call.name.endswith(("train_step", "reference_inference", "reward_inference")):
            model = call.name.split("_")[0]
            yield Row(figure=figure, case=f"{case}, {name}: {model}", value=float(call.num_devices), unit="GPUs")


def over(found: Simulated, name: str) -> float | None:
    """By which factor a plan is faster than the fastest other placement; None where it has no plan, or is alone."""
    gains = [gain for other in PLAIN if other != name and (gain := found.gain(name, other))]
    return min(gains, default=None)


def speed_ups(done: Done, quick: bool) -> Iterator[Row]:
    """Figures 9 to 11 and the ranges of section 8.2."""
    gains = {
        (size, n, other): gain
        for (size, n), cell in ppo(quick).items()
        for other in (DEEPSPEED, OPENRLHF)
        if (gain := done[cell].gain(MAPPING, other))
    }
    for other in (DEEPSPEED, OPENRLHF):
        of_other = [gain for (*_, name), gain in gains.items() if name == other]
        yield Row(figure="hf-fig9", case=f"over {other}, mean", value=statistics.mean(of_other), unit="x")
        yield Row(figure="hf-fig9", case=f"over {other}, greatest", value=max(of_other), unit="x")
    for algorithm in ALGORITHMS:
        largest = ends(algorithm, quick)["7b"][1]
        yield Row(figure="hf-fig11", case=algorithm, value=done[largest].gain(MAPPING, OPENRLHF), unit="x")
    of_8, of_70b = (
        [gain for (size, n, _), gain in gains.items() if chosen in (size, n)] for chosen in (8, "70b")
    )  # fmt: skip
    yield Row(figure="hf-range", case="least on 8 GPUs", value=min(of_8), unit="x")
    yield Row(figure="hf-range", case="least of all", value=min(gains.values()), unit="x")
    yield Row(figure="hf-range", case="70B, mean", value=statistics.mean(of_70b) if of_70b else None, unit="x")


def shares(done: Done, quick: bool) -> Iterator[Row]:
    """Section 8.2's efficiency, and what sections 1 and 2 say of a step."""
    efficiencies = []
    for algorithm in ALGORITHMS:
        for small, large in ends(algorithm, quick).values():
            pair = [tokens_per_s(cell, done[cell], MAPPING) for cell in (small, large)]
            if pair[0] and pair[1]:
                efficiencies.append(pair[1] / pair[0] / (large.num_devices / small.num_devices))
    yield Row(figure="hf-efficiency", case="hybridflow, mean", value=100 * statistics.mean(efficiencies), unit="%")
    found = done[setting("PPO", "7b", "7b", 16)]
    together, apart = found.plans["colocate"], found.plans["split"]
    assert together, "7B does not fit on 16 GPUs"
    assert apart
    own_s = together.call("actor_generate").seconds + together.call("actor_train_step").seconds
    yield Row(figure="hf-share", case="colocated", value=100 * own_s / together.step_s, unit="%")
    yield Row(figure="hf-fig3", case="idle", value=100 * apart.shares["idle"], unit="%")
    size = "7b" if quick else "70b"
    moved = parameter_count(architecture(f"llama2-{size}")) * ITEM / 1e9
    yield Row(figure="hf-disjoint", case="gigabytes a step", value=moved, unit="GB")
    plan = done[ends("PPO", quick)[size][1]].plans[OPENRLHF]
    part = 100 * plan.reallocation_s / plan.step_s if plan else None
    yield Row(figure="hf-disjoint", case="percent of the step", value=part, unit="%")


def table_2() -> Iterator[Row]:
    model, devices = architecture("llama2-7b"), range(8)
    training = Layout(DeviceMesh(0, 8), ParallelStrategy(dp=2, tp=4))
    for engine, name in ENGINES.items():
        moves = replace(transition(engine, model, training, tp=2, pp=1), element_bytes=ITEM)
        received = max(map(moves.received_bytes, devices)) / 1e9
        yield Row(figure="hf-table2", case=f"{name}: received", value=received, unit="GB")
        twice = max(map(moves.unused_bytes, devices)) / 1e9
        yield Row(figure="hf-table2", case=f"{name}: kept twice", value=twice, unit="GB")


def transition_s(size: str, num_devices: int) -> dict[str, float]:
    """Seconds by engine. HybridFlow gathers in micro-dp groups of neighbours, over nodes where stages are joined;
    DeepSpeed-Chat over all devices; OpenRLHF gathers the actor's half of them, and sends the model once."""
    hardware, crosses = described(HARDWARE), num_devices > 8
    model_bytes = float(parameter_count(architecture(f"llama2-{size}")) * ITEM)
    (p, t), (generation_p, generation_t) = TRANSITIONS[size]
    group, per_node = p * t // (generation_p * generation_t), t // generation_t
    joins_stages = crosses and p > generation_p
    return {
        MAPPING: hardware.all_gather_s(
            model_bytes / (generation_p * generation_t), group, crosses_nodes=joins_stages, per_node=per_node
        ),
        DEEPSPEED: hardware.all_gather_s(model_bytes, num_devices, crosses_nodes=crosses, per_node=8),
        OPENRLHF: hardware.all_gather_s(model_bytes, num_devices // 2, crosses_nodes=num_devices > 16, per_node=8)
        + hardware.send_s(model_bytes, crosses_nodes=crosses, senders=1),
    }


def transitions(quick: bool) -> Iterator[Row]:
    reductions: dict[str, list[float]] = {DEEPSPEED: [], OPENRLHF: []}
    saved: list[float] = []
    for size, each in clusters(quick).items():
        for num_devices in each:
            p, t = TRANSITIONS[size][0]
            if num_devices < 16 or num_devices % (p * t):
                continue
            seconds = transition_s(size, num_devices)
            yield from side_by_side("hf-fig14", f"{size.upper()}, {num_devices} GPUs", seconds, "s")
            for other, found in reductions.items():
                found.append(100 * (1 - seconds[MAPPING] / seconds[other]))
                saved.append(seconds[other] - seconds[MAPPING])
    yield Row(
        figure="hf-fig14", case="mean", value=statistics.mean([*reductions[DEEPSPEED], *reductions[OPENRLHF]]), unit="%"
    )
    for other, found in reductions.items():
        yield Row(figure="hf-fig14", case=f"greatest over {other}", value=max(found), unit="%")
    yield Row(figure="hf-fig14", case="mean, seconds", value=statistics.mean(saved), unit="s")
    yield Row(figure="hf-fig14", case="greatest, seconds", value=max(saved), unit="s")


def tensor_parallelism(quick: bool) -> Iterator[Row]:
    """Figure 15: every call with the strategy of training but generation."""
    for size in ("7b",) if quick else ("7b", "13b"):
        task, seconds = setting("PPO", size, size, 16).task(), {}
        mesh = DeviceMesh(0, 16)
        options = {name: options_on([mesh], call, task.call_models[name].samples)
                   for name, call in task.graph.model_calls.items()}  # fmt: skip
        for tp in (1, 2, 4, 8):
            wanted = {name: ParallelStrategy(dp=2, tp=8) for name in options}
            wanted["actor_generate"] = ParallelStrategy(dp=16 // tp, tp=tp)
            chosen = {name: [o for o in each if o.layout.strategy == wanted[name]] for name, each in options.items()}
            plan = fastest(task, chosen)
            call = plan.calls["actor_generate"] if plan else None
            seconds[tp] = (
                task.call_models["actor_generate"].seconds(call.layout.strategy, call.micro_batches) if call else None
            )
        yield from side_by_side(
            "hf-fig15", size.upper(), {f"tp {tp}": value for tp, value in seconds.items()}, "s"
        )  # fmt: skip
        fitting = {tp: value for tp, value in seconds.items() if value}
        best, in_training = min(fitting, key=lambda tp: fitting[tp]), fitting.get(8)
        cut = 100 * (1 - fitting[best] / in_training) if in_training else None
        yield Row(figure="hf-fig15", case=f"{size.upper()}, best tp", value=float(best), unit="")
        yield Row(figure="hf-fig15", case=f"{size.upper()}, best against tp 8", value=cut, unit="%")


def pictures(done: Done, quick: bool, folder: Path) -> None:
    lines = Lines(title="PPO, all models of one size", x="GPUs", y="tokens/s", log_x=True, log_y=True)
    for size in clusters(quick):
        for name in (MAPPING, DEEPSPEED, OPENRLHF):
            of_size = [(n, cell) for (s, n), cell in ppo(quick).items() if s == size]
            lines.add(f"{size.upper()}, {name}", [(n, tokens_per_s(cell, done[cell], name)) for n, cell in of_size])
    lines.write(folder / "hybridflow_throughput.svg")
    bars = Bars(title="placements, seconds of a step", axis="step / searched step")
    for (size, n), cell in ppo(quick).items():
        if quick or size in ("13b", "34b"):
            ours = done[cell].step_s()
            for name in PLACEMENTS:
                step_s = done[cell].step_s(name)
                bars.add(f"{size.upper()}, {n} GPUs", name, step_s / ours if step_s and ours else None)
    bars.write(folder / "hybridflow_placements.svg")
