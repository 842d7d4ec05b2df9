"""How often a draft model would be accepted, computed instead of sampled.

At every place of a given continuation both models' laws are known, so the probability that a token
drafted there is accepted is known too (Leviathan et al. 2023, arXiv 2211.17192):

    beta = sum_v min(p_v, q_v) = 1 - TVD(p, q)          at temperature 0: 1 where the argmaxes agree

    prompt        p0 p1 p2
    continuation           y0   y1   y2                 fed:   p0 p1 p2 y0 y1
    beta                   b0   b1   b2                 b_i: laws of y_i, behind p2, y0, y1

No noise but that of the texts. Logits exist for a few places at a time, never for [B, T, V].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.config import require
from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.law import Law
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.speedup import predicted_speedup, tokens_per_step
from draftsmith.core.types import Signals
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.tree_growth import Vocabularies
from draftsmith.drafters.vocabulary import padded, same_tokens
from draftsmith.errors import InputError
from draftsmith.targets.base import CHUNK, Target

Betas = NDArray[np.float64]


MAX_LOGITS = 1 << 24
"""Logits of one model that exist at once (some copies of as many are made)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Acceptance on some of the tokens."""

    alpha: float
    tokens: int

    def results(self, gamma: int | None) -> dict[str, float | None]:
        """As `AcceptanceReport.results`."""
        tau = None if gamma is None else float(tokens_per_step(self.alpha, gamma))
        return {"alpha": self.alpha, "tau_predicted": tau}


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceReport:
    """Expected acceptance over given continuations. n_x: tokens of continuation x."""

    tokens: int
    prompts: int
    alpha: float
    """Per token: all betas / all tokens."""
    alpha_per_prompt: float
    """Mean over prompts, and within one over its continuations, of (sum of betas / n_x)."""
    alpha_sequence: float
    """DistillBeam, eq. 10: per prompt E[sum of betas] / E[n_x] over its continuations (which stand
    for samples of the target), then the mean over prompts."""
    by_language: dict[str, Share]
    by_tag: dict[str, Share]
    temperature: float
    """Temperature of decoding."""

    def results(self, gamma: int | None, cost_ratio: float | None = None) -> dict[str, Any]:
        """The figures that are kept for comparisons (see `bench.compare.model`).

        Args:
            gamma: length of the chains; None: drafts are none, and nothing is predicted.
            cost_ratio: cost c of a draft forward / of a target forward; None: no speed-up is
                predicted. It is tau / (c gamma + 1) (DistillBeam, eq. 12), with tau the tokens per
                step of the token-weighted alpha (eq. 11).
        """
        require(gamma is None or gamma >= 1, f"gamma must be at least 1, got {gamma}")
        tau = Share(alpha=self.alpha, tokens=self.tokens).results(gamma)["tau_predicted"]
        speedup = None
        if tau is not None and gamma is not None and cost_ratio is not None:
            speedup = float(predicted_speedup(tau, gamma, cost_ratio))
        return {
            "alpha": self.alpha,
            "alpha_per_prompt": self.alpha_per_prompt,
            "alpha_sequence": self.alpha_sequence,
            "gamma": gamma,
            "tau_predicted": tau,
            "speedup_predicted": speedup,
            "decoding_temperature": self.temperature,
            "by_language": {name: one.results(gamma) for name, one in self.by_language.items()},
            "by_tag": {name: one.results(gamma) for name, one in self.by_tag.items()},
        }


def measure_acceptance(
    target: Target,
    draft: Target,
    trajectories: Sequence[Trajectory],
    sampler: Sampler | None = None,
    *,
    batch_size: int = 8,
    vocabularies: Vocabularies | None = None,
) -> AcceptanceReport:
    """Expected acceptance of a draft model on continuations of prompts.

    Args:
        trajectories: prompts and continuations; for alpha as decoding has it, drawn from the target
            in the way that `sampler` says.
        sampler: how both turn logits into laws when they decode; None: at temperature 1.
        batch_size: continuations that are scored together.
        vocabularies: how the ids of both correspond; None: see `shared_vocabulary`.

    Raises:
        InputError: nothing to measure, a text that does not fit, or vocabularies that differ.
    """
    sampler = sampler or Sampler(temperature=1.0)
    betas = expected_acceptance(
        target, draft, trajectories, sampler, batch_size=batch_size, vocabularies=vocabularies
    )
    pairs = [(one, beta) for one, beta in zip(trajectories, betas, strict=True) if len(beta)]
    if not pairs:
        raise InputError("There is no continuation to measure acceptance on.")
    prompts: dict[str, list[Betas]] = {}
    for one, beta in pairs:
        prompts.setdefault(one.prompt_id, []).append(beta)
    whole = _share([beta for _, beta in pairs])
    return AcceptanceReport(
        tokens=whole.tokens,
        prompts=len(prompts),
        alpha=whole.alpha,
        alpha_per_prompt=float(
            np.mean([np.mean([beta.mean() for beta in some]) for some in prompts.values()])
        ),
        alpha_sequence=float(np.mean([_share(some).alpha for some in prompts.values()])),
        by_language=_by([(one.language, beta) for one, beta in pairs]),
        by_tag=_by([(one.tag, beta) for one, beta in pairs]),
        temperature=sampler.temperature,
    )


def _share(betas: Sequence[Betas]) -> Share:
    tokens = sum(len(beta) for beta in betas)
    return Share(alpha=float(sum(beta.sum() for beta in betas) / tokens), tokens=tokens)


def _by(named: Sequence[tuple[str | None, Betas]]) -> dict[str, Share]:
    """In order of first appearance; what has no name is left out."""
    return {
        name: _share([beta for own, beta in named if own == name])
        for name in dict.fromkeys(own for own, _ in named)
        if name is not None
    }


@torch.inference_mode()
def expected_acceptance(
    target: Target,
    draft: Target,
    trajectories: Sequence[Trajectory],
    sampler: Sampler | None = None,
    *,
    batch_size: int = 8,
    vocabularies: Vocabularies | None = None,
) -> list[Betas]:
    """Per trajectory, beta at each of its tokens. As `measure_acceptance`, without the summing."""
    sampler = sampler or Sampler(temperature=1.0)
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    width = max(target.vocab_size, draft.vocab_size)
    ids = shared_vocabulary(draft, target) if vocabularies is None else vocabularies
    for one in trajectories:
        _check(one, target, draft)
    out: list[Betas] = [np.zeros(len(one.tokens)) for one in trajectories]
    # equal lengths side by side: less padding
    order = sorted(
        (i for i, one in enumerate(trajectories) if one.tokens),
        key=lambda i: (len(trajectories[i].tokens), len(trajectories[i].prompt)),
    )
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        batch = [trajectories[i] for i in numbers]
        columns = max(1, min(CHUNK, MAX_LOGITS // (len(batch) * width)))
        by_target = _logits(target, batch, columns, lambda ids: ids)
        by_draft = _logits(draft, batch, columns, ids.to_draft)
        # both go through the same places: b rows of `batch`, token i of each
        for (rows, places, logits_p), (_, _, logits_q) in zip(by_target, by_draft, strict=True):
            histories = _histories(batch, rows, places) if sampler.needs_history else ()
            p = sampler.law(logits_p, histories)
            q = sampler.law(ids.to_target(logits_q.to(logits_p.device)), histories)
            found = overlap(p, q).cpu().numpy()
            for b, i, beta in zip(rows.tolist(), places.tolist(), found.tolist(), strict=True):
                out[numbers[b]][i] = beta
    return out


def overlap(p: Law, q: Law) -> Tensor:
    """[R] float64: sum_v min(p, q), the probability that a draw from q is accepted."""
    q_RK = q.probs()
    if p.ids_RK is not None:  # where p has nothing the minimum is 0
        q_RK = q_RK.gather(1, p.ids_RK)
    return torch.minimum(p.probs_RK, q_RK).sum(-1, dtype=torch.float64).clamp(max=1.0)


def shared_vocabulary(draft: Target, target: Target) -> Vocabularies:
    """How the ids of a draft model correspond to the target's, padding apart.

    Raises:
        InputError: they have other tokens, so that no law of one is a law of the other.
    """
    if not same_tokens(draft.tokenizer, target.tokenizer):
        raise InputError(
            f"{draft.name} and {target.name} have different tokenizers, so their laws cannot be "
            "compared token by token: measure such a draft by decoding (draftsmith bench)."
        )
    return padded(draft.vocab_size, target.vocab_size)


# --------------------------------------------------------------------------- laws, piece by piece


def _logits(
    model: Target,
    batch: Sequence[Trajectory],
    columns: int,
    to_model: Callable[[Tensor], Tensor],
) -> Iterator[tuple[np.ndarray, np.ndarray, Tensor]]:
    """(rows [R], places [R], logits [R, V]) of the tokens of all continuations, piece by piece.

    fed before       p0 p1                                             no logits
    then in pieces         [p2 y0 .. ] [.. ]      logits behind them:  laws of y0 y1 ..
    """
    texts = [to_model(torch.tensor([*one.prompt, *one.tokens[:-1]])) for one in batch]
    begin = np.array([len(one.prompt) - 1 for one in batch])
    cache = model.new_cache(len(batch), max(len(text) for text in texts))
    while (cache.lengths_B < begin).any():
        stop = np.minimum(begin, cache.lengths_B + CHUNK)
        _feed(model, cache, texts, stop, keep=1)
    ends = np.array([len(text) for text in texts])
    while (cache.lengths_B < ends).any():
        first = cache.lengths_B - begin
        stop = np.minimum(ends, cache.lengths_B + columns)
        counts = stop - cache.lengths_B
        logits_BKV = _feed(model, cache, texts, stop, keep=int(counts.max()))
        rows = np.repeat(np.arange(len(batch)), counts)
        step = np.concatenate([np.arange(count) for count in counts])
        # a row's tokens stand at the right end of the piece
        column = logits_BKV.shape[1] - counts[rows] + step
        yield rows, first[rows] + step, logits_BKV[torch.from_numpy(rows), torch.from_numpy(column)]


def _feed(
    model: Target, cache: KVCache, texts: Sequence[Tensor], stop: np.ndarray, *, keep: int
) -> Tensor:
    """Feed each row up to `stop` and commit it; logits behind the last `keep` columns."""
    pieces = [
        text[have:upto].tolist()
        for text, have, upto in zip(texts, cache.lengths_B, stop, strict=True)
    ]
    tokens, block = lay_out(cache, pieces)
    logits = model.forward(torch.from_numpy(tokens), block, keep, Signals()).logits_BNV
    cache.commit(np.array([len(piece) for piece in pieces]))
    return logits


def _histories(batch: Sequence[Trajectory], rows: np.ndarray, places: np.ndarray) -> list[History]:
    return [
        History(tokens=(*batch[b].prompt, *batch[b].tokens[:i]), num_prompt=len(batch[b].prompt))
        for b, i in zip(rows.tolist(), places.tolist(), strict=True)
    ]


def _check(one: Trajectory, target: Target, draft: Target) -> None:
    if not one.prompt:
        raise InputError(f"Prompt {one.prompt_id} is empty: give at least one token.")
    length = len(one.prompt) + len(one.tokens) - 1
    for model in (target, draft):
        if model.max_length is not None and length > model.max_length:
            raise InputError(
                f"Prompt {one.prompt_id} has {length} tokens with its continuation, but "
                f"{model.name} has a context of {model.max_length}: leave it out or shorten it."
            )
    outside = [t for t in (*one.prompt, *one.tokens) if not 0 <= t < target.vocab_size]
    if outside:
        raise InputError(
            f"Prompt {one.prompt_id} holds token {outside[0]}, outside the target's vocabulary of "
            f"{target.vocab_size}: it was made with another tokenizer."
        )
