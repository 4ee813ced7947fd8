"""Parts of the choice of modes for a training: groups that are alike, their slices, rows of the solver, rules."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from realhf.architecture.compute import ModeRules
from realhf.architecture.model import DecoderConfig, Experts
from realhf.dataflow.graph import TRAIN_STEP
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.operators import slice_modes
from realhf.planning.model import mode_choice as choosing
from realhf.planning.model.features import ENGINE
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.mode_choice import (
    Chooser,
    _Alike,
    _alike,
    _cut,
    _in_rows,
    _Slice,
    _solved,
    compact,
    memory_limits,
    sharded_text,
)
from realhf.planning.model.osdp.exchange import Exchange
from realhf.planning.model.osdp.units import by_stage
from tests.unit.planning.graphs import TINY, call, work_of

# In float32 q and o have 1 MiB, k and v 128 KiB, gate, up and down 4 MiB, embedding and head 2 MiB.
BIG = DecoderConfig(hidden_size=512, intermediate_size=2048, num_layers=2, num_heads=8, num_kv_heads=1, vocab_size=1024)
EXCHANGE = Exchange(
    all_reduce=lambda size_bytes: 3.0 + 2e-6 * size_bytes,
    all_gather=lambda size_bytes: 1.0 + 1e-6 * size_bytes,
    reduce_scatter=lambda size_bytes: 2.0 + 3e-6 * size_bytes,
    micro_batches=2,
    item=4,
    gradient=4,
    recomputes=frozenset(),
    forward_s={},
    backward_s={},
)


def chooser(
    model: DecoderConfig = BIG, strategy: tuple[int, ...] = (4,), exchanges: Any = None, **features: Any
) -> Chooser:
    placed = ParallelStrategy(*strategy)
    work = work_of(call("m", model, TRAIN_STEP, "x"), placed, 2, features=replace(ENGINE, **features))
    return Chooser(work, exchanges or (EXCHANGE,) * placed.pp)


@pytest.mark.parametrize(
    ("left", "shares", "expected"),
    [
        (150.9, False, [150]),
        (1e6, False, [10**6]),
        (1e6, True, [1180, 1160, 1140]),
        (1170.9, True, [1170, 1160, 1140]),
        (1150.5, True, [1150, 1140]),
        (10.0, True, [10]),
    ],
)
def test_room_for_states(left: float, shares: bool, expected: list[int]) -> None:
    """A quarter, a half and three quarters of the 80 bytes that sharding can save, where others need memory, too."""
    assert memory_limits(left, 1200, 1120, shares_devices=shares) == expected


LAYER_KINDS = {"q": (64, 64), "k": (64, 64), "v": (64, 64), "o": (64, 64), "gate": (128, 64), "up": (128, 64),
               "down": (64, 128)}  # fmt: skip


def test_operators_that_are_alike() -> None:
    """Of all layers that are recomputed, and of those that are not."""
    found = _alike(TINY, ParallelStrategy(dp=2), 0, frozenset({0, 2}))
    expected = [_Alike("embedding", ("embedding",), ((32, 64),), True, False)]
    for layers, again in (((0, 2), True), ((1, 3), False)):
        expected += [
            _Alike(kind, tuple(f"layers.{n}.{kind}" for n in layers), (shape,), True, again)
            for kind, shape in LAYER_KINDS.items()
        ]
    expected.append(_Alike("head", ("head",), ((32, 64),), True, False))
    assert set(found) == set(expected)
    assert len(found) == len(expected)
    assert found[0] == expected[0]
    last = _alike(replace(TINY, tied_embeddings=True), ParallelStrategy(dp=2, pp=2), 1, frozenset())
    assert next(each for each in last if each.kind == "embedding").can_be_cut is False
    assert all(name.startswith(("layers.2", "layers.3", "embedding")) for each in last for name in each.names)
    experts = _alike(replace(TINY, experts=Experts(count=4, per_token=2)), ParallelStrategy(dp=2), 0, frozenset())
    assert next(each for each in experts if each.kind == "experts").can_be_cut is False


def alike(kind: str = "gate", number: int = 5, shape: tuple[int, int] = (2048, 512), can_be_cut: bool = True) -> _Alike:
    return _Alike(kind, tuple(f"layers.{n}.{kind}" for n in range(number)), (shape,), can_be_cut, False)


def test_rows_have_64_slices_at_most() -> None:
    """Behind one operator alone."""
    assert list(_in_rows(alike(number=1), 8)) == [1]
    assert list(_in_rows(alike(number=5), 1)) == [1, 4]
    assert list(_in_rows(alike(number=66), 1)) == [1, 64, 1]
    assert list(_in_rows(alike(number=6), 32)) == [1, 2, 2, 1]
    assert list(_in_rows(alike(number=9), 8)) == [1, 8]
    assert list(_in_rows(alike(number=10), 8)) == [1, 8, 1]


def test_cuts_of_the_solver() -> None:
    part = _Slice((1.0, 10), (2.0, 5), 7)
    both = ((1.0, 10, False), (2.0, 5, True))
    assert _cut(3, part, None) == (3, 7, both)
    assert _cut(3, part, ("sharded",)) == (3, 7, both[1:])
    assert _cut(3, part, ("zero1",)) == (3, 7, both[:1])


CUT = (2, 7, ((1.0, 10, False), (2.0, 5, True)))
FIXED = ((1, 0, ((1.0, 10, False),)),)


def test_choices_of_the_solver() -> None:
    """Two slices of 10 or 5 bytes and 7 while one is in use."""
    assert _solved(((CUT,),), 20) == (2.0, ((0, 0),))
    assert _solved(((CUT,),), 19) == (4.0, ((0, 2),))  # one in each mode needs 22
    assert _solved(((CUT,), FIXED), 30) == (3.0, ((0, 0), (0, 0)))
    assert _solved(((CUT,), FIXED), 29) == (5.0, ((0, 2), (0, 0)))
    assert _solved(((CUT,),), 16) is None
    assert _solved(((CUT,),), 0) is None
    assert _solved(((CUT,),), -1) is None
    assert _solved((), 0) == (0.0, ())
    # In four slices of 5 bytes or 3, gathers take 3: with 17 + 3 bytes, one is sharded less than half.
    quarters = (4, 3, ((0.5, 5, False), (1.25, 2, True)))
    assert _solved(((CUT, quarters),), 20) == (2.0, ((0, 0),))
    assert _solved(((CUT, quarters),), 19) == (2 * 0.5 + 2 * 1.25, ((1, 2),))  # 2 x 5 + 2 x 2 + 3
    assert _solved(((CUT, quarters),), 16) == (0.5 + 3 * 1.25, ((1, 3),))  # 5 + 3 x 2 + 3


def test_what_the_solver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of memory below 0."""
    asked: list[Any] = []
    monkeypatch.setattr(choosing._search, "solve_osdp", lambda *words: asked.append(words) or {"feasible": False})
    row = ((3, 7, ((1.0, 10, False),)),)
    assert _solved((row,), 12345) is None
    assert _solved((row,), -1) is None
    assert asked == [((row,), 12345)]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (alike(), [1, 2, 4, 8]),
        (alike(shape=(512, 512)), [1, 2, 4, 8]),  # a MiB
        (alike(shape=(511, 512)), [1]),
        (alike(can_be_cut=False), [1]),
        (alike(shape=(2**20, 4)), [1, 2, 4]),  # of four columns
        (alike("head", shape=(4, 2**20)), [1, 2, 4]),
    ],
)
def test_large_operators_are_cut(group: _Alike, expected: list[int]) -> None:
    assert chooser()._numbers(group) == expected


def sharded_s(elements: int, *, again: bool = False, looked_up: bool = False) -> float:
    gathers = (1 if looked_up else 2) + again
    return 2 * (gathers * (1.0 + 4e-6 * elements) + 2.0 + 12e-6 * elements)


@pytest.mark.parametrize(
    ("features", "gathered", "states"),
    [
        ({}, 2 * 4 + 2 * 4, 8),
        ({"prefetch": False}, 4 + 2 * 4, 8),
        ({"prefetch": False, "in_host_memory": True}, (4 + 2 * 4) * 9 / 8, 8),
        ({"offloads_states": True}, 2 * 4 + 2 * 4, 0),
    ],
)
def test_what_a_slice_takes(features: dict[str, bool], gathered: float, states: int) -> None:
    """A quarter of gate, 128 of its 512 columns, on four ranks."""
    elements = 2048 * 128
    found = chooser(**features)._slice(alike(), 4, 0)
    # A part of one vector: all of gate is reduce-scattered and gathered, of which this is a quarter.
    exchanged_s = (2.0 + 3e-6 * 4 * elements * 4) + (1.0 + 1e-6 * 4 * elements * 4)
    assert found.zero1 == (pytest.approx(exchanged_s / 4), elements * 8 + elements * states // 4)
    assert found.sharded == (pytest.approx(sharded_s(elements)), elements // 4 * (8 + states))
    assert found.gather_bytes == math.ceil(elements * gathered)


def test_what_a_slice_of_a_recomputed_layer_takes() -> None:
    again = replace(alike(), is_recomputed=True)
    assert chooser()._slice(again, 4, 0).sharded[0] == pytest.approx(sharded_s(2048 * 128, again=True))


def test_slices_are_as_wide_as_the_widest() -> None:
    """100 columns in three: 33, 33 and 34, padded to multiples of 64, and of 256 where four ranks divide them."""
    found = chooser()._slice(alike(shape=(3, 100)), 3, 0)
    assert found.zero1[1] == 128 * 8 + 128 * 2
    assert found.sharded[1] == 256 // 4 * 16
    tall = chooser()._slice(alike(shape=(256, 100)), 3, 0)
    assert (tall.zero1[1], tall.sharded[1]) == (34 * 256 * 10, 34 * 256 // 4 * 16)
    odd = chooser(strategy=(3,))._slice(alike(shape=(1, 64)), 1, 0)
    assert odd.zero1[1] == 64 * 8 + 171  # 64 x 8 / 3, rounded up


def test_what_hides_a_gather_is_of_its_stage() -> None:
    """By the part of the operator that a slice is."""
    slow = replace(EXCHANGE, all_gather=lambda size_bytes: 10.0 + size_bytes)
    found = chooser(strategy=(4, 1, 2), exchanges=(EXCHANGE, slow))
    ends = _Alike("head", ("head",), ((1024, 512),), True, False)
    assert found._slice(ends, 1, 1).sharded[0] > found._slice(ends, 1, 0).sharded[0]
    assert found._slice(alike(), 1, 1).sharded[0] > found._slice(alike(), 1, 0).sharded[0]
    hides = replace(EXCHANGE, forward_s={"gate": 0.5}, backward_s={"gate": 0.25})
    hidden = chooser(exchanges=(hides,))._slice(alike(), 2, 0).sharded[0]
    plain = chooser()._slice(alike(), 2, 0).sharded[0]
    assert plain - hidden == pytest.approx(2 * (0.5 + 0.25) / 2)


@pytest.mark.parametrize("dtype_item", [4])
@pytest.mark.parametrize(("stage", "norms"), [(0, 2 * 2 * 512), (1, 2 * 512 + 512)])
def test_what_no_choice_changes(stage: int, norms: int, dtype_item: int) -> None:
    """Norms in a vector of whole shards, one more shard of padding; and a device's part of a checkpoint's copy."""
    model = replace(BIG, num_layers=3)
    plain = chooser(model, (4, 1, 2))
    padded = -(-norms // 256) * 256 + 256
    assert plain._fixed_bytes(stage) == padded * (8 + 8 // 4)
    written = chooser(model, (4, 1, 2), copies_checkpoints=True)
    part = math.ceil(PlacedModel(model, ParallelStrategy(4, 1, 2), "float32").elements() / 4)
    assert written._fixed_bytes(stage) - plain._fixed_bytes(stage) == part * (dtype_item + 8)
    away = chooser(model, (4, 1, 2), offloads_states=True, copies_checkpoints=True)
    assert away._fixed_bytes(stage) == padded * 8 + part * 12
    odd = chooser(model, (3, 1, 2))
    assert odd._fixed_bytes(stage) == math.ceil((-(-norms // 192) * 192 + 192) * (8 + 8 / 3))


def test_every_row_has_all_cuts() -> None:
    chosen = chooser()
    one, two = (chosen._rows(alike(number=number), 0, None) for number in (1, 2))
    [row] = one
    assert row == tuple(_cut(number, chosen._slice(alike(), number, 0), None) for number in (1, 2, 4, 8))
    assert list(two) == [row, row]
    third = list(chosen._rows(alike(number=3), 0, None))[1]
    assert [slices for slices, _, _ in third] == [2, 4, 8, 16]
    embedding = _Alike("embedding", ("embedding",), ((1024, 512),), False, False)
    [[(_, _, modes)]] = chosen._rows(embedding, 0, ("sharded",))
    assert [gathers for _, _, gathers in modes] == [True]
    assert all(len(modes) == 2 for _, _, modes in next(chosen._rows(alike(), 0, ("sharded",))))


# --- whole choices against all that there are


ONE = replace(BIG, num_layers=1, intermediate_size=256, num_kv_heads=8, vocab_size=128, mlp="plain")


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.9])
def test_the_choice_takes_the_least_time_in_its_room(share: float) -> None:
    """q, k, v and o of a MiB each may be cut; embedding, head, up and down are smaller."""
    found = chooser(ONE, (4,), prefetch=False)
    smallest = found._on_stage(0, None, None)
    assert smallest is not None
    every = few(ONE, 4)
    least, most = min(need for _, need in every), min(every)[1]
    room = int(least + share * (most - least))
    modes = found._on_stage(0, room, None)
    assert modes is not None
    fitting = [seconds for seconds, need in every if need <= room]
    seconds, need = taken(found, modes)
    assert need <= room
    assert seconds == pytest.approx(min(fitting))
    assert taken(found, smallest)[1] == least
    assert found._on_stage(0, least, None) is not None
    assert found._on_stage(0, least - 1, None) is None


def few(model: DecoderConfig, dp: int) -> list[tuple[float, int]]:
    """Seconds and bytes of every choice. Operators of the same size take the same: how many of them have each number of
    slices, and how many of these are sharded, is all that matters."""
    found = chooser(model, (dp,), prefetch=False)
    alike: Counter[tuple[_Slice, ...]] = Counter()
    for group in found._groups(0):
        alike[tuple(found._slice(group, number, 0) for number in found._numbers(group))] += len(group.names)
    choices = [(0.0, 0, 0)]
    for parts, count in alike.items():
        of_one = [
            (n * p.sharded[0] + (number - n) * p.zero1[0], n * p.sharded[1] + (number - n) * p.zero1[1],
             p.gather_bytes if n else 0)
            for number, p in zip((1, 2, 4, 8), parts, strict=False) for n in range(number + 1)
        ]  # fmt: skip
        sums = {
            (sum(seconds), sum(sizes), max(gathers))
            for seconds, sizes, gathers in (
                zip(*each, strict=True) for each in itertools.combinations_with_replacement(of_one, count)
            )
        }
        choices = [(a + x, b + y, max(c, z)) for a, b, c in choices for x, y, z in sums]
    return [(seconds, size + gather + found._fixed_bytes(0)) for seconds, size, gather in choices]


def taken(found: Chooser, modes: dict[str, Any]) -> tuple[float, int]:
    """Seconds and bytes of these modes of the operators of the only stage."""
    seconds = size = gather = 0.0
    for group in found._groups(0):
        for name in group.names:
            part = found._slice(group, len(modes[name]), 0)
            for mode in modes[name]:
                seconds += (part.sharded if mode == "sharded" else part.zero1)[0]
                size += (part.sharded if mode == "sharded" else part.zero1)[1]
                gather = max(gather, part.gather_bytes if mode == "sharded" else 0)
    return seconds, int(size + gather) + found._fixed_bytes(0)


def test_the_first_layers_are_sharded() -> None:
    """Rows of one operator and of two: cut into four slices, of which two are sharded, and whole, one sharded."""
    chosen, down = chooser(), alike("down", 1, (512, 2048))
    found = chosen._modes([alike(number=3), down], [(2, 2), (0, 1), (1, 2)])
    assert found == {
        "layers.0.gate": ("sharded",),
        "layers.1.gate": ("sharded", "sharded", "zero1", "zero1"),
        "layers.2.gate": ("zero1",),
        "layers.0.down": ("sharded", "sharded"),
    }
    assert set(chosen._modes([alike(number=3), down], [(0, 0), (3, 0), (1, 0)]).values()) == {("zero1",)}


def test_slices_of_several_rows_add_up() -> None:
    """Ten operators in rows of one, eight and one: 3 + 60 + 5 slices of 8 are of eight operators, and a half."""
    found = chooser()._modes([alike(number=10)], [(3, 3), (3, 60), (3, 5)])
    assert list(found.values()) == [("sharded",) * 8] * 8 + [("sharded",) * 4 + ("zero1",) * 4, ("zero1",)]


@pytest.mark.parametrize(
    ("num_layers", "pp", "order"), [(4, 4, [3, 0, 1, 2]), (5, 4, [0, 3, 1, 2]), (4, 1, [0]), (4, 2, [1, 0])]
)
def test_the_fuller_end_chooses_for_a_tied_embedding(num_layers: int, pp: int, order: list[int]) -> None:
    """The last stage has a norm more, the first one perhaps a layer."""
    asked: list[tuple[int, int | None, Any]] = []

    def on_stage(stage: int, room: int | None, of_embedding: Any) -> Any:
        asked.append((stage, room, of_embedding))
        return None if stage in refused else {"embedding": ("sharded",), f"layers.{stage}.q": ("sharded",)}

    refused: set[int] = set()
    chosen = chooser(replace(TINY, num_layers=num_layers), (2, 1, pp))
    chosen._on_stage = on_stage  # type: ignore[method-assign]
    rules = chosen.rules(77)
    assert rules is not None
    assert dict(rules)["embedding"] == "sharded"
    given = [("sharded",) if place == 1 and pp > 1 else None for place in range(pp)]
    assert asked == [(stage, 77, fixed) for stage, fixed in zip(order, given, strict=True)]
    asked.clear()
    assert chosen.rules(None) is not None
    assert {room for _, room, _ in asked} == {None}
    for each in order:
        refused = {each}
        assert chosen.rules(77) is None


KINDS = tuple(LAYER_KINDS)
ALL_KINDS = {f"layers.{n}.{kind}": ("sharded",) for n in range(4) for kind in KINDS}
ENDS = {"embedding": ("sharded",), "head": ("sharded",)}


@pytest.mark.parametrize(
    ("modes", "rules"),
    [
        (ALL_KINDS | ENDS, (("*", "sharded"),)),
        (ALL_KINDS | ENDS | {"norms": ("zero1",)}, (("*", "sharded"),)),
        (ALL_KINDS, (("layers.*.*", "sharded"),)),
        (ENDS, (("embedding", "sharded"), ("head", "sharded"))),
        (
            ALL_KINDS | ENDS | {"head": ("replicated",)},
            (("embedding", "sharded"), ("head", "replicated"), ("layers.*.*", "sharded")),
        ),
        (ALL_KINDS | {"layers.1.k": ("zero1",)}, None),
        ({"layers.0.q": ("sharded",), "layers.1.q": ("sharded",)}, (("layers.0-1.q", "sharded"),)),
        (
            {"layers.0.q": ("sharded",), "layers.2.q": ("sharded",)},
            (("layers.0.q", "sharded"), ("layers.2.q", "sharded")),
        ),
        (
            {"layers.3.q": ("sharded",), "layers.3.o": ("sharded",)},
            (("layers.3.q", "sharded"), ("layers.3.o", "sharded")),
        ),
        ({}, ()),
        ({"layers.0.q": ("zero1",)}, ()),
    ],
)
def test_rules_are_as_plain_as_can_be(modes: Any, rules: ModeRules | None) -> None:
    found = compact(modes, TINY)
    if rules is not None:
        assert found == rules
    named = slice_modes(TINY, found)
    assert {name: named[name] for name in named} == dict.fromkeys(named, ("zero1",)) | modes


def test_rules_of_one_layer() -> None:
    one = replace(TINY, num_layers=1)
    modes: Any = {f"layers.0.{kind}": ("sharded",) for kind in KINDS}
    assert compact(modes, one) == (("layers.0.*", "sharded"),)
    assert compact({"layers.0.q": ("sharded",)}, one) == (("layers.0.q", "sharded"),)


def test_modes_in_words() -> None:
    """Of 168,512 elements and their padding 4 x 8,192 are sharded; of 2,261,568 the 2**20 of the embedding."""
    rules: ModeRules = (("layers.*.gate", "sharded"), ("head", "replicated"))
    stages = by_stage(TINY, ParallelStrategy(4), rules)
    whole = sum(stage.replicated + stage.zero1 + stage.sharded for stage in stages)
    assert round(100 * 4 * 8192 / whole) == 19
    assert sharded_text(rules, TINY, ParallelStrategy(4)) == (
        "layers.*.gate sharded, head replicated; the other operators zero1; 19% of the parameters sharded over dp=4"
    )
    large: ModeRules = (("*", "replicated"), ("embedding", "sharded"))
    wide = replace(TINY, vocab_size=2**14)
    assert "; 46% of the parameters" in sharded_text(large, wide, ParallelStrategy(2, 1, 2))
