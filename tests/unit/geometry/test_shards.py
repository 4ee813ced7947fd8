"""The division of a device's flat vector: shards of equal size, cut into boxes that cover every parameter once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.shards import (
    ALIGNMENT,
    FlatLayout,
    boxes_in,
    counted_slices,
    flat_layout,
    held_boxes,
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


@pytest.mark.parametrize("data_parallel", ["zero1", "fsdp"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shards_hold_the_elements_of_their_boxes(data_parallel: DataParallel, data: st.DataObject) -> None:
    """Every parameter numbered element by element: what lies in the shards is what their boxes say, a data-parallel
    group has all elements of its device boxes, and what is counted is every element of the model once."""
    model = data.draw(models())
    where = data.draw(layouts(model))
    numbers = {spec.name: np.arange(1, spec.size + 1).reshape(spec.shape) for spec in decoder_parameters(model)}
    counts = {name: np.zeros_like(values) for name, values in numbers.items()}
    in_group: dict[tuple[int, int], int] = {}

    def cut(box: Box) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))

    for device in where.mesh.devices:
        dp, tp, stage = where.coordinates(device)
        held = device_boxes(model, where, device)
        parts = []
        for flat in units(model, where, device, data_parallel).values():
            vector = np.zeros(flat.size, dtype=np.int64)
            for box in held:
                if box.name in flat.starts:
                    start = flat.starts[box.name]
                    vector[start : start + box.size] = numbers[box.name][cut(box)].ravel()
            shard = flat.shard(dp)
            assert len(shard) % ALIGNMENT == 0
            parts.append(vector[shard.start : shard.stop])
        kept = np.concatenate(parts)
        found = shard_boxes(model, where, device, data_parallel)
        for box, at in found:
            np.testing.assert_array_equal(kept[at : at + box.size], numbers[box.name][cut(box)].ravel())
        assert sum(box.size for box, _ in found) == np.count_nonzero(kept)
        in_group[tp, stage] = in_group.get((tp, stage), 0) + np.count_nonzero(kept)
        if dp == where.strategy.dp - 1:
            assert in_group[tp, stage] == sum(box.size for box in held)
        counted = shard_boxes(model, where, device, data_parallel, only_counted=True)
        for box, _ in counted:
            counts[box.name][cut(box)] += 1
        in_slices = [kept[part] for part in counted_slices(model, where, device, data_parallel)]
        assert sum(box.size for box, _ in counted) == np.count_nonzero(np.concatenate(in_slices))
    assert all((count == 1).all() for count in counts.values())


def test_units_are_used_together_and_cut_alike_over_tensor_parallelism() -> None:
    model = replace(SMALL, num_layers=2, tied_embeddings=True)
    where = Layout(DeviceMesh(0, 8), ParallelStrategy(dp=2, tp=2, pp=2))
    found = {device: units(model, where, device, "fsdp") for device in where.mesh.devices}
    assert list(found[0]) == ["model.embed_tokens", "model.layers.0"]
    assert list(found[7]) == ["model.embed_tokens", "model.layers.1", "model.norm"]
    assert found[0]["model.embed_tokens"].shapes == found[7]["model.embed_tokens"].shapes  # of both stages
    assert list(found[0]["model.layers.0"].shapes)[-2:] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ]
    one = Layout(DeviceMesh(0, 2), ParallelStrategy(tp=2))
    assert list(units(model, one, 0, "fsdp")) == [""]
    assert held_boxes(model, one, 0, "fsdp") == device_boxes(model, one, 0)
