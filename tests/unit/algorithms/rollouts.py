"""Rollouts with random numbers, as tensor functions and losses see them."""

import torch
from torch import Tensor

from realhf.api.script.columns import Columns
from realhf.api.script.functions import Reduction
from realhf.engine.batch import Batch

LENGTHS = (3, 5, 1, 4, 2, 5, 4, 1)


def f64(*values: float) -> Tensor:
    """A vector of those numbers in float64."""
    return torch.tensor(values, dtype=torch.float64)


def assert_columns(found: list[Tensor], expected: list[list[float]], tolerance: float = 1e-9) -> None:
    for column, numbers in zip(found, expected, strict=True):
        torch.testing.assert_close(column, f64(*numbers), rtol=tolerance, atol=tolerance)


def random_columns(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.3) -> dict[str, list[Tensor]]:
    """Prompts, sequences, log-probabilities near each other, values, and rewards 0, 1, 2."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(n, dtype=torch.float64, generator=generator)

    logprob = [-draw(n).abs() for n in lengths]
    rewards = torch.randint(0, 3, (len(lengths),), generator=generator).double()
    return {
        "prompt": [torch.tensor([1, 3])] * len(lengths),
        "seq": [torch.tensor([1, 3] + [4] * n) for n in lengths],
        "logprob": logprob,
        "ref_logprob": [x + spread * draw(len(x)) for x in logprob],
        "new_logprob": [x + spread * draw(len(x)) for x in logprob],
        "old_logprob": [x + spread * draw(len(x)) for x in logprob],
        "value": [draw(n) for n in lengths],
        "new_value": [draw(n) for n in lengths],
        "reward": list(rewards.split(1)),
    }


def columns_of(data: dict[str, list[Tensor]], *names: str, places: list[int] | None = None) -> Columns:
    """The columns of those names (all, if none is given) of the samples at `places`, which are their ids."""
    places = list(range(len(data["seq"]))) if places is None else places
    return Columns(places, {name: [data[name][i] for i in places] for name in names or data})


def batch_of(data: dict[str, list[Tensor]], *names: str, **others: list[Tensor]) -> Batch:
    return Batch(tuple(range(len(data["seq"]))), {name: data[name] for name in ("prompt", "seq", *names)} | others)


def reduced(loss: Tensor, lengths: tuple[int, ...], reduction: Reduction) -> Tensor:
    """The loss of a mini-batch from losses of tokens [responses]."""
    parts = loss.split(list(lengths))
    match reduction.kind:
        case "token_mean":
            return loss.mean()
        case "sequence_mean":
            return torch.stack([part.mean() for part in parts]).mean()
        case "sequence_sum_over":
            return torch.stack([part.sum() / reduction.over for part in parts]).mean()
