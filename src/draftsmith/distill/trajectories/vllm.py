"""Trajectories from vLLM: the teacher's logprobs from an engine that is made for throughput.

    greedy, sample    generate, with the logprobs that come along
    beam              vLLM's own beam search, then as gold (it keeps only 2 * width ids of a place)
    gold              the reference as part of a prompt whose logprobs are asked for

What differs from our own loops: draws (the noise is vLLM's, though keyed alike); tokens where two
are nearly as probable; beams, as vLLM counts an end of any rank, not only of the first `width`, and
searches on to the length limit.

Written for vLLM 0.32. Its logprobs are those at temperature 1 before any processor
(`raw_logprobs`). It lists the token that stands at a place first, then the K best, downwards:

    ids       y0 a0 b0 c0 | y1 a1 b1 c1        K = 3; y is one of a, b, c, or none of them
    column     0  1  2  3    0  1  2  3        column 0: what y has; the others: the law
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import numpy as np

from draftsmith.core.rows import until_end
from draftsmith.core.types import Signals
from draftsmith.distill.trajectories.beams import worthwhile
from draftsmith.distill.trajectories.collect import Draw, check_request, check_settings, draws
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    TopK,
    Trajectory,
)
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.base import Target

X = TypeVar("X")

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower ones without a word, and refuses higher ones."""
CELLS_AT_ONCE = 1 << 22
"""Numbers of laws that vLLM may hold for us at a time: as Python objects, some 150 bytes each."""
_VARIABLES = {
    # stdout belongs to --json, and nothing about the user is to be sent anywhere
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmBackend:
    """Collects with a vLLM engine, which lives as long as this object.

    Args:
        model: folder or hub id.
        dtype: of weights and arithmetic; auto: as the weights are stored.
        engine: other arguments of `vllm.LLM`: `max_model_len`, `tensor_parallel_size`,
            `gpu_memory_utilization`, `enforce_eager`, ...

    Raises:
        BackendError: vLLM is absent or broken, or cannot load the model.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self._vllm = _import_vllm()
        self.name = model
        try:
            if dtype == "auto":
                dtype = _stored_dtype(model, revision, trust_remote_code)
            self._llm = self._vllm.LLM(
                model,
                dtype=dtype,
                revision=revision,
                trust_remote_code=trust_remote_code,
                max_logprobs=-1,  # as many as there are tokens
                logprobs_mode="raw_logprobs",
                **(engine or {}),
            )
            self.vocab_size: int = self._llm.model_config.get_vocab_size()
            self.max_length: int = self._llm.model_config.max_model_len
            self.end_ids = _end_ids(self._llm)
        except Exception as error:  # whatever an engine and its processes raise
            raise BackendError(f"vLLM cannot load {model!r}: {_sentence(error)}") from error

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        """All trajectories of these prompts, prompt by prompt, in order of `index`.

        Raises:
            InputError: settings or prompts that are wrong, or that vLLM has no means for.
            BackendError: the engine failed; it is of no use any more.
        """
        self._check(requests, settings)
        work = {"beam": self._searched, "gold": self._given}.get(settings.forcing, self._generated)
        jobs = [draw for request in requests for draw in draws(request, settings)]
        top_k = self.vocab_size if settings.top_k is None else settings.top_k
        return list(work(jobs, settings, top_k))

    def _check(self, requests: Sequence[CollectRequest], settings: CollectSettings) -> None:
        """Before anything is computed: an engine may die of a bad request."""
        teacher = cast(Target, self)  # checks read its name, vocabulary and context only
        check_settings(settings, teacher)
        for request in requests:
            check_request(request, settings, teacher)
        if settings.signals != Signals():
            raise InputError(
                "The vLLM backend gives no hidden states: leave `signals` empty, or use the "
                "transformers backend."
            )
        if settings.forcing == "sample":
            low, high = LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE
            for temperature in settings.temperatures:
                if temperature != 0 and not low <= temperature <= high:
                    raise InputError(
                        f"vLLM draws at temperature 0 or from {low} to {high}, not at "
                        f"{temperature}: choose another, or the transformers backend."
                    )
        if settings.forcing == "beam" and settings.length_penalty != 0:
            raise InputError(
                "vLLM's length penalty counts the prompt's tokens too, so its best beams would be "
                "others: use length_penalty 0, or the transformers backend."
            )
        if settings.forcing == "beam" and 2 * settings.most_beams > self.vocab_size:
            raise InputError(
                f"vLLM searches with at most {self.vocab_size // 2} beams over "
                f"{self.vocab_size} tokens, got {settings.most_beams}."
            )
        for request in requests if settings.forcing in ("beam", "gold") else ():
            if len(request.prompt) + 1 >= self.max_length:
                raise InputError(
                    f"Prompt {request.prompt_id!r} has {len(request.prompt)} tokens, but vLLM "
                    f"wants room for two more in the context of {self.name}, {self.max_length}: "
                    "shorten it."
                )

    # ------------------------------------------------------------ ways to make texts

    def _generated(
        self, jobs: Sequence[Draw], settings: CollectSettings, top_k: int
    ) -> Iterator[Trajectory]:
        cells = settings.max_new_tokens * (top_k + 1)
        for some in _portions(jobs, lambda draw: cells):
            params = [
                self._vllm.SamplingParams(
                    temperature=draw.temperature or 0.0,
                    top_p=settings.top_p if draw.temperature else 1.0,
                    seed=_seed(settings.seed, draw.request_id),
                    max_tokens=settings.max_new_tokens,
                    logprobs=top_k,
                    stop_token_ids=sorted(self.end_ids),
                    ignore_eos=True,  # what ends a text is said in the line above, once
                    flat_logprobs=True,
                    detokenize=False,
                )
                for draw in some
            ]
            outputs = self._run(self._llm.generate, [draw.request.prompt for draw in some], params)
            for draw, output in zip(some, outputs, strict=True):
                text = draw.trajectory(settings.forcing, output.outputs[0].token_ids)
                yield self._scored(text, output.outputs[0].logprobs, top_k)

    def _given(
        self, jobs: Sequence[Draw], settings: CollectSettings, top_k: int
    ) -> Iterator[Trajectory]:
        most, context = settings.max_new_tokens, self.max_length - 1
        return self._score([draw.reference(self.end_ids, most, context) for draw in jobs], top_k)

    def _searched(
        self, jobs: Sequence[Draw], settings: CollectSettings, top_k: int
    ) -> Iterator[Trajectory]:
        beams = self._beams([draw.request for draw in jobs], settings)
        scored = self._score(
            [
                draw.trajectory("beam", tokens)
                for draw, some in zip(jobs, beams, strict=True)
                for tokens in some
            ],
            top_k,
        )
        for some in beams:
            ranked = sorted(islice(scored, len(some)), key=lambda text: -text.score)
            count = len(ranked)
            if settings.beams == "auto":
                count = worthwhile([text.score for text in ranked], settings.mass_gain)
            yield from (replace(text, index=i) for i, text in enumerate(ranked[:count]))

    # ------------------------------------------------------------ the engine

    def _score(self, texts: Sequence[Trajectory], top_k: int) -> Iterator[Trajectory]:
        """The texts with their logprobs and scores. Each must be shorter than the context: vLLM
        wants room for one token more.

        prompt fed      p0 p1 p2 y0 y1 #
        laws listed      -  .  . l0 l1 l2        beside the token they predict; ours are the last
        """
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=1,  # the least that vLLM does
            prompt_logprobs=top_k,
            ignore_eos=True,
            flat_logprobs=True,
            detokenize=False,
        )
        cells = top_k + 1
        for some in _portions(texts, lambda text: cells * (len(text.prompt) + len(text.tokens))):
            fed = [(*text.prompt, *text.tokens) for text in some]
            outputs = self._run(self._llm.generate, fed, [params] * len(fed))
            for text, output in zip(some, outputs, strict=True):
                yield self._scored(text, output.prompt_logprobs, top_k)

    def _beams(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[list[tuple[int, ...]]]:
        """Continuations of each prompt, each text once, as long as there is room.

        vLLM knows one end token, the tokenizer's: a beam that ran over another one is cut there.
        """
        found: list[list[tuple[int, ...]]] = [[] for _ in requests]
        context, most = self.max_length - 1, settings.max_new_tokens
        limits = [min(most, context - len(request.prompt)) for request in requests]
        for limit in sorted(set(limits)):  # vLLM has one for all
            places = [place for place, this in enumerate(limits) if this == limit]
            params = self._vllm.sampling_params.BeamSearchParams(
                beam_width=settings.most_beams, max_tokens=limit, length_penalty=0.0
            )
            prompts = [requests[place].prompt for place in places]
            outputs = self._run(self._llm.beam_search, prompts, params)
            for place, prompt, output in zip(places, prompts, outputs, strict=True):
                texts = [beam.tokens[len(prompt) :] for beam in output.sequences]
                cut = [tuple(until_end(list(text), self.end_ids)) for text in texts]
                found[place] = list(dict.fromkeys(cut))
        return found

    def _run(
        self, call: Callable[..., list[Any]], prompts: Sequence[Sequence[int]], params: Any
    ) -> list[Any]:
        fed = [self._vllm.TokensPrompt(prompt_token_ids=list(tokens)) for tokens in prompts]
        try:
            return call(fed, params, use_tqdm=False)
        except Exception as error:  # whatever an engine and its processes raise
            raise BackendError(
                f"vLLM failed while it ran {self.name!r}: {_sentence(error)}"
            ) from error

    def _scored(self, text: Trajectory, flat: Any, top_k: int) -> Trajectory:
        """The text with the logprobs of the last places listed (see the drawing at the top)."""
        cells = len(text.tokens) * (top_k + 1)
        ids, log_p = flat.token_ids[-cells:], flat.logprobs[-cells:]
        if len(ids) != cells or tuple(ids[:: top_k + 1]) != text.tokens:
            raise BackendError(
                f"vLLM {self._vllm.__version__} lists log-probabilities otherwise than 0.32, which "
                "this was written for: use that version, or the transformers backend."
            )
        ids_NC = np.array(ids, np.int32).reshape(-1, top_k + 1)
        log_p_NC = np.array(log_p, np.float64).reshape(-1, top_k + 1)
        if np.isnan(log_p_NC).any():
            raise BackendError(
                f"The logprobs of {self.name!r} hold NaN: its weights or dtype are broken (try "
                "--dtype float32)."
            )
        order_NK = np.argsort(ids_NC[:, 1:], axis=1)
        top = TopK(
            ids_NK=np.take_along_axis(ids_NC[:, 1:], order_NK, axis=1),
            log_p_NK=np.take_along_axis(log_p_NC[:, 1:], order_NK, axis=1).astype(np.float32),
        )
        return replace(text, top=top, score=float(log_p_NC[:, 0].sum()))


def _seed(seed: int, request_id: int) -> int:
    """Return the seed of one draw, which does not depend on what else is drawn."""
    digest = hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _portions(jobs: Sequence[X], cells: Callable[[X], int]) -> Iterator[list[X]]:
    """Consecutive jobs whose laws fit `CELLS_AT_ONCE`; at least one at a time."""
    some: list[X] = []
    used = 0
    for job in jobs:
        if some and used + cells(job) > CELLS_AT_ONCE:
            yield some
            some, used = [], 0
        some.append(job)
        used += cells(job)
    if some:
        yield some


def _import_vllm() -> Any:
    """The package, or a BackendError that says what to install."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise BackendError(
            f"The vLLM backend needs the package vllm ({_sentence(error)}): install it beside "
            "draftsmith, in an environment of its own (docs/collect-at-scale.md), or collect with "
            "the transformers backend."
        ) from error
    except Exception as error:  # a torchvision that was built for another torch, say
        raise BackendError(
            f"The package vllm is there but cannot be imported: {_sentence(error)} If torchvision, "
            "torchaudio or torchcodec is named, uninstall these three: they are not needed."
        ) from error


def _stored_dtype(model: str, revision: str | None, trust_remote_code: bool) -> Any:
    """What the configuration names; float32 if nothing. vLLM's own `auto` would take 16 bits for
    weights of 32."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        model, revision=revision or "main", trust_remote_code=trust_remote_code
    )
    stored = config.get_text_config(decoder=True).dtype or config.dtype
    return "float32" if stored is None else str(stored).removeprefix("torch.")


def _end_ids(llm: Any) -> frozenset[int]:
    """As for our own targets: those of generation configuration, configuration and tokenizer."""
    config = llm.model_config.hf_config
    named = [
        llm.model_config.try_get_generation_config().get("eos_token_id"),
        getattr(config, "eos_token_id", None),
        getattr(config.get_text_config(decoder=True), "eos_token_id", None),
        llm.get_tokenizer().eos_token_id,
    ]
    ids: set[int] = set()
    for end in named:
        ids.update(end if isinstance(end, list) else [] if end is None else [end])
    return frozenset(ids)


def _sentence(error: Exception) -> str:
    """The first line of another package's message, with a full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(" .:;,") + "."
