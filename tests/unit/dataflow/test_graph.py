"""Edges follow from keys and from shared parameters; what cannot be a graph is refused in one sentence."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.architecture.named import LLAMA
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, Edge
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.protocols import ALL_TO_ALL, RANK_ZERO, THREE_D_PROTO
from tests.unit.api.calls import TINY, Nothing, Rule, call, ppo_graph, rule


def test_producers_and_data_edges() -> None:
    graph = ppo_graph()
    assert graph.producers == {
        "seq": "actor_generate",
        "logprob": "actor_generate",
        "value": "critic_inference",
        "reward": "reward_inference",
    }
    assert {edge for edge in graph.edges if edge.kind == "data"} == {
        Edge("actor_generate", "actor_train_step", 0, "data", ("seq", "logprob")),
        Edge("reward_inference", "actor_train_step", 0, "data", ("reward",)),
        Edge("critic_inference", "actor_train_step", 0, "data", ("value",)),
        Edge("actor_generate", "critic_train_step", 0, "data", ("seq",)),
        Edge("reward_inference", "critic_train_step", 0, "data", ("reward",)),
        Edge("critic_inference", "critic_train_step", 0, "data", ("value",)),
        Edge("actor_generate", "critic_inference", 0, "data", ("seq",)),
        Edge("actor_generate", "reward_inference", 0, "data", ("seq",)),
    }
    assert graph.consumers("seq") == ["critic_inference", "reward_inference", "actor_train_step", "critic_train_step"]
    assert graph.consumers("prompt") == ["actor_generate"]


def test_version_edges_order_readers_then_training_then_the_next_step() -> None:
    versions = {(e.parent, e.child, e.steps_back) for e in ppo_graph().edges if e.kind == "version"}
    assert versions == {
        ("actor_generate", "actor_train_step", 0),
        ("actor_train_step", "actor_generate", 1),
        ("actor_train_step", "actor_train_step", 1),
        ("critic_inference", "critic_train_step", 0),
        ("critic_train_step", "critic_inference", 1),
        ("critic_train_step", "critic_train_step", 1),
    }


def test_two_trainings_of_one_model_follow_each_other() -> None:
    graph = DataflowGraph(
        [call("m", TRAIN_STEP, ["x"], name="first"), call("m", TRAIN_STEP, ["x"], name="second")], "x"
    )
    assert {(e.parent, e.child, e.steps_back) for e in graph.edges} == {
        ("first", "second", 0),
        ("second", "first", 1),
    }


def test_readers_come_before_the_first_of_several_trainings() -> None:
    calls = [call("m", INFERENCE, ["x"]), *(call("m", TRAIN_STEP, ["x"], name=name) for name in ("first", "second"))]
    graph = DataflowGraph(calls, ["x"])
    assert {(e.parent, e.child, e.steps_back) for e in graph.edges} == {
        ("m_inference", "first", 0),
        ("first", "second", 0),
        ("second", "first", 1),
        ("second", "m_inference", 1),
    }
    assert [graph.weights_version("m", step) for step in (0, 3)] == [0, 3]


def test_a_model_that_nobody_trains_has_no_version_edges() -> None:
    graph = DataflowGraph([call("m", GENERATE, ["x"], ["y"]), call("m", INFERENCE, ["y"], ["z"])], ["x"])
    assert [(e.parent, e.child, e.kind) for e in graph.edges] == [("m_generate", "m_inference", "data")]


def test_calls_come_in_topological_order_free_ones_as_listed() -> None:
    graph = ppo_graph()
    names = ["actor_generate", "critic_inference", "reward_inference", "actor_train_step", "critic_train_step"]
    assert list(graph.calls) == names
    assert list(graph.models) == ["actor", "critic", "reward"]
    assert [c.name for c in graph.calls_of("critic")] == ["critic_inference", "critic_train_step"]
    assert {e.parent for e in graph.parents("reward_inference")} == {"actor_generate"}


def test_calls_beside_the_devices_have_no_model_and_run_where_their_inputs_are_made() -> None:
    calls = [
        rule("late", ["x", "score"]),
        rule("judge", ["x", "seq"], ["score"]),
        rule("rows", ["x"]),
        call("b", INFERENCE, ["x"], ["value"]),
        call("a", GENERATE, ["x"], ["seq"]),
    ]
    graph = DataflowGraph(calls, ["x"])
    assert list(graph.models) == ["b", "a"]
    assert list(graph.model_calls) == ["b_inference", "a_generate"]
    assert set(graph.calls) == {*graph.model_calls, "late", "judge", "rows"}
    assert graph.nodes == [*graph.model_calls, *graph.beside]
    assert [graph.place_of(name) for name in ("a_generate", "judge", "late")] == ["a_generate"] * 3
    assert graph.place_of("rows") == "b_inference", "the first call with a model"
    assert [edge.parent for edge in graph.parents("late")] == ["judge"]
    assert replace(calls[0], name="again").name == "again", "its protocol is its own"
    assert [made.protocol for made in calls] == [*[ALL_TO_ALL] * 3, *[THREE_D_PROTO] * 2]


def test_a_model_type_may_be_the_folder_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its path, or under a name in the working folder; what looks like a path and is none is told so."""
    (tmp_path / "mine").mkdir()
    content = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "mine/config.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "./mine", str(tmp_path / "mine")):
        assert call("m", INFERENCE, model_type=name).config.num_layers == 2
    with pytest.raises(UserError, match=r"'./none' is not known; .* or give the path of a Hugging Face config.json"):
        call("m", INFERENCE, model_type="./none")


def test_names_and_named_model_types() -> None:
    made = call("actor", GENERATE, ["prompt"], ["seq"], model_type="llama7b-critic")
    assert made.name == "actor_generate"
    assert made.input_data == ("prompt",)
    assert made.config == LLAMA["llama7b"].with_head("scalar")
    assert not made.trains
    assert call("actor", TRAIN_STEP, name="other").name == "other"


class UsingRule(Rule):
    uses_model = True


BAD_CALLS = {
    "a string as keys": (
        lambda: call("m", INFERENCE, "seq"),
        "m_inference: input_data='seq' must be a list of keys",
    ),
    "outputs as a string": (
        lambda: call("m", INFERENCE, [], "reward"),
        "m_inference: output_data='reward' must be a list of keys",
    ),
    "no mini-batch": (
        lambda: call("m", TRAIN_STEP, mini_batches=0),
        "m_train_step: mini_batches=0 must be 1, or at least 1 for a train_step",
    ),
    "mini-batches without training": (
        lambda: call("m", INFERENCE, mini_batches=2),
        "m_inference: mini_batches=2 must be 1, or at least 1 for a train_step",
    ),
    "an unknown model type": (
        lambda: call("m", INFERENCE, model_type="llama8b"),
        "model_type='llama8b' is not known; choose one of llama7b, llama7b-critic, llama13b, ",
    ),
    "no model": (
        lambda: call("", INFERENCE),
        "a call: it lacks a model; give model_name and model_type, or an interface that needs none: a configuration "
        "with runs_beside=True and uses_model=False, unlike Nothing",
    ),
    "no architecture": (lambda: call("m", INFERENCE, model_type=None), "m: it lacks a model; give model_name and "),
    "a rule with a model": (
        lambda: call("m", INFERENCE, interface_impl=Rule()),
        "m: Rule runs beside the devices (runs_beside=True), where no model is; give the configuration "
        "uses_model=False, and leave model_name and model_type out",
    ),
    "a rule with a name of a model": (lambda: rule("judge", model_name="m"), "judge: Rule runs beside the devices"),
    "a rule with an architecture": (lambda: rule("judge", model_type=TINY), "judge: Rule runs beside the devices"),
    "a rule that uses a model": (
        lambda: rule("judge", interface_impl=UsingRule()),
        "judge: UsingRule runs beside the devices (runs_beside=True), where no model is; give the configuration",
    ),
    "a rule without a name": (lambda: rule(""), "a call of Rule has no name, and no model whose name it could have"),
    "a rule that trains": (
        lambda: rule("judge", interface_type=TRAIN_STEP),
        "judge: Rule runs beside the devices, and interface_type=train_step is for models; make it an inference call",
    ),
    "a rule with a protocol": (
        lambda: rule("judge", protocol=RANK_ZERO),
        "judge: protocol RANK_ZERO is for calls with a layout, and Rule runs beside the devices",
    ),
    "an unknown suffix": (
        lambda: call("m", INFERENCE, model_type="llama7b-reward"),
        "or pass a DecoderConfig",
    ),
}

BAD_GRAPHS = {
    "rules alone": ([rule("judge", ["x"])], ["x"], "all calls (judge) run beside the devices, and none has a model"),
    "no calls": ([], [], "rpcs is empty; return at least one ModelFunctionCallDef"),
    "one name twice": (
        [call("m", INFERENCE, ["x"], ["y"]), call("m", INFERENCE, ["x"], ["z"])],
        ["x"],
        "two calls are named 'm_inference'; give one of them another name=",
    ),
    "two architectures": (
        [call("m", INFERENCE, ["x"]), call("m", TRAIN_STEP, ["x"], model_type=TINY.with_head("scalar"))],
        ["x"],
        "model_name='m' has two architectures: m_inference uses ",
    ),
    "a key nobody makes": (
        [call("m", INFERENCE, ["y"])],
        ["x", "w"],
        "m_inference: input key 'y' has no producer; no call lists it in output_data and the data set does not "
        "have it; the known keys are w, x",
    ),
    "two producers": (
        [call("a", INFERENCE, ["x"], ["y"]), call("b", INFERENCE, ["x"], ["y"])],
        ["x"],
        "key 'y' has two producers, a_inference and b_inference; rename one of the outputs",
    ),
    "one call makes a key twice": (
        [call("a", INFERENCE, ["x"], ["y", "y"])],
        ["x"],
        "key 'y' has two producers, a_inference and a_inference; rename one of the outputs",
    ),
    "a producer beside the data set": (
        [call("a", INFERENCE, ["x"], ["x"])],
        ["x"],
        "key 'x' has two producers, the data set and a_inference; rename one of the outputs",
    ),
    "a cycle": (
        [call("a", INFERENCE, ["y"], ["x"]), call("b", INFERENCE, ["x"], ["y"])],
        [],
        "the calls form a cycle: ",
    ),
    "a reader behind the training of its model": (
        [call("m", TRAIN_STEP, ["x"], ["y"]), call("m", INFERENCE, ["y"])],
        ["x"],
        "the calls form a cycle: ",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str) -> None:
    make, message = BAD_CALLS[name]
    with pytest.raises(UserError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_bad_graphs(name: str) -> None:
    calls, keys, message = BAD_GRAPHS[name]
    with pytest.raises(UserError, match=re.escape(message)):
        DataflowGraph(calls, keys)


def test_a_cycle_is_shown_along_its_arrows_with_a_remedy() -> None:
    calls = [
        call("a", INFERENCE, ["z"], ["x"]),
        call("b", INFERENCE, ["x"], ["y"]),
        call("c", INFERENCE, ["y"], ["z"]),
    ]
    with pytest.raises(UserError) as error:
        DataflowGraph(calls, [])
    cycle = re.search(r"cycle: (.*); remove one of these inputs", str(error.value))
    assert cycle
    names = cycle[1].split(" -> ")
    assert names[0] == names[-1]
    arrows = set(itertools.pairwise(names))
    assert arrows == {("a_inference", "b_inference"), ("b_inference", "c_inference"), ("c_inference", "a_inference")}


def several(number: float) -> InterfaceConfig:
    class Several(Nothing):
        samples_per_prompt = number  # type: ignore[assignment]

    return Several()


def test_all_generations_of_a_graph_have_one_number_of_samples_a_prompt() -> None:
    sample = call("actor", GENERATE, ["prompt"], ["seq"], interface_impl=several(4))
    train = call("actor", TRAIN_STEP, ["seq"])
    assert DataflowGraph([train], ["seq"]).samples_per_prompt == 1
    assert ppo_graph().samples_per_prompt == 1
    assert DataflowGraph([sample, train], ["prompt"]).samples_per_prompt == 4
    greedy = call("actor", GENERATE, ["prompt"], ["greedy"], name="greedy")
    with pytest.raises(UserError, match=r"actor_generate has samples_per_prompt=4 and greedy has 1; .* one number"):
        DataflowGraph([sample, greedy, train], ["prompt"])
    with pytest.raises(UserError, match=r"actor_generate: samples_per_prompt=0 of Several must be a whole number"):
        call("actor", GENERATE, ["prompt"], ["seq"], interface_impl=several(0))
    with pytest.raises(UserError, match=r"samples_per_prompt=1\.5 of Several must be a whole number of at least 1"):
        call("actor", GENERATE, ["prompt"], ["seq"], interface_impl=several(1.5))
    both = [call("actor", GENERATE, ["prompt"], [key], name=key, interface_impl=several(4)) for key in ("seq", "other")]
    assert DataflowGraph(both, ["prompt"]).samples_per_prompt == 4


def test_a_step_has_whole_groups() -> None:
    graph = DataflowGraph([call("actor", GENERATE, ["prompt"], ["seq"], interface_impl=several(4))], ["prompt"])
    assert graph.rows_per_step(32) == 8
    with pytest.raises(
        UserError, match=r"samples_per_prompt=4 does not divide batch_size=6, .* 4 responses, .* from 1, 2, 3, 6"
    ):
        graph.rows_per_step(6)


def test_epochs_make_more_optimizer_steps() -> None:
    class Twice(Nothing):
        epochs = 2

    train = call("m", TRAIN_STEP, ["x"], mini_batches=3, interface_impl=Twice())
    assert (train.passes, train.optimizer_steps) == (2, 6)
    read = call("m", INFERENCE, ["x"], interface_impl=Twice())
    assert (read.passes, read.optimizer_steps) == (1, 0), "one interface may serve several calls"
