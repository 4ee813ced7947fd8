"""What copies from other copies take, by hand; which of them a search chooses, and what is said of that."""

from dataclasses import replace

import pytest
from msgspec import structs

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.cli.plan_tables import choice_lines
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan
from realhf.dataflow.plan_checks import check_plan
from realhf.geometry.parameters import parameter_count
from realhf.planning.certificate import Certificate
from realhf.planning.clusters import parse_cluster
from realhf.planning.copies import copies_worth, with_best_copies, with_sources
from realhf.planning.explain.comparison import describe, explain
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.sizes import model_sizes
from realhf.planning.model.workload import Workload
from realhf.planning.predict import predict, problem_of
from realhf.planning.problem.native import device_needs, native_problem
from realhf.planning.problem.tables import CallTable, KeptCopy, OptionRow, Problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES
from realhf.report.plan_section import plan_section
from tests.unit.planning.graphs import TINY, call, cpu_cluster, settings, task_of, with_memory

# Of the two layouts away from home, on devices 2 and 3, each device has half of the parameters, or all of them.
HOME = CallPlan(devices=(0, 1))
HALVES, WHOLE = CallPlan(devices=(2, 2), tp=2), CallPlan(devices=(2, 2), dp=2)
COUNT = parameter_count(TINY)
SHARDED = (lambda sizes: TINY.num_layers * sizes.layer_sharded + sizes.embedding_sharded + sizes.head_sharded)(
    model_sizes(TINY)
)


def turns(actor: DecoderConfig | str = TINY) -> DataflowGraph:
    """An actor that generates, and again when a reward model has seen that; one call after the other."""
    return DataflowGraph(
        [
            replace(call("actor", actor, GENERATE, "prompts", "seq"), name="first"),
            call("reward", "llama7b-critic" if actor == "llama34b" else TINY, INFERENCE, "seq", "score"),
            replace(call("actor", actor, GENERATE, "score", "seq2"), name="second"),
            replace(call("actor", actor, TRAIN_STEP, "seq2", "", 2), name="train"),
        ],
        ["prompts"],
    )


def task_on(cluster: Cluster) -> PlanningTask:
    return task_of(turns(), max_steps_in_flight=1, **settings(turns(), cluster))


TASK = task_on(cpu_cluster(4))


def plan_of(first: CallPlan, second: CallPlan, home: CallPlan = HOME) -> ExecutionPlan:
    places = {"first": first, "reward_inference": CallPlan(devices=(3, 1)), "second": second, "train": home}
    return ExecutionPlan(num_devices=4, calls=places, max_steps_in_flight=1)


def copying(plan: ExecutionPlan) -> ExecutionPlan:
    taker = structs.replace(plan.calls["second"], copy_from="first")
    return structs.replace(plan, calls=plan.calls | {"second": taker})


@pytest.mark.parametrize(
    ("first", "second", "lacking"), [(HALVES, WHOLE, SHARDED // 2), (WHOLE, HALVES, 0), (HALVES, HALVES, 0)]
)
def test_what_moves_is_what_the_copy_does_not_have(first: CallPlan, second: CallPlan, lacking: int) -> None:
    """In float32. From home the one device that has them sends all parameters."""
    links, plan = TASK.costs.timings[TINY].links, plan_of(first, second)
    from_home, from_copy = predict(TASK, plan), predict(TASK, copying(plan))
    home_s = from_home.transfer_s["actor: train -> second"]
    assert home_s == links.send_s(4 * COUNT, crosses_nodes=False)
    copy_s = links.send_s(4 * lacking, crosses_nodes=False) if lacking else 0.0
    assert from_copy.transfer_s["actor: first -> second"] == pytest.approx(copy_s)
    assert from_copy.step_s == pytest.approx(from_home.step_s - home_s + copy_s)


def row(first: int, size: int, strategy: str, **amounts: float) -> OptionRow:
    sizes = {"static_bytes": 0.0, "dynamic_bytes": 0.0, "copy_bytes": 0.0} | amounts
    return OptionRow(devices=(first, size), strategy=strategy, micro_batches=1, time_s=1.0, **sizes)


def call_table(name: str, option: OptionRow, home: str = "train") -> CallTable:
    return CallTable(
        name=name, model=home, trains=name == "train", home=home, parents=[], options=[option],
        spared=[] if name == home else [("home", "whole", 3.0)],
    )  # fmt: skip


def peaks(second: OptionRow, *, takers: int = 1, sending: float = 0.0) -> list[float]:
    """Of three devices. On the first is the home, and a critic with 100 bytes; the source has devices 1 and 2, the
    second also a reward model."""
    calls = [
        call_table("train", row(0, 1, "home", static_bytes=1000, dynamic_bytes=100)),
        call_table("first", row(1, 2, "halves", dynamic_bytes=20, copy_bytes=7)),
        call_table("reward", row(2, 1, "one", static_bytes=40, dynamic_bytes=30), "reward"),
        *(call_table(name, second) for name in ("second", "third")[:takers]),
    ]
    names = ["second", "third"][:takers]
    kept = KeptCopy(source="first", takers=names, beside=["reward", *names], size_bytes=5.0)
    problem = Problem(
        num_devices=3, devices_per_node=3, device_memory_bytes=1e4, steps=2, max_steps_in_flight=2, calls=calls,
        transfers=[], kept=[kept], sending_bytes=sending,
    )  # fmt: skip
    return [need.peak_bytes for need in device_needs(native_problem(problem), [0] * len(calls))]


def test_a_kept_copy_counts_until_the_taker_has_its_own() -> None:
    """The only taker finds it freed; of several, the first does not."""
    assert peaks(row(1, 1, "one", dynamic_bytes=2, copy_bytes=6)) == [1100, 20 + 7, 40 + 30 + 5]
    filling, running = (
        row(1, 1, "one", dynamic_bytes=2, copy_bytes=60),
        row(1, 1, "one", dynamic_bytes=20, copy_bytes=60),
    )
    assert peaks(filling)[1] == 60 + 5
    assert peaks(running)[1] == 20 + 60
    assert peaks(running, takers=2)[1] == 20 + 60 + 5


def test_a_copy_that_is_taken_over_counts_once() -> None:
    same = row(1, 2, "halves", dynamic_bytes=40, copy_bytes=7)
    assert peaks(same) == [1100, 40 + 7, 40 + 40 + 7]
    assert peaks(same, takers=2) == [1100, 40 + 7, 40 + 40 + 7]


def test_the_source_sends_and_not_the_home() -> None:
    """The first call's copy comes from device 0, the second's from 1 and 2; of these, 1 has its own."""
    assert peaks(row(1, 1, "one", dynamic_bytes=2, copy_bytes=6), sending=50) == [1150, 27, 75 + 50]


def test_the_tables_of_a_plan_have_the_kept_copy() -> None:
    problem = problem_of(TASK, copying(plan_of(HALVES, WHOLE)))
    halves = TASK.call_models["first"].placed(HALVES.strategy).parameter_bytes()
    assert halves == 4 * (COUNT - SHARDED // 2)
    assert problem.kept == [
        KeptCopy(source="first", takers=["second"], beside=["reward_inference", "second"], size_bytes=halves)
    ]
    assert problem_of(TASK, plan_of(HALVES, WHOLE)).kept == []


def test_a_kept_copy_takes_nothing_from_its_home() -> None:
    """The copy contains the home's part on device 2: it would be lent for one call, and not until another has it."""
    home = CallPlan(devices=(2, 2), tp=2)
    plan = plan_of(WHOLE, CallPlan(devices=(0, 2), dp=2), home)
    [spared] = [call.spared for call in problem_of(TASK, plan).calls if call.name == "first"]
    assert spared
    assert [call.spared for call in problem_of(TASK, copying(plan)).calls if call.name == "first"] == [[]]


def test_a_kept_copy_is_not_filled_in_place() -> None:
    home = CallPlan(devices=(2, 2), tp=2)
    in_place = structs.replace(WHOLE, compute=CallCompute(in_place=True))
    plan = plan_of(in_place, CallPlan(devices=(0, 2), dp=2), home)
    tables = {call.name: call.in_place_bytes for call in problem_of(TASK, plan).calls}
    assert tables == {"first": DEFAULT_BUCKET_BYTES, "reward_inference": None, "second": None, "train": None}
    check_plan(plan, TASK.graph, TASK.batch_size)
    copying_too = copying(plan)
    with pytest.raises(UserError, match="first: compute has in_place=True, which is for copies that come from the"):
        check_plan(copying_too, TASK.graph, TASK.batch_size)
    assert with_sources(plan, {"second": "first"}) == copying(plan_of(WHOLE, CallPlan(devices=(0, 2), dp=2), home))
    elsewhere = plan_of(structs.replace(HALVES, compute=in_place.compute), WHOLE, home=HOME)
    with pytest.raises(UserError, match="first: compute has in_place=True, which is for copies on the home's devices"):
        check_plan(elsewhere, TASK.graph, TASK.batch_size)


def test_the_choice_of_sources() -> None:
    """Where the step gets shorter; none where a call is at home, or the model in host memory."""
    prediction = predict(TASK, plan_of(HALVES, WHOLE))
    best = with_best_copies(TASK, prediction)
    assert best.plan.copies == {"second": "first"}
    assert best.step_s < prediction.step_s
    [worth] = copies_worth(TASK, best)
    assert (worth.of, worth.feature) == ("first", "its copy serves second")
    assert worth.without_s == pytest.approx(prediction.step_s)
    at_home = predict(TASK, plan_of(HOME, WHOLE))
    assert with_best_copies(TASK, at_home) is at_home
    assert copies_worth(TASK, at_home) == []
    waiting = replace(TASK, offload=("actor",))
    offloaded = predict(waiting, structs.replace(plan_of(HALVES, WHOLE), offload=("actor",)))
    assert with_best_copies(waiting, offloaded) is offloaded


def test_a_choice_that_does_not_fit() -> None:
    """The home would have lent its part to a copy that is not kept."""
    roomy = with_memory(parse_cluster("h100-1x4"), 10**12)
    task = task_of(turns("llama7b"), max_steps_in_flight=1, **settings(turns("llama7b"), roomy))
    plan = plan_of(WHOLE, WHOLE, CallPlan(devices=(2, 2), tp=2))
    prediction = predict(task, plan)
    best = with_best_copies(task, prediction)
    assert best.plan.copies
    assert best.peak_bytes > prediction.peak_bytes
    between = int(best.peak_bytes + prediction.peak_bytes) // 2
    tight = replace(task, cluster=with_memory(task.cluster, between))
    unable = predict(tight, plan)
    assert unable.fits
    assert with_best_copies(tight, unable) is unable


def test_a_search_says_what_its_proof_is_about() -> None:
    graph = turns("llama34b")
    lengths = Workload(prompt_tokens=256, new_tokens=256)
    task = task_of(graph, **settings(graph, parse_cluster("h100-2x8"), 256, lengths))
    found = search_plan(task, SearchBudget(evaluations=5000))
    assert found.plan.copies == {"second": "first"}
    assert found.certificate.copying_s == found.prediction.step_s < found.certificate.cost_s
    assert "proven_optimal" not in found.plan.notes
    assert found.plan.notes["peak_memory_gib"] == round(found.prediction.peak_bytes / 2**30, 3)
    assert "with copies from home alone takes less than" in str(found.certificate)
    rationale = explain(describe(task, found)).rationale
    assert rationale is not None
    [worth] = [worth for worth in rationale.worth if worth.feature == "its copy serves second"]
    assert worth.of == "first"
    assert worth.without_s is not None
    assert worth.without_s > found.prediction.step_s


def test_the_words_of_a_certificate() -> None:
    proven = Certificate(cost_s=2.0, lower_bound_s=2.0, proven=True, copying_s=1.5)
    assert str(proven) == (
        "no plan with copies from home alone takes less than 2 s a step; this plan has other copies and takes 1.5 s"
    )
    others = "; this plan has other copies and takes 1.5 s"
    assert str(replace(proven, lower_bound_s=1.0)).endswith(f"takes less than 2 s a step{others}")
    assert str(replace(proven, lower_bound_s=0.5, proven=False)).endswith(f"takes less than 0.5 s a step{others}")
    assert str(replace(proven, lower_bound_s=0.5, proven=False, wider_s=1.2)).endswith(
        "takes less than 0.5 s a step; this plan is not one of them and takes 1.2 s"
    )
    assert str(replace(proven, lower_bound_s=0.0, proven=False)) == "no lower bound was proven"


def test_tables_and_pages_name_the_sources() -> None:
    plan = copying(plan_of(HALVES, WHOLE))
    text = "second from the copy of first"
    assert list(choice_lines(plan)) == [f"parameters not from home: {text}"]
    assert text in plan_section(plan, [])
    assert list(choice_lines(plan_of(HALVES, WHOLE))) == []
    assert "not from home" not in plan_section(plan_of(HALVES, WHOLE), [])
