"""Trajectories from vLLM: the teacher's laws from an engine that is made for throughput.

    greedy, sample    generate, with the laws that come along
    beam              vLLM's own beam search, then as gold (it keeps only 2 * width ids of a law)
    gold              the reference as part of a prompt whose laws are asked for

What differs from our own loops: draws (the noise is vLLM's, though keyed alike); tokens where two
are nearly as probable; beams, as vLLM counts an end of any rank, not only of the first `width`, and
searches on to the length limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from draftsmith.core.rows import until_end
from draftsmith.core.types import Signals
from draftsmith.distill.trajectories.beams import worthwhile
from draftsmith.distill.trajectories.collect import check_request, check_settings, draws
from draftsmith.distill.trajectories.teacher import Laws, Text
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Forcing,
    Trajectory,
)
from draftsmith.distill.trajectories.vllm_engine import Dtype, Engine, Order
from draftsmith.errors import InputError
from draftsmith.targets.base import Target

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower ones without a word, and refuses higher ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """A continuation and its laws."""

    place: int
    """Index of its request."""
    tokens: tuple[int, ...]
    laws: Laws
    index: int = 0
    temperature: float | None = None


class VllmBackend:
    """Collects with a vLLM engine, which lives as long as this object.

    Args:
        model: folder or hub id.
        dtype: of weights and arithmetic; auto: as the weights are stored.
        max_length: of the context; None: the model's. Shorter needs less memory.
        devices: accelerators that share one copy of the model (tensor parallel).
        memory_share: part of an accelerator's memory that vLLM takes; None: its default.
        eager: do not compile: starts sooner, runs slower.

    Raises:
        BackendError: vLLM is absent or broken, or cannot load the model.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: Dtype = "auto",
        max_length: int | None = None,
        devices: int = 1,
        memory_share: float | None = None,
        eager: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.engine = Engine(
            model,
            dtype=dtype,
            max_length=max_length,
            devices=devices,
            memory_share=memory_share,
            eager=eager,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        """All trajectories of these prompts, prompt by prompt, in order of `index`.

        Raises:
            InputError: settings or prompts that are wrong, or that vLLM has no means for.
            BackendError: the engine failed; it is of no use any more.
        """
        self._check(requests, settings)
        work = {
            "greedy": self._generated,
            "sample": self._generated,
            "beam": self._searched,
            "gold": self._given,
        }[settings.forcing]
        found: list[list[Trajectory]] = [[] for _ in requests]
        for made in work(requests, settings):
            request = requests[made.place]
            trajectory = Trajectory(
                prompt_id=request.prompt_id,
                forcing=settings.forcing,
                index=made.index,
                temperature=made.temperature,
                prompt=request.prompt,
                tokens=made.tokens,
                score=made.laws.score,
                top=made.laws.top,
                language=request.language,
                tag=request.tag,
            )
            found[made.place].append(trajectory)
        return [trajectory for some in found for trajectory in some]

    def _check(self, requests: Sequence[CollectRequest], settings: CollectSettings) -> None:
        """Before anything is computed: an engine may die of a bad request."""
        teacher = cast(Target, self.engine)  # checks read its name, vocabulary and context only
        check_settings(settings, teacher)
        for request in requests:
            check_request(request, settings, teacher)
        if settings.signals != Signals():
            raise InputError(
                "The vLLM backend gives no hidden states: leave `signals` empty, or use the "
                "transformers backend."
            )
        _CHECKS[settings.forcing](requests, settings, self.engine)

    def _generated(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> Iterator[_Made]:
        jobs = [
            (place, draw)
            for place, request in enumerate(requests)
            for draw in draws(request, settings)
        ]
        orders = [
            Order(
                prompt=requests[place].prompt,
                temperature=draw.temperature or 0.0,
                top_p=settings.top_p if draw.temperature else 1.0,
                seed=_seed(settings.seed, draw.request_id(requests[place].prompt_id)),
            )
            for place, draw in jobs
        ]
        continuations = self.engine.continuations(
            orders, max_new_tokens=settings.max_new_tokens, top_k=self._top_k(settings)
        )
        for (place, draw), one in zip(jobs, continuations, strict=True):
            yield _Made(
                place=place,
                index=draw.index,
                temperature=draw.temperature,
                tokens=one.tokens,
                laws=one.laws,
            )

    def _given(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> Iterator[_Made]:
        jobs = [
            (place, draw.index)
            for place, request in enumerate(requests)
            for draw in draws(request, settings)
        ]
        texts = []
        for place, index in jobs:
            request = requests[place]
            tokens = until_end(list(request.references[index]), self.engine.end_ids)
            tokens = tokens[: self._room(request, settings)]
            texts.append(Text(prompt=request.prompt, tokens=tuple(tokens)))
        opinions = self.engine.judge(texts, top_k=self._top_k(settings))
        for (place, index), text, laws in zip(jobs, texts, opinions, strict=True):
            yield _Made(place=place, index=index, tokens=text.tokens, laws=laws)

    def _searched(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> Iterator[_Made]:
        beams = self.engine.search(
            [request.prompt for request in requests],
            width=settings.most_beams,
            limits=[self._room(request, settings) for request in requests],
        )
        texts = [
            Text(prompt=request.prompt, tokens=tokens)
            for request, some in zip(requests, beams, strict=True)
            for tokens in some
        ]
        opinions = self.engine.judge(texts, top_k=self._top_k(settings))
        for place, some in enumerate(beams):
            judged = [(next(opinions), tokens) for tokens in some]
            judged.sort(key=lambda pair: -pair[0].score)
            count = len(judged)
            if settings.beams == "auto":
                count = worthwhile([laws.score for laws, _ in judged], settings.mass_gain)
            for index, (laws, tokens) in enumerate(judged[:count]):
                yield _Made(place=place, index=index, tokens=tokens, laws=laws)

    def _top_k(self, settings: CollectSettings) -> int:
        return self.engine.vocab_size if settings.top_k is None else settings.top_k

    def _room(self, request: CollectRequest, settings: CollectSettings) -> int:
        """Most tokens that can be judged behind a prompt: vLLM wants a place for one more."""
        return min(settings.max_new_tokens, self.engine.max_length - len(request.prompt) - 1)


def _seed(seed: int, request_id: int) -> int:
    """Return the seed of one draw, which does not depend on what else is drawn."""
    digest = hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# --------------------------------------------------------------------------- what vLLM cannot do

_Check = Callable[[Sequence[CollectRequest], CollectSettings, Engine], None]


def _check_draws(
    requests: Sequence[CollectRequest], settings: CollectSettings, engine: Engine
) -> None:
    low, high = LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE
    for temperature in settings.temperatures:
        if temperature != 0 and not low <= temperature <= high:
            raise InputError(
                f"vLLM draws at temperature 0 or from {low} to {high}, not at {temperature}: "
                "choose another, or the transformers backend."
            )


def _check_search(
    requests: Sequence[CollectRequest], settings: CollectSettings, engine: Engine
) -> None:
    if settings.length_penalty != 0:
        raise InputError(
            "vLLM's length penalty counts the prompt's tokens too, so its best beams would be "
            "others: use length_penalty 0, or the transformers backend."
        )
    if 2 * settings.most_beams > engine.vocab_size:
        raise InputError(
            f"vLLM searches with at most {engine.vocab_size // 2} beams over "
            f"{engine.vocab_size} tokens, got {settings.most_beams}."
        )
    _check_room(requests, settings, engine)


def _check_room(
    requests: Sequence[CollectRequest], settings: CollectSettings, engine: Engine
) -> None:
    for request in requests:
        if len(request.prompt) + 1 >= engine.max_length:
            raise InputError(
                f"Prompt {request.prompt_id!r} has {len(request.prompt)} tokens, but vLLM wants "
                f"room for two more in the context of {engine.name}, {engine.max_length}: shorten "
                "it."
            )


def _check_nothing(
    requests: Sequence[CollectRequest], settings: CollectSettings, engine: Engine
) -> None:
    pass


_CHECKS: dict[Forcing, _Check] = {
    "greedy": _check_nothing,
    "sample": _check_draws,
    "beam": _check_search,
    "gold": _check_room,
}
