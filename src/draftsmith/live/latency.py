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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from statistics import fmean
from typing import Any, NamedTuple

from draftsmith.core.rows import common_prefix
from draftsmith.errors import InputError
from draftsmith.live.metrics import WORDS, Pieces, Spread, final_source, reference
from draftsmith.live.records import Hypothesis, UpdateRecord, segments

# --------------------------------------------------------------------------- means of delays


def delay_means(
    delays: Sequence[float], source_length: float, target_length: float
) -> dict[str, float | None]:
    """Compute the five means of delays d_t of a segment; None where a mean is undefined.

    al      mean of d_t - t |X| / |Y| up to the first t at which the whole source was read;
            Ma et al. 2019 (arXiv 1810.08398)
    laal    AL with the longer of translation and reference, so that longer output gains nothing;
            Polák et al. 2022 (arXiv 2204.06028), Papi et al. 2022 (arXiv 2206.05807)
    ap      sum of delays / (|X| |Y|); Cho and Esipova 2016 (arXiv 1606.02012)
    dal     mean of d'_t - t |X| / n, where writing each of the n units takes |X| / n: d'_0 = d_0,
            d'_t = max(d_t, d'_{t-1} + |X| / n); Arivazhagan et al. 2019 (arXiv 1906.05218)
    yaal    LAAL over the units emitted before the end of the source: those after it do not
            measure simultaneity; Polák et al. 2025 (arXiv 2509.17349)

    Args:
        target_length: above 0.
    """
    n = len(delays)
    if not n or not source_length:
        return dict.fromkeys(("al", "laal", "ap", "dal", "yaal"))
    before_end = next((t for t, d in enumerate(delays) if d >= source_length), n)
    step, longer = source_length / n, max(n, target_length)
    spaced = list(accumulate(delays, lambda before, d: max(d, before + step)))
    return {
        "al": _mean_lag(delays[: before_end + 1], source_length, target_length),
        "laal": _mean_lag(delays[: before_end + 1], source_length, longer),
        "ap": sum(delays) / (source_length * target_length),
        "dal": _mean_lag(spaced, source_length, n),
        "yaal": _mean_lag(delays[:before_end], source_length, longer) if before_end else None,
    }


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


class Moment(NamedTuple):
    """The times of an update, in seconds from the beginning of the stream."""

    arrived: float
    """Arrival of its hypothesis."""
    shown: float
    """Display of its output."""


Clock = Sequence[Moment]
"""One per update."""


def moments(records: Iterable[UpdateRecord], hypotheses: Iterable[Hypothesis]) -> Clock | None:
    """Compute the moment of each record; None if a time is unknown.

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
        found.append(Moment(arrived, free))
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
    clock: Clock | None = None,
) -> Latency:
    """Compute all latencies of one stream; `clock` is the result of `moments` for these records.

    Units of a language without spaces are `CHARACTERS`, or the words of a segmenter.

    Raises:
        InputError: the records are not those of one stream, in order, or the clock is not theirs.
    """
    parts = _measured(records, source, target, clock)
    found = [one for one in parts if one.delays]
    means = [delay_means(one.delays, one.read[-1], one.target_length) for one in found]
    timed = [(one, one.seconds) for one in found if one.seconds is not None]
    length = "+".join(sorted({one.length_of for one in found})) or "none"
    return Latency(
        signature=f"delay:stable|source:{source.name}|target:{target.name}|length:{length}",
        segments=len(parts),
        empty_finals=len(parts) - len(found),
        **{name: _mean(one[name] for one in means) for name in ("al", "laal", "ap", "dal", "yaal")},
        first_word=Spread.of([one.read[one.begins] for one in found]),
        first_stable_word=Spread.of([one.delays[0] for one in found]),
        lag=Spread.of([lag for one in found for lag in one.lags(one.read)]),
        first_word_seconds=Spread.of([seconds[one.begins] for one, seconds in timed]),
        first_stable_word_seconds=Spread.of([seconds[one.stable[0]] for one, seconds in timed]),
        lag_seconds=Spread.of([lag for one, seconds in timed for lag in one.lags(seconds)]),
    )


class _Segment:
    """One segment: what had been read at each update, and the update that settled each unit."""

    def __init__(
        self, part: Sequence[UpdateRecord], source: Pieces, target: Pieces, times: Clock
    ) -> None:
        states = [target.split(record.shown) for record in part]
        self.part, self.read = part, source_read([record.source for record in part], source)
        self.begins = next((update for update, state in enumerate(states) if state), 0)
        """The first update that shows any text."""
        self.first, self.stable = appearances(states), stable_from(states)
        self.delays = [self.read[update] for update in self.stable]
        translation = target.split(reference(part))
        self.target_length = len(translation or states[-1])
        self.length_of = "reference" if translation else "hypothesis"
        self.times = times
        """Empty without a clock."""

    @property
    def seconds(self) -> list[float] | None:
        """Seconds from the first arrival to the display, per update; None without a clock."""
        times = self.times
        return [one.shown - times[0].arrived for one in times] if times else None

    def lags(self, position: Sequence[float]) -> list[float]:
        """Distance from the first to the stable appearance of each unit, given update positions."""
        return [position[b] - position[a] for a, b in zip(self.first, self.stable, strict=True)]


def _measured(
    records: Sequence[UpdateRecord], source: Pieces, target: Pieces, clock: Clock | None
) -> list[_Segment]:
    if clock is not None and len(clock) != len(records):
        raise InputError(f"the clock has {len(clock)} moments for {len(records)} updates")
    times = iter(clock or ())
    return [
        _Segment(part, source, target, list(islice(times, len(part)))) for part in segments(records)
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# --------------------------------------------------------------------------- logs for other tools


def simuleval_lines(
    records: Sequence[UpdateRecord],
    *,
    source: Pieces = WORDS,
    target: Pieces = WORDS,
    clock: Clock | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of an `instances.log`, one per segment, as SimulEval writes and OmniSTEval
    reads them, with stable delays: such logs have no revisions.

    Without a clock, delays and lengths are source units, and `elapsed` repeats the delays, so no
    computing time is claimed. With one, all are milliseconds since the previous source ended, and
    `elapsed` is the display time of each unit. The prediction is the unchanged text, so that
    `str.split` finds the words of `WORDS`; OmniSTEval applies NFKC first, which may change the
    number of characters.

    Raises:
        InputError: the records are not those of one stream, in order, or the clock is not theirs.
    """
    began = 0.0
    for index, one in enumerate(_measured(records, source, target, clock)):
        delays: list[float] = [*one.delays]
        elapsed, length = delays, float(one.read[-1])
        if one.times:
            delays = [1000 * (one.times[update].arrived - began) for update in one.stable]
            elapsed = [1000 * (one.times[update].shown - began) for update in one.stable]
            length = 1000 * (one.times[-1].arrived - began)
            began = one.times[-1].arrived
        yield {
            "index": index,
            "source": final_source(one.part),
            "prediction": one.part[-1].shown,
            "delays": delays,
            "elapsed": elapsed,
            "source_length": length,
            "reference": reference(one.part),
        }
