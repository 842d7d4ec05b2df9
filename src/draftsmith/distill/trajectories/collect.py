"""Trajectories from our own decoding: any `Target`, and exactly what the other parts decode.

    greedy, sample    the decoding loop, with laws and hidden signals noted as it goes
    beam              beam search, with the laws noted as it goes
    gold              given references, one forward over each

Of beams and references, hidden signals need a forward over the whole text: then the laws are read
from that forward as well.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.cache import lay_out
from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.rows import until_end
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import RequestBatch, Signals, TargetOutput
from draftsmith.distill.config import check_continuation
from draftsmith.distill.trajectories.beams import auto_search, beam_search, first_width
from draftsmith.distill.trajectories.teacher import (
    TeacherCost,
    captured_signals,
    read_logprobs,
    score_texts,
)
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Forcing,
    TopK,
    Trajectory,
)
from draftsmith.drafters.base import Accepted, DraftState, TextState
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import InputError
from draftsmith.targets.base import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One piece of work on a prompt: a continuation, or (for beams) all of them."""

    request: CollectRequest
    index: int = 0
    """The trajectory's."""
    temperature: float | None = None
    """Sampling temperature; None for what is not sampled."""
    sample: int = 0
    """Which sample of its prompt and temperature."""

    @property
    def request_id(self) -> int:
        """Names the random stream. It depends on the prompt's id and not on what else is collected,
        or in which order: a run in parts gives what a run in one piece gives."""
        key = f"{self.temperature!r} {self.sample} {self.request.prompt_id}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1

    def trajectory(
        self, forcing: Forcing, tokens: Sequence[int], score: float = 0.0, top: TopK | None = None
    ) -> Trajectory:
        """The prompt, continued by these tokens."""
        return Trajectory(
            prompt_id=self.request.prompt_id,
            forcing=forcing,
            index=self.index,
            temperature=self.temperature,
            prompt=self.request.prompt,
            tokens=tuple(tokens),
            score=score,
            top=top,
            language=self.request.language,
            tag=self.request.tag,
        )

    def reference(
        self, end_ids: frozenset[int], max_new_tokens: int, context: int | None
    ) -> Trajectory:
        """The prompt, continued by its reference up to an end token or as far as there is room."""
        room = max_new_tokens
        if context is not None:
            room = min(room, context - len(self.request.prompt))
        tokens = until_end(list(self.request.references[self.index]), end_ids)
        return self.trajectory("gold", tokens[:room])


def draws(request: CollectRequest, settings: CollectSettings) -> tuple[Draw, ...]:
    """The pieces of work that a prompt gives, in order of `index`.

    Samples go temperature by temperature. At temperature 0 all are the same text: it is drawn once.
    """
    if settings.forcing == "gold":
        return tuple(Draw(request=request, index=i) for i in range(len(request.references)))
    if settings.forcing != "sample":
        return (Draw(request=request),)
    pairs = [
        (temperature, sample)
        for temperature in settings.temperatures
        for sample in range(settings.samples if temperature > 0 else 1)
    ]
    return tuple(
        Draw(request=request, index=index, temperature=temperature, sample=sample)
        for index, (temperature, sample) in enumerate(pairs)
    )


# --------------------------------------------------------------------------- checks


def check_settings(settings: CollectSettings, target: Target) -> None:
    """Refuse what cannot be collected from this target.

    Raises:
        InputError: naming the setting.
    """
    check_continuation(settings)
    if settings.top_k is not None and not 1 <= settings.top_k <= target.vocab_size:
        raise InputError(
            f"--top-k must be between 1 and the {target.vocab_size} tokens of {target.name}, or 0 "
            f"for whole laws, got {settings.top_k}"
        )
    if not settings.temperatures:
        raise InputError("--temperatures must name at least one temperature")
    for temperature in settings.temperatures:
        Sampler(temperature=temperature)


def why_not(prompt: Sequence[int], *, context: int | None, vocab_size: int) -> str | None:
    """Why a model with this context and vocabulary cannot continue it; None: it can."""
    if not prompt:
        return "empty prompt"
    if context is not None and len(prompt) >= context:
        return f"longer than the context of {context} tokens"
    if not in_vocabulary(prompt, vocab_size):
        return f"token outside the vocabulary of {vocab_size}"
    return None


def in_vocabulary(tokens: Sequence[int], vocab_size: int) -> bool:
    """Whether a vocabulary has them all: a tokenizer may hold more than its model was made for."""
    return all(0 <= token < vocab_size for token in tokens)


def reason_to_skip(
    request: CollectRequest, *, settings: CollectSettings, limit: int | None, vocab_size: int
) -> str | None:
    """Why nothing can be collected for a prompt of a file; None: something can."""
    bad = why_not(request.prompt, context=limit, vocab_size=vocab_size)
    if bad is not None or settings.forcing != "gold":
        return bad
    if not request.references:
        return "no reference"
    if not all(request.references):
        return "empty reference"
    if not all(in_vocabulary(tokens, vocab_size) for tokens in request.references):
        return f"token of a reference outside the vocabulary of {vocab_size}"
    return None


def check_request(request: CollectRequest, settings: CollectSettings, target: Target) -> None:
    """Refuse a prompt that nothing can be collected for.

    Raises:
        InputError: naming the prompt.
    """
    reason = reason_to_skip(
        request, settings=settings, limit=target.max_length, vocab_size=target.vocab_size
    )
    if reason is not None:
        raise InputError(
            f"Prompt {request.prompt_id!r} of {len(request.prompt)} tokens cannot be used with "
            f"{target.name}: {reason}."
        )


# --------------------------------------------------------------------------- the backend


class TransformersBackend:
    """Collects with draftsmith's own loops. A trajectory does not depend on its batch.

    Args:
        target: the teacher.
        batch_size: sequences that are continued at a time, beams counted one by one.
        on_done: called after every batch with the numbers of prompts and tokens done in this call.

    `cost` adds up what was asked of the teacher, over all calls.
    """

    def __init__(
        self,
        target: Target,
        *,
        batch_size: int = 16,
        on_done: Callable[[int, int], None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}.")
        self.target, self.batch_size, self.on_done = target, batch_size, on_done
        self.cost = TeacherCost()

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        """All trajectories of these prompts, prompt by prompt, in order of `index`.

        Raises:
            InputError: see `check_settings` and `check_request`.
        """
        check_settings(settings, self.target)
        for request in requests:  # behind this, batches are sorted: rows would name no prompt
            check_request(request, settings, self.target)
        make = {"beam": self._searched, "gold": self._given}.get(settings.forcing, self._generated)
        jobs = [
            (place, draw)
            for place, request in enumerate(requests)
            for draw in draws(request, settings)
        ]
        left = Counter(place for place, _ in jobs)
        found: list[list[Trajectory]] = [[] for _ in jobs]
        for numbers in _batches([draw for _, draw in jobs], self._jobs_at_once(settings)):
            made = make([jobs[number][1] for number in numbers], settings)
            scored = self._scored([one for some in made for one in some], settings)
            for number, some in zip(numbers, made, strict=True):
                found[number] = list(itertools.islice(scored, len(some)))
                left[jobs[number][0]] -= 1
            if self.on_done is not None:
                tokens = sum(len(one.tokens) for some in found for one in some)
                self.on_done(sum(count == 0 for count in left.values()), tokens)
        return [one for some in found for one in some]

    def _jobs_at_once(self, settings: CollectSettings) -> int:
        width = 1
        if settings.forcing == "beam":
            auto = settings.beams == "auto"
            width = first_width(settings.max_beams) if auto else settings.most_beams
        return max(1, self.batch_size // width)

    def _scored(
        self, texts: Sequence[Trajectory], settings: CollectSettings
    ) -> Iterator[Trajectory]:
        """The same with logprobs and signals, which are read where they lack."""
        for start in range(0, len(texts), self.batch_size):
            some = texts[start : start + self.batch_size]
            bare = [one for one in some if one.top is None]
            how: dict[str, Any] = {"top_k": settings.top_k, "signals": settings.signals}
            read = iter(score_texts(self.target, bare, cost=self.cost, **how) if bare else ())
            yield from (next(read) if one.top is None else one for one in some)

    # ------------------------------------------------------------ ways to make texts

    def _generated(
        self, batch: Sequence[Draw], settings: CollectSettings
    ) -> list[list[Trajectory]]:
        recorder = StepRecorder(settings.top_k, settings.signals, len(batch), self.target.name)
        session = Session()  # rows that are done stay in its cache
        prompts = [draw.request.prompt for draw in batch]
        temperature = batch[0].temperature  # draws of one batch have one
        sampler = Sampler()
        if temperature is not None:
            sampler = Sampler(temperature=temperature, top_p=settings.top_p)
        tokens: list[list[int]] = [[] for _ in batch]
        steps = decode(
            self.target,
            recorder,
            prompts,
            DecodeOptions(
                sampler=sampler, max_new_tokens=settings.max_new_tokens, seed=settings.seed
            ),
            request_ids=[draw.request_id for draw in batch],
            session=session if settings.signals != Signals() else None,
        )
        for number, step in enumerate(steps):
            self.cost.add(sum(step.active) if number else sum(map(len, prompts)))
            for row, new in zip(tokens, step.emitted, strict=True):
                row.extend(new)
        if session.cache is not None:  # the last tokens were not fed
            last_BT, block = lay_out(session.cache, [row[-1:] for row in tokens])
            out = self.target.forward(torch.from_numpy(last_BT), block, 1, settings.signals)
            self.cost.add(len(batch))
            recorder.note_signals(range(len(batch)), [1] * len(batch), out)
        made = [
            draw.trajectory(settings.forcing, row) for draw, row in zip(batch, tokens, strict=True)
        ]
        return [[recorder.added_to(one, row)] for row, one in enumerate(made)]

    def _searched(self, batch: Sequence[Draw], settings: CollectSettings) -> list[list[Trajectory]]:
        prompts = [draw.request.prompt for draw in batch]
        how: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "length_penalty": settings.length_penalty,
            # whole laws of all beams, those that die too, would fill the memory: read afterwards
            "top_k": (settings.top_k or 0) if settings.signals == Signals() else 0,
            "cost": self.cost,
        }
        if settings.beams == "auto":
            how |= {"max_width": settings.max_beams, "mass_gain": settings.mass_gain}
            found = auto_search(self.target, prompts, most_beams=self.batch_size, **how)
        else:
            found = beam_search(self.target, prompts, width=settings.beams, **how)
        return [
            [
                replace(draw, index=index).trajectory("beam", one.tokens, one.score, one.top)
                for index, one in enumerate(hypotheses)
            ]
            for draw, hypotheses in zip(batch, found, strict=True)
        ]

    def _given(self, batch: Sequence[Draw], settings: CollectSettings) -> list[list[Trajectory]]:
        target, most = self.target, settings.max_new_tokens
        return [[draw.reference(target.end_ids, most, target.max_length)] for draw in batch]


def _batches(jobs: Sequence[Draw], size: int) -> Iterator[list[int]]:
    """Places of draws of one temperature and of like lengths, the longest first: what does not fit
    into the memory shows at once."""

    def heat(place: int) -> float:
        temperature = jobs[place].temperature
        return -1.0 if temperature is None else temperature

    def order(place: int) -> tuple[float, int]:
        return heat(place), -len(jobs[place].request.prompt)

    for _, same in itertools.groupby(sorted(range(len(jobs)), key=order), key=heat):
        some = list(same)
        for start in range(0, len(some), size):
            yield some[start : start + size]


@dataclass
class _Rows(TextState):
    rows: list[int]
    """Rows of the request batch."""

    def take(self, rows: Sequence[int]) -> Self:
        self.rows = [self.rows[row] for row in rows]
        return super().take(rows)


class StepRecorder(NoDrafter):
    """Drafts nothing, and keeps the logprobs that every token was taken from, and signals.

    Args:
        top_k: how many tokens of a law are kept; None: all.
        num_rows: of the request batch.
        name: the target's.
    """

    def __init__(self, top_k: int | None, signals: Signals, num_rows: int, name: str) -> None:
        super().__init__()
        self.top_k, self.signals, self.name = top_k, signals, name
        self.kept: list[list[tuple[TopK, float]]] = [[] for _ in range(num_rows)]
        self.states: list[list[Tensor]] = [[] for _ in range(num_rows)]
        """Signals of what each row was fed, step by step."""

    def start(self, request: RequestBatch) -> _Rows:
        return _Rows(**vars(super().start(request)), rows=list(range(len(request.tokens))))

    def advance(self, state: DraftState, accepted: Accepted) -> TextState:
        assert isinstance(state, _Rows)
        some = [b for b, tokens in enumerate(accepted.emitted) if tokens]
        emitted = [accepted.emitted[b][0] for b in some]
        top, log_p_R = read_logprobs(accepted.out.logits_BNV[some, 0], emitted, self.top_k)
        for row, b in enumerate(some):
            self.kept[state.rows[b]].append((top.part(row, row + 1), float(log_p_R[row])))
        if self.signals != Signals():
            self.note_signals(state.rows, list(map(len, accepted.pending)), accepted.out)
        return state

    def note_signals(self, rows: Sequence[int], counts: Sequence[int], out: TargetOutput) -> None:
        """Keep what the last tokens of each row gave, `counts` of them."""
        # one copy of all rows: a device would be waited for at each
        signals_BTS = captured_signals(out, self.name)[:, -max(1, *counts) :].float().cpu()
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                self.states[row].append(signals_BTS[b, -count:].clone())

    def added_to(self, text: Trajectory, row: int) -> Trajectory:
        """The text of a row with its logprobs, score and signals."""
        tops, log_p = zip(*self.kept[row], strict=True)
        features = torch.cat(self.states[row]).numpy() if self.states[row] else None
        score = float(np.sum(log_p))
        return replace(text, top=TopK.cat(tops), score=score, features=features)
