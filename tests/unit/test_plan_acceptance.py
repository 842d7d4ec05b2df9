"""The acceptance rate from counts: recovery, coverage of the intervals, and the test of i.i.d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from draftsmith.core.speedup import tokens_per_step
from draftsmith.plan.acceptance import RateEstimate, estimate, wilson
from draftsmith.plan.observations import LengthCount

LENGTHS = range(1, 10)
each_wilson = np.vectorize(wilson, otypes=[float, float])


def histogram(rng: np.random.Generator, rates: np.ndarray) -> list[LengthCount]:
    """Counts of steps at gamma 1 .. 9; `rates` has the acceptance rate of each step."""
    counts = []
    for gamma in LENGTHS:
        rejected = rng.random((len(rates), gamma)) >= rates[:, None]
        accepted = np.where(rejected.any(1), rejected.argmax(1), gamma)
        for length, count in enumerate(np.bincount(accepted, minlength=gamma + 1)):
            counts.append(LengthCount(gamma=gamma, accepted=length, count=int(count)))
    return counts


def expected(alpha: float, steps: int) -> list[LengthCount]:
    """Counts without noise."""
    return [
        LengthCount(
            gamma=gamma,
            accepted=n,
            count=round(steps * alpha**n * ((1 - alpha) if n < gamma else 1.0)),
        )
        for gamma in LENGTHS
        for n in range(gamma + 1)
    ]


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75])
def test_counts_without_noise_give_the_rate_back(alpha: float) -> None:
    found = estimate(expected(alpha, 4**12))  # all counts are whole
    assert found.least_squares.alpha == pytest.approx(alpha, abs=1e-12)
    assert found.mle.alpha == pytest.approx(alpha, abs=1e-12)
    assert found.iid_p_value == pytest.approx(1.0)
    assert found.warnings == ()
    for gamma, tokens in found.tokens_per_step.items():
        assert tokens == pytest.approx(float(tokens_per_step(alpha, gamma)), rel=1e-12)
    assert found.by_depth == pytest.approx([alpha] * 9)


@pytest.mark.parametrize("alpha", [0.5, 0.65, 0.8])
def test_both_estimates_are_unbiased_and_one_is_less_noisy(alpha: float) -> None:
    rng = np.random.default_rng(1)
    found = [estimate(histogram(rng, np.full(1000, alpha))) for _ in range(150)]
    fitted = np.array([one.least_squares.alpha for one in found])
    likely = np.array([one.mle.alpha for one in found])
    for values in (fitted, likely):
        assert abs(values.mean() - alpha) < 4 * values.std() / np.sqrt(len(values))
    assert likely.std() < fitted.std()
    covered = [
        one.least_squares.ci95[0] < alpha < one.least_squares.ci95[1]
        for one in found
        if one.least_squares.ci95 is not None
    ]
    # the printed interval is too narrow: 78 to 90 % where it says 95
    assert 0.72 < np.mean(covered) < 0.95


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.3, 0.5, 0.65, 0.8, 0.95, 0.99])
def test_the_binomial_interval_covers_what_it_says(alpha: float) -> None:
    """2,000 histograms with 50 steps at each length: the interval of `estimate` is the score
    interval of all judged tokens (compared on 20 of them), and that one covers alpha."""
    rng = np.random.default_rng(2)
    accepted_R, tried_R = np.zeros(2000), np.zeros(2000)
    for gamma in LENGTHS:
        rejected = rng.random((2000, 50, gamma)) >= alpha
        accepted = np.where(rejected.any(2), rejected.argmax(2), gamma)
        accepted_R += accepted.sum(1)
        tried_R += np.minimum(accepted + 1, gamma).sum(1)
    low, high = each_wilson(accepted_R, tried_R)
    assert 0.93 <= np.mean((low <= alpha) & (alpha <= high)) <= 0.97
    for _ in range(20):
        counts = histogram(rng, np.full(50, alpha))
        accepted_sum = sum(one.count * one.accepted for one in counts)
        tried_sum = sum(one.count * min(one.accepted + 1, one.gamma) for one in counts)
        ends = wilson(accepted_sum, tried_sum)
        assert estimate(counts).mle.ci95 == pytest.approx([float(end) for end in ends], rel=1e-12)


def test_the_ends_of_the_interval_are_rates_that_the_score_test_just_keeps() -> None:
    accepted, tried = np.array([3.0, 17.0, 190.0]), np.array([40.0, 40.0, 200.0])
    for end in each_wilson(accepted, tried):
        score = (accepted / tried - end) / np.sqrt(end * (1 - end) / tried)
        assert np.abs(score) == pytest.approx(1.96, rel=1e-12)


def test_the_interval_stays_within_the_shares_at_the_ends() -> None:
    low, high = each_wilson([0, 40], [40, 40])
    assert low[0] == 0 and 0 < high[0] < 0.1
    assert 0.9 < low[1] < 1 and high[1] == 1
    everything = estimate([LengthCount(gamma=3, accepted=3, count=40)])
    assert everything.mle.alpha == everything.least_squares.alpha == 1.0
    assert everything.iid_p_value is None
    nothing = estimate([LengthCount(gamma=g, accepted=0, count=40) for g in (2, 3)])
    assert nothing.mle.alpha == nothing.least_squares.alpha == 0.0


def test_the_interval_holds_the_share_that_was_measured() -> None:
    """Exactly at the ends, where rounding would leave it outside."""
    tried = np.arange(1, 3000)
    low, high = each_wilson(np.zeros(len(tried)), tried)
    assert np.all(low == 0.0) and np.all(high < 1.0)
    low, high = each_wilson(tried, tried)
    assert np.all(high == 1.0) and np.all(low > 0.0)
    for n in (1, 2, 7, 40):
        low, high = each_wilson(np.arange(n + 1), np.full(n + 1, n))
        assert np.all((low <= np.arange(n + 1) / n) & (np.arange(n + 1) / n <= high))


@pytest.mark.parametrize(("accepted", "said"), [(0, "no drafted"), (2, "every drafted")])
def test_counts_with_one_outcome_are_said(accepted: int, said: str) -> None:
    counts = [LengthCount(gamma=2 + n, accepted=accepted + n, count=40) for n in (0, 1)]
    found = estimate(counts if accepted else [replace(one, accepted=0) for one in counts])
    assert found.iid_p_value is None and found.least_squares.ci95 is None
    assert found.mle.ci95 is not None
    assert len(found.warnings) == 1 and found.warnings[0].startswith(f"{said} token was accepted")


def test_too_few_counts_are_said() -> None:
    counts = [LengthCount(gamma=2, accepted=n, count=1) for n in range(3)]
    assert "too few counts" in estimate(counts).warnings[-1]


def test_the_least_squares_interval_is_the_printed_one() -> None:
    """alpha +- 1.96 s / sqrt(J'J), J by differences, s^2 over lengths - 1; cut off at 0 and 1."""
    found = estimate(histogram(np.random.default_rng(6), np.full(300, 0.6)))
    alpha, lengths = found.least_squares.alpha, np.array(LENGTHS)
    missed = tokens_per_step(alpha, lengths) - list(found.tokens_per_step.values())
    step = 1e-6
    ends = [tokens_per_step(alpha + signed, lengths) for signed in (step, -step)]
    slope = (ends[0] - ends[1]) / (2 * step)
    assert abs(missed @ slope) < 1e-6
    se = np.sqrt(missed @ missed / 8 / (slope @ slope))
    assert found.least_squares.se == pytest.approx(se, rel=1e-6)
    assert found.least_squares.ci95 == pytest.approx((alpha - 1.96 * se, alpha + 1.96 * se))
    # few steps, at one length nearly all and at the other none rejected; and the reverse
    for last, end in ((2, 1), (0, 0)):
        rows = [LengthCount(gamma=1, accepted=a, count=9 if a == 0 else 1) for a in (0, 1)]
        cut = estimate([*rows, LengthCount(gamma=2, accepted=last, count=10)]).least_squares
        assert cut.se is not None and cut.ci95 is not None
        assert abs(cut.alpha - end) < 1.96 * cut.se and cut.ci95[end] == end


def test_one_rate_everywhere_passes_the_test_and_p_values_are_uniform() -> None:
    rng = np.random.default_rng(3)
    values = [estimate(histogram(rng, np.full(200, 0.65))).iid_p_value or 0.0 for _ in range(300)]
    assert 0.4 < np.mean(values) < 0.6
    assert np.mean(np.array(values) < 0.05) < 0.09


@pytest.mark.parametrize("concentration", [20, 5, 2])
def test_rates_that_vary_between_steps_are_noticed(concentration: float) -> None:
    rng = np.random.default_rng(4)
    rates = rng.beta(0.65 * concentration, 0.35 * concentration, 3000)
    found = estimate(histogram(rng, rates))
    assert found.iid_p_value is not None and found.iid_p_value < 1e-4
    assert "not i.i.d." in found.warnings[0]
    # and the fitted rate is then no mean rate
    assert found.least_squares.alpha > 0.66
    assert found.by_depth[0] is not None and found.by_depth[-1] is not None
    assert found.by_depth[-1] > found.by_depth[0]


def test_a_rate_that_depends_on_the_length_is_noticed() -> None:
    counts = []
    for gamma, alpha in ((1, 0.8), (2, 0.6)):
        for n in range(gamma + 1):
            share = alpha**n * ((1 - alpha) if n < gamma else 1.0)
            counts.append(LengthCount(gamma=gamma, accepted=n, count=round(1000 * share)))
    p_value = estimate(counts).iid_p_value
    assert p_value is not None and p_value < 1e-6


def test_deep_places_with_few_trials_are_tested_together() -> None:
    """Sixteen steps at each length: half accepted at depth 1, and of those none at depth 2."""
    counts = [
        LengthCount(gamma=gamma, accepted=n, count=8) for gamma in range(2, 10) for n in (0, 1)
    ]
    p_value = estimate(counts).iid_p_value
    assert p_value is not None and p_value < 1e-6


def test_a_single_length_has_no_least_squares_interval() -> None:
    found = estimate([LengthCount(gamma=1, accepted=a, count=c) for a, c in ((0, 40), (1, 60))])
    assert found.least_squares.alpha == pytest.approx(0.6)
    assert found.least_squares.ci95 is None and found.iid_p_value is None
    length, depth = found.warnings
    assert "one draft length only" in length and "all drafts have one token" in depth


def test_rows_of_the_same_kind_add_up() -> None:
    halves = [LengthCount(gamma=2, accepted=n, count=c) for n, c in ((0, 5), (1, 7), (2, 8))]
    whole = [LengthCount(gamma=2, accepted=n, count=c) for n, c in ((0, 10), (1, 14), (2, 16))]
    assert estimate([*halves, *halves]) == estimate(whole)


# --------------------------------------------------------------------------- prompts


def texts(
    rng: np.random.Generator, prompts: int, alpha: float, *, same: bool, length: int = 64
) -> list[LengthCount]:
    """Every token is accepted with one probability, and all prompts are decoded at all lengths:
    `same` text each time, as at temperature 0, or another one."""
    return many_texts(rng, 1, prompts, alpha, same=same, length=length)[0]


def many_texts(
    rng: np.random.Generator,
    repeats: int,
    prompts: int,
    alpha: float,
    *,
    same: bool,
    length: int = 64,
) -> list[list[LengthCount]]:
    """`texts` so many times: their prompts are decoded side by side."""
    every = repeats * prompts
    counts: list[list[LengthCount]] = [[] for _ in range(repeats)]
    accepted_PT = rng.random((every, length + 1)) < alpha
    for gamma in LENGTHS:
        if not same:
            accepted_PT = rng.random((every, length + 1)) < alpha
        accepted_PT[:, -1] = False
        run_PT = np.zeros((every, length + 1), int)  # accepted ones from here on
        for place in range(length - 1, -1, -1):
            run_PT[:, place] = np.where(accepted_PT[:, place], run_PT[:, place + 1] + 1, 0)
        steps_PL, rows = np.zeros((every, gamma + 1), int), np.arange(every)
        at = np.zeros(every, int)
        while len(rows := rows[at[rows] < length - gamma]):
            found = np.minimum(run_PT[rows, at[rows]], gamma)
            steps_PL[rows, found] += 1
            at[rows] += found + 1
        for row, n in np.argwhere(steps_PL).tolist():
            repeat, prompt = divmod(row, prompts)
            count = int(steps_PL[row, n])
            one = LengthCount(gamma=gamma, accepted=n, count=count, prompt=str(prompt))
            counts[repeat].append(one)
    return counts


def covered(found: Sequence[RateEstimate], alpha: float) -> float:
    return float(
        np.mean([one.ci95 is not None and one.ci95[0] <= alpha <= one.ci95[1] for one in found])
    )


@pytest.mark.parametrize(
    ("alpha", "prompts", "same"),
    [(0.7, 16, True), (0.9, 10, True), (0.4, 30, True), (0.7, 16, False)],
)
@pytest.mark.every(4)
def test_by_prompts_intervals_cover_and_the_test_keeps_its_level(
    alpha: float, prompts: int, same: bool
) -> None:
    rng = np.random.default_rng(8)
    histograms = many_texts(rng, 500, prompts, alpha, same=same)
    found = [estimate(one) for one in histograms]
    assert 0.93 <= covered([one.mle for one in found], alpha) <= 0.97
    assert 0.925 <= covered([one.least_squares for one in found], alpha) <= 0.975
    values = np.array([one.iid_p_value for one in found], float)
    assert 0.45 < np.mean(values) < 0.55
    assert np.mean(values < 0.05) < 0.07 and np.mean(values < 0.01) < 0.02
    if same:  # what ignoring prompts would do
        blind = [estimate([replace(one, prompt=None) for one in each]) for each in histograms[:100]]
        assert covered([one.mle for one in blind], alpha) < 0.7
        assert np.mean([(one.iid_p_value or 0.0) < 0.05 for one in blind]) > 0.07


def test_by_prompts_rates_that_vary_between_steps_are_noticed() -> None:
    rng = np.random.default_rng(4)
    counts = []
    for prompt in range(12):
        rates = rng.beta(0.65 * 2, 0.35 * 2, 250)
        counts += [replace(one, prompt=str(prompt)) for one in histogram(rng, rates)]
    found = estimate(counts)
    assert found.iid_p_value is not None and found.iid_p_value < 0.005
    assert "not i.i.d." in found.warnings[0] and "too narrow" not in found.warnings[0]


def test_by_prompts_both_estimates_are_those_of_the_whole_histogram() -> None:
    counts = texts(np.random.default_rng(1), 12, 0.6, same=True)
    by_prompt, whole = (estimate(counts), estimate([replace(one, prompt=None) for one in counts]))
    assert by_prompt.mle.alpha == pytest.approx(whole.mle.alpha)
    assert by_prompt.least_squares.alpha == whole.least_squares.alpha
    assert by_prompt.tokens_per_step == whole.tokens_per_step
    assert by_prompt.by_depth == whole.by_depth


def test_the_error_by_prompts_is_nearly_that_of_leaving_prompts_out() -> None:
    """The jackknife: (n - 1) / n times the sum of squares of what each prompt changes."""
    counts = texts(np.random.default_rng(2), 25, 0.6, same=True)
    found = estimate(counts)
    left = [estimate([c for c in counts if c.prompt != str(prompt)]) for prompt in range(25)]
    for whole, parts in (
        (found.mle, [one.mle.alpha for one in left]),
        (found.least_squares, [one.least_squares.alpha for one in left]),
    ):
        jackknife = np.sqrt(24 / 25 * np.sum((np.array(parts) - np.mean(parts)) ** 2))
        assert whole.se == pytest.approx(jackknife, rel=0.1)


def test_prompts_are_trials_where_all_outcomes_are_equal() -> None:
    every = [LengthCount(gamma=2, accepted=2, count=50, prompt=str(prompt)) for prompt in range(8)]
    low, high = wilson(8, 8)
    assert estimate(every).mle.ci95 == (pytest.approx(float(low)), float(high)) and high == 1
    none = estimate([replace(one, accepted=0) for one in every])
    assert none.mle.ci95 == (0.0, pytest.approx(1 - float(low)))
    assert none.least_squares.ci95 is None and none.iid_p_value is None


def test_one_prompt_says_nothing_about_others() -> None:
    counts = [LengthCount(gamma=2, accepted=n, count=50, prompt="a") for n in range(3)]
    idle = LengthCount(gamma=2, accepted=1, count=0, prompt="b")
    for found in (estimate(counts), estimate([*counts, idle])):
        assert found.mle.ci95 is None is found.least_squares.ci95 and found.iid_p_value is None
        assert "one prompt" in found.warnings[0]


def test_by_prompts_one_length_has_a_least_squares_interval() -> None:
    counts = [c for c in texts(np.random.default_rng(3), 12, 0.6, same=True) if c.gamma == 4]
    found = estimate(counts)
    assert found.least_squares.ci95 is not None and found.warnings == ()
