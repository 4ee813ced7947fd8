"""Copies of trained models generate where a plan says how old their weights may be."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from experiments.ppo import PPOExperiment
from realhf.api import Evaluation, Pool
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.dataflow.follow import Follow

PPO = PPOExperiment(batch_size=8, evaluate=False)


@dataclass(frozen=True, kw_only=True)
class Pooled(PPOExperiment):
    @property
    def pools(self) -> dict[str, Pool]:
        return {"actor": Pool("left", devices=range(0, 2))}


def test_a_copy_generates_under_the_calls_name_by_weights_of_k_steps_before() -> None:
    stale = ResolvedExperiment(PPO, 2)
    graph, setups = stale.graph, stale.setups
    assert {name: call.model_name for name, call in graph.calls.items()} == {
        "actor_generate": "actor_rollout",
        "reward_inference": "reward",
        "reference_inference": "reference",
        "critic_inference": "critic",
        "actor_train_step": "actor",
        "critic_train_step": "critic",
    }
    assert [graph.weights_version("actor_rollout", step) for step in (2, 3, 9)] == [0, 1, 7]
    assert setups["actor_rollout"] == replace(
        setups["actor"], optimizer=None, follows=Follow("actor", eta=1.0, staleness=2)
    )
    assert ResolvedExperiment(PPO).graph.follows == {}
    assert ResolvedExperiment(PPO).setups.keys() == setups.keys() - {"actor_rollout"}
    assert list(ResolvedExperiment(PPO).graph.calls.values()) == PPO.rpcs


def test_the_graph_is_that_of_an_experiment_which_asks_for_it() -> None:
    """experiments/ppo.py has a field for it, and a copy of another name."""
    planned, own = ResolvedExperiment(PPO, 1).graph, ResolvedExperiment(replace(PPO, staleness=1)).graph

    def edges(graph: object, copy: str) -> set[tuple[str, ...]]:
        return {
            (*(name.replace(copy, "COPY") for name in (edge.parent, edge.child)), str(edge.steps_back), edge.kind)
            for edge in graph.edges  # type: ignore[attr-defined]
        }

    assert edges(planned, "actor_rollout") == edges(own, "rollout")


def test_a_copy_stays_in_the_pool_of_its_model() -> None:
    graph = ResolvedExperiment(Pooled(batch_size=8), 1).graph
    assert graph.pools["actor_rollout"] == graph.pools["actor"]


def test_what_cannot_be_stale() -> None:
    with pytest.raises(
        UserError, match=r"staleness 1 is for generation by a model that the experiment trains.* copy may"
    ):
        _ = ResolvedExperiment(replace(PPO, staleness=1), 1).graph
    taken = [
        replace(call, model_name="actor_rollout") if call.name == "reference_inference" else call for call in PPO.rpcs
    ]
    with pytest.raises(UserError, match="staleness 1 makes a model 'actor_rollout', and the experiment has one"):
        _ = ResolvedExperiment(PPO, 1, (taken, ["prompt"])).graph
    with pytest.raises(UserError, match="staleness 65 is not from 0 to 64"):
        _ = ResolvedExperiment(PPO, 65).graph


def test_evaluations_have_their_names_and_one_rhythm() -> None:
    one = Evaluation(rpcs=[], dataset=PPO.dataset, batch_size=4, every_steps=2)

    def splits(evaluation: object) -> list[str]:
        return list(ResolvedExperiment(SimpleNamespace(evaluation=evaluation)).evaluations)

    assert splits(None) == []
    assert splits(one) == ["evaluation"]
    assert splits({"hard": one, "math-500": one}) == ["evaluation/hard", "evaluation/math-500"]
    with pytest.raises(UserError, match="evaluation: the name 'a/b' has other characters than letters"):
        splits({"a/b": one})
    with pytest.raises(UserError, match=r"every_steps=5 of 'b' is not 2, that of 'a'; all sets .* one number"):
        splits({"a": one, "b": replace(one, every_steps=5)})


def test_each_part_is_asked_for_and_derived_once() -> None:
    asked: list[str] = []

    class Asked(PPOExperiment):
        def __getattribute__(self, name: str) -> object:
            asked.extend([name] * (name in ("rpcs", "models", "dataset", "evaluation")))
            return super().__getattribute__(name)

    experiment = ResolvedExperiment(Asked(batch_size=8, evaluate=False))
    for _ in range(2):
        assert experiment.graph.models.keys() == experiment.setups.keys()
        assert (experiment.settings.batch_size, experiment.evaluations, [*experiment.graphs]) == (8, {}, ["train"])
        assert experiment.calls
        assert experiment.dataset
        assert experiment.stale(0) is experiment
        assert experiment.stale(2) is experiment.stale(2)
    assert sorted(asked) == ["dataset", "evaluation", "models", "rpcs"]
