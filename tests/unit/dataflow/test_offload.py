"""Which nodes load which models, and where they stand in an order."""

import re

import pytest

from realhf.base.errors import UserError
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.offload import Load, check_offload, loads_of, models_needed, with_loads
from tests.unit.api.calls import call, ruled_graph

CALLS = [
    call("actor", GENERATE, ["prompt"], ["seq"]),
    call("reference", INFERENCE, ["seq"], ["logprob"]),
    call("actor", TRAIN_STEP, ["seq", "logprob"]),
]
GRAPH = DataflowGraph(CALLS, ["prompt"], {"reference": Follow("actor", eta=0.1)})


def test_a_model_is_loaded_for_each_node_that_needs_it() -> None:
    loads = loads_of(GRAPH, ["actor"])
    assert list(loads.values()) == [
        Load("load actor for actor_generate", "actor", "actor_generate", False),
        Load("load actor for actor_train_step", "actor", "actor_train_step", True),
        Load("load actor for reference_follows_actor", "actor", "reference_follows_actor", False),
    ]
    order = [("actor_generate", 1), ("reference_inference", 0), ("reference_follows_actor", 0)]
    assert with_loads(order, loads) == [
        ("load actor for actor_generate", 1),
        ("actor_generate", 1),
        ("reference_inference", 0),
        ("load actor for reference_follows_actor", 0),
        ("reference_follows_actor", 0),
    ]
    assert with_loads(order, loads_of(GRAPH, [])) == order


def test_a_node_needs_its_model_or_both_that_follow_or_none_beside_the_devices() -> None:
    assert models_needed(GRAPH, "actor_train_step") == ("actor",)
    assert models_needed(GRAPH, "reference_follows_actor") == ("actor", "reference")
    assert models_needed(ruled_graph(), "judge") == ()


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (["critic"], "offload: 'critic' is no model of the experiment; choose from actor, reference"),
        (["actor", "actor"], "offload: 'actor' is listed twice"),
        (["actor", "reference"], "offload: 'reference' follows 'actor', so that both are needed at once"),
    ],
)
def test_what_cannot_be_offloaded(offload: list[str], message: str) -> None:
    check_offload(["actor"], GRAPH)
    check_offload(["reference"], GRAPH)
    check_offload(["reference", "actor"], DataflowGraph(CALLS, ["prompt"]))
    with pytest.raises(UserError, match=re.escape(message)):
        check_offload(offload, GRAPH)
