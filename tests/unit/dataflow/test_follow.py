"""Which models can follow which, and when they do."""

import re

import pytest

from realhf.base.errors import UserError
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
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
    assert [node.brings(step) for step in (2, 5)] == [3, 6], "the training of the step is in it"


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
    assert [graph.weights_version("rollout", step) for step in range(4)] == [-1, 0, 1, 2]
    assert [graph.weights_version("actor", step) for step in range(4)] == [0, 1, 2, 3]


def test_a_copy_three_steps_old_waits_for_no_training_of_the_last_three_steps() -> None:
    """The copy of step t is of the weights before its training, and used in step t + 3, in which it is overwritten."""
    calls = [call("rollout", GENERATE, ["prompt"], ["seq"]), call("actor", TRAIN_STEP, ["seq"])]
    graph = DataflowGraph(calls, ["prompt"], {"rollout": Follow("actor", eta=1.0, staleness=3)})
    name = "rollout_follows_actor"
    edges = {(e.parent, e.child, e.steps_back) for e in graph.edges if name in (e.parent, e.child)}
    assert edges == {
        ("rollout_generate", name, 0),
        ("actor_train_step", name, 1),
        (name, "actor_train_step", 0),
        (name, "rollout_generate", 3),
    }
    assert [graph.weights_version("rollout", step) for step in range(6)] == [-3, -2, -1, 0, 1, 2]
    assert graph.versions_kept("rollout") == 3
    assert graph.versions_kept("actor") == 1
    [node] = graph.follows.values()
    assert [(node.version(step), node.brings(step)) for step in (3, 4)] == [(0, 3), (1, 4)]


def test_versions_of_what_follows_every_third_step_and_of_what_never_changes() -> None:
    graph = DataflowGraph(CALLS, ["prompt"], {"reference": Follow("actor", eta=1.0, every_steps=3)})
    assert [graph.weights_version("reference", step) for step in range(8)] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert graph.weights_version("critic", 5) == 0


def test_staleness_is_a_number_of_steps_and_above_1_of_copies_alone() -> None:
    with pytest.raises(UserError, match="staleness=-1 must be at least 0"):
        Follow("actor", eta=1.0, staleness=-1)
    for other in ({"eta": 0.5}, {"eta": 1.0, "every_steps": 2}):
        with pytest.raises(UserError, match="staleness=2 is for copies of the weights of single steps; give eta=1 and"):
            Follow("actor", staleness=2, **other)
        assert Follow("actor", staleness=1, **other).staleness == 1
    assert Follow("actor", eta=1.0, staleness=2).staleness == 2


@pytest.mark.parametrize("eta", [0.0, -0.1, 1.5, float("nan")])
def test_eta_is_a_weight(eta: float) -> None:
    with pytest.raises(UserError, match=f"eta={eta:g} is the weight of the source in an average"):
        Follow("actor", eta=eta)


def test_what_is_said_of_following_is_said_by_name() -> None:
    made = Follow("actor", eta=0.5)
    assert (made.every_steps, made.staleness) == (1, 0)
    for given in (("actor", 0.5), ("actor", 0.5, 3)):
        with pytest.raises(TypeError):
            Follow(*given)  # type: ignore[misc, call-arg]
    with pytest.raises(TypeError):
        Follow("actor", 1, eta=1.0)  # type: ignore[misc]


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


def test_the_trained_models_are_named_where_another_was_given() -> None:
    trained = [call(name, TRAIN_STEP, ["prompt"]) for name in ("first", "second", "third", "fourth", "fifth")]
    reference = call("reference", INFERENCE, ["prompt"])
    for calls, models in ((trained, "fifth, first, fourth, second, third"), ([], "none")):
        with pytest.raises(UserError, match=f"so that it never changes; trained models: {models}$"):
            DataflowGraph([*calls, reference], ["prompt"], {"reference": Follow("nobody", eta=0.1)})
