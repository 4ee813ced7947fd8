"""A plan beside others, each part on stand-ins for the others: alternatives of calls, what choices are worth, what is
said of them, and plans of several clusters or stalenesses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan, Intervals, OrderEntry
from realhf.dataflow.rationale import DeviceMemory, Instead, Worth
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import intervals
from realhf.planning.certificate import Certificate
from realhf.planning.explain import comparison
from realhf.planning.explain import hinges as hinge_module
from realhf.planning.explain.analysis import Analysis
from realhf.planning.explain.comparison import Alternative, Candidate, Comparison
from realhf.planning.explain.hinges import Hinge
from realhf.planning.options import Option, option_of
from realhf.planning.predict import Prediction
from realhf.planning.presets import PresetResult
from realhf.planning.problem.native import DeviceNeed
from realhf.planning.search import SearchResult
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, task_of

TASK = task_of(ppo(), **settings(ppo(), cpu_cluster(4)))
ON_ALL = dict.fromkeys(TASK.graph.model_calls, CallPlan(devices=(0, 4), tp=4))
NEED = DeviceNeed(communicator_bytes=1.4, static_bytes=20.0, peak_bytes=30.0)


def predicted(step_s: float = 2.0, *, fits: bool = True, **plan: Any) -> Prediction:
    fields: dict[str, Any] = {"num_devices": 4, "calls": ON_ALL, "predicted_step_s": step_s}
    return Prediction(
        plan=ExecutionPlan(**fields | plan), call_s={}, transfer_s={}, step_s=step_s, needs=[NEED] * 4, fits=fits
    )


def analysis_of(prediction: Prediction) -> Analysis:
    return Analysis(
        prediction=prediction,
        tokens_per_s=5.0,
        gpu_hours_per_million_tokens=7.0,
        spans=(),
        chain={"actor_generate": 0.75, "reallocation": 0.25},
        busiest_device=3,
        busy=0.5,
    )


def result_of(prediction: Prediction, **fields: Any) -> SearchResult:
    given: dict[str, Any] = {
        "certificate": Certificate(cost_s=2.0, lower_bound_s=1.0, proven=False), "evaluations": 12_345,
        "evaluations_per_s": 1.0, "trace": ((0.5, 3.0),), "num_options": {"a": 3, "b": 4}, "rules": (),
    }  # fmt: skip
    return SearchResult(prediction=prediction, **given | fields)


def comparison_of(prediction: Prediction | None = None, *, task: PlanningTask = TASK, **fields: Any) -> Comparison:
    prediction = prediction or predicted()
    given: dict[str, Any] = {
        "draws": None, "result": None, "heuristic": PresetResult(name="heuristic", prediction=predicted(2.5)),
    }  # fmt: skip
    return Comparison(task=task, analysis=analysis_of(prediction), **given | fields)


def worth(feature: str, without_s: float | None = 3.0, of: str = "actor_train_step") -> Worth:
    return Worth(of=of, feature=feature, without_s=without_s)


# --- candidates


@pytest.mark.parametrize(
    ("slower", "text"),
    [
        (None, "-"),
        (1.0, ">99%"),
        (0.991, ">99%"),
        (0.99, "99%"),
        (0.5, "50%"),
        (0.01, "1%"),
        (0.009, "<1%"),
        (0, "<1%"),
    ],
)
def test_what_no_draw_or_every_draw_says_is_not_certain(slower: float | None, text: str) -> None:
    assert Candidate(name="split", analysis=None, slower=slower).slower_text == text


def test_the_interval_of_a_candidate_is_that_of_its_plan() -> None:
    known = predicted(intervals=Intervals(step_s=(1.0, 3.0), call_s={}))
    assert Candidate(name="split", analysis=analysis_of(known)).step_interval_s == (1.0, 3.0)
    assert Candidate(name="split", analysis=analysis_of(predicted())).step_interval_s is None
    assert Candidate(name="split", analysis=None).step_interval_s is None


# --- alternatives


def test_the_best_other_layout_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned layout without its groups is no other one; what does not fit counts as too large. Of two that are
    equally fast it is the first."""
    name, mesh = "reward_inference", DeviceMesh(0, 4)
    planned = CallPlan(devices=(0, 4), dp=4, micro_dp=(2, 1), compute=CallCompute(data_parallel="fsdp"))
    plan = predicted(calls=ON_ALL | {name: planned}, offload=("ref",)).plan
    tp, mixed = Layout(mesh, ParallelStrategy(tp=4)), Layout(mesh, ParallelStrategy(dp=2, tp=2))
    sharded = CallCompute(data_parallel="fsdp")
    others = [
        Option(Layout(mesh, ParallelStrategy(dp=4)), 1, sharded), Option(tp, 2, sharded), Option(tp, 1, sharded),
        Option(mixed, 1), option_of(planned), Option(tp, 4),
    ]  # fmt: skip
    evaluations = [(10.0, True), (5.0, True), (8.0, True), (8.0, True), (4.0, False), (9.5, True)]
    kept = [option for option in others if option != option_of(planned)]

    def build(task: PlanningTask, options: Mapping[str, Sequence[Option]]) -> str:
        assert task.offload == ("ref",)
        expected = {call: [option_of(entry)] for call, entry in plan.calls.items()}
        assert options == expected | {name: [option_of(planned), *kept]}
        return "problem"

    def evaluate(choice: Sequence[int]) -> Mapping[str, Any]:
        step_s, fits = evaluations[choice[1]]
        assert list(choice) == [0, choice[1], 0, 0, 0, 0]
        return {"step_time": step_s, "feasible": fits}

    def known(what: Any) -> Any:
        def of(task: PlanningTask, call: str) -> Any:
            assert (task.offload, call) == (("ref",), name)
            return what

        return of

    monkeypatch.setattr(comparison, "worthwhile", known(others))
    monkeypatch.setattr(comparison, "num_layouts", known(6))
    monkeypatch.setattr(comparison, "build_problem", build)
    native = SimpleNamespace(evaluate=evaluate)
    monkeypatch.setattr(comparison, "native_problem", lambda problem: native if problem == "problem" else None)
    found = comparison._best(TASK, plan, name)
    seconds = TASK.call_models[name].under(sharded).seconds(tp.strategy, 2)
    option = Option(tp, 2, sharded).call_plan(predicted_s=seconds)
    assert found == Alternative(
        call=name, option=option, step_s=8.0, planned_step_s=10.0, num_layouts=5, num_too_large=4,
        worth=(Worth(of=name, feature="fsdp", without_s=9.5),),
    )  # fmt: skip
    assert found.slower_by == pytest.approx(-0.2)
    evaluations[1:] = [(5.0, False), (9.0, False), (8.0, False), (4.0, False), (9.5, False)]
    found = comparison._best(TASK, plan, name)
    assert (found.option, found.step_s, found.num_too_large) == (None, float("inf"), 5)
    assert found.worth == (Worth(of=name, feature="fsdp", without_s=None),)


def option(chunks: int = 1, **compute: Any) -> Option:
    strategy = ParallelStrategy(pp=2, chunks=chunks)
    return Option(Layout(DeviceMesh(0, 2), strategy), 1, CallCompute(**compute))


MODES = (("*", "sharded"),)


@pytest.mark.parametrize(
    ("planned", "features"),
    [
        (option(), []),
        (option(chunks=2), ["2 chunks"]),
        (option(chunks=4, recomputation="full"), ["4 chunks", "full recomputation"]),
        (option(data_parallel="fsdp", prefetch=False), ["fsdp", "no prefetch"]),
        (option(data_parallel=MODES, prefetch=False), ["modes by operator"]),
    ],
)
def test_the_features_of_a_call(planned: Option, features: list[str]) -> None:
    assert list(comparison._features(planned)) == features


@pytest.mark.parametrize(
    ("planned", "lacking", "not_lacking"),
    [
        (option(chunks=2), option(), option(chunks=4)),
        (option(recomputation="full"), option(recomputation="selective"), option(recomputation="full")),
        (option(recomputed_layers=2), option(), option(recomputed_layers=3)),
        (option(kv_cache_tokens=32), option(), option(kv_cache_tokens=64)),
        (option(data_parallel=MODES), option(data_parallel="fsdp"), option(data_parallel=(("*", "zero1"),))),
        (option(data_parallel="fsdp"), option(data_parallel=MODES), option(data_parallel="fsdp", prefetch=True)),
    ],
)
def test_which_options_lack_a_feature(planned: Option, lacking: Option, not_lacking: Option) -> None:
    [lacks] = comparison._features(planned).values()
    assert (lacks(lacking), lacks(not_lacking), lacks(planned)) == (True, False, False)


# --- what choices are worth


def test_what_it_is_worth_that_a_model_waits_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def there(task: PlanningTask, plan: ExecutionPlan) -> Prediction:
        assert (task, plan.order) == (TASK, ())
        return predicted(3.0 if plan.offload == ("b",) else 4.0, fits=plan.offload == ("b",))

    monkeypatch.setattr(comparison, "predict_in_best_order", there)
    found = comparison.offload_worth(TASK, predicted(offload=("a", "b"), order=(OrderEntry(call="actor_generate"),)))
    words = "waits in host memory"
    assert found == [worth(words, 3.0, "a"), worth(words, None, "b")]


def test_what_staleness_is_worth() -> None:
    result = result_of(predicted(staleness=2), fresher={0: None, 1: 5.0})
    assert comparison.staleness_worth(result) == [
        worth("by weights 2 updates old, not 0", None, "rollouts"),
        worth("by weights 2 updates old, not 1", 5.0, "rollouts"),
    ]


def alternative(name: str, *features: str, plan: CallPlan | None = None, step_s: float = 3.0) -> Alternative:
    return Alternative(
        call=name,
        option=plan,
        step_s=step_s,
        planned_step_s=2.0,
        num_layouts=9,
        num_too_large=4,
        worth=tuple(map(worth, features)),
    )


# --- the comparison


@pytest.mark.parametrize(
    ("is_searched", "fits", "name", "problem"),
    [
        (True, True, "searched", ""),
        (True, False, "searched", ""),
        (False, True, "given", ""),
        (False, False, "given", "memory"),
    ],
)
def test_the_plan_comes_before_the_presets(is_searched: bool, fits: bool, name: str, problem: str) -> None:
    prediction, preset = predicted(fits=fits), Candidate(name="split", analysis=None)
    found = comparison_of(prediction, result=result_of(prediction) if is_searched else None, presets=(preset,))
    assert found.candidates == [Candidate(name=name, analysis=found.analysis, problem=problem), preset]
    assert found.certificate == (found.result.certificate if found.result else None)
    assert found.plan is prediction.plan


@pytest.mark.parametrize(
    ("generation", "training", "is_apart"),
    [((0, 2), (2, 2), True), ((0, 3), (2, 2), False), ((2, 2), (0, 2), True), ((0, 4), (0, 4), False)],
)
def test_generation_apart_from_training(generation: tuple[int, int], training: tuple[int, int], is_apart: bool) -> None:
    """Of one model; where another trains matters as little as where its inferences are."""
    calls = dict.fromkeys(TASK.graph.model_calls, CallPlan(devices=generation))
    calls |= {"actor_train_step": CallPlan(devices=training), "critic_inference": CallPlan(devices=training)}
    assert comparison_of(predicted(calls=calls)).generates_apart is is_apart


def test_without_generation_nothing_is_apart() -> None:
    graph = DataflowGraph(
        [
            call("teacher", TINY, GENERATE, "prompts", "seq"),
            call("judge", TINY, INFERENCE, "seq", "score"),
            call("judge", TINY, TRAIN_STEP, "seq score"),
        ],
        ["prompts"],
    )
    task = task_of(graph, **settings(graph, cpu_cluster(4)))
    calls = {name: CallPlan(devices=(number, 1)) for number, name in enumerate(graph.model_calls)}
    assert comparison_of(predicted(calls=calls), task=task).generates_apart is False


RULES = (
    PresetResult(name="heuristic", prediction=predicted(4.0)),
    PresetResult(name="split", prediction=predicted(5.0), problem="needs too much"),
    PresetResult(name="standalone", prediction=None, problem="too few devices"),
    PresetResult(name="colocate", prediction=predicted(6.0)),
)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """For draws, intervals and hinges; what hinges are asked for."""
    asked: dict[str, Any] = {}

    def hinges(draws: Any, prediction: Prediction, rules: Mapping[str, Prediction]) -> list[str]:
        asked.update(draws=draws, prediction=prediction, rules=rules)
        return ["hinge"]

    monkeypatch.setattr(hinge_module, "hinges", hinges)
    monkeypatch.setattr(intervals, "drawn", lambda task: ("draws", task.staleness, task.more_stale))
    monkeypatch.setattr(comparison, "sure", lambda draws, prediction: replace(prediction, transfer_s={"sure": 1.0}))
    monkeypatch.setattr(comparison, "analyse", lambda task, prediction: analysis_of(prediction))
    return asked


def test_a_searched_plan_is_described_with_what_the_search_knows(stand_ins: dict[str, Any]) -> None:
    """As the task of its own staleness; rules that fit may be the faster ones."""
    stale = replace(TASK, staleness=1)
    result = result_of(predicted(staleness=1), rules=RULES, fresher={0: 5.0})
    found = comparison.describe(replace(TASK, more_stale=(stale,)), result)
    assert (found.task.staleness, found.task.more_stale, found.draws) == (1, (), ("draws", 1, ()))
    assert found.worth == (worth("by weights 1 update old, not 0", 5.0, "rollouts"),)
    assert found.heuristic is RULES[0]
    assert found.result is result
    assert found.hinges == ["hinge"]
    assert found.analysis.prediction == replace(result.prediction, transfer_s={"sure": 1.0})
    rules = {"heuristic": RULES[0].prediction, "colocate": RULES[3].prediction}
    assert stand_ins == {"draws": found.draws, "prediction": found.analysis.prediction, "rules": rules}


def test_a_given_plan_is_predicted_beside_the_heuristic(
    stand_ins: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = predicted(3.0)
    monkeypatch.setattr(comparison, "predict", lambda task, plan: prediction if plan == prediction.plan else None)
    monkeypatch.setattr(comparison, "evaluate_preset", lambda name, task: (name, task.more_stale))
    found = comparison.describe(TASK, prediction.plan)
    assert (found.heuristic, found.result) == (("heuristic", ()), None)
    assert found.analysis.prediction.step_s == 3.0
    assert (found.hinges, stand_ins["rules"]) == (["hinge"], {})


def test_a_plan_with_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Intervals(step_s=(1.0, 3.0), call_s={})
    monkeypatch.setattr(intervals, "intervals_of", lambda draws, prediction: known if draws == "draws" else None)
    draws: Any = "draws"
    found = comparison.sure(draws, predicted(2.0))
    assert found == replace(predicted(2.0), plan=structs.replace(predicted(2.0).plan, intervals=known))


class Drawn:
    def of(self, prediction: Prediction) -> float:
        return prediction.step_s


@pytest.mark.parametrize("is_searched", [True, False])
def test_presets_beside_the_plan(is_searched: bool, stand_ins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the search began with, each with how likely it is slower."""
    monkeypatch.setattr(intervals, "probability_faster", lambda one, other: (one, other))
    monkeypatch.setattr(comparison, "_explained", lambda alone: replace(alone, worth=(worth("explained"),)))
    monkeypatch.setattr(comparison, "evaluate_presets", lambda task: RULES[1:] if task is TASK else ())
    prediction = predicted(2.0)
    result = result_of(prediction, rules=RULES) if is_searched else None
    found = comparison.compare(comparison_of(prediction, draws=Drawn(), result=result))
    names = [rule.name for rule in (RULES if is_searched else RULES[1:])]
    assert [preset.name for preset in found.presets] == names
    none, last = found.presets[-2:]
    assert (none.analysis, none.slower, none.problem) == (None, None, "too few devices")
    assert last.analysis
    assert last.analysis.prediction.transfer_s == {"sure": 1.0}
    assert (last.analysis.step_s, last.slower, last.problem) == (6.0, (2.0, 6.0), "")
    assert found.worth == (worth("explained"),)


@pytest.mark.parametrize(
    ("certificate", "breadth"),
    [
        (Certificate(cost_s=1.0, lower_bound_s=0.5, proven=False, breadth="plain"), "plain"),
        (Certificate(cost_s=1.0, lower_bound_s=0.5, proven=False, breadth="plain", num_meshes=3), None),
        (None, None),
    ],
)
def test_alternatives_are_of_the_breadth_that_was_searched_everywhere(
    certificate: Certificate | None, breadth: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = predicted()
    alternatives = (alternative("a", "one", "two"), alternative("b", "three"))

    def best(task: PlanningTask, plan: ExecutionPlan) -> Sequence[Alternative]:
        assert (task.breadth, plan) == (breadth, prediction.plan)
        return alternatives

    monkeypatch.setattr(comparison, "best_alternatives", best)
    monkeypatch.setattr(comparison, "offload_worth", lambda *words: [worth("four")] * (words == (TASK, prediction)))
    monkeypatch.setattr(comparison, "copies_worth", lambda *words: [worth("five")] * (words == (TASK, prediction)))
    result = result_of(prediction, certificate=certificate) if certificate else None
    found = comparison._explained(comparison_of(prediction, result=result, worth=(worth("stale"),)))
    assert found.alternatives == alternatives
    assert [each.feature for each in found.worth] == ["one", "two", "three", "four", "five", "stale"]


def test_without_time_for_a_search_nothing_is_beside_the_plan() -> None:
    alone = comparison_of(result=result_of(predicted(), num_options={}))
    assert comparison._explained(alone) is alone


@pytest.mark.parametrize(
    ("options", "origin"),
    [
        (None, "given to the run"),
        ({}, "the best plan by rule; no time was left to search"),
        ({"a": 3, "b": 4}, "the best of 12,345 plans that a search looked at, out of 3 x 4 options"),
    ],
)
def test_the_reasons_of_a_plan(options: dict[str, int] | None, origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = predicted()
    other = alternative("b", "three", plan=CallPlan(devices=(0, 2), dp=2, micro_batches=2), step_s=3.0)
    explained = {"alternatives": (alternative("a"), other), "worth": (worth("three"), worth("four"))}
    monkeypatch.setattr(comparison, "_explained", lambda alone: replace(alone, **explained))
    result = None if options is None else result_of(prediction, num_options=options)
    alone = comparison_of(prediction, result=result)
    why = comparison.explain(alone).rationale
    assert why is not None
    assert why.origin == origin
    assert why.certificate == (str(result.certificate) if result else "")
    assert (why.hardware, why.profiled) == ("cpu", False)
    assert (why.device_memory_bytes, why.limits) == (2**32, alone.analysis.limits)
    assert (why.heuristic_step_s, why.heuristic_fits) == (2.5, True)
    assert why.memory == (DeviceMemory(devices=(0, 4), static_bytes=20, peak_bytes=30, communicator_bytes=1),)
    assert why.instead == (
        Instead(call="a", layout="", slower_by=0.0, num_too_large=4, num_others=9),
        Instead(call="b", layout=f"{other.option and other.option.layout}, 2 micro-batches", slower_by=0.5,
                num_too_large=4, num_others=9),
    )  # fmt: skip
    assert [each.feature for each in why.worth] == ["three", "four"]


def test_the_heuristic_that_has_no_plan() -> None:
    none = PresetResult(name="heuristic", prediction=None, problem="no strategy")
    why = comparison.explain(comparison_of(heuristic=none, result=result_of(predicted(), num_options={}))).rationale
    assert why
    assert (why.heuristic_step_s, why.heuristic_fits) == (None, False)


def test_neighbours_with_the_same_needs_are_one_entry() -> None:
    other = NEED._replace(peak_bytes=31.0)
    memory = comparison._memory([NEED, NEED, other, NEED])
    assert [(each.devices, each.peak_bytes) for each in memory] == [((0, 2), 30), ((2, 1), 31), ((3, 1), 30)]


# --- as data


HINGE = Hinge(rival="split", slower=0.6, constant="calls", low=0.5, high=2.0, measurement="layers")


def test_the_comparison_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hinge_module, "hinges", lambda *_: [HINGE])
    prediction = predicted(intervals=Intervals(step_s=(1.0, 3.0), call_s={}))
    task = replace(TASK, cluster=cpu_cluster(2, num_nodes=2, memory=2**31))
    known = alternative("b", "three", plan=CallPlan(devices=(0, 2), dp=2))
    found = comparison.summary(
        comparison_of(
            prediction,
            task=task,
            result=result_of(prediction),
            presets=(Candidate(name="split", analysis=None, problem="too few devices"),),
            alternatives=(alternative("a"), known),
            worth=(worth("three"),),
        )
    )
    assert found["cluster"] == {
        "hardware": "cpu", "num_nodes": 2, "devices_per_node": 2, "device_memory_bytes": 2**31,
    }  # fmt: skip
    assert found["workload"] == {
        "batch_size": 16, "prompt_tokens": 8, "new_tokens": 8, "longest_response": 8, "tokens_per_step": 256,
        "dtype": "float32",
    }  # fmt: skip
    assert found["features"] == []
    assert found["hinges"] == [
        {"rival": "split", "slower": 0.6, "constant": "calls", "low": 0.5, "high": 2.0, "measurement": "layers"}
    ]
    assert found["search_trace"] == ((0.5, 3.0),)
    assert [each["step_s"] for each in found["alternatives"]] == [None, 3.0]
    assert [each["call"] for each in found["alternatives"]] == ["a", "b"]
    assert found["worth"] == (worth("three"),)
    plan, preset = found["plans"]
    assert preset == {"name": "split", "feasible": False, "problem": "too few devices"}
    assert plan == {
        "name": "searched", "feasible": True, "problem": "", "step_s": 2.0, "step_interval_s": (1.0, 3.0),
        "probability_slower": None, "tokens_per_s": 5.0, "gpu_hours_per_million_tokens": 7.0, "peak_bytes": 30.0,
        "device_bytes": [30.0] * 4, "communicator_bytes": [1.4] * 4,
        "longest_chain": {"actor_generate": 0.75, "reallocation": 0.25}, "busiest_device": 3, "busy": 0.5,
        "plan": prediction.plan, "modes": {},
    }  # fmt: skip


@pytest.mark.parametrize("large", [{}, {"wider_s": 1.5}, {"num_meshes": 3}])
def test_a_certificate_as_data(large: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What only large clusters have is left out elsewhere, and so is that a plan was found."""
    monkeypatch.setattr(hinge_module, "hinges", lambda *_: [])
    certificate = Certificate(cost_s=2.0, lower_bound_s=1.0, proven=False, **large)  # type: ignore[arg-type]
    found = comparison.summary(comparison_of(result=result_of(predicted(), certificate=certificate)))
    assert found["certificate"] == {
        "cost_s": 2.0, "lower_bound_s": 1.0, "proven": False, "has_all_meshes": True, "breadth": "all",
        "offload": None, "copying_s": None, **large,
    }  # fmt: skip
    given = comparison.summary(comparison_of())
    assert (given["certificate"], given["search_trace"]) == (None, ())


# --- several cases


def cases(
    monkeypatch: pytest.MonkeyPatch,
    tasks: Mapping[str, PlanningTask],
    steps: Mapping[str, float | None],
    known_s: float,
) -> tuple[dict[str, Any], list[Any]]:
    """The results where searches find steps of these seconds (None: nothing), and the plan of the last case takes
    `known_s` in a further one."""
    asked: list[Any] = []
    names = {id(task): name for name, task in tasks.items()}

    def search(task: PlanningTask) -> SearchResult:
        step_s = steps[names[id(task)]]
        if step_s is None:
            raise UserError("nothing fits")
        calls = ON_ALL | {"actor_generate": CallPlan(devices=(0, 4), tp=4, copy_from="ref_inference")}
        return result_of(predicted(step_s, notes={"of": names[id(task)]}, calls=calls))

    def known(task: PlanningTask, plan: ExecutionPlan) -> Prediction:
        asked.append((names[id(task)], plan.notes["of"], plan.max_steps_in_flight, plan.predicted_step_s, plan.copies))
        return predicted(known_s + 1, notes={"of": "in order"})

    def copies(task: PlanningTask, prediction: Prediction) -> Prediction:
        assert prediction.plan.notes == {"of": "in order"}
        assert id(task) in names
        return predicted(known_s, notes={"of": "known"})

    monkeypatch.setattr(comparison, "predict_in_best_order", known)
    monkeypatch.setattr(comparison, "with_best_copies", copies)
    monkeypatch.setattr(comparison, "describe", lambda task, result: (names[id(task)], result))
    return comparison.solve_cases(tasks, search), asked


def test_a_plan_of_less_staleness_counts_for_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many steps in flight as there, and copies from home at first. A case without a plan is passed over."""
    tasks = {name: replace(TASK, max_steps_in_flight=2 + number) for number, name in enumerate("abcd")}
    found, asked = cases(monkeypatch, tasks, {"a": 3.0, "b": None, "c": 4.0, "d": 1.0}, 2.0)
    assert asked == [("c", "a", 4, None, {}), ("d", "known", 5, None, {})]
    assert str(found["b"]) == "nothing fits"
    assert [(name, found[name][0], found[name][1].prediction.step_s) for name in "acd"] == [
        ("a", "a", 3.0),
        ("c", "c", 2.0),
        ("d", "d", 1.0),
    ]


def test_plans_of_one_cluster_say_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"a": replace(TASK), "b": replace(TASK, cluster=cpu_cluster(2))}
    found, asked = cases(monkeypatch, tasks, {"a": 3.0, "b": 4.0}, 2.0)
    assert (asked, found["b"][1].prediction.step_s) == ([], 4.0)
