"""Extreme numbers: what float32 gives is what float64 gives, and always finite; equal rewards; empty responses."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.clipped import clipped_policy
from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.grpo.functions import group_advantages, grpo_policy
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.ppo.functions import ppo_advantages, ppo_policy, ppo_value
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus
from realhf.algorithms.reinforce_pp.functions import reinforce_pp_advantages, reinforce_pp_policy
from realhf.algorithms.remax.config import ReMax
from realhf.algorithms.remax.functions import remax_advantages
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.rloo.functions import rloo_advantages, rloo_policy
from realhf.algorithms.safe_rlhf.config import SafeRLHF
from realhf.algorithms.safe_rlhf.functions import safe_advantages
from realhf.engine.batch import Batch
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.rollouts import LENGTHS, batch_of, columns_of, random_columns

LARGEST = torch.finfo(torch.float32).max


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# --- Losses of one token: (loss, derivative by its log-probability) from log-ratio and advantage, in closed form.

Slope = tuple[float, float]


def surrogate(x: float, a: float, low: float, high: float, most: float = math.inf) -> Slope:
    """The clipped surrogate; `most` bounds the ratio of bad tokens."""
    ratio = math.exp(x)
    if a > 0:
        return (-ratio * a, -ratio * a) if ratio <= 1 + high else (-(1 + high) * a, 0.0)
    if ratio < 1 - low:
        return -(1 - low) * a, 0.0
    return (-ratio * a, -ratio * a) if ratio <= most else (-most * a, 0.0)


def sapo(x: float, a: float) -> Slope:
    t = 1.0 if a > 0 else 1.5
    gate = 1 / (1 + math.exp(min(-t * math.expm1(x), 700.0)))
    return -4 / t * gate * a, -4 * gate * (1 - gate) * math.exp(x) * a


def cispo(x: float, a: float) -> Slope:
    """At a log-probability of -1."""
    weight = min(math.exp(x), 3.0)
    return weight * a, -weight * a


Loss = Callable[[Tensor, Tensor], Tensor]  # of log-ratio and advantage
LOSSES: dict[str, tuple[Loss, Callable[[float, float], Slope]]] = {
    "ppo": (lambda x, a: F.ppo_policy_loss(x, 0 * x.detach(), a, 0.2)[0], lambda x, a: surrogate(x, a, 0.2, 0.2)),
    "ppo_dual_clip": (
        lambda x, a: F.ppo_policy_loss(x, 0 * x.detach(), a, 0.2, 3.0)[0],
        lambda x, a: surrogate(x, a, 0.2, 0.2, 3.0),
    ),
    "surrogate": (
        lambda x, a: F.clipped_surrogate(x, a, 0.1, 0.3)[0],
        lambda x, a: surrogate(x, a, 0.1, 0.3),
    ),
    "two_sided": (
        lambda x, a: F.clipped_surrogate(x, a, 0.1, 0.3, 4.0)[0],
        lambda x, a: surrogate(x, a, 0.1, 0.3, 4.0),
    ),
    "sapo": (lambda x, a: F.sapo_loss(x, a, 1.0, 1.5), sapo),
    "cispo": (lambda x, a: F.cispo_loss(x.detach(), x - x.detach() - 1, a, 3.0)[0], cispo),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40)
@given(x=st.floats(-200, 200, width=32), a=st.floats(-10, 10, width=32))
@example(x=89.0, a=1.0)
@example(x=89.0, a=-1.0)
@example(x=200.0, a=2.0)
@example(x=-200.0, a=-2.0)
def test_losses_of_extreme_ratios(name: str, x: float, a: float) -> None:
    loss, in_closed_form = LOSSES[name]
    log_ratio = f32(x).requires_grad_()
    value = loss(log_ratio, f32(a))
    value.sum().backward()
    expected, slope = in_closed_form(x, a)
    assert value.item() == pytest.approx(expected, rel=1e-6, abs=1e-40)
    assert log_ratio.grad.item() == pytest.approx(min(max(slope, -LARGEST), LARGEST), rel=1e-6, abs=1e-40)


@settings(max_examples=60)
@given(p=st.floats(-200, 0, width=32), q=st.floats(-200, 0, width=32))
@example(p=-200.0, q=0.0)
@example(p=-0.30000001192092896, q=-0.30000004172325134)
def test_the_estimate_k3_is_never_negative(p: float, q: float) -> None:
    logprob = f32(p).requires_grad_()
    kl = F.kl_k3(logprob, f32(q))
    kl.sum().backward()
    x = q - p
    series = x * x / 2 + x**3 / 6 + x**4 / 24
    assert kl.item() >= 0
    assert kl.item() == pytest.approx(series if abs(x) < 1e-3 else math.expm1(x) - x, rel=1e-8)
    assert logprob.grad.item() == pytest.approx(max(-math.expm1(x), -LARGEST), rel=1e-6, abs=1e-12)


def test_k3_of_float64_is_never_negative() -> None:
    distances = torch.logspace(-18, 2, 400, dtype=torch.float64)
    for x in (distances, -distances):
        assert (F.kl_k3(torch.zeros_like(x), x) >= 0).all()


def test_log_ratios_beyond_all_exponents() -> None:
    """They count as the largest one, and keep their gradient: a ratio is never infinite, in float64 neither."""
    x = torch.tensor([1e4, -1e4, 300.0], dtype=torch.float64, requires_grad=True)
    found = F.ratios(x)
    assert found.tolist() == pytest.approx([math.exp(300), 0.0, math.exp(300)])
    found.sum().backward()
    assert x.grad.tolist() == pytest.approx([math.exp(300), 0.0, math.exp(300)])
    assert F.log_ratios(f32(1e4), f32(0)).tolist() == [1e4]  # sums are of the numbers as they are


# --- Algorithms on rollouts.

RATIOS: dict[str, Callable[[Tensor, Batch], Any]] = {
    **{
        f"grpo-{loss_type}-{ratio}": lambda p, b, loss_type=loss_type, ratio=ratio: grpo_policy(
            p, b, GRPO(loss_type=loss_type, ratio=ratio, beta=0.1, delta=0.0 if loss_type == "grpo" else 5.0)
        )
        for loss_type in ("grpo", "dapo", "cispo", "sapo", "vespo")
        for ratio in ("token", "sequence", "sequence_token")
    },
    "grpo-plain-kl": lambda p, b: grpo_policy(p, b, GRPO(beta=0.1, unbiased_kl=False, off_policy_threshold=0.5)),
    "ppo": lambda p, b: ppo_policy(p, b, PPOHyperparameters()),
    "ppo-dual-clip": lambda p, b: ppo_policy(p, b, PPOHyperparameters(dual_clip=3.0)),
    "safe-rlhf": lambda p, b: ppo_policy(p, b, SafeRLHF()),
    "rloo": lambda p, b: rloo_policy(p, b, RLOO()),
    "reinforce++": lambda p, b: reinforce_pp_policy(p, b, ReinforcePlusPlus()),
    "reinforce++-group": lambda p, b: reinforce_pp_policy(
        p, b, ReinforcePlusPlus(baseline="group", samples_per_prompt=2)
    ),
    "remax": lambda p, b: clipped_policy(p, b, ReMax()),
}


def in_float32(data: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {key: [x.float() if x.is_floating_point() else x for x in column] for key, column in data.items()}


def in_float64(data: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {key: [x.double() if x.is_floating_point() else x for x in column] for key, column in data.items()}


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("spread", [0.1, 20.0, 200.0])
def test_gradients_on_rollouts_are_those_of_float64(name: str, spread: float) -> None:
    """Log-ratios of tokens of up to some hundreds, responses that add them up, a weight of importance."""
    given = in_float32(random_columns(3, spread=spread))
    given["importance"] = [x.exp().clamp(0, 2) for x in given["logprob"]]
    given["advantage"] = [torch.full_like(x, 1.5 if i % 2 else -0.5) for i, x in enumerate(given["logprob"])]
    found = []
    for data in (given, in_float64(given)):
        logprob = torch.cat(data["new_logprob"]).requires_grad_()
        batch = batch_of(data, "logprob", "ref_logprob", "importance", "advantage")
        loss, stats = RATIOS[name](logprob, batch)
        assert loss.isfinite().all()
        assert all(math.isfinite(total) for total, _ in stats.values())
        loss.sum().backward()
        found.append((loss.detach().double(), logprob.grad))
    (loss, gradient), (expected_loss, expected) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-30)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient.double(), expected.clamp(-LARGEST, LARGEST), rtol=1e-5, atol=1e-30)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_of_extreme_ratios(correction: str) -> None:
    # Sums of the responses: 200, 0 and -200.
    old, drawn, lengths = f32(100, 100, 90, -90, -200), f32(0, 0, 0, 0, 0), torch.tensor([2, 2, 1])
    weights = F.importance_weights(drawn, old, lengths, correction, (0.0, 2.0))
    expected = {
        "token_truncate": [2, 2, 2, 0, 0],
        "token_mask": [0, 0, 0, 0, 0],
        "sequence_truncate": [2, 2, 1, 1, 0],
        "sequence_mask": [0, 0, 1, 1, 0],
    }
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected[correction])


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "hinge", "ipo"])
@pytest.mark.parametrize("margin", [-2e4, -200.0, 0.0, 200.0, 2e4])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_preferences_of_extreme_margins(kind: Any, margin: float, smoothing: float) -> None:
    if smoothing and kind in ("hinge", "ipo"):
        return
    found = []
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([margin], dtype=dtype, requires_grad=True)
        F.dpo_loss(kind, x, 0.5, smoothing).sum().backward()
        found.append(x.grad.item())
    assert math.isfinite(found[0])
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-30)


# --- Equal rewards, and nearly equal ones.

GROUPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": lambda r, v: F.group_advantages(r, v, "group"),
    "batch": lambda r, v: F.group_advantages(r, v, "batch"),
    "none": lambda r, v: F.group_advantages(r, v, "none"),
    "centred": F.centred_in_groups,
    "leave_one_out": F.leave_one_out_advantages,
    "normalised": F.normalised,
}
SINGLE = st.floats(-(2.0**120), 2.0**120, width=32)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=30)
@given(reward=SINGLE, size=st.integers(1, 33), groups=st.integers(1, 3), seed=st.integers(0, 9))
@example(reward=100.0999984741211, size=7, groups=1, seed=0)
@example(reward=12345.677734375, size=16, groups=2, seed=0)
def test_equal_rewards_have_no_advantage(
    name: str, dtype: torch.dtype, reward: float, size: int, groups: int, seed: int
) -> None:
    exact = reward if dtype == torch.float32 else reward / 3  # whose multiples are rounded, too
    rewards = torch.full((groups, size), exact, dtype=dtype)
    some = torch.rand(groups, size, generator=torch.Generator().manual_seed(seed)) < 0.7
    for valid in (torch.ones_like(some), some, torch.zeros_like(some)):
        found = GROUPED[name](rewards, valid)
        assert found.dtype == dtype
        assert (found == 0).all()


@settings(max_examples=40)
@given(base=st.floats(1, 1e6, width=32), steps=st.lists(st.integers(0, 40), min_size=2, max_size=12))
def test_nearly_equal_rewards(base: float, steps: list[int]) -> None:
    """Neighbours in float32, against exact rational arithmetic."""
    unit = 2.0 ** (math.floor(math.log2(base)) - 23)
    rewards = f32(*(base + unit * step for step in steps))[None]
    exact = rewards[0].tolist()
    centred = [x - statistics.mean(exact) for x in exact]
    scale = statistics.stdev(exact) + 1e-4
    valid = torch.ones_like(rewards, dtype=torch.bool)
    n = len(exact)
    assert F.group_advantages(rewards, valid, "none")[0].tolist() == pytest.approx(centred, rel=1e-6, abs=1e-9)
    assert F.group_advantages(rewards, valid)[0].tolist() == pytest.approx(
        [x / scale for x in centred], rel=1e-6, abs=1e-9
    )
    assert F.leave_one_out_advantages(rewards, valid)[0].tolist() == pytest.approx(
        [x * n / (n - 1) for x in centred], rel=1e-6, abs=1e-9
    )
    # Whitened over a batch of responses of one token, as in PPO and REINFORCE++.
    spread = F.spread_of(F.sample_spreads(list(rewards[0].split(1)), valid[0]))
    assert (spread.mean, spread.variance) == pytest.approx((statistics.mean(exact), statistics.pvariance(exact)))
    deviation = math.sqrt(statistics.pvariance(exact) + 1e-8)
    whitened = F.standardised(rewards[0], spread.mean, spread.variance)
    assert whitened.tolist() == pytest.approx([x / deviation for x in centred], rel=1e-6, abs=1e-9)
    assert whitened.dtype == torch.float32


def test_rewards_and_scales_of_float32_are_computed_in_float64() -> None:
    p, q = f32(-0.1), f32(-0.3)
    for estimator in ("k1", "k2", "k3"):
        found = F.kl_penalised_rewards(f32(0.0), p, q, 0.7, estimator)  # type: ignore[arg-type]
        expected = F.kl_penalised_rewards(f32(0.0).double(), p.double(), q.double(), 0.7, estimator)  # type: ignore[arg-type]
        assert found.tolist() == expected.tolist()
    scale = F.ValueScale().updated(12345.678, 12345.678**2 + 1, 0.9)
    x = f32(12345.5, 12346.25)
    assert scale.normalise(x).tolist() == pytest.approx([-0.178, 0.572], rel=1e-4)
    assert F.moments(f32(1e4, 1e4 + 1e-3)).tolist()[1] == pytest.approx(1e8 + float(f32(1e4 + 1e-3)) ** 2, rel=1e-15)


def with_rewards(data: dict[str, list[Tensor]], reward: float) -> dict[str, list[Tensor]]:
    return {**data, "reward": [f32(reward) for _ in data["reward"]]}


ADVANTAGES: dict[str, Callable[[Any, SingleContext], Any]] = {
    "grpo": lambda x, c: group_advantages(x, x, x, GRPO(), context=c),
    "rloo": lambda x, c: rloo_advantages(x, x, x, RLOO(kl_coef=0.0, normalise_advantages=True), context=c),
    "reinforce++": lambda x, c: reinforce_pp_advantages(
        x, x, x, ReinforcePlusPlus(kl_coef=0.0, reward_clip=0), context=c
    ),
    "reinforce++-group": lambda x, c: reinforce_pp_advantages(
        x, x, x, ReinforcePlusPlus(baseline="group", samples_per_prompt=4, reward_clip=0), context=c
    ),
    "remax": lambda x, c: remax_advantages(x, x, x, x, ReMax(kl_coef=0.0)),
    "ppo": lambda x, c: ppo_advantages(
        x, x, x, x, PPOHyperparameters(kl_coef=0.0, lam=1.0, reward_clip=1e9), context=c
    ),
    "safe-rlhf": lambda x, c: safe_advantages(x, x, x, x, SafeRLHF(kl_coef=0.0, lam=1.0, reward_clip=1e9), context=c),
}


def surroundings(samples: int = len(LENGTHS), group: int = 4) -> SingleContext:
    return SingleContext(batch_size=samples, samples_per_prompt=group)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 100.1, 12345.678, -3e7])
def test_equal_rewards_teach_nothing(name: str, reward: float) -> None:
    data = in_float32(with_rewards(random_columns(0), reward))
    data["value"] = [torch.zeros_like(x) for x in data["value"]]
    made, _ = ADVANTAGES[name](columns_of(data), surroundings())
    for advantage in made["advantage"]:
        assert advantage.dtype == torch.float32
        assert (advantage == 0).all()


# --- Responses without a token.

EMPTY = (3, 0, 1, 4, 0, 5, 4, 0)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("lengths", [EMPTY, (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1)])
def test_empty_responses(name: str, lengths: tuple[int, ...]) -> None:
    data = in_float32(random_columns(2, lengths))
    made, _ = ADVANTAGES[name](columns_of(data), surroundings())
    for key in ("advantage", "return", "cost_return"):
        for column, length in zip(made.get(key, []), lengths, strict=bool(made.get(key))):
            assert column.shape == (length,)
            assert column.isfinite().all()


@pytest.mark.parametrize("name", ["ppo", "safe-rlhf", "reinforce++", "remax"])
def test_an_empty_response_contributes_nothing(name: str) -> None:
    """The others have what they have without it."""
    data = random_columns(2, EMPTY)
    full = [i for i, length in enumerate(EMPTY) if length]
    made, _ = ADVANTAGES[name](columns_of(data), surroundings(group=1))
    alone, _ = ADVANTAGES[name](
        columns_of({key: [column[i] for i in full] for key, column in data.items()}), surroundings(len(full), 1)
    )
    if name == "safe-rlhf":  # lambda is that of the first step, whatever the costs
        assert len(alone["advantage"]) == len(full)
    for place, advantage in zip(full, alone["advantage"], strict=True):
        torch.testing.assert_close(made["advantage"][place], advantage, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RATIOS)
def test_losses_of_empty_responses(name: str) -> None:
    """A micro-batch with some, and one of nothing else."""
    for lengths in (EMPTY, (0,) * 8):
        data = in_float32(random_columns(4, lengths))
        batch = batch_of(data, "logprob", "ref_logprob", advantage=data["value"])
        logprob = torch.cat(data["new_logprob"]).requires_grad_()
        loss, stats = RATIOS[name](logprob, batch)
        assert loss.shape == (sum(lengths),)
        loss.sum().backward()
        assert logprob.grad.isfinite().all()
        assert stats["clip_fraction"][1] == sum(lengths)


def test_values_of_empty_responses() -> None:
    data = random_columns(4, EMPTY)
    batch = batch_of(data, "value", **{"return": data["value"]})
    losses, stats = ppo_value(torch.cat(data["new_value"]), batch, PPOHyperparameters())
    assert losses.shape == (sum(EMPTY),)
    assert stats["value_mean"][1] == sum(EMPTY)
