"""The page of the papers' figures: complete for what the papers print, and made from its results file alone."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from lib.papers import assumptions, hybridflow, osdp, plans, real, real_app, systems
from lib.papers.cells import A100, A100_PRINTED, REAL_ENGINE, Cell, described
from lib.papers.large import fewer_options
from lib.papers.page import (
    Count,
    beside_published,
    count,
    error,
    number,
    of_results,
    page,
    section,
    side_by_side,
    summary,
)
from lib.papers.published import Figure, Limit, Paper, load_papers, reproduces
from lib.papers.rows import Row
from lib.papers.simulated import Simulated
from lib.papers.svg import Axis, Bars, Lines

from realhf.architecture.named import architecture
from realhf.base.errors import UserError
from realhf.geometry.layout import Layout, ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.planning.model.call import CallModel
from realhf.planning.options import Option
from tests.unit.planning.graphs import all_options
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAPERS = load_papers()
FIGURES = {figure.id: figure for paper in PAPERS for figure in paper.figures}


def check_complete(result: dict[str, Any]) -> None:
    """Every figure has rows, or says why not; every row has a label and the published value that its figure has."""
    rows = of_results(result["results"])
    assert {row.figure for row in rows} == {id for id, figure in FIGURES.items() if not figure.not_reproduced}
    for row, case in zip(rows, result["results"], strict=True):
        known = FIGURES[row.figure].values.get(row.case)
        assert case["baseline"] == (known.number if isinstance(known, Limit) else known)
        assert case["value"] == (row.value or 0.0)
        assert case["holds"] is (row.value is not None and (known is None or reproduces(known, row.value)))
    assert sum(bool(case["baseline"]) for case in result["results"]) > 30


def check_pictures(folder: Path) -> None:
    """Those that the figures name, and no others; each has a drawing."""
    names = {name for figure in FIGURES.values() for name in figure.pictures}
    assert {path.stem for path in folder.glob("*")} == names
    for name in names:
        tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(folder / f"{name}.svg").iter()]
        assert len([tag for tag in tags if tag in ("rect", "polyline")]) > 2, name


def test_the_page_says_what_its_results_file_says() -> None:
    """Where there is none, since the planner has changed, the page says that."""
    file = ROOT / "benchmarks/results/papers.json"
    result = json.loads(file.read_bytes()) if file.is_file() else None
    made = (ROOT / "docs/papers.md").read_text()
    assert made == page(PAPERS, result), "make it again: python benchmarks/papers.py --page"
    if result is None:
        assert not (ROOT / "docs/images/papers").exists()
        return
    check_complete(result)
    check_pictures(ROOT / "docs/images/papers")
    rows = of_results(result["results"])
    published = {(id, case) for id, figure in FIGURES.items() for case in figure.values if not figure.not_reproduced}
    assert published <= {(row.figure, row.case) for row in rows if not row.column}
    check_misses(rows, made)


def check_misses(rows: list[Row], made: str) -> None:
    """What does not reproduce and a case without a plan stand in a line that says so, and why."""
    lines = made.splitlines()
    for row in rows:
        known = FIGURES[row.figure].values.get(row.case)
        said = [line for line in lines if line.startswith(f"| {row.case} |")]
        if row.value is None:
            assert any("no plan" in line or "not applicable" in line for line in said), row.case
        elif known is not None and not reproduces(known, row.value):
            reason = FIGURES[row.figure].reasons.get(row.case, "not explained")
            assert any(line.endswith(f" {reason} |") for line in said), row.case


def test_a_miss_is_said_in_words() -> None:
    row = Row(figure="real-fig8", case="a", value=None, unit="s")
    assert "| a | - | no plan | - |  |" in "\n".join(beside_published(FIGURES["real-fig8"], [row]))
    columns = [Row(figure="x", case="a", value=None, unit="s", column="p")]
    columns.append(Row(figure="x", case="a", value=2.0, unit="s", column="q"))
    assert list(side_by_side(columns)) == ["| s | p | q |", "|---|---|---|", "| a | no plan | 2 |"]
    check_misses([row], "| a | - | no plan | - |")
    with pytest.raises(AssertionError, match="a"):
        check_misses([row], "| a | - | 0 | - |")


@pytest.mark.slow
def test_the_page_is_made_in_quick_form(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/papers.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "benchmarks/results/papers.json").read_bytes())
    check_complete(result)
    check_pictures(tmp_path / "docs/images/papers")
    made = (tmp_path / "docs/papers.md").read_text()
    for figure in FIGURES.values():
        assert f"### {figure.title}\n" in made
        assert f"**Not reproduced.** {figure.not_reproduced[:20]}" in made or not figure.not_reproduced
    [row] = [row for row in of_results(result["results"]) if row.case == "ReMax"]
    assert row.value
    assert f"| ReMax | 1.53 x | {number(row.value)} x | {100 * (row.value / 1.53 - 1):+.0f} % |" in made
    assert made.index("## What reproduces") < 1000, "on the first screen"
    check_misses([row for row in of_results(result["results"]) if not row.column], made)


COUNTED = Figure(
    id="x", title="t", setting="s", derived=("derived",), reasons={"far": "the moon"},
    values={
        "exact": 4.0, "near": 4.0, "far": 4.0, "farther": 4.0, "none": 4.0, "zero": 0.0, "derived": 4.0,
        "kept": Limit(at_most=2.0), "broken": Limit(at_least=2.0),
    },
)  # fmt: skip
OURS = {"exact": 4.1, "near": 5.0, "far": 5.9, "farther": 9.0, "zero": 0.0, "derived": 9.0, "kept": 2.0, "broken": 1.9}


def test_published_values_are_counted_by_hand() -> None:
    """Nine values, one of them derived and one without ours; of five points two are within 5 %, three within 25 % and
    four within 50 %; one bound of two holds. Two misses have no reason, a point and the bound."""
    rows = [Row(figure="x", case=case, value=value, unit="") for case, value in OURS.items()]
    rows += [
        Row(figure="y", case="none", value=4.0, unit=""),
        Row(figure="x", case="none", value=4.0, unit="", column="c"),
    ]
    found = count(COUNTED, rows)
    expected = Count(printed=8, not_applicable=1, points=5, within=[2, 3, 4], bounds=2, hold=1, not_explained=2)
    assert found == expected
    assert found.line("a") == "| a | 8 | 1 | 5 | 2 | 3 | 4 | 1 of 2 | 2 |"
    assert found + found == Count(16, 2, 10, [4, 6, 8], 4, 2, 4)
    lines = list(summary([Paper(name="p", source="q, 2024", testbed="", figures=(COUNTED,))], rows))
    assert [lines[at] for at in (4, 5, 9)] == [found.line("p: q, 2024"), found.line("all"), found.line("p, t")]
    said = section(COUNTED, [row for row in rows if row.figure == "x"]).splitlines()
    assert "| far | 4 | 5.9 | +48 % | the moon |" in said
    assert "| farther | 4 | 9 | +125 % | not explained |" in said
    assert "| none | 4 | not applicable | - |  |" in said
    assert "| derived | 4 (derived) | 9 | +125 % | not explained |" in said


def test_a_published_value_without_a_row_stands_on_the_page() -> None:
    nemo = section(FIGURES["hf-nemo"], [])
    assert "| over NeMo-Aligner, mean, x | 12.5 | not applicable | - |  |" in nemo


@pytest.mark.parametrize(
    ("known", "ours", "expected"),
    [
        (4.0, 5.0, True), (4.0, 3.0, True), (4.0, 5.01, False), (1.0, 4.61, False), (0.0, 0.0, True),
        (0.0, 0.1, False), (Limit(at_least=1.0), 0.99, False), (Limit(at_most=1.0), 0.1, True),
    ],
)  # fmt: skip
def test_what_reproduces(known: float | Limit, ours: float, expected: bool) -> None:
    assert reproduces(known, ours) is expected


def test_assumptions_account_for_parts_of_a_distance() -> None:
    """From 10 to 40 is two doublings: 20 is half of the way, 5 leads away, 40 is all; what is near has no distance."""
    found = {case: {"far": value, "near": 1.0} for case, value in
             {assumptions.AS_IT_IS: 10.0, "a": 20.0, "b": 5.0, "c": 40.0, "d": None}.items()}  # fmt: skip
    rows = list(assumptions.accounted("x", found, {"far": 40.0, "near": 1.04}, "h"))
    parts = {row.case: row.value for row in rows if row.column == "far: of its distance, %"}
    assert parts == pytest.approx({assumptions.AS_IT_IS: 0, "a": 50, "b": -50, "c": 100, "d": None})
    assert not [row for row in rows if row.column.startswith("near:")]


def test_each_assumption_changes_one_thing() -> None:
    cell = real.setting("70b", "70b", 128, 128)
    for name, change in assumptions.CHANGES.items():
        changed = [f for f in Cell.__dataclass_fields__ if getattr(cell, f) != getattr(change(cell), f)]
        assert len(changed) == (name != assumptions.AS_IT_IS), name
    twice = replace(cell, scaled=(("layer_launch_s", 2.0), ("matmul_flops[bfloat16]", 0.5))).described
    plain = described(A100_PRINTED)
    assert twice.layer_launch_s == 2 * plain.layer_launch_s
    assert (twice.flops("bfloat16"), twice.flops("float32")) == (plain.flops("bfloat16") / 2, plain.flops("float32"))


def test_the_best_of_other_placements() -> None:
    steps = {"colocate": 2.0, "split": 3.0, "standalone": None, "hybridflow": 1.0}
    plans: Any = {name: step_s and SimpleNamespace(step_s=step_s) for name, step_s in steps.items()}
    found = Simulated(plans=plans)
    assert hybridflow.over(found, "colocate") == 1.5
    assert hybridflow.over(found, "split") == pytest.approx(2 / 3)
    assert hybridflow.over(found, "hybridflow") == 2.0
    assert hybridflow.over(found, "standalone") is None


@pytest.mark.parametrize(
    ("known", "ours", "said"),
    [
        (2.0, 3.0, "+50 %"),
        (100.0, 1.0, "-99 %"),
        (0.0, 0.0, "0 %"),
        (0.0, 1.0, "-"),
        (None, 1.0, "-"),
        (2.0, None, "-"),
        (Limit(at_most=2.0), 2.0, "holds"),
        (Limit(at_most=2.0), 2.1, "does not hold"),
        (Limit(at_least=2.0), 1.9, "does not hold"),
    ],
)
def test_errors_by_hand(known: float | Limit | None, ours: float | None, said: str) -> None:
    assert error(known, ours) == said


def test_figures_have_one_id_each(tmp_path: Path) -> None:
    unknown = "{name: a, source: b, testbed: c, figures: [{id: x, title: t, setting: s, reasons: {y: z}}]}"
    (tmp_path / "a.yaml").write_text(unknown)
    with pytest.raises(UserError, match="figure x: no value of y"):
        load_papers(tmp_path)
    text = "{name: a, source: b, testbed: c, figures: [{id: x, title: t, setting: s}, {id: x, title: t, setting: s}]}"
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match="figures x occur twice"):
        load_papers(tmp_path)
    (tmp_path / "a.yaml").write_text("{name: a, unknown: 1}")
    with pytest.raises(UserError, match=r"a\.yaml.*lib\.papers\.published\.Paper"):
        load_papers(tmp_path)


def test_the_network_is_the_printed_one() -> None:
    """ReaL prints 141.5 hours for DeepSpeed-Chat. With 200 Gb/s for each GPU in place of each node it is 24.4."""
    cell = real.setting("70b", "70b", 128, 128)
    for hardware, hours in ((A100_PRINTED, 92.0), (A100, 24.4)):
        plan = systems.deepspeed_chat(replace(cell, hardware=hardware))
        assert plan
        assert plan.step_s * real.STEPS / 3600 == pytest.approx(hours, rel=2e-3)


def test_an_inference_under_zero3_gathers_its_model_once() -> None:
    """70 billion parameters, two bytes each, through 88 % of 200 Gb/s of a node: 6.2 s beside the computation."""
    cell = real.setting("70b", "70b", 128, 128)
    plan, task = systems.deepspeed_chat(cell), systems._zero3_task(cell, graphs=False)
    assert plan
    for name in ("reward_inference", "reference_inference", "critic_inference"):
        call = plan.call(name)
        computed_s = task.call_models[name].seconds(ParallelStrategy(dp=128), call.micro_batches)
        model_bytes = 2 * parameter_count(task.graph.model_calls[name].config)
        assert call.seconds - computed_s == pytest.approx(127 / 128 * model_bytes / 2.20e10, rel=0.01)


def test_the_printed_plan_of_table_6_is_priced_as_it_is_printed() -> None:
    plan = real.printed_plan(real.plan_cell(quick=False))
    assert plan
    assert {call.name: (call.first, (call.dp, call.tp, call.pp)) for call in plan.calls} == real.PRINTED_PLAN
    values = FIGURES["real-table6"].values
    for name, (first, degrees) in real.PRINTED_PLAN.items():
        assert [values[f"{name}: {what}"] for what in ("first GPU", "dp", "tp", "pp")] == [first, *degrees]


def test_free_links_take_no_time() -> None:
    free = plans._free_links(described(A100_PRINTED))
    assert free.send_s(1e12, crosses_nodes=True) + free.send_s(1e12, crosses_nodes=False) < 1e-9
    assert free.all_reduce_s(1e12, 128, crosses_nodes=True, per_node=8) < 1e-9


def test_papers_are_in_order() -> None:
    assert [paper.name for paper in PAPERS] == ["ReaL", "ReaL, later version", "HybridFlow", "OSDP"]
    assert all(isinstance(paper, Paper) and paper.figures for paper in PAPERS)


SMALL = Cell(
    algorithm="PPO", actor="llama2-7b", critic="llama2-7b", num_devices=16, batch_size=512, prompt_tokens=128,
    new_tokens=128, mini_batches=4, hardware="a100-80g", engine=REAL_ENGINE,
)  # fmt: skip


def test_deepspeed_chat_has_all_calls_on_all_devices() -> None:
    plan = systems.deepspeed_chat(SMALL)
    assert plan
    for call in plan.calls:
        assert (call.first, call.num_devices, call.pp) == (0, 16, 1)
        assert call.tp == 1 or call.name == "actor_generate"
        # Sharded parameters are gathered for every call.
        assert call.communication_s > 0, call.name


def test_openrlhf_has_a_group_for_each_model_and_one_that_generates() -> None:
    plan = systems.openrlhf(SMALL)
    assert plan
    groups = {call.name: (call.first, call.num_devices) for call in plan.calls}
    assert groups["critic_inference"] == groups["critic_train_step"]
    assert len(set(groups.values())) == 5
    assert sorted(d for first, size in set(groups.values()) for d in range(first, first + size)) == list(range(16))
    # The actor's weights travel every step.
    assert plan.reallocation_s > 0


def test_an_impossible_system_is_none() -> None:
    """A batch of 512 in 4 mini-batches is not divided by 128 x 3 devices, and 70B does not fit on 8."""
    assert systems.deepspeed_chat(replaced(num_devices=384)) is None
    large = replaced(num_devices=8, actor="llama2-70b", critic="llama2-70b")
    assert systems.deepspeed_chat(large) is None
    assert systems.openrlhf(large) is None


def replaced(**changes: Any) -> Cell:
    fields = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    return Cell(**(fields | changes))


def test_published_bytes_of_transitions_are_the_formulas() -> None:
    """HybridFlow, Table 2, with M of LLaMA-2 7B in bf16, training (p, t, d) = (1, 4, 2), generation (1, 2)."""
    model = 2 * parameter_count(architecture("llama2-7b")) / 1e9
    values = FIGURES["hf-table2"].values
    expected = {
        "DeepSpeed-Chat: received": 7 / 8 * model,
        "HybridFlow-V: received": 3 / 4 * model,
        "HybridFlow: received": 2 / 8 * model,
        "DeepSpeed-Chat: kept twice": model / 8,
        "HybridFlow-V: kept twice": model / 4,
        "HybridFlow: kept twice": 0.0,
    }
    assert values == pytest.approx(expected, rel=1e-3)


def test_a_transition_within_micro_groups_by_hand() -> None:
    """7B on 16 A100: 4 ranks of a node gather a half of the model, 3 messages of an eighth each over NVLink."""
    hardware = osdp.load_hardware("a100-80g")
    model_bytes = 2 * parameter_count(architecture("llama2-7b"))
    expected = 3 * (hardware.intra_node_latency_s + model_bytes / 8 / hardware.intra_node_bandwidth)
    assert hybridflow.transition_s("7b", 16)["hybridflow"] == pytest.approx(expected)


def test_large_clusters_have_fewer_options_and_no_worse_ones() -> None:
    """Of each mesh and strategy, no option that is left out is faster and smaller than all that are kept."""
    task = SMALL.task()
    everything, kept = all_options(task), fewer_options(task)
    for name, rows in kept.items():
        model = task.call_models[name]
        assert set(rows) < set(everything[name])
        by_layout: dict[Layout, list[tuple[float, float]]] = {}
        for option in rows:
            by_layout.setdefault(option.layout, []).append(cost(model, option))
        for option in everything[name]:
            if option.layout in by_layout:
                seconds, size = cost(model, option)
                static = model.static_bytes(option.layout.strategy) if task.homes[name] == name else 0
                fits = size + static <= task.cluster.device_memory_bytes
                assert not fits or any(s <= seconds and b <= size for s, b in by_layout[option.layout])


def cost(model: CallModel, option: Option) -> tuple[float, float]:
    return model.seconds(*option.shape), model.work(*option.shape).dynamic_bytes()


TINY = osdp.Setting(family="N&D", parts=((8, 512), (8, 1024)), num_devices=8, memory_gib=8)


def test_an_osdp_stage_of_data_parallelism_is_the_plain_problem() -> None:
    best = osdp.uniform(TINY, "sharded", 8, 1, 1)
    assert best
    assert best.samples_per_s == pytest.approx(best.plan.samples_per_s)
    assert sum(op.parameter_bytes for op in best.plan.problem.operators) == pytest.approx(4 * TINY.parameters)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 8), (2, 2, 2), (1, 8, 1)])
def test_osdp_stages_divide_the_model(dp: int, tp: int, pp: int) -> None:
    stages = osdp.stages(TINY, dp, tp, pp)
    held = sum(op.parameter_bytes for stage in stages for op in stage.problem.operators)
    assert held == pytest.approx(4 * TINY.parameters / tp, rel=1e-6)
    assert [size for stage in stages for size in stage.hidden] == [512] * 8 + [1024] * 8


def test_osdp_is_no_slower_than_what_it_contains() -> None:
    columns = osdp.run(TINY)
    rates = {name: best.samples_per_s for name, best in columns.best.items() if best}
    slack = 1 + 1e-9
    assert rates["OSDP"] * slack >= rates["OSDP-base"] >= rates["FSDP"] / slack
    assert rates["OSDP"] * slack >= rates["DP"]
    assert rates["3D+OSDP"] * slack >= max(rates["3D"], rates["OSDP"], rates["PP"], rates["TP"])
    assert columns.gain("OSDP", "FSDP") == pytest.approx(100 * (rates["OSDP"] / rates["FSDP"] - 1))


@pytest.mark.parametrize("whose", ["printed", "ours"])
def test_a_step_is_the_sum_of_its_calls_alone(whose: str) -> None:
    """Of each table, with one of the two ways to generate. The printed steps have 3 to 6 % beside their calls."""
    ours = {row.case: row.value or 0.0 for row in real_app.of_calls()}
    found = ours if whose == "ours" else FIGURES["app-calls"].values
    assert ours.keys() == FIGURES["app-calls"].values.keys()
    steps = [case for case in found if ": step, " in case]
    assert len(steps) == 4
    for step in steps:
        table, _, mode = step.partition(": step, ")
        other = {"eager": "CUDA graphs", "CUDA graphs": "eager"}[mode]
        calls = [case for case in found if case.startswith(table) and "step" not in case and not case.endswith(other)]
        assert len(calls) == 6
        tolerance = 1e-9 if whose == "ours" else 0.07
        assert found[step] == pytest.approx(sum(found[case] for case in calls), rel=tolerance)


def test_pipelined_rate_by_hand() -> None:
    """Two equal stages without data parallelism: batch 3 takes 4 slots."""
    setting = osdp.Setting(family="N&D", parts=((2, 512),), num_devices=8, memory_gib=8)
    stages = osdp.stages(setting, 1, 1, 2)
    plan = osdp.uniform_plan(stages[0].problem, "replicated", range(3, 4))
    assert plan
    slot_s = max(stage.work_s(1) for stage in stages)
    assert osdp.rate(stages, [plan, plan], 3) == pytest.approx(3 / (4 * slot_s))


def test_axes_have_round_ticks() -> None:
    assert Axis(0, 60, 0, 1).ticks == [0, 10, 20, 30, 40, 50, 60]
    assert Axis(8, 1024, 0, 1, log=True).ticks == [10, 100, 1000]
    assert Axis(0, 10, 100, 0).at(5) == 50


def test_missing_values_are_marked(tmp_path: Path) -> None:
    bars = Bars(title="a < b", axis="s")
    bars.add("one", "x", 2.0)
    bars.add("one", "y", None)
    file = tmp_path / "a/folder/bars.svg"
    bars.write(file)
    texts = [element.text for element in ElementTree.parse(file).iter() if element.text]
    assert {"a < b", "x", "y", "one"} <= set(texts)
    assert texts.count("x") == 2  # the cross and the legend
    lines = Lines(title="t", x="x", y="y")
    lines.add("a", [(1.0, 2.0), (2.0, None), (3.0, 4.0)])
    assert lines.lines == {"a": [(1.0, 2.0), (3.0, 4.0)]}
