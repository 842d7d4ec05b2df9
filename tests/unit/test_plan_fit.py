"""The acceptance law: Table 3 to the digit, its other errors, curves per target, predictions."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from draftsmith.plan import tables
from draftsmith.plan.fit import FORMS, affine_law, fit_form, per_target
from draftsmith.plan.observations import Observation
from draftsmith.plan.optimum import AcceptanceLaw, best_draft

pytest.importorskip("statsmodels")

PAIRS = tables.pairs()


def simulated(rng: np.random.Generator, noise: float, targets: int = 6) -> list[Observation]:
    """Pairs that follow a known law."""
    law = AcceptanceLaw(A=-0.01, B=0.02, C=0.6)
    return [
        Observation(
            target=f"t{i}",
            draft=f"d{j}",
            target_ppl=9.0 + i,
            draft_ppl=12.0 + 2 * j,
            alpha=float(law.alpha(12.0 + 2 * j, 9.0 + i)) + float(rng.normal(0, noise)),
        )
        for i in range(targets)
        for j in range(5)
    ]


def test_table_3_to_the_last_printed_digit() -> None:
    rows = tables.paper_table(3).rows
    assert len(rows) == 17
    assert [row["quantity"] for row in rows if row["agrees"] != "yes"] == []


def test_the_130_pairs_and_their_swapped_perplexities() -> None:
    assert len(PAIRS) == 130
    assert [len(tables.pairs(table)) for table in (1, 2)] == [52, 78]
    by_name = {one.target: one.target_ppl for one in PAIRS}
    assert by_name["Qwen2.5-32B"] == 10.11350441 and by_name["Qwen2.5-72B"] == 9.549574852
    own = {one.target: one.target_ppl for one in tables.pairs(1, own_perplexities=True)}
    assert own["Qwen2.5-32B"] == 9.549574852


def test_other_choices_of_perplexities_give_other_laws() -> None:
    own = affine_law(tables.pairs(own_perplexities=True))
    assert (round(own.B, 6), round(own.C, 6)) == (0.012948, 0.642340)
    assert (round(own.r2, 6), round(own.mse, 6)) == (0.601540, 0.001287)
    assert [said.split()[0] for said in own.warnings] == ["Qwen2.5-32B", "Qwen2.5-72B"]
    # the design is balanced
    assert pytest.approx(affine_law(PAIRS).A, rel=1e-9) == own.A
    assert affine_law(PAIRS).warnings == ()


def test_unrounded_coefficients_and_robust_errors() -> None:
    fit = affine_law(PAIRS, fixed_effects=True)
    assert pytest.approx([-0.00670008460, 0.0129707054, 0.642084011], rel=1e-8) == [
        fit.A,
        fit.B,
        fit.C,
    ]
    assert [round(error, 6) for error in fit.errors["hc3"].se.values()] == [
        0.000626,
        0.002160,
        0.026453,
    ]
    clustered = fit.errors["cluster_target"].se
    assert round(clustered["B"], 5) == 0.00658 and round(clustered["C"], 4) == 0.0722
    assert fit.fixed_effects is not None
    assert pytest.approx(fit.A, rel=1e-9) == fit.fixed_effects.A
    assert round(fit.fixed_effects.r2, 3) == 0.954
    assert fit.fixed_effects.errors.se["A"] < fit.errors["classic"].se["A"]
    assert np.sqrt(np.diag(fit.cov)).tolist() == pytest.approx(
        list(fit.errors["classic"].se.values())
    )


def test_the_covariance_says_how_well_the_optimum_is_known() -> None:
    setting = tables.optima()[0].setting
    found = best_draft(replace(setting, law=AcceptanceLaw(cov=affine_law(PAIRS).cov)))
    assert found.best is not None and found.se is not None
    assert found.se == pytest.approx(0.077e8, rel=0.01)
    assert found.se / found.best.params == pytest.approx(0.066, abs=0.0005)


def test_predictions_cover_new_pairs_and_the_law() -> None:
    """95 % intervals of the law and of a new pair, over repeats with known truth."""
    rng = np.random.default_rng(5)
    truth = -0.01 * 15.5 + 0.02 * 11.5 + 0.6
    law, new = 0, 0
    for _ in range(300):
        (one,) = affine_law(simulated(rng, 0.01), at=[(15.5, 11.5)]).predictions
        law += one.ci95[0] < truth < one.ci95[1]
        new += one.pi95[0] < truth + rng.normal(0, 0.01) < one.pi95[1]
    assert 0.91 < law / 300 < 0.985 and 0.91 < new / 300 < 0.985
    assert one.pi95[1] - one.pi95[0] > 2 * (one.ci95[1] - one.ci95[0])


def test_the_fits_of_every_target_have_the_conventions_of_table_4() -> None:
    curves, said = per_target(PAIRS)
    assert len(curves) == 13 and said == ()
    for target, forms in curves.items():
        own = [one for one in PAIRS if one.target == target]
        x = np.array([one.draft_ppl for one in own])
        alpha = np.array([one.alpha for one in own])
        for form, transformed in (("linear", x), ("logarithmic", np.log(x))):
            fit = forms[form]
            columns = np.column_stack([transformed, np.ones(10)])
            exact, ssr, *_ = np.linalg.lstsq(columns, alpha, rcond=None)
            errors = np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)) * ssr[0] / 8)
            assert fit is not None
            assert fit.params == pytest.approx(exact, rel=1e-6)
            assert fit.moe == pytest.approx(2.306004135 * errors, rel=1e-4)  # t(8)
            assert fit.mse == pytest.approx(ssr[0] / 10, rel=1e-6)
            assert fit.r2 == pytest.approx(1 - ssr[0] / np.sum((alpha - alpha.mean()) ** 2))
        power = forms["power"]
        assert power is not None and power.params[1] < 0
        p1, p2 = power.params
        for nudge in ((1.001, 1.0), (0.999, 1.0), (1.0, 1.001), (1.0, 0.999)):
            missed = alpha - FORMS["power"](x, p1 * nudge[0], p2 * nudge[1])
            assert np.mean(missed**2) > power.mse
        slopes = np.column_stack([x**p2, p1 * x**p2 * np.log(x)])
        errors = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)) * power.mse * 10 / 8)
        assert power.moe == pytest.approx(2.306004135 * errors, rel=1e-3)


def test_all_390_values_of_table_4() -> None:
    """39 fits; margins of the power law hang on the optimiser's last step."""
    fits, compared = per_target(PAIRS)[0], 0
    for row in tables.printed(4):
        fit = fits[row["target"]][row["form"]]
        assert fit is not None
        ours = {"mse": fit.mse, "r2": fit.r2}
        for place, at in ((1, 0), (2, 1)):
            ours |= {f"param_{place}": fit.params[at], f"moe_{place}": fit.moe[at]}
            ours |= {f"low_{place}": fit.ci95[at][0], f"high_{place}": fit.ci95[at][1]}
        within = 2e-6 if row["form"] == "power" else 5.1e-7
        for name, value in ours.items():
            assert float(row[name]) == pytest.approx(value, abs=within)
            compared += 1
    assert compared == 390
    table = tables.paper_table(4).rows
    assert len(table) == 39 and {row["agrees"] for row in table} == {"yes"}
    worst = max(table, key=lambda row: abs(float(row["residual"] or 0)))
    assert 4e-7 < abs(float(worst["residual"] or 0)) < 2e-6


def test_a_target_with_few_drafts_is_named_and_left_out() -> None:
    few = [one for one in PAIRS if one.target != "OPT-13B" or one.draft in ("OPT-125M", "OPT-350M")]
    curves, said = per_target(few)
    assert "OPT-13B" not in curves and len(curves) == 12
    assert said == ("OPT-13B has 2 different draft perplexities: curves of its own take 3 or more",)
    assert affine_law(few).n == 122


def test_a_curve_that_cannot_be_fitted_is_said() -> None:
    x = np.array([1e300, 2e300, 3e300])
    assert fit_form("power", x, np.array([0.5, 0.6, 0.7])) is None


@pytest.mark.filterwarnings("error")
def test_curves_through_points_that_say_nothing_have_no_nonsense_in_them() -> None:
    """Perplexities a rounding apart; rates whose squares are no numbers any more."""
    x = np.array([12.0, 12.0, 12.0, 12.0]) + 1e-12 * np.arange(4)
    for form in FORMS:
        fit = fit_form(form, x, np.array([0.5, 0.61, 0.59, 0.7]))
        assert fit is None or np.isfinite([*fit.params, *fit.moe]).all()
    flat = fit_form("linear", np.array([12.0, 14.0, 16.0, 18.0]), 5e-324 * np.arange(1, 5))
    assert flat is None or np.isnan(flat.r2)
    rows = [
        replace(one, alpha=5e-324 * (1 + place % 7))
        for place, one in enumerate(simulated(np.random.default_rng(0), 0.01))
    ]
    assert np.isnan(affine_law(rows).r2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[:3], "four rows or more, got 3"),
        (lambda rows: rows[:5], "all rows have the same target perplexity"),
        (lambda rows: rows[::5], "all rows have the same draft perplexity"),
        (
            lambda rows: [replace(one, target_ppl=one.draft_ppl - 3) for one in rows],
            "vary together",
        ),
        (
            lambda rows: [replace(one, draft_ppl=12 + 1e-12 * one.draft_ppl) for one in rows],
            "all rows have the same draft perplexity",
        ),
    ],
)
def test_pairs_that_do_not_determine_the_law_are_refused(change: object, said: str) -> None:
    rows = simulated(np.random.default_rng(0), 0.01)
    assert callable(change)
    with pytest.raises(ValueError, match=said):
        affine_law(change(rows))


@pytest.mark.parametrize(("targets", "kept"), [(2, False), (3, False), (4, True), (9, True)])
def test_errors_by_cluster_take_enough_clusters(targets: int, kept: bool) -> None:
    """With as many clusters as coefficients or fewer they come out as nought."""
    fit = affine_law(simulated(np.random.default_rng(0), 0.01, targets))
    assert ("cluster_target" in fit.errors) == kept
    by_target, by_draft = fit.warnings
    assert by_target.startswith("errors clustered by target")
    assert ("left out" in by_target) != kept and str(targets) in by_target
    assert "rest on 5 drafts" in by_draft
    se = fit.errors["cluster_target" if kept else "hc3"].se
    assert min(se.values()) > 1e-6


def test_rows_that_are_there_twice_are_said() -> None:
    rows = simulated(np.random.default_rng(0), 0.01, targets=10)
    once, twice = affine_law(rows), affine_law([*rows, *rows])
    assert twice.errors["classic"].se["A"] < once.errors["classic"].se["A"]
    assert any("50 pairs have several rows (d0 with t0, for one)" in one for one in twice.warnings)
    assert not any("several rows" in one for one in once.warnings)
    assert any("1 pair has" in one for one in affine_law([*rows, rows[7]]).warnings)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ((200.0, 10.0), "gives -1.2, which is no acceptance rate"),
        ((1.0, 100.0), "no acceptance rate"),
        ((21.0, 10.0), "outside of those measured (12 to 20 and 9 to 18)"),
        ((15.0, 8.0), "is an extrapolation"),
        ((20.0, 18.0), None),
        ((1e300, 10.0), "no acceptance rate"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_predictions_far_from_the_rows_are_doubted(
    at: tuple[float, float], said: str | None
) -> None:
    rows = [*simulated(np.random.default_rng(0), 0.0, targets=10)]
    plain, fit = affine_law(rows), affine_law(rows, at=[at])
    more = [one for one in fit.warnings if one not in plain.warnings]
    assert len(more) == (said is not None)
    assert said is None or said in more[0]


@pytest.mark.filterwarnings("error")
def test_a_row_that_decides_alone_has_no_robust_error() -> None:
    rows = simulated(np.random.default_rng(0), 0.01, targets=2)[:6]  # one row of the second target
    fit = affine_law(rows)
    assert "hc3" not in fit.errors
    assert any("d0 with t1 alone decides a coefficient" in one for one in fit.warnings)
    assert all(np.isfinite(list(one.se.values())).all() for one in fit.errors.values())


@pytest.mark.filterwarnings("error")
def test_rates_that_do_not_vary_have_nothing_to_explain() -> None:
    rows = [replace(one, alpha=0.7) for one in simulated(np.random.default_rng(0), 0.01)]
    fit = affine_law(rows, fixed_effects=True)
    assert np.isnan(fit.r2) and fit.fixed_effects is not None and np.isnan(fit.fixed_effects.r2)
    assert any("same acceptance rate (0.7)" in one for one in fit.warnings)
    assert all(
        form is None or np.isnan(form.r2)
        for forms in per_target(rows)[0].values()
        for form in forms.values()
    )


def test_fixed_effects_take_more_rows_than_targets() -> None:
    rows = simulated(np.random.default_rng(0), 0.01)
    one_each = [rows[5 * i + j] for i, j in enumerate((0, 2, 1, 4, 3))]
    with pytest.raises(ValueError, match="--fixed-effects"):
        affine_law(one_each, fixed_effects=True)


def test_without_statsmodels_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsmodels.regression.linear_model", None)
    with pytest.raises(ValueError, match=r'pip install "draftsmith\[plan\]"'):
        affine_law(PAIRS)
