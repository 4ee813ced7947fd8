"""A call of a planning task: its seconds and bytes under an option, by hand, and what is kept of them."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs

from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelFunctionCallDef, ModelInterfaceType
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.plan import AS_SET_UP, CallCompute
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.planning.model import call as call_module
from realhf.planning.model.call import CallModel
from realhf.planning.model.experience import RunTimes, SeenCall
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.profile import CollectiveKind
from realhf.planning.model.seconds import RankSeconds
from realhf.planning.model.workload import Workload
from tests.unit.planning.graphs import TINY, call, cpu_cluster
from tests.unit.planning.test_cost import ROUND, RoundTimings

ONE, TWO = ParallelStrategy(), ParallelStrategy(dp=2)
SHARDED = EngineFeatures(fully_sharded=True)
COUNT = parameter_count(TINY)


@dataclass(frozen=True)
class Rings(RoundTimings):
    """An all-reduce takes a second a byte; what is asked of it is written down."""

    asked: list[Any] = field(default_factory=list)

    def collective(
        self, kind: CollectiveKind, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1
    ) -> float:
        self.asked.append((size_bytes, group_size, crosses_nodes, per_node))
        return size_bytes


def modelled(definition: ModelFunctionCallDef, *, num_nodes: int = 1, **changes: Any) -> CallModel:
    """Of mini-batches of 16 samples of 8 + 5 tokens on nodes of four devices."""
    cluster = cpu_cluster(4, num_nodes=num_nodes)
    given: dict[str, Any] = {
        "call": definition,
        "samples": 16,
        "lengths": Workload(prompt_tokens=8, new_tokens=5),
        "dtype": "float32",
        "features": EngineFeatures(),
        "timings": RoundTimings(),
        "cluster": cluster,
        "hardware": cluster.hardware,
    }
    return CallModel(**(given | changes))


INFER, TRAIN, GEN = (call("m", TINY, kind, "x", "y") for kind in (INFERENCE, TRAIN_STEP, GENERATE))
FORWARD_S = 2 * (4 + 10 + 100)  # of two micro-batches: four layers, embedding, head


def test_a_call_is_as_much_slower_as_a_run_measured_it() -> None:
    assert modelled(INFER).seconds(ONE, 2) == 7 + FORWARD_S
    assert modelled(INFER, factor=3.0).seconds(ONE, 2) == 3 * (7 + FORWARD_S)


@dataclass(frozen=True, kw_only=True)
class Rules(InterfaceConfig):
    """A call that asks no model."""

    implementation = "nowhere:Nothing"

    @property
    def uses_model(self) -> bool:
        return False


def test_a_call_without_a_model_takes_its_way_alone() -> None:
    rules = replace(INFER, interface_impl=Rules())
    model = modelled(rules, factor=3.0, features=SHARDED)
    assert model.seconds(ONE, 2) == 3 * 7
    assert model.gathering_s(TWO, 2) == 0.0


def test_a_training_makes_its_mini_batches_one_after_another() -> None:
    alone = modelled(TRAIN).seconds(ONE, 2) - 7
    assert alone > 2 * FORWARD_S
    three = modelled(replace(TRAIN, mini_batches=3))
    assert three.seconds(ONE, 2) == pytest.approx(7 + 3 * alone)


def seen(option: str, log_ratio: float, interface: str = "inference") -> RunTimes:
    measured = SeenCall(interface=interface, option=option, log_ratio=log_ratio, noise=0.001)
    return RunTimes(run=option, profile="", calls=(measured,))


OPTION = "dp2 tp1 pp1, 2 micro-batches of 16 samples of 13 tokens"


def test_what_runs_had_of_an_option_is_expected_of_it() -> None:
    """One run tells of the option and the call two thirds of what it saw, and of another option a third."""
    model = modelled(INFER, seen=(seen(OPTION, 0.6),), error=0.3)
    assert model.option_text(TWO, 2) == OPTION
    assert model.option_text(ParallelStrategy(1, 2, 2), 4) == "dp1 tp2 pp2, 4 micro-batches of 16 samples of 13 tokens"
    own, other = model.expected(TWO, 2), model.expected(ONE, 2)
    assert own.mean == pytest.approx(0.4, rel=1e-3)
    assert other.mean == pytest.approx(0.2, rel=1e-3)
    plain = modelled(INFER)
    assert model.seconds(ONE, 2) == pytest.approx(plain.seconds(ONE, 2) * math.exp(other.mean))
    assert model.seconds(TWO, 2) == pytest.approx(plain.seconds(TWO, 2) * math.exp(own.mean))
    twice = replace(model, factor=2.0)
    assert twice.seconds(ONE, 2) == pytest.approx(2 * model.seconds(ONE, 2))


def test_what_runs_had_of_another_kind_of_call_says_nothing() -> None:
    model = modelled(INFER, seen=(seen(OPTION, 0.6, "generate"),), error=0.3)
    assert model.expected(TWO, 2).mean == 0.0
    assert modelled(INFER, error=0.3).expected(TWO, 2).option == pytest.approx(0.3 / math.sqrt(3))


def counting(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Counter[str]:
    """How often a function is called from now on, by its name."""
    real, count = getattr(owner, name), Counter[str]()

    def counted(*arguments: Any, **keywords: Any) -> Any:
        count[name] += 1
        return real(*arguments, **keywords)

    patch.setattr(owner, name, counted)
    return count


@pytest.mark.parametrize(
    ("owner", "name", "ask"),
    [
        (RankSeconds, "total_s", lambda model, s: model.seconds(s, 2)),
        (PlacedModel, "static_bytes", lambda model, s: model.static_bytes(s)),
        (call_module, "RankWork", lambda model, s: model.work(s, 2)),
        (call_module, "PlacedModel", lambda model, s: model.placed(s)),
        (call_module, "features_during", lambda model, s: model.under(CallCompute(recomputation="full"))),
        (call_module, "expected", lambda model, s: model.expected(s, 2)),
    ],
    ids=["seconds", "static_bytes", "work", "placed", "under", "expected"],
)
def test_what_was_computed_is_not_computed_again(
    owner: Any, name: str, ask: Callable[[CallModel, ParallelStrategy], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search asks for the same many times; only another option is another question."""
    model, count = modelled(INFER), counting(monkeypatch, owner, name)
    first = ask(model, ONE)
    assert count[name] == 1
    assert ask(model, ONE) is first
    assert count[name] == 1


def test_options_that_no_run_had_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    model = modelled(INFER, seen=(seen(OPTION, 0.6),), error=0.3)
    count = counting(monkeypatch, call_module, "expected")
    for strategy in (ONE, TWO, ParallelStrategy(tp=2), ParallelStrategy(pp=2)):
        model.expected(strategy, 2)
    assert count["expected"] == 2  # that of the option and that of all others


def test_a_plan_that_says_nothing_leaves_the_call_as_it_is() -> None:
    model = modelled(GEN)
    assert model.under(AS_SET_UP) is model
    assert model.under(CallCompute()) is model


def test_a_call_as_a_plan_has_it_computed() -> None:
    """Its timings know; what does not depend on the computation is known to both."""
    lengths = Workload(prompt_tokens=8, new_tokens=5, decode_graphs="call")
    on_gpus = EngineFeatures(on_gpus=True)
    model = modelled(TRAIN, lengths=lengths, features=on_gpus)
    full = model.under(CallCompute(recomputation="full", sequence_parallel=True))
    assert full.features == replace(on_gpus, recomputation="full", sequence_parallel=True)
    assert full.timings.features == full.features
    assert (full.lengths, full.call, full.samples) == (lengths, TRAIN, 16)
    assert full.known is model.known
    assert full.seconds(ONE, 1) != model.seconds(ONE, 1)
    # Not in training alone: inference divides no tokens.
    infer = modelled(INFER, features=on_gpus).under(CallCompute(sequence_parallel=True, recomputation="full"))
    assert infer.features == replace(on_gpus, recomputation="full")


def test_a_plan_may_choose_the_graphs_of_decode_steps() -> None:
    lengths = Workload(prompt_tokens=8, new_tokens=5, decode_graphs="call")
    on_gpus = EngineFeatures(on_gpus=True, full_logits=True)
    model = modelled(GEN, lengths=lengths, features=on_gpus)
    eager = model.under(CallCompute(decode_graphs="off"))
    assert eager.lengths == replace(lengths, decode_graphs="off")
    assert eager.features == replace(on_gpus, cuda_graphs=False)
    assert model.under(CallCompute(prefetch=False)).lengths == lengths


@pytest.mark.parametrize(
    ("kind", "features", "strategy", "micro_batches", "gathers"),
    [
        (INFERENCE, SHARDED, TWO, 4, 4),
        (INFERENCE, SHARDED, TWO, 1, 1),
        (GENERATE, SHARDED, TWO, 4, 1),
        (TRAIN_STEP, SHARDED, TWO, 4, 0),  # it is part of its seconds
        (INFERENCE, EngineFeatures(), TWO, 4, 0),
        (INFERENCE, SHARDED, ParallelStrategy(tp=2), 4, 0),
    ],
)
def test_parameters_are_gathered_from_a_sharded_home(
    kind: ModelInterfaceType, features: EngineFeatures, strategy: ParallelStrategy, micro_batches: int, gathers: int
) -> None:
    """For every micro-batch, or once for a generation; of an all-reduce's ring half, by bytes of float32."""
    timings = Rings()
    model = modelled(call("m", TINY, kind, "x"), features=features, timings=timings, factor=3.0)
    assert model.gathering_s(strategy, micro_batches) == 3 * gathers * 4 * COUNT / 2
    assert timings.asked == ([(4 * COUNT / 2, 2, False, 1)] if gathers else [])


@pytest.mark.parametrize(
    ("strategy", "ring"),
    [(ParallelStrategy(dp=8), (8, True, 4)), (ParallelStrategy(dp=4, tp=2), (4, True, 2)), (TWO, (2, False, 1))],
)
def test_a_gather_goes_between_nodes_where_its_group_does(
    strategy: ParallelStrategy, ring: tuple[int, bool, int]
) -> None:
    timings, norms = Rings(), 9 * 64  # which tensor parallelism does not divide
    modelled(INFER, features=SHARDED, timings=timings, num_nodes=2).gathering_s(strategy, 1)
    assert timings.asked == [(4 * ((COUNT - norms) / strategy.tp + norms) / 2, *ring)]


def test_only_what_is_sharded_is_gathered() -> None:
    """On the stage with the most of it: gate and up of one layer of four, 64 x 128 elements each; or all of q."""
    rules = (("layers.0.gate", "sharded"), ("layers.0.up", "sharded"))
    model = modelled(INFER, features=EngineFeatures(modes=rules), timings=Rings())
    assert model.gathering_s(TWO, 2) == 2 * 4 * (2 * 64 * 128) / 2
    rules += (("layers.3.q", "sharded"),)
    model = modelled(INFER, features=EngineFeatures(modes=rules), timings=Rings())
    assert model.gathering_s(ParallelStrategy(dp=2, pp=2), 2) == 2 * 4 * (2 * 64 * 128) / 2
    model = modelled(INFER, features=EngineFeatures(modes=(("*", "zero1"),)), timings=Rings())
    assert model.gathering_s(TWO, 2) == 0.0


def test_the_work_of_a_rank() -> None:
    model = modelled(INFER)
    work = model.work(ParallelStrategy(dp=4, tp=2), 3)
    assert (work.samples, work.micro_batches, work.call, work.lengths) == (4, 3, INFER, model.lengths)
    assert work.placed == PlacedModel(TINY, ParallelStrategy(dp=4, tp=2), "float32", model.features)
    assert work.known is model.known


def test_ways_to_compute_a_call_share_what_is_known_of_parts() -> None:
    model = modelled(INFER)
    assert model.under(CallCompute(prefetch=False)).known is model.known
    assert modelled(INFER).known is not model.known


def test_a_plan_changes_what_was_computed_before() -> None:
    """Of a training whose states and parameters are then divided over two ranks."""
    model, sharded = modelled(TRAIN), CallCompute(data_parallel="fsdp")
    assert model.static_bytes(TWO) == (4 + 4 + 8 // 2) * COUNT
    assert model.work(TWO, 2).gathered_bytes() == 0
    assert model.under(sharded).static_bytes(TWO) == 16 // 2 * COUNT
    assert model.under(sharded).work(TWO, 2).gathered_bytes() > 0
    full = CallCompute(recomputation="full")
    assert model.under(sharded).under(full).features == replace(SHARDED, recomputation="full", cuda_graphs=False)
    assert model.under(full).features == EngineFeatures(recomputation="full", cuda_graphs=False)


def test_a_home_keeps_versions_or_states() -> None:
    assert modelled(INFER).static_bytes(TWO) == 4 * COUNT
    assert modelled(INFER, versions=3).static_bytes(TWO) == 3 * 4 * COUNT
    assert modelled(TRAIN, versions=3).static_bytes(TWO) == (4 + 4 + 8 // 2) * COUNT


def test_every_plan_with_an_option_needs_the_parameters_there() -> None:
    def dynamic(model: CallModel) -> float:
        return model.work(TWO, 2).dynamic_bytes()

    trains = modelled(TRAIN, versions=2)
    assert trains.least_bytes(TWO, 2) == trains.static_bytes(TWO) + dynamic(trains)
    plain = modelled(INFER, versions=2)
    assert plain.least_bytes(TWO, 2) == 4 * COUNT + dynamic(plain)
    # At a sharded home half of them, and two layers that are gathered.
    sharded = modelled(INFER, features=SHARDED)
    gathered = sharded.work(TWO, 2).gathered_bytes()
    assert sharded.least_bytes(TWO, 2) == 4 * COUNT // 2 + gathered + dynamic(sharded)
    # A generation gathers all, and a copy is less than that and a share.
    generates = modelled(GEN, features=SHARDED)
    assert generates.work(TWO, 2).gathered_bytes() == 4 * COUNT
    assert generates.least_bytes(TWO, 2) == 4 * COUNT + dynamic(generates)


def test_a_device_has_room_beside_its_communicators() -> None:
    """Of 2^32 bytes; a training of dp 2 and tp 2 has those of tensor, data and norm. Of all devices there are two."""
    hardware = structs.replace(ROUND, communicator_bytes=1000.25)
    model = modelled(TRAIN, hardware=hardware)
    strategy = ParallelStrategy(dp=2, tp=2)
    assert model.available_bytes(strategy) == 2**32 - round((3 + 2) * 1000.25)
    alone = modelled(TRAIN, hardware=hardware, shares_devices=False)
    assert alone.available_bytes(strategy) == 2**32 - round((3 + 1) * 1000.25)
    assert alone.available_bytes(ONE) == 2**32 - round(1000.25)
    assert model.communicator_bytes(Layout(DeviceMesh(0, 4), strategy)) == 3 * 1000.25


def test_parameters_are_gathered_by_a_communicator_at_home_alone() -> None:
    layout = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2))
    assert len(modelled(INFER).communicators(layout)) == 1
    sharded = modelled(INFER, features=SHARDED)
    assert len(sharded.communicators(layout)) == 2
    assert len(sharded.communicators(layout, at_home=False)) == 1
    trains = modelled(TRAIN, features=SHARDED)
    assert trains.communicators(layout) == trains.communicators(layout, at_home=False)
    # The group of all four ranks is one, whether for gradients or their norm.
    assert len(trains.communicators(Layout(DeviceMesh(0, 4), ParallelStrategy(dp=4)))) == 1


def test_data_come_for_all_mini_batches_in_parts() -> None:
    """Three keys of 3 x 16 samples of 13 tokens of 8 bytes, a quarter of them to each device."""
    model = modelled(replace(TRAIN, mini_batches=3))
    hardware = model.hardware
    size = 3 * 3 * 16 * 13 * 8 / 4
    for crosses_nodes in (False, True):
        expected = hardware.send_s(size, crosses_nodes=crosses_nodes)
        assert model.transfer_s(3, 4, crosses_nodes=crosses_nodes) == pytest.approx(expected)
        wide = hardware.send_s(size + 3 * 16 * model.lengths.new_tokens * 128 / 4, crosses_nodes=crosses_nodes)
        assert model.transfer_s(3, 4, 128, crosses_nodes=crosses_nodes) == pytest.approx(wide)
        assert wide > expected


def test_a_training_counts_the_samples_that_its_interface_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the eight that each of two ranks has of a mini-batch; other calls compute all of theirs."""
    expected = {(8, 2, 4): 3}
    monkeypatch.setattr(InterfaceConfig, "computed_samples", lambda self, *asked: expected[asked])
    training = replace(call("m", TINY, TRAIN_STEP, "x"), mini_batches=4)
    assert modelled(training).work(TWO, 1).computed == 3
    assert modelled(call("m", TINY, INFERENCE, "x")).work(TWO, 1).computed == 8
