"""What is measured of a sample and of an optimizer, against numbers by hand."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from realhf.base.errors import UserError
from realhf.wrapping.measuring import READINGS, optimizer_costs, sample_costs

CPU = torch.device("cpu")


def taking(*seconds: float) -> Any:
    """Within it readings take the given seconds."""
    left = list(seconds)

    def seconds_of(work: Callable[[], object], device: torch.device) -> float:
        work()
        return left.pop(0)

    return mock.patch("realhf.wrapping.measuring.seconds_of", seconds_of)


def test_activations_of_a_sample_by_hand() -> None:
    # 400 bytes each, at the end of the second exp's backward pass: the inputs, what both exps gave, and the gradient.
    # The product is freed when the first exp is done, and the weight's gradient of 40,000 bytes is no activation.
    model = nn.Linear(100, 100, bias=False)

    def example(samples: int) -> Tensor:
        return model(torch.ones(samples, 100)).exp().exp().sum()

    with taking(3.0, 1.0, 2.0, 1.5, 9.0):
        costs = sample_costs(model, example, 4)
    assert costs.bytes_per_sample == 4 * 400
    assert costs.seconds_per_sample == 2.0 / 4
    assert model.weight.grad is None


def test_forward_passes_share_the_seconds_by_their_products() -> None:
    """8 products of the first and 12 of the second for each of two rows. A backward pass has two for each of a forward
    pass, so of 9 s the first takes 9 x 8 / (3 x 20) forward. The second is used twice where it is computed again."""
    first, second = nn.Linear(2, 4), nn.Linear(4, 3)
    for again in (False, True):
        model = nn.Sequential(nn.Embedding(5, 2), first, second)

        def example(samples: int, model: nn.Sequential = model, again: bool = again) -> Tensor:
            x = first(model[0](torch.ones(samples, 2, dtype=torch.long)))
            y: Tensor = checkpoint(second, x, use_reentrant=False) if again else second(x)
            return y.sum()

        with taking(*[9.0] * READINGS):
            costs = sample_costs(model, example, 1)
        assert costs.products == {"1": 2 * 8, "2": 2 * 12 * (1 + again)}
        of_all = 3 * 8 + (4 if again else 3) * 12
        assert costs.forward_s(("1",)) == pytest.approx(9.0 * 8 / of_all)
        assert costs.forward_s(("2",)) == pytest.approx(9.0 * 12 / of_all)
        assert costs.forward_s(("0",)) == 0.0


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 512), nn.Linear(512, 8)
        self.tied = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = checkpoint(lambda y: self.second(torch.relu(self.first(y))), x, use_reentrant=self.reentrant)
        return F.linear(self.tied(x), self.tied.weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_uses_of_operators(reentrant: bool) -> None:
    model = Recomputed(reentrant=reentrant)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numbers = torch.get_rng_state()

    def example(samples: int) -> Tensor:
        return model(torch.randn(2 * samples, 8)).square().mean()

    costs = sample_costs(model, example, 1)
    assert dict(costs.uses) == {"first": 2, "second": 2, "tied": 1}
    assert costs.used_elsewhere == {"tied.weight"}
    # Dropout, batch norm: nobody has seen the measuring.
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("value", [None, torch.ones(2, requires_grad=True), torch.ones(())])
def test_an_example_gives_a_loss(value: Tensor | None) -> None:
    with pytest.raises(UserError, match="not a loss"):
        sample_costs(nn.Linear(2, 2), lambda _: value, 1)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("factory", "state_bytes"),
    [
        (lambda vectors: torch.optim.AdamW(vectors, lr=1e-3), 8),
        (lambda vectors: torch.optim.SGD(vectors, lr=1e-3), 0),
        (lambda vectors: torch.optim.SGD(vectors, lr=1e-3, momentum=0.9), 4),
    ],
)
def test_states_of_an_optimizer(factory: Callable[[list[Tensor]], torch.optim.Optimizer], state_bytes: float) -> None:
    with taking(*[2.0**20, 2.0**19] * READINGS):
        costs = optimizer_costs(factory, torch.float32, CPU)
    assert costs.state_bytes == state_bytes
    assert (costs.update_s, costs.accumulate_s) == (1.0, 0.5)


class ByNorm(torch.optim.SGD):
    """As LAMB: steps are as long as the vector is."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for vector in group["params"]:
                vector -= group["lr"] * vector.norm() * vector.grad / vector.grad.norm()


def test_an_optimizer_that_is_not_elementwise_is_refused() -> None:
    with pytest.raises(UserError, match="ByNorm, which updates a vector otherwise than its halves"):
        optimizer_costs(lambda vectors: ByNorm(vectors, lr=1e-3), torch.float32, CPU)
    with pytest.raises(UserError, match="optimizer_factory failed on 1 vector"):
        optimizer_costs(lambda vectors: torch.optim.LBFGS(vectors), torch.float32, CPU)
