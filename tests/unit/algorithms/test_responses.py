"""Two rollouts worked out by hand: prompts of 2 and 1 tokens, responses of 3 and 2."""

import pytest
import torch

from realhf.algorithms.responses import (
    by_sample,
    response_lengths,
    response_logprobs,
    response_tokens,
    response_values,
    responses,
    token_scores,
)
from realhf.engine.batch import Batch
from realhf.parallel.vocabulary import WholeLogits


@pytest.fixture
def batch() -> Batch:
    seq = [torch.tensor([1, 2, 3, 0, 1]), torch.tensor([2, 3, 0])]
    return Batch(ids=(7, 8), data={"prompt": [seq[0][:2], seq[1][:1]], "seq": seq})


def test_lengths_and_tokens(batch: Batch) -> None:
    assert response_lengths(batch) == [3, 2]
    assert response_tokens(batch) == 5.0
    assert [tokens.tolist() for tokens in responses(batch)] == [[3, 0, 1], [3, 0]]


def test_a_token_is_predicted_by_the_position_before_it(batch: Batch) -> None:
    table = torch.arange(8 * 4, dtype=torch.float64).reshape(8, 4).sin()  # [tokens, vocab]
    found = response_logprobs(WholeLogits(table), batch, temperature=2.0)
    expected = (table / 2).log_softmax(-1)
    pairs = [(1, 3), (2, 0), (3, 1), (5, 3), (6, 0)]  # (position, token after it)
    plain = torch.stack([table.log_softmax(-1)[position, token] for position, token in pairs])
    assert torch.allclose(response_logprobs(WholeLogits(table), batch), plain)
    assert torch.allclose(found, torch.stack([expected[position, token] for position, token in pairs]))
    assert response_values(table[:, 0], batch).tolist() == [float(table[position, 0]) for position, _ in pairs]


def test_a_token_is_scored_at_its_own_position(batch: Batch) -> None:
    head = torch.arange(8.0)
    assert [x.tolist() for x in token_scores(head, batch)] == [[2, 3, 4], [6, 7]]


def test_between_samples_and_tokens(batch: Batch) -> None:
    of_tokens = torch.tensor([0.5, 0.5, 0.5, -1.0, -1.0])
    assert [part.tolist() for part in by_sample(of_tokens, batch)] == [[0.5, 0.5, 0.5], [-1.0, -1.0]]
