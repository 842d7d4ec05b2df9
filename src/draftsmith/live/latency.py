"""Latency of a translation, in source units: the delays of its units, and the usual means of them.

Re-translation may rewrite what was shown, so the delay of a unit is its STABLE delay: the source
read at the first update after which the unit, and everything before it, no longer changed.

    source read    2      4              6        7
    shown          a      a b c          a d      a b c        last text: a b c
    a  appears at  ^ stays                                     stable delay 2
    b                     ^ appears      gone     ^ stays      stable delay 7, lag 7 - 4 = 3

The lag of a unit is the source read between its first and its stable appearance. |X| is the length
of the source, |Y| that of the reference (without one, of the translation), as in SimulEval and
OmniSTEval; delays d_t count from t = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from draftsmith.core.rows import common_prefix
from draftsmith.errors import InputError
from draftsmith.live.metrics import WORDS, Pieces, Spread, final_source, reference, segments
from draftsmith.live.records import Hypothesis, UpdateRecord

# --------------------------------------------------------------------------- means of delays


def average_lagging(
    delays: Sequence[float], source_length: float, target_length: float
) -> float | None:
    """AL: mean of d_t - t |X| / |Y| up to the first t at which the whole source was read.

    Ma et al. 2019 (arXiv 1810.08398). None without delays or where a length is 0.
    """
    if not delays or not source_length or not target_length:
        return None
    whole = next((t for t, d in enumerate(delays) if d >= source_length), len(delays) - 1)
    return _mean_lag(delays[: whole + 1], source_length, target_length)


def length_adaptive_average_lagging(
    delays: Sequence[float], source_length: float, target_length: float
) -> float | None:
    """LAAL: AL with the longer of translation and reference, so that longer output gains nothing.

    Polák et al. 2022 (arXiv 2204.06028), Papi et al. 2022 (arXiv 2206.05807).
    """
    return average_lagging(delays, source_length, max(len(delays), target_length))


def average_proportion(
    delays: Sequence[float], source_length: float, target_length: float
) -> float | None:
    """AP: sum of delays / (|X| |Y|). Cho and Esipova 2016 (arXiv 1606.02012)."""
    if not delays or not source_length or not target_length:
        return None
    return sum(delays) / (source_length * target_length)


def differentiable_average_lagging(delays: Sequence[float], source_length: float) -> float | None:
    """DAL: mean of d'_t - t |X| / n, where writing each of the n units takes |X| / n.

    d'_0 = d_0, d'_t = max(d_t, d'_{t-1} + |X| / n). Arivazhagan et al. 2019 (arXiv 1906.05218).
    """
    if not delays or not source_length:
        return None
    step = source_length / len(delays)
    spaced = list(accumulate(delays, lambda before, d: max(d, before + step)))
    return _mean_lag(spaced, source_length, len(delays))


def yet_another_average_lagging(
    delays: Sequence[float], source_length: float, target_length: float
) -> float | None:
    """YAAL: LAAL over the units emitted before the end of the source; None if there are none.

    Polák et al. 2025 (arXiv 2509.17349): units after the end do not measure simultaneity.
    """
    after = next((t for t, d in enumerate(delays) if d >= source_length), len(delays))
    if not after or not source_length:
        return None
    return _mean_lag(delays[:after], source_length, max(len(delays), target_length))


def _mean_lag(delays: Sequence[float], source_length: float, target_length: float) -> float:
    """Mean delay relative to a translator that is always as far in the target as in the source."""
    step = source_length / target_length
    return fmean(d - t * step for t, d in enumerate(delays))


# --------------------------------------------------------------------------- delays of a segment


def appearances(states: Sequence[Sequence[str]]) -> list[int]:
    """Return, per unit of the last state, the first state that contains it and all before it."""
    return _first_with(accumulate((common_prefix(state, states[-1]) for state in states), max))


def stable_from(states: Sequence[Sequence[str]]) -> list[int]:
    """Return, per unit of the last state, the first state after which it and all before it stay."""
    agreeing = [common_prefix(state, states[-1]) for state in states]
    return _first_with(reversed(list(accumulate(reversed(agreeing), min))))


def _first_with(ascending: Iterable[int]) -> list[int]:
    """Return the index of the first number above 0, above 1, ..., up to the last number."""
    found: list[int] = []
    for place, reached in enumerate(ascending):
        found += [place] * (reached - len(found))
    return found


def source_read(sources: Sequence[str], units: Pieces) -> list[int]:
    """Return the source units read by each update: ascending, and at most the final number.

    Words that a recogniser takes back were read all the same; surplus words are no part of |X|, the
    last entry. If the last source is empty, the one before it counts.
    """
    counts = [len(units.split(source)) for source in sources]
    whole = next((count for count in reversed(counts) if count), 0)
    return [min(count, whole) for count in accumulate(counts, max)]


# --------------------------------------------------------------------------- the clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The times of an update, in seconds from the beginning of the stream."""

    arrived: float
    """Arrival of its hypothesis."""
    shown: float
    """Display of its output."""


def moments(
    records: Iterable[UpdateRecord], hypotheses: Iterable[Hypothesis]
) -> list[Moment] | None:
    """Compute one per record; None if a time is unknown.

    An update begins when its hypothesis has arrived and the previous update is done.

    Raises:
        InputError: a record has no hypothesis among these.
    """
    times = {(h.seg, h.rev): h.time for h in hypotheses}
    found: list[Moment] = []
    free = 0.0
    for record in records:
        if (record.seg, record.rev) not in times:
            raise InputError(
                f"no hypothesis for segment {record.seg} revision {record.rev}: give the stream "
                "from which these records come"
            )
        arrived = times[record.seg, record.rev]
        if arrived is None:
            return None
        free = max(free, arrived) + record.seconds
        found.append(Moment(arrived=arrived, shown=free))
    return found


# --------------------------------------------------------------------------- all together


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Latency of one stream. A value that is undefined for every segment is None.

    AL, LAAL, AP, DAL and YAAL are means over the segments for which they are defined.
    """

    signature: str
    segments: int
    empty_finals: int
    """Segments whose final text is empty: in none of the numbers."""
    al: float | None
    laal: float | None
    ap: float | None
    dal: float | None
    yaal: float | None
    first_word: Spread | None
    """Source read when the first text was shown, over segments."""
    first_stable_word: Spread | None
    """Source read at the stable appearance of the first unit, over segments."""
    lag: Spread | None
    """Source read between first and stable appearance, over all units of all segments."""
    first_word_seconds: Spread | None
    """Seconds from the arrival of the segment's first hypothesis to the display, with a clock."""
    first_stable_word_seconds: Spread | None
    lag_seconds: Spread | None


def latency(
    records: Sequence[UpdateRecord],
    *,
    source: Pieces = WORDS,
    target: Pieces = WORDS,
    clock: Sequence[Moment] | None = None,
) -> Latency:
    """Compute all latencies of one stream; `clock` is the result of `moments` for these records.

    Units of a language without spaces are `CHARACTERS`, or the words of a segmenter.

    Raises:
        InputError: the records are not those of one stream, in order, or the clock is not theirs.
    """
    parts = segments(records)
    found = [
        _measure(part, source, target, times)
        for part, times in zip(parts, _by_segment(parts, clock), strict=True)
        if target.split(part[-1].shown)
    ]
    timed = [(one, one.seconds) for one in found if one.seconds is not None]

    def mean(metric: Callable[[Sequence[float], float, float], float | None]) -> float | None:
        return _mean(metric(s.delays, s.read[-1], s.target_length) for s in found)

    length = "+".join(sorted({one.length_of for one in found})) or "none"
    return Latency(
        signature=f"delay:stable|source:{source.name}|target:{target.name}|length:{length}",
        segments=len(parts),
        empty_finals=len(parts) - len(found),
        al=mean(average_lagging),
        laal=mean(length_adaptive_average_lagging),
        ap=mean(average_proportion),
        dal=_mean(differentiable_average_lagging(s.delays, s.read[-1]) for s in found),
        yaal=mean(yet_another_average_lagging),
        first_word=Spread.of([s.read[s.begins] for s in found]),
        first_stable_word=Spread.of([s.delays[0] for s in found]),
        lag=Spread.of([lag for s in found for lag in s.lags(s.read)]),
        first_word_seconds=Spread.of([seconds[s.begins] for s, seconds in timed]),
        first_stable_word_seconds=Spread.of([seconds[s.stable[0]] for s, seconds in timed]),
        lag_seconds=Spread.of([lag for s, seconds in timed for lag in s.lags(seconds)]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SegmentDelays:
    """Delays of one segment whose final text is not empty."""

    read: list[int]
    """Source units, per update."""
    seconds: list[float] | None
    """Seconds from the first arrival to the display, per update."""
    begins: int
    """The first update that shows any text."""
    first: list[int]
    """The update in which a unit first appears, per target unit."""
    stable: list[int]
    target_length: int
    length_of: str

    @property
    def delays(self) -> list[int]:
        return [self.read[update] for update in self.stable]

    def lags(self, position: Sequence[float]) -> list[float]:
        """Distance from the first to the stable appearance of each unit, given update positions."""
        return [position[b] - position[a] for a, b in zip(self.first, self.stable, strict=True)]


def _measure(
    part: Sequence[UpdateRecord], source: Pieces, target: Pieces, clock: Sequence[Moment] | None
) -> _SegmentDelays:
    states = [target.split(record.shown) for record in part]
    translation = target.split(reference(part))
    return _SegmentDelays(
        read=source_read([record.source for record in part], source),
        seconds=[one.shown - clock[0].arrived for one in clock] if clock else None,
        begins=next(update for update, state in enumerate(states) if state),
        first=appearances(states),
        stable=stable_from(states),
        target_length=len(translation) or len(states[-1]),
        length_of="reference" if translation else "hypothesis",
    )


def _by_segment(
    parts: Sequence[Sequence[UpdateRecord]], clock: Sequence[Moment] | None
) -> list[Sequence[Moment] | None]:
    """Split the clock by segments; None for each without a clock."""
    if clock is None:
        return [None] * len(parts)
    updates = sum(len(part) for part in parts)
    if len(clock) != updates:
        raise InputError(f"the clock has {len(clock)} moments for {updates} updates")
    ends = list(accumulate(len(part) for part in parts))
    return [clock[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# --------------------------------------------------------------------------- logs for other tools


def simuleval_lines(
    records: Sequence[UpdateRecord],
    *,
    source: Pieces = WORDS,
    target: Pieces = WORDS,
    clock: Sequence[Moment] | None = None,
) -> list[dict[str, Any]]:
    """Build the lines of an `instances.log`, one per segment, as SimulEval writes and OmniSTEval
    reads them, with stable delays: such logs have no revisions.

    Without a clock, delays and lengths are source units, and `elapsed` repeats the delays, so no
    computing time is claimed. With one, all are milliseconds since the previous source ended, and
    `elapsed` is the display time of each unit. The prediction is the unchanged text, so that
    `str.split` finds the words of `WORDS`; OmniSTEval applies NFKC first, which may change the
    number of characters.

    Raises:
        InputError: the records are not those of one stream, in order, or the clock is not theirs.
    """
    parts = segments(records)
    lines, began = [], 0.0
    for index, (part, times) in enumerate(zip(parts, _by_segment(parts, clock), strict=True)):
        stable = stable_from([target.split(record.shown) for record in part])
        read = source_read([record.source for record in part], source)
        delays: list[float] = [read[update] for update in stable]
        elapsed, length = list(delays), float(read[-1])
        if times is not None:
            delays = [1000 * (times[update].arrived - began) for update in stable]
            elapsed = [1000 * (times[update].shown - began) for update in stable]
            length = 1000 * (times[-1].arrived - began)
            began = times[-1].arrived
        lines.append(
            {
                "index": index,
                "source": final_source(part),
                "prediction": part[-1].shown,
                "delays": delays,
                "elapsed": elapsed,
                "source_length": length,
                "reference": reference(part),
            }
        )
    return lines
