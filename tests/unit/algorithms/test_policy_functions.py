"""Surrogates, importance weights, penalties and controllers against numbers worked out by hand."""

import math

import pytest
import torch
from torch import tensor

from realhf.algorithms import functional as F
from tests.unit.algorithms.rollouts import f64


def assert_close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


def slope(loss, ratio: float, advantage: float):
    """(loss, its derivative by the log-ratio) of one token."""
    log_ratio = f64(math.log(ratio)).requires_grad_()
    value = loss(log_ratio, f64(advantage))
    value.sum().backward()
    return value.item(), log_ratio.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.25, 1.0, -1.25, False, -1.25),  # clip_low 0.2, clip_high 0.3: still free
        (1.5, 1.0, -1.3, True, 0.0),
        (0.5, -2.0, 1.6, True, 0.0),  # 0.8 x 2
        (3.0, -2.0, 6.0, False, 6.0),
        (5.0, -2.0, 8.0, True, 0.0),  # delta 4: 4 x 2
        (0.5, 2.0, -1.0, False, -1.0),
        (0.5, -1e-16, 8e-17, False, 0.0),  # an advantage whose sign is that of rounding
        (0.5, -(2.0**-48), 0.8 * 2.0**-48, False, 0.0),
        (5.0, 1e-16, -1.3e-16, False, 0.0),
        (5.0, -1e-16, 4e-16, False, 0.0),
        (0.5, -15.5 * 2.0**-52, 12.4 * 2.0**-52, False, 0.0),  # as much as 16 times float64's rounding
        (0.5, -16.5 * 2.0**-52, 13.2 * 2.0**-52, True, 0.0),
        (1.5, 15.5 * 2.0**-52, -20.15 * 2.0**-52, False, 0.0),
        (1.5, 16.5 * 2.0**-52, -21.45 * 2.0**-52, True, 0.0),
    ],
)
def test_clipped_surrogate(ratio, advantage, loss, clipped, gradient):
    def of(log_ratio, a):
        value, is_clipped = F.clipped_surrogate(log_ratio, a, 0.2, 0.3, delta=4.0)
        assert is_clipped.tolist() == [clipped]
        return value

    assert slope(of, ratio, advantage) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "loss", "clipped"),
    [(2.0, 2.0, False), (2.9, 2.9, False), (7.0, 3.0, True)],  # A = -1: -ratio * A, at most 3
)
def test_dual_clip(ratio, loss, clipped):
    logprob = f64(math.log(ratio)).requires_grad_()
    value, is_clipped = F.ppo_policy_loss(logprob, f64(0.0), f64(-1.0), clip=0.2, dual_clip=3.0)
    assert_close(value.detach(), [loss])
    assert is_clipped.tolist() == [clipped]
    value.sum().backward()
    assert_close(logprob.grad, [0.0 if clipped else ratio])


def test_a_ratio_at_its_bound_is_not_clipped():
    zero = f64(0.0, 0.0)
    assert not F.clipped_surrogate(zero, f64(1.0, -1.0), 0.0, 0.0)[1].any()
    assert not F.clipped_surrogate(zero, f64(1.0, -1.0), 0.0, 0.0, delta=1.0)[1].any()
    assert not F.cispo_loss(zero, zero, f64(1.0, -1.0), ratio_cap=1.0)[1].any()
    assert not F.cispo_loss(zero + 1, zero, f64(0.0, -1.0), ratio_cap=1.0)[1].any()  # without an advantage
    assert not F.ppo_policy_loss(zero, zero, f64(1.0, -1.0), clip=0.0, dual_clip=1.0)[1].any()


def test_dual_clip_leaves_good_tokens_alone():
    logprob = f64(0.0, math.log(0.5)).requires_grad_()
    value, is_clipped = F.ppo_policy_loss(logprob, f64(0.0, 0.0), f64(0.5, 0.25), clip=0.2, dual_clip=3.0)
    assert_close(value.detach(), [-0.5, -0.125])
    assert not is_clipped.any()
    value.sum().backward()
    assert_close(logprob.grad, [-0.5, -0.125])


def test_cispo_keeps_the_gradient_of_every_token():
    # min(ratio, 2) x A is a constant beside logprob: the slope is -min(ratio, 2) * A.
    logprob = f64(math.log(3), math.log(0.5)).requires_grad_()
    loss, is_capped = F.cispo_loss(logprob - f64(0.0, 0.0), logprob, f64(1.0, -4.0), ratio_cap=2.0)
    assert_close(loss.detach(), [-2 * math.log(3), 0.5 * 4 * math.log(0.5)])
    assert is_capped.tolist() == [True, False]
    loss.sum().backward()
    assert_close(logprob.grad, [-2.0, 2.0])


def test_sapo_is_reinforce_at_a_ratio_of_one():
    # 4/t sigmoid(0) = 2/t, and its slope by the ratio is 4 x 1/4 = 1, whatever the temperature.
    def of(log_ratio, a):
        return F.sapo_loss(log_ratio, a, 1.0, 2.0)

    assert slope(of, 1.0, 3.0) == pytest.approx((-6.0, -3.0))
    assert slope(of, 1.0, -3.0) == pytest.approx((3.0, 3.0))
    assert abs(slope(of, 8.0, 3.0)[1]) < 0.2  # 8 x 4 s (1 - s) x 3 with s = sigmoid(7)


def test_vespo_weight():
    # w = 2, k = 2, lambda = 3: 4 x exp(-3); A < 0 with k = 3, lambda = 2: 8 x exp(-2).
    log_w, logprob = f64(math.log(2), math.log(2)), f64(-1.0, -1.0).requires_grad_()
    loss = F.vespo_loss(log_w, logprob, f64(1.0, -1.0), (2.0, 3.0), (3.0, 2.0))
    assert_close(loss.detach(), [4 * math.exp(-3), -8 * math.exp(-2)])
    loss.sum().backward()
    assert_close(logprob.grad, [-4 * math.exp(-3), 8 * math.exp(-2)])


def test_weights_of_vespo_are_bounded_and_without_gradient():
    # w to the power 1: e^20 at most, 1e-8 at least.
    log_w, logprob = f64(30.0, 20.5, 19.5, -25.0).requires_grad_(), f64(-1.0, -1.0, -1.0, -1.0).requires_grad_()
    loss = F.vespo_loss(log_w, logprob, f64(1.0, 1.0, 1.0, -1.0), (1.0, 0.0), (1.0, 0.0))
    assert_close(loss.detach(), [math.exp(20), math.exp(20), math.exp(19.5), -1e-8])
    loss.sum().backward()
    assert log_w.grad is None
    assert_close(logprob.grad, [-math.exp(20), -math.exp(20), -math.exp(19.5), 1e-8])
    # A token's own log-ratio is held within 20, and its importance from 1e-8 to e^20.
    x, lengths = f64(25.0, -30.0, 19.5, -19.5, 20.5).requires_grad_(), tensor([2, 2, 1])
    total = F.sequence_log_weight(x, None, lengths)
    assert not total.requires_grad
    assert_close(total, [0, 0, 0, 0, 20])
    importance = f64(25.0, -math.inf, 19.5, 20.5, -18.0)
    low = math.log(1e-8)
    assert_close(F.sequence_log_weight(x, importance, lengths), [20 + low, 20 + low, 39.5, 39.5, 2.0])
    # Sums and weights are those of float64: 1000 tokens of 0.1, where float32 would be off by more.
    many = torch.full((1000,), 0.01)
    total = F.sequence_log_weight(many, many, tensor([1000]))
    assert_close(total, torch.full((1000,), 2 * 1000 * many[0].item(), dtype=torch.float64), 1e-12)
    found = F.vespo_loss(f64(0.3).float(), f64(-1.0), f64(1.0), (2.0, 3.0), (3.0, 2.0))
    assert_close(found, [math.exp(3 + 2 * f64(0.3).float().item() - 3 * math.exp(f64(0.3).float().item()))], 1e-12)


def test_ratios_of_sequences():
    # Responses of 2 and 3 tokens: means 2 and 1, sums 4 and 3.
    x, lengths = f64(1.0, 3.0, 0.0, 0.0, 3.0).requires_grad_(), tensor([2, 3])
    assert_close(F.sequence_log_ratio(x, lengths).detach(), [2, 2, 1, 1, 1])
    assert_close(F.sequence_log_weight(x, None, lengths).detach(), [4, 4, 3, 3, 3])
    assert_close(F.sequence_log_weight(x, f64(1.0, 0.0, 0.0, 0.0, 2.0), lengths).detach(), [5, 5, 5, 5, 5])
    weights = f64(1.0, 10.0, 1.0, 1.0, 1.0)
    (F.sequence_log_ratio(x, lengths) * weights).sum().backward()
    assert_close(x.grad, [5.5, 5.5, 1, 1, 1])
    # GSPO-token: the same numbers, and each token has its own gradient.
    x.grad = None
    token = F.sequence_token_log_ratio(x, x, lengths)
    assert_close(token.detach(), [2, 2, 1, 1, 1])
    (token * weights).sum().backward()
    assert_close(x.grad, weights)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [1, 1, 1]),
        ("token_truncate", [2.0, 0.5, 1.0]),  # ratios 4, 0.25, 1 within 0.5 and 2
        ("token_mask", [0, 0, 1]),
        ("sequence_truncate", [1.0, 1.0, 1.0]),  # 4 x 0.25 = 1, and 1
        ("sequence_mask", [1.0, 1.0, 1.0]),
    ],
)
def test_importance_weights(correction, expected):
    old = f64(math.log(0.4), math.log(0.1), -1.0).requires_grad_()
    drawn = f64(math.log(0.1), math.log(0.4), -1.0)
    weights = F.importance_weights(drawn, old, tensor([2, 1]), correction, (0.5, 2.0))
    assert_close(weights, expected)
    assert not weights.requires_grad


def test_weights_at_their_bounds_are_within_them():
    for correction in ("token_mask", "sequence_mask"):
        for bounds in ((1.0, 2.0), (0.0, 1.0)):
            assert F.importance_weights(f64(-1.0), f64(-1.0), tensor([1]), correction, bounds).tolist() == [1.0]


def test_responses_from_which_the_policy_has_moved_away():
    # The first response: mean of drawn - logprob is (1 + 3) / 2 = 2; the second 0.
    drawn, logprob = f64(1.0, 3.0, 0.0), f64(0.0, 0.0, 0.0)
    lengths = tensor([2, 1])
    assert F.is_near_policy(f64(-1, -1, -1), logprob, drawn, lengths, 1.5).tolist() == [False, False, True]
    assert F.is_near_policy(f64(1, 1, -1), logprob, drawn, lengths, 1.5).all()
    assert F.is_near_policy(f64(-1, -1, -1), logprob, drawn, lengths, 2.5).all()
    assert F.is_near_policy(f64(-1, -1, -1), logprob, drawn, lengths, 2.0).all()  # no further than the threshold
    assert F.is_near_policy(f64(0, 0, 0), logprob, drawn, lengths, 1.5).all()


def test_estimates_of_the_divergence():
    p, q = f64(-1.0, -2.0), f64(-1.5, -1.0)
    assert_close(F.kl_estimate("k1", p, q), [0.5, -1.0])
    assert_close(F.kl_estimate("k2", p, q), [0.125, 0.5])
    assert_close(F.kl_estimate("k3", p, q), [math.exp(-0.5) - 0.5, math.e - 2])


def test_the_mean_of_the_estimates_is_the_divergence():
    p, q = tensor([0.7, 0.3], dtype=torch.float64), tensor([0.4, 0.6], dtype=torch.float64)
    divergence = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert_close((p * F.kl_estimate(estimator, p.log(), q.log())).sum(), divergence)


def test_kl_controller():
    # 12 / 6 - 1 = 1 is clipped to 0.2: 0.1 x (1 + 0.2 x 100 / 1000).
    assert F.adapted_kl_coef(0.1, 12.0, 6.0, 100, 1000) == pytest.approx(0.102)
    assert F.adapted_kl_coef(0.1, 6.6, 6.0, 100, 1000) == pytest.approx(0.101)
    assert F.adapted_kl_coef(0.1, 0.0, 6.0, 100, 1000) == pytest.approx(0.098)
    assert F.adapted_kl_coef(0.1, 6.0, 6.0, 100, 1000) == 0.1
    # More samples than the horizon count as many as it: at most 20 %, and never a negative coefficient.
    assert F.adapted_kl_coef(0.1, 0.0, 6.0, 9000, 1000) == pytest.approx(0.08)
    assert F.adapted_kl_coef(0.1, 12.0, 6.0, 1000, 1000) == pytest.approx(0.12)


def test_multiplier():
    # log lambda 0, lambda 1: + 0.5 x (3 - 1); then held at log 2.
    assert F.updated_multiplier(0.0, 3.0, 1.0, 0.5, 100.0) == pytest.approx(1.0)
    assert F.updated_multiplier(0.0, 3.0, 1.0, 0.5, 2.0) == pytest.approx(math.log(2))
    assert F.updated_multiplier(math.log(2), 0.0, 1.0, 0.5, 9.0) == pytest.approx(math.log(2) - 1.0)
    assert_close(F.constrained_advantage(f64(1.0), f64(2.0), 3.0), [-1.25])  # (1 - 6) / 4


def test_value_scale():
    scale = F.ValueScale()
    assert (scale.mean, scale.std) == (0.0, 1.0)
    # Returns 1 and 3: mean 2, squares 5, variance 1; one update takes them as they are.
    scale = scale.updated(2.0, 5.0, decay=0.9)
    assert (scale.mean, scale.std) == pytest.approx((2.0, 1.0))
    # Then mean 4, squares 25: mean (0.9 x 0.2 + 0.1 x 4) / 0.19, squares (0.9 x 0.5 + 2.5) / 0.19.
    scale = scale.updated(4.0, 25.0, decay=0.9)
    mean = 0.58 / 0.19
    assert (scale.mean, scale.std) == pytest.approx((mean, math.sqrt(2.95 / 0.19 - mean**2)))
    x = f64(1.0, -2.0)
    assert_close(scale.restore(scale.normalise(x)), x)
    assert scale.normalise(x.float()).dtype == torch.float32
    assert F.standardised(x.float(), 0.5, 2.0).dtype == torch.float32


def test_rewards_to_go():
    assert [x.tolist() for x in F.rewards_to_go([f64(1, 2, 4), f64(8)], 0.5)] == [[3, 4, 4], [8]]


def test_spreads_of_samples_make_that_of_all_their_tokens():
    # 1, 2 and 6; the other samples do not count or have no token. Mean 3, squares 4 + 1 + 9.
    samples = [f64(), f64(1, 2), f64(5), f64(6)]
    rows = F.sample_spreads(samples, tensor([True, True, False, True]))
    assert rows.tolist() == [[0, 0, 0], [2, 1.5, 0.5], [0, 0, 0], [1, 6, 0]]
    assert F.spread_of(rows) == F.Spread(3.0, 14 / 3, 3.0)
    assert F.spread_of(rows[[2]]) == F.Spread(0.0, 0.0, 0.0)
    whitened = F.standardised(samples[1], 3.0, 14 / 3 - 1e-8)
    assert_close(whitened, [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3)])


@pytest.mark.parametrize(
    ("kind", "smoothing", "expected"),
    [
        # beta x margin = ln 3: sigmoid 3/4.
        ("sigmoid", 0.0, math.log(4 / 3)),
        ("sigmoid", 0.1, 0.9 * math.log(4 / 3) + 0.1 * math.log(4)),
        ("robust", 0.1, (0.9 * math.log(4 / 3) - 0.1 * math.log(4)) / 0.8),
        ("hinge", 0.0, 0.0),
        ("ipo", 0.0, (2 * math.log(3) - 1) ** 2),  # beta 1/2: the margin should be 1
    ],
)
def test_dpo(kind, smoothing, expected):
    margin = f64(2 * math.log(3)).requires_grad_()
    loss = F.dpo_loss(kind, margin, 0.5, smoothing)
    assert_close(loss.detach(), [expected])


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "hinge", "ipo"])
def test_dpo_raises_a_margin_of_zero(kind):
    margin = f64(0.0).requires_grad_()
    F.dpo_loss(kind, margin, 0.1, 0.0 if kind == "ipo" else 0.2).sum().backward()
    assert margin.grad.item() < 0


def test_scores_with_margin_and_centring():
    # 2 - 1 - (1 - ln 3) = ln 3; centred at c = 0.1: 0.1 x 3^2.
    loss = F.margin_loss(f64(2.0), f64(1.0), f64(1 - math.log(3)), centre_coef=0.1)
    assert_close(loss, [math.log(4 / 3) + 0.9])


def test_costs_of_pairs():
    # The safer one costs 0, the other ln 3: ln(4/3); signs: unknown, unsafe: ln(4/3) again.
    loss = F.safe_pairwise_loss(f64(0.0), f64(math.log(3)), f64(0.0), f64(1.0))
    assert_close(loss, [2 * math.log(4 / 3)])
    loss = F.safe_pairwise_loss(f64(0.0), f64(math.log(3)), f64(-1.0), f64(0.0))
    assert_close(loss, [math.log(4 / 3) + math.log(2)])


def test_a_margin_without_end_has_no_loss():
    assert F.dpo_loss("sigmoid", f64(math.inf, -math.inf), 0.1).tolist() == [0.0, math.inf]
