"""The named transfer protocols by hand, and what holds of each of them under any layout."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.dataflow.plan_checks import check_plan
from realhf.dataflow.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Division,
    TransferProtocol,
    all_micro_dp,
)
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from tests.unit.api.calls import call

SMALL = ParallelStrategy(dp=2, tp=2, pp=2)
EIGHT = Layout(DeviceMesh(8, 8), SMALL)  # (dp, tp) of devices 8 to 11: 00 01 10 11, all of stage 0; then stage 1
MICRO = all_micro_dp(ParallelStrategy(tp=1, pp=2))

# By protocol: the parts of devices 8 to 15 (None: it gets nothing), and the devices that are collected.
BY_HAND = {
    ONE_TO_ALL: ([0] * 8, range(8, 16)),
    ALL_TO_ALL: (list(range(8)), range(8, 16)),
    RANK_ZERO: ([0, *[None] * 7], [8]),
    THREE_D_PROTO: ([0, 0, 1, 1, 0, 0, 1, 1], [12, 14]),
    THREE_D_PP_ONLY: ([0] * 8, [8, 12]),
    THREE_D_PP_AS_DP: ([0, 0, 2, 2, 1, 1, 3, 3], [8, 12, 10, 14]),
    # Two micro-data-parallel groups in each data-parallel one: tensor-parallel neighbours in training.
    MICRO: ([0, 1, 2, 3, 0, 1, 2, 3], [12, 13, 14, 15]),
    # All four devices of a model are micro-data-parallel: stage first, then tensor.
    all_micro_dp(ParallelStrategy()): ([0, 1, 4, 5, 2, 3, 6, 7], [8, 9, 12, 13, 10, 11, 14, 15]),
}


@pytest.mark.parametrize("protocol", BY_HAND, ids=lambda protocol: protocol.name)
def test_by_hand(protocol: TransferProtocol) -> None:
    parts, collected = BY_HAND[protocol]
    division = protocol.distribute(EIGHT)
    assert [division.part_of.get(device) for device in range(8, 16)] == parts
    assert protocol.collect(EIGHT) == tuple(collected)
    assert protocol.restores(EIGHT) == (protocol not in (ONE_TO_ALL, THREE_D_PP_ONLY))


def test_data_parallelism_alone() -> None:
    four = Layout(DeviceMesh(4, 4), ParallelStrategy(dp=4))
    assert DP_PROTO.distribute(four) == THREE_D_PROTO.distribute(four) == Division(4, {4: 0, 5: 1, 6: 2, 7: 3})
    assert DP_PROTO.collect(four) == THREE_D_PROTO.collect(four) == (4, 5, 6, 7)
    with pytest.raises(UserError, match="DP_PROTO: dp2 tp2 pp2 on devices 8-15 divides the model as well"):
        DP_PROTO.distribute(EIGHT)


layouts = st.builds(
    lambda first, dp, tp, pp: Layout(DeviceMesh(first, dp * tp * pp), ParallelStrategy(dp, tp, pp)),
    st.integers(0, 8), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 4]),
)  # fmt: skip


@given(layouts, st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_distributed_and_collected_is_the_batch(layout: Layout, data: st.DataObject) -> None:
    """Devices that double their samples: the collected outputs are the doubled batch, or one for each device asked."""
    tp = data.draw(st.sampled_from([t for t in range(1, layout.strategy.tp + 1) if layout.strategy.tp % t == 0]))
    pp = data.draw(st.sampled_from([p for p in range(1, layout.strategy.pp + 1) if layout.strategy.pp % p == 0]))
    micro = all_micro_dp(ParallelStrategy(tp=tp, pp=pp))
    for protocol in (ONE_TO_ALL, ALL_TO_ALL, RANK_ZERO, THREE_D_PROTO, THREE_D_PP_ONLY, THREE_D_PP_AS_DP, micro):
        protocol.check(layout)
        division = protocol.distribute(layout)
        batch = list(range(3 * division.parts))
        inputs = {device: batch[3 * part : 3 * part + 3] for device, part in division.part_of.items()}
        outputs = [[2 * sample for sample in inputs[device]] for device in protocol.collect(layout)]
        whole = [2 * sample for sample in batch]
        if protocol in (ONE_TO_ALL, THREE_D_PP_ONLY):
            count = layout.mesh.size if protocol is ONE_TO_ALL else layout.strategy.pp
            assert outputs == [whole] * count
        else:
            assert [sample for output in outputs for sample in output] == whole
        by_part: dict[int, int] = {}
        for part in division.part_of.values():
            by_part[part] = by_part.get(part, 0) + 1
        assert len(set(by_part.values())) == 1, "every part goes to equally many devices"


@given(layouts)
def test_peers_in_a_pass_through_the_model_have_the_same_samples(layout: Layout) -> None:
    part_of = THREE_D_PROTO.distribute(layout).part_of
    for dp in range(layout.strategy.dp):
        peers = [device for stage in range(layout.strategy.pp) for device in layout.tensor_group(dp, stage)]
        assert {part_of[device] for device in peers} == {dp}
    assert THREE_D_PROTO.collect(layout) == tuple(map(layout.output_device, range(layout.strategy.dp)))


def test_generation_must_divide_training() -> None:
    with pytest.raises(UserError, match="3D_ALL_MICRO_DP: tp=4 and pp=1 of generation must divide tp=2 and pp=2"):
        all_micro_dp(ParallelStrategy(tp=4)).distribute(EIGHT)
    with pytest.raises(UserError, match="3D_ALL_MICRO_DP: tp=1 and pp=4 of generation must divide tp=2 and pp=2"):
        all_micro_dp(ParallelStrategy(pp=4)).collect(EIGHT)


@pytest.mark.parametrize(
    ("division", "collected", "message"),
    [
        (Division(1, {0: 0, 8: 0}), (8,), "protocol MINE: devices [0] are not of dp2 tp2 pp2 on devices 8-15"),
        (Division(2, {8: 0, 9: 0}), (8,), "protocol MINE cuts a batch into 2 parts and gives [0] to"),
        (Division(1, {8: 0}), (9,), "protocol MINE collects outputs of [9], which get nothing"),
    ],
)
def test_a_protocol_that_contradicts_itself(division: Division, collected: tuple[int, ...], message: str) -> None:
    mine = TransferProtocol(name="MINE", distribute=lambda _: division, collect=lambda _: collected)
    with pytest.raises(UserError, match=re.escape(message)):
        mine.check(EIGHT)


def test_devices_and_parts_that_contradict_a_layout_are_named_in_their_order() -> None:
    layout = Layout(DeviceMesh(4, 8), SMALL)
    for division, collected, message in (
        (Division(2, {4: 8, 5: 1}), (4,), "MINE cuts a batch into 2 parts and gives [1, 8] to dp2 tp2 pp2 on devices"),
        (Division(1, {4: 0}), (8, 5, 4), "MINE collects outputs of [5, 8], which get nothing"),
        (Division(1, {16: 0, 3: 0}), (16,), "MINE: devices [3, 16] are not of dp2 tp2 pp2 on devices 4-11"),
    ):
        given = {"distribute": lambda _, result=division: result, "collect": lambda _, result=collected: result}
        with pytest.raises(UserError, match=re.escape(f"protocol {message}")):
            TransferProtocol(name="MINE", **given).check(layout)


class Rule(InterfaceConfig):
    """Looks at data alone; no test here loads it."""

    implementation = "rule:Rule"
    uses_model = False


def rule(protocol: TransferProtocol, outputs: Sequence[str] = ("score",)) -> ModelFunctionCallDef:
    return call("judge", inputs=["seq"], outputs=outputs, interface_impl=Rule(), protocol=protocol)


def test_a_rule_runs_under_every_protocol_that_restores_the_batch() -> None:
    for protocol, parts in ((THREE_D_PROTO, 2), (THREE_D_PP_AS_DP, 4), (ALL_TO_ALL, 8), (RANK_ZERO, 1)):
        rule(protocol).check_protocol(EIGHT)
        assert rule(protocol).parts(EIGHT) == parts
    for protocol in (ONE_TO_ALL, THREE_D_PP_ONLY):
        rule(protocol, outputs=()).check_protocol(EIGHT)
        with pytest.raises(UserError, match="does not collect each sample once"):
            rule(protocol).check_protocol(EIGHT)


def test_a_pass_through_a_model_needs_what_3d_proto_gives_it() -> None:
    four = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=4))
    for protocol in (DP_PROTO, ALL_TO_ALL):  # on these devices they are 3D_PROTO
        call("reward", outputs=["reward"], protocol=protocol).check_protocol(four)
    with pytest.raises(UserError, match="reward_inference: protocol ALL_TO_ALL differs from 3D_PROTO"):
        call("reward", outputs=["reward"], protocol=ALL_TO_ALL).check_protocol(EIGHT)
    two = Layout(DeviceMesh(0, 2), ParallelStrategy(tp=2))
    # The same devices are collected of other parts, and other devices of the same parts.
    for protocol in (RANK_ZERO, ONE_TO_ALL):
        with pytest.raises(UserError, match=f"protocol {protocol.name} differs from 3D_PROTO on dp1 tp2 pp1 on "):
            call("reward", protocol=protocol).check_protocol(two)
    with pytest.raises(UserError, match="reward_inference: protocol DP_PROTO: dp2 tp2 pp2 on devices 8-15 divides"):
        call("reward", protocol=DP_PROTO).check_protocol(EIGHT)
    with pytest.raises(UserError, match="judge_train_step: Rule has uses_model=False"):
        call("judge", TRAIN_STEP, interface_impl=Rule())


def test_a_plan_cuts_the_batch_as_the_protocol_does() -> None:
    graph = DataflowGraph([rule(ALL_TO_ALL)], ["seq"])
    plan = ExecutionPlan(num_devices=4, calls={"judge_inference": CallPlan(devices=(0, 4), tp=2, pp=2)})
    check_plan(plan, graph, 8)
    with pytest.raises(UserError, match="parts of ALL_TO_ALL=4 x micro_batches=1 does not divide the mini-batch of 6"):
        check_plan(plan, graph, 6)
