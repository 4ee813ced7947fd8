"""The mathematics of the algorithms against numbers worked out by hand."""

import math

import pytest
import torch
from torch import tensor

from realhf.algorithms import functional as F
from tests.unit.algorithms.rollouts import f64


def assert_close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


def test_predicting_positions_are_one_before_each_response_token():
    # Sequence 0 is tokens 0..4 with a prompt of 2: its response 2, 3, 4 is predicted at 1, 2, 3.
    # Sequence 1 is tokens 5..7 with a prompt of 1: its response 6, 7 is predicted at 5, 6.
    assert F.predicting_positions([5, 3], [2, 1], torch.device("cpu")).tolist() == [1, 2, 3, 5, 6]
    assert F.last_positions([5, 3], torch.device("cpu")).tolist() == [4, 7]


def test_token_logprobs_under_a_temperature():
    # softmax([0, ln 3]) = [1/4, 3/4]; at temperature 1/2 the logits double: [0, ln 9] -> [1/10, 9/10].
    logits = torch.stack([f64(0, math.log(3)), f64(0, math.log(3))])
    tokens = tensor([0, 1])
    assert_close(F.token_logprobs(logits, tokens), [math.log(1 / 4), math.log(3 / 4)])
    assert_close(F.token_logprobs(logits, tokens, 0.5), [math.log(1 / 10), math.log(9 / 10)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_token_logprobs_have_at_least_fp32(given, expected):
    assert F.token_logprobs(torch.zeros(2, 4, dtype=given), tensor([1, 2])).dtype == expected


def test_kl_estimates():
    # p = 1/2, q = 1/4: k1 = ln(p/q) = ln 2; r = q/p = 1/2, k3 = 1/2 - 1 - ln(1/2) = ln 2 - 1/2.
    # p = 1/4, q = 1/2: k1 = -ln 2;        r = 2,         k3 = 2 - 1 - ln 2     = 1 - ln 2.
    p, q = f64(0.5, 0.25).log(), f64(0.25, 0.5).log()
    assert_close(F.kl_k1(p, q), [math.log(2), -math.log(2)])
    assert_close(F.kl_k3(p, q), [math.log(2) - 0.5, 1 - math.log(2)])


def test_standardised_score_is_clipped_after_standardising():
    # (7 - 1) / 2 = 3; (13 - 1) / 2 = 6 -> 5; (-11 - 1) / 2 = -6 -> -5.
    for score, expected in ((7, 3), (13, 5), (-11, -5)):
        assert_close(F.standardised_score(f64(score), mean=1, std=2, clip=5), [expected])
    # Of tokens the mean of responses is taken from the last one alone: 7/2, 13/2, (7 - 1)/2.
    assert_close(F.standardised_score(f64(7, 13, 7), mean=1, std=2, clip=5), [3.5, 5, 3])


def test_kl_penalised_rewards():
    # -0.1 * (-1 - -2) = -0.1; -0.1 * (-3 - -1) = 0.2; -0.1 * (-2 - -2) = 0, plus the score 4 at the end.
    logprob, ref = f64(-1, -3, -2), f64(-2, -1, -2)
    assert_close(F.kl_penalised_rewards(f64(4), logprob, ref, kl_coef=0.1), [-0.1, 0.2, 4.0])
    assert_close(F.kl_penalised_rewards(f64(1, 2, 4), logprob, ref, kl_coef=0.1), [0.9, 2.2, 4.0])
    assert_close(logprob, [-1, -3, -2])  # the input is left as it was


def test_gae_of_two_responses_of_different_lengths():
    # gamma = 0.9, lambda = 0.5, gamma * lambda = 0.45.
    # Response 0: r = [1, 0, 2], V = [0.5, 1, 1.5]
    #   delta_2 = 2 + 0       - 1.5 = 0.5              A_2 = 0.5
    #   delta_1 = 0 + 0.9*1.5 - 1   = 0.35             A_1 = 0.35 + 0.45 * 0.5   = 0.575
    #   delta_0 = 1 + 0.9*1   - 0.5 = 1.4              A_0 = 1.4  + 0.45 * 0.575 = 1.65875
    #   returns = A + V = [2.15875, 1.575, 2.0]
    # Response 1, one token: r = [3], V = [4]: A = 3 - 4 = -1, return 3. It ends here: no value behind it.
    advantages, returns = F.gae([f64(1, 0, 2), f64(3)], [f64(0.5, 1, 1.5), f64(4)], gamma=0.9, lam=0.5)
    assert_close(advantages[0], [1.65875, 0.575, 0.5])
    assert_close(returns[0], [2.15875, 1.575, 2.0])
    assert_close(advantages[1], [-1])
    assert_close(returns[1], [3])


def test_gae_with_lambda_1_and_gamma_1_is_reward_to_go_minus_value():
    rewards, values = f64(0.5, -1, 2, 0.25), f64(3, 1, -2, 0.5)
    advantages, returns = F.gae([rewards], [values], gamma=1, lam=1)
    # Sums from each token to the end: 0.25, 2.25, 1.25, 1.75 (from the back).
    assert_close(returns[0], [1.75, 1.25, 2.25, 0.25])
    assert_close(advantages[0], [-1.25, 0.25, 4.25, -0.25])


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 200])
def test_discounted_sums_are_those_of_the_recurrence(length):
    torch.manual_seed(length)
    x = torch.randn(3, length, dtype=torch.float64)
    found, expected = F.discounted_sums(x, 0.93), x.clone()
    for j in reversed(range(length - 1)):
        expected[:, j] += 0.93 * expected[:, j + 1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gae_does_not_depend_on_the_company_in_the_batch():
    torch.manual_seed(0)
    rewards = [torch.randn(n, dtype=torch.float64) for n in (3, 7, 1)]
    values = [torch.randn(n, dtype=torch.float64) for n in (3, 7, 1)]
    together = F.gae(rewards, values, 0.97, 0.9)[0]
    alone = [F.gae([r], [v], 0.97, 0.9)[0][0] for r, v in zip(rewards, values, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_the_moments_of_two_ranks():
    # Ranks hold [1, 2] and [3, 6]: sum 12, squares 1 + 4 + 9 + 36 = 50, count 4.
    assert (F.moments(f64(1, 2)) + F.moments(f64(3, 6))).tolist() == [12, 50, 4]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        # clip 0.2. The gradient with respect to logprob is -ratio * A, or 0 where the clip holds.
        (1.0, 2.0, -2.0, False, -2.0),
        (1.5, 2.0, -2.4, True, 0.0),  # max(-3.0, -1.2 * 2)
        (0.5, 2.0, -1.0, False, -1.0),  # max(-1.0, -0.8 * 2): a good token that became rare is still pulled up
        (1.5, -2.0, 3.0, False, 3.0),  # max(3.0, 2.4): a bad token that became likely is still pushed down
        (0.5, -2.0, 1.6, True, 0.0),  # max(1.0, 0.8 * 2)
    ],
)
def test_ppo_policy_loss(ratio, advantage, loss, clipped, gradient):
    old = f64(-1.0)
    logprob = (old + math.log(ratio)).requires_grad_()
    value, is_clipped = F.ppo_policy_loss(logprob, old, f64(advantage), clip=0.2)
    assert_close(value.detach(), [loss])
    assert is_clipped.tolist() == [clipped]
    value.sum().backward()
    assert_close(logprob.grad, [gradient])


@pytest.mark.parametrize(
    ("value", "old", "returns", "loss", "clipped", "gradient"),
    [
        # clip 0.2; the gradient is V - R, or 0 where the clipped error is the larger one.
        (1.1, 1.0, 2.0, 0.405, False, -0.9),  # both 0.9^2 / 2
        (1.5, 1.0, 2.0, 0.32, True, 0.0),  # free 0.5^2, clipped (1.2 - 2)^2 = 0.64
        (0.5, 1.0, 2.0, 1.125, False, -1.5),  # free 1.5^2 = 2.25, clipped (0.8 - 2)^2 = 1.44
        (0.5, 1.0, 0.0, 0.32, True, 0.0),  # free 0.25, clipped 0.8^2
    ],
)
def test_clipped_value_loss(value, old, returns, loss, clipped, gradient):
    v = f64(value).requires_grad_()
    result, is_clipped = F.clipped_value_loss(v, f64(old), f64(returns), clip=0.2)
    assert_close(result.detach(), [loss])
    assert is_clipped.tolist() == [clipped]
    result.sum().backward()
    assert_close(v.grad, [gradient])


def test_margin_loss():
    # Margins 0 and ln 3: sigmoid = 1/2 and 3/4, losses ln 2 and ln(4/3).
    assert_close(F.margin_loss(f64(2, math.log(3)), f64(2, 0)), [math.log(2), math.log(4 / 3)])


def test_what_is_not_given_changes_nothing():
    chosen, rejected = f64(1), f64(-2)
    assert_close(F.margin_loss(chosen, rejected), [math.log1p(math.exp(-3))])
    for kind in ("sigmoid", "robust"):
        assert_close(F.dpo_loss(kind, f64(0.5), 2.0), [math.log1p(math.exp(-1))])
    assert_close(F.rewards_to_go([f64(1, 2)])[0], [3, 2])
    loss, is_clipped = F.clipped_surrogate(f64(math.log(100)), f64(-1), 0.2, 0.2)
    assert_close(loss, [100])
    assert not is_clipped.any()
    found = F.token_statistics(f64(0, math.log(3))[None], tensor([1]))
    assert_close(found.logprob, [math.log(3 / 4)])
    assert found.entropy is None
    found = F.token_statistics(f64(0, math.log(3))[None], tensor([1]), 0.5, with_entropy=True)
    assert_close(found.entropy, [0.9 * math.log(10 / 9) + 0.1 * math.log(10)])
    assert found.is_top.tolist() == [True]


def test_a_variance_of_zero_counts_as_one_of_a_hundred_millionth():
    assert_close(F.standardised(f64(3), 1.0, 0.0), [2e4], tolerance=1e-6)
    assert_close(F.standardised(f64(3), 1.0, 0.0, 0.25), [4])
