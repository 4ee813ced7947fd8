"""Random models and layouts, and a global state to hold every layout against."""

import numpy as np
from hypothesis import strategies as st

from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, divisors
from realhf.geometry.parameters import decoder_parameters
from realhf.realloc.plan.broadcast_chain import node_of
from realhf.realloc.plan.planner import ReallocationPlan


@st.composite
def models(draw: st.DrawFn) -> DecoderConfig:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    heads = kv_heads * draw(st.integers(1, 2))
    head = draw(st.sampled_from(["lm", "scalar"]))
    return DecoderConfig(
        hidden_size=2 * heads,
        intermediate_size=12,
        num_layers=draw(st.integers(1, 5)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=12,
        head=head,
        tied_embeddings=head == "lm" and draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn, model: DecoderConfig) -> Layout:
    pp = draw(st.integers(1, model.num_layers))
    strategy = ParallelStrategy(
        dp=draw(st.integers(1, 3)),
        tp=draw(st.sampled_from(divisors(model.num_kv_heads))),
        pp=pp,
        chunks=draw(st.integers(1, model.num_layers // pp)) if pp > 1 else 1,
    )
    return Layout(DeviceMesh(draw(st.integers(0, 8)), strategy.size), strategy)


def network_bytes(plan: ReallocationPlan, devices_per_node: int | None) -> int:
    """Bytes that cross from one node to another; the other sent bytes stay within a node."""
    return sum(
        each.load.elements * plan.element_bytes
        for each in plan.transfers
        if node_of(each.target, devices_per_node) != node_of(each.source, devices_per_node)
    )


def global_state(model: DecoderConfig) -> dict[str, np.ndarray]:
    """Every parameter whole, no value twice."""
    state, first = {}, 1
    for spec in decoder_parameters(model):
        state[spec.name] = np.arange(first, first + spec.size).reshape(spec.shape)
        first += spec.size
    return state
