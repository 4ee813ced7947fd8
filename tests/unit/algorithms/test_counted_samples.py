"""How many samples an update is expected to compute, and what it does where there are more."""

from typing import Any

import pytest
import torch

from realhf.algorithms.grpo.config import GRPO, grpo_loss
from realhf.algorithms.script.update import UpdateInterface
from realhf.api.script.config import Update
from realhf.api.script.views import View
from tests.unit.algorithms.script_rollouts import ROLLOUT, rollouts, term, update_of


@pytest.mark.parametrize(
    ("peers", "micro_batches", "expected"),
    [
        (0.0, 1, 3),  # three of the four are in the loss, and the plan counts on one
        (0.0, 2, 4),  # at most one sample a micro-batch
        (1.0, 1, 4),  # another rank has all four
    ],
)
def test_more_samples_than_planned_are_computed_in_more_micro_batches(
    language_model: Any, context: Any, monkeypatch: pytest.MonkeyPatch, peers: float, micro_batches: int, expected: int
) -> None:
    """Two ranks have four samples each, and their plan counts on one of them in a micro-batch."""
    monkeypatch.setattr(Update, "computed_samples", lambda self, samples, dp, parts: {(4, 2, 1): 1}[samples, dp, parts])
    batch = rollouts(valid=[torch.tensor([v]) for v in (1.0, 1.0, 0.0, 1.0)])
    model, made = language_model(), []
    monkeypatch.setattr(model, "train_step", lambda *arguments: made.append((arguments[0].ids, arguments[-1])) or {})
    of_others = torch.tensor([6.0, peers, peers, peers], dtype=torch.float64)
    surroundings = context(batch_size=8, micro_batches=micro_batches, peers=[of_others])
    config = update_of(term(batch=View((*ROLLOUT.columns, ("valid", "valid")))), reports=())
    UpdateInterface(config).train_step(model, [batch], surroundings)
    assert made == [((4, 5, 7) if expected == 3 else (4, 5, 6, 7), expected)]


@pytest.mark.parametrize(
    ("wanted", "dp", "mini_batches", "expected"),
    [
        (0, 2, 1, 64),  # all
        (16, 2, 1, 64),  # all groups there are
        (8, 1, 1, 64),  # eight of 16 groups, on the only rank
        (8, 2, 1, 39),  # 8 x (4 + 0.8335 x sqrt(8 / 4 x 8 / 15)) = 38.9
        (8, 2, 2, 22),  # 8 x (2 + 0.8335 x sqrt(8 x 3 / 16 x 8 / 15)) = 22.0, of each of two mini-batches
        (15, 2, 1, 64),
    ],
)
def test_samples_that_a_rank_is_expected_to_compute(wanted: int, dp: int, mini_batches: int, expected: int) -> None:
    grpo = GRPO(samples_per_prompt=8, drop_uniform_groups=bool(wanted), groups_per_step=wanted, beta=0.0)
    loss = grpo_loss(grpo)
    samples = 128 // dp // mini_batches
    assert update_of(term(loss)).computed_samples(samples, dp, mini_batches) == min(samples, expected)
    assert update_of(term(loss), term(loss)).computed_samples(samples, dp, mini_batches) == samples


@pytest.mark.parametrize(("dp", "groups", "wanted"), [(2, 32, 8), (2, 8, 3), (4, 32, 10), (8, 64, 24)])
def test_the_rank_with_the_most_groups(dp: int, groups: int, wanted: int) -> None:
    """Against the mean of 4,000 drawn steps: within half a group, and a sample that is rounded up."""
    grpo = GRPO(samples_per_prompt=4, drop_uniform_groups=True, groups_per_step=wanted, beta=0.0)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(4000, groups, generator=generator).argsort(1)[:, :wanted] // (groups // dp)
    most = torch.stack([(chosen == rank).sum(1) for rank in range(dp)]).amax(0).double().mean().item()
    found = update_of(term(grpo_loss(grpo))).computed_samples(groups * 4 // dp, dp, 1)
    assert found / 4 == pytest.approx(most, abs=0.5)
