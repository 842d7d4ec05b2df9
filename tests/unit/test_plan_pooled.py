"""Rules of thumb over computed optima: Table 9 to the digit, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.plan import tables
from draftsmith.plan.pooled import Sweep, sweep

pytest.importorskip("statsmodels")


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep("paper")


def test_table_9_to_the_last_printed_digit(found: Sweep) -> None:
    rows = tables.paper_table(9).records()
    assert len(rows) == 9
    assert [row["quantity"] for row in rows if row["agrees"] != "yes"] == []
    rule = found.table9
    assert f"{rule.estimates['mu']:.4e} {rule.moe['mu']:.4e}" == "2.7096e-03 4.3767e-05"
    assert f"{rule.estimates['M0']:.4e} {rule.moe['M0']:.4e}" == "8.7134e+07 2.1830e+06"
    assert (round(rule.r2, 5), rule.n) == (0.98648, 288)


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
