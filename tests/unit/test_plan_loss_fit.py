"""The loss law of one's own runs: what is put in comes out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from draftsmith.plan.fit import fit_loss
from draftsmith.plan.observations import TrainedModel
from draftsmith.plan.optimum import LossLaw


def trained(law: LossLaw, noise: float = 0.0, seed: int = 0) -> list[TrainedModel]:
    rng = np.random.default_rng(seed)
    return [
        TrainedModel(
            params=float(N),
            tokens=float(D),
            loss=float(law.loss(N, D)) * float(np.exp(rng.normal(0, noise))),
        )
        for N in np.geomspace(2e6, 1e10, 8)
        for D in np.geomspace(1e8, 1e12, 7)
    ]


@pytest.mark.parametrize("law", [LossLaw(), LossLaw(E=1.69, A=406.4, nu=0.34, B=410.7, delta=0.28)])
def test_losses_without_noise_give_the_constants_back(law: LossLaw) -> None:
    found = fit_loss(trained(law), bootstrap=20)
    for name in ("E", "A", "nu", "B", "delta"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=1e-4), name
    assert found.rmse_log < 1e-6 and found.warnings == ()


@pytest.mark.full
def test_noisy_losses_give_intervals_that_hold_the_truth() -> None:
    found = [fit_loss(trained(LossLaw(), 0.005, seed), bootstrap=60) for seed in range(8)]
    inside = [
        low <= getattr(LossLaw(), name) <= high
        for one in found
        for name, (low, high) in one.ci95.items()
    ]
    assert sum(inside) >= 32 and len(inside) == 40
    for one in found:
        low, high = one.ci95["nu"]
        assert low <= one.law.nu <= high and high - low < 0.03 and one.r2_log > 0.99
    again = fit_loss(trained(LossLaw(), 0.005, seed=3), bootstrap=60)
    assert again == found[3]


def test_an_outlier_hardly_matters() -> None:
    runs = trained(LossLaw(), noise=0.002)
    spoilt = [*runs, TrainedModel(params=1e9, tokens=1e11, loss=9.0)]
    clean, robust = fit_loss(runs, bootstrap=20).law, fit_loss(spoilt, bootstrap=20).law
    assert robust.nu == pytest.approx(clean.nu, rel=0.03)
    assert pytest.approx(clean.E, rel=0.03) == robust.E


def test_runs_that_do_not_tell_size_from_data_are_said() -> None:
    law = LossLaw()
    runs = [
        TrainedModel(params=N, tokens=20 * N, loss=float(law.loss(N, 20 * N)))
        for N in np.geomspace(1e6, 1e10, 12).tolist()
    ]
    assert any("grow together" in said for said in fit_loss(runs, bootstrap=20).warnings)


def grid(loss: Callable[[float, float], float]) -> list[TrainedModel]:
    return [
        TrainedModel(params=N, tokens=D, loss=loss(N, D))
        for N in (1e7, 1e8, 1e9, 1e10)
        for D in (1e9, 1e10, 1e11)
    ]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda N, D: 2 + 300 / N**0.3, "B comes out as 0: the runs do not show that losses fall"),
        (lambda N, D: 2 + 900 / D**0.3, "A comes out as 0"),
        (lambda N, D: 2 + (N > 1e7) * 0.1 + (D < 1e10) * 1.0, "delta lies at an end of what is"),
        (lambda N, D: 2 + np.log10(N * D) / 9, "no better than their mean"),
    ],
)
def test_a_law_that_does_not_describe_the_runs_is_doubted(
    loss: Callable[[float, float], float], said: str
) -> None:
    assert any(said in one for one in fit_loss(grid(loss), bootstrap=20).warnings)


@pytest.mark.filterwarnings("error")
def test_counts_beyond_all_sense_are_fitted_and_doubted() -> None:
    rng = np.random.default_rng(1)
    runs = [
        TrainedModel(params=10.0 ** (290 + i), tokens=10.0 ** (285 + 5 * i % 12), loss=3.0 + noise)
        for i, noise in enumerate(rng.random(12).tolist())
    ]
    assert any("comes out as 0" in one for one in fit_loss(runs, bootstrap=20).warnings)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(1e6 * i, 1e9 * i, 3.0 / i) for i in range(1, 6)], "six runs or more, got 5"),
        ([(1e6, 1e9 * i, 3.0 / i) for i in range(1, 9)], "'params' has 1 different value:"),
        ([(1e6 * i, 1e9 * (i % 2 + 1), 3.0 / i) for i in range(1, 9)], "'tokens' has 2 different"),
        ([(1e6 * i, 1e9 * i, 3.0) for i in range(1, 9)], "all losses are equal"),
    ],
)
def test_too_few_runs_are_refused(rows: list[tuple[float, float, float]], said: str) -> None:
    runs = [TrainedModel(params=N, tokens=D, loss=L) for N, D, L in rows]
    with pytest.raises(ValueError, match=said):
        fit_loss(runs)
