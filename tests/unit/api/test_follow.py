"""Which models can follow which, and when they do."""

import re

import pytest

from realhf.api.errors import UserError
from realhf.api.follow import Follow
from realhf.api.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from tests.unit.api.calls import TINY, call

CALLS = [
    call("actor", GENERATE, ["prompt"], ["seq"]),
    call("reference", INFERENCE, ["seq"], ["logprob"]),
    call("reference", INFERENCE, ["seq"], ["entropy"], name="entropies"),
    call("critic", INFERENCE, ["seq"], ["value"], model_type=TINY.with_head("scalar")),
    call("actor", TRAIN_STEP, ["seq", "logprob"], name="first"),
    call("actor", TRAIN_STEP, ["seq", "logprob"], name="second"),
]


def test_a_model_follows_between_the_steps() -> None:
    """After the last training of its source and its own readers, before those of the next step."""
    graph = DataflowGraph(CALLS, ["prompt"], {"reference": Follow("actor", eta=0.1)})
    name = "reference_follows_actor"
    assert graph.nodes == [*graph.calls, name]
    edges = {(e.parent, e.child, e.steps_back) for e in graph.edges if name in (e.parent, e.child)}
    assert edges == {
        ("second", name, 0),
        ("reference_inference", name, 0),
        ("entropies", name, 0),
        (name, "first", 1),
        (name, "reference_inference", 1),
        (name, "entropies", 1),
    }
    assert not DataflowGraph(CALLS, ["prompt"]).follows


def test_every_third_step() -> None:
    graph = DataflowGraph(CALLS, ["prompt"], {"reference": Follow("actor", eta=0.1, every_steps=3)})
    [node] = graph.follows.values()
    assert [step for step in range(9) if node.is_due(step)] == [2, 5, 8]


def test_a_stale_copy_is_made_before_the_training_of_its_source() -> None:
    """After the training of the step before, and after its own readers; neither waits for this step's training."""
    calls = [
        call("rollout", GENERATE, ["prompt"], ["seq"]),
        call("actor", TRAIN_STEP, ["seq"], name="first"),
        call("actor", TRAIN_STEP, ["seq"], name="second"),
    ]
    graph = DataflowGraph(calls, ["prompt"], {"rollout": Follow("actor", eta=1.0, staleness=1)})
    name = "rollout_follows_actor"
    edges = {(e.parent, e.child, e.steps_back) for e in graph.edges if name in (e.parent, e.child)}
    assert edges == {
        ("rollout_generate", name, 0),
        ("second", name, 1),
        (name, "first", 0),
        (name, "rollout_generate", 1),
    }
    assert graph.order == ["rollout_generate", name, "first", "second"]
    assert [graph.weights_version("rollout_generate", step) for step in range(4)] == [0, 0, 1, 2]
    assert [graph.weights_version("first", step) for step in range(4)] == [0, 1, 2, 3]


def test_versions_of_what_follows_every_third_step_and_of_what_never_changes() -> None:
    graph = DataflowGraph(CALLS, ["prompt"], {"reference": Follow("actor", eta=1.0, every_steps=3)})
    assert [graph.weights_version("entropies", step) for step in range(8)] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert graph.weights_version("critic_inference", 5) == 0


def test_staleness_is_0_or_1() -> None:
    with pytest.raises(UserError, match="staleness=2 must be 0 or 1"):
        Follow("actor", eta=1.0, staleness=2)


@pytest.mark.parametrize("eta", [0.0, -0.1, 1.5, float("nan")])
def test_eta_is_a_weight(eta: float) -> None:
    with pytest.raises(UserError, match=f"eta={eta:g} is the weight of the source in an average"):
        Follow("actor", eta=eta)


def test_every_steps_is_a_number_of_steps() -> None:
    with pytest.raises(UserError, match="every_steps=0 must be at least 1"):
        Follow("actor", eta=0.1, every_steps=0)


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        ("reference", "critic", "which no call trains, so that it never changes; trained models: actor"),
        ("reference", "nobody", "model 'reference' follows 'nobody', which no call trains"),
        ("actor", "actor", "model 'actor' follows 'actor' but is trained itself"),
        ("critic", "actor", "model 'critic' follows 'actor' but they have two architectures"),
        ("nobody", "actor", "follows 'actor' but no call uses it; the calls use actor, critic, reference"),
    ],
)  # fmt: skip
def test_models_that_cannot_follow(target: str, source: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        DataflowGraph(CALLS, ["prompt"], {target: Follow(source, eta=0.1)})
