"""`draftsmith live translate`: a stream on stdin, its translation on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from draftsmith.live.feeds import open_feed
from draftsmith.live.metrics import CHARACTERS, report
from draftsmith.live.records import Hypothesis, UpdateRecord, write_lines
from draftsmith.live.replay import Setting
from draftsmith.live.translator import LiveTranslator, SourceTooLong
from draftsmith.live_options import LiveTranslateOptions
from draftsmith.recipes._drafting import open_target
from draftsmith.recipes._live import coloured, make_display_options, maker, warn


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One that is final."""

    seg: int
    source: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TranslateResult:
    """What `--json` prints."""

    segments: tuple[Segment, ...]
    updates: int
    accepted_of_drafted: float | None
    tokens_per_second: float | None

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def run(options: LiveTranslateOptions) -> TranslateResult:
    """Translate until the input ends. On an interrupt, what was said so far is still written."""
    warn(options.bias, options.redraft.final_bias, options.redraft.revision_bias)
    target = open_target(options.model)
    display = make_display_options(options.screen, no_shrink=options.no_shrink)
    setting = Setting(method="ssbd", bias=options.bias, mask_k=display.hide)
    translator = maker(target, options.prompt, options.redraft, display)(setting)
    records: list[UpdateRecord] = []
    try:
        _follow(translator, options, records)
    finally:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_lines(options.out, records)
    found = report(records, CHARACTERS)
    result = TranslateResult(
        segments=tuple(
            Segment(seg=one.seg, source=one.source, text=one.full) for one in records if one.final
        ),
        updates=found.updates,
        accepted_of_drafted=found.accepted_of_drafted,
        tokens_per_second=found.tokens_per_second,
    )
    print(_summary(result), file=sys.stderr, flush=True)
    return result


def _follow(
    translator: LiveTranslator, options: LiveTranslateOptions, records: list[UpdateRecord]
) -> None:
    """Update by update; a terminal shows the segment growing, other readers get it when it ends."""
    console = Console(highlight=False, markup=False)
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        for heard in _until_interrupted(open_feed(options.format)(sys.stdin)):
            before = translator.last
            try:
                update = translator.update(heard.text, final=heard.final)
            except SourceTooLong as error:  # the next segment may be shorter
                print(f"segment {heard.seg}: {error}", file=sys.stderr, flush=True)
                translator.close()
                continue
            if update is None or update is before:
                continue
            own = replace(update.record, seg=heard.seg, rev=heard.rev, reference=heard.reference)
            records.append(own)
            if update.final:
                screen.update(Text(""), refresh=True)
                console.print(Text(update.text), soft_wrap=True)
            elif console.is_terminal:
                screen.update(coloured(update), refresh=True)


def _until_interrupted(feed: Iterator[Hypothesis]) -> Iterator[Hypothesis]:
    """What is heard; an interrupt makes the last of it final before it goes on its way."""
    last: Hypothesis | None = None
    try:
        for last in feed:
            yield last
    except KeyboardInterrupt:
        if last is not None and not last.final:
            yield replace(last, rev=last.rev + 1, final=True)
        raise


def _summary(result: TranslateResult) -> str:
    parts = [f"{len(result.segments)} segments, {result.updates} updates"]
    if result.accepted_of_drafted is not None:
        parts.append(f"{result.accepted_of_drafted:.0%} of the drafts stayed")
    if result.tokens_per_second is not None:
        parts.append(f"{result.tokens_per_second:.0f} tokens/s")
    return ", ".join(parts)
