"""pass@k, intervals and paired tests: against enumeration, and numbers by hand."""

from itertools import combinations, product

import numpy as np
import pytest

from realhf.report.estimates import compare, estimate, pass_at


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_of_k_answers_with_one_that_passes(samples: int) -> None:
    for k in range(1, samples + 1):
        for passed in range(samples + 1):
            answers = [True] * passed + [False] * (samples - passed)
            drawn = [any(some) for some in combinations(answers, k)]
            assert pass_at(k, [passed], samples)[0] == pytest.approx(sum(drawn) / len(drawn), abs=1e-12)
    assert pass_at(1, [0, samples], samples).tolist() == [0, 1]


def test_the_interval_of_a_share_is_wilson_s() -> None:
    """10 of 10 and 5 of 10 by the formula: (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)."""
    half = estimate(np.array([0.0, 1.0] * 5))
    assert (half.mean, half.low, half.high) == pytest.approx((0.5, 0.236593, 0.763407), abs=1e-6)
    whole = estimate(np.ones(10))
    assert (whole.mean, whole.low, whole.high) == pytest.approx((1.0, 0.722467, 1.0), abs=1e-6)
    none = estimate(np.zeros(10))
    assert (none.low, none.high) == pytest.approx((0.0, 0.277533), abs=1e-6)


def test_the_interval_of_other_values_is_that_of_means_of_prompts_drawn_again() -> None:
    assert estimate(np.full(4, 0.5)) == estimate(np.full(4, 0.5))
    alike = estimate(np.full(4, 0.5))
    assert (alike.mean, alike.low, alike.high) == (0.5, 0.5, 0.5)
    values = np.random.default_rng(1).normal(2.0, 3.0, 500)
    found, half = estimate(values), 1.959964 * values.std() / 500**0.5
    assert found.mean == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=half / 20)


def test_models_with_scores_of_0_and_1_are_compared_by_mcnemar_s_exact_test() -> None:
    """Five prompts only the second answers right, one only the first, three both: 2 (1 + 6) / 2^6."""
    first = np.array([0.0] * 5 + [1.0] + [1.0] * 3)
    second = np.array([1.0] * 5 + [0.0] + [1.0] * 3)
    found = compare(first, second)
    assert (found.test, found.p) == ("McNemar's exact test", pytest.approx(14 / 64))
    assert found.difference.mean == pytest.approx(4 / 9)
    assert found.difference.low < 4 / 9 < found.difference.high
    assert compare(second, first).p == found.p
    assert compare(first, first).p == 1.0
    assert compare(np.zeros(10), np.ones(10)).p == pytest.approx(2 / 2**10)


def test_models_with_other_scores_are_compared_by_flips_of_signs() -> None:
    first = np.array([0.1, 0.4, 0.3, 0.9, 0.2, 0.5, 0.0, 0.7, 0.6])
    second = first + np.array([0.3, 0.2, -0.1, 0.05, 0.4, 0.25, 0.15, -0.05, 0.0])
    differences = second - first
    sums = [abs(np.dot(signs, differences[:8])) for signs in product((-1, 1), repeat=8)]
    exact = sum(total >= abs(differences.sum()) - 1e-9 for total in sums) / 2**8
    found = compare(first, second)
    assert found.test == "sign flips"
    assert found.p == pytest.approx(exact, abs=0.01)
    assert found == compare(first, second), "the same figures each time"
