"""The routing of experts by hand, and the gradients of gated products."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from realhf.architecture.model import Activation, Experts
from realhf.models.mlp import MixtureOfExperts, _Gated
from realhf.parallel.views import side_by_side
from tests.unit.engine.losses import tiny

# Exact in bfloat16. The first three are near enough that bfloat16 gives two of them one probability.
LOGITS = (0.125, 0.1259765625, 0.12451171875, -3.0)


def routed(dtype: torch.dtype, *, normalised: bool, per_token: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of one token whose router has `LOGITS`."""
    experts = Experts(count=len(LOGITS), per_token=per_token, normalised=normalised)
    mixture = MixtureOfExperts(tiny(hidden_size=8, experts=experts), 1, None).to(dtype)
    with torch.no_grad():
        mixture.gate.weight.zero_()[:, 0] = torch.tensor(LOGITS, dtype=dtype)
        return mixture.choose(mixture.gate(torch.tensor([[1.0, *[0.0] * 7]], dtype=dtype)))


@pytest.mark.parametrize("normalised", [False, True])
def test_experts_are_routed_in_float32_whatever_the_dtype(normalised: bool) -> None:
    probabilities = torch.tensor(LOGITS, dtype=torch.float64).softmax(-1)
    expected = probabilities[[1, 0]] / (probabilities[[1, 0]].sum() if normalised else 1.0)
    for dtype, relative in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        chosen, weights = routed(dtype, normalised=normalised)
        assert chosen.tolist() == [[1, 0]]
        assert weights.dtype == dtype
        # Rounded once, to the model's dtype.
        torch.testing.assert_close(weights[0].double(), expected, rtol=relative, atol=0)
    in_bfloat16 = torch.tensor(LOGITS, dtype=torch.bfloat16).softmax(-1)
    assert in_bfloat16[0] == in_bfloat16[1], "in bfloat16 the two could not be told apart"


def test_the_most_likely_experts_are_taken_first() -> None:
    assert routed(torch.float32, normalised=True, per_token=3)[0].tolist() == [[1, 0, 2]]
    assert routed(torch.float32, normalised=True, per_token=1)[1].tolist() == [[1.0]]


def test_a_batch_without_tokens_goes_through_no_expert() -> None:
    """As of a rank that has no samples: the outputs are none, and gradients flow into nothing."""
    experts = Experts(count=3, per_token=2)
    mixture = MixtureOfExperts(tiny(hidden_size=8, experts=experts), 1, None)
    tokens = torch.zeros(0, 8, requires_grad=True)
    out = mixture(tokens)
    assert out.shape == (0, 8)
    out.sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.shape == (0, 8)


PLAIN = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}


@pytest.mark.parametrize("activation", PLAIN)
def test_gradients_of_a_gated_product_are_autograds_and_lie_side_by_side(activation: Activation) -> None:
    torch.manual_seed(0)
    gate, up, grad = torch.randn(3, 7, 5, dtype=torch.float64)
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    out = PLAIN[activation](leaves[0]) * leaves[1]
    expected = torch.autograd.grad(out, leaves, grad)
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    mine = _Gated.apply(*leaves, activation)
    torch.testing.assert_close(mine, out, rtol=0, atol=0)
    found = torch.autograd.grad(mine, leaves, grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    assert side_by_side(found, 1) is not None
