"""One live translation: a source that grows and changes, translated anew at every update.

Self-speculative biased decoding (SSBD, arXiv 2509.21740): the last output is the draft of the next.

    cache      A  This is an exam   B   Y Y Y Y y
    prompt     A  This is an example of   B            token by token the same up to here
                  `----- kept ----'^ fed again, with the whole last output behind it, in one forward
    output     Y Y Y | Z . .          3 stay, one comes free; what follows is decoded on

An update costs one forward and one more per token behind those that stay. The draft never holds an
end of sequence. It is kept as tokens: text that is encoded again may fall into other pieces.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from draftsmith.core.decode import Session
from draftsmith.drafters.base import BindableTarget, Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.live.config import LiveConfig
from draftsmith.live.display import Shown, make_display, without_thoughts, word_ends
from draftsmith.live.engine import FAILURES, InFlightUpdate, LiveEngine
from draftsmith.live.records import UpdateRecord
from draftsmith.live.templates import Template, check_text

KEPT_SEGMENTS = 200
"""Finished ones that are remembered."""
FULL_STOPS = ".!?\N{IDEOGRAPHIC FULL STOP}\N{FULLWIDTH EXCLAMATION MARK}\N{FULLWIDTH QUESTION MARK}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one update gave."""

    stable: int
    """Characters of the displayed text that are not expected to change."""
    erased: int
    """Characters that were removed from the display."""
    tokens: tuple[int, ...]
    """The whole output, without end tokens."""
    record: UpdateRecord

    @property
    def text(self) -> str:
        """The displayed text."""
        return self.record.shown

    @property
    def final(self) -> bool:
        return self.record.final


class SourceTooLong(InputError):
    """The source leaves no room in the model's context."""


class LiveTranslator:
    """A session: segments one after the other, each updated until it is final.

    translator = LiveTranslator(target, Template(tokenizer=target.tokenizer, language="German"))
    translator.update("This is an exam")
    translator.update("This is an example.", final=True).text
    """

    def __init__(
        self,
        target: BindableTarget,
        template: Template,
        config: LiveConfig | None = None,
        *,
        then: Drafter | None = None,
        engine: LiveEngine | None = None,
    ) -> None:
        """
        Args:
            then: drafter for what lies behind the divergence, where the old tail gives no draft;
                None: the one that the configuration names.
            engine: shared with other translations on this target and made for the same options;
                None: a new one.
        """
        self.target, self.template = target, template
        self.config = config or LiveConfig()
        if engine is None:
            if then is None and self.config.then is not None:
                then = load_drafter(self.config.then)
            redraft, resync = self.config.redraft, self.config.resync
            engine = LiveEngine(target, redraft=redraft, resync=resync, then=then)
        self.engine = engine
        self.session = Session()
        self.seg = self.rev = 0
        self._said: list[tuple[str, str]] = []
        self._begin()

    def _begin(self) -> None:
        """A segment of which nothing is known."""
        self.rev = 0
        self.source = ""
        self.last: Update | None = None
        self._draft: tuple[int, ...] = ()
        self._kept: tuple[int, ...] = ()
        self._display = make_display(self.config.display, self.target.tokenizer)
        self._shown = Shown(text="", stable=0, full="", erased=0)

    # ------------------------------------------------------------------ the outside

    def update(self, source: str, *, final: bool = False) -> Update | None:
        """The segment's source is now this. None: there is nothing to show (no words yet).

        What is the same as before costs no forward; so does a source without words, which keeps
        what is shown. A final update ends the segment: the next one begins another.

        Raises:
            InputError: text that cannot be read, or a source that leaves no room in the context.
            BackendError: the target failed twice; the translation goes on from what it had.
        """
        wanted = self.wanted(source)
        if wanted is None or (self.is_known(wanted) and not final):
            update = self.last
            if final:
                self.close()
            return update
        update_in_flight = self.begin(wanted, final=final)
        try:
            self.engine.run(update_in_flight, self.session)
        except FAILURES:
            self.engine.run_afresh(update_in_flight, self.session)
        return self.finish(update_in_flight)

    def append(self, words: str) -> Update | None:
        """The source goes on with these."""
        return self.update(self.source + words)

    def close(self) -> None:
        """The segment is over as it stands, without a final update."""
        self._end(self.last)

    def reset(self) -> None:
        """Forget the segment, what was said before, and the cache."""
        self.session.clear()
        self._said.clear()
        self.seg = 0
        self._begin()

    def snapshot(self) -> dict[str, object]:
        """What a reader who comes late must know."""
        text = "" if self.last is None else self.last.text
        said = [{"source": source, "text": answer} for source, answer in self._said]
        return {"seg": self.seg, "rev": self.rev, "source": self.source, "text": text, "said": said}

    def configure(self, config: LiveConfig) -> None:
        """Go on with other options; what is shown is shown by the new display.

        What an engine is made for stays: `redraft` and `resync`.
        """
        self.config = config
        self._display = make_display(config.display, self.target.tokenizer)
        if self.last is not None:
            self._shown = self._display.show(self._kept, final=False)
            record = replace(self.last.record, shown=self._shown.text)
            self.last = replace(self.last, stable=self._shown.stable, record=record)

    # ------------------------------------------------------------------ both halves of an update

    def wanted(self, source: str) -> str | None:
        """What a hypothesis asks to be translated: in silence what was said before; None: nothing.

        Raises:
            InputError: text that cannot be read.
        """
        check_text(source)
        return (source if source.strip() else self.source) or None

    def is_known(self, source: str) -> bool:
        """Whether it is what was translated last."""
        return self.last is not None and source == self.source

    def begin(self, source: str, *, final: bool) -> InFlightUpdate:
        """Build the update for the engine: the prompt, and the last output as a draft.

        Raises:
            InputError: the source leaves no room in the context.
        """
        words = len(self.template.encode(source)) - len(self.template.encode(""))
        limit = math.ceil(self.config.max_ratio * max(words, 0)) + self.config.max_extra
        room = self.target.max_length
        context = self._said[-self.config.context :] if self.config.context else []
        prompt = self.template.encode(source, context)
        while context and room is not None and len(prompt) + limit > room:
            del context[0]  # the source comes first
            prompt = self.template.encode(source, context)
        if room is not None:
            if len(prompt) >= room:
                raise SourceTooLong(
                    f"the source is too long: its prompt has {len(prompt)} tokens, the model reads "
                    f"{room}; end segments sooner"
                )
            limit = min(limit, room - len(prompt))
        revised = not _spaced(source).startswith(_spaced(self.source))
        known = _common(self.source, source) >= self.config.min_common
        return InFlightUpdate(
            source=source,
            final=final,
            prompt=tuple(prompt),
            draft=self._draft[: limit - 1] if known else (),
            bias=self.config.bias_of(final=final, revised=revised),
            max_new_tokens=limit,
        )

    def finish(self, decoded: InFlightUpdate) -> Update:
        """Display a decoded update; a final one ends the segment."""
        output = decoded.output(self.target.end_ids)
        tokens = without_thoughts(output, self.target.tokenizer)
        degenerate = not tokens or not decoded.ended
        if degenerate and self._kept:  # the last good output stays, and is drafted from
            tokens = self._kept
        if degenerate and not decoded.final:
            shown = replace(self._shown, erased=0)
        else:
            shown = self._shown = self._display.show(tokens, final=decoded.final)
        update = Update(
            stable=shown.stable,
            erased=shown.erased,
            tokens=output,
            record=UpdateRecord(
                seg=self.seg,
                rev=self.rev,
                source=decoded.source,
                shown=shown.text,
                full=shown.full,
                final=decoded.final,
                tokens=len(output),
                drafted=decoded.drafted,
                accepted=decoded.accepted,
                redrafted=decoded.redrafted,
                reaccepted=decoded.reaccepted,
                restarts=decoded.restarts,
                forwards=decoded.forwards,
                fed=decoded.fed,
                seconds=decoded.seconds,
                first_seconds=decoded.first_seconds,
                degenerate=degenerate,
            ),
        )
        self.source, self.last, self.rev = decoded.source, update, self.rev + 1
        if not degenerate:
            self._kept, self._draft = tokens, self._drafted(output)
        if decoded.final:
            self._end(update)
        return update

    def _drafted(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """What of an output is the next draft."""
        tokens = tokens[: max(0, len(tokens) - self.config.trim_draft)]
        if self.config.trim_full_stop and tokens:
            last = self.target.tokenizer.decode([tokens[-1]]).strip()
            if last and set(last) <= set(FULL_STOPS):
                return tokens[:-1]
        return tokens

    def _end(self, update: Update | None) -> None:
        """The segment is over."""
        if update is not None and update.record.full:
            self._said.append((update.record.source, update.record.full))
            del self._said[:-KEPT_SEGMENTS]
        self.seg += 1
        self._begin()


def _common(before: str, after: str) -> float:
    """Share of the words before that are there after, too; the last one may only have grown."""
    old, new = (
        Counter(text[start:end].strip() for start, end in pairwise([0, *ends]))
        for text, ends in ((before, word_ends(before)[:-1]), (after, word_ends(after)))
    )
    return (old & new).total() / old.total() if old else 1.0


def _spaced(text: str) -> str:
    """With single blanks, so that a line break is no revision."""
    return " ".join(text.split())
