"""Linears of one input as one product, against each of them alone."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realhf.engine.arena import Arena
from realhf.geometry.shards import ALIGNMENT, FlatLayout
from realhf.parallel import joined
from realhf.parallel.gradients import let_add_to_grad
from realhf.parallel.joined import JoinedLinears
from realhf.parallel.tensor import ColumnParallelLinear
from realhf.parallel.views import side_by_side

INPUTS, OUTPUTS, ROWS = 32, (8, 4, 4), 5  # a weight of 4 rows has 128 elements, without padding
CPU = torch.device("cpu")


def test_tensors_side_by_side_by_hand() -> None:
    vector = torch.arange(24)
    rows = [vector[4:12].view(2, 4), vector[12:16].view(1, 4), vector[16:24].view(2, 4)]
    whole = side_by_side(rows, 0)
    assert whole is not None
    assert whole.equal(vector[4:24].view(5, 4))
    assert whole.data_ptr() == rows[0].data_ptr()
    matrix = vector.view(4, 6)
    columns = side_by_side([matrix[:, 1:3], matrix[:, 3:4], matrix[:, 4:]], -1)
    assert columns is not None
    assert columns.equal(matrix[:, 1:])
    assert side_by_side(rows[:1], 0) is not None


def test_tensors_that_are_not_side_by_side() -> None:
    vector = torch.arange(24)
    first, second = vector[:8].view(2, 4), vector[8:16].view(2, 4)
    assert side_by_side([second, first], 0) is None  # the other order
    assert side_by_side([first, vector[12:20].view(2, 4)], 0) is None  # a gap
    assert side_by_side([first, vector.clone()[8:16].view(2, 4)], 0) is None  # another storage
    assert side_by_side([first, second.t()], 0) is None  # other strides


class Case:
    """Linears whose parameters lie in an arena, perhaps with gradients in another one; and the same ones alone."""

    def __init__(self, *, bias: bool, gradients: torch.dtype | None, dtype: torch.dtype = torch.float64):
        torch.manual_seed(0)
        self.linears = [ColumnParallelLinear((size, INPUTS), bias=bias) for size in OUTPUTS]
        shapes = {f"{i}.weight": (size, INPUTS) for i, size in enumerate(OUTPUTS)}
        # Each bias behind padding would leave the linears alone, so these lie in a vector without it.
        self.biases = torch.randn(sum(OUTPUTS), dtype=dtype)
        arena = Arena(FlatLayout(shapes), dtype, CPU)
        arena.flat.normal_()
        self.sums = None if gradients is None else torch.ones(arena.layout.size, dtype=gradients)
        self.bias_sums = torch.ones(sum(OUTPUTS), dtype=gradients or dtype)
        for i, (linear, of_bias, of_sum) in enumerate(
            zip(self.linears, self.biases.split(OUTPUTS), self.bias_sums.split(OUTPUTS), strict=True)
        ):
            linear.weight = nn.Parameter(arena.views()[f"{i}.weight"])
            linear.bias = nn.Parameter(of_bias) if bias else None
            if self.sums is not None:
                start = arena.layout.starts[f"{i}.weight"]
                attach(linear.weight, self.sums[start : start + linear.weight.numel()].view_as(linear.weight))
                if linear.bias is not None:
                    attach(linear.bias, of_sum)
        self.join = JoinedLinears(*self.linears)
        self.x = torch.randn(ROWS, INPUTS, dtype=dtype, requires_grad=True)

    def parameters(self) -> list[nn.Parameter]:
        return [p for linear in self.linears for p in linear.parameters()]

    def alone(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and the gradients of x and all parameters of the loss below, by torch in float64."""
        leaves = [x.detach().double().requires_grad_() for x in (self.x, *self.parameters())]
        x, *rest = leaves
        each = iter(rest)
        out = [F.linear(x, next(each), next(each) if linear.bias is not None else None) for linear in self.linears]
        loss_of(out).backward()
        return out, [leaf.grad for leaf in leaves if leaf.grad is not None]


def attach(parameter: nn.Parameter, grad: Tensor) -> None:
    parameter.grad_dtype = grad.dtype
    parameter.grad = grad
    let_add_to_grad(parameter)


def loss_of(outputs: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(out.double() ** 2).sum() * (i + 1) for i, out in enumerate(outputs)]).sum()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of the weights of all products that are made."""
    found: list[int] = []
    plain = joined.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(len(weight))
        return plain(x, weight, bias)

    monkeypatch.setattr(joined, "linear", counted)
    return found


@pytest.mark.parametrize("gradients", [None, torch.float64, torch.float32], ids=["autograd", "added", "narrow"])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_each_alone(
    bias: bool, gradients: torch.dtype | None, products: list[int]
) -> None:
    case = Case(bias=bias, gradients=gradients)
    outputs, grads = case.alone()
    for times in (1, 2):
        found = case.join(case.x)
        torch.testing.assert_close(list(found), outputs, rtol=0, atol=1e-12)
        loss_of(found).backward()
        assert case.x.grad is not None
        torch.testing.assert_close(case.x.grad, times * grads[0], rtol=1e-12, atol=1e-12)
        tolerance = 1e-4 if gradients == torch.float32 else 1e-11
        for parameter, expected in zip(case.parameters(), grads[1:], strict=True):
            assert parameter.grad is not None
            before = 0 if gradients is None else 1  # the sums begin with ones
            torch.testing.assert_close(
                parameter.grad.double(), before + times * expected, rtol=tolerance, atol=tolerance
            )
    assert products == [sum(OUTPUTS), INPUTS] * 2
    if case.sums is not None:
        for linear in case.linears:
            assert linear.weight is not None
            assert linear.weight.grad is not None
            assert linear.weight.grad._is_view(), "the sums stay in their vector"


def test_bfloat16_adds_to_float32_sums(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the CPU multiplies each alone."""
    case = Case(bias=True, gradients=torch.float32, dtype=torch.bfloat16)
    loss_of(case.join(case.x)).backward()
    assert products == []
    case = Case(bias=True, gradients=torch.float32, dtype=torch.bfloat16)
    monkeypatch.setattr(joined, "is_better_alone", lambda x: False)
    loss_of(case.join(case.x)).backward()
    assert products == [sum(OUTPUTS), INPUTS]
    for parameter, expected in zip(case.parameters(), case.alone()[1][1:], strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        scale = expected.abs().max().item()
        torch.testing.assert_close(parameter.grad.double() - 1, expected, rtol=0, atol=scale * 2**-6)


def test_gradients_that_lie_side_by_side_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    cat = torch.cat

    def counted(tensors: list[Tensor], dim: int = 0) -> Tensor:
        copies.append(len(tensors))
        return cat(tensors, dim)

    monkeypatch.setattr(torch, "cat", counted)
    case = Case(bias=False, gradients=torch.float64)
    grads = torch.randn(ROWS, sum(OUTPUTS), dtype=torch.float64)
    torch.autograd.backward(case.join(case.x), grads.split(OUTPUTS, 1))
    assert copies == []
    torch.autograd.backward(case.join(case.x), [grad.clone() for grad in grads.split(OUTPUTS, 1)])
    assert copies == [3]
    weight = torch.cat([linear.weight.detach() for linear in case.linears if linear.weight is not None])
    torch.testing.assert_close(case.x.grad, 2 * grads @ weight)


def test_weights_that_are_cut_or_padded_are_multiplied_alone(products: list[int]) -> None:
    case = Case(bias=False, gradients=None)
    wide = case.linears[1]
    assert wide.weight is not None
    whole = wide.weight.detach()
    wide.cut([(4, 16), (4, 16)])
    for part, columns in zip(wide.to(torch.float64).weights(), whole.split(16, 1), strict=True):
        part.data.copy_(columns)
    torch.testing.assert_close(case.join(case.x)[1], case.x @ whole.t())
    size = ALIGNMENT // 2 + 1
    padded = Arena(FlatLayout({"a": (1, size), "b": (1, size)}), torch.float64, CPU).views()
    linears = [ColumnParallelLinear((1, size)) for _ in padded]
    for linear, view in zip(linears, padded.values(), strict=True):
        linear.weight = nn.Parameter(view.fill_(2))
    found = JoinedLinears(*linears)(torch.ones(3, size, dtype=torch.float64))
    assert [out.tolist() for out in found] == [[[2 * size]] * 3] * 2
    assert products == []
