"""What is thought of constants, and what measurements and finished runs add to it, against closed forms."""

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from realhf.base.errors import UserError
from realhf.planning.model import gaussian
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.experience import (
    CallError,
    RunTimes,
    SeenCall,
    digest_of,
    expected,
    load_run_times,
    load_runs,
    runs_folder,
    save_run_times,
)
from realhf.planning.model.gaussian import (
    covariance_of,
    narrowed,
    observed,
    of_covariance,
    square_root,
    standard_draws,
)
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import (
    FOUND_BY,
    MeasuredConstant,
    MeasuredConstants,
    constants_path,
    measurement_of,
    network_text,
    save_constants,
    with_measured,
)
from realhf.planning.model.profile import PARTS, profiles_root
from realhf.planning.model.uncertainty import Uncertainty

CPU, H100 = load_hardware("cpu"), load_hardware("h100")
spreads = st.floats(0.05, 2.0)


@given(spreads, spreads, st.integers(1, 20))
def test_the_posterior_of_readings_of_one_number(prior: float, noise: float, count: int) -> None:
    """Precisions add up, and the mean is weighted with them."""
    readings = np.linspace(0.5, 1.5, count)
    mean, covariance = observed(
        np.zeros(1), np.array([[prior**2]]), np.ones((count, 1)), readings, np.full(count, noise)
    )
    precision = 1 / prior**2 + count / noise**2
    assert covariance[0, 0] == pytest.approx(1 / precision, rel=1e-5)
    assert mean[0] == pytest.approx(readings.sum() / noise**2 / precision, rel=1e-5)


def test_draws_have_the_spread_and_come_in_pairs() -> None:
    draws = standard_draws(3, 4000, seed=1)
    assert np.abs(draws.mean(0)).max() < 1e-12
    assert draws.std(0) == pytest.approx(np.ones(3), abs=0.05)
    assert np.array_equal(draws[:, :2], standard_draws(2, 4000, seed=1))
    assert draws.shape == (4000, 3)
    assert np.array_equal(draws[:2000], -draws[2000:])
    assert not np.array_equal(draws, standard_draws(3, 4000, seed=2))
    assert standard_draws(0, 4000, seed=1).shape == (4000, 0)


def test_a_square_root_by_hand() -> None:
    """[[2, 0], [1, 3]] times its transpose; a constant that is sure varies by no more than a millionth."""
    assert square_root(np.array([[4.0, 2.0], [2.0, 10.0]])) == pytest.approx(np.array([[2, 0], [1, 3]]), abs=1e-9)
    assert square_root(np.diag([0.0, 4.0])) == pytest.approx(np.diag([0, 2]), abs=2e-6)


def test_a_measured_constant_moves_those_that_go_with_it() -> None:
    """Two constants with correlation -0.8: the measured one comes nearer, the other goes the other way."""
    stated = Uncertainty(spread={"layer_launch_s": 0.4, "decode_launch_s": 0.2}, correlation=((-0.8,),), call_error=0.1)
    hardware = structs.replace(H100, layer_launch_s=1e-4, decode_launch_s=2e-4, uncertainty=stated)
    found = narrowed(hardware, {"layer_launch_s": (2e-4, 0.1)})
    weight = 0.4**2 / (0.4**2 + 0.1**2)
    assert found.layer_launch_s == pytest.approx(1e-4 * math.exp(weight * math.log(2)))
    slope = -0.8 * 0.4 * 0.2 / (0.4**2 + 0.1**2)
    assert found.decode_launch_s == pytest.approx(2e-4 * math.exp(slope * math.log(2)))
    spread = found.sureness.spread
    assert spread["layer_launch_s"] == pytest.approx(0.4 * math.sqrt(1 - weight))
    assert spread["decode_launch_s"] < 0.2
    assert found.sureness.call_error == 0.1


def test_errors_of_calls_stay_where_constants_are_measured() -> None:
    stated = Uncertainty(spread={"sampling_s": 0.4}, call_error=0.1, profiled_error=0.05)
    found = narrowed(structs.replace(H100, uncertainty=stated), {"sampling_s": (1.0, 0.1)})
    assert (found.sureness.call_error, found.sureness.profiled_error) == (0.1, 0.05)


def test_readings_that_were_all_the_same_are_taken_as_they_are() -> None:
    """Also of two constants that go together."""
    stated = Uncertainty(spread={"layer_launch_s": 0.4, "decode_launch_s": 0.2}, correlation=((0.5,),))
    hardware = structs.replace(H100, uncertainty=stated)
    found = narrowed(hardware, {"layer_launch_s": (3e-4, 0.0), "decode_launch_s": (2e-4, 0.0)})
    assert found.layer_launch_s == pytest.approx(3e-4, rel=1e-9)
    assert found.decode_launch_s == pytest.approx(2e-4, rel=1e-9)


def test_what_is_measured_is_taken_where_no_constant_has_a_spread() -> None:
    sure = structs.replace(CPU, uncertainty=Uncertainty(spread={}, call_error=0.1))
    found = narrowed(sure, {"sampling_s": (0.5, 0.3), "memory_bandwidth": (7.0, 0.1)})
    assert found == structs.replace(sure, sampling_s=0.5, memory_bandwidth=7.0)
    assert narrowed(CPU, {}) == CPU


def test_a_covariance_and_back() -> None:
    matrix = covariance_of(H100.sureness)
    names = list(H100.sureness.spread)
    again = of_covariance(names, matrix, call_error=0.1)
    assert covariance_of(again) == pytest.approx(matrix)
    assert np.linalg.eigvalsh(matrix).min() > -1e-4


def test_a_covariance_by_hand() -> None:
    """Of variances 4, 0 and 9 and a covariance of -1 / 300 the spreads are 2, 0 and 3, and a correlation -1 / 1800."""
    matrix = np.array([[4, 0, -1 / 300], [0, 0, 0], [-1 / 300, 0, 9]])
    found = of_covariance(["a", "b", "c"], matrix, call_error=0.3, profiled_error=0.4)
    assert found.spread == {"a": 2.0, "b": 0.0, "c": 3.0}
    assert found.correlation == ((0.0,), (pytest.approx(-1 / 1800), 0.0))
    assert (found.call_error, found.profiled_error) == (0.3, 0.4)
    assert covariance_of(found) == pytest.approx(matrix)
    assert covariance_of(Uncertainty(spread={})).shape == (0, 0)


def test_a_variance_that_rounding_made_negative_is_none() -> None:
    assert of_covariance(["a"], np.array([[-1e-20]])).spread == {"a": 0.0}


def test_what_no_distribution_has() -> None:
    with pytest.raises(UserError, match=r"spread.*rows|rows of \[2\]"):
        Uncertainty(spread={"a": 0.1, "b": 0.1}, correlation=((0.1, 0.2),))
    with pytest.raises(UserError, match=r"uncertainty: a -0.1 is not from 0"):
        Uncertainty(spread={"a": -0.1})
    with pytest.raises(UserError, match="no distribution"):
        covariance_of(Uncertainty(spread={"a": 0.1, "b": 0.1}, correlation=((1.5,),)))
    with pytest.raises(UserError, match="no distribution"):  # one of the two would be the other
        covariance_of(Uncertainty(spread={"a": 0.1, "b": 0.1}, correlation=((1.0,),)))
    with pytest.raises(UserError, match=r"'speed', which is no constant"):
        structs.replace(CPU, uncertainty=Uncertainty(spread={"speed": 0.1}))
    with pytest.raises(UserError, match=r"'matmul_flops\[float16\]'"):
        structs.replace(CPU, uncertainty=Uncertainty(spread={"matmul_flops[float16]": 0.1}))


def test_constants_by_name() -> None:
    assert H100.constant("matmul_flops[bfloat16]") == H100.flops("bfloat16")
    assert CPU.constant("train_launch_s") == CPU.layer_launch_s
    assert CPU.constant("inter_node_send_bandwidth") == CPU.inter_node_bandwidth
    changed = CPU.with_constants({"matmul_flops[float32]": 1e9, "matmul_flops[float64]": 2e9, "sampling_s": 3.0})
    assert changed.matmul_flops == {**CPU.matmul_flops, "float32": 1e9, "float64": 2e9}
    assert changed.sampling_s == 3.0


def test_every_constant_has_a_measurement() -> None:
    found = {name: measurement_of(name) for name in H100.sureness.spread}
    between_nodes = {name for name, measurement in found.items() if measurement == "network"}
    assert between_nodes == {"inter_node_bandwidth", "inter_node_send_bandwidth", "inter_node_latency_s"}
    assert {measurement_of(part) for part in PARTS} == {"layers"}
    fields = {field for found in FOUND_BY.values() for field in found}
    assert fields <= set(CPU.__struct_fields__)


def test_the_oldest_runs_go(tmp_path: Path) -> None:
    """The last 32 stay, in the order of their files' names."""
    profile = tmp_path / "1234.json"
    profile.write_text("")
    for number in range(34):
        path = save_run_times(times(seen(0.1), run=f"run {number}", profile=digest_of(profile)), profile)
        os.utime(path, (number, number))
    assert {run.run for run in load_runs(profile)} == {f"run {number}" for number in range(2, 34)}
    files = sorted(runs_folder(profile).iterdir())
    assert [run.run for run in load_runs(profile)] == [load_run_times(file).run for file in files]


def test_a_run_that_another_one_removed_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that end at the same time both remove the oldest."""
    profile, real = tmp_path / "1234.json", Path.unlink

    def removed_before(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".json":
            os.remove(path)
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", removed_before)
    for number in range(33):
        save_run_times(times(run=f"run {number}"), profile)
    assert len(list(runs_folder(profile).iterdir())) == 32


def test_a_profile_without_runs_is_not_read(tmp_path: Path) -> None:
    assert load_runs(tmp_path / "1234.json") == ()


def test_a_runs_file_has_a_line_for_each_number(tmp_path: Path) -> None:
    """A space for each level, and a line end: its differences can be read."""
    path = save_run_times(times(seen(0.5), run="one", profile="abc"), tmp_path / "1234.json")
    assert path.parent == tmp_path / "1234.runs"
    assert path.stem == hashlib.sha256(b"one").hexdigest()[:16]
    assert path.read_text() == (
        '{\n "run": "one",\n "profile": "abc",\n "calls": [\n  {\n   "interface": "inference",\n   "option": "a",\n'
        '   "log_ratio": 0.5,\n   "noise": 0.02\n  }\n ],\n "format": "run-times/1"\n}\n'
    )


@pytest.mark.parametrize(("log_ratio", "noise"), [(1.1e9, 0.1), (-1.1e9, 0.1), (0.1, -0.1), (math.nan, 0.1)])
def test_times_that_no_run_has_are_refused(log_ratio: float, noise: float) -> None:
    with pytest.raises(UserError, match="is not from"):
        seen(log_ratio, noise=noise)
    assert seen(-1e9).log_ratio == -1e9


def test_measured_constants_are_kept_and_taken(tmp_path: Path) -> None:
    path = constants_path("cpu", tmp_path)
    assert with_measured(CPU, tmp_path) == CPU
    for name, value in (("memory_bandwidth", 2e10), ("matmul_flops[float32]", 3e10)):
        found = {name: MeasuredConstant(value=value, spread=0.01)}
        save_constants(MeasuredConstants(hardware="cpu", constants=found), path)
    taken = with_measured(CPU, tmp_path)
    assert taken.memory_bandwidth == pytest.approx(2e10, rel=0.01)
    assert taken.flops("float32") == pytest.approx(3e10, rel=0.01)
    assert taken.intra_node_bandwidth == pytest.approx(CPU.intra_node_bandwidth)
    assert taken.sureness.spread["memory_bandwidth"] < 0.02
    path.write_text("{}")
    with pytest.raises(UserError, match="measure them again"):
        with_measured(CPU, tmp_path)


def test_a_constant_that_is_measured_and_has_no_spread_is_taken_as_it_is() -> None:
    """`cpu` has no launches of a training of its own, and does not say how sure it would be of them."""
    assert "train_launch_s" not in CPU.sureness.spread
    taken = narrowed(CPU, {"layer_launch_s": (2e-4, 0.01), "train_launch_s": (9e-4, 0.01)})
    assert taken.layer_launch_s == pytest.approx(2e-4, rel=0.01)
    assert taken.launch_s(trains=True) == 9e-4
    none = narrowed(CPU, {"layer_launch_s": (2e-4, 0.01), "train_launch_s": (0.0, 0.01)})
    assert none.launch_s(trains=True) == 0.0


@pytest.mark.parametrize("hardware", [CPU, H100], ids=["cpu", "h100"])
def test_a_measured_network_takes_the_place_of_the_described_one(hardware: Hardware, tmp_path: Path) -> None:
    """Forty times slower than was thought, from readings that differed by a tenth."""
    values = {"inter_node_bandwidth": 1.2e7, "inter_node_send_bandwidth": 1.1e7, "inter_node_latency_s": 1e-4}
    found = {name: MeasuredConstant(value=value, spread=0.1) for name, value in values.items()}
    found["memory_bandwidth"] = MeasuredConstant(value=2e10, spread=0.01)
    path = constants_path(hardware.name, tmp_path)
    save_constants(MeasuredConstants(hardware=hardware.name, constants=found), path)
    taken = with_measured(hardware, tmp_path)
    assert {name: taken.constant(name) for name in values} == values
    assert taken.memory_bandwidth == pytest.approx(2e10, rel=0.1)
    stated, before = taken.sureness, hardware.sureness
    assert stated.spread["inter_node_bandwidth"] == 0.1
    assert stated.spread["memory_bandwidth"] < 0.02
    assert list(stated.spread) == list(before.spread)
    np.linalg.cholesky(covariance_of(stated))


def test_a_measured_network_is_what_each_device_has_of_a_shared_one(tmp_path: Path) -> None:
    """Eight devices that reach 3 GB/s at the same time: their node reaches 24, whatever was described."""
    hardware = structs.replace(H100, inter_node_shared_bandwidth=1e9)
    values = {"inter_node_bandwidth": 3e9, "inter_node_send_bandwidth": 2e9}
    found = {name: MeasuredConstant(value=value, spread=0.1) for name, value in values.items()}
    save_constants(MeasuredConstants(hardware="h100", constants=found), constants_path("h100", tmp_path))
    taken = with_measured(hardware, tmp_path)
    assert taken.inter_node_shared_bandwidth == 24e9
    assert (taken.link(True, 1)[1], taken.send_bandwidth) == (3e9, 2e9)
    assert with_measured(H100, tmp_path).inter_node_shared_bandwidth is None
    assert measurement_of("inter_node_shared_bandwidth") == "network"


def test_a_measurement_counts_beside_the_description(tmp_path: Path) -> None:
    """As sure as each other, they meet in the middle of their logarithms. Between nodes the measurement is alone."""
    stated = Uncertainty(spread={"memory_bandwidth": 0.3, "inter_node_latency_s": 0.2, "sampling_s": 0.4})
    hardware = structs.replace(CPU, memory_bandwidth=1e9, inter_node_latency_s=1e-3, uncertainty=stated)
    found = {
        "memory_bandwidth": MeasuredConstant(value=4e9, spread=0.3),
        "inter_node_latency_s": MeasuredConstant(value=4e-3, spread=0.7),
    }
    save_constants(MeasuredConstants(hardware="cpu", constants=found), constants_path("cpu", tmp_path))
    taken = with_measured(hardware, tmp_path)
    assert taken.memory_bandwidth == pytest.approx(2e9)
    assert taken.inter_node_latency_s == 4e-3
    spread = taken.sureness.spread
    assert spread["memory_bandwidth"] == pytest.approx(0.3 / math.sqrt(2))
    assert (spread["inter_node_latency_s"], spread["sampling_s"]) == (0.7, pytest.approx(0.4))


def test_a_file_of_measured_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the hardware's profiles, wherever those lie; a new measurement takes the place of the old."""
    monkeypatch.chdir(tmp_path)
    assert constants_path("cpu") == profiles_root() / "cpu" / "constants.json"
    path = constants_path("cpu", tmp_path / "new")
    assert path == tmp_path / "new" / "cpu" / "constants.json"
    for value, source in ((1.0, {"host": "a", "cores": 2}), (2.5, {"host": "b"})):
        found = {"sampling_s": MeasuredConstant(value=value, spread=0.5)}
        save_constants(MeasuredConstants(hardware="cpu", constants=found, measured=source), path)
    assert path.read_text() == (
        '{\n "hardware": "cpu",\n "constants": {\n  "sampling_s": {\n   "value": 2.5,\n   "spread": 0.5\n  }\n },\n'
        ' "measured": {\n  "host": "b",\n  "cores": 2\n },\n "format": "measured-constants/1"\n}\n'
    )


@pytest.mark.parametrize(("value", "spread"), [(-1.0, 0.1), (0.0, 0.1), (2e24, 0.1), (math.nan, 0.1), (1.0, -0.1)])
def test_constants_that_nothing_has_are_refused(value: float, spread: float) -> None:
    with pytest.raises(UserError, match="is not from"):
        MeasuredConstant(value=value, spread=spread)


def test_a_file_with_a_constant_of_nothing_is_broken(tmp_path: Path) -> None:
    path = constants_path("cpu", tmp_path)
    found = {"memory_bandwidth": MeasuredConstant(value=2e10, spread=0.01)}
    save_constants(MeasuredConstants(hardware="cpu", constants=found), path)
    path.write_text(path.read_text().replace("20000000000.0", "0.0"))
    with pytest.raises(UserError, match=r"value 0\.0 is not from 1e-12 to 1e\+24.*measure them again"):
        with_measured(CPU, tmp_path)


def test_links_between_nodes_name_their_source(tmp_path: Path) -> None:
    """Also after another measurement of the machine."""
    path = constants_path("cpu", tmp_path)
    assert network_text(CPU, tmp_path) == ""
    network = {"inter_node_bandwidth": 2e8, "inter_node_latency_s": 5e-5}
    for values, source in ((network, {"network": "2026-11-24 between node1, node2"}), ({"memory_bandwidth": 2e10}, {})):
        constants = {name: MeasuredConstant(value=value, spread=0.0) for name, value in values.items()}
        save_constants(MeasuredConstants(hardware="cpu", constants=constants, measured={"host": "a", **source}), path)
    text = "links between nodes: 0.2 GB/s a device, 50 us; measured 2026-11-24 between node1, node2"
    assert network_text(CPU, tmp_path) == text


def seen(log_ratio: float, interface: str = "inference", option: str = "a", noise: float = 0.02) -> SeenCall:
    return SeenCall(interface=interface, option=option, log_ratio=log_ratio, noise=noise)


def times(*calls: SeenCall, run: str = "run", profile: str = "") -> RunTimes:
    return RunTimes(run=run, profile=profile, calls=calls)


def total(error) -> float:  # type: ignore[no-untyped-def]
    return math.sqrt(error.run**2 + error.call**2 + error.option**2)


def test_one_call_of_one_run_by_hand() -> None:
    """Three equal parts: two of them are the option's and the call's, the third is the run's own."""
    sigma = 0.3
    part = sigma**2 / 3
    error = expected([times(seen(0.4))], "inference", "a", sigma)
    gain = 2 * part / (3 * part + 0.02**2)
    assert error.mean == pytest.approx(gain * 0.4)
    assert error.run == pytest.approx(math.sqrt(part))
    assert error.call**2 + error.option**2 == pytest.approx(2 * part - 2 * part * gain)
    other = expected([times(seen(0.4))], "inference", "b", sigma)
    assert other.mean == pytest.approx(error.mean / 2)
    assert total(error) < total(other) < sigma
    assert expected([times(seen(0.4))], "generate", "a", sigma).mean == 0.0


def test_nothing_is_learned_of_a_call_that_no_run_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything computed for that."""
    monkeypatch.setattr(gaussian, "observed", None)
    part = 0.3 / math.sqrt(3)
    for runs in ([], [times()], [times(seen(0.4))]):
        assert expected(runs, "generate", "a", 0.3) == CallError(0.0, part, part, part)


def test_a_call_that_is_never_off_is_not_off_after_a_run() -> None:
    assert expected([times(seen(0.4))], "inference", "a", 0.0) == CallError(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("count", [1, 3])
def test_parts_of_an_error_after_runs_of_one_option(count: int) -> None:
    """Runs that saw call + option, each with a part of its own and a noise: v is the variance of their mean. Of the
    call's and the option's part p^2 / (2 p + v) is learned of each, and they are correlated by as much."""
    part, noise = 0.3**2 / 3, 0.02
    v = (part + noise**2) / count
    learned = part**2 / (2 * part + v)
    runs = [times(seen(0.4, noise=noise), run=str(number)) for number in range(count)]
    error = expected(runs, "inference", "a", 0.3)
    assert error.mean == pytest.approx(0.4 * 2 * part / (2 * part + v))
    left = part - learned
    assert error.run == pytest.approx(math.sqrt(part))
    assert error.call == pytest.approx(math.sqrt(left) - learned / math.sqrt(left))
    assert error.option == pytest.approx(math.sqrt(left - learned**2 / left))


@given(st.integers(1, 8), st.floats(-0.5, 0.5))
def test_more_runs_narrow_and_come_nearer(count: int, ratio: float) -> None:
    runs = [times(seen(ratio), run=str(number)) for number in range(count + 1)]
    fewer, more = (expected(runs[:number], "inference", "a", 0.3) for number in (count, count + 1))
    assert total(more) < total(fewer)
    assert abs(ratio - more.mean) <= abs(ratio - fewer.mean)


def test_calls_that_are_slow_alike_tell_of_the_machine() -> None:
    alone = expected([times(seen(0.4))], "inference", "a", 0.3)
    alike = [times(seen(0.4), seen(0.4, "generate"), seen(0.4, "train_step"))]
    assert 0 < expected(alike, "inference", "a", 0.3).mean < alone.mean


def test_runs_belong_to_their_profile(tmp_path: Path) -> None:
    profile = tmp_path / "1234.json"
    profile.write_text("first")
    first = times(seen(0.1), run="one", profile=digest_of(profile))
    path = save_run_times(first, profile)
    assert load_runs(profile) == (first,)
    again = times(seen(0.2), run="one", profile=digest_of(profile))
    assert save_run_times(again, profile) == path  # a run has one file
    assert load_runs(profile) == (again,)
    profile.write_text("measured again")
    assert load_runs(profile) == ()
    path.write_text("{")
    with pytest.raises(UserError, match="remove it"):
        load_runs(profile)
    assert not list(runs_folder(tmp_path / "5678.json").parent.glob("5678*"))
