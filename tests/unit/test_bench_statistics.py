"""The definitions on records written by hand, and the bootstrap's coverage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.measurements import a_record

from draftsmith.bench.records import (
    BASELINE,
    TRANSFORMERS,
    CostSeconds,
    FirstDivergence,
    Floor,
    Pace,
    PhaseSeconds,
    RunRecord,
    bootstrap_interval,
    drafter_metrics,
    exceeds_floor,
    total_floor,
    weighted_speedup,
)


def line(
    drafter: str, prompt: int, *, seconds: float, tokens: int = 11, **more: object
) -> RunRecord:
    return a_record(drafter, prompt, seconds=seconds, tokens=tokens, **{"identical": True, **more})


def only(records: list[RunRecord], name: str) -> object:
    (found,) = [entry for entry in drafter_metrics(records) if entry.name == name]
    return found


def test_speedup_leaves_the_prompt_step_out_and_weighs_prompts_by_tokens() -> None:
    records = [
        line(BASELINE, 0, seconds=10.0, tokens=11),  # 1.0 s per token, 10 tokens
        line(BASELINE, 1, seconds=30.0, tokens=31),  # 1.0 s per token, 30 tokens
        line("d", 0, seconds=5.0, tokens=11),  # 0.5 s
        line("d", 1, seconds=7.5, tokens=31),  # 0.25 s
    ]
    found = only(records, "d")
    assert found.speedup == pytest.approx(40 / (10 * 0.5 + 30 * 0.25))
    assert found.speedup_median_prompt == pytest.approx(3.0)
    assert only(records, BASELINE).speedup == 1.0


def test_a_stray_repeat_does_not_move_the_speedup() -> None:
    records = [line(BASELINE, 0, seconds=10.0, repeat=r) for r in range(3)]
    records += [line("d", 0, seconds=s, repeat=r) for r, s in enumerate((5.0, 500.0, 5.0))]
    assert only(records, "d").speedup == pytest.approx(2.0)


def test_seconds_of_a_group_count_once() -> None:
    both = [line("d", 0, seconds=6.0), line("d", 1, seconds=6.0, group=0)]
    assert only(both, "d").seconds_per_token == pytest.approx(6.0 / 20)


def test_a_prompt_that_ends_at_once_has_no_pace() -> None:
    records = [line(BASELINE, 0, seconds=0.0, tokens=1), line("d", 0, seconds=0.0, tokens=1)]
    assert only(records, "d").speedup is None


def test_transformers_is_a_second_baseline() -> None:
    records = [
        line(BASELINE, 0, seconds=10.0),
        line(TRANSFORMERS, 0, seconds=20.0),
        line("d", 0, seconds=5.0),
    ]
    assert only(records, "d").speedup_vs_transformers == pytest.approx(4.0)
    assert only(records, BASELINE).speedup_vs_transformers == pytest.approx(2.0)
    assert only(records, TRANSFORMERS).speedup == pytest.approx(0.5)
    assert only(records, TRANSFORMERS).tokens_per_step is None


def test_acceptance_is_token_weighted_and_beside_it_per_prompt() -> None:
    records = [
        line("d", 0, seconds=1.0, steps=4, accepted=7, offered=8, proposed=16),
        line("d", 1, seconds=1.0, steps=8, accepted=0, offered=2, proposed=4),
        line("d", 2, seconds=1.0, steps=11, accepted=0, offered=0, proposed=0),
    ]
    found = only(records, "d")
    assert found.tokens_per_step == pytest.approx(33 / 23)
    assert found.acceptance_rate == pytest.approx(7 / 10)
    assert found.node_acceptance_rate == pytest.approx(7 / 20)
    assert found.acceptance_rate_per_prompt == pytest.approx((7 / 8 + 0.0) / 2)


def test_figures_without_meaning_are_none() -> None:
    found = only([line(BASELINE, 0, seconds=1.0, steps=11, offered=0, proposed=0)], BASELINE)
    assert found.acceptance_rate is None
    assert found.node_acceptance_rate is None
    assert found.acceptance_by_position is None
    assert found.speedup_ci95 is None
    warm = line("d", 0, seconds=1.0, temperature=0.8, identical=None)
    (found,) = drafter_metrics([warm])
    assert found.identical_to_autoregressive is None
    assert found.divergences is None
    assert found.largest_gap_at_divergence is None


def test_positions_add_up_over_prompts_of_different_depth() -> None:
    records = [
        line("d", 0, seconds=1.0, by_position=((4, 2), (2, 1))),
        line("d", 1, seconds=1.0, by_position=((6, 6),)),
    ]
    assert only(records, "d").acceptance_by_position == (0.8, 0.5)


def test_efficiency_is_draft_and_target_over_everything() -> None:
    phases = PhaseSeconds(draft=1.0, target=6.0, verify=2.0, other=1.0)
    assert only([line("d", 0, seconds=10.0, phases=phases)], "d").engine_efficiency == 0.7


def test_predicted_speedup_is_the_ratio_of_summed_costs() -> None:
    # tau 3, t(1) = 2, t_draft = 1, t(n) = 3: 3 * 2 / (1 + 3), in ten steps and in two
    costs = [CostSeconds(baseline=n * 3 * 2.0, draft=n * 1.0, target=n * 3.0) for n in (10, 2)]
    records = [line("d", i, seconds=1.0, costs=cost) for i, cost in enumerate(costs)]
    assert only(records, "d").predicted_speedup == pytest.approx(1.5)


def test_divergences_count_tokens_up_to_the_first_difference() -> None:
    far = FirstDivergence(at=4, gap=0.25, bound=0.5)
    wide = FirstDivergence(at=9, gap=2.0, bound=0.5)
    records = [
        line("d", 0, seconds=1.0),
        line("d", 1, seconds=1.0, identical=False, divergence=far),
        line("d", 2, seconds=1.0, identical=False, divergence=wide),
        line("d", 2, seconds=1.0, identical=False, divergence=wide, repeat=1),
    ]
    found = only(records, "d")
    assert found.identical_to_autoregressive is False
    assert (found.divergences, found.divergences_over_bound) == (2, 1)
    assert found.largest_gap_at_divergence == 2.0
    assert found.divergence_rate == pytest.approx(2 / (11 + 5 + 10))


def test_the_floor_is_compared_by_a_test_and_not_by_chance() -> None:
    some = Floor(tokens=300, flips=1, largest_gap=0.1)
    records = [line(BASELINE, 0, seconds=1.0, floor=some), line(BASELINE, 1, seconds=1.0)]
    floor = total_floor(records)
    assert floor == some
    near = FirstDivergence(at=5, gap=0.1, bound=0.5)
    few = [line("d", 0, seconds=1.0, tokens=100, identical=False, divergence=near)]
    many = [replace(few[0], prompt=str(i), group=i) for i in range(20)]
    assert not exceeds_floor(few, some)
    assert exceeds_floor(many, some)
    assert total_floor([line("d", 0, seconds=1.0)]) is None


def test_bootstrap_interval_covers_the_true_ratio() -> None:
    """Nominal 95 %; 200 data sets of 20 prompts: fewer than 170 hits has probability below 1e-6
    even at a true coverage of 92 %, which is what a percentile interval of so few prompts has."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        pace = rng.lognormal(0.0, 0.3, 20)
        ratio = rng.lognormal(np.log(2.0), 0.2, 20)
        paces = [
            Pace(weight=1.0, baseline=float(p * r), candidate=float(p))
            for p, r in zip(pace, ratio, strict=True)
        ]
        found = bootstrap_interval(paces, draws=300)
        assert found is not None
        assert found.low <= (weighted_speedup(paces) or 0.0) <= found.high
        truth = 2.0 * np.exp(0.2**2 / 2)  # mean of the log-normal ratio
        hits += found.low <= truth <= found.high
    assert hits >= 170


def test_bootstrap_pairs_the_sides_of_a_prompt() -> None:
    # prompts differ a hundredfold, but every one is exactly twice as fast
    paces = [Pace(weight=1.0, baseline=2.0 * 10**k, candidate=10.0**k) for k in (-1, 0, 1)]
    found = bootstrap_interval(paces)
    assert found is not None
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)
    assert bootstrap_interval(paces[:1]) is None
