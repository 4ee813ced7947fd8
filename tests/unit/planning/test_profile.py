"""Profiles and hardware descriptions: files, interpolation, and what replaces a missing measurement."""

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

import realhf
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.planning.model.descriptions import DESCRIPTIONS, load_hardware
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.profile import (
    CallOverheads,
    CollectiveKind,
    CollectiveTimings,
    Curve,
    DecodeTimings,
    LayerProfile,
    ReallocationTimings,
    TensorTimings,
    interpolate,
    load_profile,
    profile_path,
    profiles_root,
    save_profile,
)
from realhf.planning.model.timings import ProfiledTimings, TensorGroup, load_costs
from tests.unit.planning.graphs import TINY


def tensor(tp: int, scale: float, includes_all_reduce: bool = True) -> TensorTimings:
    line = Curve((1, 2, 4), (1 * scale, 2 * scale, 4 * scale))
    return TensorTimings(
        tp=tp,
        includes_all_reduce=includes_all_reduce,
        layer_forward=line,
        layer_backward=Curve((1, 4), (2 * scale, 8 * scale)),
        embedding_forward=line,
        embedding_backward=line,
        head_forward=line,
        head_backward=line,
        layer_decode=(
            DecodeTimings(context=10, seconds=Curve((1, 2), (1.0, 2.0))),
            DecodeTimings(context=20, seconds=Curve((1, 2), (3.0, 4.0))),
        ),
    )


def profile(*tensors: TensorTimings) -> LayerProfile:
    return LayerProfile(
        hardware="cpu",
        model=TINY,
        dtype="float32",
        sequence_length=16,
        tensor=tensors or (tensor(1, 1.0),),
        collectives=(
            CollectiveTimings(kind="all_reduce", group_size=4, seconds=Curve((0, 256), (0.3, 0.3))),
            CollectiveTimings(kind="all_reduce", group_size=2, seconds=Curve((0, 256), (0.1, 0.1))),
            CollectiveTimings(kind="send", group_size=2, seconds=Curve((0, 100), (0.0, 1.0))),
        ),
        optimizer_s_per_parameter=1e-9,
        call_overhead_s=0.01,
        sampling_s=0.002,
    )


def test_interpolation() -> None:
    curve = Curve((1, 2, 4), (1.0, 3.0, 4.0))
    assert [curve.at(x) for x in (1, 1.5, 2, 3, 4)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert curve.at(8) == 6.0  # the last piece goes on
    assert Curve((2, 4), (3.0, 4.0)).at(1) == 2.5  # and so does the first
    assert interpolate([(2.0, 5.0)], 9) == 5.0


def test_beyond_the_measured_sizes_nothing_is_free() -> None:
    steep = Curve((2, 4), (1.0, 7.0))
    assert [steep.at(x) for x in (0, 0.5, 1, 2)] == [0.0, 0.25, 0.5, 1.0]  # in proportion; the piece itself is below 0
    falling = Curve((1, 2, 4), (1.0, 8.0, 6.0))
    assert [falling.at(x) for x in (4, 5, 100)] == [6.0, 6.0, 6.0]


def test_a_profile_with_a_time_of_zero_is_to_be_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    broken = structs.replace(tensor(1, 1.0), layer_backward=Curve((1, 4), (0.0, 8.0)))
    save_profile(profile(broken), path)
    with pytest.raises(UserError, match=r"layer_backward at tp=1 takes 0 s at 1, .* `realhf profile --force`"):
        load_profile(path)
    decode = DecodeTimings(context=10, seconds=Curve((1, 2), (1.0, 0.0)))
    save_profile(profile(structs.replace(tensor(1, 1.0), layer_decode=(decode,))), path)
    with pytest.raises(UserError, match="layer_decode of context 10 at tp=1 takes 0 s at 2"):
        load_profile(path)


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((1,), (1.0,)), ((1, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((1, 2), (1.0, -1.0))]
)
def test_broken_curves(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises((ValueError, UserError), match=r"curve|sizes|seconds"):
        Curve(sizes, seconds)


def test_profiles_are_files(tmp_path: Path) -> None:
    path = profile_path(TINY, "float32", "cpu", tmp_path)
    assert path.parent == tmp_path / "cpu"
    assert path != profile_path(TINY, "float64", "cpu", tmp_path)
    assert path != profile_path(TINY.with_head("scalar"), "float32", "cpu", tmp_path)
    save_profile(profile(), path)
    assert load_profile(path) == profile()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_where_profiles_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "realhf").mkdir(parents=True)
    (checkout / "experiments").mkdir()
    monkeypatch.setattr(realhf, "__file__", str(checkout / "realhf" / "__init__.py"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    of_the_user = tmp_path / "data" / "realhf" / "profiles"
    monkeypatch.chdir(checkout)
    assert profiles_root() == of_the_user  # an installed package: pyproject.toml does not stand beside it
    (checkout / "pyproject.toml").touch()
    for folder, root in (
        (checkout, checkout / "profiles" / "local"),
        (checkout / "experiments", checkout / "profiles" / "local"),
        (tmp_path, of_the_user),
    ):
        monkeypatch.chdir(folder)
        assert profiles_root() == root
        assert profile_path(TINY, "float32", "cpu").is_relative_to(root / "cpu")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert profiles_root() == tmp_path / "home" / ".local" / "share" / "realhf" / "profiles"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layer-profile/1", "layer-profile/9", "format"),
        ('"sampling_s"', '"samplings"', "samplings"),
        ('"tp": 1', '"tp": 2', "it needs tp=1"),
        ('"num_layers": 4', '"num_layers": 0', "num_layers"),
    ],
)
def test_broken_profiles_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "p.json"
    save_profile(profile(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message) as error:
        load_profile(path)
    assert str(path) in str(error.value)
    assert "realhf profile" in str(error.value)


def test_missing_profile(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_profile(tmp_path / "none.json")


def profiled(measured: LayerProfile, hardware: Hardware) -> ProfiledTimings:
    return ProfiledTimings.of(measured, hardware)


def test_measured_times_are_used() -> None:
    timings = profiled(profile(tensor(1, 1.0), tensor(2, 0.75)), load_hardware("cpu"))
    assert timings.layer(3, 16, TensorGroup(1), backward=False, trains=False) == 3.0
    assert timings.layer(3, 16, TensorGroup(1), backward=True, trains=False) == 6.0
    assert timings.layer(3, 16, TensorGroup(2), backward=False, trains=False) == 0.75 * 3
    assert timings.decode_layer(2, 15, TensorGroup(1)) == 3.0  # between the contexts
    # Of a group that was not measured: the work of the largest one divided further, with two all-reduces of its own, of
    # 2 tokens of 64 numbers, in place of those that were measured.
    two, four = (2 * timings.collective("all_reduce", 2 * 64 * 4, size, crosses_nodes=False) for size in (2, 4))
    assert timings.decode_layer(2, 15, TensorGroup(4)) == pytest.approx((3.0 - two) * 2 / 4 + four)
    found = timings.hardware
    assert (found.call_overhead_s, found.sampling_s, found.mini_batch_s) == (0.01, 0.002, 0.0)
    assert timings.optimizer(10**9) == pytest.approx(1.0)
    assert timings.send(50, crosses_nodes=False) == 0.5
    between_sizes = timings.collective("all_reduce", 100, 3, crosses_nodes=False)
    assert between_sizes == pytest.approx(0.2)
    assert timings.collective("all_reduce", 100, 1, crosses_nodes=False) == 0.0


def test_gathers_and_scatters_are_those_of_the_profile() -> None:
    gathers = CollectiveTimings(kind="all_gather", group_size=2, seconds=Curve((0, 100), (0.5, 1.5)))
    measured = structs.replace(profile(), collectives=(*profile().collectives, gathers))
    hardware = load_hardware("cpu")
    timings = profiled(measured, hardware)
    assert timings.collective("all_gather", 50, 2, crosses_nodes=False) == pytest.approx(1.0)
    half = timings.collective("reduce_scatter", 50, 2, crosses_nodes=False)  # of the all-reduce: none was measured
    assert half == pytest.approx(0.1 / 2)
    assert timings.collective("all_gather", 50, 1, crosses_nodes=False) == 0.0
    across = timings.collective("all_gather", 1e6, 2, crosses_nodes=True)
    assert across == pytest.approx(hardware.all_reduce_s(1e6, 2, crosses_nodes=True) / 2)
    doubled = ProfiledTimings.of(measured, hardware, {"collectives": 2.0})
    assert doubled.collective("all_gather", 50, 2, crosses_nodes=False) == pytest.approx(2.0)


def test_a_profile_of_all_reduces_alone_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    save_profile(profile(), path)
    assert "all_gather" not in path.read_text()
    timings = profiled(load_profile(path), load_hardware("cpu"))
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
    for kind in kinds:
        assert timings.collective(kind, 256, 4, crosses_nodes=False) == pytest.approx(0.3 / 2)


def test_links_are_those_of_the_hardware_but_for_a_measured_reallocation() -> None:
    hardware = load_hardware("cpu")
    described = profiled(profile(), hardware).links
    assert (described.call_overhead_s, described.sampling_s) == (profile().call_overhead_s, profile().sampling_s)
    assert described.send_s(200, crosses_nodes=False) == hardware.send_s(200, crosses_nodes=False)
    measured = structs.replace(profile(), reallocation=ReallocationTimings(latency_s=0.5, bandwidth=100.0))
    links = profiled(measured, hardware).links
    assert links.send_s(200, crosses_nodes=False) == 0.5 + 2.0
    assert links.send_s(200, crosses_nodes=True) == hardware.send_s(200, crosses_nodes=True)


def test_what_was_not_measured() -> None:
    hardware = load_hardware("cpu")
    timings = profiled(profile(tensor(1, 1.0), tensor(2, 0.75)), hardware)
    # tp 4 from tp 2: its own two all-reduces out, half the compute, two all-reduces of four devices.
    four = timings.layer(4, 16, TensorGroup(4), backward=False, trains=False)
    assert four == pytest.approx((3.0 - 2 * 0.1) / 2 + 2 * 0.3)
    without = profiled(profile(tensor(1, 1.0), tensor(2, 0.75, includes_all_reduce=False)), hardware)
    assert without.layer(4, 16, TensorGroup(2), backward=False, trains=False) == pytest.approx(3.0 + 2 * 0.1)
    size_bytes = 4 * 64 * 4
    between = hardware.all_reduce_s(size_bytes, 2, crosses_nodes=True)
    crossing = timings.layer(4, 16, TensorGroup(2, True), backward=False, trains=False)
    assert crossing == pytest.approx(3.0 - 2 * 0.1 + 2 * between)


def test_load_costs_prefers_a_measurement(tmp_path: Path) -> None:
    models = {"actor": TINY, "critic": TINY.with_head("scalar")}
    save_profile(profile(), profile_path(TINY, "float32", "cpu", tmp_path))
    costs = load_costs(models, dtype="float32", hardware=load_hardware("cpu"), root=tmp_path)
    assert isinstance(costs.timings[TINY], ProfiledTimings)
    assert not isinstance(costs.timings[models["critic"]], ProfiledTimings)
    assert not costs.profiled
    assert costs.hardware.communicator_bytes == 0


def test_the_memory_of_a_communicator_is_the_most_that_was_measured(tmp_path: Path) -> None:
    models = {"actor": TINY, "critic": TINY.with_head("scalar")}
    for size_bytes, model in ((300_000_000, TINY), (200_000_000, models["critic"])):
        measured = structs.replace(profile(), hardware="h100", model=model, communicator_bytes=size_bytes)
        save_profile(measured, profile_path(model, "float32", "h100", tmp_path))
    costs = load_costs(models, dtype="float32", hardware=load_hardware("h100"), root=tmp_path)
    assert costs.profiled
    assert costs.hardware.communicator_bytes == 300_000_000


@pytest.mark.parametrize("name", ["a100-80g", "h100", "h100-modern", "h200", "cpu"])
def test_hardware_descriptions(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.flops("bfloat16") > hardware.flops("float32") > hardware.flops("float64")
    assert hardware.intra_node_bandwidth > hardware.inter_node_bandwidth


def test_broken_hardware(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose one of a100-80g, cpu, h100, h100-modern, h200"):
        load_hardware("b300")
    text = (DESCRIPTIONS / "cpu.yaml").read_text()
    for old, new, message in [
        ("memory_bandwidth: 10.0e+9\n", "", "memory_bandwidth"),
        ("memory_bandwidth: 10.0e+9", "memory_bandwidth: -1", "memory_bandwidth -1.0 is not from 1 to"),
        ("name: cpu", "name: ../cpu", "name '../cpu' is no name of a folder"),
    ]:
        assert old in text
        (tmp_path / "cpu.yaml").write_text(text.replace(old, new))
        with pytest.raises(UserError, match=message):
            load_hardware(str(tmp_path / "cpu.yaml"))


@pytest.mark.parametrize(("model", "dtype"), [(TINY.with_head("scalar"), "float32"), (TINY, "bfloat16")])
def test_a_profile_of_something_else_is_refused(model: DecoderConfig, dtype: DType, tmp_path: Path) -> None:
    path = profile_path(model, dtype, "cpu", tmp_path)
    save_profile(profile(), path)
    with pytest.raises(UserError, match=r"\.json: the profile is of another model or dtype; measure it again"):
        load_costs({"actor": model}, dtype=dtype, hardware=load_hardware("cpu"), root=tmp_path)


# --- the file format, field by field


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((1,), (1.0,), "a curve needs as many seconds as sizes, and at least two of each"),
        ((), (), "at least two of each"),
        ((1, 2), (1.0,), "as many seconds as sizes"),
        ((1, 2), (1.0, 2.0, 3.0), "as many seconds as sizes"),
        ((1, 1), (1.0, 1.0), r"sizes=\[1, 1\] must increase from at least 0"),
        ((1, 3, 2), (1.0, 1.0, 1.0), r"sizes=\[1, 3, 2\] must increase"),
        ((-1, 2), (1.0, 1.0), r"sizes=\[-1, 2\] must increase from at least 0"),
        ((1, 2**61), (1.0, 1.0), "sizes .* is not from 0 to"),
        ((1, 2), (1.0, -1.0), "seconds -1.0 is not from 0 to"),
        ((1, 2), (1.0, 1e10), "seconds .* is not from 0 to"),
    ],
)
def test_curves_that_are_none(sizes: tuple[float, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises((ValueError, UserError), match=message):
        Curve(sizes, seconds)


def test_curves_begin_at_nothing() -> None:
    assert Curve((0, 2), (0.0, 4.0)).at(1) == 2.0


def test_a_curve_at_every_piece() -> None:
    curve = Curve((1, 2, 4, 8), (2.0, 4.0, 5.0, 13.0))
    assert [curve.at(x) for x in (1, 1.5, 2, 3, 4, 6, 8)] == [2.0, 3.0, 4.0, 4.5, 5.0, 9.0, 13.0]
    assert [curve.at(x) for x in (0.5, 10)] == [1.0, 17.0]
    flat = Curve((2, 4), (3.0, 4.0))
    assert [flat.at(x) for x in (0, 1)] == [2.0, 2.5]  # the piece goes on: more than in proportion
    assert Curve((2, 4), (3.0, 2.0)).at(6) == 2.0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (DecodeTimings, {"context": -1}, "context -1 is not from 0 to"),
        (DecodeTimings, {"context": 2**24 + 1}, "context .* is not from 0 to"),
        (TensorTimings, {"tp": 0}, "tp 0 is not from 1 to"),
        (TensorTimings, {"layer_decode": ()}, "layer_decode must have increasing contexts"),
        (CollectiveTimings, {"group_size": 0}, "group_size 0 is not from 1 to"),
        (CallOverheads, {"generate_s_per_parameter": -1.0}, "overheads: generate_s_per_parameter -1.0 is not from 0"),
        (CallOverheads, {"message_s": 1e10}, "overheads: message_s .* is not from 0"),
        (ReallocationTimings, {"latency_s": -1.0}, "reallocation: latency_s -1.0 is not from 0 to"),
        (ReallocationTimings, {"bandwidth": 0.5}, "reallocation: bandwidth 0.5 is not from 1 to"),
        (LayerProfile, {"optimizer_s_per_parameter": -1.0}, "optimizer_s_per_parameter -1.0 is not from 0 to"),
        (LayerProfile, {"call_overhead_s": -1.0}, "call_overhead_s -1.0 is not from 0 to"),
        (LayerProfile, {"sampling_s": 1e10}, "sampling_s .* is not from 0 to"),
        (LayerProfile, {"sequence_length": 0}, "sequence_length 0 is not from 1 to"),
        (LayerProfile, {"communicator_bytes": -1}, "communicator_bytes -1 is not from 0 to"),
        (LayerProfile, {"spread": {"layers": 11.0}}, "spread 11.0 is not from 0 to 10"),
        (LayerProfile, {"tensor": ()}, r"tensor has tp=\[\]; it needs tp=1 and increasing degrees"),
        (LayerProfile, {"tensor": (tensor(2, 1.0),)}, r"tensor has tp=\[2\]; it needs tp=1 and increasing degrees"),
        (LayerProfile, {"tensor": (tensor(1, 1.0), tensor(1, 1.0))}, r"tensor has tp=\[1, 1\]"),
        (LayerProfile, {"tensor": (tensor(1, 1.0), tensor(4, 1.0), tensor(2, 1.0))}, r"tensor has tp=\[1, 4, 2\]"),
    ],
)
def test_fields_out_of_range(kind: Any, changes: dict[str, Any], message: str) -> None:
    good: dict[Any, Any] = {
        DecodeTimings: tensor(1, 1.0).layer_decode[0],
        TensorTimings: tensor(1, 1.0),
        CollectiveTimings: profile().collectives[0],
        CallOverheads: CallOverheads(),
        ReallocationTimings: ReallocationTimings(latency_s=0.0, bandwidth=1.0),
        LayerProfile: profile(),
    }
    with pytest.raises((ValueError, UserError), match=message):
        kind(**(structs.asdict(good[kind]) | changes))
    assert kind(**structs.asdict(good[kind])) == good[kind]


@pytest.mark.parametrize("contexts", [(10, 10), (20, 10)])
def test_contexts_increase(contexts: tuple[int, ...]) -> None:
    decodes = tuple(DecodeTimings(context=context, seconds=Curve((1, 2), (1.0, 2.0))) for context in contexts)
    with pytest.raises(ValueError, match="layer_decode must have increasing contexts"):
        structs.replace(tensor(1, 1.0), layer_decode=decodes)
    assert DecodeTimings(context=0, seconds=Curve((1, 2), (1.0, 2.0))).context == 0


def test_curves_by_name() -> None:
    found = dict(tensor(1, 1.0).curves())
    assert list(found) == [
        "layer_forward", "layer_backward", "embedding_forward", "embedding_backward", "head_forward", "head_backward",
        "layer_decode of context 10", "layer_decode of context 20",
    ]  # fmt: skip
    assert found["layer_backward"] == Curve((1, 4), (2.0, 8.0))
    assert found["layer_decode of context 20"] == Curve((1, 2), (3.0, 4.0))


def test_what_an_older_profile_lacks() -> None:
    found = profile()
    assert found.overheads == CallOverheads()
    assert set(structs.asdict(CallOverheads()).values()) == {0.0}
    assert (found.reallocation, found.communicator_bytes, found.spread, found.noisy) == (None, None, {}, ())
    assert (found.measured, found.format) == ({}, "layer-profile/1")


@pytest.mark.parametrize(("readings", "number"), [({}, 1), ({"repetitions": 9}, 9), ({"repetitions": 0}, 1)])
def test_the_error_of_a_part_is_that_of_a_median(readings: dict[str, int], number: int) -> None:
    """pi / 2 times the variance of a mean."""
    found = structs.replace(profile(), spread={"layers": 0.4}, measured=readings)
    assert found.error_of("layers") == pytest.approx(0.4 * (math.pi / 2 / number) ** 0.5)
    assert found.error_of("collectives") == 0.1


def test_collectives_of_a_kind_by_group() -> None:
    assert [one.group_size for one in profile().collective("all_reduce")] == [2, 4]
    assert [one.group_size for one in profile().collective("send")] == [2]
    assert profile().collective("broadcast") == []


def test_interpolation_between_and_beyond_points() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (4.0, 5.0)]
    assert [interpolate(points, x) for x in (1, 1.5, 3, 6)] == [2.0, 3.0, 4.5, 6.0]
    assert [interpolate([(2.0, 5.0)], x) for x in (0, 2, 9)] == [5.0, 5.0, 5.0]


def test_names_of_files_are_of_what_was_measured(tmp_path: Path) -> None:
    """16 hexadecimal digits of the model and the dtype; the same whatever the order of fields."""
    path = profile_path(TINY, "float32", "h100", tmp_path)
    content = msgspec.json.encode({"dtype": "float32", "model": msgspec.to_builtins(TINY)}, order="sorted")
    assert path == tmp_path / "h100" / f"{hashlib.sha256(content).hexdigest()[:16]}.json"


def test_a_profile_is_written_below_new_folders_for_people_to_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "profile.json"
    save_profile(profile(), path)
    save_profile(profile(), path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[:2] == [b"{\n", b' "hardware": "cpu",\n']
    assert lines[-1] == b"}\n"
    assert load_profile(path) == load_profile(str(path)) == profile()


def test_a_profile_of_another_format_is_to_be_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(structs.replace(profile(), format="layer-profile/0"), path)
    text = "format 'layer-profile/0' is not 'layer-profile/1'; measure it again with `realhf profile`"
    with pytest.raises(UserError, match=text):
        load_profile(path)
    path.write_text("{")
    with pytest.raises(UserError, match="layer profile"):
        load_profile(path)


def test_a_time_of_zero_is_named_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    broken = structs.replace(tensor(2, 1.0), head_forward=Curve((1, 4, 8), (1.0, 0.0, 2.0)))
    save_profile(profile(tensor(1, 1.0), broken), path)
    with pytest.raises(UserError, match="head_forward at tp=2 takes 0 s at 4, which noise of a busy machine made"):
        load_profile(path)
    falling = structs.replace(tensor(1, 1.0), head_forward=Curve((0, 8), (1e-9, 2.0)))
    save_profile(profile(falling), path)
    assert load_profile(path) == profile(falling)
