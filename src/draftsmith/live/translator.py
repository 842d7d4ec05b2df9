"""Live translation: a source that grows and changes is translated again at every update.

Self-speculative biased decoding (SSBD, arXiv 2509.21740) drafts with the last output:

    cache      A  This is an exam   B   Y Y Y Y y
    prompt     A  This is an example of   B            token by token the same up to here
                  `---- reused ---'^ fed again, followed by the whole last output, in one forward
    output     Y Y Y | Z . .          3 accepted, one token from the target; then plain decoding

An update costs one forward pass, and one more per token after the accepted ones. A draft has no end
of sequence. Drafts are kept as tokens, because text that is encoded again may give other tokens.

A `LiveTranslator` follows one translation; a `LiveEngine` decodes the updates of one or several, by
the decoding loop, on caches that outlive them.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from draftsmith.config import check_text
from draftsmith.core.config import MOST_NODES
from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.lossy_rules import biased_rule
from draftsmith.core.rows import common_prefix
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import (
    ALIGNED,
    DecodeStep,
    LengthPolicy,
    RequestBatch,
    RowStats,
    TreeShape,
)
from draftsmith.drafters.base import BindableTarget, Drafter, DraftState
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import BackendError, InputError
from draftsmith.live.config import LiveConfig
from draftsmith.live.display import Display, Shown, without_thoughts, word_ends
from draftsmith.live.records import UpdateRecord
from draftsmith.live.templates import Template

KEPT_SEGMENTS = 200
"""Finished segments that are kept for the prompt's context."""
PIECE = 256
"""Tokens of a long prompt that one forward reads, so that other translations wait for no more."""
_KEPT = ("source", "final", "restarts", "seconds", "first_seconds")
"""What a record takes over from a decoded update, beside its counts."""
FULL_STOPS = ".!?\N{IDEOGRAPHIC FULL STOP}\N{FULLWIDTH EXCLAMATION MARK}\N{FULLWIDTH QUESTION MARK}"


class SourceTooLong(InputError):
    """The source leaves no room in the model's context."""


@dataclass(kw_only=True, slots=True)
class InFlightUpdate:
    """One update on its way through the target: the request, and what has been decoded so far."""

    source: str
    final: bool
    prompt: tuple[int, ...]
    draft: tuple[int, ...]
    """The last output; empty: there is none. It is shorter than `max_new_tokens`, because the last
    token is the target's."""
    bias: float
    max_new_tokens: int

    words: int = 0
    """Tokens of the source."""
    reused: int = 0
    """Tokens of the prompt that were in the cache."""
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    """Drafted tokens per forward."""
    first_seconds: float = 0.0
    seconds: float = 0.0
    restarts: int = 0
    done: bool = False
    ended: bool = False
    """The target ended the text itself; else it was cut at `max_new_tokens`."""

    def add(self, step: DecodeStep, row: int, seconds: float) -> bool:
        """Add row `row` of a step that ended `seconds` after the start. Returns `done`."""
        most = self.max_new_tokens
        room = most - len(self.tokens) - 1  # alone, no more would have been drafted
        self.tokens += step.emitted[row]
        self.origins += step.origins[row][:room]
        self.offered.append(min(step.offered_depth[row], room))
        self.first_seconds, self.seconds = self.first_seconds or seconds, seconds
        self.ended = step.finish[row] == "stop" and len(self.tokens) <= most
        self.done = step.finish[row] is not None or len(self.tokens) >= most
        del self.tokens[most:]  # other rows of the batch may go on for longer
        return self.done

    def restart(self) -> None:
        """Drop what was decoded, and the draft, which may be at fault."""
        self.draft, self.restarts = (), self.restarts + 1
        self.tokens, self.origins, self.offered = [], [], []
        self.first_seconds = self.seconds = 0.0
        self.done = self.ended = False

    def output(self, end_ids: frozenset[int]) -> tuple[int, ...]:
        """The decoded tokens without ends of sequence."""
        return tuple(token for token in self.tokens if token not in end_ids)

    def counts(self) -> dict[str, Any]:
        """Return the counts of `UpdateRecord` that follow from what was decoded."""
        drafted = sum(self.offered[: _steps_of(len(self.draft))])
        accepted = sum(origin == ALIGNED for origin in self.origins) if self.draft else 0
        forwards, offered = len(self.offered), sum(self.offered)
        return {
            "drafted": drafted,
            "accepted": accepted,
            "redrafted": offered - drafted,
            "reaccepted": len(self.origins) - accepted,
            "forwards": forwards,
            "fed": len(self.prompt) - self.reused + offered + forwards - 1,
        }


def _steps_of(num_drafted: int) -> int:
    """Steps that draft a last output: one, unless it is longer than a draft can be."""
    return math.ceil(num_drafted / MOST_NODES)


@dataclass(frozen=True, slots=True)
class _WholeThenShort(LengthPolicy):
    """Drafts the whole last output first, at most `later` tokens in a step after that."""

    whole: int
    later: int

    def length(self, stats: RowStats) -> int:
        goes_on = stats.steps < _steps_of(self.whole)
        return min(self.whole, MOST_NODES) if goes_on else self.later

    @property
    def max_length(self) -> int:
        return min(max(self.whole, self.later), MOST_NODES)


class LiveEngine:
    """Decodes updates of live translations greedily, alone or several in one batch.

    It follows `redraft`, `resync` and `then` of the configuration. With a drafter for what lies
    behind the divergence it serves one translation, as that drafter's state is not kept for each.
    """

    def __init__(self, target: BindableTarget, config: LiveConfig) -> None:
        self.target, self.redraft, self.sampler = target, config.redraft, Sampler()
        then = None if config.then is None else load_drafter(config.then)
        self._later = max(config.resync, 0 if then is None else then.default_shape.depth)
        first = PredictionDrafter(PredictionDrafter.Config(resync=config.resync > 0))
        self.drafter: Drafter = then or NoDrafter()
        if config.redraft:
            self.drafter = first if then is None else Cascade([first, then])
        self.drafter.bind(target)
        longest = max(map(len, target.tokenizer.get_vocab()), default=1)
        self.most_characters = target.max_length and target.max_length * longest
        """A longer source has more tokens than the context, whatever they are; None: no limit."""

    def width(self, update: InFlightUpdate, session: Session) -> int:
        """Return how many tokens are fed until the first one comes out: unknown ones and draft."""
        cached = session.tokens[0] if session.tokens else []
        return len(update.prompt) - common_prefix(list(update.prompt), cached) + len(update.draft)

    def steps(
        self,
        updates: Sequence[InFlightUpdate],
        sessions: Sequence[Session],
        on_done: Callable[[int], None] = lambda _: None,
    ) -> Iterator[None]:
        """Decode updates of several translations, all with one bias, in the same forwards.

        Yields after each forward. Between two of them the target may decode for other sessions,
        also for those of the rows that are done. Rows that are not when it is closed are empty.

        Args:
            on_done: called with the row of an update as soon as it is done, while others go on.

        Raises:
            BackendError: the target failed; the sessions of the rows that are not done are empty.
        """
        assert len({update.bias for update in updates}) == 1, "a rule has one bias"
        if len(updates) == 1:  # no batch cache to fill and to copy back from
            yield from self._decode(updates, sessions[0], on_done)
            return
        cached = [session.tokens[0] if session.tokens else [] for session in sessions]
        parts = [None if one.cache is None else one.cache.contents(0) for one in sessions]
        for session in sessions:
            session.clear()
        longest = max(len(one.prompt) + one.max_new_tokens + len(one.draft) for one in updates)
        cache = self.target.new_cache(len(updates), max(longest, *map(len, cached)) + self._later)
        for row, part in enumerate(parts):
            if part is not None:
                cache.fill(row, part)
        batch = Session(cache=cache, state=self._empty_state(updates), tokens=cached)

        def release(row: int) -> None:
            """Give a row's cache back as soon as it is done: its session may go on without us."""
            assert batch.cache is not None and batch.tokens is not None
            session = sessions[row]
            session.cache = self.target.new_cache(1, longest)
            session.cache.fill(0, batch.cache.contents(row))
            session.state = self._empty_state([updates[row]])
            session.tokens = [list(batch.tokens[row])]
            on_done(row)

        yield from self._decode(updates, batch, release)

    def steps_afresh(
        self,
        update: InFlightUpdate,
        session: Session,
        on_done: Callable[[int], None] = lambda _: None,
    ) -> Iterator[None]:
        """Decode an update that failed once more: with an empty cache and without its draft."""
        session.clear()
        update.restart()
        return self.steps([update], [session], on_done)

    def _empty_state(self, updates: Sequence[InFlightUpdate]) -> DraftState:
        """State of a drafter that receives the predictions anew with every update."""
        return self.drafter.start(
            RequestBatch(
                tokens=[update.prompt for update in updates],
                request_ids=tuple(range(len(updates))),
                max_new_tokens=1,
            )
        )

    def _decode(
        self,
        updates: Sequence[InFlightUpdate],
        session: Session,
        on_done: Callable[[int], None],
    ) -> Iterator[None]:
        cached = session.tokens or [[] for _ in updates]
        for update, old in zip(updates, cached, strict=True):
            update.reused = min(common_prefix(list(update.prompt), old), len(update.prompt) - 1)
            if not self.redraft:
                update.draft = ()
        drafts = [update.draft for update in updates]
        rule, verifier_sampler = biased_rule(updates[0].bias if any(drafts) else 0.0, self.sampler)
        policy = _WholeThenShort(max(map(len, drafts)), self._later)
        options = DecodeOptions(
            sampler=self.sampler,
            verifier_sampler=verifier_sampler,
            rule=rule,
            max_new_tokens=max(update.max_new_tokens for update in updates),
            shape=TreeShape.chain(max(policy.max_length, 1)) if self.redraft else None,
            policy=policy if self.redraft else None,
            allow_lossy=rule.lossy,
        )
        prompts = [update.prompt for update in updates]
        elapsed = 0.0  # without what others do between two steps
        began = time.perf_counter()
        if len(prompts) == 1:
            for end in range(updates[0].reused + PIECE, len(prompts[0]), PIECE):
                self._read(prompts[0][:end], session)
                elapsed += time.perf_counter() - began
                yield
                began = time.perf_counter()
        steps = decode(
            self.target,
            self.drafter,
            prompts,
            options,
            predictions=drafts if self.redraft else (),
            session=session,
        )
        with contextlib.closing(steps):
            for step in steps:
                elapsed += time.perf_counter() - began
                for row, update in enumerate(updates):
                    if not update.done and update.add(step, row, elapsed):
                        on_done(row)
                if all(update.done for update in updates):  # a row may be cut before the others
                    return
                yield
                began = time.perf_counter()

    def _read(self, prompt: Sequence[int], session: Session) -> None:
        """Let the session's cache take in a prompt; what would follow it is dropped."""
        options = DecodeOptions(sampler=self.sampler, max_new_tokens=1)
        predictions = [()] if self.redraft else ()
        with contextlib.closing(
            decode(
                self.target,
                self.drafter,
                [prompt],
                options,
                predictions=predictions,
                session=session,
            )
        ) as steps:
            next(steps)


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
        engine: LiveEngine | None = None,
    ) -> None:
        """
        Args:
            engine: shared with other translations on this target and made for the same options;
                None: a new one.
        """
        self.target, self.template = target, template
        self.config = config or LiveConfig()
        self.engine = engine or LiveEngine(target, self.config)
        self.session = Session()
        self.seg = self.rev = 0
        self.history: list[tuple[str, str]] = []
        """(source, translation) of finished segments ..."""
        self._lengths: list[int] = []
        """... and the tokens of both."""
        self._begin()

    def _begin(self) -> None:
        """Begin a segment."""
        self.rev = 0
        self.source = ""
        self.last: UpdateRecord | None = None
        self._draft: tuple[int, ...] = ()
        self._kept: tuple[int, ...] = ()
        self._length = 0
        """Tokens of the source and of the output that is kept."""
        self._display = Display(self.config.display, self.target.tokenizer)
        self._shown = Shown()

    # ------------------------------------------------------------------ whole updates

    def update(self, source: str, *, final: bool = False) -> UpdateRecord | None:
        """Translate the segment's new source. None: there are no words yet.

        A source that is unchanged or blank costs no forward pass and keeps the display. A final
        update ends the segment; the next one begins another.

        Raises:
            InputError: the text cannot be encoded, or leaves no room in the context.
            BackendError: the target failed twice; the translation keeps its state.
        """
        last = self.last
        return self.decoded(source, final=final) or last

    def decoded(self, source: str, *, final: bool = False) -> UpdateRecord | None:
        """Update, but return None where nothing had to be decoded."""
        steps = self.steps(source, final=final)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cast(UpdateRecord | None, end.value)

    def steps(
        self, source: str, *, final: bool = False
    ) -> Generator[None, None, UpdateRecord | None]:
        """Like `decoded`, but stop after each forward."""
        wanted = self.wanted(source)
        if wanted is None or (self.is_known(wanted) and not final):
            if final:
                self.close()
            return None
        in_flight = self.begin(wanted, final=final)
        try:
            yield from self.engine.steps([in_flight], [self.session])
        except (BackendError, RuntimeError, MemoryError):  # torch's own errors are RuntimeErrors
            yield from self.engine.steps_afresh(in_flight, self.session)
        return self.finish(in_flight)

    def close(self) -> None:
        """End the segment as it is, without a final update."""
        self._end(self.last)

    def configure(self, config: LiveConfig) -> None:
        """Use another configuration, and display the last output by it.

        `redraft`, `resync` and `then` belong to the engine and do not change.
        """
        self.config = config
        self._display = Display(config.display, self.target.tokenizer)
        if self.last is not None:
            self._shown = self._display.show(self._kept, final=False)
            self.last = replace(self.last, shown=self._shown.shown, stable=self._shown.stable)

    # ------------------------------------------------------------------ the halves of an update

    def wanted(self, source: str) -> str | None:
        """Return the text to translate for a hypothesis: the last source if it is blank.

        None: there are no words yet.

        Raises:
            InputError: the text cannot be encoded.
        """
        check_text(source, "the text")
        return (source if source.strip() else self.source) or None

    def is_known(self, source: str) -> bool:
        """Whether this source was translated last."""
        return self.last is not None and source == self.source

    def begin(self, source: str, *, final: bool) -> InFlightUpdate:
        """Build the update for the engine: the prompt, and the last output as a draft.

        Raises:
            InputError: the source leaves no room in the context.
        """
        room, most = self.target.max_length, self.engine.most_characters
        if most is not None and len(source) > most:  # to count its tokens would take long
            raise SourceTooLong(
                f"the source is too long: it has {len(source)} characters, more than the {room} "
                "tokens that the model reads can have; end segments sooner"
            )
        prompt = self.template.encode(source)
        words = max(len(prompt) - len(self.template.encode("")), 0)
        limit = math.ceil(self.config.max_ratio * words) + self.config.max_extra
        if room is not None and len(prompt) >= room:
            raise SourceTooLong(
                f"the source is too long: its prompt has {len(prompt)} tokens, the model reads "
                f"{room}; end segments sooner"
            )
        prompt = self._with_context(source, prompt, math.inf if room is None else room - limit)
        if room is not None:
            limit = min(limit, room - len(prompt))
        revised = not _spaced(source).startswith(_spaced(self.source))
        least = self.config.min_common
        known = not least or _common(self.source, source) >= least
        return InFlightUpdate(
            source=source,
            final=final,
            prompt=tuple(prompt),
            draft=self._draft[: limit - 1] if known else (),
            bias=self.config.bias_of(final=final, revised=revised),
            max_new_tokens=limit,
            words=words,
        )

    def _with_context(self, source: str, alone: list[int], room: float) -> list[int]:
        """Return the prompt with the earlier segments that are wanted and have room beside it."""
        end = len(self.history)
        first, left = max(end - self.config.context, 0), room
        for place in range(end - 1, first - 1, -1):
            left -= self._lengths[place]
            if left < 0:  # what cannot fit is not encoded
                first = place + 1
                break

        def prompt(start: int) -> list[int]:
            return self.template.encode(source, self.history[start:]) if start < end else alone

        whole = prompt(first)
        if len(whole) <= room:
            return whole
        starts = range(first + 1, end)  # the source is more important
        return prompt(first + 1 + bisect_left(starts, True, key=lambda n: len(prompt(n)) <= room))

    def finish(self, decoded: InFlightUpdate) -> UpdateRecord:
        """Display a decoded update; a final one ends the segment."""
        output = decoded.output(self.target.end_ids)
        tokens = without_thoughts(output, self.target.tokenizer)
        degenerate = not tokens or not decoded.ended
        if degenerate and self._kept:  # the last good output stays, and is drafted from
            tokens = self._kept
        if degenerate and not decoded.final:
            shown = self._shown._replace(erased=0)
        else:
            shown = self._shown = self._display.show(tokens, final=decoded.final)
        update = UpdateRecord(
            seg=self.seg,
            rev=self.rev,
            tokens=len(output),
            output=output,
            degenerate=degenerate,
            **{name: getattr(decoded, name) for name in _KEPT},
            **decoded.counts(),
            **shown._asdict(),
        )
        self.source, self.last, self.rev = decoded.source, update, self.rev + 1
        if not degenerate:
            self._kept, self._draft = tokens, self._drafted(output)
        self._length = decoded.words + len(self._kept)
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
            self._lengths.append(self._length)
            del self.history[:-KEPT_SEGMENTS], self._lengths[:-KEPT_SEGMENTS]
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
