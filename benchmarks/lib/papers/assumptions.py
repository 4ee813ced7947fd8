"""What accounts for the distance of some figures: one assumption of the page changed at a time, all else as it is."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from lib.papers import hybridflow, real
from lib.papers.cells import A100, Cell
from lib.papers.published import distance, load_papers
from lib.papers.rows import Row, side_by_side
from lib.papers.simulated import Done, Simulated

NEAR = 0.05  # of what is this near to the published value no distance is left to account for
LAUNCHES = ("layer_launch_s", "train_launch_s", "decode_launch_s", "decode_graph_launch_s", "mini_batch_s")
AS_IT_IS = "as on this page"


def scaled(by: float, *names: str) -> Callable[[Cell], Cell]:
    return lambda cell: replace(cell, scaled=tuple((name, by) for name in names))


CHANGES: dict[str, Callable[[Cell], Cell]] = {
    AS_IT_IS: lambda cell: cell,
    "200 Gb/s for each GPU": lambda cell: replace(cell, hardware=A100),
    "collectives between nodes at half the rate": scaled(0.5, "inter_node_bandwidth", "inter_node_shared_bandwidth"),
    "links within a node at half the rate": scaled(0.5, "intra_node_bandwidth"),
    "messages between stages at half the rate": scaled(0.5, "inter_node_send_bandwidth"),
    "matrix products at half the rate": scaled(0.5, "matmul_flops[bfloat16]"),
    "launches of kernels twice as long": scaled(2.0, *LAUNCHES),
    "generation without CUDA graphs": lambda cell: replace(cell, engine=replace(cell.engine, cuda_graphs=False)),
    "choices of computation closed": lambda cell: replace(cell, opens=False),
    "one step after the other": lambda cell: replace(cell, steps_in_flight=1),
}


def table_3(quick: bool) -> dict[str, Cell]:
    """The cell of ReaL's Table 3 by assumption."""
    cell = list(real.pairs(quick, 128).values())[-1]
    return {name: change(cell) for name, change in CHANGES.items()}


def figure_9(quick: bool) -> dict[str, tuple[Cell, Cell]]:
    """HybridFlow's 7B and its largest model on the most GPUs, by assumption; nothing is searched."""
    clusters = hybridflow.clusters(quick)
    sizes = ("7b", list(clusters)[-1])
    ends = [replace(hybridflow.ppo(quick)[size, clusters[size][-1]], searches=False) for size in sizes]
    kept = [name for name in CHANGES if name not in ("choices of computation closed", "one step after the other")]
    return {name: (CHANGES[name](ends[0]), CHANGES[name](ends[1])) for name in kept}


def cells(quick: bool) -> list[Cell]:
    return [*table_3(quick).values(), *(cell for pair in figure_9(quick).values() for cell in pair)]


def rows(done: Done, quick: bool) -> Iterator[Row]:
    published = {figure.id: figure.values for paper in load_papers() for figure in paper.figures}
    by_name = {name: done[cell] for name, cell in table_3(quick).items()}
    plans = {name: what for name, what in real.TABLE_3.items() if name != real.OWN_HEURISTIC}

    def taken(found: Simulated) -> dict[str, float | None]:
        return {what: real.hours(found.step_s(name)) for name, what in plans.items()}

    known = {what: published["real-table3"][what] for what in plans.values()}
    yield from accounted("real-assumptions", {name: taken(found) for name, found in by_name.items()}, known, "h")
    pairs = {name: [done[cell] for cell in each] for name, each in figure_9(quick).items()}

    def factors(small: Simulated, large: Simulated, ours: str = hybridflow.MAPPING) -> dict[str, float | None]:
        return {
            "7B over OpenRLHF": small.gain(ours, hybridflow.OPENRLHF),
            "largest over OpenRLHF": large.gain(ours, hybridflow.OPENRLHF),
            "largest over DeepSpeed-Chat": large.gain(ours, hybridflow.DEEPSPEED),
        }

    of_hybridflow = {
        "7B over OpenRLHF": published["hf-fig11"]["PPO"],
        "largest over OpenRLHF": published["hf-fig9"]["over OpenRLHF, greatest"],
        "largest over DeepSpeed-Chat": published["hf-fig9"]["over DeepSpeed-Chat, greatest"],
    }
    by_factor = {name: factors(*each) for name, each in pairs.items()}
    by_factor["`mapping` in place of Algorithm 1"] = factors(*pairs[AS_IT_IS], hybridflow.OWN_MAPPING)
    yield from accounted("hf-assumptions", by_factor, of_hybridflow, "x")


def accounted(
    figure: str, values: Mapping[str, Mapping[str, float | None]], published: Mapping[str, object], unit: str
) -> Iterator[Row]:
    """A line for each assumption: the values with it, and what part of the distance between the page's and the
    published value it accounts for. Negative: it leads away. Columns that are near have no distance."""
    before = values[AS_IT_IS]
    for case, each in values.items():
        columns: dict[str, float | None] = {}
        for name, value in each.items():
            columns[name] = value
            known, old = published[name], before[name]
            if isinstance(known, float | int) and old and distance(known, old) > NEAR:
                columns[f"{name}: of its distance, %"] = value and 100 * share(old, value, known)
        yield from side_by_side(figure, case, columns, unit)


def share(before: float, after: float, published: float) -> float:
    """The part of the way from `before` to `published`, by factors, that `after` has come."""
    return math.log(after / before) / math.log(published / before)
