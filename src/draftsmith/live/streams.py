"""Makes streams of growing hypotheses from whole sentences, and training pairs of prefixes.

    lag 3                This is an
                         This is an example of self-speculative
                         This is an example of self-speculative decoding.    final
    and with rewrites    This is deco
                         This is an
                         ...

Every hypothesis that is not a rewrite is an exact prefix of its sentence: white space between words
is kept, white space around the sentence is removed.

Training pairs for live translation are prefixes of sentences with prefixes of their translations:

    pair      the exam was hard today  ->  die Prüfung war heute schwer
    prefix    the exam                 ->  die Prüfung
    prefix    the exam was hard        ->  die Prüfung war heute

A model trained on whole sentences only completes a prefix with invented words; a model that also
sees prefixes learns to stop (Niehues et al. 2018, Arivazhagan et al. 2020).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from draftsmith.errors import InputError
from draftsmith.live.config import check_prefixes, check_stream
from draftsmith.live.display import borders
from draftsmith.live.records import Hypothesis

Unit = Literal["word", "char"]
MOST_WRONG = 3
_WORD = re.compile(r"\S+")


def prefix_pairs(
    pairs: Sequence[tuple[str, str]],
    share: float,
    seed: int,
    *,
    source_unit: Unit = "word",
    target_unit: Unit = "word",
) -> list[tuple[str, str]]:
    """Return every (source, target) pair, each followed by prefixes of it.

    The target is cut in the proportion of the source, rounded down, but never to nothing. A source
    of one unit has no prefix, and gets none.

    Args:
        pairs: Whole sentences. The prefixes of a pair depend on its index, not on other pairs.
        share: Average share of prefixes in the result, below 1; 0.5 is one for every pair.
        seed: Seed of the cut positions.
        source_unit: "word", or "char" for languages without spaces.
        target_unit: The same for the translations.

    Raises:
        InputError: a side is empty, or an argument is out of its range.
    """
    check_prefixes(share)
    wanted = share / (1 - share)
    out = []
    for number, (source, target) in enumerate(pairs):
        source_ends = [end for _, end in spans(source, source_unit)]
        target_ends = [end for _, end in spans(target, target_unit)]
        if not source_ends or not target_ends:
            side = "target" if source_ends else "source"
            raise InputError(f"the {side} of pair {number + 1} is empty")
        out.append((source, target))
        rng = np.random.Generator(np.random.PCG64([seed, number]))
        count = int(wanted + rng.random())
        for _ in range(count if len(source_ends) > 1 else 0):
            kept = int(rng.integers(1, len(source_ends)))
            length = max(1, len(target_ends) * kept // len(source_ends))
            out.append((source[: source_ends[kept - 1]], target[: target_ends[length - 1]]))
    return out


def lag_stream(
    text: str, seg: int, lag: int, reference: str | None = None, unit: Unit = "word"
) -> list[Hypothesis]:
    """Return the first `lag` units of a sentence, the first 2 * `lag`, ..., and the whole sentence.

    Raises:
        InputError: the text has no word, or an argument is out of its range.
    """
    check_stream(lag)
    text = text.strip()
    ends = [end for _, end in spans(text, unit)]
    if not ends:
        raise InputError(f"segment {seg} has no words")
    texts = [text[:end] for end in ends[lag - 1 : -1 : lag]] + [text]
    last = len(texts) - 1
    return [
        Hypothesis(seg=seg, rev=rev, text=prefix, final=rev == last, reference=reference)
        for rev, prefix in enumerate(texts)
    ]


def make_stream(
    sources: Sequence[str],
    references: Sequence[str] | None = None,
    lag: int = 3,
    unit: Unit = "word",
    rewrites: float = 0.0,
    seed: int = 0,
) -> list[Hypothesis]:
    """Return one segment per source.

    With probability `rewrites` a hypothesis that is not final is preceded by one with errors. They
    depend on the segment's index, its text and the seed, not on other segments.

    Raises:
        InputError: there are no lines, one is empty, or an argument is out of its range.
    """
    check_stream(lag, rewrites)
    _refuse_empty(sources, "source")
    if references is not None:
        _refuse_empty(references, "reference")
        if len(references) != len(sources):
            raise InputError(
                f"every source needs one reference, got {len(sources)} sources and "
                f"{len(references)} references"
            )
    stream = []
    for seg, source in enumerate(sources):
        reference = None if references is None else references[seg]
        right = lag_stream(source, seg, lag, reference, unit)
        rng = np.random.Generator(np.random.PCG64([seed, seg]))
        made = []
        for one in right:
            if not one.final and rng.random() < rewrites:
                made.append(replace(one, text=_with_errors(one.text, right[-1].text, unit, rng)))
            made.append(one)
        stream += [replace(one, rev=rev) for rev, one in enumerate(made)]
    return stream


def spans(text: str, unit: Unit) -> list[tuple[int, int]]:
    """Return where each unit begins and ends: a word, or a grapheme cluster without white space.

    Raises:
        InputError: unknown unit.
    """
    if unit not in get_args(Unit):
        raise InputError(f"unknown unit {unit!r}: give one of {', '.join(get_args(Unit))}")
    if unit == "word":
        return [match.span() for match in _WORD.finditer(text)]
    return [(start, end) for start, end in pairwise(borders(text)) if not text[start].isspace()]


def _refuse_empty(lines: Sequence[str], what: str) -> None:
    if not lines:
        raise InputError(f"a stream needs at least one {what}, got none")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise InputError(f"{what} line {number} is empty; take it out of all files")


def _with_errors(text: str, sentence: str, unit: Unit, rng: np.random.Generator) -> str:
    """Cut short, or replace by others of the sentence, the last one to three units of `text`."""
    places = spans(text, unit)
    count = min(int(rng.integers(1, MOST_WRONG + 1)), len(places))
    known = sorted({sentence[start:end] for start, end in spans(sentence, unit)})
    out, done = "", 0
    for start, end in places[-count:]:
        right = text[start:end]
        others = [one for one in known if one != right]
        ways = [others[int(rng.integers(len(others)))]] if others else []
        if len(right) > 1:
            ways.append(right[: int(rng.integers(1, len(right)))])
        # a unit that can neither be replaced nor cut is left out
        out += text[done:start] + (ways[int(rng.integers(len(ways)))] if ways else "")
        done = end
    return out.strip()
