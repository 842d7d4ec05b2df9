"""Metrics of a live translation from its records: stability, speed and quality.

    shown       a    a b    a c    a        erased: 0, 0, 1 (b), 1 (c)
    normalised erasure = (0 + 0 + 1 + 1) / 1    divided by the pieces of the FINAL text, not by
                                                updates or the longest text

Erasure counts displayed text, so hidden ends do not matter. Texts are compared without Unicode
normalisation, because a changed code point is displayed differently.

Quality compares final texts with references. Each segment counts once, with its whole last output,
so that stability cannot be gained at the cost of quality. sacrebleu and COMET are imported on use.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftsmith.core.rows import common_prefix
from draftsmith.data.languages import find
from draftsmith.errors import InputError
from draftsmith.intervals import Interval, bootstrap, bootstrap_ratio
from draftsmith.live.records import UpdateRecord, segments
from draftsmith.provenance import write_text_atomic

# --------------------------------------------------------------------------- pieces of a text


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """A named way to split texts into the units that are counted; signatures contain the name."""

    name: str
    split: Callable[[str], Sequence[str]]


WORDS = Pieces(name="word", split=str.split)
CHARACTERS = Pieces(name="char", split=list)
"""Code points: for scripts without spaces, and where no other tokenizer is available."""


_UNSPACED = frozenset(
    ("thai", "th", "tha", "lao", "lo", "khmer", "km", "khm", "burmese", "my", "mya")
)
_UNSPACED_SCRIPTS = frozenset(("Han", "Japanese"))
_SUMMED = (
    *("tokens", "drafted", "accepted", "redrafted", "reaccepted", "forwards", "fed", "seconds"),
    *("degenerate", "restarts"),
)
"""Fields of `LiveReport` that are sums over the records."""


def units_of(language: str) -> Pieces:
    """Return the units in which texts of this language (a name or code) are counted."""
    known = find(language)
    if known is not None:
        return CHARACTERS if known.script in _UNSPACED_SCRIPTS else WORDS
    first = language.strip().lower().replace("_", "-").split("-")[0]
    return CHARACTERS if first in _UNSPACED else WORDS


def flores_pieces() -> Pieces:
    """Return the pieces of sacrebleu's `flores101`, which the papers count; else `CHARACTERS`.

    Only a model file that sacrebleu has already fetched is read (from $SACREBLEU, else from
    ~/.sacrebleu); nothing is downloaded. `sacrebleu --tokenize flores101` on any two files fetches
    it. The name of the result tells which of the two was used.

    Raises:
        InputError: the model file exists and cannot be read.
    """
    folder = Path(os.environ.get("SACREBLEU") or Path.home() / ".sacrebleu")
    path = folder / "models" / "sacrebleu_tokenizer_spm.model"
    # a failed download leaves an empty file, which sacrebleu ignores, too
    if not path.is_file() or path.stat().st_size == 0:
        return CHARACTERS
    try:
        sentencepiece = importlib.import_module("sentencepiece")
    except ImportError:
        return CHARACTERS
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.Load(str(path))
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a SentencePiece model ({error}): delete it and fetch it again"
        ) from None
    return Pieces(name="flores101", split=model.EncodeAsPieces)


# --------------------------------------------------------------------------- erasure


def erasure(before: Sequence[str], after: Sequence[str]) -> int:
    """Count the pieces of the previous text that an update removed or rewrote."""
    return len(before) - common_prefix(before, after)


def erased(parts: Sequence[Sequence[UpdateRecord]], pieces: Pieces) -> list[tuple[int, int]]:
    """Return what each segment erased and the length of its final text, where this has one: parts
    of the normalised erasure (SSBD, arXiv 2509.21740, eqs. 3-4)."""
    states = [[pieces.split(record.shown) for record in part] for part in parts]
    gone = [sum(erasure(*both) for both in pairwise(texts)) for texts in states]
    lengths = [len(texts[-1]) for texts in states]
    return [both for both in zip(gone, lengths, strict=True) if both[1]]


def normalised_erasure(records: Sequence[UpdateRecord], pieces: Pieces) -> float | None:
    """Return NE in these pieces, mean over segments; None: no final text."""
    scored = erased(segments(records), pieces)
    return fmean(gone / length for gone, length in scored) if scored else None


def displayed_erasure(records: Sequence[UpdateRecord]) -> float | None:
    """Return NE in characters, as displays counted them: the texts are not looked at again, and
    what a setting of the user's removed does not count."""
    parts = [part for part in segments(records) if part[-1].shown]
    gone = [sum(one.erased for one in part[1:]) / len(part[-1].shown) for part in parts]
    return fmean(gone) if gone else None


def final_source(part: Sequence[UpdateRecord]) -> str:
    """Return the last source of a segment that is not blank."""
    return next((r.source for r in reversed(part) if r.source.strip()), "")


def reference(part: Sequence[UpdateRecord]) -> str:
    """Return the reference of a segment; empty if it has none."""
    return next((r.reference for r in reversed(part) if r.reference), "")


# --------------------------------------------------------------------------- speed


def tokens_per_second(records: Sequence[UpdateRecord]) -> float | None:
    """Tokens of all outputs / seconds of all updates, prefill and verification included.

    Accepted tokens count: they are output, too.
    """
    return _ratio(sum(r.tokens for r in records), sum(r.seconds for r in records))


def decode_tokens_per_second(records: Iterable[UpdateRecord]) -> float | None:
    """Speed of plain decoding: tokens and time after the first forward pass of each update.

        tokens of an update   | accepted | 1 |  ...  |
        came from             first forward  | the others

    The first forward pass gives the accepted tokens and one more; these and `first_seconds` are
    left out. The last forward pass, which gives the end of sequence, takes time and gives no token.
    Only updates with several forward passes and a timed first one count; None without any.
    """
    timed = [r for r in records if r.forwards > 1 and r.first_seconds > 0]
    tokens = sum(max(0, r.tokens - r.accepted - 1) for r in timed)
    return _ratio(tokens, sum(r.seconds - r.first_seconds for r in timed))


def speedup(records: Sequence[UpdateRecord], baseline: Sequence[UpdateRecord]) -> float | None:
    """Tokens per second over those of a baseline (decoding without drafts) on the same stream.

    Raises:
        InputError: the two did not translate the same sources, so they cannot be compared.
    """
    ours, theirs = ([(r.seg, r.rev, r.source) for r in side] for side in (records, baseline))
    if ours != theirs:
        raise InputError(
            f"cannot compare {len(ours)} updates with {len(theirs)} of other sources: replay one "
            "stream under both settings"
        )
    faster, slower = tokens_per_second(records), tokens_per_second(baseline)
    return None if faster is None or slower is None else _ratio(faster, slower)


def speedup_interval(
    records: Sequence[UpdateRecord], baseline: Sequence[UpdateRecord]
) -> Interval | None:
    """Return the 95 % percentile interval of `speedup` over resampled segments (2 or more)."""
    sides = [
        [(sum(r.tokens for r in part), sum(r.seconds for r in part)) for part in segments(side)]
        for side in (records, baseline)
    ]
    if len(sides[0]) != len(sides[1]):
        return None
    ours, theirs = (np.array(side, np.float64) for side in sides)

    def ratios(picks: NDArray[np.int64]) -> NDArray[np.float64]:
        (tokens, seconds), (plain_tokens, plain_seconds) = (
            side[picks].sum(1).T for side in (ours, theirs)
        )
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample without tokens
            speedups: NDArray[np.float64] = tokens / seconds / (plain_tokens / plain_seconds)
        return speedups

    interval = bootstrap(len(ours), ratios)
    return interval if interval and np.isfinite(interval).all() else None


def verification_cost(speedup: float, accepted_of_tokens: float) -> float:
    """c in 1 / speed-up = (1 - A/O) + c: the cost of drafts, in decoding steps per output token.

    Every token that was not accepted costs one step; c is the rest: the verification of drafts
    beyond the prefill of the baseline, whose time is part of the speed-up. The tables of SSBD
    (arXiv 2509.21740) give .13 to .30, a small model on a CPU a fraction of that. Tokens drafted
    again in the same update save steps, which makes c smaller, or negative.
    """
    return 1 / speedup - (1 - accepted_of_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median and 95th percentile of some values."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Compute both, with linear interpolation; None without values."""
        if not values:
            return None
        p50, p95 = np.quantile(values, [0.5, 0.95])
        return cls(p50=float(p50), p95=float(p95))


# --------------------------------------------------------------------------- all together


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveReport:
    """All metrics of one stream but quality. A value whose denominator is 0 is None."""

    signature: str
    """What was counted, and how; only reports with equal signatures are comparable."""
    updates: int
    segments: int
    open_segments: int
    """Segments without a final update; the last displayed text counts as final."""
    empty_finals: int
    """Segments whose final text is empty; excluded from the erasure, as they would divide by 0."""
    degenerate: int
    """Outputs that are empty or did not end: never drafted from, but their tokens count."""
    restarts: int
    """Updates that were decoded again with an empty cache because the target failed."""
    longest_freeze: int
    """Largest number of successive updates of a segment without a change of the display."""
    erasure_macro: float | None
    """NE, mean over segments."""
    erasure_ci95: tuple[float, float] | None
    """95 % interval of it, by bootstrap over segments; None with fewer than two."""
    erasure_micro: float | None
    """NE, all erased pieces / all final pieces."""
    accepted_of_drafted: float | None
    """A/D over all updates, for drafts from the previous output."""
    accepted_of_tokens: float | None
    """A/O, likewise."""
    reaccepted_of_redrafted: float | None
    """The same as A/D for tokens drafted in later steps of an update."""
    tokens: int
    drafted: int
    accepted: int
    redrafted: int
    reaccepted: int
    forwards: int
    fed: int
    seconds: float
    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    update_ms: Spread | None
    """Spread over updates that were decoded; repeated sources take no time."""


def report(records: Sequence[UpdateRecord], pieces: Pieces) -> LiveReport:
    """Compute all metrics of one stream but quality.

    Raises:
        InputError: the records are not those of one stream, in order.
    """
    parts = segments(records)
    scored = erased(parts, pieces)
    ratios = [gone / length for gone, length in scored]
    total = {name: sum(getattr(r, name) for r in records) for name in _SUMMED}
    return LiveReport(
        **total,
        signature=f"erasure:{pieces.name}|text:shown|per:final|corpus:macro+micro|acceptance:micro",
        updates=len(records),
        segments=len(parts),
        open_segments=sum(not part[-1].final for part in parts),
        empty_finals=len(parts) - len(scored),
        longest_freeze=max((_longest_freeze(part) for part in parts), default=0),
        erasure_macro=fmean(ratios) if ratios else None,
        erasure_ci95=bootstrap_ratio(ratios, [1.0] * len(ratios)),
        erasure_micro=_ratio(sum(gone for gone, _ in scored), sum(n for _, n in scored)),
        accepted_of_drafted=_ratio(total["accepted"], total["drafted"]),
        accepted_of_tokens=_ratio(total["accepted"], total["tokens"]),
        reaccepted_of_redrafted=_ratio(total["reaccepted"], total["redrafted"]),
        tokens_per_second=tokens_per_second(records),
        decode_tokens_per_second=decode_tokens_per_second(records),
        update_ms=Spread.of([1000 * r.seconds for r in records if r.seconds > 0]),
    )


def _longest_freeze(part: Iterable[UpdateRecord]) -> int:
    shown = ["", *(record.shown for record in part)]
    return max(len(list(same)) - 1 for _, same in groupby(shown))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


COMET_MODEL = "Unbabel/wmt22-comet-da"
_CHINESE = {"zh", "zho", "chi", "cmn", "chinese"}
_JAPANESE = {"ja", "jpn", "japanese"}


class Translation(NamedTuple):
    """A finished segment."""

    source: str
    text: str
    reference: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A value and how it was measured; only equal signatures are comparable."""

    value: float
    signature: str
    ci95: tuple[float, float] | None = None
    """95 % interval by bootstrap over segments; None: fewer than two, or not computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Scores of the segments with a reference."""

    scored: int
    without_reference: int
    chrf: Score
    bleu: Score


def translations(records: Sequence[UpdateRecord]) -> list[Translation]:
    """Return the segments with a reference, each with its last whole output.

    If the last update was degenerate, the text that is still displayed counts. Empty outputs are
    included and lower the score.

    Raises:
        InputError: the records are not those of one stream, in order.
    """
    found = []
    for part in segments(records):
        last = part[-1]
        wanted = reference(part)
        if wanted:
            text = last.shown if last.degenerate else last.full
            found.append(Translation(source=final_source(part), text=text, reference=wanted))
    return found


def quality(records: Sequence[UpdateRecord], *, target_language: str) -> Quality | None:
    """Compute chrF2 (character 6-grams, no words, beta 2) and BLEU of the corpus.

    None: no segment has a reference.

    Raises:
        InputError: sacrebleu is not installed, or the records are not those of one stream.
    """
    found = translations(records)
    if not found:
        return None
    _, texts, references = zip(*found, strict=True)
    sacrebleu = sacrebleu_metrics()

    def score(metric: Any) -> Score:
        value = metric.corpus_score(texts, [references]).score
        # the signature is complete only after scoring
        signature = str(metric.get_signature())
        return Score(value=float(value), signature=signature, ci95=interval(metric))

    def interval(metric: Any) -> Interval | None:
        # sacrebleu's own bootstrap fails where a resample scores 0
        counts = np.array(metric._extract_corpus_statistics(texts, [references]))
        return bootstrap(
            len(found),
            lambda picks: [
                float(metric._compute_score_from_stats(counts[pick].sum(0).tolist()).score)
                for pick in picks
            ],
        )

    return Quality(
        scored=len(found),
        without_reference=len(segments(records)) - len(found),
        chrf=score(sacrebleu.CHRF()),
        bleu=score(sacrebleu.BLEU(tokenize=bleu_tokenizer(target_language))),
    )


def sacrebleu_metrics() -> Any:
    """Return sacrebleu's metrics. InputError: it is not installed."""
    return _import("sacrebleu.metrics", "chrF and BLEU", 'pip install "draftsmith[eval]"')


def bleu_tokenizer(target_language: str) -> str:
    """Return sacrebleu's tokenizer: `zh`, `ja-mecab` (`char` without MeCab), else `13a`.

    Languages are codes (zh, zh-CN, zho_Hans, ja, jpn_Jpan) or English names.
    """
    language = target_language.strip().lower().replace("_", "-").partition("-")[0]
    if language in _CHINESE:
        return "zh"
    if language in _JAPANESE:
        there = all(importlib.util.find_spec(name) for name in ("MeCab", "ipadic"))
        return "ja-mecab" if there else "char"
    return "13a"


def comet(found: Sequence[Translation]) -> Score:
    """Compute the mean COMET (wmt22-comet-da) of the segments, on the CPU; nothing is downloaded.

    Raises:
        InputError: unbabel-comet is missing, or the model or its encoder is not in the model cache.
    """
    from huggingface_hub import snapshot_download

    # version 2.2.7 of the package pins transformers 4: installing it would break this package
    package = _import(
        "comet",
        "COMET",
        "it is the package unbabel-comet, made for transformers 4: install it in an environment of "
        "its own and run there, on the files of `write_texts`: comet-score -s source.txt "
        f"-t translation.txt -r reference.txt --model {COMET_MODEL}",
    )
    try:
        path = Path(snapshot_download(COMET_MODEL, local_files_only=True), "checkpoints/model.ckpt")
        path.stat()  # a download that was cut short has none, which COMET reports by an Exception
        model = package.load_from_checkpoint(str(path), local_files_only=True)
    except OSError as error:
        raise InputError(
            f"COMET cannot be loaded from the model cache ({error}): hf download {COMET_MODEL}, "
            "and its encoder, FacebookAI/xlm-roberta-large"
        ) from None
    data = [{"src": one.source, "mt": one.text, "ref": one.reference} for one in found]
    value = float(model.predict(data, gpus=0, progress_bar=False).system_score)
    name = COMET_MODEL.rpartition("/")[2]
    return Score(value=value, signature=f"comet:{name}|nrefs:1|corpus:mean")


def write_texts(found: Sequence[Translation], folder: Path) -> None:
    """Write source.txt, translation.txt and reference.txt, a line per segment, for other tools."""
    for place, name in enumerate(("source", "translation", "reference")):
        # a line break inside a text would misalign the files
        lines = (" ".join(one[place].splitlines()) for one in found)
        write_text_atomic(folder / f"{name}.txt", "".join(f"{line}\n" for line in lines))


def _import(module: str, what: str, how: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{what} cannot be imported ({error}): {how}") from None
