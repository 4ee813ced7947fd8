"""Timings of a measured profile, term by term, and what the cost model knows of all its models."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from realhf.architecture.model import Experts
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.experience import RunTimes, SeenCall, digest_of, save_run_times
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.profile import (
    PARTS,
    UNSTATED_ERROR,
    CallOverheads,
    CollectiveKind,
    CollectiveTimings,
    Curve,
    DecodeTimings,
    LayerProfile,
    ReallocationTimings,
    TensorTimings,
    profile_path,
    save_profile,
)
from realhf.planning.model.timings import Costs, ProfiledTimings, TensorGroup, Timings, load_costs
from realhf.planning.model.uncertainty import Uncertainty
from tests.unit.planning.graphs import TINY

CPU, H100 = load_hardware("cpu"), load_hardware("h100")
CRITIC = TINY.with_head("scalar")
WEIGHTS = 4 * 64 * 64 + 3 * 64 * 128
OVERHEADS = CallOverheads(
    forward_s=1.0, forward_micro_batch_s=2.0, train_s=3.0, train_micro_batch_s=4.0, generate_s=5.0,
    generate_s_per_parameter=6.0, decode_step_s=7.0, message_s=8.0,
)  # fmt: skip


def line(slope: float) -> Curve:
    return Curve((1, 2, 64), (slope, 2 * slope, 64 * slope))


def tensor(tp: int, scale: float, *, reduces: bool = True) -> TensorTimings:
    """Seconds a token: 100, 200 of a layer, 3, 5 of an embedding, 7, 11 of a head; 50 and 60 a sequence to decode."""
    return TensorTimings(
        tp=tp,
        includes_all_reduce=reduces,
        layer_forward=line(100 * scale),
        layer_backward=line(200 * scale),
        embedding_forward=line(3 * scale),
        embedding_backward=line(5 * scale),
        head_forward=line(7 * scale),
        head_backward=line(11 * scale),
        layer_decode=(
            DecodeTimings(context=10, seconds=line(50 * scale)),
            DecodeTimings(context=20, seconds=line(60 * scale)),
        ),
    )


def measured(*tensors: TensorTimings, **fields: Any) -> LayerProfile:
    """Collectives: 1e-3 of a byte over 2 devices, 3e-3 over 4; half of it gathered, a quarter reduce-scattered."""
    ends = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.25}
    collectives = [
        CollectiveTimings(kind=kind, group_size=n, seconds=Curve((0, 1000), (0.0, part * slope)))  # type: ignore[arg-type]
        for kind, part in ends.items()
        for n, slope in ((4, 3.0), (2, 1.0))
    ]
    collectives.append(CollectiveTimings(kind="send", group_size=2, seconds=Curve((0, 1000), (0.0, 9.0))))
    all_fields = {
        "hardware": "cpu", "model": TINY, "dtype": "float32", "sequence_length": 16,
        "tensor": tensors or (tensor(1, 1.0), tensor(2, 0.75)), "collectives": tuple(collectives),
        "optimizer_s_per_parameter": 0.5, "call_overhead_s": 20.0, "sampling_s": 30.0, "overheads": OVERHEADS,
    }  # fmt: skip
    return LayerProfile(**(all_fields | fields))


def timings_of(*tensors: TensorTimings, factors: Any = None, **fields: Any) -> ProfiledTimings:
    return ProfiledTimings.of(measured(*tensors, **fields), CPU, factors)


REDUCED = 2 * 64 * 4  # bytes of the hidden states of two tokens


@pytest.mark.parametrize(
    ("name", "seconds", "reduces"),
    [("layer", (100, 200), (2, 2)), ("embedding", (3, 5), (1, 0)), ("head", (7, 11), (1, 1))],
)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_seconds_of_every_degree(
    name: str, seconds: tuple[int, int], reduces: tuple[int, int], backward: bool, scale: float
) -> None:
    """Two tokens. Measured with tp 1 and 2, the latter with its all-reduces; tp 4 is half of tp 2 with its own."""
    timings = timings_of(factors={"layers": scale})
    without = timings_of(tensor(1, 1.0), tensor(2, 0.75, reduces=False), factors={"layers": scale})
    own, number = scale * 2 * seconds[backward], reduces[backward]

    def found(of: ProfiledTimings, tp: int, *, crosses: bool = False) -> float:
        length, way = ((16,), {"trains": False}) if name == "layer" else ((), {})
        return float(getattr(of, name)(2, *length, TensorGroup(tp, crosses), backward=backward, **way))

    of_two, of_four = REDUCED / 1000, 3 * REDUCED / 1000
    across = CPU.all_reduce_s(REDUCED, 2, crosses_nodes=True)
    assert found(timings, 1) == own
    assert found(timings, 2) == 0.75 * own
    assert found(timings, 4) == pytest.approx(max(0.75 * own - number * of_two, 0) / 2 + number * of_four)
    assert found(timings, 2, crosses=True) == pytest.approx(max(0.75 * own - number * of_two, 0) + number * across)
    assert found(without, 2) == pytest.approx(0.75 * own + number * of_two)
    assert found(without, 4) == pytest.approx(0.75 * own / 2 + number * of_four)
    alone = timings_of(tensor(1, 1.0), factors={"layers": scale})
    assert found(alone, 2) == pytest.approx(own / 2 + number * of_two)  # one device has no all-reduces to take out
    assert found(timings_of(tensor(1, 1.0), tensor(4, 0.5)), 2) == pytest.approx(own / scale / 2 + number * of_two)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_seconds_of_a_decode_step(scale: float) -> None:
    timings = timings_of(factors={"layers": scale})
    assert timings.decode_layer(2, 10, TensorGroup(1)) == scale * 100
    assert timings.decode_layer(2, 15, TensorGroup(1)) == scale * 110
    assert timings.decode_layer(2, 20, TensorGroup(2)) == scale * 90
    four = (scale * 90 - 2 * REDUCED / 1000) / 2 + 2 * 3 * REDUCED / 1000
    assert timings.decode_layer(2, 20, TensorGroup(4)) == pytest.approx(four)
    across = scale * 90 - 2 * REDUCED / 1000 + 2 * CPU.all_reduce_s(REDUCED, 2, crosses_nodes=True)
    assert timings.decode_layer(2, 20, TensorGroup(2, True)) == pytest.approx(across)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_other_lengths_by_what_attention_takes(backward: bool, experts: bool) -> None:
    """The part of attention at 16 tokens, in a layer of one device, grows and shrinks with the tokens attended to."""
    model = replace(TINY, experts=Experts(count=8, per_token=2)) if experts else TINY
    weights = WEIGHTS + (3 * 64 * 128 if experts else 0)
    timings = timings_of(model=model, factors={"layers": 2.0})
    layer = 2.0 * 2 * (200 if backward else 100)
    a_token = layer * 2 * 64 / (2 * weights + 2 * 64 * 16)
    for length in (1, 16, 26, 1000):
        for tp, part in ((1, 1.0), (2, 0.75)):
            found = timings.layer(2, length, TensorGroup(tp), backward=backward, trains=False)
            assert found == pytest.approx(part * layer + (length - 16) * a_token / tp)


def test_shorter_sequences_never_take_less_than_nothing() -> None:
    """A layer of two devices that was measured to take next to nothing."""
    timings = timings_of(tensor(1, 1.0), tensor(2, 1e-6))
    assert timings.layer(2, 1, TensorGroup(2), backward=False, trains=False) == 0.0
    reduces = 2 * 3 * REDUCED / 1000
    assert timings.layer(2, 16, TensorGroup(4), backward=False, trains=False) == pytest.approx(reduces)


def test_factors_scale_their_own_part() -> None:
    factors = {"layers": 2.0, "collectives": 3.0, "overheads": 5.0, "reallocation": 7.0}
    moves = ReallocationTimings(latency_s=0.5, bandwidth=100.0)
    plain, scaled = (timings_of(factors=each, reallocation=moves) for each in (None, factors))
    assert plain.optimizer(10) == 5.0
    assert scaled.optimizer(10) == 10.0
    assert [plain.send(100, crosses_nodes=False), scaled.send(100, crosses_nodes=False)] == pytest.approx([0.9, 2.7])
    assert [each.collective("all_reduce", 500, 2, crosses_nodes=False) for each in (plain, scaled)] == pytest.approx(
        [0.5, 1.5]
    )
    assert (plain.hardware.call_overhead_s, plain.hardware.sampling_s) == (20.0, 30.0)
    assert (scaled.hardware.call_overhead_s, scaled.hardware.sampling_s) == (100.0, 150.0)
    assert plain.overheads == OVERHEADS
    of_calls = structs.asdict(OVERHEADS)
    assert structs.asdict(scaled.overheads) == {name: 5 * seconds for name, seconds in of_calls.items()}
    links = [(each.links.intra_node_latency_s, each.links.intra_node_bandwidth) for each in (plain, scaled)]
    assert links == [(0.5, 100.0), pytest.approx((3.5, 100 / 7))]
    assert scaled.links == structs.replace(
        scaled.hardware, intra_node_latency_s=3.5, intra_node_bandwidth=scaled.links.intra_node_bandwidth
    )
    assert timings_of(factors=factors).links == timings_of(factors=factors).hardware
    assert (plain.factors, scaled.factors) == (dict.fromkeys(PARTS, 1.0), factors)


def test_a_profile_has_the_place_of_what_a_description_says_of_calls() -> None:
    described = structs.replace(CPU, mini_batch_s=4.0, call_overhead_s=5.0, sampling_s=6.0)
    found = ProfiledTimings.of(measured(), described)
    assert found.hardware == structs.replace(described, mini_batch_s=0.0, call_overhead_s=20.0, sampling_s=30.0)
    assert (found.model, found.dtype, found.profile) == (TINY, "float32", measured())


@pytest.mark.parametrize(("kind", "part"), [("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.25)])
def test_collectives_between_and_beyond_what_was_measured(kind: CollectiveKind, part: float) -> None:
    collective = partial(timings_of().collective, kind)
    assert collective(500, 2, crosses_nodes=False) == pytest.approx(part * 0.5)
    assert collective(500, 3, crosses_nodes=False) == pytest.approx(part * 1.0)
    assert collective(500, 4, crosses_nodes=False, per_node=7) == pytest.approx(part * 1.5)
    assert collective(500, 1, crosses_nodes=False) == 0.0
    across = CPU.all_reduce_s(500, 4, crosses_nodes=True, per_node=2)
    assert collective(500, 4, crosses_nodes=True, per_node=2) == pytest.approx(across * (1 if part == 1 else 0.5))
    assert collective(500, 4, crosses_nodes=True) == collective(500, 4, crosses_nodes=True, per_node=1)
    without = partial(timings_of(collectives=()).collective, kind)
    within = CPU.all_reduce_s(500, 4, crosses_nodes=False)
    assert without(500, 4, crosses_nodes=False) == pytest.approx(within * (1 if part == 1 else 0.5))


def test_messages_within_and_between_nodes() -> None:
    timings = timings_of()
    assert timings.send(500, crosses_nodes=False) == pytest.approx(4.5)
    assert timings.send(500, crosses_nodes=True) == CPU.send_s(500, crosses_nodes=True)
    assert timings_of(collectives=()).send(500, crosses_nodes=False) == CPU.send_s(500, crosses_nodes=False)
    more = CollectiveTimings(kind="send", group_size=4, seconds=Curve((0, 1000), (0.0, 90.0)))
    among_four = timings_of(collectives=(more, *measured().collectives))
    assert among_four.send(500, crosses_nodes=False) == pytest.approx(4.5), "a message is between two"


def test_what_was_measured_stays_as_it_is() -> None:
    timings = timings_of()
    assert timings.under(EngineFeatures(full_logits=True)) is timings


# --- costs


def costs(**fields: Any) -> Costs:
    timings = {
        TINY: ProfiledTimings.of(measured(spread={"layers": 0.3, "collectives": 0.5}), H100),
        CRITIC: ProfiledTimings.of(measured(model=CRITIC, spread={"layers": 0.4}), H100),
    }
    return Costs(H100, timings, **fields)  # type: ignore[arg-type]


def analytic() -> Timings:
    return Timings(model=CRITIC, dtype="float32", hardware=H100)


def test_features_are_those_of_the_model_or_of_all() -> None:
    of_all, own = EngineFeatures(zero1=False), EngineFeatures(full_logits=True)
    known = Costs(H100, {CRITIC: analytic()}, of_all, {"actor": own})
    assert known.features_of("actor") == own
    assert known.features_of("critic") == of_all


def test_parts_are_as_sure_as_the_least_sure_profile() -> None:
    error = math.sqrt(math.pi / 2)  # of a median of one reading, over its spread
    found = costs().part_spread
    assert found == pytest.approx(
        {"layers": 0.4 * error, "collectives": max(0.5 * error, UNSTATED_ERROR), "overheads": UNSTATED_ERROR,
         "reallocation": UNSTATED_ERROR}
    )  # fmt: skip
    assert set(found) == set(PARTS)
    one = Costs(H100, {TINY: costs().timings[TINY], CRITIC: analytic()})
    assert one.part_spread["layers"] == pytest.approx(0.3 * error)
    assert Costs(H100, {CRITIC: analytic()}).part_spread == {}


def test_costs_that_are_scaled() -> None:
    """Constants of the description by name, and parts of profiles."""
    known = Costs(H100, {TINY: costs().timings[TINY], CRITIC: analytic()}, ENGINE, {"a": ENGINE}, {"call": 2.0})
    factors = {"layers": 2.0, "intra_node_latency_s": 3.0, "matmul_flops[float32]": 5.0, "overheads": 7.0}
    found = known.scaled(factors)
    flops = {**H100.matmul_flops, "float32": 5 * H100.matmul_flops["float32"]}
    changed = structs.replace(H100, intra_node_latency_s=3 * H100.intra_node_latency_s, matmul_flops=flops)
    assert found.hardware == changed
    assert found.timings[CRITIC] == replace(analytic(), hardware=changed)
    profiled = found.timings[TINY]
    assert profiled == ProfiledTimings.of(
        measured(spread={"layers": 0.3, "collectives": 0.5}), changed, {"layers": 2.0, "overheads": 7.0}
    )
    assert (found.features, found.of_models, found.call_factors) == (ENGINE, {"a": ENGINE}, {"call": 2.0})


def test_how_far_a_call_may_be_off() -> None:
    """A profiled model by the error of profiles, and by how its own readings of layers spread."""
    stated = Uncertainty(spread={}, call_error=0.5, profiled_error=0.4)
    hardware = structs.replace(H100, uncertainty=stated)
    known = Costs(hardware, {TINY: costs().timings[TINY], CRITIC: analytic()})
    assert known.call_error(TINY) == pytest.approx(0.5)  # of 0.4 and 0.3 at right angles
    assert known.call_error(CRITIC) == 0.5
    other = ProfiledTimings.of(measured(), hardware)
    assert Costs(hardware, {TINY: other}).call_error(TINY) == 0.4
    assert Costs(hardware, {TINY: other}).call_error(CRITIC) == 0.5  # a model that is not known


def test_costs_are_profiled_where_every_model_is() -> None:
    assert costs().profiled
    assert not Costs(H100, {TINY: costs().timings[TINY], CRITIC: analytic()}).profiled


def test_costs_of_a_folder_of_profiles(tmp_path: Path) -> None:
    """Features are those that hold on the hardware; runs beside the profile are read unless told otherwise."""
    path = profile_path(TINY, "float32", "cpu", tmp_path)
    save_profile(measured(), path)
    seen = SeenCall(interface="inference", option="a", log_ratio=0.1, noise=0.01)
    run = RunTimes(run="one", profile=digest_of(path), calls=(seen,))
    save_run_times(run, path)
    models, own = {"actor": TINY, "critic": CRITIC}, EngineFeatures(offloads_states=True, full_logits=True)
    arguments: dict[str, Any] = {"dtype": "float32", "hardware": CPU, "root": tmp_path}
    found = load_costs(models, features=replace(ENGINE, zero1=False), of_models={"critic": own}, **arguments)
    assert found.features == replace(ENGINE, zero1=False).on(CPU)
    assert found.of_models == {"critic": own.on(CPU)}
    assert not found.of_models["critic"].offloads_states
    assert found.timings[CRITIC] == Timings(model=CRITIC, dtype="float32", hardware=CPU, features=found.features)
    assert found.timings[TINY] == ProfiledTimings.of(measured(), CPU)
    assert found.seen == {TINY: (run,)}
    assert found.hardware == CPU
    assert load_costs(models, ignores_runs=True, **arguments).seen == {TINY: ()}
    assert load_costs(models, **arguments).of_models == {}


def test_the_memory_of_communicators_is_the_largest_measured(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"dtype": "float32", "hardware": H100, "root": tmp_path}
    for model, size_bytes in ((TINY, 0), (CRITIC, None)):
        fields = {"hardware": "h100", "model": model, "communicator_bytes": size_bytes}
        save_profile(measured(**fields), profile_path(model, "float32", "h100", tmp_path))
    assert load_costs({"critic": CRITIC}, **arguments).hardware == H100
    found = load_costs({"critic": CRITIC, "actor": TINY}, **arguments).hardware
    assert found == structs.replace(H100, communicator_bytes=0.0)
