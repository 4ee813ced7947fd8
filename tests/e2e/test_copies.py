"""Calls that take their copy of the parameters from another call's copy compute the same, bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.dataflow.plan_checks import check_plan
from realhf.experiments import ready_file
from realhf.report.run_data import read_trace
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import SMALL, FinishedRun, realhf
from tests.e2e.test_algorithms_plans import (
    BATCH,
    JOBS,
    MIXED,
    PATTERNS,
    STEPS,
    Pattern,
    Runs,
    at,
    check_rollouts,
    graph_of,
    statistics,
)

pytestmark = pytest.mark.distributed

SOURCE, TAKER = "actor_generate", "actor_generate_greedy"
OVERLAPPING = 6  # steps


@dataclass(frozen=True)
class Given(Pattern):
    """The plan of ReMax in which calls named in `named` have these layouts."""

    named: Mapping[str, CallPlan] = field(default_factory=dict)

    def plan(self, graph: DataflowGraph) -> ExecutionPlan:
        plan = super().plan(graph)
        plan = replace(plan, calls=plan.calls | self.named)
        check_plan(plan, graph, BATCH)
        return plan


def given(source: CallPlan, taker: CallPlan) -> Given:
    """The actor lives on four devices and generates twice in other layouts."""
    rest = PATTERNS[MIXED]
    return Given(rest.train, rest.generate, rest.infer, named={SOURCE: source, TAKER: taker})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("copies"))


def movers(run: FinishedRun) -> set[tuple[int, str]]:
    """The workers that took part in moves of parameters for the taker, and as what."""
    events = read_trace(run.path / "trace.json")
    return {
        (e.tid, e.cat) for e in events if e.name.startswith(f"{TAKER} of ") and e.cat in ("sending", "reallocation")
    }


@pytest.mark.parametrize(
    ("source", "taker", "moving"),
    [
        pytest.param(
            at(0, dp=2, tp=2),
            at(0, dp=4),
            dict.fromkeys(range(4), "reallocation"),
            id="the same devices",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            at(0, tp=2), at(1, dp=2), {0: "sending", 1: "reallocation", 2: "reallocation"}, id="other devices"
        ),
        pytest.param(at(0, tp=2), at(0, tp=2, micro_batches=2), {}, id="taken over", marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_a_copy_computes_the_same(
    source: CallPlan, taker: CallPlan, moving: dict[int, str], runs: Runs, tmp_path: Path
) -> None:
    """Its bits come from the source's devices: the home's devices 2 and 3 have nothing to send."""
    from_home = runs.run(tmp_path / "home", "remax", given(source, taker), "--steps", str(STEPS))
    copied = given(source, replace(taker, copy_from=SOURCE))
    from_copy = runs.run(tmp_path / "copy", "remax", copied, "--steps", str(STEPS))
    assert {worker for worker, _ in movers(from_home)} == {0, 1, 2, 3}
    assert movers(from_copy) == set(moving.items())
    assert statistics(from_copy) == statistics(from_home)
    for step in range(STEPS):
        check_rollouts(from_copy, from_home, step)
    for model, config in runs.models("remax").items():
        assert torch.equal(from_copy.parameters(model, config), from_home.parameters(model, config))


def test_a_wrong_source_is_refused_before_anything_starts(runs: Runs, tmp_path: Path) -> None:
    words = runs.options("remax")
    plan = given(at(0, tp=2), at(1, dp=2)).plan(graph_of(JOBS["remax"], words))
    wrong = {TAKER: replace(plan.calls[TAKER], copy_from="reference_inference")}
    save_plan(replace(plan, calls=plan.calls | wrong), tmp_path / "plan.json")
    places = ("--plan", tmp_path / "plan.json", "--run-dir", tmp_path / "run")
    result = realhf("run", ready_file("remax"), *words, *places)
    assert result.returncode == 2
    assert result.stderr == (
        "error: actor_generate_greedy: copy_from='reference_inference' is no other call of its model 'actor' with a "
        "copy; choose from actor_generate, or leave it out: the copy then comes from the model's home\n"
    )
    assert not (tmp_path / "run").exists()


# PPO whose reference looks four times at what was generated. All but the first are for nobody: they may be late.
EXPERIMENT = """
from dataclasses import dataclass, replace

from experiments.ppo import PPOExperiment
from realhf.api import Logprobs, auto


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class LookingPPO(PPOExperiment):
    @property
    def rpcs(self):
        first = next(call for call in super().rpcs if call.name == "reference_inference")
        more = [
            replace(first, name=name, interface_impl=Logprobs(outputs=(name,)), output_data=[name])
            for name in ("second", "third", "fourth")
        ]
        return [*super().rpcs, *more]
"""


@pytest.mark.slow
def test_a_frozen_models_copies_over_steps_that_overlap(tmp_path: Path) -> None:
    """One that is moved and one that is taken over, of the same copy; three steps in flight."""
    (tmp_path / "looking_ppo.py").write_text(EXPERIMENT)
    words = f"--steps {OVERLAPPING} --seed 7 --batch-size 8 --dtype float64 --verify-reallocations-every 1".split()
    words += ["--no-evaluate", "--record", "second", "third", "fourth", *SMALL[2:]]
    names = ("actor_generate", "reward_inference", "critic_inference", "actor_train_step", "critic_train_step")
    places = dict.fromkeys((*names, "reference_inference"), at(0))
    places |= {"second": at(2, tp=2), "third": at(1), "fourth": at(2, tp=2)}
    copied = {name: replace(places[name], copy_from="second") for name in ("third", "fourth")}
    runs = {}
    for name, calls in (("home", places), ("copy", places | copied)):
        plan = ExecutionPlan(num_devices=4, calls=calls, max_steps_in_flight=3)
        save_plan(plan, tmp_path / f"{name}.json")
        given = ("--plan", tmp_path / f"{name}.json")
        runs[name] = quickly_finished(tmp_path / name, tmp_path / "looking_ppo.py", *words, *given)
    for step in range(OVERLAPPING):
        for key in ("second", "third", "fourth"):
            expected, got = (runs[name].recorded(step, key, key) for name in ("home", "copy"))
            assert all(torch.equal(got[sample], expected[sample]) for sample in expected)
            assert expected.keys() == got.keys()
