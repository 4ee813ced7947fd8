"""Sets of devices that models are confined to."""

import re
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.dataflow.plan_checks import check_plan
from realhf.dataflow.pools import Pool, check_devices
from realhf.geometry.layout import DeviceMesh
from tests.unit.api.calls import PPO_CALLS

TRAIN, ROLLOUT = Pool("train", devices=range(0, 4)), Pool("rollout", devices=(6, 4, 5, 7))


def test_devices_are_a_set() -> None:
    assert ROLLOUT.devices == (4, 5, 6, 7)
    assert Pool("train", devices=[3, 2, 1, 0]) == TRAIN
    assert str(Pool("odd", devices=[0, 1, 2, 5, 7])) == "pool 'odd' (devices 0-2, 5, 7)"
    assert Pool("odd", devices=[0, 1, 2, 5]).runs == [DeviceMesh(0, 3), DeviceMesh(5, 1)]
    several = Pool("several", devices=[0, 1, 4, 5, 6, 9, 10])
    assert several.runs == [DeviceMesh(0, 2), DeviceMesh(4, 3), DeviceMesh(9, 2)]
    assert str(several) == "pool 'several' (devices 0-1, 4-6, 9-10)"
    assert DeviceMesh(5, 2) in ROLLOUT
    assert DeviceMesh(3, 2) not in ROLLOUT


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("", range(2), "has no name"),
        ("p", (), r"^pool 'p' \(devices none\) needs the numbers, from 0 on, of at least one device"),
        ("p", (-1,), r"^pool 'p' \(devices -1\) needs the numbers, from 0 on, of at least one device"),
        ("p", (2, -1), r"^pool 'p' \(devices 2, -1\) needs the numbers, from 0 on, of at least one device"),
        ("p", "01", r"^pool 'p' \(devices '0', '1'\) needs the numbers, from 0 on, of at least one device"),
        ("p", (0, "1"), r"^pool 'p' \(devices 0, '1'\) needs the numbers, from 0 on, of at least one device"),
        ("p", (1, 1), "names a device twice"),
    ],
)
def test_what_is_no_pool(name: str, devices: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pool(name, devices=devices)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"judge": TRAIN}, "pools: 'judge' is used by no call; the calls use actor, critic, reward"),
        ({"actor": range(4)}, "pools: 'actor' has range(0, 4); give it a Pool"),
        (
            {"actor": TRAIN, "critic": Pool("train", devices=[9])},
            "pools: pool 'train' (devices 0-3) and pool 'train' (devices 9) have one name",
        ),
    ],
)
def test_pools_that_do_not_fit_the_graph(pools: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        DataflowGraph(PPO_CALLS, ["prompt"], pools=pools)


def test_models_may_share_a_pool() -> None:
    graph = DataflowGraph(PPO_CALLS, ["prompt"], pools={"actor": TRAIN, "critic": TRAIN, "reward": ROLLOUT})
    assert graph.pools == {"actor": TRAIN, "critic": TRAIN, "reward": ROLLOUT}


def test_a_pool_has_devices_of_the_cluster() -> None:
    check_devices([TRAIN, ROLLOUT], 8)
    with pytest.raises(UserError, match=r"pool 'rollout' \(devices 4-7\) has device 7, and there are 6, .* 8 or more"):
        check_devices([TRAIN, ROLLOUT], 6)
    with pytest.raises(UserError, match=r"pool 'rollout' .* has device 7, and there are 7, numbered from 0 on; give"):
        check_devices([TRAIN, ROLLOUT], 7)


def test_a_plan_by_hand_keeps_to_the_pools() -> None:
    graph = DataflowGraph(PPO_CALLS, ["prompt"], pools={"actor": TRAIN, "critic": ROLLOUT})
    inside = dict.fromkeys(graph.calls, CallPlan(devices=(4, 4), dp=4))
    inside |= {call.name: CallPlan(devices=(0, 4), dp=4) for call in graph.calls_of("actor")}
    check_plan(ExecutionPlan(num_devices=8, calls=inside), graph, 16)
    outside = inside | {"actor_generate": CallPlan(devices=(2, 4), dp=4)}
    message = "actor_generate: devices=[2, 4] are not all of pool 'train' (devices 0-3), to which model 'actor' is"
    with pytest.raises(UserError, match=re.escape(message)):
        check_plan(ExecutionPlan(num_devices=8, calls=outside), graph, 16)
    anywhere = inside | {"reward_inference": CallPlan(devices=(2, 4), dp=4)}  # this model has no pool
    check_plan(ExecutionPlan(num_devices=8, calls=anywhere), graph, 16)
