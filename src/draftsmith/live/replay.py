"""Replays one stream under many settings, which take turns segment by segment.

Because they take turns, other load on the machine affects all settings alike. A mask that only
hides is not decoded again: its records come from the outputs of the setting without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

from draftsmith.drafters.base import BindableTarget
from draftsmith.live.config import DisplayConfig, LiveConfig, PromptConfig, RedraftConfig
from draftsmith.live.display import Display, without_thoughts
from draftsmith.live.metrics import (
    WORDS,
    Pieces,
    normalised_erasure,
    quality,
    report,
    speedup,
    speedup_interval,
)
from draftsmith.live.records import Hypothesis, UpdateRecord
from draftsmith.live.templates import Template
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


Runs: TypeAlias = dict[ReplaySetting, list[UpdateRecord]]
"""The updates of a stream under each setting."""


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
    ne_words: float | None = None
    ne_tokens: float | None = None
    """NE in words, and in tokens of the target."""
    ne_low: float | None = None
    ne_high: float | None = None
    """95 % interval by bootstrap over segments, here and below; None: fewer than two."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    chrf_low: float | None = None
    chrf_high: float | None = None
    bleu_low: float | None = None
    bleu_high: float | None = None


def maker(
    target: BindableTarget,
    prompt: PromptConfig,
    redraft: RedraftConfig,
    display: DisplayConfig | None = None,
) -> Callable[[ReplaySetting], LiveTranslator]:
    """Return a function that makes a translator per setting; all share the target.

    `display`: what is hidden beside the setting's mask.
    """
    template = Template.of(prompt, target.tokenizer)
    display = display or DisplayConfig()

    def make(setting: ReplaySetting) -> LiveTranslator:
        drafts = setting.method == "ssbd"
        values = vars(redraft) | ({} if drafts else {"resync": 0, "then": None})
        config = LiveConfig(
            **values,
            redraft=drafts,
            bias=setting.bias or 0.0,
            trim_draft=setting.mask_k if setting.mask == "draft" else 0,
            context=prompt.context,
            display=replace(display, mask_k=setting.mask_k),
        )
        return LiveTranslator(target, template, config)

    return make


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
    parts: Iterable[Sequence[Hypothesis]],
    wanted: Sequence[ReplaySetting],
    make: Callable[[ReplaySetting], LiveTranslator],
) -> Runs:
    """Translate the segments of a stream under all settings of `wanted`."""
    translators = {one: make(one) for one in dict.fromkeys(one.decoded for one in wanted)}
    records: Runs = {one: [] for one in translators}
    for part in parts:
        for one, translator in translators.items():
            records[one] += _segment(translator, part)
    made = {}
    for one in wanted:
        tokenizer = translators[one.decoded].target.tokenizer
        shown = records[one.decoded]
        made[one] = shown if one == one.decoded else hidden(shown, one.mask_k, tokenizer)
    return made


def _segment(translator: LiveTranslator, part: Sequence[Hypothesis]) -> Iterator[UpdateRecord]:
    """Yield a record for each of a segment's updates that was decoded."""
    for hypothesis in part:
        update = translator.decoded(hypothesis.text, final=hypothesis.final)
        if update is not None:
            yield update.numbered_as(hypothesis)
    if not part[-1].final:
        translator.close()


def hidden(shown: Sequence[UpdateRecord], mask_k: int, tokenizer: Any) -> list[UpdateRecord]:
    """Apply a mask to outputs that were decoded without it."""
    records = []
    for _, part in groupby(shown, lambda one: one.seg):
        display = Display(DisplayConfig(mask_k=mask_k), tokenizer)
        before = ""
        for record in part:
            if record.final:  # a final output is shown in full
                before = record.full
            elif not record.degenerate:
                answer = without_thoughts(record.output, tokenizer)
                before = display.show(answer, final=False).shown
            records.append(replace(record, shown=before))
    return records


def table(made: Runs, pieces: Pieces, *, tokens: Pieces, target_language: str) -> list[ReplayRow]:
    """Build one row per setting; `pieces` and `tokens`: what erasure is counted in."""
    base = next((records for one, records in made.items() if one.method == "ar"), None)
    rows = []
    for setting, records in made.items():
        found = report(records, pieces)
        score = quality(records, target_language=target_language)
        drafts = setting.method == "ssbd"
        ends = {
            "ne": found.erasure_ci95,
            "speedup": None if base is None else speedup_interval(records, base),
            "chrf": None if score is None else score.chrf.ci95,
            "bleu": None if score is None else score.bleu.ci95,
        }
        spreads: dict[str, Any] = {
            f"{name}_{end}": value
            for name, both in ends.items()
            for end, value in zip(("low", "high"), both or (None, None), strict=True)
        }
        rows.append(
            ReplayRow(
                **asdict(setting),
                ne=found.erasure_macro,
                ad=found.accepted_of_drafted if drafts else None,
                ao=found.accepted_of_tokens if drafts else None,
                output_tps=found.tokens_per_second,
                speedup=None if base is None else speedup(records, base),
                chrf=None if score is None else score.chrf.value,
                bleu=None if score is None else score.bleu.value,
                identical_to_ar=None if base is None else _outputs(records) == _outputs(base),
                ne_words=normalised_erasure(records, WORDS),
                ne_tokens=normalised_erasure(records, tokens),
                **spreads,
            )
        )
    return rows


def _outputs(records: Sequence[UpdateRecord]) -> list[tuple[int, ...]]:
    return [one.output for one in records]
