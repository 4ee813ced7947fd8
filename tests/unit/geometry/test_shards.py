"""The division of a device's flat vector: shards of equal size, cut into boxes that cover every parameter once."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.architecture.compute import MODES, DataParallel, ModeRules, modes_text
from realhf.architecture.model import DecoderConfig, Experts
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import UserError
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.operators import can_be_cut, kind_of, operators
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.shards import (
    ALIGNMENT,
    FlatLayout,
    Placement,
    boxes_in,
    counted_slices,
    flat_layout,
    held_boxes,
    matrix_slices,
    shard_boxes,
    units,
)
from tests.unit.realloc.layouts import layouts, models

# One matrix of 6 x 12, kept whole: model.embed_tokens.weight.
SMALL = DecoderConfig(hidden_size=12, intermediate_size=4, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=6)


def test_flat_layout_by_hand() -> None:
    flat = FlatLayout({"a": (3, 5), "b": (130,)}, shards=3)
    assert flat.starts == {"a": 0, "b": 64}
    assert [flat.end(name) for name in "ab"] == [64, 64 + 192]
    assert flat.size == 384  # the next multiple of 3 x 64
    assert [flat.shard(i) for i in range(3)] == [range(0, 128), range(128, 256), range(256, 384)]
    assert FlatLayout({}).size == 0
    assert FlatLayout({"a": (3,)}).size == 64
    assert FlatLayout({"a": (8, 8), "b": (1,)}).shard(0) == range(128)


def test_a_flat_layout_has_first_what_tensor_parallelism_divides() -> None:
    """Then what is replicated over it, and last the second copy of a tied embedding."""
    model = replace(SMALL, tied_embeddings=True)
    last = Layout(DeviceMesh(0, 8), ParallelStrategy(dp=2, tp=2, pp=2))
    found = flat_layout(replace(model, num_layers=2), last, 7)
    assert [name.removeprefix("model.").removesuffix(".weight") for name in found.shapes] == [
        *(f"layers.1.self_attn.{part}_proj" for part in "qkvo"),
        *(f"layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")),
        "layers.1.input_layernorm",
        "layers.1.post_attention_layernorm",
        "norm",
        "embed_tokens",
    ]
    assert found.shapes["model.embed_tokens.weight"] == (3, 12)
    assert found.shards == 2
    alone = flat_layout(model, Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)
    assert next(iter(alone.shapes)) == "model.embed_tokens.weight"


def test_slices_of_a_matrix() -> None:
    """As even as can be, along columns unless rows are wanted, in coordinates of the whole parameter."""
    box = Box("w", (2, 10), (3, 7))
    first, second = matrix_slices("m", box, ("sharded", "zero1"))
    assert first == ("m:0", "sharded", {"m.slices.0.weight": Box("w", (2, 10), (3, 3))}, "m.slices.0")
    assert second == ("m:1", "zero1", {"m.slices.1.weight": Box("w", (2, 13), (3, 4))}, "m.slices.1")
    rows = matrix_slices("m", box, ("zero1", "zero1"), 0)
    assert [list(part.boxes.values()) for part in rows] == [[Box("w", (2, 10), (1, 7))], [Box("w", (3, 10), (2, 7))]]


def test_what_data_parallelism_divides_of_a_place() -> None:
    where = Layout(DeviceMesh(0, 12), ParallelStrategy(dp=3, tp=2, pp=2))
    assert Placement(where, "fsdp").divided == 3
    assert Placement(where).divided == Placement(where, (("layers.*.q", "sharded"),)).divided == 1


def test_with_zero1_a_device_keeps_all_of_its_boxes_in_their_order() -> None:
    where = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
    assert held_boxes(SMALL, where, 1) == held_boxes(SMALL, where, 1, "zero1") == device_boxes(SMALL, where, 1)
    names = [spec.name for spec in decoder_parameters(SMALL)]
    assert [box.name for box in device_boxes(SMALL, where, 1)] == names


def test_a_device_outside_of_the_mesh_holds_nothing() -> None:
    where = Layout(DeviceMesh(2, 2), ParallelStrategy(dp=2))
    for device in (1, 4):
        assert device_boxes(SMALL, where, device) == held_boxes(SMALL, where, device, "fsdp") == []


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 72, [((0, 0), (6, 12))]),
        (12, 36, [((1, 0), (2, 12))]),
        (5, 9, [((0, 5), (1, 4))]),
        (5, 40, [((0, 5), (1, 7)), ((1, 0), (2, 12)), ((3, 0), (1, 4))]),
        (5, 12, [((0, 5), (1, 7))]),
        (5, 14, [((0, 5), (1, 7)), ((1, 0), (1, 2))]),
        (12, 14, [((1, 0), (1, 2))]),
        (7, 7, []),
    ],
)
def test_a_cut_matrix_by_hand(first: int, last: int, expected: list) -> None:
    one = Layout(DeviceMesh(0, 1), ParallelStrategy())
    flat, whole = flat_layout(SMALL, one, 0), {box.name: box for box in device_boxes(SMALL, one, 0)}
    start = flat.starts["model.embed_tokens.weight"]
    found = boxes_in(flat, whole, range(start + first, start + last))
    assert [(box.offset, box.shape) for box, _ in found] == expected
    sizes = [box.size for box, _ in found]
    assert [at for _, at in found] == [start + first + sum(sizes[:i]) for i in range(len(found))]


@pytest.mark.parametrize("kind", ["zero1", "fsdp", "modes"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shards_hold_the_elements_of_their_boxes(kind: str, data: st.DataObject) -> None:
    """Every parameter numbered element by element: what lies in the updated parts is what their boxes say, a
    data-parallel group has all elements of its device boxes, and what is counted is every element of the model once."""
    model = data.draw(models())
    where = data.draw(layouts(model))
    data_parallel: DataParallel = data.draw(mode_rules(model)) if kind == "modes" else kind
    numbers = {spec.name: np.arange(1, spec.size + 1).reshape(spec.shape) for spec in decoder_parameters(model)}
    counts = {name: np.zeros_like(values) for name, values in numbers.items()}
    in_group: dict[tuple[int, int, str], np.ndarray] = {}

    def cut(box: Box) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))

    for device in where.mesh.devices:
        dp, tp, stage = where.coordinates(device)
        held = {box.name: box for box in device_boxes(model, where, device)}
        vectors, updated = [], []
        for unit in units(model, where, device, data_parallel):
            vector = np.zeros(unit.flat.size, dtype=np.int64)
            for tensor, start in unit.flat.starts.items():
                box = unit.boxes[tensor]
                assert held[box.name].contains(box)
                vector[start : start + box.size] = numbers[box.name][cut(box)].ravel()
            assert len(unit.flat.shard(dp)) % ALIGNMENT == 0
            vectors.append(vector[unit.kept(dp).start : unit.kept(dp).stop])
            updated.append(vector[unit.updated(dp).start : unit.updated(dp).stop])
        ours = np.concatenate(updated)
        found = shard_boxes(model, where, device, data_parallel)
        for box, at in found:
            np.testing.assert_array_equal(ours[at : at + box.size], numbers[box.name][cut(box)].ravel())
        assert sum(box.size for box, _ in found) == np.count_nonzero(ours)
        assert sum(box.size for box in held_boxes(model, where, device, data_parallel)) == np.count_nonzero(
            np.concatenate(vectors)
        )
        for name, whole in held.items():
            seen = in_group.setdefault((tp, stage, name), np.zeros(numbers[name].shape, dtype=bool))
            for box in held_boxes(model, where, device, data_parallel):
                if box.name == name:
                    seen[cut(box)] = True
            if dp == where.strategy.dp - 1:
                assert seen[cut(whole)].all()
        counted = shard_boxes(model, where, device, data_parallel, only_counted=True)
        for box, at in counted:
            counts[box.name][cut(box)] += 1
            np.testing.assert_array_equal(ours[at : at + box.size], numbers[box.name][cut(box)].ravel())
        in_slices = [ours[part] for part in counted_slices(model, where, device, data_parallel)]
        assert sum(box.size for box, _ in counted) == np.count_nonzero(np.concatenate(in_slices))
    assert all((count == 1).all() for count in counts.values())


@st.composite
def mode_rules(draw: st.DrawFn, model: DecoderConfig) -> ModeRules:
    """A mode for some of the operators, projections in up to three slices."""
    rules = []
    for name in draw(st.lists(st.sampled_from(list(operators(model))), unique=True)):
        modes = st.sampled_from(["replicated", "zero1"] if name == "norms" else MODES)
        slices = draw(st.lists(modes, min_size=1, max_size=3 if can_be_cut(name, model) else 1))
        extents = {"o": model.query_size, "down": model.intermediate_size, "head": model.vocab_size}
        columns = extents.get(kind_of(name), model.hidden_size)
        if columns // 6 >= len(slices):  # tp is at most 6
            rules.append((name, modes_text(slices)))
    return tuple(rules)


def test_units_are_used_together_and_cut_alike_over_tensor_parallelism() -> None:
    model = replace(SMALL, num_layers=2, tied_embeddings=True)
    where = Layout(DeviceMesh(0, 8), ParallelStrategy(dp=2, tp=2, pp=2))
    found = {
        device: {unit.name: unit.flat.shapes for unit in units(model, where, device, "fsdp")}
        for device in where.mesh.devices
    }
    assert list(found[0]) == ["model.embed_tokens", "model.layers.0"]
    assert list(found[7]) == ["model.embed_tokens", "model.layers.1", "model.norm"]
    assert found[0]["model.embed_tokens"] == found[7]["model.embed_tokens"]  # of both stages
    assert list(found[0]["model.layers.0"])[-2:] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ]
    one = Layout(DeviceMesh(0, 2), ParallelStrategy(tp=2))
    assert [unit.name for unit in units(model, one, 0, "fsdp")] == [""]
    assert held_boxes(model, one, 0, "fsdp") == device_boxes(model, one, 0)


def test_units_of_modes_by_hand() -> None:
    """What is replicated, what is divided without being gathered, then each sharded slice, in the order of use."""
    model = replace(SMALL, num_layers=2)
    rules = (("layers.*.*", "sharded"), ("layers.1.gate", "3 sharded + 1 zero1"), ("layers.1.up", "replicated"))
    where = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
    found = units(model, where, 1, (*rules, ("head", "2 sharded"), ("embedding", "2 sharded")))
    first, second = ([f"layers.{n}.{kind}" for kind in ["q", "k", "v", "o", "gate", "up", "down"]] for n in (0, 1))
    gates = [f"layers.1.gate:{n}" for n in range(3)]
    assert [(unit.mode, unit.name) for unit in found] == [
        ("replicated", ""),
        ("zero1", ""),
        *(
            ("sharded", name)
            for name in ["embedding:0", "embedding:1", *first, *second[:4], *gates, second[6], "head:0", "head:1"]
        ),
    ]
    by_name = {unit.name: unit for unit in found}
    gate = by_name["layers.1.gate:1"]
    assert gate.module == "model.layers.1.mlp.gate_proj.slices.1"
    assert gate.boxes == {f"{gate.module}.weight": Box("model.layers.1.mlp.gate_proj.weight", (0, 3), (4, 3))}
    assert by_name["head:1"].boxes == {"lm_head.slices.1.weight": Box("lm_head.weight", (3, 0), (3, 12))}
    assert list(found[0].flat.shapes) == ["model.layers.1.mlp.up_proj.weight"]
    assert "model.layers.1.mlp.gate_proj.slices.3.weight" in found[1].flat.shapes
    assert (found[0].kept(1), found[0].updated(1)) == (range(128), range(128))  # 48 elements, padded
    assert gate.kept(1) == gate.updated(1) == range(64, 128)


@pytest.mark.parametrize(
    ("model", "operator", "module", "tensors"),
    [
        (SMALL, "layers.0.q", "model.layers.0.self_attn.q_proj.slices.0", ["*.weight"]),
        (SMALL, "layers.0.down", "model.layers.0.mlp.down_proj.slices.0", ["*.weight"]),
        (SMALL, "head", "lm_head.slices.0", ["*.weight"]),
        (SMALL, "embedding", "model.embed_tokens", ["*.weight"]),
        (replace(SMALL, tied_embeddings=True), "embedding", "model.embed_tokens", ["*.weight"]),
        (replace(SMALL, head="scalar"), "head", "model.norm", ["score.weight"]),
        (
            replace(SMALL, experts=Experts(count=1, per_token=1)),
            "layers.0.experts",
            "model.layers.0.mlp",
            ["*.gate.weight", *(f"*.experts.0.{part}_proj.weight" for part in ("gate", "up", "down"))],
        ),
    ],
)
def test_the_module_that_uses_a_sharded_operator_first(
    model: DecoderConfig, operator: str, module: str, tensors: list[str]
) -> None:
    """A projection and a language model's head are one slice of their own; a critic's head is used with the norm."""
    where = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
    [found] = [unit for unit in units(model, where, 0, ((operator, "sharded"),)) if unit.mode == "sharded"]
    assert (found.name, found.module) == (operator, module)
    assert list(found.boxes) == [tensor.replace("*", module) for tensor in tensors]
    assert {box.name for box in found.boxes.values()} == {spec.name for spec in operators(model)[operator]}
    rest = units(model, where, 0, ((operator, "zero1"),))
    assert [(unit.name, unit.mode, unit.module) for unit in rest] == [("", "zero1", "")]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("layers.7.q", "sharded"), "'layers.7.q' names no operator of this model; its operators are embedding, norms"),
        (("norms", "sharded"), "'norms' cannot be sharded"),
        (("norms", "2 zero1"), "'norms' cannot have 2 slices"),
        (("layers.0.q", "13 sharded"), "'layers.0.q' has 12 columns on a device, fewer than 13 slices"),
        (("layers.0.q", "2 shared"), "'2 shared' is no mode of an operator; write one of replicated, zero1, sharded"),
        (("layers.0.q", "0 sharded"), "'0 sharded' is no mode of an operator"),
    ],
)
def test_modes_that_cannot_be(rule: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        units(SMALL, Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2)), 0, (rule,))


def test_as_many_slices_as_columns_or_rows() -> None:
    where = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
    found = units(SMALL, where, 0, (("layers.0.q", "12 sharded"), ("head", "6 sharded")))
    slices = {unit.name: box for unit in found for box in unit.boxes.values() if ":" in unit.name}
    assert len(slices) == 12 + 6
    assert slices["layers.0.q:11"] == Box("model.layers.0.self_attn.q_proj.weight", (0, 11), (12, 1))
    assert slices["head:5"] == Box("lm_head.weight", (5, 0), (1, 12))
    with pytest.raises(UserError, match="'head' has 6 rows on a device, fewer than 7 slices"):
        units(SMALL, where, 0, (("head", "7 sharded"),))


def test_transformers_divides_every_parameter_along_its_first_dimension_that_dp_divides() -> None:
    """As torch's `fully_shard` is asked to: 3 x 4 by columns, 4 x 3 by rows; each part starts at a multiple of 64."""
    sizes = {name: getattr(SMALL, name) for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads")}
    config = TransformersConfig(
        config="{}", parameters=(("a", (3, 4)), ("b", (4, 3)), ("c", (130,))), num_kv_heads=2, vocab_size=6, **sizes
    )
    where = Layout(DeviceMesh(4, 2), ParallelStrategy(dp=2))
    found = shard_boxes(config, where, 5, "fsdp")
    assert found == [(Box("a", (0, 2), (3, 2)), 0), (Box("b", (2, 0), (2, 3)), 64), (Box("c", (65,), (65,)), 128)]
    assert held_boxes(config, where, 5, "fsdp") == [box for box, _ in found]
    assert [box.offset for box in held_boxes(config, where, 4, "fsdp")] == [(0, 0), (0, 0), (0,)]
    assert counted_slices(config, where, 5, "fsdp") == [slice(0, 128 + 65)]
    assert [unit.name for unit in units(config, where, 5, "zero1")] == [""]
    message = "data_parallel='fsdp' with dp=7: dp divides no dimension of a, whose shape is [3, 4]; choose another dp"
    with pytest.raises(UserError, match=re.escape(message)):
        shard_boxes(config, Layout(DeviceMesh(0, 7), ParallelStrategy(dp=7)), 0, "fsdp")
