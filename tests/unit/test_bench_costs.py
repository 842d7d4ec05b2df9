"""Cost tables: interpolation, prediction, and that measuring leaves everything as it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from draftsmith.bench import costs as bench_costs
from draftsmith.bench.costs import (
    Cost,
    CostMeter,
    CostTable,
    DraftCost,
    ForwardProbe,
    StepCost,
    StepProbe,
    interpolate,
    thin_out,
)
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import Recorder
from draftsmith.core.types import TreeShape
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.targets.toy import TabularTarget, tiny_target

CASES = [((1, 2, 3, 4), ()), ((5, 6, 7), ())]


def table() -> CostTable:
    return CostTable(
        context=10,
        rounds=3,
        target=(Cost(width=1, seconds=2.0), Cost(width=5, seconds=4.0)),
        draft=(DraftCost(drafter="d", temperature=0.0, costs=(Cost(width=5, seconds=1.0),)),),
    )


def arm(target: TabularTarget, length: int = 4) -> Arm:
    drafter = Independent(Independent.Config(), model=TabularTarget(8, seed=1))
    drafter.bind(target)
    return Arm(name="d", drafter=drafter, shape=TreeShape.chain(length))


def test_costs_are_linear_between_points_and_flat_outside() -> None:
    costs = (Cost(width=2, seconds=1.0), Cost(width=6, seconds=3.0))
    assert [interpolate(costs, w) for w in (1, 2, 3, 6, 9)] == [1.0, 1.0, 1.5, 3.0, 3.0]
    with pytest.raises(ValueError, match="empty"):
        interpolate((), 1)


def test_thinning_keeps_both_ends() -> None:
    assert thin_out([5, 1, 5, 3]) == (1, 3, 5)
    thinned = thin_out(range(1, 100), 4)
    assert len(thinned) == 4
    assert (thinned[0], thinned[-1]) == (1, 99)


def test_prediction_for_steps_of_one_width_is_the_closed_formula() -> None:
    costs = table().predict("d", 0.0, tokens=30, widths=(5,) * 10)
    predicted = costs.baseline / (costs.draft + costs.target)
    tau, t_one, t_draft, t_block = 3.0, 2.0, 1.0, 4.0
    assert predicted == pytest.approx(tau * t_one / (t_draft + t_block))


def test_prediction_weighs_mixed_widths_by_how_often_they_were_fed() -> None:
    costs = table().predict("d", 0.0, tokens=7, widths=(1, 5, 3, 1))
    assert costs.baseline == 14.0
    assert costs.target == pytest.approx(2.0 + 4.0 + 3.0 + 2.0)
    assert costs.draft == pytest.approx(4.0)
    with pytest.raises(KeyError):
        table().predict("other", 0.0, tokens=1, widths=(1,))


def test_probing_forwards_leaves_the_cache_as_it_was() -> None:
    probe = ForwardProbe(tiny_target(64), tuple(range(1, 20)), max_width=9)
    before = [part.clone() for part in probe._cache.contents(0)]
    for width in (1, 9, 4):
        assert probe.seconds(width) > 0
    after = probe._cache.contents(0)
    assert len(after) == len(before)
    assert all(a.equal(b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(("tokens", "rows"), [(18, 1), (40, 1), (40, 3)])
@pytest.mark.every(3)
def test_a_step_probe_never_tells_of_drafts_that_were_cut(
    tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of those before a text ends, nor of a prompt's step, nor of a batch that shrank."""
    target = TabularTarget(8)
    fed: set[int] = set()
    forward = target.forward
    options = DecodeOptions(max_new_tokens=tokens, sampler=Sampler(temperature=1.0))
    probe = StepProbe(target, arm(target, 16), CASES, options, rows=rows)

    def noted(tokens_BT: Any, *rest: Any) -> Any:
        fed.add(len(tokens_BT))
        return forward(tokens_BT, *rest)

    monkeypatch.setattr(target, "forward", noted)
    assert {probe.step().width for _ in range(40)} == {17}
    assert fed == {rows}


def test_what_is_timed_comes_behind_others_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that a processor has settled, and no more than one of what lasts long."""
    clock = iter(range(100))
    taken: list[str] = []
    monkeypatch.setattr(bench_costs.time, "perf_counter", lambda: 0.003 * next(clock))
    bench_costs.settle(lambda: taken.append("short"))
    assert len(taken) == 5  # of 3 ms each: the fifth ends behind 12
    monkeypatch.setattr(bench_costs.time, "perf_counter", lambda: 0.02 * next(clock))
    bench_costs.settle(lambda: taken.append("long"))
    assert taken[5:] == ["long"]
    monkeypatch.setattr(bench_costs.time, "perf_counter", lambda: 0.0)
    bench_costs.settle(lambda: taken.append("tiny"))
    assert len(taken[6:]) == bench_costs.SETTLING


def test_the_narrowest_forward_is_timed_long_behind_wide_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor that is slow for 30 narrow forwards behind a wide one, and fast from then on."""
    narrow = 0

    def seconds(probe: ForwardProbe, width: int) -> float:
        nonlocal narrow
        narrow = narrow + 1 if width == 1 else 0
        return 1.0 if width > 1 or narrow > 30 else 1.5

    monkeypatch.setattr(bench_costs.time, "perf_counter", lambda: 0.0)  # all are short
    monkeypatch.setattr(ForwardProbe, "seconds", seconds)
    target, plain = TabularTarget(8), Arm(name="none", drafter=NoDrafter())
    options = DecodeOptions(max_new_tokens=16)
    meter = CostMeter(target, [plain], [Sampler()], CASES, options, [1, 16])
    meter.measure(3)
    assert [cost.seconds for cost in meter.table().target] == [1.0, 1.0]


def test_a_step_is_told_of_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second later than the one before: the parts of a step and what
    lies between them are as many seconds as there are readings."""
    clock = itertools.count()
    monkeypatch.setattr(bench_costs, "now", lambda device: float(next(clock)))
    monkeypatch.setattr(bench_costs, "make_recorder", lambda device: Recorder(lambda: next(clock)))
    target = TabularTarget(8)
    cost = StepProbe(target, arm(target, 2), CASES, DecodeOptions(max_new_tokens=24)).step()
    # draft, target, verify and draft again are 1 each; 5 gaps lie around them, and verify is other
    assert (cost.width, cost.seconds, cost.other) == (3, 2.0, 6.0)


def test_a_context_cuts_drafts_as_the_end_of_a_text_does() -> None:
    target = tiny_target(64, max_length=48)
    drafter = Independent(Independent.Config(), model=tiny_target(64, seed=3))
    drafter.bind(target)
    long = Arm(name="d", drafter=drafter, shape=TreeShape.chain(16))
    probe = StepProbe(target, long, [(tuple(range(1, 21)), ())], DecodeOptions(max_new_tokens=64))
    assert {probe.step().width for _ in range(12)} == {17}


def test_what_finds_nothing_to_draft_is_probed_at_width_1() -> None:
    target = TabularTarget(8)
    lookup = PromptLookup(PromptLookup.Config(min_ngram=9, max_ngram=9))
    lookup.bind(target)
    vain = Arm(name="d", drafter=lookup, shape=TreeShape.chain(16))
    options = DecodeOptions(max_new_tokens=24, sampler=Sampler(temperature=1.0))
    probe = StepProbe(target, vain, CASES, options)
    assert {probe.step().width for _ in range(20)} == {1}


def test_a_step_probe_ends_even_if_no_step_is_whole() -> None:
    target = TabularTarget(8)
    probe = StepProbe(target, arm(target), CASES, DecodeOptions(max_new_tokens=1))
    assert probe.step().width >= 1


def test_a_measured_table_has_every_width_and_arm() -> None:
    target = TabularTarget(8)
    arms = [Arm(name="none", drafter=NoDrafter()), arm(target)]
    samplers = [Sampler(), Sampler(temperature=0.8)]
    meter = CostMeter(target, arms, samplers, CASES, DecodeOptions(max_new_tokens=16), [1, 3])
    with pytest.raises(ValueError, match="no round"):
        meter.table()
    meter.measure(2)
    found = meter.table()
    assert found.rounds == 2
    assert [cost.width for cost in found.target] == [1, 3, 5]
    assert all(cost.seconds > 0 for cost in found.target)
    assert found.draft_seconds("none", 0.0, 1) == 0.0
    whole = found.draft_seconds("d", 0.8, 5)
    assert whole > 0.0
    assert found.draft_seconds("d", 0.8, 3) == pytest.approx(whole / 2)  # cut by the end of a text
    assert found.context == 4 + 8


def test_costs_in_a_short_context_stay_inside_it() -> None:
    target = tiny_target(64, max_length=24)
    meter = CostMeter(
        target,
        [Arm(name="none", drafter=NoDrafter())],
        [Sampler()],
        [(tuple(range(1, 21)), ())],
        DecodeOptions(max_new_tokens=64),
        [1, 8],
    )
    meter.measure(1)
    assert meter.table().context + 8 <= 24


def test_a_table_of_the_latest_rounds_forgets_the_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = TabularTarget(8)
    meter = CostMeter(
        target,
        [Arm(name="none", drafter=NoDrafter())],
        [Sampler()],
        CASES,
        DecodeOptions(max_new_tokens=16),
        [1, 4],
    )
    for most in ("SETTLING", "RECOVERING"):
        monkeypatch.setattr(bench_costs, most, 1)  # the first of a width is not counted
    pace = iter([9.0, 1.0] * 2 * 3 + [9.0, 7.0] * 2 * 3)
    monkeypatch.setattr(ForwardProbe, "seconds", lambda self, width: width * next(pace))
    meter.measure(3)
    assert meter.table(latest=3).target_seconds(4) == 4.0
    meter.measure(3)
    assert meter.table(latest=3).target_seconds(4) == 28.0
    assert meter.table().target_seconds(1) == 4.0
    assert meter.table().rounds == 6


def metered(
    monkeypatch: pytest.MonkeyPatch, steps: Sequence[Cost], forwards: Iterator[float] | None = None
) -> CostMeter:
    """A meter whose drafter costs what `steps` says, round by round; the first is not counted."""
    costs = iter([StepCost(width=1, seconds=99.0), *steps])
    monkeypatch.setattr(StepProbe, "step", lambda self, *, recover: next(costs))
    if forwards is not None:
        monkeypatch.setattr(ForwardProbe, "seconds", lambda self, width: next(forwards))
    target = TabularTarget(8)
    options = DecodeOptions(max_new_tokens=16)
    return CostMeter(target, [arm(target, 16)], [Sampler()], CASES, options, [1])


def curve(monkeypatch: pytest.MonkeyPatch, *steps: tuple[int, float]) -> dict[int, float]:
    meter = metered(monkeypatch, [StepCost(width=w, seconds=s) for w, s in steps])
    meter.measure(len(steps))
    (entry,) = meter.table().draft
    return {cost.width: cost.seconds for cost in entry.costs}


def test_one_slow_step_of_a_rare_width_makes_no_point_of_the_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    often = [(17, 4.0)] * 5
    assert curve(monkeypatch, *often) == {1: 0.0, 17: 4.0}
    assert curve(monkeypatch, *often, (12, 90.0)) == {1: 0.0, 17: 4.0}
    assert curve(monkeypatch, *often, (3, 50.0), (12, 90.0)) == {1: 0.0, 17: 4.0}
    assert curve(monkeypatch, *[(9, 2.0)] * 5, (17, 90.0)) == {1: 0.0, 9: 2.0}


def test_lookups_that_find_another_length_each_time_are_pooled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = curve(monkeypatch, (28, 1.0), (31, 1.2), (34, 1.1), (37, 3.0), (40, 3.2), (43, 3.1))
    assert found == {1: 0.0, 31: 1.1, 40: 3.1}


def test_what_looking_in_vain_costs_stands_apart_from_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert curve(monkeypatch, (1, 0.3), *[(17, 4.0)] * 6) == {1: 0.3, 17: 4.0}
    assert curve(monkeypatch, (17, 4.0), *[(1, 0.3)] * 6) == {1: 0.3, 17: 4.0}


def test_rounds_drawn_anew_differ_as_the_rounds_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 9
    steps = [StepCost(width=17, seconds=float(n)) for n in range(rounds)]
    meter = metered(monkeypatch, steps, itertools.count(1.0))
    meter.measure(rounds)
    rng = np.random.default_rng(0)
    drawn = [meter.redrawn(rng) for _ in range(200)]
    drafts = {table.draft_seconds("d", 0.0, 17) for table in drawn}
    forwards = {table.target_seconds(1) for table in drawn}
    assert len(drafts) > 3
    assert len(forwards) > 3
    assert {table.rounds for table in drawn} == {rounds}
    middle = meter.table().draft_seconds("d", 0.0, 17)
    assert np.mean([one.draft_seconds("d", 0.0, 17) for one in drawn]) == pytest.approx(
        middle, abs=0.5
    )
