"""Plans for models of other families than Llama's, and for layouts with micro data-parallel groups."""

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig, Experts
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy, divisors
from realhf.geometry.shards import Placement, held_boxes
from realhf.realloc.plan.planner import plan_between
from tests.unit.realloc.layouts import global_state
from tests.unit.realloc.test_planner import check


@st.composite
def families(draw: st.DrawFn) -> DecoderConfig:
    """Mixtures of experts; biases; head norms; LayerNorm, plain MLPs and learned positions."""
    kv_heads = draw(st.sampled_from([2, 3, 4, 6]))
    experts = draw(st.integers(0, 3))
    is_old = experts == 0 and draw(st.booleans())
    return DecoderConfig(
        hidden_size=4 * kv_heads,
        intermediate_size=12,
        num_layers=draw(st.integers(2, 4)),
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        vocab_size=24,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        norm="layer" if is_old else "rms",
        mlp="plain" if is_old else "gated",
        mlp_bias=is_old,
        positions="learned" if is_old else "rotary",
        max_positions=5 if is_old else 0,
        tied_embeddings=draw(st.booleans()),
        experts=Experts(count=experts, per_token=min(experts, 2)),
    )


@st.composite
def grouped_layouts(draw: st.DrawFn, model: DecoderConfig) -> Layout:
    dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    interval = draw(st.sampled_from(divisors(dp)))
    micro_dp = (interval, draw(st.sampled_from(divisors(dp // interval))))
    tp = draw(st.sampled_from(divisors(model.num_kv_heads)))
    strategy = ParallelStrategy(dp=dp, tp=tp, pp=pp, micro_dp=micro_dp)
    check_strategy("call", model, strategy)
    return Layout(DeviceMesh(draw(st.integers(0, 6)), strategy.size), strategy)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_family_to_any_grouping(data: st.DataObject) -> None:
    model = data.draw(families())
    a, b = data.draw(grouped_layouts(model)), data.draw(grouped_layouts(model))
    kinds: list[DataParallel] = [data.draw(st.sampled_from(["zero1", "fsdp"])) for _ in range(2)]
    bucket_bytes = data.draw(st.sampled_from([64, 1000, 2**20]))
    plan = plan_between(
        model, *map(Placement, (a, b), kinds), data.draw(st.sampled_from([None, 2, 4])), 2, bucket_bytes
    )
    source = {device: held_boxes(model, a, device, kinds[0]) for device in a.mesh.devices}
    target = {device: held_boxes(model, b, device, kinds[1]) for device in b.mesh.devices}
    check(plan, global_state(model), source, target)
