"""Rules of thumb over computed optima: Table 9 to the digit, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import lambertw

from draftsmith.plan import tables
from draftsmith.plan.optimum import AcceptanceLaw
from draftsmith.plan.sweep import GridName, Sweep, sweep

pytest.importorskip("statsmodels")


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep("paper")


def test_table_9_to_the_last_printed_digit(found: Sweep) -> None:
    rows = tables.paper_table(9).rows
    assert len(rows) == 9
    assert [row["quantity"] for row in rows if row["agrees"] != "yes"] == []
    rule = found.table9
    assert f"{rule.estimates['mu']:.4e} {rule.moe['mu']:.4e}" == "2.7096e-03 4.3767e-05"
    assert f"{rule.estimates['M0']:.4e} {rule.moe['M0']:.4e}" == "8.7134e+07 2.1830e+06"
    assert (round(rule.r2, 5), rule.n) == (0.98648, 288)


def test_table_8_to_the_last_printed_digit(found: Sweep) -> None:
    rows = tables.paper_table(8).rows
    assert len(rows) == 19
    assert [row["quantity"] for row in rows if row["agrees"] != "yes"] == []
    by_name = {row["quantity"]: row for row in rows}
    first = by_name["mu"]
    assert first["residual"] == pytest.approx(4.89e-3 - found.table8.estimates["mu"])
    other = sweep("printed").table8.estimates  # by the sizes that Table 7 prints
    assert not any(tables.agrees(str(by_name[name]["printed"]), other[name]) for name in other)


def test_table_8_from_the_printed_equations(found: Sweep) -> None:
    """Eq. 7 to 10 with scipy's W, a grid of 800 sizes, and HC3 errors from their definition."""
    M, D, Dt = (
        axis.ravel()
        for axis in np.meshgrid(
            np.geomspace(13e9, 110e9, 8), *[np.geomspace(1e12, 1e14, 6)] * 2, indexing="ij"
        )
    )
    N = np.logspace(8, 10, 800)

    def ppl(params: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return np.exp(1.8172 + 482.01 * params**-0.3478 + 2085.43 * tokens**-0.3658)

    y = ppl(M, Dt)[:, None]
    alpha = -0.0067 * ppl(N[None], D[:, None]) + 0.012971 * y + 0.642084
    w = lambertw(-(alpha ** (M[:, None] / N - 1)) / np.e, -1).real
    best = N[np.argmax(np.log(alpha) / (N * (1 - alpha) * w), axis=1)]
    X = np.column_stack([np.ones(len(M)), 1e9 / M, np.log(D), np.log(Dt)])
    ratio = best / M
    inverse = np.linalg.inv(X.T @ X)
    coefficients = inverse @ X.T @ ratio
    missed = (ratio - X @ coefficients) / (1 - np.einsum("ij,jk,ik->i", X, inverse, X))
    errors = np.sqrt(np.diag(inverse @ (X.T * missed**2) @ X @ inverse))
    units = np.array([1.0, 1e9, 1.0, 1.0])
    rule = found.table8
    assert list(rule.estimates.values()) == pytest.approx(coefficients * units, rel=1e-7)
    assert list(rule.se.values()) == pytest.approx(errors * units, rel=1e-7)
    assert list(rule.moe.values()) == pytest.approx(1.96 * errors * units, rel=1e-7)


def test_solved_optima_give_nearly_the_same() -> None:
    exact = sweep("exact").table9
    assert f"{exact.estimates['mu']:.4e} {exact.estimates['M0']:.4e}" == "2.7093e-03 8.7109e+07"
    assert round(exact.r2, 5) == 0.98664


def test_the_printed_ranges_do_not_give_the_printed_values() -> None:
    printed = sweep("printed").table9
    assert f"{printed.estimates['mu']:.2e}" != "2.71e-03"


def test_the_best_size_is_a_power_of_the_target_and_no_line(found: Sweep) -> None:
    power = found.power_law
    assert round(power.exponent, 3) == 0.578 and round(power.r2_log, 3) == 0.998
    assert power.r2 > found.table9.r2
    low, high = power.ci95
    assert low < power.exponent < high < 1
    optima = found.optima
    slope, level = np.polyfit(np.log(optima.target_params), np.log(optima.draft_params), 1)
    assert power.exponent == pytest.approx(slope, rel=1e-9)
    assert power.factor == pytest.approx(np.exp(level), rel=1e-9)
    line = optima.draft_params - power.factor * optima.target_params**power.exponent
    assert power.r2 == pytest.approx(1 - np.mean(line**2) / np.var(optima.draft_params), rel=1e-9)
    assert found.warnings == () and not optima.at_end.any()


@pytest.mark.parametrize(
    ("grid", "law", "said"),
    [
        ("paper", (0.0, 0.0, -1.0), r"no draft of 1e\+08 to 1e\+10 parameters has an acceptance"),
        ("paper", (0.0, 0.0, 1.5), "has an acceptance rate between 0 and 1"),
        ("printed", (0.0, 0.0, 0.001), r"parameters pays for a target of 1.3e\+10"),
        ("paper", (-0.0067, 0.0, 1.08), "acceptance of 1 or more for"),
        ("exact", (0.0, 0.0, 1.5), "for no draft size"),
        ("exact", (-0.0067, 0.0129, 1.05), "acceptance of 1 or more for"),
    ],
)
def test_laws_without_optima_are_refused(grid: GridName, law: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sweep(grid, law=AcceptanceLaw(*law))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("grid", "size"), [("paper", 1e8), ("exact", 1.0)])
def test_optima_at_an_end_of_the_sizes_are_counted(grid: GridName, size: float) -> None:
    """One rate for all sizes: the smallest is best."""
    found = sweep(grid, law=AcceptanceLaw(A=0.0, B=0.0, C=0.7))
    assert found.optima.draft_params.tolist() == [size] * 288
    assert found.optima.at_end.all()
    assert len(found.warnings) == 1 and found.warnings[0].startswith("288 of 288 optima lie at")
    assert np.isnan([found.table9.r2, found.power_law.r2, found.power_law.r2_log]).all()
    # some of them only: this draft must be small to pay
    partly = sweep("paper", law=AcceptanceLaw(A=-0.004, B=0.012971, C=0.642084))
    count = int(partly.optima.at_end.sum())
    assert 0 < count < 288 and partly.warnings[0].startswith(f"{count} of 288 optima")
    assert np.all((partly.optima.draft_params == 1e8) == partly.optima.at_end)


def test_both_rules_describe_the_same_optima(found: Sweep) -> None:
    """Coefficients are in plain units: the rule gives back the optima that it was fitted to."""
    optima, rule = found.optima, found.table8.estimates
    ratio = (
        rule["mu"]
        + rule["M0"] / optima.target_params
        + rule["gamma"] * np.log(optima.draft_tokens)
        + rule["gamma_prime"] * np.log(optima.target_tokens)
    )
    actual = optima.draft_params / optima.target_params
    missed = np.sum((actual - ratio) ** 2) / np.sum((actual - actual.mean()) ** 2)
    assert 1 - missed == pytest.approx(found.table8.r2, abs=0.002)
    assert found.table8.r2_adj < found.table8.r2
    for name, value in rule.items():
        low, high = found.table8.ci95[name]
        assert high - value == pytest.approx(1.96 * found.table8.se[name])
        assert value - low == pytest.approx(found.table8.moe[name])


def test_more_data_for_the_draft_makes_the_best_draft_smaller() -> None:
    optima = sweep("exact").optima
    cube = optima.draft_params.reshape(8, 6, 6)  # M, D, D'
    by_draft = cube[:, -1] / cube[:, 0] - 1
    by_target = cube[:, :, -1] / cube[:, :, 0] - 1
    assert by_draft.min() > -0.0525 and by_draft.max() < -0.0495
    assert by_target.min() > 0.0009 and by_target.max() < 0.0012
