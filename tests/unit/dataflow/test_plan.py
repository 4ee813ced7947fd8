"""Plan files: round trip, what is refused in them, and the order in which a plan issues calls."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import (
    CallCompute,
    CallPlan,
    ExecutionPlan,
    Intervals,
    OrderEntry,
    beside_s,
    digest_in,
    load_plan,
    plan_digest,
    save_plan,
)
from realhf.dataflow.plan_checks import check_plan
from realhf.dataflow.protocols import RANK_ZERO
from realhf.dataflow.rationale import DeviceMemory, Instead, Rationale
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from tests.unit.api.calls import TINY, Nothing, Rule, call, ppo_graph, ruled_graph

BATCH_SIZE = 16
ALL = CallPlan(devices=(0, 4), dp=4)
GRAPH = ppo_graph()
ORDER = ("actor_generate", "reward_inference", "critic_inference", "actor_train_step", "critic_train_step")


def plan_of(**changes: Any) -> ExecutionPlan:
    return ExecutionPlan(**{"num_devices": 4, "calls": dict.fromkeys(GRAPH.calls, ALL), **changes})


def with_call(name: str = "actor_generate", **changes: Any) -> ExecutionPlan:
    """A plan that is right but for one call."""
    return plan_of(calls={**plan_of().calls, name: msgspec.structs.replace(ALL, **changes)})


def order(*entries: str | tuple[str, int]) -> tuple[OrderEntry, ...]:
    pairs = [(entry, 0) if isinstance(entry, str) else entry for entry in entries]
    return tuple(OrderEntry(call=name, steps_back=steps_back) for name, steps_back in pairs)


def test_a_call_plan_says_its_layout() -> None:
    given = CallPlan(devices=(4, 8), dp=2, tp=2, pp=2)
    assert given.layout == Layout(DeviceMesh(4, 8), ParallelStrategy(2, 2, 2))


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    plan = plan_of(
        order=order(*ORDER),
        devices_per_node=2,
        models={"actor": TINY},
        predicted_step_s=1.5,
        notes={"seed": 3, "gpu": "none", "exact": True, "cost": 0.1},
    )
    computed = CallCompute(recomputation="selective", sequence_parallel=False, data_parallel="fsdp")
    plan.calls["actor_train_step"] = msgspec.structs.replace(ALL, compute=computed)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    saved = json.loads((tmp_path / "plan.json").read_text())["calls"]
    assert saved["actor_train_step"]["compute"] == computed.chosen, "what it does not say is not written"
    assert saved["actor_generate"]["compute"] == {}
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "no temporary file stays"


def test_a_plan_written_by_hand_needs_only_devices_and_calls(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"num_devices": 1, "calls": {"m_inference": {"devices": [0, 1]}}}')
    plan = load_plan(path)
    check_plan(plan, DataflowGraph([call("m", INFERENCE, ["x"])], ["x"]), 1)
    assert (plan.max_steps_in_flight, plan.staleness, OrderEntry(call="a").steps_back) == (2, 0, 0)
    one = plan.calls["m_inference"]
    assert (one.dp, one.tp, one.pp, one.chunks, one.micro_dp, one.micro_batches) == (1, 1, 1, 1, (1, 1), 1)


def test_a_plan_may_have_model_chunks(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"num_devices": 2, "calls": {"m_train_step": {"devices": [0, 2], "pp": 2, "chunks": 2}}}')
    plan = load_plan(path)
    check_plan(plan, DataflowGraph([call("m", TRAIN_STEP, ["x"])], ["x"]), 1)
    assert plan.layout("m_train_step").strategy == ParallelStrategy(pp=2, chunks=2)
    assert plan.calls["m_train_step"].stages_text == "2 x 2"
    save_plan(plan, path)
    assert load_plan(path) == plan
    with pytest.raises(
        UserError, match=r"actor_generate: chunks=2 is for train_step and inference .* leave chunks out"
    ):
        check_plan(with_call(dp=2, pp=2, chunks=2), GRAPH, BATCH_SIZE)


def trained_with(**training: Any) -> ExecutionPlan:
    """The right plan with actor_train_step, the home of the actor, laid out so."""
    home = msgspec.structs.replace(ALL, **training)
    return plan_of(calls={**plan_of().calls, "actor_train_step": home})


def test_a_plan_may_group_ranks_as_the_home_does(tmp_path: Path) -> None:
    plan = trained_with(dp=1, tp=4)
    grouped = msgspec.structs.replace(ALL, dp=2, tp=2, micro_dp=(2, 1))
    plan = msgspec.structs.replace(plan, calls={**plan.calls, "actor_generate": grouped})
    check_plan(plan, GRAPH, BATCH_SIZE)
    assert plan.layout("actor_generate").tensor_group(0, 0) == [0, 2]
    assert (grouped.replicas_text, ALL.replicas_text) == ("2 in 2 x 1", "4")
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


BAD_GROUPS = {
    "of a home with other degrees": (
        trained_with(dp=1, tp=4),
        {"dp": 2, "pp": 2, "micro_dp": (2, 1)},
        "actor_generate: with micro_dp=[2, 1], dp2 tp1 pp2 micro-dp2x1 does not contain",
    ),
    "with a remedy": (
        trained_with(dp=1, tp=2, pp=2),
        {"dp": 2, "tp": 2, "micro_dp": (2, 1)},
        "on every device; the home is dp1 tp2 pp2 on devices 0-3 of actor_train_step; set it to [1, 2]",
    ),
    "of a home elsewhere": (
        trained_with(devices=(0, 2), dp=1, tp=2),
        {"dp": 4, "micro_dp": (2, 1)},
        "actor_train_step; leave it out",
    ),
    "that dp does not fill": (
        trained_with(dp=1, tp=4),
        {"dp": 2, "tp": 2, "micro_dp": (4, 1)},
        "actor_generate: micro_dp=[4, 1] must be two numbers from 1 on whose product divides dp=2",
    ),
    "of none": (trained_with(), {"micro_dp": (0, 1)}, "actor_generate: micro_dp=[0, 1] must be two numbers from 1 on"),
    "at home": (
        trained_with(micro_dp=(2, 1)),
        {},
        "actor_train_step: micro_dp=[2, 1] in the home of its model; leave it out here",
    ),
}


@pytest.mark.parametrize("name", BAD_GROUPS)
def test_groups_that_are_not_those_of_the_home(name: str) -> None:
    plan, generation, message = BAD_GROUPS[name]
    calls = {**plan.calls, "actor_generate": msgspec.structs.replace(ALL, **generation)}
    with pytest.raises(UserError, match=re.escape(message)):
        check_plan(msgspec.structs.replace(plan, calls=calls), GRAPH, BATCH_SIZE)


def written(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(msgspec.json.encode(plan_of(models={"actor": TINY})))
    change(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    return path


BAD_FILES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown field": (lambda c: c.update(num_device=4), "unknown field `num_device`"),
    "an unknown field of a call": (
        lambda c: c["calls"]["actor_generate"].update(ep=2),
        "unknown field `ep` - at `$.calls[...]`",
    ),
    "a wrong type": (
        lambda c: c["calls"]["actor_generate"].update(dp="4"),
        "Expected `int`, got `str` - at `$.calls[...].dp`",
    ),
    "a missing field": (lambda c: c.pop("calls"), "missing required field `calls`"),
    "an architecture that cannot be": (
        lambda c: c["models"]["actor"].update(num_kv_heads=3),
        "num_kv_heads=3 must divide",
    ),
    "another format": (lambda c: c.update(format="execution-plan/0"), "format 'execution-plan/0' is not"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_plan_files_are_named(name: str, tmp_path: Path) -> None:
    change, message = BAD_FILES[name]
    path = written(tmp_path, change)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        load_plan(path)
    assert str(error.value).startswith(str(path))
    assert "`realhf plan`" in str(error.value), "the remedy"


def test_a_plan_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.json: cannot read the plan \(No such file.*write one with"):
        load_plan(tmp_path / "nowhere.json")
    (tmp_path / "plan.json").write_text("dp: 4")
    with pytest.raises(UserError, match=r"plan.json: not a plan: JSON is malformed"):
        load_plan(tmp_path / "plan.json")


BAD_PLANS: dict[str, tuple[ExecutionPlan, str]] = {
    "other calls": (
        plan_of(calls={"actor_generate": ALL, "judge": ALL}),
        "the plan is for other calls: it has actor_generate, judge, the experiment has actor_generate, "
        "actor_train_step, critic_inference, critic_train_step, reward_inference; make a plan for this experiment "
        "with `realhf plan`",
    ),
    "another model": (
        plan_of(models={"actor": TINY.with_head("scalar")}),
        "the plan is for another model: its 'actor' is DecoderConfig(",
    ),
    "more ranks than devices": (with_call(tp=2), "actor_generate: dp4 tp2 pp1 needs 8 devices but devices=[0, 4]"),
    "devices past the end": (
        with_call(devices=(1, 4)),
        "actor_generate: devices=[1, 4] do not lie within the 4 devices of the plan",
    ),
    "an illegal strategy": (
        with_call(devices=(0, 3), dp=1, tp=3),
        "actor_generate: tp=3 does not divide num_heads=8; choose tp from 1, 2, 4",
    ),
    "a batch that dp does not divide": (
        with_call(devices=(0, 3), dp=3),
        "actor_generate: dp=3 x micro_batches=1 does not divide the mini-batch of 16 samples; choose a product that "
        "divides 16",
    ),
    "a batch that micro-batches do not divide": (
        with_call(micro_batches=8),
        "actor_generate: dp=4 x micro_batches=8 does not divide the mini-batch of 16 samples",
    ),
    "recomputation of a call that trains nothing": (
        with_call(compute=CallCompute(recomputation="full")),
        "actor_generate: compute has recomputation='full', which is for train_step calls, and this one trains nothing; "
        "leave it out",
    ),
    "more recomputed layers than a stage has": (
        with_call("actor_train_step", compute=CallCompute(recomputation="full", recomputed_layers=5)),
        "actor_train_step: compute has recomputed_layers=5, and each stage of this model (each of its chunks) has at "
        "most 4 layers; choose 0 to 4, or leave it out for all",
    ),
    "recomputed layers without a kind": (
        with_call("actor_train_step", compute=CallCompute(recomputed_layers=2)),
        "actor_train_step: compute has recomputed_layers=2 without the kind of recomputation; add",
    ),
    "graphs of a call that generates nothing": (
        with_call("reward_inference", compute=CallCompute(decode_graphs="call")),
        "reward_inference: compute has decode_graphs='call', which is for generate calls, and this one generates "
        "nothing; leave it out",
    ),
    "a KV cache of a call that generates nothing": (
        with_call("reward_inference", compute=CallCompute(kv_cache_tokens=64)),
        "reward_inference: compute has kv_cache_tokens=64, which is for generate calls, and this one generates "
        "nothing; leave it out",
    ),
    "sharding of what is not the home": (
        with_call(compute=CallCompute(data_parallel="fsdp")),
        "actor_generate: compute has data_parallel='fsdp', which is for the home of model 'actor'; leave it out, or "
        "say it of actor_train_step",
    ),
    "modes of an operator that the model does not have": (
        with_call("actor_train_step", compute=CallCompute(data_parallel=(("layers.99.q", "sharded"),))),
        "actor_train_step: data_parallel: 'layers.99.q' names no operator of this model; its operators are embedding, ",
    ),
    "more slices than columns": (
        with_call("actor_train_step", compute=CallCompute(data_parallel=(("layers.*.q", "1000 sharded"),))),
        "actor_train_step: data_parallel: 'layers.0.q' has ",
    ),
    "more slices than rows on the last stage": (
        with_call("actor_train_step", dp=2, pp=2, compute=CallCompute(data_parallel=(("head", "1000 sharded"),))),
        "actor_train_step: data_parallel: 'head' has 64 rows on a device, fewer than 1000 slices; choose fewer slices",
    ),
    "a model in host memory that there is not": (
        plan_of(offload=("judge",)),
        "offload: 'judge' is no model of the experiment; choose from actor, critic, reward",
    ),
    "an order that lacks a call": (
        plan_of(order=order(*ORDER[:-1])),
        "order must name every call once; the calls are actor_generate, ",
    ),
    "a rule that the experiment does not have": (
        plan_of(beside={"judge": 1.0}),
        "the plan has calls beside the devices, judge, that the experiment does not have; make a plan",
    ),
    "an order with a call twice": (plan_of(order=order(*ORDER, ORDER[0])), "order must name every call once"),
    "steps_back past the bound": (
        plan_of(order=order(*ORDER[:-1], (ORDER[-1], 2))),
        "order: steps_back=2 of critic_train_step must be from 0 to 1, since max_steps_in_flight=2",
    ),
    "a child before its parent": (
        plan_of(order=order("reward_inference", "actor_generate", *ORDER[2:])),
        "order: reward_inference needs the result of actor_generate but is scheduled before it; move reward_inference",
    ),
    "a child of this step, its parent of the last": (
        plan_of(order=order((ORDER[0], 1), *ORDER[1:])),
        "needs the result of actor_generate but is scheduled before it; move",
    ),
    "the next step's generation before the training that it needs": (
        plan_of(order=order(*ORDER[:3], (ORDER[3], 1), ORDER[4])),
        "order: actor_generate needs the result of actor_train_step but is scheduled before it; move actor_generate",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_bad_plans(name: str) -> None:
    plan, message = BAD_PLANS[name]
    with pytest.raises(UserError, match=re.escape(message)):
        check_plan(plan, GRAPH, BATCH_SIZE)


def test_a_call_beside_the_devices_has_as_many_parts_as_divide_the_batch() -> None:
    graph = ruled_graph()
    calls = dict.fromkeys(graph.model_calls, CallPlan(devices=(4, 4), tp=4))
    plan = ExecutionPlan(num_devices=8, calls=calls, beside={"judge": 0.5})
    check_plan(plan, graph, BATCH_SIZE)
    assert plan.of_call(graph, "actor_generate", 12) is plan.calls["actor_generate"]
    for batch_size, parts in ((12, 4), (6, 3), (7, 1), (5, 1), (2, 2)):
        found = plan.of_call(graph, "judge", batch_size)
        assert (found.layout, found.predicted_s) == (Layout(DeviceMesh(4, parts), ParallelStrategy(parts)), 0.5)


def test_seconds_of_a_call_beside_the_devices() -> None:
    """Of 12 samples each of 4 devices (5 do not divide them) has 3, of half a second; two are made at a time."""

    class Slow(Rule):
        seconds_per_sample = 0.5
        processes_per_worker = 2

    assert beside_s(Slow(), 12, 5) == 0.75
    assert beside_s(Slow(), 7, 5) == 1.75
    assert beside_s(Rule(), 12, 5) == 0.0


def test_a_plan_file_can_be_edited(tmp_path: Path) -> None:
    """Two spaces for each level, and a new line at the end."""
    save_plan(plan_of(calls={"judge": CallPlan(devices=(0, 2), dp=2)}), tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert text.startswith('{\n  "num_devices": 4,\n  "calls": {\n    "judge": {\n      "devices": [\n        0,\n')
    assert text.endswith('"rationale": null\n}\n')


def test_a_plan_is_for_whole_groups_of_samples_and_for_the_protocols_of_its_calls() -> None:
    class Four(Nothing):
        samples_per_prompt = 4

    graph = DataflowGraph([call("m", GENERATE, ["x"], ["y"], interface_impl=Four())], ["x"])
    plan = ExecutionPlan(num_devices=1, calls={"m_generate": CallPlan(devices=(0, 1))})
    check_plan(plan, graph, 8)
    with pytest.raises(UserError, match="samples_per_prompt=4 does not divide batch_size=6"):
        check_plan(plan, graph, 6)
    graph = DataflowGraph([call("m", INFERENCE, ["x"], protocol=RANK_ZERO)], ["x"])
    check_plan(ExecutionPlan(num_devices=1, calls={"m_inference": CallPlan(devices=(0, 1))}), graph, 8)
    two = ExecutionPlan(num_devices=2, calls={"m_inference": CallPlan(devices=(0, 2), dp=2)})
    with pytest.raises(UserError, match="m_inference: protocol RANK_ZERO differs from 3D_PROTO"):
        check_plan(two, graph, 8)


def test_predictions_of_calls_beside_the_devices_are_no_part_of_what_a_plan_does() -> None:
    plan = plan_of()
    assert plan_digest(msgspec.structs.replace(plan, beside={"judge": 0.5})) == plan_digest(plan)
    known = "778d439a61c1ecbe6e645d793c581d3a4ca150c363a5f8fe6ff6a6b0e33e1992"
    assert plan_digest(plan) == known, "as in checkpoints of runs whose plans know no such calls"


def test_a_copy_is_taken_over_in_the_same_layout_alone() -> None:
    apart = msgspec.structs.replace(ALL, dp=2, tp=2, copy_from="a")
    plan = plan_of(calls={"a": ALL, "b": msgspec.structs.replace(ALL, copy_from="a"), "c": apart})
    assert {name: plan.takes_over(name) for name in "abc"} == {"a": False, "b": True, "c": False}


NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"num_devices": 4096, "devices_per_node": 4096, "max_steps_in_flight": 1024, "staleness": 64}, ""),
    ({"num_devices": 0}, "num_devices 0"),
    ({"num_devices": 4097}, "num_devices 4097"),
    ({"devices_per_node": 0}, "devices_per_node 0"),
    ({"max_steps_in_flight": 0}, "max_steps_in_flight 0"),
    ({"staleness": 65}, "staleness 65"),
    ({"staleness": -1}, "staleness -1"),
    ({"predicted_step_s": -0.1}, "predicted_step_s -0.1"),
    ({"beside": {"judge": -1.0}}, "beside.judge -1"),
    ({"order": (OrderEntry(call="a", steps_back=1024),)}, ""),
    ({"order": (OrderEntry(call="a", steps_back=-1),)}, "order: steps_back of a -1"),
    ({"order": (OrderEntry(call="a", steps_back=1025),)}, "order: steps_back of a 1025"),
    ({"calls": {"a": CallPlan(devices=(0, 4096), micro_batches=2**20)}}, ""),
    ({"calls": {"a": CallPlan(devices=(0, 4097))}}, "calls.a.devices"),
    ({"calls": {"a": CallPlan(devices=(-1, 4))}}, "calls.a.devices"),
    ({"calls": {"a": CallPlan(devices=(0, 1), dp=0)}}, "calls.a.dp 0"),
    ({"calls": {"a": CallPlan(devices=(0, 1), micro_dp=(0, 1))}}, "calls.a.micro_dp"),
    ({"calls": {"a": CallPlan(devices=(0, 1), micro_batches=0)}}, "calls.a.micro_batches 0"),
    ({"calls": {"a": CallPlan(devices=(0, 1), micro_batches=2**20 + 1)}}, "calls.a.micro_batches 1048577"),
    ({"calls": {"a": CallPlan(devices=(0, 1), predicted_s=-1.0)}}, "calls.a.predicted_s -1"),
    ({"calls": {"a": CallPlan(devices=(0, 1), compute=CallCompute(kv_cache_tokens=1))}}, ""),
    (
        {"calls": {"a": CallPlan(devices=(0, 1), compute=CallCompute(kv_cache_tokens=-1))}},
        "calls.a.compute.kv_cache_tokens -1",
    ),
    (
        {"calls": {"a": CallPlan(devices=(0, 1), compute=CallCompute(kv_cache_tokens=0))}},
        "calls.a.compute.kv_cache_tokens 0",
    ),
]


@pytest.mark.parametrize(("changes", "message"), NUMBERS, ids=lambda value: value if isinstance(value, str) else "")
def test_numbers_of_a_plan_file_are_in_their_ranges(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Docs: a number that cannot be is refused when the file is read."""
    save_plan(plan_of(**changes), tmp_path / "plan.json")
    if not message:
        load_plan(tmp_path / "plan.json")
        return
    with pytest.raises(UserError, match=re.escape(f"plan.json: {message}")):
        load_plan(tmp_path / "plan.json")
    assert digest_in(tmp_path / "plan.json") is None


REASONS = Rationale(
    origin="searched", hardware="none", profiled=False, certificate="", limits="", heuristic_step_s=None,
    heuristic_fits=False, device_memory_bytes=0, instead=(),
    memory=(
        DeviceMemory(devices=(1, 2), static_bytes=10, peak_bytes=20),
        DeviceMemory(devices=(3, 1), static_bytes=30, peak_bytes=40),
    ),
)  # fmt: skip


def test_the_memory_of_a_device_is_that_of_the_devices_around_it() -> None:
    found = [REASONS.memory_of(device) for device in range(5)]
    assert [memory and memory.peak_bytes for memory in found] == [None, 20, 20, 40, None]
    assert found[1] is not None
    assert found[1].communicator_bytes == 0
    assert Instead(call="a", layout="", num_too_large=3, num_others=3).slower_by == 0.0, "none fits"


def test_the_digest_is_of_what_a_plan_does_alone(tmp_path: Path) -> None:
    plan = plan_of()
    save_plan(plan, tmp_path / "plan.json")
    assert digest_in(tmp_path / "plan.json") == plan_digest(plan)
    assert digest_in(tmp_path / "none.json") is None
    predicted = dict.fromkeys(plan.calls, msgspec.structs.replace(ALL, predicted_s=3.0))
    said = {"predicted_step_s": 2.0, "models": {"actor": TINY}, "notes": {"seed": 3}, "calls": predicted}
    said |= {"rationale": REASONS, "intervals": Intervals(step_s=(1.0, 2.0), call_s={})}
    assert plan_digest(plan_of(**said)) == plan_digest(plan)
    different = [
        {"staleness": 1}, {"num_devices": 8}, {"devices_per_node": 2}, {"max_steps_in_flight": 1},
        {"offload": ("actor",)}, {"order": order(*ORDER)},
    ]  # fmt: skip
    others = [plan_of(**changes) for changes in different]
    others += [with_call(copy_from="x"), with_call(micro_batches=2), with_call(compute=CallCompute(prefetch=True))]
    assert len({plan_digest(other) for other in (plan, *others)}) == 1 + len(others)


def test_bounds_of_a_plan_that_just_fits() -> None:
    layers = CallCompute(recomputation="full", recomputed_layers=4)  # of 4
    none = CallCompute(recomputation="selective", recomputed_layers=0)
    for compute in (layers, none):
        check_plan(with_call("actor_train_step", compute=compute), GRAPH, BATCH_SIZE)
    check_plan(with_call(micro_batches=4), GRAPH, BATCH_SIZE)  # 4 x 4 of 16
    check_plan(with_call(compute=CallCompute(decode_graphs="call")), GRAPH, BATCH_SIZE)
    without = CallCompute(recomputation="off", recomputed_layers=2)
    with pytest.raises(UserError, match="recomputed_layers=2 without the kind of recomp"):
        check_plan(with_call("actor_train_step", compute=without), GRAPH, BATCH_SIZE)
    few = CallCompute(recomputation="full", recomputed_layers=-1)
    with pytest.raises(UserError, match="recomputed_layers=-1"):
        check_plan(with_call("actor_train_step", compute=few), GRAPH, BATCH_SIZE)


def test_mini_batches_have_to_divide_the_batch() -> None:
    graph = DataflowGraph([call("m", TRAIN_STEP, ["x"], mini_batches=3)], ["x"])
    plan = ExecutionPlan(num_devices=1, calls={"m_train_step": CallPlan(devices=(0, 1))})
    with pytest.raises(UserError, match=r"m_train_step: mini_batches=3 does not divide batch_size=16"):
        check_plan(plan, graph, 16)
    check_plan(plan, graph, 15)


def test_good_plans() -> None:
    check_plan(plan_of(), GRAPH, BATCH_SIZE)
    check_plan(plan_of(models={"actor": TINY, "unused": TINY.with_head("scalar")}), GRAPH, BATCH_SIZE)
    check_plan(plan_of(max_steps_in_flight=1, order=order(*ORDER)), GRAPH, BATCH_SIZE)
    # The critic's training of the last step, then its inference: the overlap of two steps.
    overlapping = order("actor_generate", (ORDER[4], 1), *ORDER[1:4])
    check_plan(plan_of(order=overlapping), GRAPH, BATCH_SIZE)


def test_unrolled_without_an_order_is_one_step_after_the_other() -> None:
    assert plan_of().unrolled(GRAPH, 2) == [(name, step) for step in (0, 1) for name in GRAPH.calls]


def test_unrolled_fills_and_drains() -> None:
    graph = DataflowGraph([call("a", GENERATE, ["x"], ["y"]), call("b", INFERENCE, ["y"])], ["x"])
    plan = ExecutionPlan(
        num_devices=1,
        calls=dict.fromkeys(graph.calls, CallPlan(devices=(0, 1))),
        order=order("a_generate", ("b_inference", 1)),
    )
    check_plan(plan, graph, 1)
    assert plan.unrolled(graph, 3) == [
        ("a_generate", 0),
        ("a_generate", 1),
        ("b_inference", 0),
        ("a_generate", 2),
        ("b_inference", 1),
        ("b_inference", 2),
    ]
    assert plan.unrolled(graph, 0) == []


def test_home_is_where_a_model_is_trained_else_where_it_is_used_first() -> None:
    assert plan_of().home(GRAPH, "actor") == "actor_train_step"
    assert plan_of().home(GRAPH, "reward") == "reward_inference"
    graph = DataflowGraph([call("m", GENERATE, ["x"], ["y"]), call("m", INFERENCE, ["y"])], ["x"])
    plan = ExecutionPlan(num_devices=1, calls={})
    assert plan.home(graph, "m") == "m_generate"


def test_all_training_of_one_model_is_in_one_place() -> None:
    calls = (
        call("actor", TRAIN_STEP, ["prompt"], name="first_lesson"),
        call("actor", TRAIN_STEP, ["prompt"], name="second_lesson"),
    )
    graph = DataflowGraph(calls, ["prompt"])
    here = CallPlan(devices=(0, 2), dp=2)
    check_plan(ExecutionPlan(num_devices=2, calls=dict.fromkeys(graph.calls, here)), graph, 8)
    apart = ExecutionPlan(num_devices=2, calls={"first_lesson": here, "second_lesson": CallPlan(devices=(0, 2), tp=2)})
    with pytest.raises(UserError, match=r"second_lesson .* first_lesson trains the same model .*give all train_step"):
        check_plan(apart, graph, 8)
    full = msgspec.structs.replace(here, compute=CallCompute(recomputation="full"))
    check_plan(ExecutionPlan(num_devices=2, calls=dict.fromkeys(graph.calls, full)), graph, 8)
    for one, other in ((here, full), (full, here)):
        unlike = ExecutionPlan(num_devices=2, calls={"first_lesson": one, "second_lesson": other})
        with pytest.raises(UserError, match=r"second_lesson .* the same model .*give all .* the same compute"):
            check_plan(unlike, graph, 8)
