"""Where plans send only what changed, by hand: what such moves take, and the memory that copies and homes keep."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.cli.plan_tables import choice_lines
from realhf.dataflow.plan import CallPlan, ExecutionPlan, plan_digest
from realhf.dataflow.plan_checks import check_plan, keeping
from realhf.planning.carriers import TRIED, with_changes
from realhf.planning.model.cluster import Cluster
from realhf.planning.predict import predict
from realhf.planning.request import PlanRequest
from realhf.planning.task import PlanningTask
from realhf.report.plan_section import plan_section
from tests.unit.planning.graphs import cpu_cluster
from tests.unit.planning.test_copies import COUNT, WHOLE, copying, plan_of, task_on

MOVE = "actor: train -> first"
BYTES = 4 * COUNT  # float32, from device 0 to devices 2 and 3


def apart(**hardware: float) -> Cluster:
    """Four nodes of one device, without latency; by default comparing takes a tenth of sending."""
    cluster = cpu_cluster(1, num_nodes=4)
    values = {"inter_node_latency_s": 0.0, "inter_node_bandwidth": 1e8, "memory_bandwidth": 2e9, **hardware}
    return replace(cluster, hardware=structs.replace(cluster.hardware, **values))


def task_with(share: float | None = None, cluster: Cluster | None = None, **fields: Any) -> PlanningTask:
    task = task_on(cluster or apart())
    shares = {} if share is None else {"actor": share}
    return replace(task, costs=replace(task.costs, changed_shares=shares), **fields)


@pytest.mark.parametrize(("share", "seconds"), [(None, BYTES / 1e8), (0.5, BYTES / 2e8), (0.01, 2 * BYTES / 2e9)])
def test_a_move_takes_its_share_of_the_bytes_or_what_comparing_takes(share: float | None, seconds: float) -> None:
    """All of them before a run has measured it."""
    plan = structs.replace(plan_of(WHOLE, WHOLE), changes=("first",))
    found = predict(task_with(share), plan).transfer_s
    assert found[MOVE] == pytest.approx(seconds)
    assert found["actor: train -> second"] == pytest.approx(BYTES / 1e8)


def test_they_are_chosen_where_links_are_slow() -> None:
    task = task_with()
    assert with_changes(task, predict(task, plan_of(WHOLE, WHOLE))).plan.changes == ("first", "second")
    found = with_changes(task, predict(task, plan_of(WHOLE, WHOLE))).plan
    assert "copies that get only what changed: first, second" in choice_lines(found)
    assert "<td>first, second</td>" in plan_section(found, [])
    fast = task_with(cluster=apart(inter_node_bandwidth=1e9 * TRIED * 1.1))
    prediction = predict(fast, plan_of(WHOLE, WHOLE))
    assert with_changes(fast, prediction) is prediction, "comparing takes more than a part of sending"
    within = task_with(cluster=cpu_cluster(4))
    prediction = predict(within, plan_of(WHOLE, WHOLE))
    assert with_changes(within, prediction) is prediction, "in one host's memory"
    forced = replace(within, send_changes="on")
    assert with_changes(forced, prediction).plan.changes == ("first", "second")
    off = replace(task, send_changes="off")
    assert with_changes(off, predict(off, plan_of(WHOLE, WHOLE))).plan.changes == ()


def test_copies_and_the_values_that_were_sent_take_memory() -> None:
    task, plan = task_with(), plan_of(WHOLE, CallPlan(devices=(2, 1)))

    def bytes_of(plan: ExecutionPlan, *names: str) -> list[float]:
        return predict(task, structs.replace(plan, changes=names)).device_bytes

    before, after = bytes_of(plan), bytes_of(plan, "first", "second")
    gained = [more - less for more, less in zip(after, before, strict=True)]
    assert gained == [BYTES, 0, BYTES, 0]  # at home; while each call runs, the other's copy
    one = plan_of(WHOLE, WHOLE)
    assert bytes_of(one, "first", "second")[1:] == bytes_of(one)[1:], "both calls use one copy"
    small = replace(task.cluster, hardware=task.cluster.hardware.with_constants({}))
    small = replace(small, hardware=structs.replace(small.hardware, device_memory_bytes=int(max(before)) + 10))
    tight = task_with(cluster=small)
    prediction = predict(tight, plan)
    assert prediction.fits
    assert with_changes(tight, prediction) is prediction
    with pytest.raises(UserError, match=r"send_changes=on: with copies that are kept a device needs .*; take auto or"):
        with_changes(replace(tight, send_changes="on"), prediction)


def test_copies_that_serve_others_or_are_filled_in_place_do_not_keep_their_memory() -> None:
    task = task_on(cpu_cluster(4))
    plan = plan_of(WHOLE, WHOLE)
    assert keeping(plan, task.graph) == ["first", "second"]
    assert keeping(copying(plan_of(CallPlan(devices=(2, 1)), WHOLE)), task.graph) == []
    in_place = structs.replace(WHOLE, compute=structs.replace(WHOLE.compute, in_place=True))
    assert keeping(plan_of(in_place, WHOLE), task.graph) == [], "both calls have one copy"
    wrong = structs.replace(plan, changes=("train",))
    with pytest.raises(UserError, match=r"changes: 'train' is no call .* for itself alone; choose from first, second"):
        check_plan(wrong, task.graph, task.batch_size)


def test_a_digest_has_changes_where_there_are_some() -> None:
    plan = plan_of(WHOLE, WHOLE)
    assert plan_digest(structs.replace(plan, changes=("first",))) != plan_digest(plan)


def test_a_search_counts_with_the_measured_share() -> None:
    """At most as fast as all is compared; not where all is sent."""
    hardware = apart().hardware
    assert hardware.sending(1.0) is hardware
    assert hardware.sending(0.5).send_s(1e8, crosses_nodes=True) == pytest.approx(0.5)
    assert hardware.sending(0.001).send_s(1e9, crosses_nodes=True) == pytest.approx(1.0)
    assert hardware.sending(0.001).send_s(1e9, crosses_nodes=False) == hardware.send_s(1e9, crosses_nodes=False)


@pytest.mark.parametrize("fields", [{"plan": Path("plan.json")}, {"rule": "colocate"}])
def test_the_option_is_for_a_search(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--send-changes on is for the search of a plan; (write|leave)"):
        PlanRequest(send_changes="on", **fields)
