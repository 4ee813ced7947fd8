"""What an engine does: by default, on a hardware, for a setup, under a plan, and by the names of a command line."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from msgspec import structs

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.architecture.compute import ComputeConfig, Recomputed
from realhf.architecture.decoding import GraphLife
from realhf.architecture.model import DType, Experts
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelInterfaceType
from realhf.dataflow.plan import CallCompute
from realhf.planning.model.call import features_during
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE, FEATURES, EngineFeatures, differences, of_setup, with_features
from realhf.planning.model.workload import Workload
from tests.unit.planning.graphs import TINY, call

CPU, H100 = load_hardware("cpu"), load_hardware("h100")
ON_GPUS = EngineFeatures(on_gpus=True)
MODES = (("*", "zero1"), ("layers.0.q", "1 zero1 + 1 sharded"))


def test_what_this_engine_does_where_nobody_chooses() -> None:
    does = {name for name, value in asdict(ENGINE).items() if value is True}
    does_not = {name for name, value in asdict(ENGINE).items() if value is False}
    others = {name: value for name, value in asdict(ENGINE).items() if not isinstance(value, bool)}
    assert does == {"zero1", "prefetch", "fp32_gradients", "cuda_graphs", "response_logits", "gathers_drawn_logits"}
    assert does_not == {
        "fully_sharded", "on_gpus", "full_logits", "sequence_parallel", "regathers_inputs", "blocking_sends",
        "drains_pipelines", "offloads_states", "packs_weights", "in_host_memory", "fuses_training",
        "copies_checkpoints", "ordered",
    }  # fmt: skip
    assert others == {
        "modes": None,
        "recomputation": "off",
        "recomputed_layers": None,
        "multiprocessors": 1,
        "logits_chunk_bytes": ENGINE.logits_chunk_bytes,
    }


@pytest.mark.parametrize(
    ("dtype", "gradient", "narrow", "states"), [("bfloat16", 4, 2, 12), ("float32", 4, 4, 8), ("float64", 8, 8, 16)]
)
def test_bytes_of_gradients_and_states(dtype: DType, gradient: int, narrow: int, states: int) -> None:
    """Two states, and a master copy below float32; all in float32 at least."""
    assert ENGINE.gradient_bytes(dtype) == gradient
    assert EngineFeatures(fp32_gradients=False).gradient_bytes(dtype) == narrow
    assert ENGINE.state_bytes(dtype) == states


def test_what_holds_on_a_hardware() -> None:
    asked = EngineFeatures(offloads_states=True, copies_checkpoints=True, sequence_parallel=True)
    of_gpus: dict[str, Any] = {"on_gpus": True, "multiprocessors": 132, "logits_chunk_bytes": 512 * 2**20}
    on_gpu = replace(asked, **of_gpus, copies_checkpoints=False)
    on_host = replace(asked, offloads_states=False, packs_weights=True, in_host_memory=True, fuses_training=True)
    assert asked.on(H100) == on_gpu
    assert asked.on(CPU) == on_host
    assert asked.on(structs.replace(CPU, threads=2)) == replace(on_host, fuses_training=False)
    assert asked.on(structs.replace(H100, threads=2, packs_weights=True)) == replace(on_gpu, packs_weights=True)
    assert on_host.on(H100) == EngineFeatures(**of_gpus, sequence_parallel=True)
    assert on_gpu.on(CPU) == replace(on_host, copies_checkpoints=False)
    assert replace(asked, logits_chunk_bytes=None).on(H100).logits_chunk_bytes is None
    assert asked.on(load_hardware("a100-80g")).multiprocessors == 108
    assert ENGINE.on(CPU) == EngineFeatures(packs_weights=True, in_host_memory=True, fuses_training=True)


@pytest.mark.parametrize(
    ("compute", "changes"),
    [
        (CallCompute(), {}),
        (CallCompute(recomputation="full", recomputed_layers=2), {"recomputation": "full", "recomputed_layers": 2}),
        (CallCompute(recomputation="off"), {"recomputation": "off"}),
        (CallCompute(sequence_parallel=True), {"sequence_parallel": True}),
        (CallCompute(prefetch=False), {"prefetch": False}),
        (CallCompute(offload_states=True), {"offloads_states": True}),
        (CallCompute(data_parallel="fsdp"), {"fully_sharded": True, "modes": None}),
        (CallCompute(data_parallel=MODES), {"fully_sharded": False, "modes": MODES}),
        (CallCompute(data_parallel="zero1"), {"fully_sharded": False, "modes": None}),
    ],
)
def test_a_plan_goes_before_the_setup(compute: CallCompute, changes: dict[str, Any]) -> None:
    given = EngineFeatures(recomputation="selective", recomputed_layers=1, modes=(("*", "sharded"),))
    assert given.under(compute) == replace(given, **{"offloads_states": False} | changes)
    assert given.recomputed == Recomputed("selective", 1)


def test_a_plan_leaves_what_it_does_not_say() -> None:
    """Of states in a host's memory none wait elsewhere, whatever the plan says."""
    given = EngineFeatures(fully_sharded=True, sequence_parallel=True, prefetch=False)
    assert given.under(CallCompute(recomputation="full")) == replace(given, recomputation="full")
    host = EngineFeatures(in_host_memory=True)
    assert not host.under(CallCompute(offload_states=True)).offloads_states


@pytest.mark.parametrize(
    ("features", "divides"),
    [
        (ENGINE, False),
        (EngineFeatures(fully_sharded=True), True),
        (EngineFeatures(modes=(("*", "zero1"), ("head", "replicated"))), False),
        (EngineFeatures(modes=MODES), True),
    ],
)
def test_parameters_are_divided_by_what_is_sharded(features: EngineFeatures, divides: bool) -> None:
    assert features.divides_parameters is divides


EXPERTS = replace(TINY, experts=Experts(count=4, per_token=2))


@pytest.mark.parametrize("graphs", ["kept", "call", "off"])
@pytest.mark.parametrize("does", [True, False])
@pytest.mark.parametrize("on_gpus", [True, False])
@pytest.mark.parametrize("model", [TINY, EXPERTS], ids=["dense", "experts"])
def test_decode_steps_are_graphs_where_all_allow_it(model: Any, on_gpus: bool, does: bool, graphs: GraphLife) -> None:
    """Their cache waits for the next call where graphs do, and nothing of the model is divided."""
    features = EngineFeatures(on_gpus=on_gpus, cuda_graphs=does)
    replays = model is TINY and on_gpus and does and graphs != "off"
    assert features.replays(model, graphs) is replays
    assert features.keeps_cache(model, graphs) is (replays and graphs == "kept")
    assert not replace(features, fully_sharded=True).keeps_cache(model, graphs)


NAMES = {
    "zero1": {"zero1": True},
    "no-zero1": {"zero1": False},
    "fp32-gradients": {"fp32_gradients": True},
    "no-fp32-gradients": {"fp32_gradients": False},
    "recomputation": {"recomputation": "full"},
    "no-recomputation": {"recomputation": "off"},
    "selective-recomputation": {"recomputation": "selective"},
    "no-selective-recomputation": {"recomputation": "off"},
    "cuda-graphs": {"cuda_graphs": True},
    "no-cuda-graphs": {"cuda_graphs": False},
    "sharded-logits": {"full_logits": False},
    "no-sharded-logits": {"full_logits": True},
    "response-logits": {"response_logits": True},
    "no-response-logits": {"response_logits": False},
    "sharded-sampling": {"gathers_drawn_logits": False},
    "no-sharded-sampling": {"gathers_drawn_logits": True},
    "chunked-logits": {"logits_chunk_bytes": ENGINE.logits_chunk_bytes},
    "no-chunked-logits": {"logits_chunk_bytes": None},
    "sequence-parallel": {"sequence_parallel": True},
    "no-sequence-parallel": {"sequence_parallel": False},
    "overlapped-sends": {"blocking_sends": False},
    "no-overlapped-sends": {"blocking_sends": True},
}


def test_each_name_of_the_command_line_says_one_thing() -> None:
    assert set(NAMES) == {word + name for name in FEATURES for word in ("", "no-")}
    other = EngineFeatures(
        zero1=False, fp32_gradients=False, cuda_graphs=False, full_logits=True, response_logits=False,
        logits_chunk_bytes=7, sequence_parallel=True, blocking_sends=True, recomputation="full",
    )  # fmt: skip
    for name, changes in NAMES.items():
        for engine in (ENGINE, other):
            assert with_features([name], engine) == replace(engine, **changes), name
    assert with_features([]) == ENGINE
    assert with_features(["recomputation", "no-zero1", "zero1"]) == EngineFeatures(recomputation="full")


def test_differences_are_said_by_the_same_names() -> None:
    assert differences(ENGINE) == []
    default = {name for name, changes in NAMES.items() if replace(ENGINE, **changes) == ENGINE}
    for name in set(NAMES) - default:
        assert differences(with_features([name])) == [name]
        back = {name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"}
        assert set(differences(ENGINE, with_features([name]))) & back, name
    assert differences(EngineFeatures(zero1=False, full_logits=True)) == ["no-zero1", "no-sharded-logits"]
    # Neither of the two kinds of recomputation is the absence of the other.
    selective, full = (EngineFeatures(recomputation=kind) for kind in ("selective", "full"))
    assert differences(selective, full) == ["selective-recomputation"]
    assert differences(EngineFeatures(logits_chunk_bytes=7)) == []


def test_an_unknown_feature_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError) as error:
        with_features(["zero1", "no-turbo"])
    assert str(error.value) == (
        "feature 'no-turbo' is not known; choose from zero1, fp32-gradients, recomputation, selective-recomputation, "
        "cuda-graphs, sharded-logits, response-logits, sharded-sampling, chunked-logits, sequence-parallel, "
        "overlapped-sends, or with no- before one of them"
    )


@pytest.mark.parametrize(
    ("setup", "changes"),
    [
        (ModelSetup(), {}),
        (ModelSetup(compute=ComputeConfig(data_parallel="fsdp")), {"fully_sharded": True}),
        (ModelSetup(compute=ComputeConfig(prefetch=False)), {"prefetch": False}),
        (ModelSetup(compute=ComputeConfig(sequence_parallel=True)), {"sequence_parallel": True}),
        (ModelSetup(compute=ComputeConfig(recomputation="full")), {"recomputation": "full"}),
        (ModelSetup(optimizer=OptimizerConfig(offload_states=True)), {"offloads_states": True, "fp32_gradients": True}),
        (ModelSetup(optimizer=OptimizerConfig(fp32_gradients=True)), {"fp32_gradients": True}),
        (ModelSetup(optimizer=OptimizerConfig(fp32_gradients=False)), {"fp32_gradients": False}),
        (
            ModelSetup(backend="transformers"),
            {"full_logits": True, "response_logits": False, "logits_chunk_bytes": None, "cuda_graphs": False},
        ),
        (ModelSetup(backend="megatron"), {}),
    ],
)
def test_what_a_setup_chooses(setup: ModelSetup, changes: dict[str, Any]) -> None:
    assert of_setup(setup) == replace(ENGINE, **changes)


@pytest.mark.parametrize(
    ("kind", "features", "changes"),
    [
        (TRAIN_STEP, EngineFeatures(on_gpus=True, sequence_parallel=True), {}),
        (TRAIN_STEP, EngineFeatures(on_gpus=True, full_logits=True, gathers_drawn_logits=False), {}),
        (INFERENCE, EngineFeatures(on_gpus=True, sequence_parallel=True), {"sequence_parallel": False}),
        (INFERENCE, EngineFeatures(on_gpus=True, full_logits=True), {}),
        (GENERATE, EngineFeatures(on_gpus=True), {"full_logits": True}),
        (GENERATE, EngineFeatures(on_gpus=True, gathers_drawn_logits=False), {}),
        (GENERATE, EngineFeatures(on_gpus=True, gathers_drawn_logits=False, full_logits=True), {}),
        (GENERATE, EngineFeatures(), {"full_logits": True, "cuda_graphs": False}),
    ],
)
def test_what_an_engine_does_during_a_call(
    kind: ModelInterfaceType, features: EngineFeatures, changes: dict[str, Any]
) -> None:
    """Tokens are divided in training alone; where tokens are drawn, logits are gathered."""
    lengths = Workload(prompt_tokens=8, new_tokens=8)
    assert features_during(call("m", TINY, kind, "x"), lengths, features) == replace(features, **changes)
    eager = replace(lengths, decode_graphs="off")
    without = replace(features, **changes | {"cuda_graphs": False})
    assert features_during(call("m", TINY, kind, "x"), eager, features) == without
