"""Products of packed weights, and the decode step of a layer, against torch's operators."""

import pytest
import torch
import torch.nn.functional as F

from realhf.cpu import products

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def operands(rows: int, out: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, width), torch.randn(out, width) / width**0.5, torch.randn(out)
    return [t.to(dtype) for t in (x, weight, bias)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("out", [1, 16, 31, 32, 75])
@pytest.mark.parametrize("rows", [0, *range(1, 16), 28, 29, 113, 240])
def test_values_are_those_of_float64(dtype, rows, out):
    """Every height of a tile, one row more than fits into tiles and blocks, and panels that are not full."""
    x, weight, bias = operands(rows, out, 38, dtype)
    packed = products.pack(weight)
    expected = F.linear(x.double(), weight.double(), bias.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(packed.product(x, bias).double(), expected, rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(packed.product(x).double(), expected - bias, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_the_others(dtype):
    x, weight, _ = operands(120, 40, 64, dtype)
    packed = products.pack(weight)
    alone = torch.cat([packed.product(row) for row in x.split(1)])
    assert torch.equal(packed.product(x), alone)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_and_weights_may_be_parts_of_others(dtype):
    wide_x, wide_weight, _ = operands(9, 33, 31, dtype)
    x, weight = wide_x[:, 3:17], wide_weight[:, 5:19]
    found = products.pack(weight).product(x)
    assert torch.equal(found, products.pack(weight.contiguous()).product(x.contiguous()))


def test_what_the_kernel_does_not_have_is_not_packed():
    assert products.pack(torch.zeros(4, 4, dtype=torch.float64)) is None
    assert products.pack(torch.zeros(4, 3, dtype=torch.bfloat16)) is None  # pairs of inputs
    assert products.pack(torch.zeros(4, 3)) is not None
