"""The best draft length in closed form: against many digits, brute force, reference vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from draftsmith.plan.optimum import (
    branch_root,
    optimal_length,
    optimal_speedup,
    speedup,
    stationary_length,
)

mpmath = pytest.importorskip("mpmath")

# alpha, M, N, W_-1, gamma, 2 M T: 50 digits, rounded
VECTORS = [
    (0.5, 1e10, 1e10, -1.0, -1.0, 1.3862943611198906),
    (0.5, 1e10, 0.999e10, -1.0377155940646894, -0.9465889004796924, 1.3372469789410797),
    (0.65, 1.4e10, 1.2e8, -54.83148859977463, 8.295319031534437, 2.618829235373734),
    (0.8, 7e10, 3e8, -56.88471170664379, 17.109537982056885, 4.576522151372807),
    (0.6, 1e11, 1e8, -517.5639311982814, 11.23339778843866, 2.467451811138143),
    (0.475, 1e11, 1e8, -751.3178632881458, 7.89504136118392, 1.8873261589136796),
    (0.3, 1e11, 1e8, -1210.8679241957932, 4.8963895601924765, 1.4204366262153456),
    (0.01, 1e12, 1e8, -46058.83436456109, 1.3316564714228265, 1.0099445895080579),
    (0.99, 1e10, 1e7, -13.654343169592641, 259.0965470257371, 73.60541425297487),
    (0.999999, 1e11, 1e8, -1.0453674708382084, 44367.44815316462, 956.6018915802896),
    (0.2, 1e9, 9e8, -1.7227459144242288, -0.6620438256691061, 1.2975392454686716),
    (0.9, 1e9, 5e8, -1.531811608389612, 3.0475418145897097, 1.3756328138626843),
]


@pytest.mark.parametrize(("alpha", "M", "N", "w", "gamma", "gain"), VECTORS)
def test_the_reference_vectors(
    alpha: float, M: float, N: float, w: float, gamma: float, gain: float
) -> None:
    assert -1 - branch_root((M - N) / N * -math.log(alpha)) == pytest.approx(w, rel=1e-13)
    assert stationary_length(alpha, N, M) == pytest.approx(gamma, rel=1e-13, abs=1e-13)
    if gamma > 0:
        assert optimal_length(alpha, N, M) == stationary_length(alpha, N, M)
        assert optimal_speedup(alpha, N, M) == pytest.approx(gain, rel=1e-13)
    else:
        assert (optimal_length(alpha, N, M), optimal_speedup(alpha, N, M)) == (0.0, 1.0)


def literal(alpha: float, M: float, N: float) -> tuple[Any, Any]:
    """gamma and 2 M T by eq. 13 and 4 as they are printed, in 60 digits."""
    with mpmath.workdps(60):
        a, big, small = mpmath.mpf(alpha), mpmath.mpf(M), mpmath.mpf(N)
        w = mpmath.re(mpmath.lambertw(-(a ** (big / small - 1)) / mpmath.e, -1))
        gamma = (-big * mpmath.log(a) + small * w + small) / (small * mpmath.log(a))
        return gamma, 2 * big * -mpmath.log(a) / (2 * small * (-1 + a) * w)


def test_fifty_digits_agree_from_equal_sizes_to_a_hundred_million_times() -> None:
    rng = np.random.default_rng(7)
    ratios = [*np.geomspace(1.0, 1e8, 120), *(1 + np.geomspace(1e-15, 1e-2, 40))]
    for ratio in ratios:
        M = float(rng.uniform(1e8, 1e12))
        N = min(M / float(ratio), M)
        alpha = float(rng.choice([rng.uniform(0.01, 0.99), 1 - 10 ** rng.uniform(-6, -1)]))
        gamma, gain = literal(alpha, M, N)
        found = float(stationary_length(alpha, N, M))
        assert abs(found - gamma) <= 1e-12 * (1 + abs(gamma)), (alpha, M, N)
        if gamma > 0:
            assert abs(float(optimal_speedup(alpha, N, M)) - gain) <= 1e-12 * gain, (alpha, M, N)


def test_the_root_solves_its_equation_at_all_sizes() -> None:
    for excess in np.geomspace(1e-18, 1e10, 200):
        with mpmath.workdps(50):
            v = mpmath.mpf(float(branch_root(excess)))
            # near 0 both sides are squares of v, so the error of v is half of theirs
            back = v - mpmath.log1p(v)
            assert abs(back / mpmath.mpf(float(excess)) - 1) < 1e-13


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.9])
def test_no_speedup_is_invented_where_the_draft_is_nearly_as_large_as_the_target(
    alpha: float,
) -> None:
    ratio = np.linspace(0.01, 1.5, 300)
    gamma, gain = optimal_length(alpha, ratio), optimal_speedup(alpha, ratio)
    pays = ratio < -alpha * math.log(alpha) / (1 - alpha)
    assert np.all((gamma > 0) == pays) and np.all((gain > 1) == pays)
    assert np.all(gain[~pays] == 1.0)
    whole = optimal_length(alpha, ratio, integer=True)
    assert np.all((whole > 0) == (ratio < alpha))


def test_the_length_is_the_best_one_of_all_real_and_of_all_whole_lengths() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        alpha, ratio = float(rng.uniform(0.05, 0.95)), float(10 ** rng.uniform(-4, 0.1))
        gamma = float(optimal_length(alpha, ratio))
        best = float(optimal_speedup(alpha, ratio))
        lengths = np.concatenate([np.linspace(0, 3 * gamma + 3, 500), gamma + np.linspace(0, 0.1)])
        assert best >= speedup(alpha, lengths, ratio).max() - 1e-14
        whole = speedup(alpha, np.arange(0, 400.0), ratio)
        assert float(optimal_length(alpha, ratio, integer=True)) == np.argmax(whole)
        at_best = float(optimal_speedup(alpha, ratio, integer=True))
        assert at_best == pytest.approx(whole.max(), rel=1e-14)
        assert at_best <= best * (1 + 1e-14)


def test_the_speedup_is_the_sum_over_positions_over_the_cost() -> None:
    tokens = sum(0.7**j for j in range(6))
    assert speedup(0.7, 5, 1e8, 1e10) == pytest.approx(tokens * 1e10 / (1e10 + 5e8), rel=1e-14)
    assert speedup(0.7, 0, 1e8, 1e10) == pytest.approx(1.0, rel=1e-15)


def test_measured_seconds_count_as_costs() -> None:
    same = optimal_speedup(0.7, 0.004, 0.1)
    assert same == pytest.approx(float(optimal_speedup(0.7, 4e8, 1e10)), rel=1e-12)
    assert float(optimal_length(0.7, 0.004, 0.1)) > float(optimal_length(0.7, 0.01, 0.1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1.0, 1.0, 2.0), "alpha must be above 0 and below 1, got 1"),
        ((0.0, 1.0, 2.0), "alpha must be above 0"),
        ((math.nan, 1.0, 2.0), "alpha must be above 0"),
        ((0.5, 0.0, 2.0), "draft_cost must be above 0"),
        ((0.5, 1.0, math.inf), "target_cost must be above 0 and finite"),
    ],
)
def test_values_without_meaning_are_named(arguments: tuple[float, ...], said: str) -> None:
    for function in (optimal_length, stationary_length):
        with pytest.raises(ValueError, match=said):
            function(*arguments)
    with pytest.raises(ValueError, match="at most 1"):
        stationary_length(0.5, 2.0, 1.0)
