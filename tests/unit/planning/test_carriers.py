"""What moves by broadcasts take, by hand; where the planner takes them, and what it says of that."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.cli.plan_tables import choice_lines
from realhf.dataflow.plan import CallPlan, ExecutionPlan, plan_digest
from realhf.dataflow.plan_checks import check_plan, moves_of
from realhf.geometry.layout import Layout
from realhf.geometry.parameters import parameter_count
from realhf.geometry.shards import Placement
from realhf.planning.carriers import with_best_carriers
from realhf.planning.clusters import parse_cluster
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.reallocation import GLOO_BROADCASTS, Reallocation
from realhf.planning.predict import Prediction, predict, problem_of
from realhf.planning.request import PlanRequest, SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES
from realhf.report.plan_section import plan_section
from tests.unit.planning.graphs import TINY, cpu_cluster, settings, task_of
from tests.unit.planning.test_copies import COUNT, HOME, WHOLE, copying, plan_of, task_on
from tests.unit.planning.test_follow import NAME, following, placed
from tests.unit.planning.test_reallocation import LINKS, NODES, layout

GPUS = structs.replace(LINKS, shares_host_memory=False)


def seconds(hardware: Hardware, source: Layout, target: Layout) -> float:
    return Reallocation(TINY, 4, replace(NODES, hardware=hardware), hardware).broadcasts_s(Placement(source), target)


def test_one_broadcast_by_hand() -> None:
    """All parameters from one device to two: in one load, over two hops, or into a host's memory and out of it."""
    size, one = 4 * parameter_count(TINY), layout(1, 1, 1)
    within, across = layout(2, 1, 1, first=2), layout(2, 1, 1, first=4)
    assert size < DEFAULT_BUCKET_BYTES
    assert seconds(LINKS, one, within) == pytest.approx(0.5 + 2 * size / 1000)
    assert seconds(LINKS, one, across) == pytest.approx(GLOO_BROADCASTS * (2 * 2.0 + size / 100))
    assert seconds(GPUS, one, within) == pytest.approx(2 * 0.5 + size / 1000)
    assert seconds(GPUS, one, across) == pytest.approx(2 * 2.0 + size / 100)
    assert seconds(LINKS, one, one) == 0.0


def test_a_collective_may_be_faster_between_nodes_than_a_message() -> None:
    faster = structs.replace(GPUS, inter_node_send_bandwidth=25.0)
    move = Reallocation(TINY, 4, replace(NODES, hardware=faster), faster)
    source, target = Placement(layout(1, 1, 1)), layout(2, 1, 1, first=4)
    assert 3 * move.broadcasts_s(source, target) < move.table([source], [target])[0]


def test_a_device_between_two_others_has_one_broadcast_at_a_time_but_over_gloo() -> None:
    """Device 1 sends its half to device 2 and gets that of device 0, which also sends the norms to device 2."""
    source, target = layout(2, 2, 1), layout(2, 2, 1, first=1)
    plan = Reallocation(TINY, 4, NODES, LINKS).by_broadcasts(Placement(source), target)
    assert plan.groups == ((0, 1), (1, 2), (0, 2))
    half, both = plan.sent_bytes[1], plan.sent_bytes[0]
    assert plan.received_bytes == {1: half, 2: both}
    assert both > half
    assert seconds(LINKS, source, target) == pytest.approx(2 * (0.5 + 2 * half / 1000))
    assert seconds(GPUS, source, target) == pytest.approx(2 * (0.5 + half / 1000))
    apart = Cluster(num_nodes=8, devices_per_node=1, hardware=LINKS)
    found = Reallocation(TINY, 4, apart, LINKS).broadcasts_s(Placement(source), target)
    assert found == pytest.approx(GLOO_BROADCASTS * (2 * 2.0 + both / 100))


def predicted(cluster: Cluster, **fields: Any) -> tuple[PlanningTask, Prediction]:
    """A plan with two copies on devices 2 and 3 of the parameters on device 0."""
    task = replace(task_on(cluster), **fields)
    return task, predict(task, plan_of(WHOLE, WHOLE))


def test_broadcasts_where_they_are_faster() -> None:
    """Over gloo; not over a host's memory, where a collective copies twice."""
    of_gloo = cpu_cluster(1, num_nodes=4)
    of_gloo = replace(of_gloo, hardware=structs.replace(of_gloo.hardware, inter_node_latency_s=0.0))
    task, prediction = predicted(of_gloo)
    found = with_best_carriers(task, prediction)
    assert found.plan.broadcasts == ("first", "second")
    for name in ("first", "second"):
        before, after = (each.transfer_s[f"actor: train -> {name}"] for each in (prediction, found))
        assert after == pytest.approx(GLOO_BROADCASTS * before)
    assert found.step_s < prediction.step_s
    assert "parameters by broadcasts in process groups: first, second" in choice_lines(found.plan)
    assert "<td>first, second</td>" in plan_section(found.plan, [])
    check_plan(found.plan, task.graph, task.batch_size)
    task, prediction = predicted(cpu_cluster(4))
    assert with_best_carriers(task, prediction) is prediction


def test_a_move_that_is_hidden_stays_as_it_is_where_broadcasts_are_slower() -> None:
    """Behind generation on another device, where a slower move makes no step longer."""
    graph = following()
    task = task_of(graph, **settings(graph, cpu_cluster(4)))
    prediction = predict(task, placed(CallPlan(devices=(1, 1)), CallPlan(devices=(0, 1))))
    by_broadcasts = predict(task, structs.replace(prediction.plan, broadcasts=(NAME,)))
    assert by_broadcasts.transfer_s[NAME] > prediction.transfer_s[NAME]
    assert by_broadcasts.step_s == prediction.step_s
    assert with_best_carriers(task, prediction) is prediction


def test_the_choice_can_be_forced() -> None:
    task, prediction = predicted(cpu_cluster(1, num_nodes=4), moved_by="chains")
    assert with_best_carriers(task, prediction) is prediction
    task, prediction = predicted(cpu_cluster(4), moved_by="broadcasts")
    assert with_best_carriers(task, prediction).plan.broadcasts == ("first", "second")
    graph = following()
    task = replace(task_of(graph, **settings(graph, cpu_cluster(4))), moved_by="broadcasts")
    found = search_plan(task, SearchBudget(evaluations=200)).plan
    assert NAME in found.broadcasts
    assert list(found.broadcasts) == moves_of(found, graph)


def test_a_model_that_follows_every_fourth_step_costs_a_quarter() -> None:
    graph, plan = following(4), placed(CallPlan(devices=(1, 1)), CallPlan(devices=(0, 1)))
    task = task_of(graph, **settings(graph, cpu_cluster(1, num_nodes=4)))
    links, by_broadcasts = task.costs.timings[TINY].links, structs.replace(plan, broadcasts=(NAME,))
    expected = GLOO_BROADCASTS * links.broadcast_s(4 * COUNT, 2, crosses_nodes=True) / 4
    assert predict(task, by_broadcasts).transfer_s[NAME] == pytest.approx(expected)


def gpus(communicator_gib: float, memory_gib: float) -> Cluster:
    """Nodes of one GPU, between which a message is much slower than a collective."""
    hardware = structs.replace(
        parse_cluster("h100-4x1").hardware,
        inter_node_send_bandwidth=1e6,
        communicator_bytes=communicator_gib * 2**30,
        device_memory_bytes=int(memory_gib * 2**30),
    )
    return Cluster(num_nodes=4, devices_per_node=1, hardware=hardware)


def test_the_groups_take_memory_on_the_devices_of_both_ends() -> None:
    """One for each move here: of devices 0, 2 and 3. Where there is no room for both, the second is by chains."""
    task, prediction = predicted(gpus(1.0, 80.0))
    found = with_best_carriers(task, prediction)
    assert found.plan.broadcasts == ("first", "second")
    before, after = ([need.communicator_bytes for need in each.needs] for each in (prediction, found))
    assert [more - less for more, less in zip(after, before, strict=True)] == [2.0**31, 0.0, 2.0**31, 2.0**31]
    fullest_gib = max(prediction.device_bytes) / 2**30
    task, prediction = predicted(gpus(1.0, fullest_gib + 1.5))
    assert with_best_carriers(task, prediction).plan.broadcasts == ("first",)
    task, prediction = predicted(gpus(1.0, fullest_gib + 1.5), moved_by="broadcasts")
    with pytest.raises(UserError, match=r"moved_by=broadcasts: with the process groups of all .*; take auto or chains"):
        with_best_carriers(task, prediction)


def test_senders_pack_what_they_broadcast() -> None:
    """Also where messages would go out of the tensors, over a host's memory."""
    task, prediction = predicted(cpu_cluster(4))
    by_broadcasts = structs.replace(prediction.plan, broadcasts=("first",))
    assert problem_of(task, prediction.plan).sending_bytes == 0.0
    assert problem_of(task, by_broadcasts).sending_bytes == 2.0 * DEFAULT_BUCKET_BYTES


def test_a_device_counts_the_groups_of_the_device_in_most() -> None:
    """Of halves on devices 0 and 1 that go to devices 2 and 3 a receiver has two groups or one, and counts the most."""
    home = CallPlan(devices=(0, 2), tp=2)
    task = task_on(gpus(1.0, 80.0))
    plan = plan_of(WHOLE, WHOLE, home)
    move = Reallocation(TINY, 4, task.cluster, task.cluster.hardware)
    groups = move.by_broadcasts(Placement(home.layout), WHOLE.layout).groups
    most = max(Counter(device for group in groups for device in group).values())
    needs = [predict(task, structs.replace(plan, broadcasts=names)).needs for names in ((), ("first",))]
    gained = {(b.communicator_bytes - a.communicator_bytes) / 2**30 for a, b in zip(*needs, strict=True)}
    assert gained == {float(most)}
    assert most >= 1


def test_a_copy_from_a_copy_may_come_by_broadcasts() -> None:
    """Of the copy's layout, not of the home's; a copy that is taken over does not move."""
    task = task_on(cpu_cluster(1, num_nodes=4))
    plan = structs.replace(copying(plan_of(CallPlan(devices=(2, 1)), WHOLE)), broadcasts=("second",))
    links = task.costs.timings[TINY].links
    transfer_s = predict(task, plan).transfer_s["actor: first -> second"]
    assert transfer_s == pytest.approx(GLOO_BROADCASTS * links.broadcast_s(4 * COUNT, 2, crosses_nodes=True))
    over = structs.replace(copying(plan_of(WHOLE, WHOLE)), broadcasts=("second",))
    with pytest.raises(UserError, match=r"broadcasts: 'second' is no call .*; choose from first, or leave it out"):
        check_plan(over, task.graph, task.batch_size)


def test_a_plan_is_refused_whose_broadcasts_do_not_move() -> None:
    task = task_on(cpu_cluster(4))
    at_home = ExecutionPlan(
        num_devices=4,
        calls=dict.fromkeys(("first", "second", "train", "reward_inference"), HOME),
        broadcasts=("first",),
    )
    with pytest.raises(UserError, match=r"broadcasts: 'first' is no call or model .*; leave it out"):
        check_plan(at_home, task.graph, task.batch_size)


def test_a_digest_has_broadcasts_where_there_are_some() -> None:
    plan = plan_of(WHOLE, WHOLE)
    by_broadcasts = structs.replace(plan, broadcasts=("first",))
    assert plan_digest(by_broadcasts) != plan_digest(plan)
    # As before plans knew broadcasts.
    assert plan_digest(plan) == "bc562e0c25af84c06b91e716d52b6ca871c73e8e4562fb690792688c7fa8ff08"


@pytest.mark.parametrize("fields", [{"plan": Path("plan.json")}, {"rule": "colocate"}])
def test_the_option_is_for_a_search(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--moved-by broadcasts is for the search of a plan; (write|leave)"):
        PlanRequest(moved_by="broadcasts", **fields)
