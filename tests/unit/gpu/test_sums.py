"""Products and sums in Triton's interpreter: those of float64, and the same bits whatever is beside them."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.gpu import sums
from realhf.gpu.sums import add_rows, product, row_sums
from tests.unit.gpu.in_order import multiply_in_order
from tests.unit.models.flash import IN_INTERPRETER

pytestmark = IN_INTERPRETER

# Of the largest number; the interpreter cuts off what bfloat16 does not have, in place of rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _multiplies_in_order() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        multiply_in_order(patch)
        yield


@settings(max_examples=12)
@given(
    rows=st.sampled_from([1, 3, 32, 65, 100]),
    outs=st.sampled_from([1, 17, 64, 90]),
    width=st.sampled_from([1, 16, 37, 64, 150]),
    dtype=st.sampled_from(list(TOLERANCE)),
    is_transposed=st.booleans(),
    has_bias=st.booleans(),
)
def test_products_are_those_of_float64(
    rows: int, outs: int, width: int, dtype: torch.dtype, is_transposed: bool, has_bias: bool
) -> None:
    """Of transposed weights, and of parts of the columns of both, too."""
    torch.manual_seed(rows + outs + width)
    x = torch.randn(rows, width + 3).to(dtype)[:, 3:]
    weight = torch.randn(width, outs).to(dtype).t() if is_transposed else torch.randn(outs, width).to(dtype)
    bias = torch.randn(outs + 1).to(dtype)[1:] if has_bias else None
    y = product(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCE[dtype] * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_number_depends_on_its_row_and_its_output_alone(dtype: torch.dtype) -> None:
    """Neither on how many there are, nor on how they lie in memory."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(100, 150).to(dtype), torch.randn(70, 150).to(dtype), torch.randn(70).to(dtype)
    whole = product(x, weight, bias)
    for rows in (slice(40, 41), slice(36, 41), slice(1, 100)):
        assert torch.equal(product(x[rows], weight, bias), whole[rows])
    for outs in (slice(40, 41), slice(33, 38)):
        assert torch.equal(product(x, weight[outs], bias[outs]), whole[:, outs])
    assert torch.equal(product(x.t().contiguous().t(), weight.t().contiguous().t(), bias), whole)
    assert product(x[:0], weight).shape == (0, 70)


def test_kernels_get_aligned_operands_and_are_compiled_once() -> None:
    """Rows of other lengths, or at other places, are copied; zeros fill them up."""
    x = torch.randn(6, 96)
    assert sums._aligned(x) is x
    assert sums._aligned(x[2:4, 16:48]).data_ptr() == x[2:4, 16:48].data_ptr()
    for other in (x[:, 1:33], x[:, :20], x[:, :33], x.t(), x.flatten()[1:81].view(5, 16)):
        aligned = sums._aligned(other)
        assert not any(number % 16 for number in (aligned.shape[1], aligned.stride(0), aligned.data_ptr()))
        assert torch.equal(aligned[:, : other.shape[1]], other)
        assert not aligned[:, other.shape[1] :].any()


def test_tiles_of_products_are_those_of_the_dtype_and_inputs_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^24 + 1 is 2^24 in float32: the order in which tiles are added shows."""
    _, _, depth = sums.TILES[torch.float32]
    x = torch.zeros(1, 3 * depth)
    x[0, 0], x[0, depth], x[0, 2 * depth] = 2.0**24, 1.0, 1.0
    assert product(x, torch.ones(1, 3 * depth)).item() == 2.0**24
    assert product(x.flip(1), torch.ones(1, 3 * depth)).item() == 2.0**24 + 2


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 80, 1024, 1500])
def test_sums_of_rows_alone_and_among_others(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(60, width + 1).to(dtype)[:, 1:]
    found = row_sums(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double().sum(1), rtol=0, atol=2e-6 * width**0.5 * 4)
    for rows in (slice(30, 31), slice(28, 33)):
        assert torch.equal(row_sums(x[rows]), found[rows])
        assert torch.equal(row_sums(x[rows].contiguous()), found[rows])


def test_rows_are_added_where_they_are_named_in_their_order() -> None:
    torch.manual_seed(1)
    total, x = torch.randn(6, 40), torch.randn(50, 40)
    index = torch.randint(1, 5, (50,))  # the first and the last have none
    expected = total.double().index_add(0, index, x.double())
    added = total.clone()
    add_rows(added, index, x)
    torch.testing.assert_close(added.double(), expected, rtol=0, atol=2e-6 * 4)
    alone = total.clone()
    add_rows(alone[2:3], (index[index == 2] - 2), x[index == 2])
    assert torch.equal(alone[2], added[2])
    big = torch.tensor([[2.0**24], [1.0], [1.0], [2.0**24]])
    in_order = torch.zeros(2, 1)
    add_rows(in_order, torch.tensor([0, 0, 0, 1]), big)
    assert in_order[0].item() == 2.0**24
    add_rows(in_order, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1))
