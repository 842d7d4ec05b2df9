"""Equality with plain decoding at temperature 0, and what a difference means.

Exact arithmetic would give equal tokens. Rounding depends on how many tokens a forward is fed, so
near-ties can flip in any engine, and in half precision they do. Two metrics keep the claim honest:

* the *gap* at the first divergence: how far the target, decoding plainly in its own dtype, held its
  first choice above its second. It must lie under a *bound* that rounding explains;
* the *floor*: how often the target differs from itself when the same text is scored in chunks, as
  verification does. A drafter's rate of divergences must not exceed it.

Scores are the logits after penalties and bias, as plain decoding sees them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.bench.records import FirstDivergence, Floor
from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.types import Signals
from draftsmith.targets.base import Target, feed_beginning

_ULPS = 8
"""Half precision: rounding errors of a few units in the last place of the largest logit add up."""
_BOUND = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Wider formats: the stated bounds of the losslessness claim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The target's choice at one place."""

    token: int
    gap: float
    """Score of the first choice minus that of the second."""
    bound: float
    """See `near_tie_bound`."""


def near_tie_bound(dtype: torch.dtype, top_logit: float) -> float:
    """Return the largest gap that rounding may flip: 1e-3 in float32, 8 ulps in half precision."""
    least = _BOUND.get(dtype)
    if least is not None:
        return least
    exponent = math.floor(math.log2(abs(top_logit))) if top_logit else 0
    return _ULPS * torch.finfo(dtype).eps * 2.0**exponent


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index where two texts first differ, one of them ending included."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def divergence(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    text: Sequence[int],
    sampler: Sampler,
) -> FirstDivergence | None:
    """Find where `text` leaves the `plain` continuation, and the target's gap there; None:
    nowhere."""
    at = first_difference(plain, text)
    if at is None:
        return None
    choice = choice_after(target, prompt, plain[:at], sampler)
    return FirstDivergence(at=at, gap=choice.gap, bound=choice.bound)


def choice_after(
    target: Target, prompt: Sequence[int], generated: Sequence[int], sampler: Sampler
) -> Choice:
    """Return the target's choice behind `prompt + generated`, fed as plain decoding feeds it.

    prompt in one forward, then each generated token in a forward of its own
    """
    scorer = _Scorer(target, prompt, len(generated), sampler)
    (choice,) = scorer.feed(prompt, only_last=True)
    for token in generated:
        (choice,) = scorer.feed([token])
    return choice


def floor(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    sampler: Sampler,
    widths: Sequence[int],
) -> Floor:
    """Score the plain text again in chunks of each width, and count where a choice flips.

    plain    t0 t1 t2 t3 t4          t0 came from the prompt's forward, as it did before
    chunks   [t0 t1] [t2 t3]         width 2: the choices behind t0 and t1 come from one forward
    choices    t1 t2   t3 t4         compared with what plain decoding chose
    """
    tokens = flips = 0
    largest: float | None = None
    for width in widths:
        scorer = _Scorer(target, prompt, len(plain), sampler)
        scorer.feed(prompt, only_last=True)
        for start in range(0, len(plain) - 1, width):
            chunk = plain[start : min(start + width, len(plain) - 1)]
            choices = scorer.feed(chunk)
            decoded = plain[start + 1 : start + 1 + len(chunk)]
            flipped = first_difference([choice.token for choice in choices], decoded)
            tokens += len(chunk) if flipped is None else flipped + 1
            if flipped is not None:
                # the rescored gap is the flipped side of the same near-tie
                largest = max(choices[flipped].gap, largest or 0.0)
                flips += 1
                break
    return Floor(tokens=tokens, flips=flips, largest_gap=largest)


class _Scorer:
    """Feeds known tokens to the target in chunks and returns its greedy choices."""

    def __init__(self, target: Target, prompt: Sequence[int], more: int, sampler: Sampler) -> None:
        self._target = target
        self._cache: KVCache = target.new_cache(1, len(prompt) + more + 1)
        self._num_prompt = len(prompt)
        self._fed: list[int] = []
        # at temperature 1 and untruncated, differences of log-probabilities are those of scores
        self._sampler = replace(sampler, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    def feed(self, tokens: Sequence[int], *, only_last: bool = False) -> list[Choice]:
        """Return the choices behind each token; `only_last`: a prompt, fed as in decoding."""
        left = feed_beginning(self._target, self._cache, [tokens]) if only_last else [tokens]
        fed, block = lay_out(self._cache, left)
        keep = 1 if only_last else len(tokens)
        out = self._target.forward(torch.from_numpy(fed), block, keep, Signals())
        self._cache.commit(np.array([len(left[0])]))
        first = len(self._fed) + len(tokens) - keep + 1
        self._fed.extend(tokens)
        histories = [
            History(tokens=self._fed[: first + i], num_prompt=self._num_prompt) for i in range(keep)
        ]
        return self._choices(out.logits_BNV[0].double(), histories)

    def _choices(self, logits_RV: Tensor, histories: Sequence[History]) -> list[Choice]:
        probs_RV = self._sampler.law(logits_RV, histories).probs()
        token_R = probs_RV.argmax(-1)
        top_R2 = probs_RV.topk(2, dim=-1).values.log()
        highest_R = logits_RV.amax(-1)
        return [
            Choice(
                token=int(token),
                gap=float(top[0] - top[1]),
                bound=near_tie_bound(self._target.dtype, float(highest)),
            )
            for token, top, highest in zip(token_R, top_R2, highest_R, strict=True)
        ]
