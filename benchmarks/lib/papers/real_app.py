"""The appendix of ReaL's later version: its tables of calls, and scaling over devices, batches and contexts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lib.fit import Residual, calibration_script, load_tables
from lib.papers.cells import REAL_ENGINE, Cell
from lib.papers.rows import Row, side_by_side
from lib.papers.simulated import SEARCHED, Done
from lib.papers.svg import Bars, Lines

from realhf.planning.model.descriptions import load_hardware

HARDWARE, PROMPT = "h100", 1024
GRAPHS, EAGER = "CUDA graphs", "eager"
STEPS = {"whole step, graphs": f"step, {GRAPHS}", "whole step, eager": f"step, {EAGER}"}  # as the paper calls them
WEAK = {16: "7b", 32: "13b", 64: "34b", 128: "70b"}
SAMPLES_A_DEVICE = 32  # of weak scaling: batch 512 on 16 GPUs to 4,096 on 128
STRONG = (32, 64, 128)
CONTEXTS = (2048, 4096, 8192)
MODELS = {"7B": "7b", "70B + 7B": "70b"}  # the actor; critic and reward are 7B
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
STRONG_BATCH = 4096


def setting(
    actor: str, num_devices: int, batch_size: int, context: int = 2048, *, graphs: bool = True, large: bool = False
) -> Cell:
    """Actor and reference are `actor`, critic and reward 7B."""
    return Cell(
        algorithm="PPO", actor=f"llama3-{actor}", critic="llama3-7b", num_devices=num_devices, batch_size=batch_size,
        prompt_tokens=PROMPT, new_tokens=context - PROMPT, mini_batches=8, hardware=HARDWARE,
        engine=replace(REAL_ENGINE, cuda_graphs=graphs), steps_in_flight=2, systems=("heuristic",), large=large,
    )  # fmt: skip


def tables(quick: bool) -> dict[str, Cell]:
    """The two clusters of the tables, with and without CUDA graphs."""
    known = {"7B on 2 x 8": ("7b", 16, 512), "70B + 7B on 16 x 8": ("70b", 128, 4096)}
    return {
        f"{name}, {mode}": setting(*each, graphs=mode == GRAPHS)
        for name, each in list(known.items())[: 1 if quick else None]
        for mode in (GRAPHS, EAGER)
    }


def weak(quick: bool) -> dict[str, Cell]:
    return {
        f"{actor.upper()} + 7B on {n}": setting(actor, n, SAMPLES_A_DEVICE * n)
        for n, actor in list(WEAK.items())[: 1 if quick else None]
    }


def strong(quick: bool) -> dict[str, Cell]:
    return (
        {"7B on 16": setting("7b", 16, 512)} if quick else {f"70B + 7B on {n}": setting("70b", n, 512) for n in STRONG}
    )


def contexts(quick: bool) -> dict[tuple[str, int], Cell]:
    """By models and context; as many tokens a step everywhere."""
    known = {"7B on 16": ("7b", 16)} if quick else {"7B on 16": ("7b", 16), "70B + 7B on 128": ("70b", 128)}
    return {
        (name, context): setting(actor, n, SAMPLES_A_DEVICE * n * CONTEXTS[0] // context, context)
        for name, (actor, n) in known.items()
        for context in CONTEXTS
    }


def scaling(quick: bool) -> dict[tuple[str, str, int], Cell]:
    """Beyond the paper: by study, models and devices, 8 to 1,024 of them."""
    return {
        (study, name, n): setting(actor, n, STRONG_BATCH if study == "strong" else SAMPLES_A_DEVICE * n, large=True)
        for study in ("strong", "weak")
        for name, actor in list(MODELS.items())[: 1 if quick else None]
        for n in DEVICES[: 2 if quick else None]
    }


def cells(quick: bool) -> list[Cell]:
    groups = (tables(quick), weak(quick), strong(quick), contexts(quick), scaling(quick))
    return [cell for group in groups for cell in group.values()]


def rows(done: Done, quick: bool) -> Iterator[Row]:
    yield from of_calls()
    for name, cell in tables(quick).items():
        for kind in (SEARCHED, "heuristic"):
            if plan := done[cell].plans[kind]:
                seconds = {call.name: call.seconds for call in plan.calls}
                yield from side_by_side("app-table6", f"{name}: {kind}", {**seconds, "step": plan.step_s}, "s")
    for name, cell in weak(quick).items():
        yield from throughput("app-weak", name, done, cell)
    for name, cell in strong(quick).items():
        yield from throughput("app-strong", name, done, cell)
    for (name, context), cell in contexts(quick).items():
        yield from throughput("app-context", f"{name}, context {context:,}", done, cell)
    for (study, name, n), cell in scaling(quick).items():
        yield from throughput("app-scaling", f"{name}, {study}, {n:,} devices", done, cell, parts=True)


def throughput(figure: str, case: str, done: Done, cell: Cell, *, parts: bool = False) -> Iterator[Row]:
    """Tokens/s and gain; `parts`: also the shares of the searched plan's device time, in percent, and its gap."""
    found = done[cell]
    rates = {name: (step_s := found.step_s(name)) and cell.tokens / step_s for name in (SEARCHED, "heuristic")}
    columns: dict[str, float | None] = {name: rate and rate / 1000 for name, rate in rates.items()}
    columns["gain, %"] = (gain - 1) * 100 if (gain := found.gain(SEARCHED, "heuristic")) else None
    plan = found.plans[SEARCHED]
    if parts:
        columns["gap, %"] = 100 * found.gap if plan else None
        columns["generation, %"] = 100 * plan.shares["actor_generate"] if plan else None
        for what in ("communication", "reallocation", "idle"):
            columns[f"{what}, %"] = 100 * plan.by_kind[what] if plan else None
    yield from side_by_side(figure, case, columns, "1000 tokens/s")


def of_calls() -> Iterator[Row]:
    """Each published table by constants that were fitted to the others alone."""
    calibrate, h100 = calibration_script(), load_hardware(HARDWARE)
    known = load_tables(calibrate.TABLES)
    for held_out in known:
        found: list[Residual] = calibrate.held_out_residuals(
            held_out, [table for table in known if table is not held_out], h100
        )
        for row in found:
            name = STEPS.get(row.row, row.row)
            yield Row(figure="app-calls", case=f"{held_out.name}: {name}", value=row.predicted_s, unit="s")


def pictures(done: Done, quick: bool, folder: Path) -> None:
    for study in ("strong", "weak"):
        lines = Lines(title=f"{study} scaling on H100s", x="devices", y="tokens/s a device", log_x=True)
        for name in list(MODELS)[: 1 if quick else None]:
            for kind in (SEARCHED, "heuristic"):
                points = [
                    (n, step_s and cell.tokens / step_s / n)
                    for (of, models, n), cell in scaling(quick).items()
                    if (of, models) == (study, name)
                    for step_s in [done[cell].step_s(kind)]
                ]
                lines.add(f"{name}, {kind}", points)
        lines.write(folder / f"scaling_{study}.svg")
    bars = Bars(title="searched plans, device time over the context", axis="% of device time", stacked=True)
    for (name, context), cell in contexts(quick).items():
        if plan := done[cell].plans[SEARCHED]:
            for what, share in plan.shares.items():
                bars.add(f"{name}, {context:,}", what, 100 * share)
    bars.write(folder / "scaling_context.svg")
