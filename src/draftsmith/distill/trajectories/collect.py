"""Trajectories from our own decoding: any `Target`, and exactly what the other parts decode.

    greedy, sample    the decoding loop, with the laws noted as it goes
    beam              beam search, with the laws noted as it goes
    gold              given references, one forward over each

Hidden signals need a forward over the whole text (no loop feeds the last token): then the laws are
read from that forward as well.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise
from draftsmith.core.rows import until_end
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DecodeStep, DraftTree, RequestBatch, Signals, TreeShape
from draftsmith.distill.config import check_continuation
from draftsmith.distill.trajectories.beams import auto_search, beam_search, first_width
from draftsmith.distill.trajectories.teacher import (
    Laws,
    TeacherCost,
    Text,
    read_laws,
    score_texts,
)
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.drafters.base import Accepted, Drafter, DraftState
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import InputError
from draftsmith.targets.base import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One piece of work on a prompt: a continuation, or (for beams) all of them."""

    index: int = 0
    """The trajectory's."""
    temperature: float | None = None
    """Sampling temperature; None for what is not sampled."""
    sample: int = 0
    """Which sample of its prompt and temperature."""

    def request_id(self, prompt_id: str) -> int:
        """Names the random stream. It depends on the prompt's id and not on what else is collected,
        or in which order: a run in parts gives what a run in one piece gives."""
        key = f"{self.temperature!r} {self.sample} {prompt_id}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def draws(request: CollectRequest, settings: CollectSettings) -> tuple[Draw, ...]:
    """The pieces of work that a prompt gives, in order of `index`.

    Samples go temperature by temperature. At temperature 0 all are the same text: it is drawn once.
    """
    if settings.forcing == "gold":
        return tuple(Draw(index=index) for index in range(len(request.references)))
    if settings.forcing != "sample":
        return (Draw(),)
    pairs = [
        (temperature, sample)
        for temperature in settings.temperatures
        for sample in range(settings.samples if temperature > 0 else 1)
    ]
    return tuple(
        Draw(index=index, temperature=temperature, sample=sample)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    request: CollectRequest
    place: int
    """Index of the request among those asked for."""
    draw: Draw


_Made = list[tuple[_Job, Trajectory]]
"""Continuations; their `top` is None while nobody has read its logprobs."""


class TransformersBackend:
    """Collects with draftsmith's own loops. A trajectory does not depend on its batch.

    Args:
        target: the teacher.
        batch_size: sequences that are continued at a time, beams counted one by one.
        drafter: bound to the target; it makes collecting faster and changes nothing.
        on_done: called after every batch with the numbers of prompts and tokens done in this call.

    `cost` adds up what was asked of the teacher, over all calls.
    """

    def __init__(
        self,
        target: Target,
        *,
        batch_size: int = 16,
        drafter: Drafter | None = None,
        on_done: Callable[[int, int], None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}.")
        self.target, self.batch_size = target, batch_size
        self.drafter = NoDrafter() if drafter is None else drafter
        self.on_done = on_done
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
        make: Callable[[list[_Job], CollectSettings], _Made] = {
            "greedy": self._generated,
            "sample": self._generated,
            "beam": self._searched,
            "gold": self._given,
        }[settings.forcing]
        jobs = [
            _Job(request=request, place=place, draw=draw)
            for place, request in enumerate(requests)
            for draw in draws(request, settings)
        ]
        left = [0] * len(requests)
        for job in jobs:
            left[job.place] += 1
        found: list[list[Trajectory]] = [[] for _ in requests]
        prompts_done = tokens_done = 0
        for batch in _batches(jobs, self._jobs_at_once(settings)):
            for job, trajectory in self._judged(make(batch, settings), settings):
                found[job.place].append(trajectory)
                tokens_done += len(trajectory.tokens)
            for job in batch:
                left[job.place] -= 1
                prompts_done += left[job.place] == 0
            if self.on_done is not None:
                self.on_done(prompts_done, tokens_done)
        return [one for some in found for one in sorted(some, key=lambda one: one.index)]

    def _jobs_at_once(self, settings: CollectSettings) -> int:
        width = 1
        if settings.forcing == "beam":
            auto = settings.beams == "auto"
            width = first_width(settings.max_beams) if auto else settings.most_beams
        return max(1, self.batch_size // width)

    def _judged(self, made: _Made, settings: CollectSettings) -> Iterator[tuple[_Job, Trajectory]]:
        """The same with logprobs and signals, which are read where they lack."""
        for start in range(0, len(made), self.batch_size):
            some = made[start : start + self.batch_size]
            texts = [
                Text(prompt=one.prompt, tokens=one.tokens) for _, one in some if one.top is None
            ]
            how: dict[str, Any] = {"top_k": settings.top_k, "signals": settings.signals}
            scored = iter(score_texts(self.target, texts, cost=self.cost, **how) if texts else ())
            for job, one in some:
                if one.top is None:
                    found = next(scored)
                    laws = found.laws
                    one = replace(one, top=laws.top, score=laws.score, features=found.features_TS)
                yield job, one

    # ------------------------------------------------------------ ways to make texts

    def _generated(self, batch: list[_Job], settings: CollectSettings) -> _Made:
        noting = settings.signals == Signals()
        notes = LogprobRecorder(self.drafter, settings.top_k, len(batch))
        prompts = [job.request.prompt for job in batch]
        tokens: list[list[int]] = [[] for _ in batch]
        steps = decode(
            self.target,
            notes if noting else self.drafter,
            prompts,
            DecodeOptions(
                # jobs of one batch have one temperature
                sampler=_sampler(batch[0].draw.temperature, settings),
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
            ),
            request_ids=[job.draw.request_id(job.request.prompt_id) for job in batch],
        )
        for number, step in enumerate(steps):
            self.cost.add(_fed(step, prompts if number == 0 else None))
            for row, new in zip(tokens, step.emitted, strict=True):
                row.extend(new)
        made = []
        for job, emitted, laws in zip(batch, tokens, notes.laws, strict=True):
            read = Laws.cat(laws) if noting else None
            one = job.request.continued(
                settings.forcing,
                tuple(emitted),
                score=0.0 if read is None else read.score,
                top=None if read is None else read.top,
                index=job.draw.index,
                temperature=job.draw.temperature,
            )
            made.append((job, one))
        return made

    def _searched(self, batch: list[_Job], settings: CollectSettings) -> _Made:
        prompts = [job.request.prompt for job in batch]
        # whole laws of all beams, those that die too, would fill the memory: they are read after
        noted = (settings.top_k or 0) if settings.signals == Signals() else 0
        if settings.beams == "auto":
            found = auto_search(
                self.target,
                prompts,
                max_width=settings.max_beams,
                mass_gain=settings.mass_gain,
                most_beams=self.batch_size,
                max_new_tokens=settings.max_new_tokens,
                length_penalty=settings.length_penalty,
                top_k=noted,
                cost=self.cost,
            )
        else:
            found = beam_search(
                self.target,
                prompts,
                width=settings.beams,
                max_new_tokens=settings.max_new_tokens,
                length_penalty=settings.length_penalty,
                top_k=noted,
                cost=self.cost,
            )
        return [
            (
                job,
                job.request.continued(
                    settings.forcing, one.tokens, score=one.score, top=one.top, index=index
                ),
            )
            for job, hypotheses in zip(batch, found, strict=True)
            for index, one in enumerate(hypotheses)
        ]

    def _given(self, batch: list[_Job], settings: CollectSettings) -> _Made:
        made = []
        for job in batch:
            prompt = job.request.prompt
            tokens = until_end(list(job.request.references[job.draw.index]), self.target.end_ids)
            room = settings.max_new_tokens
            if self.target.max_length is not None:
                room = min(room, self.target.max_length - len(prompt))
            one = job.request.continued(
                settings.forcing, tuple(tokens[:room]), score=0.0, top=None, index=job.draw.index
            )
            made.append((job, one))
        return made


def _batches(jobs: list[_Job], size: int) -> Iterator[list[_Job]]:
    """Jobs of one temperature and of like lengths, the longest first: what does not fit into the
    memory shows at once."""

    def heat(job: _Job) -> float:
        return -1.0 if job.draw.temperature is None else job.draw.temperature

    order = sorted(jobs, key=lambda job: (heat(job), -len(job.request.prompt)))
    for _, same in itertools.groupby(order, key=heat):
        some = list(same)
        for start in range(0, len(some), size):
            yield some[start : start + size]


def _sampler(temperature: float | None, settings: CollectSettings) -> Sampler:
    if temperature is None:
        return Sampler()
    return Sampler(temperature=temperature, top_p=settings.top_p)


def _fed(step: DecodeStep, prompts: Sequence[Sequence[int]] | None) -> int:
    """Tokens of one forward: the prompts at first, else a root per row; and the drafts."""
    known = sum(step.active) if prompts is None else sum(map(len, prompts))
    return known + sum(step.proposed)


@dataclass(frozen=True, slots=True)
class _Noted(DraftState):
    inner: DraftState
    rows: tuple[int, ...]
    """Row of the request batch."""

    def take(self, rows: Sequence[int]) -> _Noted:
        return _Noted(self.inner.take(rows), tuple(self.rows[row] for row in rows))

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _Noted:
        return _Noted(self.inner.rewind(tokens), self.rows)


class LogprobRecorder(Drafter):
    """A drafter as it is, that notes which law every emitted token was taken from.

    tree        root -+- n0 --- n2       accepted n0 n2, then the teacher's own token y2
                      `- n1
    logits row  0        1  2   3        y0 = n0 from row 0, y1 = n2 from row 1, y2 from row 3
    """

    def __init__(self, inner: Drafter, top_k: int | None, num_rows: int) -> None:
        super().__init__()
        self.inner, self.top_k = inner, top_k
        self.laws: list[list[Laws]] = [[] for _ in range(num_rows)]
        # an instance's own: what this drafter reads is what the inner one reads
        self.signals = inner.signals
        self.default_shape = inner.default_shape

    def max_nodes(self, shape: TreeShape) -> int:
        return self.inner.max_nodes(shape)

    def start(self, request: RequestBatch) -> _Noted:
        return _Noted(self.inner.start(request), tuple(range(len(request.tokens))))

    def propose(
        self, state: DraftState, shape: TreeShape, sampler: Sampler, noise: Noise
    ) -> DraftTree:
        return self.inner.propose(_noted(state).inner, shape, sampler, noise)

    def advance(self, state: DraftState, accepted: Accepted) -> _Noted:
        noted, at = _noted(state), []
        for b, tokens in enumerate(accepted.emitted):
            path = accepted.verdict.path_BD[b, : max(len(tokens) - 1, 0)].tolist()
            at += [(b, node) for node in [0, *(1 + n for n in path)][: len(tokens)]]
        emitted = [token for tokens in accepted.emitted for token in tokens]
        rows, nodes = zip(*at, strict=True)
        laws = read_laws(accepted.out.logits_BNV[list(rows), list(nodes)], emitted, self.top_k)
        first = 0
        for b, tokens in enumerate(accepted.emitted):
            if tokens:
                self.laws[noted.rows[b]].append(laws.part(first, first + len(tokens)))
            first += len(tokens)
        return _Noted(self.inner.advance(noted.inner, accepted), noted.rows)


def _noted(state: DraftState) -> _Noted:
    assert isinstance(state, _Noted), "a state that this drafter started"
    return state
