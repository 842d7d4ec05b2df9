"""Repetition loops: the definition on texts written by hand, a slow twin, and steps outside."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from draftsmith.bench.loops import StepCounts, count_outside, in_loops
from draftsmith.core.types import DecodeStep


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("", ""),
        ("abc", "..."),
        ("aa", ".."),
        ("aaa", "xxx"),
        ("abab", "...."),
        ("ababab", "xxxxxx"),
        ("abcdcdcde", "..xxxxxx."),
        ("xababababy", ".xxxxxxxx."),  # and the half round at its end
        ("xabababay", ".xxxxxxx."),
        ("aaa-abcabcabc", "xxx.xxxxxxxxx"),  # two loops
        ("abcabc-abcabc", "............."),  # twice, interrupted, twice
        ("aabaabaab", "xxxxxxxxx"),
    ],
)
def test_a_token_lies_in_a_loop_when_its_stretch_stands_three_times(text: str, marks: str) -> None:
    found = in_loops([ord(letter) for letter in text])
    assert "".join(".x"[mark] for mark in found.tolist()) == marks


def test_a_period_may_have_32_tokens_and_no_more() -> None:
    assert in_loops([*range(32)] * 3).all()
    assert not in_loops([*range(33)] * 3).any()
    assert not in_loops([*range(32)] * 2).any()


def slow(tokens: list[int], longest_period: int, repeats: int) -> list[bool]:
    """By the words of the definition: try every stretch of whole rounds."""
    out = [False] * len(tokens)
    for period in range(1, longest_period + 1):
        for start in range(len(tokens) - repeats * period + 1):
            stretch = tokens[start : start + repeats * period]
            if stretch == stretch[:period] * repeats:
                out[start : start + repeats * period] = [True] * len(stretch)
    return out


@pytest.mark.parametrize(("longest_period", "repeats"), [(32, 3), (3, 3), (5, 2), (4, 4)])
def test_the_fast_function_says_what_its_slow_twin_says(longest_period: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for case in range(200):
        parts = [
            rng.integers(3, size=rng.integers(1, 6)).tolist() * rng.integers(1, 5) for _ in range(6)
        ]
        tokens = list(itertools.chain.from_iterable(parts))[: 60 - case % 7]
        wanted = slow(tokens, longest_period, repeats)
        assert in_loops(tokens, longest_period=longest_period, repeats=repeats).tolist() == wanted
        seen |= set(wanted)
    assert seen == {True, False}


def a_step(*emitted: int, accepted: int = 0, offered: int = 4, active: bool = True) -> DecodeStep:
    return DecodeStep(
        emitted=((), emitted),
        accepted=(0, accepted),
        offered_depth=(0, offered),
        proposed=(0, offered),
        origins=((), (0,) * accepted),
        finish=(None, None),
        prefill=False,
        active=(False, active),
    )


def test_a_step_counts_as_outside_when_its_first_token_does() -> None:
    """The prompt's step is not counted, and `4 5`, which runs into the loop, is outside.

    tokens      9   1 2   4 5   5 5   5 8   7
    in loops    .   . .   . x   x x   x .   .
    """
    steps = [
        a_step(9, offered=4),
        a_step(1, 2, accepted=1),
        a_step(4, 5, accepted=1),
        a_step(5, 5, accepted=1),
        a_step(5, 8, accepted=1),
        a_step(active=False),
        a_step(7, offered=3),
    ]
    tokens = [token for step in steps for token in step.emitted[1]]
    looped = in_loops(tokens)
    assert looped.tolist() == [False] * 4 + [True] * 4 + [False] * 2
    assert count_outside(steps, 1, looped) == StepCounts(steps=3, tokens=5, accepted=2, offered=11)
    assert count_outside(steps, 0, in_loops([])) == StepCounts(
        steps=0, tokens=0, accepted=0, offered=0
    )
