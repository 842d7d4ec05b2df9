"""The controller of the draft length: the best length by its own estimates, and little regret."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.rows import Row, counted, one_more, wanted
from draftsmith.core.types import LengthPolicy, RowStats, StepCount
from draftsmith.plan.length_policy import CostAware, Experience, Learning, StepCosts

DEPTH = 16


def linear(target: float, draft: float, longest: int = DEPTH) -> StepCosts:
    """In units of a plain step: each drafted token costs so much of the target, and of drafting."""
    lengths = range(longest + 1)
    return StepCosts(
        target_D=tuple(1.0 + target * n for n in lengths),
        draft_D=tuple(draft * n for n in lengths),
        in_vain=1.0,
    )


def count_of(asked: int, offered: int, accepted: int) -> StepCount:
    return StepCount(asked=asked, offered=offered, accepted=accepted)


def more(stats: RowStats, asked: int, offered: int, accepted: int) -> RowStats:
    return one_more(stats, count_of(asked, offered, accepted))


def past(outcomes: Sequence[tuple[int, int]]) -> RowStats:
    """After steps of these (offered, accepted); all were to draft, if they did."""
    stats = RowStats()
    for offered, accepted in outcomes:
        stats = more(stats, offered, offered, accepted)
    return stats


outcomes = st.lists(
    st.integers(0, DEPTH).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=30
)
seconds = st.floats(1e-4, 10.0)


# ---------------------------------------------------------------------------- counts of a row


def test_counts_by_depth_are_trials_behind_accepted_tokens() -> None:
    stats = past([(4, 2)])
    assert stats.tried_D == (1.0, 1.0, 1.0)  # place 3 was never reached
    assert stats.kept_D == (1.0, 1.0, 0.0)
    assert past([(2, 2)]).tried_D == past([(2, 2)]).kept_D == (1.0, 1.0)
    assert past([(3, 0)]).tried_D == (1.0,)
    assert past([(0, 0)]).tried_D == ()


@given(outcomes)
def test_counts_fade_and_successes_never_outnumber_trials(steps: list[tuple[int, int]]) -> None:
    stats = past(steps)
    assert len(stats.tried_D) == len(stats.kept_D)
    assert all(0 <= k <= t <= len(steps) for t, k in zip(stats.tried_D, stats.kept_D, strict=True))
    idle = more(stats, 0, 0, 0)
    assert all(new < old for new, old in zip(idle.tried_D, stats.tried_D, strict=True))
    assert (stats.offered, stats.accepted) == tuple(map(sum, zip(*steps, strict=True))) or not steps


def test_a_young_row_forgets_faster_than_an_old_one() -> None:
    def kept_after(first: int) -> float:
        old = past([(0, 0)] * first + [(1, 0)])
        return past([(0, 0)] * first + [(1, 0)] + [(0, 0)] * 10).tried_D[0] / old.tried_D[0]

    young, grown, old = kept_after(0), kept_after(40), kept_after(400)
    assert young < grown < old < 1.0


# ---------------------------------------------------------------------------- one decision


triples = st.lists(
    st.integers(0, DEPTH)
    .flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
    .flatmap(lambda some: st.tuples(*map(st.just, some), st.integers(0, some[1]))),
    max_size=20,
)


@settings(max_examples=200)
@given(
    triples,
    triples,
    st.lists(st.tuples(seconds, seconds), min_size=2, max_size=DEPTH + 1),
    seconds,
    st.integers(1, 4),
)
def test_the_depth_is_the_best_where_drafts_end_early(
    before: list[tuple[int, int, int]],
    steps: list[tuple[int, int, int]],
    costs: list[tuple[float, float]],
    in_vain: float,
    rows: int,
) -> None:
    """The formulas of the class, written out for every depth; of a batch whose rows are alike."""
    target, draft = zip(*costs, strict=True)
    policy = CostAware(costs=StepCosts(target_D=target, draft_D=draft, in_vain=in_vain))
    policy = policy.after([count_of(*step) for step in before])
    stats = RowStats()
    for step in steps:
        stats = more(stats, *step)
    past, rates = policy.past, list(policy.rates(stats))
    usual = (past.found + 8) / (past.asked + 8)
    found = (stats.found + 8 * usual) / (stats.asked + 8)
    end = (stats.ended + past.ended) / (stats.asked_on + past.asked_on + 4)
    kept = (stats.ended_kept + past.ended_kept) / (stats.asked_on_kept + past.asked_on_kept + 4)
    whole = [one + other for one, other in costs]

    def pace(n: int) -> float:
        if n == 0:
            return (1.0 if rows == 1 else 1.04) * rows / whole[0]
        survival = [math.prod(rates[:d]) * (1 - kept) ** (d - 1) for d in range(1, n + 1)]
        longest = [1 - (1 - found * (1 - end) ** d) ** rows for d in range(n)]  # any has one there
        spent = float(np.interp(sum(longest) / longest[0], range(len(whole)), whole))
        expected = (1 - longest[0]) * in_vain + longest[0] * spent
        return rows * (1 + found * sum(survival)) / expected

    paces = [pace(n) for n in range(len(costs))]
    chosen = policy.best_depth({stats: rows}, [rates])
    assert paces[chosen] == pytest.approx(max(paces), rel=1e-9)


@settings(max_examples=200)
@given(outcomes, st.lists(st.tuples(seconds, seconds), min_size=2, max_size=DEPTH + 1), seconds)
def test_the_length_is_the_best_by_enumeration(
    steps: list[tuple[int, int]], costs: list[tuple[float, float]], in_vain: float
) -> None:
    target, draft = zip(*costs, strict=True)
    policy = CostAware(costs=StepCosts(target_D=target, draft_D=draft, in_vain=in_vain))
    # every depth is known: there is no other limit
    stats = past([(DEPTH, DEPTH), *steps])
    rates = list(policy.rates(stats))
    assert len(rates) == policy.max_length == len(costs) - 1
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    paces = [
        (1.0 + sum(math.prod(rates[:d]) for d in range(1, n + 1))) / (target[n] + draft[n])
        for n in range(len(costs))
    ]
    assert stats.found == stats.asked  # then costs of looking in vain do not matter
    chosen = policy.length(stats)
    assert 0 <= chosen <= policy.max_length
    assert paces[chosen] == pytest.approx(max(paces), rel=1e-9)


def test_rates_end_at_what_was_seen_and_begin_at_the_prior() -> None:
    policy = CostAware(costs=linear(0.02, 0.1, 3))
    hopeful = list(policy.rates(RowStats()))
    assert 0.5 < hopeful[0] < hopeful[1] < hopeful[2] < 1.0
    many = RowStats(tried_D=(4e4, 2e4, 1e4), kept_D=(2e4, 1e4, 1e3))
    assert list(policy.rates(many)) == pytest.approx([0.5, 0.5, 0.1], abs=1e-3)
    # what is not seen follows what is: behind a bad beginning less is expected
    good = list(policy.rates(RowStats(tried_D=(50.0,), kept_D=(49.0,))))
    bad = list(policy.rates(RowStats(tried_D=(50.0,), kept_D=(5.0,))))
    assert bad[1] < hopeful[1] < good[1]


def test_nothing_is_drafted_where_it_cannot_pay() -> None:
    certain = RowStats(tried_D=(100.0,) * 4, kept_D=(100.0,) * 4)
    assert CostAware(costs=linear(0.5, 0.6)).length(certain) == 0
    assert CostAware(costs=linear(0.1, 0.1)).length(certain) > 0
    never = RowStats(offered=20, tried_D=(20.0,), kept_D=(0.0,))
    assert CostAware(costs=linear(0.02, 0.1)).length(never) == 0


def test_what_costs_nothing_is_drafted_as_deep_as_may_be() -> None:
    sure = past([(DEPTH, DEPTH)] * 20)
    assert CostAware(costs=linear(0.0, 0.0, 7)).length(sure) == 7


def in_vain(seconds: float) -> CostAware:
    costs = linear(0.04, 0.0)
    return CostAware(
        costs=StepCosts(target_D=costs.target_D, draft_D=costs.draft_D, in_vain=seconds)
    )


def test_looking_in_vain_counts_where_it_costs() -> None:
    """A draft is there in every fifth step, and then its first token is right."""
    seldom = RowStats()
    for number in range(60):
        there = number % 5 == 0
        seldom = more(seldom, 3, 3 * there, 1 * there)
    assert in_vain(1.0).length(seldom) > 0
    assert in_vain(2.5).length(seldom) == 0


def test_a_draft_grows_step_by_step() -> None:
    """What was never tried is not believed at once, however cheap it is."""
    policy, stats = CostAware(costs=linear(0.001, 0.0)), RowStats()
    lengths = []
    for _ in range(4):
        lengths.append(policy.length(stats))
        stats = more(stats, lengths[-1], lengths[-1], lengths[-1])
    assert lengths == [4, 12, 16, 16]


# ---------------------------------------------------------------------------- over time

Accepted = Callable[[int], int]
"""Place in the text -> how many drafted tokens would be accepted there."""


def decode(policy: LengthPolicy | int, accepted: Accepted, costs: StepCosts, count: int) -> float:
    """Seconds for `count` tokens, a row as the decoding loop would have it."""
    place, spent, row = 0, 0.0, row_of(count)
    while place < count:
        depth = policy if isinstance(policy, int) else wanted([row], policy)[0]
        row.asked = min(depth, count - place - 1)
        kept = min(row.asked, accepted(place))
        row.count(row.asked, kept)
        place += kept + 1
        spent += costs.seconds(row.asked)
    if not isinstance(policy, int):
        policy.learn([row.counts])
    return spent


def row_of(count: int) -> Row:
    return Row(request_id=0, tokens=[0], num_prompt=1, max_new_tokens=count, max_length=None)


def runs(rates: Callable[[int], float], count: int, seed: int) -> Accepted:
    """Every drafted token at place t is accepted with probability rates(t), decided beforehand."""
    rng = np.random.default_rng(seed)
    good = rng.random((count, DEPTH)) < np.array(
        [[rates(place + d) for d in range(DEPTH)] for place in range(count)]
    )
    lengths = good.cumprod(1).sum(1).tolist()
    return lambda place: lengths[place]


def loss(
    rates: Callable[[int], float], costs: StepCosts, *, count: int = 256, rows: int = 24
) -> float:
    """The controller's loss against the best fixed length (or none) for all rows."""
    texts = [runs(rates, count, seed) for seed in range(rows)]
    policy = CostAware(costs=costs)
    mine = sum(decode(policy, text, costs, count) for text in texts)
    fixed = [sum(decode(n, text, costs, count) for text in texts) for n in range(DEPTH + 1)]
    return mine / min(fixed) - 1.0


LOOKUP, MODEL, DEAR = linear(0.04, 0.0), linear(0.01, 0.1), linear(0.04, 0.27)


@pytest.mark.parametrize("costs", [LOOKUP, MODEL, DEAR], ids=["lookup", "model", "dear"])
@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(0.3, marks=pytest.mark.full),
        0.5,
        pytest.param(0.7, marks=pytest.mark.full),
        0.9,
    ],
)
def test_the_best_fixed_length_is_hardly_better(rate: float, costs: StepCosts) -> None:
    assert loss(lambda place: rate, costs) < 0.06


@pytest.mark.parametrize("costs", [LOOKUP, MODEL, DEAR], ids=["lookup", "model", "dear"])
@pytest.mark.every(3)
def test_a_useless_drafter_costs_little(costs: StepCosts) -> None:
    """The bound holds from the first try on, and in texts as short as an answer."""
    assert loss(lambda place: 0.0, costs, count=256) < 0.03
    assert loss(lambda place: 0.0, costs, count=1024, rows=6) < 0.02


@pytest.mark.parametrize("costs", [LOOKUP, MODEL, DEAR], ids=["lookup", "model", "dear"])
def test_easy_and_hard_passages_are_told_apart(costs: StepCosts) -> None:
    """No fixed length is as good on a text whose halves want different ones."""
    assert loss(lambda place: 0.95 if place < 128 else 0.05, costs) < 0.0


SMALL = StepCosts(
    target_D=tuple(1.0 + (0.17 + 0.02 * n) * (n > 0) for n in range(DEPTH + 1)),
    draft_D=tuple((0.15 + 0.2 * n) * (n > 0) for n in range(DEPTH + 1)),
    in_vain=1.35,
)
"""Costs of an 8 M target and a draft model on a CPU: the first drafted token costs most."""


def of_a_batch(
    policy: LengthPolicy | int, texts: Sequence[Accepted], count: int, costs: StepCosts
) -> float:
    """Seconds in which all rows have so many tokens; a step lasts as long as its deepest draft."""
    rows, places, spent = [row_of(count) for _ in texts], [0] * len(texts), 0.0
    while min(places) < count:
        live = [b for b, place in enumerate(places) if place < count]
        some = [rows[b] for b in live]
        depths = [policy] * len(live) if isinstance(policy, int) else wanted(some, policy)
        for b, row, depth in zip(live, some, depths, strict=True):
            row.asked = min(depth, count - places[b] - 1)
            kept = min(row.asked, texts[b](places[b]))
            row.count(row.asked, kept)
            places[b] += kept + 1
        spent += costs.seconds(max(row.asked for row in some))
    if not isinstance(policy, int):
        policy.learn([row.counts for row in rows])
    return spent


@pytest.mark.parametrize(("plain", "least"), [(1.0, 0.97), (0.92, 0.95)])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.5, 0.6, 0.7, 0.9])
def test_a_batch_is_hardly_slower_than_with_the_best_fixed_length(
    rate: float, plain: float, least: float
) -> None:
    """None included. Also where drafting hardly pays or hardly does not, and where a plain step
    takes less than was measured. Rows that decided each for themselves would draft at different
    steps, and each of these lasts as long as if all did."""
    costs = replace(SMALL, target_D=(plain * SMALL.target_D[0], *SMALL.target_D[1:]))
    batches = [[runs(lambda place: rate, 256, 8 * n + b) for b in range(4)] for n in range(6)]
    learning = Learning(CostAware(costs=SMALL))
    mine = sum(of_a_batch(learning, texts, 256, costs) for texts in batches)
    fixed = [sum(of_a_batch(n, texts, 256, costs) for texts in batches) for n in range(DEPTH + 1)]
    assert min(fixed) / mine > 0.95
    assert fixed[0] / mine > least


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 12])
def test_a_dear_drafter_is_tried_with_eight_tokens_of_a_batch(rows: int) -> None:
    """Two of each row at least; none is accepted, and at the first guess of 0.6 none would be
    tried. Nor is it tried anew when rows have left the batch."""
    policy, stats, drafted = CostAware(costs=linear(0.1, 0.6)), [RowStats()] * rows, 0
    while depth := policy.together(stats):
        stats = [more(row, depth, depth, 0) for row in stats]
        drafted += depth * rows
    assert max(8, 2 * rows) <= drafted <= max(10, 2 * rows)
    stats = [more(row, 0, 0, 0) for row in stats]
    assert not any(policy.together(stats[:left]) for left in range(1, rows + 1))


@pytest.mark.parametrize("rows", [4, 8])
def test_a_dear_drafter_that_is_good_is_found_to_be_in_a_batch(rows: int) -> None:
    """Sixty batches, each the first one: without a trial none would draft."""
    deep = range(DEPTH + 1)
    costs = StepCosts(
        target_D=tuple(1.0 + 0.05 * n for n in deep),
        draft_D=(0.0, *(0.5 + 0.35 * n for n in deep[1:])),
        in_vain=1.0,
    )
    spent = [
        of_a_batch(
            Learning(CostAware(costs=costs)),
            [runs(lambda place: 0.95, 128, 100 * number + b) for b in range(rows)],
            128,
            costs,
        )
        for number in range(60)
    ]
    assert sum(spent) < 0.8 * 128 * len(spent)


def test_what_is_useless_is_soon_known_to_be() -> None:
    """Short texts one after the other; the first alone would cost more."""
    for rate in (0.0, 0.1):
        texts = [runs(lambda place, rate=rate: rate, 96, seed) for seed in range(12)]
        learning = Learning(CostAware(costs=SMALL))
        assert sum(decode(learning, text, SMALL, 96) for text in texts) < 1.02 * 12 * 96


def test_what_others_found_worth_asking_for_is_asked_for_longer() -> None:
    """A drafter that finds nothing at first, and asking costs half a step."""
    policy = CostAware(costs=replace(SMALL, in_vain=1.6))
    good = replace(policy, past=Experience(asked=100.0, tried_D=(80.0,), kept_D=(70.0,)))
    bad = replace(policy, past=Experience(asked=100.0, tried_D=(10.0,), kept_D=(8.0,)))

    def patience(one: CostAware) -> int:
        stats, number = RowStats(), 0
        while length := one.length(stats):
            stats, number = more(stats, length, 0, 0), number + 1
            if number == 40:
                break
        return number

    assert patience(bad) == 0
    assert patience(policy) > 2
    assert patience(good) > 2


def test_older_rows_fade() -> None:
    """Ten steps: two without a draft, six of which a token was accepted, two all of it."""
    row = [count_of(2, 0, 0)] * 2 + [count_of(2, 2, 0)] * 2
    row += [count_of(2, 2, 1)] * 4 + [count_of(2, 2, 2)] * 2
    policy = CostAware(costs=SMALL)
    for _ in range(200):
        policy = policy.after(row)
    learnt = policy.past
    assert (learnt.asked, learnt.found) == pytest.approx((100.0, 80.0))
    assert learnt.tried_D[:3] == pytest.approx((80.0, 60.0, 0.0))
    assert learnt.kept_D[:3] == pytest.approx((60.0, 20.0, 0.0))


def test_what_is_common_is_believed_where_it_foretold_better() -> None:
    """Rows that are all alike, and rows with easy and hard passages."""

    def lead(rates: Callable[[int], float]) -> float:
        learning = Learning(CostAware(costs=MODEL))
        for seed in range(6):
            decode(learning, runs(rates, 256, seed), MODEL, 256)
        return learning.policy.past.lead

    assert lead(lambda place: 0.6) > 3.0
    assert lead(lambda place: 0.95 if place < 128 else 0.2) < -3.0


def test_rates_lie_between_both_forecasts() -> None:
    met = Experience(asked=90.0, tried_D=(80.0, 40.0), kept_D=(40.0, 30.0))
    stats = RowStats(tried_D=(9.0, 3.0), kept_D=(8.0, 1.0))
    own, common = zip(*CostAware(costs=MODEL, past=met).forecasts(stats), strict=True)
    assert own[0] > common[0] > 0.5
    assert own[1] < common[1]
    for lead, expected in ((-1e4, own), (1e4, common)):
        sure = CostAware(costs=MODEL, past=replace(met, lead=lead))
        assert tuple(sure.rates(stats)) == expected
    even = list(CostAware(costs=MODEL, past=met).rates(stats))
    assert even == pytest.approx([(a + b) / 2 for a, b in zip(own, common, strict=True)])
    fresh = CostAware(costs=MODEL)
    assert list(fresh.rates(stats)) == [own for own, _ in fresh.forecasts(stats)]


def test_the_common_forecast_by_hand() -> None:
    """48 of 68 behind 12 trials at 0.6 are 0.69; deeper, 3 trials at what that suggests."""
    met = Experience(asked=68.0, tried_D=(68.0, 27.0), kept_D=(48.0, 9.0))
    policy = CostAware(costs=linear(0.04, 0.1, 2), past=met)
    first = (48.0 + 12 * 0.6) / 80.0
    second = (9.0 + 3 * (3 * first + 1) / 4) / 30.0
    hope = 1.5 * math.sqrt(first * (1 - first) / 80.0)
    assert [one for _, one in policy.forecasts(RowStats())] == pytest.approx([first + hope, second])
    stats = RowStats(tried_D=(10.0, 5.0, 2.0), kept_D=(5.0, 2.0, 2.0))  # deeper than it drafts
    own, common = zip(*policy.forecasts(stats), strict=True)
    assert common == pytest.approx([(5 + 30 * (first + hope)) / 40, (2 + 30 * second) / 35])
    weight = 1.5 * (1 + 68 / 80)
    mine = (5 + weight * first) / (10 + weight)
    assert own == pytest.approx([mine, (2 + 3 * (3 * mine + 1) / 4) / 8])


def test_the_lead_by_hand() -> None:
    """Twice the difference of squared errors at every judged place; the first row has no rival."""
    policy = CostAware(costs=linear(0.04, 0.1, 2)).after([count_of(2, 2, 1)] * 4)
    assert policy.past.lead == 0.0
    own, common = zip(*policy.forecasts(RowStats()), strict=True)
    expected = sum((own[d] - kept) ** 2 - (common[d] - kept) ** 2 for d, kept in enumerate((1, 0)))
    once = policy.after([count_of(2, 2, 1)])
    assert once.past.lead == pytest.approx(2 * expected) and expected != 0.0
    # a second step of the same row knows of the first; an older row counts less
    step = past([(2, 2)])
    own, common = zip(*once.forecasts(step), strict=True)
    first = [(o, c, 1.0) for o, c in once.forecasts(RowStats())]
    errors = [*first, (own[0], common[0], 0.0)]
    gained = sum((o - kept) ** 2 - (c - kept) ** 2 for o, c, kept in errors)
    twice = once.after([count_of(2, 2, 2), count_of(2, 2, 0)])
    assert twice.past.lead == pytest.approx(0.9 * once.past.lead + 2 * gained)


@pytest.mark.parametrize("rate", [0.5, 0.6, 0.7])
def test_where_all_rows_are_alike_little_is_lost(rate: float) -> None:
    """Short texts one after the other, the first of which knows of no other."""
    texts = [runs(lambda place: rate, 128, seed) for seed in range(48)]
    learning = Learning(CostAware(costs=SMALL))
    mine = sum(decode(learning, text, SMALL, 128) for text in texts)
    fixed = [sum(decode(n, text, SMALL, 128) for text in texts) for n in range(DEPTH + 1)]
    assert mine < 1.03 * min(fixed)


def test_rows_of_their_own_kind_are_told_apart() -> None:
    count, costs = 192, MODEL
    texts = [
        runs(lambda place, rate=rate: rate, count, seed)
        for seed, rate in enumerate((0.0, 0.5, 0.95) * 6)
    ]
    mine = sum(decode(CostAware(costs=costs), text, costs, count) for text in texts)
    for length in range(DEPTH + 1):
        assert mine < sum(decode(length, text, costs, count) for text in texts)


def row_behind(outcomes: Sequence[tuple[int, int]]) -> Row:
    """A row after steps of these (offered, accepted), as in `past`."""
    row = row_of(1 << 30)
    for row.asked, accepted in outcomes:
        row.count(row.asked, accepted)
    return row


def steps_until(policy: LengthPolicy, row: Row, accept: bool, done: Callable[[int], bool]) -> int:
    """Steps, all accepted or none, until the row drafts as deep as is waited for."""
    for number in itertools.count():
        row.asked = wanted([row], policy)[0]
        if done(row.asked):
            return number
        row.count(row.asked, row.asked if accept else 0)
    raise AssertionError


@pytest.mark.parametrize("before", [10, 50, 500])
def test_it_gives_up_soon_and_tries_again_in_time(before: int) -> None:
    policy = CostAware(costs=MODEL)
    good = [(6, 6)] * before
    assert policy.length(past(good)) > 4
    assert steps_until(policy, row_behind(good), accept=False, done=lambda n: n <= 3) <= 40
    assert steps_until(policy, row_behind(good), accept=False, done=lambda n: n == 0) <= 160
    bad = [(1, 0)] * before
    assert policy.length(past(bad)) == 0
    assert 0 < steps_until(policy, row_behind([*bad, (0, 0)]), accept=False, done=bool) <= 160


@pytest.mark.parametrize("costs", [SMALL, MODEL, LOOKUP, DEAR])
@pytest.mark.parametrize("useless", [1, 3, 12, 60])
def test_an_idle_row_tries_again_whatever_rows_before_met(costs: StepCosts, useless: int) -> None:
    learning = Learning(CostAware(costs=costs))
    for _ in range(useless):
        decode(learning, lambda place: 0, costs, 96)
    idle = steps_until(learning, row_behind([]), accept=False, done=bool)
    assert idle <= 200
    # and once it is accepted, goes on
    stats = more(RowStats(steps=idle, idle=idle), 1, 1, 1)
    assert learning.length(stats) > 0


def test_a_long_good_text_behind_useless_ones_is_nearly_as_fast_as_alone() -> None:
    for costs in (SMALL, MODEL, LOOKUP, DEAR):
        learning = Learning(CostAware(costs=costs))
        for _ in range(12):
            decode(learning, lambda place: 0, costs, 96)
        good = runs(lambda place: 0.9, 1024, 7)
        best = min(decode(n, good, costs, 1024) for n in range(DEPTH + 1))
        assert decode(learning, good, costs, 1024) < 1.25 * best < 1024


@pytest.mark.parametrize("costs", [SMALL, MODEL, LOOKUP, DEAR])
@pytest.mark.parametrize("before", [0.6, 0.85, 0.95])
def test_a_useless_text_behind_good_ones_is_soon_known_to_be(
    costs: StepCosts, before: float
) -> None:
    learning = Learning(CostAware(costs=costs))
    for seed in range(12):
        decode(learning, runs(lambda place: before, 96, seed), costs, 96)
    assert decode(learning, lambda place: 0, costs, 256) < 1.12 * 256


def test_nothing_is_learnt_from_a_row_that_ended_in_its_first_step() -> None:
    policy = CostAware(costs=MODEL).after([count_of(2, 2, 1)] * 4)
    assert policy.after([]) == policy


@pytest.mark.parametrize("rate", [0.9, 0.95])
def test_a_dear_drafter_that_is_good_is_found_to_be(rate: float) -> None:
    """At the first guess of acceptance no depth pays."""
    costs = linear(0.04, 0.6)
    assert CostAware(costs=costs).best_depth({RowStats(): 1}, [[0.6] * DEPTH]) == 0
    texts = [runs(lambda place: rate, 96, seed) for seed in range(8)]
    learning = Learning(CostAware(costs=costs))
    mine = sum(decode(learning, text, costs, 96) for text in texts)
    best = min(sum(decode(n, text, costs, 96) for text in texts) for n in range(DEPTH + 1))
    assert mine < 1.03 * best < 8 * 96
    # one that is useless costs its trials
    useless = Learning(CostAware(costs=costs))
    assert sum(decode(useless, lambda place: 0, costs, 96) for _ in range(8)) < 1.03 * 8 * 96


def test_a_row_that_is_unlike_all_others_goes_by_itself() -> None:
    met = Experience(asked=90.0, tried_D=(80.0,), kept_D=(64.0,), lead=50.0)
    policy = CostAware(costs=MODEL, past=met)

    def share(kept: int, missed: int) -> float:
        stats = RowStats(tried_D=(float(kept + missed),), kept_D=(float(kept),))
        own, common = next(policy.forecasts(stats))
        return (next(policy.rates(stats)) - own) / (common - own)

    assert share(8, 2) == share(7, 3) == pytest.approx(1.0)
    assert share(0, 3) == pytest.approx(1.0, abs=0.5)
    assert share(0, 6) < share(0, 4) < share(0, 3)
    assert share(0, 8) < 0.01
    # the surprise of 8 misses where (64 + 7.2) / 92 are usual
    stats = RowStats(tried_D=(8.0,), kept_D=(0.0,))
    assert policy.surprise(stats) == pytest.approx(-8 * math.log(1 - 71.2 / 92))
    assert policy.surprise(RowStats()) == 0.0


def test_what_a_row_finds_itself_counts() -> None:
    """Others always found a draft, this row hardly ever: looking in vain then costs too much."""
    met = Experience(asked=90.0, tried_D=(90.0, 60.0), kept_D=(60.0, 40.0))
    policy = replace(in_vain(3.0), past=met)
    stats = RowStats(asked=40.0, found=40.0, tried_D=(40.0, 25.0), kept_D=(25.0, 20.0))
    assert policy.length(stats) > 0
    assert policy.length(replace(stats, found=2.0)) == 0


def test_a_depth_that_pays_only_later_is_grown_to() -> None:
    """A dear first token: nothing below 6 tokens pays, and at first 4 may be drafted."""
    costs = linear(0.02, 0.05)
    costs = replace(costs, draft_D=tuple(2.6 * (n > 0) + 0.05 * n for n in range(DEPTH + 1)))
    policy = CostAware(costs=costs)
    stats = RowStats(tried_D=(20.0,) * 2, kept_D=(19.0,) * 2)
    assert policy.best_depth({stats: 1}, [policy.rates(stats)]) > 6
    assert policy.length(stats) == 6 + 2  # twice the two that are known, and four


def test_after_a_change_for_the_better_it_drafts_deep_again() -> None:
    policy, stats = CostAware(costs=MODEL), past([(1, 0)] * 20 + [(0, 0)] * 20)
    spent = 0
    while policy.length(stats) < 4:
        length = policy.length(stats)
        stats = more(stats, length, length, length)
        spent += 1
        assert spent < 60


# ---------------------------------------------------------------------------- idle rows


def test_an_idle_row_decides_again_after_four_steps_and_later_after_more() -> None:
    class Never(CostAware):
        def length(self, stats: RowStats) -> int:
            asked.append(stats.steps)
            return 0

    asked: list[int] = []
    decode(Never(costs=MODEL), lambda place: 0, MODEL, 100)
    assert asked == [0, 4, 8, 12, 17, 24, 34, 48, 64, 80, 96]
    row = row_of(12)
    row.asked = 3
    row.count(0, 0)  # who looks in vain is not idle
    assert (row.pause, wanted([row], CostAware(costs=linear(0.0, 0.0)))[0]) == (0, 4)


def test_a_decision_is_held() -> None:
    """Short drafts are decided on at every second step behind the first eight; while drafts end
    before that depth, or nothing is found, at every fourth."""
    policy = CostAware(costs=linear(0.0, 0.0))

    def held(last: StepCount) -> list[int]:
        return [steps for steps in range(18) if policy.keeps(steps, last)]

    assert held(count_of(1, 1, 1)) == held(count_of(3, 3, 0)) == [9, 11, 13, 15, 17]
    assert held(count_of(1, 0, 0)) == held(count_of(8, 2, 2)) == [9, 10, 11, 13, 14, 15, 17]
    assert held(count_of(4, 4, 4)) == held(count_of(0, 0, 0)) == []


def faded(stats: RowStats) -> RowStats:
    """A step that is not to draft: counts fade, nothing else is known."""
    fade = 1.0 - 1.0 / min(10.0 + 0.7 * stats.steps, 64.0)
    scaled = ("asked", "found", "asked_on", "ended", "asked_on_kept", "ended_kept")
    return replace(
        stats,
        steps=stats.steps + 1,
        idle=stats.idle + 1,
        last_offered=0,
        last_accepted=0,
        **{name: fade * getattr(stats, name) for name in scaled},
        **{name: tuple(fade * n for n in getattr(stats, name)) for name in ("tried_D", "kept_D")},
    )


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, DEPTH)), max_size=6))
def test_steps_that_rest_are_counted_at_once_as_one_by_one(runs: list[tuple[int, int]]) -> None:
    """So many steps that draft nothing, then one that drafts so deep (0: nothing either)."""
    steps = [
        step
        for idle, depth in runs
        for step in [*[count_of(0, 0, 0)] * idle, count_of(depth, depth, depth // 2)]
    ]
    met = Experience(asked=9.0, tried_D=(9.0, 4.0), kept_D=(5.0, 3.0), lead=1.0)
    policy = CostAware(costs=linear(0.04, 0.1), past=met)
    stats, lead = RowStats(), 0.0
    for step in steps:
        forecasts = itertools.islice(policy.forecasts(stats), min(step.accepted + 1, step.offered))
        for d, (own, common) in enumerate(forecasts):
            kept = d < step.accepted
            lead += (own - kept) ** 2 - (common - kept) ** 2
        stats = one_more(stats, step) if step.asked else faded(stats)
    found = counted(RowStats(), steps)
    for part in fields(RowStats):
        assert getattr(found, part.name) == pytest.approx(getattr(stats, part.name))
    if steps:
        assert policy.after(steps).past.lead == pytest.approx(0.9 + 2.0 * lead)


def test_a_batch_keeps_its_depth_where_all_rows_do() -> None:
    class Asked(CostAware):
        def together(self, stats: Sequence[RowStats]) -> int:
            asked.append([row.steps for row in stats])
            return 5

    def step(*offered: int) -> None:
        for row, depth, count in zip(rows, wanted(rows, policy), offered, strict=True):
            row.asked = depth
            row.count(count, 1)

    asked: list[list[int]] = []
    rows, policy = [row_of(99), row_of(99)], Asked(costs=MODEL)
    for _ in range(11):
        step(1, 1)
    assert asked == [[n, n] for n in range(9)]  # and not behind the ninth and tenth
    step(5, 1)
    assert wanted(rows, policy) == [5, 5] and asked[9:] == [[12, 12]]
    step(5, 1)  # one of them was not at an end
    assert wanted(rows, policy) == [5, 5] and asked[9:] == [[12, 12], [12, 12], [13, 13]]


# ---------------------------------------------------------------------------- drafts that end early


def test_where_a_draft_ends_is_counted() -> None:
    """Asked for five: two, of which one is accepted, then two that both are, then five."""
    stats = more(RowStats(), 5, 2, 1)
    assert (stats.asked_on, stats.ended, stats.asked_on_kept, stats.ended_kept) == (2, 1, 1, 0)
    assert count_of(5, 2, 2).ends() == (2, 1, 2, 1)
    assert count_of(5, 5, 4).ends() == (4, 0, 4, 0)
    assert count_of(5, 5, 5).ends() == (4, 0, 4, 0)
    assert count_of(5, 0, 0).ends() == count_of(1, 1, 1).ends() == (0, 0, 0, 0)


def test_a_stop_inside_a_draft_says_nothing_of_where_drafts_end() -> None:
    """Drafts that find nothing, or are accepted whole, in front of an end token count as others."""
    row = row_of(9)
    row.asked = 4
    row.count(2, 2, cut=True)
    assert row.counts[-1] == count_of(2, 2, 2)
    row.finish = "stop"
    row.count(0, 0)
    row.count(2, 2)
    assert row.counts[1:] == [count_of(4, 0, 0), count_of(4, 2, 2)]


def test_a_draft_that_ends_early_costs_what_it_is_long() -> None:
    """By turns a draft is refused at once, or accepted whole: 1 + 5 tokens in two steps. Of four
    tokens each they take 2 x 3.2 seconds; where the bad ones end behind the first, 1.55 + 3.2."""
    policy = CostAware(costs=linear(0.0, 0.55, 4))
    whole = ending = RowStats()
    for _ in range(30):
        whole = more(more(whole, 4, 4, 0), 4, 4, 4)
        ending = more(more(ending, 4, 1, 0), 4, 4, 4)
    assert policy.length(whole) == 0
    assert policy.length(ending) == 4
    # rows before told, too
    told = policy.after([count_of(4, 1, 0), count_of(4, 4, 4)] * 30)
    assert told.length(more(more(RowStats(), 4, 1, 0), 4, 4, 4)) == 4


# ---------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ((1.0,), (0.0,), "drafts of 0, 1"),
        ((), (), "drafts of 0, 1"),
        ((1.0, 2.0), (0.0,), "of target and drafter alike: got 2 and 1"),
        ((0.0, 2.0), (0.0, 0.0), r"must be finite and positive.*target_D=\(0.0, 2.0\)"),
        ((1.0, -2.0), (0.0, 0.0), "target_D and in_vain must be finite"),
        ((1.0, math.inf), (0.0, 0.0), "target_D and in_vain must be finite"),
        ((1.0, 2.0), (0.0, math.nan), "draft_D and other_D finite and not negative"),
        ((1.0, 2.0), (0.0, -0.1), "draft_D and other_D finite and not negative"),
    ],
)
def test_costs_that_cannot_be_are_refused(
    target: tuple[float, ...], draft: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StepCosts(target_D=target, draft_D=draft, in_vain=1.0)


def test_what_else_a_step_takes_is_of_every_depth() -> None:
    two = {"target_D": (1.0, 2.0), "draft_D": (0.0, 0.5), "in_vain": 1.0}
    assert StepCosts(**two, other_D=(0.25, 0.5)).seconds(1) == 3.0
    with pytest.raises(ValueError, match="other_D has 1 of 2 values"):
        StepCosts(**two, other_D=(0.25,))
    with pytest.raises(ValueError, match="other_D finite and not negative"):
        StepCosts(**two, other_D=(0.25, -0.5))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_step_in_vain_takes_its_time(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"in_vain.*positive"):
        StepCosts(target_D=(1.0, 2.0), draft_D=(0.0, 0.0), in_vain=seconds)
