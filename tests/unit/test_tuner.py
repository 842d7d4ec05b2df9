"""Estimates from measurements and step costs: the formula, batches, intervals, sentences."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from draftsmith.bench.costs import Cost, CostTable, DraftCost
from draftsmith.bench.tuner import (
    Candidate,
    Measurement,
    advice,
    batch_advice,
    estimate_candidate,
    evidence,
    rates,
)
from draftsmith.core.generation import Arm
from draftsmith.core.types import TreeShape
from draftsmith.drafters.none import NoDrafter

STEPS = {1: 2.5, 5: 4.0, 9: 6.0}
"""Seconds of a step by its width."""


def table(plain: float = 2.0) -> CostTable:
    """Forwards of every width last as long as one of plain decoding, and drafting the rest."""
    curve = tuple(Cost(width=width, seconds=own - plain) for width, own in STEPS.items())
    draft = DraftCost(drafter="d", temperature=0.0, costs=curve)
    target = (Cost(width=1, seconds=plain),)
    return CostTable(context=1, rounds=1, target=target, draft=(draft,))


PRICES = table()


def measurement(
    tokens: Sequence[int], widths: Sequence[Mapping[int, int]], **other: object
) -> Measurement:
    given: dict[str, object] = {
        "arm": Arm(name="d", drafter=NoDrafter(), shape=TreeShape.chain(4)),
        "drafter": "d",
        "shape": "4 tokens",
        "flags": ("--draft-length", "4"),
        "length": 4,
        "temperature": 0.0,
        "by_depth": (),
    }
    return Measurement(**{**given, **other}, tokens_P=tuple(tokens), widths_P=tuple(widths))


def test_the_speedup_of_steps_of_one_width_is_the_closed_formula() -> None:
    found = measurement([30, 15], [{5: 10}, {5: 5}])
    assert found.tokens_per_step == 3.0
    assert found.speedup(PRICES) == pytest.approx(3.0 * 2.0 / 4.0)


def test_mixed_widths_are_weighed_by_how_often_they_were_fed() -> None:
    found = measurement([12], [{1: 2, 5: 3, 9: 1}])
    assert found.speedup(PRICES) == pytest.approx(12 * 2.0 / (2 * 2.5 + 3 * 4.0 + 6.0))


def test_prompts_without_a_step_say_nothing() -> None:
    """Neither of the speed nor of how sure it is."""
    with pytest.raises(ValueError, match="no step"):
        measurement([0], [{}]).speedup(PRICES)
    some, padded = (
        measurement([30, 10], [{5: 10}] * 2),
        measurement([0, 30, 0, 10, 0], [{}, {5: 10}] * 2 + [{}]),
    )
    assert padded.prompts == (1, 3)
    assert padded.tokens_per_step == some.tokens_per_step == 2.0
    few, many = (estimate_candidate(one, PRICES, [PRICES] * 200) for one in (some, padded))
    assert (few.speedup, few.low, few.high) == (many.speedup, many.low, many.high)
    assert few.low < few.speedup < few.high


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_pays_for_its_widest_row(rows: int) -> None:
    """Against all ways in which rows can come together."""
    widths = [1, 1, 5, 9]
    found = measurement([8], [Counter(widths)])
    mean = np.mean([STEPS[max(together)] for together in itertools.product(widths, repeat=rows)])
    assert found.speedup(PRICES, rows=rows) == pytest.approx(2.0 * 2.0 / mean)


def test_the_interval_holds_the_value_and_widens_with_the_prompts_differences() -> None:
    alike = measurement([30] * 8, [{5: 10}] * 8)
    unlike = measurement([10, 50] * 4, [{5: 10}] * 8)
    draws = [PRICES] * 200
    narrow, wide = (
        estimate_candidate(alike, PRICES, draws),
        estimate_candidate(unlike, PRICES, draws),
    )
    assert narrow.low == pytest.approx(narrow.speedup) == pytest.approx(narrow.high)
    assert wide.low < wide.speedup < wide.high
    noisy = [table(plain) for plain in np.linspace(1.6, 2.4, 200)]
    shaken = estimate_candidate(alike, PRICES, noisy)
    assert shaken.low < 0.9 * shaken.speedup
    assert shaken.high > 1.1 * shaken.speedup
    assert narrow.tokens_per_second == pytest.approx(narrow.speedup / 2.0)


def candidate(value: float, low: float, high: float, prompts: int = 3) -> Candidate:
    made = measurement([1] * prompts, [{5: 1}] * prompts)
    return Candidate(measurement=made, speedup=value, low=low, high=high, tokens_per_second=1.0)


def test_it_says_plainly_what_to_do() -> None:
    assert advice(candidate(1.9, 1.8, 2.0)) == "draft 4 tokens with d: 1.90x (1.80 to 2.00)"
    refusal = advice(candidate(0.97, 0.95, 0.99))
    assert refusal == ("do not speculate: the best would be 0.97x (0.95 to 0.99), 4 tokens with d")
    assert advice(candidate(1.02, 0.98, 1.06)).startswith("it is not certain that drafting pays")


def test_it_says_how_far_a_promise_reaches() -> None:
    assert evidence(candidate(1.9, 1.8, 2.0), 18) == (
        "it is the best of 18 drafts on the very 3 prompts that it was chosen by: "
        "others may gain a little less"
    )
    assert evidence(candidate(0.97, 0.95, 0.99), 18) == ""
    for value in (0.97, 1.9):
        said = evidence(candidate(value, 0.9, 2.0, prompts=1), 18)
        assert said.startswith("one prompt was measured: the interval is that of the measured")


def test_it_says_from_which_batch_size_on_drafting_no_longer_pays() -> None:
    assert batch_advice({1: 1.9, 2: 1.5, 4: 1.1, 8: 0.8}) == (
        "from 8 rows on drafting no longer pays"
    )
    assert batch_advice({1: 0.9, 2: 1.2, 4: 0.9}) == (
        "drafting pays at batch size 2, but not at 1, 4"
    )
    assert batch_advice({1: 1.0, 4: 1.1}) == "drafting pays at batch size 4, but not at 1"
    assert batch_advice({1: 1.9, 8: 1.1}) == "drafting pays up to 8 rows, the most tried"
    assert batch_advice({1: 0.9, 8: 0.8}) == "drafting pays at no batch size tried (1, 8)"
    assert batch_advice({1: 1.9}) == batch_advice({1: 0.9}) == ""
    assert batch_advice({8: 1.9}) == "drafting pays up to 8 rows, the most tried"


def test_rates_by_depth_have_intervals_that_hold_them() -> None:
    few, many, none = rates([(4, 2), (400, 200), (3, 0), (0, 0)])
    assert few["rate"] == many["rate"] == 0.5
    assert few["low"] < many["low"] < 0.5 < many["high"] < few["high"]
    assert none["rate"] == 0.0
    assert none["low"] == pytest.approx(0.0)
    assert none["high"] < 0.75
