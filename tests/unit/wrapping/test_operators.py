"""Which operators a module has, how they are cut, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from realhf.wrapping.operators import cut, operators_of, units_in_modes


class Shared(nn.Module):
    """A weight in two modules, a frozen one, attention that reads the weight of a linear by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.attention = nn.MultiheadAttention(8, 2)
        self.bounded = nn.Embedding(4, 8, max_norm=1.0)
        self.head = nn.Linear(8, 10)
        self.head.weight = self.embed.weight


def test_operators_of_a_module() -> None:
    found = {op.name: op for op in operators_of(Shared())}
    assert list(found) == ["embed", "others"]
    assert found["embed"].modules == ("embed", "head")
    assert found["embed"].most_slices == 1
    assert found["embed"].elements == 80
    assert list(found["others"].shapes) == [
        "attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias",
        "bounded.weight", "head.bias",
    ]  # fmt: skip
    assert found["others"].modes == ("replicated", "zero1")
    # Whoever else reads a weight needs it at any time.
    assert [op.name for op in operators_of(Shared(), {"embed.weight"})] == ["others"]


def test_slices_are_units_of_their_modes() -> None:
    module = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))
    modes = {"0": ("sharded", "zero1", "sharded"), "1": ("replicated",), "others": ("zero1",)}
    units = units_in_modes(operators_of(module), modes, 2)
    assert [(unit.mode, unit.module, list(unit.flat.shapes)) for unit in units] == [
        ("replicated", "", ["1.weight"]),
        ("zero1", "", ["0.slices.1.weight", "0.bias", "1.bias"]),
        ("sharded", "0.slices.0", ["0.slices.0.weight"]),
        ("sharded", "0.slices.2", ["0.slices.2.weight"]),
    ]
    assert [unit.boxes["0.slices.2.weight"].offset for unit in units[3:]] == [(0, 6)]
    assert [unit.boxes["0.slices.2.weight"].shape for unit in units[3:]] == [(4, 4)]


@pytest.mark.parametrize(
    ("part", "inputs"),
    [
        (nn.Linear(10, 4), torch.randn(2, 3, 10)),
        (nn.Linear(10, 4, bias=False), torch.randn(3, 10)),
        (nn.Embedding(6, 10, padding_idx=2), torch.tensor([[0, 2], [5, 2]])),
    ],
)
def test_a_module_that_is_cut_computes_the_same(part: nn.Linear | nn.Embedding, inputs: Tensor) -> None:
    part = part.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    whole = part.weight.detach().clone()
    expected = part(inputs)
    expected.square().sum().backward()
    gradient = part.weight.grad
    cut(part, [3, 3, 4])
    for slice_, weight in zip(part.slices, whole.split([3, 3, 4], dim=1), strict=True):
        slice_.weight = nn.Parameter(weight.clone())
    found = part(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    by_slices = torch.cat([slice_.weight.grad for slice_ in part.slices], dim=1)
    torch.testing.assert_close(by_slices, gradient, rtol=1e-12, atol=1e-12)
