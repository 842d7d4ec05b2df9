"""A package that looks to us like vLLM 0.32 and computes the laws of a `TabularTarget`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from draftsmith.targets.toy import TabularTarget

Rows = list[list[tuple[int, float]]]
"""Per place: the token there, then the K best, each with its log-probability."""


@dataclass
class FlatLogprobs:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Rows) -> FlatLogprobs:
        cells = [cell for row in rows for cell in row]
        return cls([token for token, _ in cells], [value for _, value in cells])


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    flat_logprobs: bool
    detokenize: bool
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    length_penalty: float


class Fake(ModuleType):
    """The package. `options` is what the engine was made with, `calls` how many prompts each call
    brought; `listing` changes what is listed; `beams` is what a search finds."""

    __version__ = "0.32.0"

    def __init__(self, target: TabularTarget) -> None:
        super().__init__("vllm")
        self.target = target
        self.options: dict[str, Any] = {}
        self.calls: list[int] = []
        self.params: list[SamplingParams | BeamSearchParams] = []
        self.listing: Callable[[Rows], Rows] = lambda rows: rows
        self.beams: list[tuple[int, ...]] = []
        self.failure: Exception | None = None
        self.SamplingParams = SamplingParams
        self.sampling_params = SimpleNamespace(BeamSearchParams=BeamSearchParams)
        self.TokensPrompt = dict

    def LLM(self, model: str, **options: Any) -> LLM:
        self.options = options
        if model == "broken":
            raise RuntimeError("no such weights\nand a long story")
        return LLM(self)


class LLM:
    def __init__(self, package: Fake) -> None:
        self.package, self.target = package, package.target
        holder = SimpleNamespace(eos_token_id=min(self.target.end_ids))
        holder.get_text_config = lambda decoder: holder
        self.model_config = SimpleNamespace(
            hf_config=holder,
            max_model_len=self.target.max_length,
            get_vocab_size=lambda: self.target.vocab_size,
            try_get_generation_config=lambda: {"eos_token_id": sorted(self.target.end_ids)},
        )

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(eos_token_id=min(self.target.end_ids))

    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[Any]:
        self._called(len(prompts), params)
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        assert all(len(one) < self.target.max_length for one in tokens)
        return [self._one(one, param) for one, param in zip(tokens, params, strict=True)]

    def beam_search(
        self, prompts: list[dict[str, list[int]]], params: BeamSearchParams, use_tqdm: bool
    ) -> list[Any]:
        self._called(len(prompts), [params])
        return [
            SimpleNamespace(
                sequences=[
                    SimpleNamespace(tokens=[*prompt["prompt_token_ids"], *tokens])
                    for tokens in self.package.beams
                ]
            )
            for prompt in prompts
        ]

    def _called(self, count: int, params: list[Any]) -> None:
        self.package.calls.append(count)
        self.package.params += params
        if self.package.failure is not None:
            raise self.package.failure

    def _one(self, prompt: list[int], params: SamplingParams) -> Any:
        known, rows = list(prompt), []
        for _ in range(min(params.max_tokens, self.target.max_length - len(prompt))):
            token = self._draw(known, params)
            rows.append(self._row(known, token, params.logprobs or 0))
            known.append(token)
            if token in params.stop_token_ids:
                break
        completion = SimpleNamespace(
            token_ids=known[len(prompt) :], logprobs=FlatLogprobs.of(self.package.listing(rows))
        )
        before = [
            self._row(prompt[:place], prompt[place], params.prompt_logprobs or 0)
            for place in range(1, len(prompt))
        ]
        return SimpleNamespace(
            outputs=[completion], prompt_logprobs=FlatLogprobs.of(self.package.listing(before))
        )

    def _draw(self, known: list[int], params: SamplingParams) -> int:
        logits_V = self.target.logits_after(known)
        if params.temperature == 0:
            return int(logits_V.argmax())
        generator = torch.Generator().manual_seed((params.seed or 0) + len(known))
        return int(
            torch.multinomial((logits_V / params.temperature).softmax(-1), 1, generator=generator)
        )

    def _row(self, known: list[int], token: int, count: int) -> list[tuple[int, float]]:
        law_V = self.target.logits_after(known).log_softmax(-1)
        best = law_V.topk(count)
        listed = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(token, float(law_V[token])), *listed]


def with_nan(rows: Rows) -> Rows:
    """A broken model's."""
    return [[(token, math.nan) for token, _ in row] for row in rows]
