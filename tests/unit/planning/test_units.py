"""Modes of operators in numbers: bytes against the engine's units, gathers and seconds by hand."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.architecture.compute import MODES, ModeRules, modes_text
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType, Experts
from realhf.dataflow.graph import INFERENCE, TRAIN_STEP
from realhf.dataflow.plan import CallCompute
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.operators import can_be_cut, operators, slice_modes
from realhf.geometry.shards import units
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.mode_choice import compact
from realhf.planning.model.osdp.exchange import Exchange
from realhf.planning.model.osdp.units import (
    Piece,
    StageUnits,
    by_stage,
    operators_on,
    slice_elements,
    vector_elements,
)
from tests.unit.planning.graphs import TINY, call, work_of

KINDS = ("q", "k", "v", "o", "gate", "up", "down")
MODELS = [
    TINY,
    replace(TINY, tied_embeddings=True, num_layers=5),
    TINY.with_head("scalar"),
    replace(TINY, hidden_size=96, intermediate_size=72, qkv_bias=True),
    replace(TINY, vocab_size=150, intermediate_size=100),  # no multiples of the slices
    replace(TINY, experts=Experts(count=4, per_token=2)),
]
STRATEGIES = [ParallelStrategy(2), ParallelStrategy(4, 2), ParallelStrategy(2, 1, 2), ParallelStrategy(3, 2, 4),
              ParallelStrategy(2, 1, 2, 2)]  # fmt: skip


def drawn(model: DecoderConfig, seed: int) -> ModeRules:
    """A random mode for every operator and slice."""
    draw, rules = random.Random(seed), []
    for name in operators(model):
        modes = ("replicated", "zero1") if name == "norms" else MODES
        count = draw.choice((1, 2, 4, 8)) if can_be_cut(name, model) else 1
        rules.append((name, modes_text([draw.choice(modes) for _ in range(count)])))
    return tuple(rules)


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    strategy=st.sampled_from(STRATEGIES),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 10**6),
)
def test_static_bytes_are_those_of_the_units(
    model: DecoderConfig, strategy: ParallelStrategy, dtype: DType, seed: int
) -> None:
    rules = drawn(model, seed)
    features = EngineFeatures().under(CallCompute(data_parallel=rules))
    layout, item = Layout(DeviceMesh(0, strategy.size), strategy), DTYPE_BYTES[dtype]
    kept, trained, gathered = [], [], []
    for device in layout.mesh.devices:
        here, index = units(model, layout, device, rules), layout.coordinates(device)[0]
        kept.append(sum(len(unit.kept(index)) for unit in here))
        # Gradients, two states of AdamW, and below float32 a master copy are in float32.
        states = (8 if item == 4 else 12) * sum(len(unit.updated(index)) for unit in here)
        trained.append(kept[-1] * (item + 4) + states)
        gathered.append(sum(unit.flat.size for unit in here if unit.mode == "sharded"))
    placed = PlacedModel(model, strategy, dtype, features)
    assert placed.static_bytes(trained=True) == max(trained)
    assert placed.static_bytes(trained=False, versions=2) == 2 * item * max(kept)
    assert max(stage.sharded for stage in placed.stages) == max(gathered)
    assert placed.is_divided == any(gathered)


def test_gathered_bytes_by_hand() -> None:
    """Of 64 hidden and 128 intermediate: gate and up follow one another, 8,192 elements each, whole or in slices."""
    definition = call("m", TINY, TRAIN_STEP, "x")

    def gathered(prefetch: bool, *rules: tuple[str, str], kind: str = "train") -> int:
        features = EngineFeatures(modes=rules, prefetch=prefetch)
        of = definition if kind == "train" else call("m", TINY, INFERENCE, "x")
        return work_of(of, ParallelStrategy(2), 1, dtype="bfloat16", features=features).gathered_bytes()

    gate_up = (("layers.*.gate", "sharded"), ("layers.*.up", "sharded"))
    # Parameters in bfloat16, gradients of one unit in float32, as they come and as a vector to reduce.
    assert gathered(True, *gate_up) == 2 * 8192 * 2 + 2 * 8192 * 4
    assert gathered(False, *gate_up) == 8192 * 2 + 2 * 8192 * 4
    assert gathered(True, *gate_up, kind="inference") == 2 * 8192 * 2
    assert gathered(False, ("layers.*.gate", "4 sharded")) == 2048 * (2 + 2 * 4)
    # One sharded operator a layer is followed by that of the next layer.
    assert gathered(True, ("layers.0.q", "sharded"), ("layers.1.q", "sharded")) == 2 * 4096 * 2 + 2 * 4096 * 4
    assert gathered(True, ("layers.0.q", "sharded"), ("embedding", "sharded")) == (4096 + 2048) * 2 + 2 * 4096 * 4
    assert gathered(True, ("*", "replicated")) == 0


EXCHANGE = Exchange(
    all_reduce=lambda size_bytes: 2 * size_bytes,
    all_gather=lambda size_bytes: 1 * size_bytes,
    reduce_scatter=lambda size_bytes: 3 * size_bytes,
    micro_batches=5,
    item=2,
    gradient=4,
    recomputes=frozenset(),
    forward_s={},
    backward_s={},
)


def test_seconds_by_hand() -> None:
    pieces = (Piece(0, "q", 1.0, 40), Piece(0, "k", 1.0, 0), Piece(0, "gate", 0.5, 60), Piece(0, "gate", 0.5, 60))
    stage = StageUnits(2, 100, 200, (40, 60, 60), pieces)
    replicated, zero1 = 2 * 100 * 4, 200 * (3 * 4 + 1 * 2)
    gather, reduce = (40 + 60 + 60) * 2, 3 * (40 + 60 + 60) * 4
    assert EXCHANGE.mini_batch_s(stage) == replicated + zero1 + 5 * (2 * gather + reduce)
    again = replace(EXCHANGE, recomputes=frozenset({0}))
    assert again.mini_batch_s(stage) == replicated + zero1 + 5 * (3 * gather + reduce)
    two_layers = replace(stage, pieces=(*pieces, Piece(1, "q", 1.0, 40)), gathered=(40, 60, 60, 40))
    assert again.mini_batch_s(two_layers) - again.mini_batch_s(stage) == 5 * (2 * 80 + 3 * 160), "not the other layer"
    assert EXCHANGE.sharded_s(60, "gate", 0.5, recomputed=False) == 5 * (2 * 120 + 3 * 240)
    assert again.sharded_s(60, "gate", 0.5, recomputed=True) == 5 * (3 * 120 + 3 * 240)
    ends = StageUnits(2, 0, 0, (10, 20), (Piece(-1, "embedding", 1.0, 10), Piece(-1, "head", 1.0, 20)))
    # Neither is computed again, and the backward pass of an embedding needs no values.
    assert again.mini_batch_s(ends) == EXCHANGE.mini_batch_s(ends) == 5 * ((20 + 40) + 40 + 3 * (40 + 80))
    assert again.sharded_s(10, "embedding", 1.0, recomputed=False) == 5 * (20 + 3 * 40)
    assert again.sharded_s(20, "head", 1.0, recomputed=False) == 5 * (2 * 40 + 3 * 80)
    # Forward q (80 s to gather) hides what it can of the first half of gate (120 s), and k as well.
    hidden = replace(EXCHANGE, forward_s={"q": 30.0, "k": 20.0, "gate": 100.0}, backward_s={"gate": 400.0, "k": 1.0})
    forward = 80 + (120 - 30 - 20) + (120 - 50)
    backward = 120 + 0 + 0  # half of gate takes 200 s, longer than its other half or q take to gather
    assert hidden.mini_batch_s(stage) == replicated + zero1 + 5 * (forward + backward + reduce)
    nothing = StageUnits(2, 0, 0, (), ())
    assert EXCHANGE.mini_batch_s(nothing) == 0


@settings(max_examples=60, deadline=None)
@given(model=st.sampled_from(MODELS), seed=st.integers(0, 10**6))
def test_compact_rules_give_the_modes_that_they_were_made_of(model: DecoderConfig, seed: int) -> None:
    wanted = {name: modes for name, modes in slice_modes(model, drawn(model, seed)).items() if name != "norms"}
    found = slice_modes(model, compact(wanted, model))
    assert {name: found[name] for name in wanted} == wanted
    assert found["norms"] == ("zero1",)


@pytest.mark.parametrize(
    ("modes", "rules"),
    [
        ({}, ()),
        ({name: ("sharded",) for name in operators(TINY) if name != "norms"}, (("*", "sharded"),)),
        (
            {f"layers.{n}.gate": ("sharded",) * 2 for n in range(3)} | {"layers.3.gate": ("sharded", "zero1")},
            (("layers.0-2.gate", "2 sharded"), ("layers.3.gate", "1 sharded + 1 zero1")),
        ),
        (
            {"embedding": ("sharded",)} | {f"layers.1.{kind}": ("sharded",) for kind in KINDS},
            (("embedding", "sharded"), ("layers.1.*", "sharded")),
        ),
        ({f"layers.{n}.o": ("replicated",) for n in range(4)}, (("layers.*.o", "replicated"),)),
    ],
)
def test_rules_are_plain(modes: dict[str, tuple[str, ...]], rules: ModeRules) -> None:
    assert compact(modes, TINY) == rules  # type: ignore[arg-type]


def test_a_tied_embedding_is_used_at_both_ends() -> None:
    tied = replace(TINY, tied_embeddings=True)
    [alone] = by_stage(tied, ParallelStrategy(2), (("embedding", "sharded"),))
    gathered = [(piece.kind, piece.gathered) for piece in alone.pieces if piece.gathered]
    assert gathered == [("embedding", 2048), ("head", 2048)]
    assert alone.gathered == (2048,)
    first, last = by_stage(tied, ParallelStrategy(2, 1, 2), (("embedding", "sharded"),))
    assert [piece.kind for piece in (*first.pieces, *last.pieces) if piece.gathered] == ["embedding", "head"]
    assert first.gathered == last.gathered == (2048,)


# --- elements of a stage

STAGE = StageUnits(
    dp=4,
    replicated=100,
    zero1=200,
    gathered=(40, 60, 60),
    pieces=(
        Piece(-1, "embedding", 1.0, 0),
        Piece(0, "q", 1.0, 40),
        Piece(0, "k", 1.0, 0),
        Piece(0, "up", 1.0, 60),
        Piece(1, "up", 1.0, 60),
    ),
)


def test_what_a_device_keeps_and_updates() -> None:
    assert STAGE.sharded == 160
    assert STAGE.kept == 100 + 200 + 160 // 4
    assert STAGE.updated == 100 + (200 + 160) // 4


@pytest.mark.parametrize(
    ("gathered", "expected"),
    [
        ([], (0, 0)),
        ([(0, 5)], (5, 5)),
        ([(0, 5), (0, 7)], (7, 12)),
        ([(0, 5), (0, 0), (0, 7), (0, 3)], (7, 12)),
        ([(0, 3), (0, 7), (0, 5)], (7, 12)),
        # Computed again, the first unit of layer 1 is followed by that of layer 0.
        ([(0, 9), (0, 1), (1, 8), (1, 1)], (9, 17)),
        # What lies in no layer is not computed again.
        ([(-1, 9), (0, 1), (0, 9)], (9, 10)),
        ([(0, 9), (0, 1), (-1, 9)], (9, 10)),
    ],
)
def test_units_in_use_at_a_time(gathered: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    pieces = tuple(Piece(layer, "q", 1.0, elements) for layer, elements in gathered)
    assert StageUnits(2, 0, 0, (), pieces).in_use == expected


def test_elements_of_slices() -> None:
    """Tensors begin at multiples of 64 elements; what is sharded ends at one for every rank."""
    assert slice_elements(((3, 5), (7,)), ("zero1",), 4, 1) == (128,)
    assert slice_elements(((3, 5), (7,)), ("sharded",), 4, 1) == (256,)
    assert slice_elements(((10, 39),), ("zero1",), 4, 1) == (448,)
    # 39 columns in 19 and 20; 10 rows in 5 and 5, in 3, 3 and 4.
    assert slice_elements(((10, 39),), ("zero1", "replicated"), 4, 1) == (192, 256)
    assert slice_elements(((10, 39),), ("zero1", "sharded"), 5, 0) == (256, 320)
    assert slice_elements(((10, 32),), ("zero1", "sharded", "zero1"), 3, 0) == (128, 192, 128)


def test_elements_of_vectors() -> None:
    assert [vector_elements(elements, 4) for elements in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert vector_elements(65, 1) == 128


def test_operators_of_a_stage() -> None:
    """In the order of the forward pass, with the shapes that tensor parallelism leaves a device."""
    model = replace(TINY, num_kv_heads=2, num_layers=3)
    strategy = ParallelStrategy(dp=2, tp=2, pp=2)
    first, last = (operators_on(model, strategy, stage) for stage in (0, 1))
    layer = {
        "q": ((32, 64),), "k": ((16, 64),), "v": ((16, 64),), "o": ((64, 32),),
        "gate": ((64, 64),), "up": ((64, 64),), "down": ((64, 64),),
    }  # fmt: skip
    assert {name: shapes for name, shapes in first.items() if name != "norms"} == {
        "embedding": ((16, 64),),
        **{f"layers.{n}.{kind}": shapes for n in (0, 1) for kind, shapes in layer.items()},
    }
    assert {name: shapes for name, shapes in last.items() if name != "norms"} == {
        **{f"layers.2.{kind}": shapes for kind, shapes in layer.items()},
        "head": ((16, 64),),
    }
    assert (first["norms"], last["norms"]) == (((64,),) * 4, ((64,),) * 3)
    chunked = operators_on(replace(model, num_layers=4), ParallelStrategy(pp=2, chunks=2), 1)
    assert [name for name in chunked if name.endswith(".q")] == ["layers.1.q", "layers.3.q"]


def test_pieces_of_a_stage() -> None:
    """Slices one by one, each a part of its operator; sharded ones are gathered."""
    model = replace(TINY, num_layers=2)
    rules: ModeRules = (("layers.1.q", "1 sharded + 1 zero1"), ("head", "sharded"), ("layers.0.k", "replicated"))
    first, last = by_stage(model, ParallelStrategy(2, 1, 2), rules)
    kinds = ("q", "k", "v", "o", "gate", "up", "down")
    whole = tuple(Piece(0, kind, 1.0, 0) for kind in kinds)
    found = [piece for piece in first.pieces if piece.kind != "norms"]
    assert found == [Piece(-1, "embedding", 1.0, 0), *whole]
    found = [piece for piece in last.pieces if piece.kind != "norms"]
    assert found == [
        Piece(1, "q", 0.5, 2048), Piece(1, "q", 0.5, 0), *(Piece(1, kind, 1.0, 0) for kind in kinds[1:]),
        Piece(-1, "head", 1.0, 2048),
    ]  # fmt: skip
    assert (first.gathered, last.gathered) == ((), (2048, 2048))
    assert (first.dp, first.replicated, first.zero1) == (2, 4096, 40960 - 4096 + 2048 + 128)
    assert (last.replicated, last.zero1) == (0, 40960 - 2048 + 3 * 64 + 64)  # of the padding


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_tied_embedding_comes_first_and_last(pp: int) -> None:
    tied = replace(TINY, tied_embeddings=True)
    stages = by_stage(tied, ParallelStrategy(2, 1, pp), (("embedding", "sharded"),))
    places = [[(piece.layer, piece.kind) for piece in stage.pieces if piece.gathered] for stage in stages]
    expected: list[list[tuple[int, str]]] = [[] for _ in range(pp)]
    expected[0].append((-1, "embedding"))
    expected[-1].append((-1, "head"))
    assert places == expected
    assert [stage.pieces[-1] == Piece(-1, "head", 1.0, 2048) for stage in stages] == [False] * (pp - 1) + [True]
    assert [any(piece.kind == "embedding" for piece in stage.pieces) for stage in stages] == [True] + [False] * (pp - 1)
