"""Calls beside the devices occupy none of them: their time, in predictions, searches and problem files."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from realhf.dataflow.graph import INFERENCE, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.planning.explain.analysis import BESIDE, analyse
from realhf.planning.explain.comparison import compare, describe
from realhf.planning.predict import predict, problem_of
from realhf.planning.presets import evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.file import PlannedFile, load_problem, problem_bytes
from realhf.planning.problem.native import native_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import all_options, cpu_cluster, ppo, settings, task_of
from tests.unit.planning.simulation import makespan_s, simulate


@dataclass(frozen=True, kw_only=True)
class Rule(InterfaceConfig):
    implementation: ClassVar[str] = "nowhere:Nothing"
    uses_model: ClassVar[bool] = False
    runs_beside: ClassVar[bool] = True

    seconds_per_sample: float = 0.0
    processes_per_worker: int = 1


def ruled(rule: Rule) -> DataflowGraph:
    """PPO with a rule in the place of the reward model."""
    calls = [call for call in ppo().calls.values() if call.model_name != "reward"]
    judge = ModelFunctionCallDef(
        name="judge", interface_type=INFERENCE, interface_impl=rule, input_data=["seq"], output_data=["rewards"]
    )
    return DataflowGraph([*calls, judge], ["prompts"])


def task(rule: Rule, devices: int = 4, batch_size: int = 16) -> PlanningTask:
    graph = ruled(rule)
    return task_of(graph, **settings(graph, cpu_cluster(devices), batch_size))


def all_on(devices: tuple[int, int]) -> ExecutionPlan:
    calls = dict.fromkeys(ruled(Rule()).model_calls, CallPlan(devices=devices, tp=devices[1]))
    return ExecutionPlan(num_devices=4, calls=calls, max_steps_in_flight=1)


def test_its_time_is_that_of_a_workers_samples_over_its_processes() -> None:
    rule = Rule(seconds_per_sample=3.0, processes_per_worker=2)
    for devices, batch_size, samples in (((0, 4), 16, 4), ((0, 1), 16, 16), ((0, 4), 6, 2)):
        prediction = predict(task(rule, batch_size=batch_size), all_on(devices))
        assert prediction.call_s["judge"] == prediction.plan.beside["judge"] == 3.0 * samples / 2
        assert "judge" not in prediction.plan.calls
        assert "judge" not in prediction.transfer_s
    slow = replace(task(rule), costs=replace(task(rule).costs, call_factors={"judge": 2.0}))
    assert predict(slow, all_on((0, 4))).call_s["judge"] == 12.0, "it took twice as long as was predicted"


def test_a_short_rule_hides_behind_other_calls_and_a_long_one_is_what_the_step_waits_for() -> None:
    """One device: reference and critic compute while the rule runs."""
    plan = all_on((0, 1))
    free = predict(task(Rule()), plan)
    others_s = free.call_s["ref_inference"] + free.call_s["critic_inference"]
    short = predict(task(Rule(seconds_per_sample=0.9 * others_s / 16)), plan)
    assert short.step_s == pytest.approx(free.step_s)
    long = predict(task(Rule(seconds_per_sample=(others_s + 7.0) / 16)), plan)
    assert long.step_s == pytest.approx(free.step_s + 7.0, rel=1e-3)
    found = analyse(task(Rule(seconds_per_sample=7.0)), long)
    assert next(iter(found.chain)) == "judge"
    assert {span.devices for span in found.spans if span.kind == BESIDE} == {()}


def test_the_search_knows_it_and_proves_its_plan_as_python_simulates_it() -> None:
    of_rule = task(Rule(seconds_per_sample=0.01), devices=2)
    found = search_plan(of_rule, SearchBudget(evaluations=3000))
    assert found.certificate.proven
    assert found.plan.beside.keys() == {"judge"}
    assert {entry.call for entry in found.plan.order} == set(of_rule.graph.nodes)
    problem = build_problem(of_rule, all_options(of_rule))
    native = native_problem(problem)
    sizes = [len(call.options) for call in problem.calls]
    for seed in range(20):
        choice = [(7 * seed + 3 * i) % size for i, size in enumerate(sizes)]
        step_s = makespan_s(simulate(problem, choice, problem.steps)) / problem.steps
        assert native.evaluate(choice)["step_time"] == pytest.approx(step_s, rel=1e-12)
    assert all(rule.prediction is not None for rule in evaluate_presets(of_rule) if rule.name != "standalone")
    assert compare(describe(of_rule, found)).alternatives


def test_problem_files_have_it(tmp_path: Path) -> None:
    of_rule = task(Rule(seconds_per_sample=0.01))
    problem = problem_of(of_rule, all_on((0, 1)))
    path = tmp_path / "problem.json"
    path.write_bytes(problem_bytes(PlannedFile.of(problem)))
    again = load_problem(path)
    assert again.transfers[0].on == []
    plan = [0] * len(problem.calls)
    assert native_problem(again).evaluate(plan) == native_problem(problem).evaluate(plan)
