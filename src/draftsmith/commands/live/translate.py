"""`draftsmith live translate`: a stream on stdin, its translation on stdout."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from draftsmith.commands._options import VerbOptions
from draftsmith.config import require, unused
from draftsmith.core.config import bias_warning, check_bias
from draftsmith.errors import InputError
from draftsmith.live.config import DisplayConfig, MaskConfig, PromptConfig, RedraftConfig
from draftsmith.live.feeds import open_feed
from draftsmith.live.records import Hypothesis, UpdateRecord, write_lines
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.live.translator import LiveTranslator

Feed = Literal["lines", "jsonl", "simulstreaming", "textflow", "google", "aws", "deepgram", "azure"]


@dataclass(frozen=True, kw_only=True)
class LiveTranslateOptions(VerbOptions):
    """Translate what comes in on stdin, anew with every line, drafting with the last output."""

    model: ModelConfig
    format: Feed = "lines"
    """Format of the input: lines (a hypothesis each, an empty one ends the segment), jsonl, or what
    a recogniser sends."""
    bias: float = 0.2
    """How far verification leans towards the last output: 0 changes nothing, 0.5 keeps it all."""
    screen: MaskConfig = field(default_factory=MaskConfig)
    no_shrink: bool = False
    """Text that is on the screen and in the new output stays, whatever is hidden."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    redraft: RedraftConfig = field(default_factory=RedraftConfig)
    out: Path | None = None
    """Write what happened to this file (JSONL, for `live score`)."""

    def validate(self) -> None:
        super().validate()
        check_bias(self.bias, "--bias")
        if not self.screen.mask_k:
            unused("--unit", self.screen.unit, "token", "--mask-k")


def run(options: LiveTranslateOptions) -> dict[str, Any]:
    """Translate until the input ends; after an interrupt the records so far are still written.

    Raises:
        InputError: no line of the input could be used.
    """
    from draftsmith.live.metrics import CHARACTERS, report
    from draftsmith.live.replay import ReplaySetting, maker
    from draftsmith.targets.hf import open_model

    note = bias_warning(options.bias, options.redraft.final_bias, options.redraft.revision_bias)
    if note is not None:
        print(f"note: {note}", file=sys.stderr, flush=True)
    require(sys.stdin is not None, "there is nothing to read: stdin is closed")
    target = open_model(options.model)
    display = DisplayConfig(**vars(options.screen), no_shrink=options.no_shrink)
    setting = ReplaySetting(method="ssbd", bias=options.bias, mask_k=display.mask_k)
    follower = _Follower(maker(target, options.prompt, options.redraft, display)(setting))
    if options.out is not None:
        write_lines(options.out, ())  # what cannot be written is said now, not after hours
    try:
        follower.follow(options.format)
    finally:
        if options.out is not None:
            write_lines(options.out, follower.records)
    if follower.left_out and not follower.records:
        raise InputError(f"nothing could be translated: {follower.left_out[0]}")
    found = report(follower.records, CHARACTERS)
    result = {
        "segments": [
            {"seg": one.seg, "source": one.source, "text": one.full}
            for one in follower.records
            if one.final
        ],
        "updates": found.updates,
        "accepted_of_drafted": found.accepted_of_drafted,
        "tokens_per_second": found.tokens_per_second,
        "left_out": follower.left_out,
    }
    print(_summary(result), file=sys.stderr, flush=True)
    return result


class _Follower:
    """Translates a feed; a terminal shows every update, other outputs get final segments only."""

    def __init__(self, translator: LiveTranslator) -> None:
        self.translator = translator
        self.records: list[UpdateRecord] = []
        self.left_out: list[str] = []
        """Errors of the skipped lines."""
        self._console = Console(highlight=False, markup=False)
        self._screen = Live(console=self._console, auto_refresh=False, transient=True)

    def follow(self, feed: Feed) -> None:
        """Translate stdin. An interrupt, also during an update, makes the last hypothesis final."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        hypothesis: Hypothesis | None = None
        with self._screen:
            try:
                for hypothesis in open_feed(feed).read(sys.stdin, self._leave_out):
                    self._update(hypothesis)
            except KeyboardInterrupt:
                if hypothesis is not None and not self._is_over(hypothesis.seg):
                    rev = hypothesis.rev if hypothesis.final else hypothesis.rev + 1
                    self._update(replace(hypothesis, rev=rev, final=True))
                raise

    def _leave_out(self, error: InputError) -> None:
        self.left_out.append(str(error))
        print(f"left out: {error}", file=sys.stderr, flush=True)

    def _is_over(self, seg: int) -> bool:
        return bool(self.records) and self.records[-1].final and self.records[-1].seg == seg

    def _update(self, hypothesis: Hypothesis) -> None:
        try:
            update = self.translator.decoded(hypothesis.text, final=hypothesis.final)
        except InputError as error:  # too long, or no text: the segment stays as it was
            place = f"segment {hypothesis.seg} revision {hypothesis.rev}"
            self._leave_out(InputError(f"{place}: {error}"))
            if not hypothesis.final:
                return
            update = self.translator.decoded("", final=True)
        if update is None:
            return
        self.records.append(update.numbered_as(hypothesis))
        if update.final:
            self._screen.update(Text(""), refresh=True)
            self._console.print(Text(update.shown), soft_wrap=True)
        elif self._console.is_terminal:
            self._screen.update(coloured(update), refresh=True)


def coloured(update: UpdateRecord) -> Text:
    """Format the displayed text; the part that may still change is dim."""
    text = Text(update.shown[: update.stable])
    text.append(update.shown[update.stable :], style="" if update.final else "dim")
    return text


def _summary(result: dict[str, Any]) -> str:
    parts = [f"{len(result['segments'])} segments, {result['updates']} updates"]
    if result["accepted_of_drafted"] is not None:
        parts.append(f"{result['accepted_of_drafted']:.0%} of the drafts stayed")
    if result["tokens_per_second"] is not None:
        parts.append(f"{result['tokens_per_second']:.0f} tokens/s")
    if result["left_out"]:
        parts.append(f"{len(result['left_out'])} left out")
    return ", ".join(parts)
