"""The division of a device's flat vector: shards of equal size, cut into boxes that cover every parameter once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model import DecoderConfig
from realhf.models.parameters import decoder_parameters
from realhf.realloc.layout import Box, device_boxes
from realhf.realloc.shards import ALIGNMENT, FlatLayout, boxes_in, counted_range, flat_layout
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
    start = flat_layout(SMALL, one, 0).starts["model.embed_tokens.weight"]
    found = boxes_in(SMALL, one, 0, range(start + first, start + last))
    assert [(box.offset, box.shape) for box, _ in found] == expected
    sizes = [box.size for box, _ in found]
    assert [at for _, at in found] == [start + first + sum(sizes[:i]) for i in range(len(found))]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shards_hold_the_elements_of_their_boxes(data: st.DataObject) -> None:
    """Every parameter numbered element by element: what lies in a shard is what its boxes say, and what is
    counted is every element of the model once."""
    model = data.draw(models())
    where = data.draw(layouts(model))
    numbers = {spec.name: np.arange(1, spec.size + 1).reshape(spec.shape) for spec in decoder_parameters(model)}
    counts = {name: np.zeros_like(values) for name, values in numbers.items()}

    def cut(box: Box) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))

    for device in where.mesh.devices:
        flat = flat_layout(model, where, device)
        vector = np.zeros(flat.size, dtype=np.int64)
        for box in device_boxes(model, where, device):
            start = flat.starts[box.name]
            vector[start : start + box.size] = numbers[box.name][cut(box)].ravel()
        shard = flat.shard(where.coordinates(device)[0])
        assert len(shard) % ALIGNMENT == 0
        seen = 0
        for box, at in boxes_in(model, where, device, shard):
            assert shard.start <= at
            assert at + box.size <= shard.stop
            np.testing.assert_array_equal(vector[at : at + box.size], numbers[box.name][cut(box)].ravel())
            seen += box.size
        assert seen == np.count_nonzero(vector[shard.start : shard.stop])
        for box, _ in boxes_in(model, where, device, counted_range(model, where, device)):
            counts[box.name][cut(box)] += 1
    assert all((count == 1).all() for count in counts.values())
