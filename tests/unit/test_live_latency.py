"""Latency of live translations: delays by definition, means against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import InputError
from draftsmith.live.latency import (
    Latency,
    Moment,
    appearances,
    delay_means,
    latency,
    moments,
    simuleval_lines,
    source_read,
    stable_from,
)
from draftsmith.live.metrics import CHARACTERS, WORDS, Pieces, Spread
from draftsmith.live.records import Hypothesis, UpdateRecord

# Table 1 of SSBD (arXiv 2509.21740): 2, 4, 6 and 7 source words.
TABLE_1 = [
    ("This is", "C'est"),
    ("This is an example", "C'est un exemple"),
    ("This is an example of self-speculative", "C'est un exemple d'auto-spéculation"),
    (
        "This is an example of self-speculative decoding.",
        "C'est un exemple de décodage auto-spéculatif.",
    ),
]


def stream(
    updates: Sequence[tuple[str, str]],
    *,
    seg: int = 0,
    reference: str | None = None,
    seconds: float = 0.0,
) -> list[UpdateRecord]:
    return [
        UpdateRecord(
            seg=seg,
            rev=rev,
            source=source,
            shown=shown,
            full=shown,
            final=rev == len(updates) - 1,
            tokens=0,
            drafted=0,
            accepted=0,
            seconds=seconds,
            reference=reference,
        )
        for rev, (source, shown) in enumerate(updates)
    ]


def means(delays: Sequence[float], source: float, target: float) -> list[float | None]:
    """AL, LAAL, AP, DAL, YAAL."""
    return list(delay_means(delays, source, target).values())


# --------------------------------------------------------------------------- golden means


def test_wait_two_lags_two_words() -> None:
    """|X| = |Y| = 4, delays 2 3 4 4: wait-2.

    AL, LAAL: step 1; 2-0, 3-1, 4-2, then the source is read: 6/3.     AP: 13/16.
    DAL: d' = 2 3 4 5, minus 0 1 2 3: 2 each.    YAAL: 2-0, 3-1: 4/2.
    """
    assert means([2, 3, 4, 4], 4, 4) == pytest.approx([2, 2, 13 / 16, 2, 2])


def test_saying_too_much_gains_only_where_the_measure_is_not_length_adaptive() -> None:
    """|X| = |Y| = 3, six words with delays 1 1 2 2 3 3.

    AL: step 1; 1-0, 1-1, 2-2, 2-3, 3-4: -1/5.    LAAL: step 1/2; 1, .5, 1, .5, 1: 4/5.
    AP: 12/9.    DAL: d' = 1 1.5 2 2.5 3 3.5, minus t/2: 1 each.    YAAL: 1, .5, 1, .5: 3/4.
    """
    assert means([1, 1, 2, 2, 3, 3], 3, 3) == pytest.approx([-1 / 5, 4 / 5, 12 / 9, 1, 3 / 4])


def test_saying_too_little() -> None:
    """|X| = 6, |Y| = 4, two words with delays 3 6.

    AL, LAAL: step 6/4; 3-0, 6-1.5: 7.5/2.    AP: 9/24.    DAL: step 6/2, d' = 3 6; 3, 3: 3.
    YAAL: 3-0: 3.
    """
    assert means([3, 6], 6, 4) == pytest.approx([7.5 / 2, 7.5 / 2, 9 / 24, 3, 3])


def test_offline_translation_lags_the_whole_source() -> None:
    """|X| = 5, |Y| = 2, three words, all at the end.

    AL, LAAL: the first word ends the sum: 5-0.    AP: 15/10.
    DAL: step 5/3, d' = 5, 20/3, 25/3; 5 each.     YAAL: no word came before the end.
    """
    found = means([5, 5, 5], 5, 2)
    assert found[:4] == pytest.approx([5, 5, 15 / 10, 5])
    assert found[4] is None


def test_a_source_that_is_never_read_to_its_end_sums_all_words() -> None:
    # |X| = 4, |Y| = 2, delays 1 2; step 2: 1-0, 2-2: 1/2 for AL, LAAL and YAAL
    al, laal, _, _, yaal = means([1, 2], 4, 2)
    assert al == laal == yaal == 1 / 2


def test_a_first_word_after_the_end_is_as_late_as_it_is() -> None:
    # as computation-aware delays can be; SimulEval gives the first delay here
    assert means([7, 8], 5, 3)[:2] == [7, 7]


def test_what_has_no_delays_or_no_length_is_not_defined() -> None:
    assert means([], 3, 3) == [None] * 5
    assert means([1.0], 0, 3) == [None] * 5


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=8).map(sorted),
    st.integers(1, 8),
    st.integers(1, 12),
)
def test_means_agree_where_they_must(delays: list[int], source: int, target: int) -> None:
    al, laal, _, dal, yaal = means(delays, source, target)
    assert al is not None
    assert laal is not None
    assert dal is not None
    assert laal >= al  # a longer text is expected to run ahead more slowly
    if target >= len(delays):
        assert laal == al
    # DAL sums the same lags as AL with |Y| = n would, only later ones
    plain = sum(d - t * source / len(delays) for t, d in enumerate(delays)) / len(delays)
    assert dal >= plain - 1e-9
    assert (yaal is None) == (delays[0] >= source)
    # all measures grow by one when every word comes one word of source later and is still in time
    if delays[-1] + 1 < source:
        later = means([d + 1 for d in delays], source, target)
        assert [later[i] for i in (0, 1, 3, 4)] == pytest.approx(
            [al + 1, laal + 1, dal + 1, yaal + 1]
        )


# --------------------------------------------------------------------------- stable delays

STATES = st.lists(st.lists(st.sampled_from("ab"), max_size=4), min_size=1, max_size=6)


@given(STATES)
def test_a_unit_is_stable_from_the_update_after_the_last_that_had_it_wrong(
    states: list[list[str]],
) -> None:
    last = states[-1]
    for j, found in enumerate(stable_from(states)):
        there = [state[: j + 1] == last[: j + 1] for state in states]
        wrong = [update for update, right in enumerate(there) if not right]
        assert found == (wrong[-1] + 1 if wrong else 0)
    assert len(stable_from(states)) == len(last)


@given(STATES)
def test_a_unit_first_appears_with_all_before_it(states: list[list[str]]) -> None:
    last = states[-1]
    for j, found in enumerate(appearances(states)):
        assert found == next(
            update for update, state in enumerate(states) if state[: j + 1] == last[: j + 1]
        )
    assert len(appearances(states)) == len(last)


def test_a_unit_that_goes_and_comes_back_is_stable_when_it_is_back() -> None:
    # the drawing of the module: b appears with the second text, goes and comes back with the last
    states = [["a"], ["a", "b", "c"], ["a", "d"], ["a", "b", "c"]]
    assert stable_from(states) == [0, 3, 3]
    assert appearances(states) == [0, 1, 1]
    found = latency(
        stream([("s s", "a"), ("s " * 4, "a b c"), ("s " * 6, "a d"), ("s " * 7, "a b c")])
    )
    # delays 2 7 7, appearances 2 4 4: lags 0 3 3
    assert found.first_stable_word == Spread(p50=2, p95=2)
    assert found.lag == Spread(p50=3, p95=3)
    assert found.ap == pytest.approx((2 + 7 + 7) / (7 * 3))


def test_a_word_behind_a_change_is_not_stable_though_it_stays_in_its_place() -> None:
    assert stable_from([["the", "cat"], ["a", "cat"]]) == [1, 1]


def test_source_read_never_goes_down_nor_beyond_the_end() -> None:
    sources = ["a b c", "a b c d e", "a b", "a b c d"]
    assert source_read(sources, WORDS) == [3, 4, 4, 4]
    assert source_read(["a", "a b", ""], WORDS) == [1, 2, 2]
    assert source_read(["", ""], WORDS) == [0, 0]
    assert source_read(["ab", "abcd"], CHARACTERS) == [2, 4]


# --------------------------------------------------------------------------- whole streams


def check_table_1(found: Latency) -> None:
    """Delays 2 4 4 7 7 7, |X| = 7, |Y| = 6, so |X| / |Y| = 7/6.

    AL, LAAL: 2, 4 - 7/6, 4 - 14/6, 7 - 21/6, then the source is read: 60/6 / 4.
    AP: 31/42.    YAAL: without the last of these: 39/6 / 3.
    DAL: d' = 12/6, 24/6, 31/6, 42/6, 49/6, 56/6; less 7t/6: 12, 17, 17, 21, 21, 21 sixths: 109/36.
    """
    assert found.al == pytest.approx(10 / 4)
    assert found.laal == pytest.approx(10 / 4)
    assert found.ap == pytest.approx(31 / 42)
    assert found.dal == pytest.approx(109 / 36)
    assert found.yaal == pytest.approx(13 / 6)
    assert found.first_word == found.first_stable_word == Spread(p50=2, p95=2)
    assert found.lag == Spread(p50=0, p95=0)  # nothing that went came back


def test_the_papers_example_stream() -> None:
    found = latency(stream(TABLE_1))
    check_table_1(found)
    assert (found.segments, found.empty_finals) == (1, 0)
    assert found.signature == "delay:stable|source:word|target:word|length:hypothesis"
    assert found.first_word_seconds is None
    assert found.first_stable_word_seconds is None
    assert found.lag_seconds is None


def test_the_reference_gives_the_target_length() -> None:
    found = latency(stream(TABLE_1, reference="un deux trois"))
    # |Y| = 3, step 7/3: 2, 4 - 7/3, 4 - 14/3, 7 - 7: (2 + 5/3 - 2/3 + 0) / 4
    assert found.al == pytest.approx(3 / 4)
    assert found.laal == pytest.approx(10 / 4)  # the translation is the longer one
    assert found.ap == pytest.approx(31 / 21)
    assert found.dal == pytest.approx(109 / 36)
    assert found.yaal == pytest.approx(13 / 6)
    assert found.signature.endswith("length:reference")


def test_means_are_over_segments_that_say_something() -> None:
    records = [
        *stream(TABLE_1, seg=0),
        *stream([("a b", "x"), ("a b c", "")], seg=1),
        *stream([("a b", ""), ("a b c", "x y")], seg=2, reference="x y"),
    ]
    found = latency(records)
    assert (found.segments, found.empty_finals) == (3, 1)
    assert found.al == pytest.approx((10 / 4 + 3) / 2)
    assert found.yaal == pytest.approx(13 / 6)  # the third has nothing before its end
    assert found.first_word == Spread(p50=2.5, p95=2 + 0.95)
    assert found.signature.endswith("length:hypothesis+reference")
    nothing = latency(stream([("a", "")]))
    assert (nothing.empty_finals, nothing.al, nothing.first_word) == (1, None, None)
    assert latency([]).segments == 0


def test_unspaced_languages_are_measured_in_characters() -> None:
    records = stream([("これ", "这"), ("これは例", "这是例子")])
    found = latency(records, source=CHARACTERS, target=CHARACTERS)
    # delays 2 4 4 4, |X| = |Y| = 4: AL (2 + 3) / 2
    assert found.al == pytest.approx(5 / 2)
    assert found.signature.startswith("delay:stable|source:char|target:char|")
    pairs = Pieces(
        name="pair", split=lambda text: [text[i : i + 2] for i in range(0, len(text), 2)]
    )
    # in pairs: delays 2 2 (`这` is not yet the pair `这是`), |X| = 2: AL 2
    assert latency(records, source=pairs, target=pairs).al == 2


# --------------------------------------------------------------------------- the clock


def timed() -> tuple[list[UpdateRecord], list[Hypothesis]]:
    """Two segments, .3 s an update; the third hypothesis comes while the second is at work."""
    records = [
        *stream([("a", ""), ("a b", "x y"), ("a b c", "x z"), ("a b c d", "x y")], seconds=0.3),
        *stream([("e f", "u v")], seg=1, seconds=0.3),
    ]
    arrivals = [(0, 0, 1.0), (0, 1, 2.0), (0, 2, 2.1), (0, 3, 3.0), (1, 0, 5.0)]
    return records, [Hypothesis(seg=s, rev=r, text="t", time=t) for s, r, t in arrivals]


def test_an_update_waits_for_its_hypothesis_and_for_the_one_before() -> None:
    records, hypotheses = timed()
    clock = moments(records, hypotheses)
    assert clock is not None
    assert [one.arrived for one in clock] == [1.0, 2.0, 2.1, 3.0, 5.0]
    assert [one.shown for one in clock] == pytest.approx([1.3, 2.3, 2.6, 3.3, 5.3])


def test_dropped_hypotheses_need_no_record() -> None:
    records, hypotheses = timed()
    del records[2]
    clock = moments(records, hypotheses)
    assert clock is not None
    assert [one.shown for one in clock] == pytest.approx([1.3, 2.3, 3.3, 5.3])


def test_without_times_there_is_no_clock() -> None:
    records, hypotheses = timed()
    hypotheses[3] = Hypothesis(seg=0, rev=3, text="t")
    assert moments(records, hypotheses) is None
    with pytest.raises(InputError, match="segment 1 revision 0"):
        moments(records, [*hypotheses[:3], Hypothesis(seg=0, rev=3, text="t", time=3.0)])


def test_seconds_are_counted_from_the_first_hypothesis_of_a_segment() -> None:
    records, hypotheses = timed()
    found = latency(records, clock=moments(records, hypotheses))
    # segment 0: first word 2.3 - 1, and x stays from then on; segment 1: 5.3 - 5
    first = Spread.of([1.3, 0.3])
    assert first is not None
    for one in (found.first_word_seconds, found.first_stable_word_seconds):
        assert one is not None
        assert (one.p50, one.p95) == pytest.approx((first.p50, first.p95))
    # y appears at 2.3 and is there to stay at 3.3; x, u and v at once
    lags = Spread.of([0, 1.0, 0, 0])
    assert found.lag_seconds is not None
    assert lags is not None
    assert (found.lag_seconds.p50, found.lag_seconds.p95) == pytest.approx((lags.p50, lags.p95))


def test_a_first_word_that_goes_again_is_not_the_first_stable_word() -> None:
    records = stream([("a", "x"), ("a b", "w"), ("a b c", "x y")], seconds=0.5)
    clock = [Moment(arrived=float(i), shown=i + 0.5) for i in range(3)]
    found = latency(records, clock=clock)
    assert found.first_word == Spread(p50=1, p95=1)
    assert found.first_stable_word == Spread(p50=3, p95=3)
    assert found.first_word_seconds == Spread(p50=0.5, p95=0.5)
    assert found.first_stable_word_seconds == Spread(p50=2.5, p95=2.5)


def test_a_revision_that_comes_again_has_a_moment_of_its_own() -> None:
    first, last = stream([("a", ""), ("a b", "x y")])
    records = [replace(first, shown="x", seconds=1.0), replace(first, shown="x", seconds=4.0), last]
    hypotheses = [Hypothesis(seg=0, rev=rev, text="t", time=0.0) for rev in (0, 1)]
    clock = moments(records, hypotheses)
    assert clock is not None and [one.shown for one in clock] == [1.0, 5.0, 5.0]
    assert latency(records, clock=clock).first_word_seconds == Spread(p50=1.0, p95=1.0)
    with pytest.raises(InputError, match=r"2 moments.*3 updates"):
        latency(records, clock=clock[:2])


def test_the_first_word_may_be_one_that_never_comes_back() -> None:
    found = latency(stream([("a", "w"), ("a b", "x"), ("a b c", "x y")]))
    assert found.first_word == Spread(p50=1, p95=1)
    assert found.first_stable_word == Spread(p50=2, p95=2)


# --------------------------------------------------------------------------- logs


def test_a_log_line_holds_stable_delays() -> None:
    (line,) = simuleval_lines(stream(TABLE_1, reference="C'est un exemple."))
    assert json.loads(json.dumps(line)) == {
        "index": 0,
        "source": TABLE_1[-1][0],
        "prediction": TABLE_1[-1][1],
        "delays": [2, 4, 4, 7, 7, 7],
        "elapsed": [2, 4, 4, 7, 7, 7],
        "source_length": 7,
        "reference": "C'est un exemple.",
    }
    # and the means come out of it as out of the records, by the formulas of the tools that read it
    length = len(line["reference"].split(" "))
    found = latency(stream(TABLE_1, reference=line["reference"]))
    assert delay_means(line["delays"], line["source_length"], length)["al"] == found.al


def test_log_lines_with_a_clock_are_in_milliseconds_from_the_end_of_the_segment_before() -> None:
    records, hypotheses = timed()
    first, second = simuleval_lines(records, clock=moments(records, hypotheses))
    # x from the second update on, y from the fourth
    assert first["delays"] == pytest.approx([2000, 3000])
    assert first["elapsed"] == pytest.approx([2300, 3300])
    assert first["source_length"] == pytest.approx(3000)
    # the source of segment 0 ended at 3 s
    assert second["delays"] == pytest.approx([2000, 2000])
    assert second["elapsed"] == pytest.approx([2300, 2300])
    assert second["source_length"] == pytest.approx(2000)
    assert [first["index"], second["index"]] == [0, 1]


def test_a_segment_that_ends_empty_has_a_line_without_delays() -> None:
    (line,) = simuleval_lines(stream([("a b", "x"), ("", "")]))
    assert (line["prediction"], line["delays"], line["elapsed"]) == ("", [], [])
    assert (line["source"], line["source_length"]) == ("a b", 2)
    assert line["reference"] == ""


TEXTS = st.text(alphabet="ab \n\N{NO-BREAK SPACE}e\N{COMBINING ACUTE ACCENT}", max_size=6)


@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5), st.sampled_from([WORDS, CHARACTERS])
)
def test_every_unit_of_a_log_line_has_one_delay_and_they_ascend(
    updates: list[tuple[str, str]], units: Pieces
) -> None:
    (line,) = simuleval_lines(stream(updates), source=units, target=units)
    assert len(line["delays"]) == len(line["elapsed"]) == len(units.split(line["prediction"]))
    assert line["delays"] == sorted(line["delays"])
    assert all(0 <= d <= line["source_length"] for d in line["delays"])
    assert line["prediction"] == updates[-1][1]
