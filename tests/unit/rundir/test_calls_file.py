"""Calls of a live program as data: what comes out is what went in, and what is no data is refused by name."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realhf.algorithms.grpo.config import GRPO, grpo_loss
from realhf.api import DP_PROTO, Generate, GenerationOptions, ModelFunctionCallDef, Update, inputs
from realhf.base.errors import RunError, UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.rundir.calls_file import GrowingCalls, ProgramGraph, call_line, decoded, encoded
from tests.e2e.runs import SMALL_ACTOR

GENERATION = ModelFunctionCallDef(
    model_name="actor",
    model_type=SMALL_ACTOR,
    interface_type=GENERATE,
    interface_impl=Generate.by(GenerationOptions(max_new_tokens=4, samples_per_prompt=2, stop_sequences=((1, 2),))),
    input_data=["prompt"],
    output_data=["seq", "logprob"],
)
TRAINING = ModelFunctionCallDef(
    model_name="actor",
    model_type=SMALL_ACTOR,
    interface_type=TRAIN_STEP,
    interface_impl=Update(grpo_loss(GRPO(max_new_tokens=4, samples_per_prompt=2)), batch=inputs("prompt", "seq")),
    input_data=["prompt", "seq"],
    mini_batches=2,
)


def itself(module: str) -> str:
    return module


def function_of_this_file(x: int) -> int:
    return x


@dataclass(frozen=True)
class Settings:
    number: float
    names: tuple[str, ...] = ()
    nested: Any = None
    derived: int = dataclasses.field(default=3, init=False)


@pytest.mark.parametrize(
    "value",
    [
        Settings(0.1 + 0.2, ("a", "b"), Settings(float("inf"))),
        {"a": [1, (2.5, None)], "b": True},
        INFERENCE,
        GENERATION.interface_impl,
        TRAINING.interface_impl,
    ],
)
def test_values_come_back(value: Any) -> None:
    line = msgspec.json.encode(encoded(value, itself))
    assert decoded(msgspec.json.decode(line)) == value


def test_functions_go_by_their_names() -> None:
    assert encoded(function_of_this_file, itself) == f"{__name__}:function_of_this_file"
    assert encoded(function_of_this_file, lambda _: "program") == "program:function_of_this_file"


def local() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 0, "has no name that workers could find it by"),
        (local(), "define it at the top level of a file"),
        ({1, 2}, "a set, which workers cannot get"),
        (Settings(1.0, nested=b"bytes"), "a bytes, which workers cannot get"),
    ],
)
def test_what_is_no_data_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encoded(value, itself)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"class": "os:system", "fields": {}}, "'os:system' is no dataclass"),
        ({"class": "os:nothing", "fields": {}}, "workers do not find 'os:nothing'"),
        ({"class": "no_such_module:Settings", "fields": {}}, "define it above `realhf.start`"),
    ],
)
def test_names_in_a_file_call_nothing(line: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoded(line)


def test_a_protocol_of_the_users_is_refused() -> None:
    call = dataclasses.replace(GENERATION, name="generate", protocol=DP_PROTO)
    with pytest.raises(UserError, match="protocol DP_PROTO is for declared experiments"):
        call_line(call, itself)


def written(path: Path, *calls: ModelFunctionCallDef, end: bytes = b"") -> None:
    path.write_bytes(b"".join(msgspec.json.encode(call_line(call, itself)) + b"\n" for call in calls) + end)


def test_calls_are_found_as_they_come(tmp_path: Path) -> None:
    """A line that is still being written counts once it is whole."""
    path, added = tmp_path / "calls.jsonl", list[str]()
    calls = GrowingCalls(path, {"actor": SMALL_ACTOR}, lambda call: added.append(call.name))
    assert calls.get("actor_generate") is None
    half = msgspec.json.encode(call_line(TRAINING, itself))
    written(path, GENERATION, end=half[:40])
    assert calls["actor_generate"] == GENERATION
    with pytest.raises(KeyError):
        calls["actor_train_step"]
    written(path, GENERATION, TRAINING)
    assert calls["actor_train_step"] == TRAINING
    assert added == ["actor_generate", "actor_train_step"]


def test_a_call_of_an_unknown_model(tmp_path: Path) -> None:
    written(tmp_path / "calls", GENERATION)
    with pytest.raises(RunError, match="a model 'actor' that there is not"):
        GrowingCalls(tmp_path / "calls", {}, lambda _: None)["actor_generate"]


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_graph_grows(tmp_path: Path, reproducible: bool) -> None:
    outline = DataflowGraph([GENERATION], ["prompt"])
    graph = ProgramGraph(outline, tmp_path / "calls", reproducible=reproducible)
    assert not graph.makes("seq")
    assert not graph.calls
    written(tmp_path / "calls", GENERATION)
    assert graph.makes("seq")
    assert (graph.samples_per_prompt, graph.producers["logprob"]) == (2, "actor_generate")
    assert graph.calls["actor_generate"].reproducible is reproducible
    assert graph.calls_of("actor") == [graph.calls["actor_generate"]]
