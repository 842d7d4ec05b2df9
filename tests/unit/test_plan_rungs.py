"""Draft sizes around N* for a budget, at a measured cost: what `plan ladder` predicts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from draftsmith.errors import InputError
from draftsmith.plan.ladder import ladder
from draftsmith.plan.optimum import (
    AcceptanceLaw,
    FlopBudget,
    SizingProblem,
    TokenBudget,
    best_draft,
    draft_of,
    optimal_params,
    optimal_speedup,
)

OPT_13B = SizingProblem(
    target_params=12_853_473_280, target_tokens=1.8e11, budget=TokenBudget(amount=1.8e11)
)
SIZES = {"a": 8e6, "b": 3e7, "c": 1e8, "d": 4e8, "e": 2e9, "huge": 1e11}
KNOWN = AcceptanceLaw(cov=((1e-8, 0.0, 0.0), (0.0, 1e-6, 0.0), (0.0, 0.0, 1e-4)), residual=0.03)


def exactly(params: float) -> tuple[str, float]:
    """Any size can be built."""
    return f"n{params:.6g}", params


# --------------------------------------------------------------------------- solving


def test_with_a_budget_of_tokens_the_best_size_is_that_of_plan_optimum() -> None:
    sizing = best_draft(replace(OPT_13B, law=KNOWN))
    found = ladder(replace(OPT_13B, law=KNOWN), SIZES, exactly)
    assert sizing.best is not None and sizing.ci95 is not None
    assert (found.best_params, found.ci95) == (sizing.best.params, sizing.ci95)
    assert found.best_params == pytest.approx(117313808.6, rel=1e-6)  # Table 5


def test_with_a_budget_of_operations_larger_drafts_see_less_text() -> None:
    budget = FlopBudget(amount=1e19)
    assert float(budget.tokens(1e8)) == pytest.approx(1e19 / 6e8)
    best = optimal_params(replace(OPT_13B, budget=budget))
    sizes = np.geomspace(1e6, 1e9, 4001)
    by_hand = [
        replace(OPT_13B, budget=TokenBudget(amount=1e19 / (6 * size))) for size in sizes.tolist()
    ]
    found = [float(one.speedup(size)) for one, size in zip(by_hand, sizes, strict=True)]
    assert best == pytest.approx(float(sizes[int(np.argmax(found))]), rel=2e-3)
    assert optimal_params(replace(OPT_13B, budget=FlopBudget(amount=1e21))) > best


def test_the_derivative_knows_budgets_and_costs() -> None:
    step = 1e-5
    for setting in (
        replace(OPT_13B, budget=FlopBudget(amount=1e19)),
        replace(OPT_13B, cost_floor=0.05),
        replace(OPT_13B, cost_floor=0.001),
    ):
        for size in (3e7, 1e8, 1e9):
            ends = setting.speedup(np.array([size * np.exp(-step), size * np.exp(step)]))
            slope = float(np.diff(np.log(ends))[0]) / (2 * step)
            gamma = float(setting.length(size))
            assert setting.slope(size, gamma) == pytest.approx(slope, rel=1e-5)


def test_a_measured_cost_is_a_floor_under_all_sizes() -> None:
    dear = replace(OPT_13B, cost_floor=0.05, law=KNOWN)
    M = dear.target_params
    assert float(dear.cost(1e8)) == pytest.approx(0.05 * M)
    assert float(dear.cost(5e9)) == 5e9
    sizing = best_draft(dear)
    assert sizing.best is not None
    assert sizing.best.params == pytest.approx(0.05 * M, rel=1e-9), "smaller is no cheaper"
    assert sizing.ci95 is None and "measured cost of 0.05" in sizing.warnings[0]
    assert sizing.best.speedup < float(OPT_13B.speedup(optimal_params(OPT_13B)))
    at_the_rate = draft_of(dear, 1e8)
    assert at_the_rate == draft_of(OPT_13B, 1e8, cost_ratio=0.05)


# --------------------------------------------------------------------------- rungs


def test_the_rungs_are_the_best_size_its_half_and_its_double() -> None:
    found = ladder(OPT_13B, {}, exactly)
    best = found.best_params
    assert best is not None
    assert [rung.params for rung in found.rungs] == [best / 2, best, 2 * best]
    assert found.recommended == 1


@pytest.mark.parametrize("target_params", [1e9, 13e9, 70e9, 1e12])
def test_a_size_with_a_name_is_taken_where_it_is_near(target_params: float) -> None:
    setting = replace(OPT_13B, target_params=target_params)
    best = optimal_params(setting)
    named = {"near": 0.5 * best * 1.29, "nearer": 0.5 * best / 1.05, "far": best * 1.31}
    named["edge"] = 2 * best / 1.29
    found = ladder(setting, named, exactly)
    assert [rung.size for rung in found.rungs] == ["nearer", exactly(best)[0], "edge"]
    assert found.warnings == ()


def test_what_can_be_built_is_what_is_predicted() -> None:
    """Not a little smaller than N*, nor the same thing three times."""
    found = ladder(OPT_13B, {}, lambda params: ("smallest", max(3e8, params)))
    assert [rung.params for rung in found.rungs] == [3e8]
    assert found.recommended == 0
    assert "the nearest has 3e+08" in found.warnings[0]
    dear = ladder(OPT_13B, {}, lambda params: ("large", 1.2e10))
    assert dear.recommended is None and "train none" in dear.warnings[-1]


def test_estimates_hang_together_and_widen_with_the_law() -> None:
    for setting in (OPT_13B, replace(OPT_13B, law=KNOWN)):
        for rung in ladder(setting, SIZES, exactly).rungs:
            alpha, gamma = rung.alpha.value, rung.gamma
            assert rung.tau.value == pytest.approx(sum(alpha**n for n in range(gamma + 1)))
            cost = rung.params / setting.target_params
            assert rung.speedup.value == pytest.approx(rung.tau.value / (1 + gamma * cost))
            whole = float(optimal_speedup(alpha, cost, integer=True))
            assert rung.speedup.value == pytest.approx(whole)
    rung = ladder(replace(OPT_13B, law=KNOWN), SIZES, exactly).rungs[1]
    for estimate in (rung.alpha, rung.tau, rung.speedup):
        assert estimate.low is not None and estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
    assert rung.alpha.high is not None
    # 1.96 sqrt(x^2 1e-8 + y^2 1e-6 + 1e-4 + 0.03^2)
    y = OPT_13B.target_ppl
    spread = math.sqrt(rung.draft_ppl**2 * 1e-8 + y**2 * 1e-6 + 1e-4 + 9e-4)
    assert rung.alpha.high - rung.alpha.value == pytest.approx(1.96 * spread)
    assert ladder(OPT_13B, SIZES, exactly).rungs[1].alpha.low is None


def test_a_draft_that_does_not_pay_is_said_to_slow_down() -> None:
    found = ladder(replace(OPT_13B, cost_floor=0.9), SIZES, exactly)
    assert found.best_params is None and found.recommended is None
    assert "decode without a draft" in found.warnings[0]
    assert [rung.size for rung in found.rungs] == ["a", "b", "c", "d", "e"]
    assert all(rung.gamma == 1 and rung.speedup.value < 1 for rung in found.rungs)
    assert "huge (1e+11 parameters) is left out: it is not smaller" in found.warnings[1]


def test_sizes_without_a_rate_are_left_out_or_refused() -> None:
    found = ladder(replace(OPT_13B, cost_floor=0.9), {"tiny": 1e5, **SIZES}, exactly)
    assert "tiny (1e+05 parameters) is left out: the law gives it an accept" in found.warnings[1]
    with pytest.raises(InputError, match=r"huge \(1e\+11\).*plan law"):
        ladder(OPT_13B, {}, lambda params: ("huge", 1e11))


@pytest.mark.parametrize("budget", [TokenBudget(amount=50, name="X"), FlopBudget(amount=1e9)])
def test_a_budget_that_is_too_small_is_to_blame(budget: TokenBudget | FlopBudget) -> None:
    with pytest.raises(InputError, match=rf"{budget.name} = .*larger budget"):
        ladder(replace(OPT_13B, budget=budget), SIZES, exactly)
    with pytest.raises(InputError, match=rf"{budget.name}.*from 1 to.*0\.5"):
        replace(budget, amount=0.5)


def test_the_guards_of_plan_optimum_hold_here() -> None:
    """A law that reaches 1, a covariance that says nothing, N* at the end of the sizes."""
    broken = replace(OPT_13B, law=AcceptanceLaw(A=-0.0067, B=0.0129, C=1.05))
    with pytest.raises(InputError, match="no best draft size"):
        ladder(broken, SIZES, exactly)
    vast = ((1e6, 0.0, 0.0), (0.0, 1e6, 0.0), (0.0, 0.0, 1e6))
    found = ladder(replace(OPT_13B, law=AcceptanceLaw(cov=vast)), SIZES, exactly)
    assert found.ci95 is None and "says nothing about N*" in found.warnings[0]
    flat = AcceptanceLaw(A=0.0, B=0.0, C=0.6)
    edge = ladder(replace(OPT_13B, law=flat), SIZES, exactly)
    assert edge.best_params is not None and edge.best_params < 10
    assert "edge of the sizes" in edge.warnings[0]
