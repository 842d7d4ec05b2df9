"""The closed formulas against sums, simulations and the papers' own numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from draftsmith.core.speedup import (
    memory_bound_speedup,
    predicted_speedup,
    rejections_saved,
    tokens_per_step,
)
from draftsmith.errors import InputError

ALPHAS = [0.0, 1e-12, 0.1, 0.5, 0.778, 0.99, 1 - 1e-9, 1 - 1e-15, 1.0]
GAMMAS = [0, 1, 2, 3, 5, 8, 40]


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_tokens_per_step_is_the_geometric_sum(alpha: float, gamma: int) -> None:
    exact = float(sum(Fraction(alpha) ** j for j in range(gamma + 1)))
    assert float(tokens_per_step(alpha, gamma)) == pytest.approx(exact, rel=1e-14)


def test_tokens_per_step_counts_the_targets_own_token() -> None:
    assert tokens_per_step(0.0, 5) == 1.0
    assert tokens_per_step(1.0, 5) == 6.0
    assert tokens_per_step(0.7, 0) == pytest.approx(1.0, rel=1e-15)


def test_tokens_per_step_is_what_a_simulated_chain_emits() -> None:
    rng = np.random.default_rng(0)
    alpha, gamma, steps = 0.7, 4, 200_000
    accepted = (rng.random((steps, gamma)) < alpha).cumprod(1).sum(1)
    spread = accepted.std() / np.sqrt(steps)
    assert abs(accepted.mean() + 1 - float(tokens_per_step(alpha, gamma))) < 5 * spread


def test_arrays_broadcast_and_equal_their_elements() -> None:
    found = tokens_per_step(np.array(ALPHAS)[:, None], np.array(GAMMAS))
    assert found.shape == (len(ALPHAS), len(GAMMAS))
    for i, alpha in enumerate(ALPHAS):
        for j, gamma in enumerate(GAMMAS):
            assert found[i, j] == tokens_per_step(alpha, gamma)
    assert found.dtype == np.float64
    assert (np.diff(found, axis=0) >= 0).all()
    assert (np.diff(found, axis=1) >= 0).all()


def test_memory_bound_speedup_has_the_values_of_the_corrected_formula() -> None:
    # Llama 2 Chat drafter: 115M of 7B; the printed formula would give 0.036
    found = memory_bound_speedup(2.3, np.array([3, 5]), 115e6, 7e9)
    np.testing.assert_allclose(found, [2.19, 2.13], atol=0.005)


def test_speedup_never_exceeds_tokens_per_step_and_a_free_draft_reaches_it() -> None:
    taus = np.linspace(1, 4, 7)
    assert (predicted_speedup(taus, 3, 0.0) == taus).all()
    assert (predicted_speedup(taus, 3, 0.2) < taus).all()
    assert predicted_speedup(2.0, 3, 1.0) == 0.5
    # Leviathan et al.: with alpha > c one drafted token already helps by (1 + alpha) / (1 + c)
    assert predicted_speedup(tokens_per_step(0.6, 1), 1, 0.25) == pytest.approx(1.6 / 1.25)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: tokens_per_step(1.1, 3), "alpha must be between 0 and 1, got 1.1"),
        (lambda: tokens_per_step([0.5, -0.2], 3), "alpha must be between 0 and 1, got -0.2"),
        (lambda: tokens_per_step(float("nan"), 3), "alpha"),
        (lambda: tokens_per_step(0.5, -1), "gamma"),
        (lambda: tokens_per_step(0.5, float("inf")), "gamma"),
        (lambda: predicted_speedup(2.0, 3, -0.1), "cost_ratio"),
        (lambda: predicted_speedup(9.0, 3, 0.1), "tau"),
        (lambda: predicted_speedup(float("nan"), 3, 0.1), "tau"),
        (lambda: memory_bound_speedup(2.0, 3, 1e6, 0), "target_parameters"),
        (lambda: memory_bound_speedup(2.0, 3, -1, 1e9), "draft_parameters"),
    ],
)
def test_a_value_outside_its_domain_is_named(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        call()
    assert isinstance(caught.value, InputError)


def test_rejections_saved_are_those_of_the_papers_best_setting() -> None:
    """DistillBeam, table 2: 31 % more tokens per step at 18.4 % fewer refused drafts."""
    assert float(rejections_saved(0.778, 0.728)) == pytest.approx(0.184, abs=5e-4)
    saved = rejections_saved([0.4, 0.7, 0.4], [0.4, 0.4, 0.7])
    assert saved == pytest.approx([0.0, 0.5, -1.0])
    assert np.isnan(rejections_saved(1.0, 1.0))
    with pytest.raises(InputError, match=r"before .*1\.2"):
        rejections_saved(0.5, 1.2)


@pytest.mark.parametrize("before", [0.2, 0.5, 0.9])
def test_the_same_saving_multiplies_tokens_per_step_of_endless_chains_alike(before: float) -> None:
    after = before + 0.184 * (1 - before)
    ratio = tokens_per_step(after, 100_000) / tokens_per_step(before, 100_000)
    assert float(ratio) == pytest.approx(1 / (1 - 0.184))
