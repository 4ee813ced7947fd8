"""The product that all layers use, against the plain one in float64."""

import pytest
import torch
import torch.nn.functional as F

from realhf.cpu import products
from realhf.parallel import linear as module
from realhf.parallel.linear import computes_in_halves, linear, takes_packed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def operands(rows: int, dtype: torch.dtype, width: int = 40) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    shapes = [(rows, width), (24, width), (24,)]
    return [(torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype) for shape in shapes]


def assert_plain_product(x, weight, bias, packed=None):
    for b in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        torch.testing.assert_close(linear(x, weight, b, packed).double(), expected, rtol=0, atol=TOLERANCE[x.dtype])


@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 65])
def test_values_are_those_of_the_plain_product(dtype, rows, has_onednn, monkeypatch):
    """Builds of torch for other processors may come without oneDNN."""
    if not has_onednn:
        monkeypatch.setattr(module, "_has_onednn", lambda dtype: False)
    assert_plain_product(*operands(rows, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 65, 256, 257])
def test_values_of_packed_weights_are_those_of_the_plain_product(dtype, rows):
    """At the bounds of its rows too."""
    x, weight, bias = operands(rows, dtype)
    assert takes_packed(x, weight) == (rows <= 256)
    assert_plain_product(x, weight, bias, products.pack(weight))


@pytest.mark.parametrize("instructions", ["any", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 30, 32, 34, 100])
def test_a_number_of_a_packed_product_depends_on_no_other_row_or_output(dtype, width, instructions):
    """By the best instructions up to these: whole tiles and blocks of rows, and what is left of them."""
    torch.manual_seed(width)
    x, weight = torch.randn(300, width).to(dtype), torch.randn(70, width).to(dtype)
    packed, kinds = products.pack(weight), products.kernels.Instructions
    try:
        products.kernels.use_instructions(getattr(kinds, instructions))
        whole = packed.product(x)
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(whole.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * width**0.5)
        for first, rows in [(0, 1), (3, 15), (5, 16), (8, 17), (1, 31), (2, 33), (0, 256), (40, 257)]:
            assert torch.equal(packed.product(x[first : first + rows]), whole[first : first + rows])
        for first, outputs in [(0, 1), (5, 16), (1, 31), (33, 37)]:
            some = products.pack(weight[first : first + outputs])
            assert torch.equal(some.product(x), whole[:, first : first + outputs])
    finally:
        products.kernels.use_instructions(kinds.amx)


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 65, 1025])
def test_gradients_are_those_of_the_plain_product(rows, in_halves, monkeypatch):
    monkeypatch.setattr(module, "computes_in_halves", lambda: in_halves)
    leaves = [x.requires_grad_(True) for x in operands(rows, torch.float32)]
    linear(*leaves).square().sum().backward()
    wide = [x.detach().double().requires_grad_(True) for x in leaves]
    F.linear(*wide).square().sum().backward()
    for leaf, expected in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)


def test_gradients_of_bfloat16_without_onednn_are_those_of_float32_rounded_once(monkeypatch):
    monkeypatch.setattr(module, "_has_onednn", lambda dtype: False)
    leaves = [x.requires_grad_(True) for x in operands(65, torch.bfloat16)]
    linear(*leaves).square().sum().backward()
    wide = [x.detach().float().requires_grad_(True) for x in leaves]
    y = F.linear(*wide)
    assert torch.equal(linear(*leaves), y.bfloat16())
    y.backward(2 * y.detach().bfloat16().float())
    for leaf, expected in zip(leaves[:2], wide[:2], strict=True):
        torch.testing.assert_close(leaf.grad.float(), expected.grad, rtol=2**-8, atol=1e-5)


def test_a_gradient_is_only_computed_where_it_is_asked_for(monkeypatch):
    x, weight, _ = operands(8, torch.float32)
    calls = []
    original = module._product
    monkeypatch.setattr(module, "computes_in_halves", lambda: False)
    monkeypatch.setattr(module, "_product", lambda *a: calls.append(a[0].shape) or original(*a))
    linear(x, weight.requires_grad_(True)).sum().backward()
    assert calls == [(8, 40), (24, 8)]  # forward, and the gradient of the weight alone


@pytest.mark.parametrize(
    ("vendor", "family", "expected"),
    [("AuthenticAMD", 25, True), ("AuthenticAMD", 26, False), ("GenuineIntel", 25, False)],
)
def test_processors_that_compute_in_halves(vendor, family, expected, tmp_path):
    processor = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\npower management:\n\n"
    (tmp_path / "cpuinfo").write_text(2 * processor)
    assert computes_in_halves(tmp_path / "cpuinfo") is expected
    assert not computes_in_halves(tmp_path / "missing")


def test_packed_weights_are_of_no_use_to_a_gradient():
    """They are left aside: a pass with gradients may follow a change of the weights."""
    x, weight, _ = operands(8, torch.float32)
    packed = products.pack(torch.zeros_like(weight))
    assert packed is not None
    assert not linear(x, weight, packed=packed).any()
    assert linear(x, weight.requires_grad_(True), packed=packed).any()


def test_a_gradient_reads_rows_that_follow_one_another(monkeypatch):
    """Those of a slice's input do not, and oneDNN would compute with them 500 times slower."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    product, given = module._product, []

    def seen(x, weight, bias):
        given.extend((x, weight))
        return product(x, weight, bias)

    monkeypatch.setattr(module, "computes_in_halves", lambda: False)
    monkeypatch.setattr(module, "_product", seen)
    wide, grad = torch.randn(8, 32), torch.randn(8, 6)
    found = module.weight_gradient(grad, wide[:, 4:20])
    torch.testing.assert_close(found, grad.T @ wide[:, 4:20])
    assert len(given) == 2
    assert all(x.t().is_contiguous() for x in given)
