"""Cost tables: interpolation, prediction, and that measuring leaves everything as it was."""

from __future__ import annotations

import pytest

from draftsmith.bench.arms import Arm
from draftsmith.bench.costs import (
    Cost,
    CostMeter,
    CostTable,
    DraftCost,
    ForwardProbe,
    StepProbe,
    interpolate,
    thin_out,
)
from draftsmith.decode import DecodeOptions
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.sampler import Sampler
from draftsmith.targets.toy import TabularTarget, tiny_target
from draftsmith.types import TreeShape

PROMPTS = [(1, 2, 3, 4), (5, 6, 7)]


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


def test_a_step_probe_tells_widths_of_drafts_whole_unless_the_text_ends() -> None:
    target = TabularTarget(8)
    options = DecodeOptions(max_new_tokens=40, sampler=Sampler(temperature=1.0))
    probe = StepProbe(target, arm(target), PROMPTS, options)
    widths = [probe.step().width for _ in range(30)]
    assert set(widths) <= {2, 3, 4, 5}  # never a prompt's, never without a draft
    assert widths.count(5) > 20


def test_a_step_probe_ends_even_if_no_step_is_whole() -> None:
    target = TabularTarget(8)
    probe = StepProbe(target, arm(target), PROMPTS, DecodeOptions(max_new_tokens=1))
    assert probe.step().width >= 1


def test_a_measured_table_has_every_width_and_arm() -> None:
    target = TabularTarget(8)
    arms = [Arm(name="none", drafter=NoDrafter()), arm(target)]
    samplers = [Sampler(), Sampler(temperature=0.8)]
    meter = CostMeter(target, arms, samplers, PROMPTS, DecodeOptions(max_new_tokens=16), [1, 3])
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
        [tuple(range(1, 21))],
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
        PROMPTS,
        DecodeOptions(max_new_tokens=16),
        [1, 4],
    )
    pace = iter([9.0, 1.0] * 2 * 3 + [9.0, 7.0] * 2 * 3)  # the first of a width is not counted
    monkeypatch.setattr(ForwardProbe, "seconds", lambda self, width: width * next(pace))
    meter.measure(3)
    assert meter.table(latest=3).target_seconds(4) == 4.0
    meter.measure(3)
    assert meter.table(latest=3).target_seconds(4) == 28.0
    assert meter.table().target_seconds(1) == 4.0
    assert meter.table().rounds == 6
