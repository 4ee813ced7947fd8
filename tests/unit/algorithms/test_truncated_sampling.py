"""Ratios under top-p and top-k, by adding up over all tokens that can be drawn: no random numbers.

p is the policy's whole distribution, K the tokens that top-p and top-k keep, m = p(K) the kept mass, and q = p / m on K
the distribution that tokens are drawn from. A rollout's `logprob` is log p ("whole"), `drawn` is log q.
"""

import pytest
import torch
from torch import Tensor

from realhf.algorithms.functional import clipped_surrogate, importance_weights, log_ratios
from realhf.engine.generate.sampling import Truncation, replay

TOP_P, CLIP = 0.7, 0.2
# Two prompts: three tokens of the first are kept, with 0.77 of its probability, and two of the second, with 0.95.
LOGITS = torch.tensor([[1.0, 0.8, 0.3, 0.2, -0.4], [1.2, 1.2, -1.5, -3.0, -3.0]], dtype=torch.float64)
REWARDS = torch.tensor([[0.2, 1.0, 0.5, 3.0, 0.1], [1.0, -0.4, 0.6, 0.3, 2.0]], dtype=torch.float64)


def kept_log_mass(logits: Tensor, is_kept: Tensor) -> Tensor:
    """[prompts]: log m of each prompt, of sets of tokens that stay as they are."""
    return logits.log_softmax(-1).masked_fill(~is_kept, -torch.inf).logsumexp(-1)


@pytest.fixture(scope="module")
def drawn():
    """(prompts, tokens, draw) of every pair that can be drawn, and is_kept [prompts, vocab]."""
    is_kept = Truncation(top_p=TOP_P)(LOGITS.log_softmax(-1)).isfinite()
    prompts, tokens = is_kept.nonzero(as_tuple=True)
    assert is_kept.sum(-1).tolist() == [3, 2]
    return prompts, tokens, replay(LOGITS[prompts], tokens, 1.0, Truncation(top_p=TOP_P)), is_kept


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


def test_the_gradient_is_that_of_the_reward_of_what_is_drawn(drawn):
    prompts, tokens, draw, is_kept = drawn
    probability = draw.logprobs.exp()  # q
    mean = torch.zeros(2, dtype=torch.float64).index_add(0, prompts, probability * REWARDS[prompts, tokens])
    advantage = (REWARDS - mean[:, None])[prompts, tokens]  # the baseline is the mean of the group

    def expected_gradient(old: Tensor) -> Tensor:
        logits = LOGITS.clone().requires_grad_()
        logprob = logits.log_softmax(-1)[prompts, tokens]
        loss, _ = clipped_surrogate(log_ratios(logprob, old), advantage, 0.999, 1e6)
        return -gradient((probability * loss).sum(), logits)

    # The oracle: the expected reward of q itself, by autograd.
    logits = LOGITS.clone().requires_grad_()
    q = (logits.log_softmax(-1) - kept_log_mass(logits, is_kept)[:, None]).exp().where(is_kept, 0.0)
    exact = gradient((q * REWARDS).sum(), logits)
    torch.testing.assert_close(expected_gradient(draw.untruncated), exact, rtol=1e-12, atol=1e-12)

    # Divided by q, each prompt is scaled by its kept mass: the sum points elsewhere.
    mass = kept_log_mass(LOGITS, is_kept).exp()
    other = expected_gradient(draw.logprobs)
    torch.testing.assert_close(other, exact * mass[:, None], rtol=1e-12, atol=1e-12)
    assert mass[1] - mass[0] > 0.05


def test_after_a_change_of_the_policy_only_the_change_of_the_kept_mass_is_left(drawn):
    prompts, tokens, draw, is_kept = drawn
    new_logits = LOGITS + torch.tensor([0.3, -0.2, 0.1, 0.0, 0.2], dtype=torch.float64)
    new = new_logits.log_softmax(-1)
    log_mass, new_log_mass = kept_log_mass(LOGITS, is_kept), kept_log_mass(new_logits, is_kept)
    exact = ((new - new_log_mass[:, None]).exp() * REWARDS).where(is_kept, 0.0).sum(-1)  # the mean reward under q

    def estimate(old: Tensor) -> Tensor:
        ratio = log_ratios(new[prompts, tokens], old).exp()
        values = draw.logprobs.exp() * ratio * REWARDS[prompts, tokens]
        return torch.zeros(2, dtype=torch.float64).index_add(0, prompts, values)

    torch.testing.assert_close(estimate(draw.untruncated), exact * (new_log_mass - log_mass).exp())
    torch.testing.assert_close(estimate(draw.logprobs), exact * new_log_mass.exp())
    assert ((new_log_mass - log_mass).exp() - 1).abs().max() < 0.1 < (1 - new_log_mass.exp()).max()


def test_a_policy_that_has_not_changed_is_clipped_by_its_kept_mass(drawn):
    prompts, tokens, draw, _ = drawn
    whole = LOGITS.log_softmax(-1)[prompts, tokens]
    is_first = prompts == 0  # keeps less than 1 - CLIP
    bad = torch.full_like(whole, -1.0)
    _, is_clipped = clipped_surrogate(log_ratios(whole, draw.untruncated), bad, CLIP, CLIP)
    assert not is_clipped.any()
    _, is_clipped = clipped_surrogate(log_ratios(whole, draw.logprobs), bad, CLIP, CLIP)
    assert is_clipped[is_first].all()


def test_a_response_has_the_product_of_its_kept_masses(drawn):
    """Ten tokens at the first prompt: the weight of a whole response is 1 here, else next to nothing."""
    _, _, draw, is_kept = drawn
    tokens, lengths = slice(0, 1), torch.tensor([10])
    whole, of_kept = draw.untruncated[tokens].expand(10), draw.logprobs[tokens].expand(10)

    def weight(drawn: Tensor) -> float:
        return importance_weights(drawn, whole, lengths, "sequence_truncate", (0.0, 2.0))[0].item()

    assert weight(whole) == 1
    assert weight(of_kept) == pytest.approx((10 * kept_log_mass(LOGITS, is_kept)[0]).exp().item())
    assert weight(of_kept) < 0.1
    assert not importance_weights(of_kept, whole, lengths, "sequence_mask", (0.5, 2.0)).any()
