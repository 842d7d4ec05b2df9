"""The target's joint law, by arithmetic of our own: what the decoder is compared with.

Nothing here calls `Sampler.law` or transformers: every setting is written out from its definition,
one token at a time, in float64 on plain numpy arrays. Only the table of logits is the target's.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from draftsmith.core.sampling import Sampler
from draftsmith.targets.toy import TabularTarget

JointLaw = Mapping[tuple[int, ...], float]
"""Probability of each complete continuation."""


def exact_law(
    logits_V: np.ndarray, settings: Sampler, tokens: Sequence[int], num_prompt: int
) -> np.ndarray:
    """[V] float64: the law of the token after `tokens`, of which `num_prompt` are the prompt."""
    scores_V = np.array(logits_V, dtype=np.float64)
    for token, amount in settings.logit_bias:
        scores_V[token] += amount
    for token in set(tokens):
        down = scores_V[token] > 0
        scores_V[token] *= 1 / settings.repetition_penalty if down else settings.repetition_penalty
    for token, count in Counter(tokens[num_prompt:]).items():
        scores_V[token] -= settings.presence_penalty + settings.frequency_penalty * count
    if settings.temperature == 0:
        return np.eye(len(scores_V))[int(np.argmax(scores_V))]
    scores_V = scores_V / settings.temperature
    keep_V = np.ones(len(scores_V), dtype=bool)
    if settings.top_k:
        lowest = np.sort(scores_V)[::-1][min(settings.top_k, len(scores_V)) - 1]
        keep_V &= scores_V >= lowest
    probs_V = _softmax(scores_V, keep_V)
    if settings.top_p < 1:
        before = 0.0
        for token in np.argsort(-probs_V, kind="stable"):
            keep_V[token] &= before < settings.top_p
            before += probs_V[token]
        probs_V = _softmax(scores_V, keep_V)
    if settings.min_p > 0:
        keep_V &= probs_V >= settings.min_p * probs_V.max()
        probs_V = _softmax(scores_V, keep_V)
    return probs_V


def _softmax(scores_V: np.ndarray, keep_V: np.ndarray) -> np.ndarray:
    weights_V = np.where(keep_V, np.exp(scores_V - scores_V.max()), 0.0)
    return weights_V / weights_V.sum()


def joint_law(
    target: TabularTarget, settings: Sampler, prompt: Sequence[int], num_tokens: int
) -> dict[tuple[int, ...], float]:
    """Every continuation of positive probability: `num_tokens` long, or shorter at an end token
    or at the context's end."""
    return dict(_continuations(target, settings, list(prompt), len(prompt), num_tokens, 1.0))


def _continuations(
    target: TabularTarget,
    settings: Sampler,
    tokens: list[int],
    num_prompt: int,
    num_tokens: int,
    prob: float,
) -> Iterator[tuple[tuple[int, ...], float]]:
    generated = tokens[num_prompt:]
    full = target.max_length is not None and len(tokens) >= target.max_length
    if len(generated) == num_tokens or full or (generated and generated[-1] in target.end_ids):
        yield tuple(generated), prob
        return
    logits_V = target.logits_after(tokens).numpy()
    for token, p in enumerate(exact_law(logits_V, settings, tokens, num_prompt)):
        if p > 0:
            yield from _continuations(
                target, settings, [*tokens, token], num_prompt, num_tokens, prob * p
            )


def total_variation(one: JointLaw, other: JointLaw) -> float:
    """Half the summed difference: the largest error of any event's probability."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def story(expected: JointLaw, found: JointLaw) -> str:
    """What went wrong, for a failure message: the distance, and the worst continuations."""
    keys = sorted(
        {*expected, *found}, key=lambda key: -abs(expected.get(key, 0.0) - found.get(key, 0.0))
    )
    distance, mass = total_variation(expected, found), sum(found.values())
    lines = [f"total variation {distance:.3g}, mass found {mass:.12f}"]
    lines += [
        f"  {key}: should have {expected.get(key, 0.0):.6f}, has {found.get(key, 0.0):.6f}"
        for key in keys[:5]
    ]
    return "\n".join(lines)
