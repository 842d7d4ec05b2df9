"""The three things that a vLLM engine does for us, token ids in, token ids and laws out.

vLLM lists the token that stands at a place first, then the K best, downwards:

    ids       y0 a0 b0 c0 | y1 a1 b1 c1        K = 3; y is one of a, b, c, or none of them
    column     0  1  2  3    0  1  2  3        column 0: what y has; the others: the law

Written for vLLM 0.32. Its laws are those at temperature 1 before any processor (`raw_logprobs`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from draftsmith.core.rows import until_end
from draftsmith.distill.trajectories.teacher import Laws, Text
from draftsmith.distill.trajectories.types import TopK
from draftsmith.errors import BackendError

X = TypeVar("X")
Dtype = Literal["auto", "bfloat16", "float16", "float32"]

CELLS_AT_ONCE = 1 << 22
"""Numbers of laws that vLLM may hold for us at a time: as Python objects, some 150 bytes each."""
_VARIABLES = {
    # stdout belongs to --json, and nothing about the user is to be sent anywhere
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A continuation that is wanted."""

    prompt: tuple[int, ...]
    temperature: float
    """0: the most probable token."""
    top_p: float
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """What became of an order."""

    tokens: tuple[int, ...]
    laws: Laws


class Engine:
    """A model in vLLM; arguments and errors are those of `VllmBackend`."""

    def __init__(
        self,
        model: str,
        *,
        dtype: Dtype,
        max_length: int | None,
        devices: int,
        memory_share: float | None,
        eager: bool,
        revision: str | None,
        trust_remote_code: bool,
    ) -> None:
        self._vllm = _import_vllm()
        self.name = model
        try:
            if dtype == "auto":
                dtype = _stored_dtype(model, revision, trust_remote_code)
            share = {} if memory_share is None else {"gpu_memory_utilization": memory_share}
            self._llm = self._vllm.LLM(
                model,
                dtype=dtype,
                max_model_len=max_length,
                tensor_parallel_size=devices,
                enforce_eager=eager,
                revision=revision,
                trust_remote_code=trust_remote_code,
                max_logprobs=-1,  # as many as there are tokens
                logprobs_mode="raw_logprobs",
                **share,
            )
            self.vocab_size: int = self._llm.model_config.get_vocab_size()
            self.max_length: int = self._llm.model_config.max_model_len
            self.end_ids = _end_ids(self._llm)
        except Exception as error:  # whatever an engine and its processes raise
            raise BackendError(f"vLLM cannot load {model!r}: {_sentence(error)}") from error

    def continuations(
        self, orders: Sequence[Order], *, max_new_tokens: int, top_k: int
    ) -> Iterator[Continuation]:
        """One per order, up to and with an end token."""
        cells = max_new_tokens * (top_k + 1)
        for some in _portions(orders, lambda order: cells):
            params = [
                self._vllm.SamplingParams(
                    temperature=order.temperature,
                    top_p=order.top_p,
                    seed=order.seed,
                    max_tokens=max_new_tokens,
                    logprobs=top_k,
                    stop_token_ids=sorted(self.end_ids),
                    ignore_eos=True,  # what ends a text is said in the line above, once
                    flat_logprobs=True,
                    detokenize=False,
                )
                for order in some
            ]
            for output in self._generate([order.prompt for order in some], params):
                tokens = tuple(output.outputs[0].token_ids)
                yield Continuation(
                    tokens=tokens, laws=self._laws(output.outputs[0].logprobs, tokens, top_k)
                )

    def judge(self, texts: Sequence[Text], *, top_k: int) -> Iterator[Laws]:
        """The laws of known texts, one after the other. Each must be shorter than the context.

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
            outputs = self._generate(fed, [params] * len(fed))
            for text, output in zip(some, outputs, strict=True):
                yield self._laws(output.prompt_logprobs, text.tokens, top_k)

    def search(
        self, prompts: Sequence[tuple[int, ...]], *, width: int, limits: Sequence[int]
    ) -> list[list[tuple[int, ...]]]:
        """Up to `width` continuations of each prompt, each text once, of at most `limits` tokens.

        vLLM knows one end token, the tokenizer's: a beam that ran over another one is cut there.
        """
        found: list[list[tuple[int, ...]]] = [[] for _ in prompts]
        for limit in sorted(set(limits)):  # vLLM has one for all
            places = [place for place, this in enumerate(limits) if this == limit]
            params = self._vllm.sampling_params.BeamSearchParams(
                beam_width=width, max_tokens=limit, length_penalty=0.0
            )
            outputs = self._run(
                self._llm.beam_search, [self._prompt(prompts[place]) for place in places], params
            )
            for place, output in zip(places, outputs, strict=True):
                texts = [beam.tokens[len(prompts[place]) :] for beam in output.sequences]
                cut = [tuple(until_end(list(text), self.end_ids)) for text in texts]
                found[place] = list(dict.fromkeys(cut))
        return found

    # ------------------------------------------------------------ inside

    def _prompt(self, tokens: Sequence[int]) -> Any:
        return self._vllm.TokensPrompt(prompt_token_ids=list(tokens))

    def _generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        fed = [self._prompt(tokens) for tokens in prompts]
        return self._run(self._llm.generate, fed, list(params))

    def _run(self, call: Callable[..., list[Any]], prompts: list[Any], params: Any) -> list[Any]:
        try:
            return call(prompts, params, use_tqdm=False)
        except Exception as error:
            raise BackendError(
                f"vLLM failed while it ran {self.name!r}: {_sentence(error)}"
            ) from error

    def _laws(self, flat: Any, tokens: tuple[int, ...], top_k: int) -> Laws:
        """The laws of the last places listed (see the drawing at the top)."""
        cells = len(tokens) * (top_k + 1)
        ids, log_p = flat.token_ids[-cells:], flat.logprobs[-cells:]
        if len(ids) != cells or tuple(ids[:: top_k + 1]) != tokens:
            raise BackendError(
                f"vLLM {self._vllm.__version__} lists log-probabilities otherwise than 0.32, which "
                "this was written for: use that version, or the transformers backend."
            )
        ids_NC = np.array(ids, np.int32).reshape(-1, top_k + 1)
        log_p_NC = np.array(log_p, np.float64).reshape(-1, top_k + 1)
        if np.isnan(log_p_NC).any():
            raise BackendError(
                f"The laws of {self.name!r} hold NaN: its weights or dtype are broken (try --dtype "
                "float32)."
            )
        order_NK = np.argsort(ids_NC[:, 1:], axis=1)
        return Laws(
            top=TopK(
                ids_NK=np.take_along_axis(ids_NC[:, 1:], order_NK, axis=1),
                log_p_NK=np.take_along_axis(log_p_NC[:, 1:], order_NK, axis=1).astype(np.float32),
            ),
            token_log_p_N=log_p_NC[:, 0],
        )


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
