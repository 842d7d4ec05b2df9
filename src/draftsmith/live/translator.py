"""Live translation: a source that grows and changes is translated again at every update.

Self-speculative biased decoding (SSBD, arXiv 2509.21740) drafts with the last output:

    cache      A  This is an exam   B   Y Y Y Y y
    prompt     A  This is an example of   B            token by token the same up to here
                  `---- reused ---'^ fed again, followed by the whole last output, in one forward
    output     Y Y Y | Z . .          3 accepted, one token from the target; then plain decoding

An update costs one forward pass, and one more per token after the accepted ones. A draft has no end
of sequence. Drafts are kept as tokens, because text that is encoded again may give other tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

from draftsmith.core.decode import Session
from draftsmith.drafters.base import BindableTarget, Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.live.config import LiveConfig
from draftsmith.live.display import Display, Shown, without_thoughts, word_ends
from draftsmith.live.engine import FAILURES, InFlightUpdate, LiveEngine
from draftsmith.live.records import UpdateRecord
from draftsmith.live.templates import Template, check_text

KEPT_SEGMENTS = 200
"""Finished segments that are kept for the prompt's context."""
_COUNTS = (
    *("drafted", "accepted", "redrafted", "reaccepted", "restarts", "forwards", "fed"),
    *("seconds", "first_seconds"),
)
"""What a record takes over from a decoded update."""
FULL_STOPS = ".!?\N{IDEOGRAPHIC FULL STOP}\N{FULLWIDTH EXCLAMATION MARK}\N{FULLWIDTH QUESTION MARK}"


class SourceTooLong(InputError):
    """The source leaves no room in the model's context."""


class LiveTranslator:
    """Translates segments one after the other, each updated until it is final.

    translator = LiveTranslator(target, Template(tokenizer=target.tokenizer, language="German"))
    translator.update("This is an exam")
    translator.update("This is an example.", final=True).shown
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
        self.history: list[tuple[str, str]] = []
        """(source, translation) of finished segments."""
        self._begin()

    def _begin(self) -> None:
        """Begin a segment."""
        self.rev = 0
        self.source = ""
        self.last: UpdateRecord | None = None
        self._draft: tuple[int, ...] = ()
        self._kept: tuple[int, ...] = ()
        self._display = Display(self.config.display, self.target.tokenizer)
        self._shown = Shown(text="", stable=0, full="", erased=0)

    # ------------------------------------------------------------------ whole updates

    def update(self, source: str, *, final: bool = False) -> UpdateRecord | None:
        """Translate the segment's new source. None: there are no words yet.

        A source that is unchanged or blank costs no forward pass and keeps the display. A final
        update ends the segment; the next one begins another.

        Raises:
            InputError: the text cannot be encoded, or leaves no room in the context.
            BackendError: the target failed twice; the translation keeps its state.
        """
        wanted = self.wanted(source)
        if wanted is None or (self.is_known(wanted) and not final):
            update = self.last
            if final:
                self.close()
            return update
        in_flight = self.begin(wanted, final=final)
        try:
            self.engine.run(in_flight, self.session)
        except FAILURES:
            self.engine.run_afresh(in_flight, self.session)
        return self.finish(in_flight)

    def append(self, words: str) -> UpdateRecord | None:
        """Translate the source with these words added."""
        return self.update(self.source + words)

    def close(self) -> None:
        """End the segment as it is, without a final update."""
        self._end(self.last)

    def reset(self) -> None:
        """Drop the segment, the earlier ones and the cache."""
        self.session.clear()
        self.history.clear()
        self.seg = 0
        self._begin()

    def configure(self, config: LiveConfig) -> None:
        """Use another configuration, and display the last output by it.

        `redraft`, `resync` and `then` belong to the engine and do not change.
        """
        self.config = config
        self._display = Display(config.display, self.target.tokenizer)
        if self.last is not None:
            self._shown = self._display.show(self._kept, final=False)
            shown, stable = self._shown.text, self._shown.stable
            self.last = replace(self.last, shown=shown, stable=stable)

    # ------------------------------------------------------------------ the halves of an update

    def wanted(self, source: str) -> str | None:
        """Return the text to translate for a hypothesis: the last source if it is blank.

        None: there are no words yet.

        Raises:
            InputError: the text cannot be encoded.
        """
        check_text(source)
        return (source if source.strip() else self.source) or None

    def is_known(self, source: str) -> bool:
        """Whether this source was translated last."""
        return self.last is not None and source == self.source

    def begin(self, source: str, *, final: bool) -> InFlightUpdate:
        """Build the update for the engine: the prompt, and the last output as a draft.

        Raises:
            InputError: the source leaves no room in the context.
        """
        words = len(self.template.encode(source)) - len(self.template.encode(""))
        limit = math.ceil(self.config.max_ratio * max(words, 0)) + self.config.max_extra
        room = self.target.max_length
        context = self.history[-self.config.context :] if self.config.context else []
        prompt = self.template.encode(source, context)
        while context and room is not None and len(prompt) + limit > room:
            del context[0]  # the source is more important
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

    def finish(self, decoded: InFlightUpdate) -> UpdateRecord:
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
        update = UpdateRecord(
            seg=self.seg,
            rev=self.rev,
            source=decoded.source,
            shown=shown.text,
            full=shown.full,
            final=decoded.final,
            tokens=len(output),
            **{name: getattr(decoded, name) for name in _COUNTS},
            degenerate=degenerate,
            output=output,
            stable=shown.stable,
            erased=shown.erased,
        )
        self.source, self.last, self.rev = decoded.source, update, self.rev + 1
        if not degenerate:
            self._kept, self._draft = tokens, self._drafted(output)
        if decoded.final:
            self._end(update)
        return update

    def _drafted(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the next draft, from the last output."""
        tokens = tokens[: max(0, len(tokens) - self.config.trim_draft)]
        if self.config.trim_full_stop and tokens:
            last = self.target.tokenizer.decode([tokens[-1]]).strip()
            if last and set(last) <= set(FULL_STOPS):
                return tokens[:-1]
        return tokens

    def _end(self, update: UpdateRecord | None) -> None:
        """Add the segment to the history and begin the next."""
        if update is not None and update.full:
            self.history.append((update.source, update.full))
            del self.history[:-KEPT_SEGMENTS]
        self.seg += 1
        self._begin()


def _common(before: str, after: str) -> float:
    """Share of the old words that the new text has too; the last one is ignored, as it may grow."""
    old, new = (
        Counter(text[start:end].strip() for start, end in pairwise([0, *ends]))
        for text, ends in ((before, word_ends(before)[:-1]), (after, word_ends(after)))
    )
    return (old & new).total() / old.total() if old else 1.0


def _spaced(text: str) -> str:
    """Collapse white space, so that a line break is no revision."""
    return " ".join(text.split())
