"""What is measured of a target with a draft model, for `draftsmith plan`: how many tokens of drafts
of a fixed length are accepted, and how often the two agree on the target's texts.

Counting: chains are drafted and verified as in any decoding. Only whole drafts count. One that was
shorter than asked is no evidence about its length: where the room for text ends, where an accepted
end token stands inside it, where another tokenizer spells it with fewer tokens.

    draft of 4    accepted 2    1 1 0        tried 3, accepted 2
                  accepted 4    1 1 1 1      tried 4, accepted 4

Counts are kept by prompt: the tokens of one text are not independent, least of all where it is
decoded again at the next draft length.

Agreement on re-tokenised text is how the scaling-laws paper measured pairs with different
tokenizers: the target's text, cut by the draft's tokenizer, and at each token the probability that
the draft gives it. Nothing is verified: no decoder has this rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.bench.metrics import Ratio, ratio
from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Generation, generate
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.types import DecodeStep, Signals, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.errors import InputError
from draftsmith.plan.acceptance import estimate
from draftsmith.plan.observations import LengthCount
from draftsmith.targets.base import CHUNK, Target


@dataclass(slots=True)
class LengthTrial:
    """All steps with drafts of one length."""

    gamma: int
    left_out: int = 0
    """Steps whose draft was not whole."""
    by_prompt: dict[int, list[int]] = field(default_factory=dict)
    """Whole drafts of which 0, 1, .., gamma tokens were accepted, by the number of the prompt."""

    @property
    def steps(self) -> list[int]:
        """The counts summed over prompts."""
        return [sum(each[n] for each in self.by_prompt.values()) for n in range(self.gamma + 1)]

    def add(self, step: DecodeStep, numbers: range) -> None:
        """Count a step; `numbers`: the prompts of its rows."""
        for row, number in enumerate(numbers):
            if not step.active[row]:
                continue
            if step.offered_depth[row] != self.gamma:
                self.left_out += 1
                continue
            counts = self.by_prompt.setdefault(number, [0] * (self.gamma + 1))
            counts[step.accepted[row]] += 1

    @property
    def counts(self) -> tuple[LengthCount, ...]:
        """The counts above 0."""
        return tuple(
            LengthCount(gamma=self.gamma, accepted=accepted, count=count, prompt=str(number))
            for number, counts in self.by_prompt.items()
            for accepted, count in enumerate(counts)
            if count
        )


def count_accepted(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    on_length: Callable[[int], None] | None = None,
) -> tuple[tuple[LengthTrial, ...], list[Generation]]:
    """Decode all prompts with chains of every length; return counts and the texts of the last.

    Each length has a seed of its own: with one for all, drawn texts would be nearly the same.
    """
    trials, made = [], []
    for gamma in lengths:
        if on_length is not None:
            on_length(gamma)
        trial = LengthTrial(gamma=gamma)
        chain = replace(options, shape=TreeShape.chain(gamma), seed=options.seed + gamma)
        made = generate(target, drafter, prompts, chain, batch_size=batch_size, on_step=trial.add)
        trials.append(trial)
    return tuple(trials), made


def acceptance(trials: Sequence[LengthTrial]) -> Ratio | None:
    """Return accepted / tried, all lengths together; None: no draft was whole.

    The margin is the longer half of the interval over prompts, which is not symmetric.
    """
    counts = [count for trial in trials for count in trial.counts]
    if not counts:
        return None
    rate = estimate(counts).mle
    if rate.ci95 is None:
        return Ratio(value=rate.alpha, moe=None)
    low, high = rate.ci95
    return Ratio(value=rate.alpha, moe=max(rate.alpha - low, high - rate.alpha))


@torch.inference_mode()
def agreement(
    draft: Target,
    target_tokenizer: Any,
    texts: Sequence[Generation],
    sampler: Sampler,
) -> Ratio | None:
    """Return the draft's mean probability for its tokens in the target's texts, that is of drafting
    them: at temperature 0 the share of its first choices. None: there are no such tokens."""
    parts = []
    for text in texts:
        ids, places = _reread(draft, target_tokenizer, text)
        if not places:
            continue
        agreed = 0.0
        cache = draft.new_cache(1, len(ids))
        for first, logits_TV in read_along(draft, cache, ids[:-1]):
            # row t is behind ids[first + t]: it is about the token at first + t + 1
            rows = [place for place in places if 0 <= place - 1 - first < len(logits_TV)]
            if rows:
                behind = torch.tensor([place - 1 - first for place in rows])
                history = [
                    History(tokens=ids[:place], num_prompt=places[0])
                    for place in rows
                    if sampler.needs_history
                ]
                law = sampler.law(logits_TV[behind.to(logits_TV.device)], history)
                tokens = torch.tensor([ids[place] for place in rows])
                agreed += float(law.prob(tokens).double().sum())
        parts.append((agreed, float(len(places))))
    return ratio(parts) if parts else None


def parameters_of(model: Target) -> int | None:
    """Count the weights of a model, tied ones once; None: it is no network."""
    network = getattr(model, "model", None)
    if not isinstance(network, nn.Module):
        return None
    return sum(parameter.numel() for parameter in network.parameters())


def _reread(draft: Target, target_tokenizer: Any, text: Generation) -> tuple[list[int], list[int]]:
    """Cut the whole text into the draft's tokens; return them and which lie in the generated part.

    text         prompt prompt | generated generated
    draft ids    a   b     c   d   e    f    g            d straddles the edge: e, f, g count
    """
    known = list(text.prompt_tokens)
    edge = len(target_tokenizer.decode(known, skip_special_tokens=True))
    whole = target_tokenizer.decode([*known, *text.token_ids], skip_special_tokens=True)
    cut = draft.tokenizer(whole, return_offsets_mapping=True, verbose=False)
    ids: list[int] = cut["input_ids"][: draft.max_length]
    spans = cut["offset_mapping"]
    places = [i for i in range(1, len(ids)) if spans[i][0] >= edge and spans[i][1] > spans[i][0]]
    return ids, places


LONGEST = 2048
"""Tokens of a document that are read."""
_LOGITS = 1 << 24
"""Numbers that stand in memory at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """The perplexity of a model on documents."""

    value: float
    moe: float | None
    """Half the 95 % interval, over documents (first order); None: there was one only."""
    loss: float
    """Nats per token."""
    tokens: int
    """Predicted ones."""
    documents: int
    cut: int
    """Documents that were longer than what is read."""
    unread: int
    """Their tokens behind that."""
    longest: int
    """Tokens of a document that were read at most."""


def perplexity(
    model: Target, documents: Iterable[str], *, longest: int = LONGEST, piece: int | None = None
) -> Perplexity:
    """Read all documents.

    Args:
        longest: tokens of a document to read; less where the model's context is shorter.
        piece: tokens per forward; None: as many as memory for their logits is worth.

    Raises:
        InputError: no document has two tokens, or the tokenizer is another model's.
    """
    longest = min(longest, model.max_length or longest)
    cache = model.new_cache(1, longest)
    parts: list[tuple[float, float]] = []
    cut = unread = 0
    for document in documents:
        ids = _token_ids(model, document)
        cut += len(ids) > longest
        unread += max(len(ids) - longest, 0)
        ids = ids[:longest]
        if len(ids) > 1:
            parts.append((_loss(model, cache, ids, piece), len(ids) - 1))
    if not parts:
        raise InputError(
            f"there is nothing to measure the perplexity of {model.name} on: no document has two "
            "tokens"
        )
    loss = ratio(parts)
    value = math.exp(loss.value) if loss.value < 700 else math.inf
    return Perplexity(
        value=value,
        moe=None if loss.moe is None else value * loss.moe,
        loss=loss.value,
        tokens=int(sum(number for _, number in parts)),
        documents=len(parts),
        cut=cut,
        unread=unread,
        longest=longest,
    )


def read_along(
    model: Target, cache: KVCache, ids: Sequence[int], piece: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first, logits_TV) by piece: row t holds the logits behind `ids[first + t]`.

    The logits of a long text over a large vocabulary would fill gigabytes: each piece is dropped
    before the next. What the cache held before is forgotten.
    """
    size = piece or max(1, min(CHUNK, _LOGITS // model.vocab_size))
    cache.rewind([0])
    for first in range(0, len(ids), size):
        part = list(ids[first : first + size])
        tokens_BT, block = lay_out(cache, [part])
        out = model.forward(torch.from_numpy(tokens_BT), block, len(part), Signals())
        cache.commit(np.array([len(part)]))
        yield first, out.logits_BNV[0]


@torch.inference_mode()
def _loss(model: Target, cache: KVCache, ids: Sequence[int], piece: int | None) -> float:
    """Return the nats of all tokens but the first."""
    total = 0.0
    for first, logits_TV in read_along(model, cache, ids[:-1], piece):
        wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        next_T = torch.tensor(ids[first + 1 : first + 1 + len(wide_TV)], device=wide_TV.device)
        nats_T = torch.nn.functional.cross_entropy(wide_TV, next_T, reduction="none")
        total += float(nats_T.double().sum())
    return total


def _token_ids(model: Target, document: str) -> list[int]:
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer to read text with")
    ids: list[int] = model.tokenizer(document, verbose=False)["input_ids"]
    if max(ids, default=0) >= model.vocab_size:
        raise InputError(
            f"the tokenizer of {model.name} gives token {max(ids)}, outside the vocabulary of "
            f"{model.vocab_size}: tokenizer and model do not belong together"
        )
    return ids
