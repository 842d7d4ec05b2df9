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

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from draftsmith.bench.records import FirstDivergence, Floor
from draftsmith.core.cache import lay_out
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
    *_, (choice,) = _choices(target, prompt, generated, 1, sampler)
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
        chunks = _choices(target, prompt, plain[:-1], width, sampler)
        next(chunks)  # behind the prompt
        for choice, decoded in zip(itertools.chain.from_iterable(chunks), plain[1:], strict=False):
            tokens += 1
            if choice.token != decoded:
                # the rescored gap is the flipped side of the same near-tie
                largest = max(choice.gap, largest or 0.0)
                flips += 1
                break
    return Floor(tokens=tokens, flips=flips, largest_gap=largest)


def _choices(
    target: Target, prompt: Sequence[int], known: Sequence[int], width: int, sampler: Sampler
) -> Iterator[list[Choice]]:
    """Feed a prompt as in decoding, then the known tokens in chunks; yield the target's greedy
    choices: that behind the prompt, then those behind the tokens of each chunk."""
    cache = target.new_cache(1, len(prompt) + len(known) + 1)
    text = [*prompt, *known]
    # at temperature 1 and untruncated, differences of log-probabilities are those of scores
    scores = replace(sampler, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    (left,) = feed_beginning(target, cache, [prompt])
    chunks = [left, *(known[n : n + width] for n in range(0, len(known), width))]
    end = len(prompt) - len(left)
    for number, chunk in enumerate(chunks):
        keep = len(chunk) if number else 1
        fed, block = lay_out(cache, [chunk])
        logits_RV = target.forward(torch.from_numpy(fed), block, keep, Signals()).logits_BNV[0]
        cache.commit(np.array([len(chunk)]))
        end += len(chunk)
        histories = [
            History(tokens=text[:length], num_prompt=len(prompt))
            for length in range(end - keep + 1, end + 1)
        ]
        probs_RV = scores.law(logits_RV.double(), histories).probs()
        top = probs_RV.topk(2, dim=-1).values.log().tolist()
        bounds = [near_tie_bound(target.dtype, highest) for highest in logits_RV.amax(-1).tolist()]
        yield [
            Choice(token=token, gap=first - second, bound=bound)
            for token, (first, second), bound in zip(
                probs_RV.argmax(-1).tolist(), top, bounds, strict=True
            )
        ]
