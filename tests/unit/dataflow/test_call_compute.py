"""What a plan says of how a call computes."""

from dataclasses import replace

import msgspec
import pytest

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan, interval_text, updates_text
from realhf.dataflow.plan_checks import check_plan
from tests.unit.api.calls import TINY, Nothing, call
from tests.unit.dataflow.test_plan import ALL, BATCH_SIZE, GRAPH, with_call


def test_how_calls_are_computed_in_words() -> None:
    said = {
        CallCompute(
            recomputation="full", recomputed_layers=2
        ): "full recomputation, in the first 2 layers of a stage only",
        CallCompute(recomputation="off"): "no recomputation",
        CallCompute(sequence_parallel=True): "sequence parallel",
        CallCompute(sequence_parallel=False): "not sequence parallel",
        CallCompute(data_parallel="fsdp", prefetch=True): "fsdp, prefetch",
        CallCompute(data_parallel=(("*", "sharded"),), prefetch=False): "modes by operator, no prefetch",
        CallCompute(offload_states=True): "states in host memory",
        CallCompute(offload_states=False): "states on the device",
        CallCompute(decode_graphs="kept"): "graphs kept",
        CallCompute(decode_graphs="call"): "graphs of a call",
        CallCompute(decode_graphs="off"): "no graphs",
        CallCompute(in_place=True): "copy filled in place",
        CallCompute(in_place=False): "copy filled beside the home",
        CallCompute(kv_cache_tokens=4096): "KV cache of 4,096 tokens",
        CallCompute(): "",
    }
    assert [str(compute) for compute in said] == list(said.values())
    assert ALL.way_text == "1 micro-batch"
    two = msgspec.structs.replace(ALL, micro_batches=2, compute=CallCompute(recomputation="full"))
    assert two.way_text == "2 micro-batches, full recomputation"
    assert (ALL.stages_text, CallPlan(devices=(0, 2), pp=2).stages_text) == ("1", "2")
    assert [updates_text(number) for number in (0, 1, 2)] == ["0 updates", "1 update", "2 updates"]
    assert [interval_text(each) for each in (None, (0.214, 9.96), (9.99, 10.0))] == ["-", "0.21-10", "10-10"]
    assert interval_text((1.26, 123.4)) == "1.3-123"
    assert interval_text((9.46, 99.7)) == "9.5-100"


def test_layers_are_counted_in_the_largest_chunk_of_a_stage() -> None:
    """Of five layers on two stages of two chunks the first chunk has two; of four on three stages the first stage."""
    five = replace(TINY, num_layers=5)
    for config, layout in ((five, {"devices": (0, 2), "pp": 2, "chunks": 2}), (TINY, {"devices": (0, 3), "pp": 3})):
        graph = DataflowGraph([call("m", TRAIN_STEP, ["x"], model_type=config)], ["x"])
        for number in (2, 3):
            compute = CallCompute(recomputation="full", recomputed_layers=number)
            plan = ExecutionPlan(num_devices=3, calls={"m_train_step": CallPlan(**layout, compute=compute)})
            if number == 2:
                check_plan(plan, graph, 4)
                continue
            with pytest.raises(UserError, match=r"recomputed_layers=3, and .* has at most 2 layers; choose 0 to 2"):
                check_plan(plan, graph, 4)


def test_the_home_of_a_model_that_nobody_trains_may_divide_its_parameters() -> None:
    """Each call that trains a model may say so, too: they all say the same."""
    divided = CallCompute(data_parallel="fsdp", prefetch=False)
    check_plan(with_call("reward_inference", compute=divided), GRAPH, BATCH_SIZE)
    lessons = [call("m", TRAIN_STEP, ["x"], name=name) for name in ("first", "second")]
    calls = dict.fromkeys(("first", "second"), msgspec.structs.replace(ALL, compute=divided))
    check_plan(ExecutionPlan(num_devices=4, calls=calls), DataflowGraph(lessons, ["x"]), BATCH_SIZE)


def test_graphs_that_the_experiment_fixes_are_not_the_plan_s_to_choose() -> None:
    class Fixed(Nothing):
        decode_graphs = "off"

    graph = DataflowGraph([call("m", GENERATE, ["x"], ["y"], interface_impl=Fixed())], ["x"])
    for life, is_right in (("off", True), ("call", False)):
        plan = ExecutionPlan(
            num_devices=1, calls={"m_generate": CallPlan(devices=(0, 1), compute=CallCompute(decode_graphs=life))}
        )
        if is_right:
            check_plan(plan, graph, 4)
            continue
        with pytest.raises(UserError, match="leave it open, and the experiment fixes decode_graphs='off'; leave it"):
            check_plan(plan, graph, 4)


def test_the_room_that_the_experiment_gives_is_not_the_plan_s_to_choose() -> None:
    class Fixed(Nothing):
        kv_cache_tokens = 64

    graph = DataflowGraph([call("m", GENERATE, ["x"], ["y"], interface_impl=Fixed())], ["x"])
    compute = CallCompute(kv_cache_tokens=32)
    plan = ExecutionPlan(num_devices=1, calls={"m_generate": CallPlan(devices=(0, 1), compute=compute)})
    with pytest.raises(UserError, match="the experiment fixes kv_cache_tokens=64; leave it out of the plan"):
        check_plan(plan, graph, 4)
