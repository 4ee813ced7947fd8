"""Sums and products whose bits depend on neither ranks nor rows."""

import pytest
import torch
import torch.nn.functional as F

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.chunks import LOGITS_BYTES
from realhf.cpu import products
from realhf.engine.train.optimizer import FlatAdamW
from realhf.parallel import ordered
from realhf.parallel.ordered import Leaves, column_sums, columns, product, row, tree_sum, weight_gradient
from realhf.parallel.vocabulary import Softmax

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def test_a_tree_adds_neighbours_and_odd_numbers_from_left_to_right() -> None:
    big, one = 2.0**24, 1.0  # in float32 big + one is big
    assert tree_sum(torch.tensor([one, one, big, one])).item() == big + 2
    assert tree_sum(torch.tensor([big, one, one])).item() == big
    assert tree_sum(torch.tensor([one, one, big])).item() == big + 2
    halves = torch.full((4,), 1 / 3, dtype=torch.bfloat16)
    assert tree_sum(halves).item() == (halves.float().sum()).bfloat16().item(), "rounded once"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_and_their_gradients_are_the_plain_ones(dtype: torch.dtype) -> None:
    """Of an odd number of rows too, and of several weights with and without biases."""
    torch.manual_seed(0)
    x, first, second = (torch.randn(shape).to(dtype) for shape in ((7, 24), (8, 24), (12, 24)))
    biases = torch.randn(8).to(dtype), torch.randn(12).to(dtype)
    back = torch.randn(24, 20).to(dtype)
    ours = [each.clone().requires_grad_() for each in (x, first, second, *biases, back)]
    wide = [each.double().requires_grad_() for each in (x, first, second, *biases, back)]
    leaves = Leaves(4)
    made = columns(leaves.enter(ours[0]), leaves, (ours[1], ours[3]), (ours[2], ours[4]))
    out = leaves.leave(row(torch.cat(made, -1), ours[5], leaves))
    expected = F.linear(
        torch.cat([F.linear(wide[0], w, b) for w, b in zip(wide[1:3], wide[3:5], strict=True)], -1), wide[5]
    )
    scale = expected.abs().max()
    torch.testing.assert_close(out.double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])
    out.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, wide, strict=True):
        scale = other.grad.abs().max()
        torch.testing.assert_close(one.grad.double() / scale, other.grad / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_parts_of_a_layer_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    """Two ranks, each with half of the leaves, played one after the other: what one rank with all of them computes."""
    torch.manual_seed(1)
    x, up, down = (torch.randn(shape).to(dtype) for shape in ((9, 16), (24, 16), (16, 24)))

    def passed(rows: slice, own: int) -> list[torch.Tensor]:
        """The parts of the output, and the gradients of x by part, of both weights."""
        leaves, parts = Leaves(own), []
        inputs = [x.clone().requires_grad_(), up[rows].clone().requires_grad_(), down[:, rows].clone().requires_grad_()]
        entered = inputs[0].expand(own, *x.shape)
        [inner] = columns(entered, leaves, (inputs[1], None))
        parts = row(inner, inputs[2], leaves)
        grads = torch.autograd.grad(parts, [entered, *inputs[1:]], torch.ones_like(parts[:1]).expand_as(parts))
        return [parts.detach(), *grads]

    whole = passed(slice(0, 24), 4)
    halves = [passed(slice(0, 12), 2), passed(slice(12, 24), 2)]
    for place, dim in enumerate((0, 0, 0, 1)):
        assert torch.equal(torch.cat([half[place] for half in halves], dim), whole[place])


def test_a_product_of_transposed_operands_is_that_of_their_copies() -> None:
    torch.manual_seed(2)
    for dtype in TOLERANCE:
        x, weight = torch.randn(37, 34).to(dtype), torch.randn(34, 45).to(dtype)
        assert torch.equal(product(x, weight.t()), product(x, weight.t().contiguous()))
        grad = torch.randn(37, 45).to(dtype)
        assert torch.equal(weight_gradient(grad[:, 3:20], x), weight_gradient(grad, x)[3:20])


def test_kept_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    pack = products.pack
    monkeypatch.setattr(ordered.products, "pack", lambda weight: made.append(weight) or pack(weight))
    leaves, x, weight = Leaves(1), torch.randn(2, 4), torch.randn(3, 4)
    leaves.packed.keep()
    expected = leaves.packed.product(x, weight)
    assert torch.equal(leaves.packed.product(x, weight), expected)
    assert len(made) == 1
    leaves.packed.forget()
    weight.zero_()
    assert not leaves.packed.product(x, weight).any(), "a weight that has changed is read again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_columns_are_the_same_whatever_columns_are_beside_them(dtype: torch.dtype) -> None:
    """As of the gradients of biases, of which tensor-parallel ranks have some columns each."""
    x = torch.randn(77, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = column_sums(x)
    torch.testing.assert_close(
        whole, x.double().sum(0).to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-5
    )
    for first in range(0, 20, 4):
        for end in range(first + 4, 21, 4):
            assert torch.equal(column_sums(x[:, first:end].contiguous()), whole[first:end])


def test_tiles_of_a_vocabulary_are_the_model_s_whatever_rows_and_ranks() -> None:
    vocab, item = 48_000, 4
    whole = Softmax(1.0, None, LOGITS_BYTES, False, Leaves(4)).tiles(10, vocab, item)[0]
    assert Softmax(1.0, None, LOGITS_BYTES, False, Leaves(4)).tiles(5000, vocab, item)[0] == whole
    half = Softmax(1.0, None, LOGITS_BYTES, False, Leaves(2)).tiles(300, vocab // 2, item)[0]
    moved = [slice(part.start + vocab // 2, part.stop + vocab // 2) for part in half]
    assert [*half, *moved] == whole


def test_an_update_of_an_element_does_not_depend_on_its_place() -> None:
    torch.manual_seed(3)
    whole, gradient = torch.randn(1000), torch.randn(1000)

    def updated(first: int, end: int) -> torch.Tensor:
        part = whole[first:end].clone()
        optimizer = FlatAdamW([part], OptimizerConfig(), 10, in_vectors=True)
        for _ in range(3):
            optimizer.step([gradient[first:end]], 0.7)
        return torch.stack([part, optimizer.state["exp_avg"], optimizer.state["exp_avg_sq"]])

    expected = updated(0, 1000)
    for first, end in [(0, 63), (1, 70), (13, 14), (500, 1000), (64, 128), (900, 1000)]:
        assert torch.equal(updated(first, end), expected[:, first:end])
