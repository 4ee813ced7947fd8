"""ReaL's first version: its grid of sizes, lengths and clusters."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from lib.papers.cells import A100_PRINTED, REAL_ENGINE, Cell
from lib.papers.plans import Planned, fastest, planned
from lib.papers.rows import Row, side_by_side
from lib.papers.simulated import SEARCHED, Done, Simulated
from lib.papers.svg import Bars, Timeline

from realhf.geometry.layout import DeviceMesh, ParallelStrategy
from realhf.planning.options import Option, micro_batch_counts, options_on
from realhf.planning.predict import predict_in_best_order

SIZES = ("7b", "13b", "34b", "70b")
SCALES = {"actor": (8, 16, 32, 64), "critic": (8, 16, 32, 64), "both": (16, 32, 64, 128)}
BATCHES = {128: 512, 384: 256, 896: 128}  # by the length of responses
MINI_BATCHES, STEPS = 4, 1600  # of 4 x 400
OTHERS = ("DeepSpeed-Chat", "OpenRLHF")
HEURISTIC, OWN_HEURISTIC = "real-heuristic", "heuristic"  # the paper's, and this project's
# The sizes of Figures 9 and 10, on their clusters of Figure 8, and those of Table 4.
PAIRS = {("7b", "7b"): 16, ("7b", "70b"): 64, ("70b", "7b"): 64, ("70b", "70b"): 128}
TABLE_4 = PAIRS | {("7b", "7b"): 8}
# Table 6: first device, and (dp, tp, pp) on 16 devices.
PRINTED_PLAN = {
    "actor_generate": (0, (8, 1, 2)), "actor_train_step": (0, (2, 1, 8)), "critic_train_step": (16, (1, 4, 4)),
    "critic_inference": (16, (2, 2, 4)), "reward_inference": (0, (1, 2, 8)), "reference_inference": (0, (4, 4, 1)),
}  # fmt: skip


KINDS = {SEARCHED: SEARCHED, HEURISTIC: "heuristic"}  # by the name of a plan, as the paper calls it
TABLE_3 = {name: name for name in OTHERS} | {
    HEURISTIC: "heuristic",
    OWN_HEURISTIC: "heuristic, ours",
    SEARCHED: SEARCHED,
}


def setting(actor: str, critic: str, num_devices: int, response: int) -> Cell:
    return Cell(
        algorithm="PPO", actor=f"llama2-{actor}", critic=f"llama2-{critic}", num_devices=num_devices,
        batch_size=BATCHES[response], prompt_tokens=128, new_tokens=response, mini_batches=MINI_BATCHES,
        hardware=A100_PRINTED, engine=REAL_ENGINE, steps_in_flight=2, 
        systems=(HEURISTIC, OWN_HEURISTIC, *OTHERS),
    )  # fmt: skip


def grid(quick: bool) -> dict[tuple[str, str, int], Cell]:
    """The 36 cells of Figure 8, by what grows, size and response; all of 7B where it has to be quick."""
    cells = {}
    for scale, clusters in SCALES.items():
        for size, num_devices in list(zip(SIZES, clusters, strict=True))[: 1 if quick else None]:
            actor, critic = ("7b" if scale == "critic" else size), ("7b" if scale == "actor" else size)
            for response in BATCHES:
                cells[scale, size, response] = setting(actor, critic, num_devices, response)
    return cells


def cells(quick: bool) -> list[Cell]:
    return [*grid(quick).values(), plan_cell(quick)]


def plan_cell(quick: bool) -> Cell:
    """The plan of Table 6."""
    return setting("7b", "7b", 8, 896) if quick else setting("7b", "34b", 32, 896)


def pairs(quick: bool, response: int) -> dict[str, Cell]:
    """The representative sizes, by name."""
    chosen = list(PAIRS.items())[: 1 if quick else None]
    return {named(actor, critic): setting(actor, critic, n, response) for (actor, critic), n in chosen}


def named(actor: str, critic: str) -> str:
    return f"{actor.upper()} + {critic.upper()}"


def rows(done: Done, quick: bool) -> Iterator[Row]:
    yield from figure_8(done, quick)
    yield from table_1()
    yield from table_3(done, quick)
    yield from of_calls(done, quick)
    yield from table_4(done, quick)
    yield from device_time(done, quick)
    yield from table_5(done, quick)
    yield from table_6(done[plan_cell(quick)], quick)


def figure_8(done: Done, quick: bool) -> Iterator[Row]:
    cells = grid(quick)
    gains = [gain for cell in cells.values() if (gain := done[cell].gain(SEARCHED, HEURISTIC))]
    factors = [
        factor
        for cell in cells.values()
        for ours in (SEARCHED, HEURISTIC)
        for other in OTHERS
        if (factor := done[cell].gain(ours, other))
    ]
    yield Row(figure="real-fig8", case="searched over heuristic, mean gain",
              value=100 * (statistics.mean(gains) - 1), unit="%")  # fmt: skip
    yield Row(figure="real-fig8", case="searched over heuristic, greatest gain", value=100 * (max(gains) - 1), unit="%")
    for name, choose in (("least", min), ("greatest", max)):
        case = f"searched or heuristic over another system, {name}"
        yield Row(figure="real-fig8", case=case, value=choose(factors), unit="x")
    for (scale, size, response), cell in cells.items():
        found, case = done[cell], f"{size.upper()} {scale}, response {response}, {cell.num_devices} GPUs"
        columns = {
            "searched": found.step_s(),
            "heuristic": found.step_s(HEURISTIC),
            "heuristic, ours": found.step_s(OWN_HEURISTIC),
            "gain, %": (gain - 1) * 100 if (gain := found.gain(SEARCHED, HEURISTIC)) else None,
            **{f"over {other}, x": found.gain(SEARCHED, other) for other in OTHERS},
        }
        yield from side_by_side("real-fig8", case, columns, "s")
    sizes = sorted({n for clusters in SCALES.values() for n in clusters})
    for response, batch in BATCHES.items():
        illegal = [n for n in sizes if not micro_batch_counts(ParallelStrategy(dp=n), batch // MINI_BATCHES)]
        yield Row(figure="real-fig8-crosses", case=f"response {response}", value=len(illegal), unit="cluster sizes")


def table_1() -> Iterator[Row]:
    task, each = setting("7b", "7b", 8, 384).task(), dict[tuple[str, str], float | None]()
    for call, what in (("actor_generate", "generation"), ("actor_train_step", "training")):
        for name, strategy in (("pipeline", ParallelStrategy(pp=8)), ("tensor", ParallelStrategy(tp=8))):
            model = task.call_models[call]
            limit = task.cluster.device_memory_bytes
            counts = micro_batch_counts(strategy, model.samples)
            fitting = [count for count in counts if model.least_bytes(strategy, count) <= limit]
            each[what, name] = min((model.seconds(strategy, count) for count in fitting), default=None)
            yield Row(figure="real-table1", case=f"{what}, {name} parallelism", value=each[what, name], unit="s")
    for what in ("generation", "training"):
        stages, tensor = each[what, "pipeline"], each[what, "tensor"]
        ratio = stages / tensor if stages and tensor else None
        yield Row(figure="real-table1", case=f"{what}, pipeline over tensor", value=ratio, unit="x")


def table_3(done: Done, quick: bool) -> Iterator[Row]:
    found = done[list(pairs(quick, 128).values())[-1]]
    for name, case in TABLE_3.items():
        yield Row(figure="real-table3", case=case, value=hours(found.step_s(name)), unit="h")
        if name != SEARCHED:
            yield Row(figure="real-table3", case=f"searched over {case}", value=found.gain(SEARCHED, name), unit="x")


def hours(step_s: float | None) -> float | None:
    """Of the paper's 4 x 400 steps."""
    return step_s and step_s * STEPS / 3600


def of_calls(done: Done, quick: bool) -> Iterator[Row]:
    """Figure 9."""
    for name, cell in pairs(quick, 128).items():
        for kind, what in KINDS.items():
            if plan := done[cell].plans[kind]:
                seconds = {call.name: call.seconds for call in plan.calls}
                whole = {"sum of calls": sum(seconds.values()), "step": plan.step_s}
                yield from side_by_side("real-fig9", f"{name}: {what}", seconds | whole, "s")


def table_4(done: Done, quick: bool) -> Iterator[Row]:
    """Table 4."""
    for (actor, critic), num_devices in list(TABLE_4.items())[: 1 if quick else None]:
        if plan := done[setting(actor, critic, num_devices, 128)].plans[SEARCHED]:
            for call in plan.calls:
                case = f"{named(actor, critic)} on {num_devices}: {call.name}"
                yield Row(figure="real-table4", case=case, value=float(call.num_devices), unit="GPUs")


def device_time(done: Done, quick: bool) -> Iterator[Row]:
    """Figure 10."""
    moved = [plan.by_kind["reallocation"] for cell in grid(quick).values() if (plan := done[cell].plans[SEARCHED])]
    yield Row(figure="real-fig10", case="searched plans, parameter reallocation, mean",
              value=100 * statistics.mean(moved), unit="%")  # fmt: skip
    for name, cell in pairs(quick, 896).items():
        for kind, case in KINDS.items():
            if plan := done[cell].plans[kind]:
                columns = {what: 100 * share for what, share in plan.by_kind.items()}
                yield from side_by_side("real-fig10", f"{name}: {case}", columns, "%")
                if kind == HEURISTIC:  # the paper says that it dominates: that nothing takes more
                    over = plan.by_kind["communication"] / max(
                        v for k, v in plan.by_kind.items() if k != "communication"
                    )
                    case = f"{name}: communication of the heuristic over the next largest part"
                    yield Row(figure="real-fig10", case=case, value=over, unit="x")


def table_5(done: Done, quick: bool) -> Iterator[Row]:
    """Table 5."""
    for size, num_devices in list(zip(SIZES, SCALES["actor"], strict=True))[: 1 if quick else None]:
        found = done[setting(size, "7b", num_devices, 128)]
        ours, heuristic = found.step_s(), found.step_s(HEURISTIC)
        saved = hours(heuristic - ours) if ours and heuristic else None
        yield Row(figure="real-table5", case=f"{named(size, '7b')} on {num_devices}", value=saved, unit="h")


def printed_plan(cell: Cell) -> Planned | None:
    """The paper's plan of Table 6 with the micro-batches that are fastest here."""
    task, options = cell.task(), dict[str, list[Option]]()
    for name, call in task.graph.model_calls.items():
        first, strategy = PRINTED_PLAN[name]
        each = options_on([DeviceMesh(first, 16)], call, task.call_models[name].samples)
        options[name] = [option for option in each if option.layout.strategy == ParallelStrategy(*strategy)]
    plan = fastest(task, options)
    return planned(cell, task, predict_in_best_order(task, plan)) if plan else None


def table_6(found: Simulated, quick: bool) -> Iterator[Row]:
    gain = found.gain(SEARCHED, HEURISTIC)
    yield Row(figure="real-table6", case="gain over heuristic", value=gain and 100 * (gain - 1), unit="%")
    for other in OTHERS:
        yield Row(figure="real-table6", case=f"over {other}", value=found.gain(SEARCHED, other), unit="x")
    plan, heuristic_s = found.plans[SEARCHED], found.step_s(HEURISTIC)
    assert plan, "Table 6: nothing fits"
    known = None if quick else printed_plan(plan_cell(quick))
    gain = heuristic_s / known.step_s if known and heuristic_s else None
    yield Row(
        figure="real-table6", case="gain of the printed plan over heuristic", value=gain and 100 * (gain - 1), unit="%"
    )
    for call in plan.calls:
        layout = {"first GPU": call.first, "GPUs": call.num_devices, "dp": call.dp, "tp": call.tp, "pp": call.pp}
        for what, number in layout.items():
            yield Row(figure="real-table6", case=f"{call.name}: {what}", value=float(number), unit="")
    for call in plan.calls:
        columns = {"micro-batches": call.micro_batches, "seconds": call.seconds}
        yield from side_by_side("real-table6", call.name, columns, "")


def pictures(done: Done, quick: bool, folder: Path) -> None:
    cells = grid(quick)
    gains = Bars(title="searched plan over heuristic", axis="gain in throughput, %")
    for (scale, size, response), cell in cells.items():
        gain = done[cell].gain(SEARCHED, HEURISTIC)
        gains.add(f"{size.upper()} {scale}", f"response {response}", 100 * (gain - 1) if gain else None)
    gains.write(folder / "real_gains.svg")
    shares = Bars(title="device time, response 896", axis="% of device time", stacked=True)
    for name, cell in pairs(quick, 896).items():
        for kind, case in KINDS.items():
            if plan := done[cell].plans[kind]:
                for what, share in plan.by_kind.items():
                    shares.add(f"{name}, {case}", what, 100 * share)
    shares.write(folder / "real_device_time.svg")
    plan = done[plan_cell(quick)].plans[SEARCHED]
    assert plan
    timeline(plan).write(folder / "real_timeline.svg")


def timeline(plan: Planned) -> Timeline:
    """The simulated steps: GPUs from top to bottom, seconds from left to right."""
    drawing = Timeline(title="two steps of the searched plan of Table 6", x="seconds", y="GPU")
    for span in plan.spans:
        if span.step < 2:
            drawing.add(span.name, span.start_s, span.end_s, span.first, span.num_devices)
    return drawing
