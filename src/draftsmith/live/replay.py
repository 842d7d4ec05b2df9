"""Replays one stream under many settings, which take turns segment by segment.

Because they take turns, other load on the machine affects all settings alike. A mask that only
hides is not decoded again: its records come from the outputs of the setting without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from draftsmith.live.config import DisplayConfig
from draftsmith.live.display import make_display, without_thoughts
from draftsmith.live.metrics import Pieces, quality, report, speedup, translations
from draftsmith.live.records import Hypothesis, UpdateRecord
from draftsmith.live.translator import LiveTranslator

Method = Literal["ar", "ssbd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySetting:
    """How a stream is translated and shown."""

    method: Method
    """ar: re-translation without drafts; ssbd: with the last output."""
    bias: float | None = None
    """None: there is no draft."""
    mask_k: int = 0
    mask: Literal["display", "draft"] = "display"

    @property
    def name(self) -> str:
        parts = [self.method, "" if self.bias is None else f"bias{self.bias:g}"]
        parts.append(f"{self.mask}{self.mask_k}" if self.mask_k else "")
        return "-".join(filter(None, parts))

    @property
    def decoded(self) -> ReplaySetting:
        """The setting whose decoded outputs this one displays."""
        return replace(self, mask_k=0) if self.mask == "display" else self


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRun:
    """The updates of a stream under one setting."""

    setting: ReplaySetting
    records: tuple[UpdateRecord, ...]
    outputs: tuple[tuple[int, ...], ...]
    """Output tokens of each record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRow:
    """A row of the result table. Shares are fractions; None: undefined, or no references."""

    method: str
    bias: float | None
    mask_k: int
    mask: str
    ne: float | None
    ad: float | None
    ao: float | None
    output_tps: float | None
    speedup: float | None
    chrf: float | None
    bleu: float | None
    identical_to_ar: bool | None
    """Whether every output equals that of re-translation, token by token."""


def settings(
    methods: Sequence[Method], biases: Sequence[float], masks: Sequence[int], mask: str
) -> list[ReplaySetting]:
    """Return all combinations, once each. Without drafts a mask can only hide."""
    found = []
    for method in methods:
        for bias in biases if method == "ssbd" else (None,):
            for hidden in masks:
                way: Any = mask if method == "ssbd" else "display"
                found.append(ReplaySetting(method=method, bias=bias, mask_k=hidden, mask=way))
    return list(dict.fromkeys(found))


def replay(
    stream: Sequence[Hypothesis],
    wanted: Sequence[ReplaySetting],
    make: Callable[[ReplaySetting], LiveTranslator],
    on_segment: Callable[[int, int], None] | None = None,
) -> dict[ReplaySetting, ReplayRun]:
    """Replay all settings of `wanted`; `on_segment` is called with (done, total) segments."""
    needed = list(dict.fromkeys(one.decoded for one in wanted))
    translators = {one: make(one) for one in needed}
    records: dict[ReplaySetting, list[UpdateRecord]] = {one: [] for one in needed}
    outputs: dict[ReplaySetting, list[tuple[int, ...]]] = {one: [] for one in needed}
    parts = [list(part) for _, part in groupby(stream, key=lambda one: one.seg)]
    for number, part in enumerate(parts, 1):
        for one in needed:
            for record, tokens in _segment(translators[one], part):
                records[one].append(record)
                outputs[one].append(tokens)
        if on_segment is not None:
            on_segment(number, len(parts))
    made = {
        one: ReplayRun(setting=one, records=tuple(records[one]), outputs=tuple(outputs[one]))
        for one in needed
    }
    out = {}
    for one in wanted:
        tokenizer = translators[one.decoded].target.tokenizer
        out[one] = made[one] if one in made else hidden(made[one.decoded], one, tokenizer)
    return out


def _segment(
    translator: LiveTranslator, part: Sequence[Hypothesis]
) -> Iterator[tuple[UpdateRecord, tuple[int, ...]]]:
    """Yield a record for each of a segment's updates that was decoded."""
    for hypothesis in part:
        before = translator.last
        update = translator.update(hypothesis.text, final=hypothesis.final)
        if update is not None and update is not before:
            yield update.record_of(hypothesis), update.tokens
    if not part[-1].final:
        translator.close()


def hidden(shown: ReplayRun, setting: ReplaySetting, tokenizer: Any) -> ReplayRun:
    """Apply a mask to outputs that were decoded without it."""
    config = DisplayConfig(mask_k=setting.mask_k)
    records = []
    for _, part in groupby(zip(shown.records, shown.outputs, strict=True), lambda one: one[0].seg):
        display = make_display(config, tokenizer)
        before = ""
        for record, tokens in part:
            if record.final:  # a final output is shown in full
                before = record.full
            elif not record.degenerate:
                before = display.show(without_thoughts(tokens, tokenizer), final=False).text
            records.append(replace(record, shown=before))
    return replace(shown, setting=setting, records=tuple(records))


def table(
    made: Sequence[ReplayRun], pieces: Pieces, *, target_language: str | None
) -> list[ReplayRow]:
    """Build one row per setting. `target_language` None: quality is left out."""
    plain = {one.setting.mask_k: one for one in made if one.setting.method == "ar"}
    base = next(iter(plain.values()), None)
    rows = []
    for one in made:
        found = report(one.records, pieces)
        scored = target_language is not None and bool(translations(one.records))
        score = quality(one.records, target_language=target_language or "") if scored else None
        setting = one.setting
        drafts = setting.method == "ssbd"
        rows.append(
            ReplayRow(
                method=setting.method,
                bias=setting.bias,
                mask_k=setting.mask_k,
                mask=setting.mask,
                ne=found.erasure_macro,
                ad=found.accepted_of_drafted if drafts else None,
                ao=found.accepted_of_tokens if drafts else None,
                output_tps=found.tokens_per_second,
                speedup=None if base is None else speedup(one.records, base.records),
                chrf=None if score is None or score.chrf is None else score.chrf.value,
                bleu=None if score is None or score.bleu is None else score.bleu.value,
                identical_to_ar=None if base is None else one.outputs == base.outputs,
            )
        )
    return rows
