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
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.config import require
from draftsmith.core.law import Law
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.speedup import predicted_speedup, tokens_per_step
from draftsmith.core.types import Signals
from draftsmith.distill.trajectories.teacher import feed
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.tree_growth import Vocabularies
from draftsmith.drafters.vocabulary import padded, same_tokens
from draftsmith.errors import InputError
from draftsmith.targets.base import CHUNK, Target

Betas = NDArray[np.float64]


AT_ONE = Sampler(temperature=1.0)
MAX_LOGITS = 1 << 24
"""Logits of one model that exist at once (some copies of as many are made)."""


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
    by_language: dict[str, float]
    """`alpha` of each language, in order of first appearance; texts without one are left out."""
    by_tag: dict[str, float]
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

        def predicted(alpha: float) -> dict[str, float | None]:
            tau = None if gamma is None else float(tokens_per_step(alpha, gamma))
            return {"alpha": alpha, "tau_predicted": tau}

        whole, speedup = predicted(self.alpha), None
        tau = whole["tau_predicted"]
        if tau is not None and gamma is not None and cost_ratio is not None:
            speedup = float(predicted_speedup(tau, gamma, cost_ratio))
        return {
            **whole,
            "alpha_per_prompt": self.alpha_per_prompt,
            "alpha_sequence": self.alpha_sequence,
            "gamma": gamma,
            "speedup_predicted": speedup,
            "decoding_temperature": self.temperature,
            "by_language": {name: predicted(alpha) for name, alpha in self.by_language.items()},
            "by_tag": {name: predicted(alpha) for name, alpha in self.by_tag.items()},
        }


def measure_acceptance(
    target: Target,
    draft: Target,
    trajectories: Sequence[Trajectory],
    sampler: Sampler = AT_ONE,
    *,
    batch_size: int = 8,
    vocabularies: Vocabularies | None = None,
) -> AcceptanceReport:
    """Expected acceptance of a draft model on continuations of prompts.

    Args:
        trajectories: prompts and continuations; for alpha as decoding has it, drawn from the target
            in the way that `sampler` says.
        sampler: how both turn logits into laws when they decode.
        batch_size: continuations that are scored together.
        vocabularies: how the ids of both correspond; None: they are the same,
            padding apart.

    Raises:
        InputError: nothing to measure, a text that does not fit, or vocabularies that differ.
    """
    betas = expected_acceptance(
        target, draft, trajectories, sampler, batch_size=batch_size, vocabularies=vocabularies
    )
    texts = pd.DataFrame(
        {
            "prompt": [one.prompt_id for one in trajectories],
            "language": [one.language for one in trajectories],
            "tag": [one.tag for one in trajectories],
            "accepted": [float(beta.sum()) for beta in betas],
            "tokens": [len(beta) for beta in betas],
        }
    ).query("tokens > 0")
    if texts.empty:
        raise InputError("There is no continuation to measure acceptance on.")

    def alpha_by(kind: str) -> pd.Series[float]:
        sums = texts.groupby(kind, sort=False)[["accepted", "tokens"]].sum()
        return sums["accepted"] / sums["tokens"]

    means = (texts["accepted"] / texts["tokens"]).groupby(texts["prompt"]).mean()
    return AcceptanceReport(
        tokens=int(texts["tokens"].sum()),
        prompts=len(means),
        alpha=float(texts["accepted"].sum() / texts["tokens"].sum()),
        alpha_per_prompt=float(means.mean()),
        alpha_sequence=float(alpha_by("prompt").mean()),
        by_language=alpha_by("language").to_dict(),
        by_tag=alpha_by("tag").to_dict(),
        temperature=sampler.temperature,
    )


@torch.inference_mode()
def expected_acceptance(
    target: Target,
    draft: Target,
    trajectories: Sequence[Trajectory],
    sampler: Sampler = AT_ONE,
    *,
    batch_size: int = 8,
    vocabularies: Vocabularies | None = None,
) -> list[Betas]:
    """Per trajectory, beta at each of its tokens. As `measure_acceptance`, without the summing."""
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    width = max(target.vocab_size, draft.vocab_size)
    ids = vocabularies or padded(draft.vocab_size, target.vocab_size)
    if vocabularies is None and not same_tokens(draft.tokenizer, target.tokenizer):
        raise InputError(
            f"{draft.name} and {target.name} have different tokenizers, so their laws cannot be "
            "compared token by token: measure such a draft by decoding (draftsmith bench)."
        )
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
            q = sampler.law(ids.to_target(logits_q.to(logits_p.device), -torch.inf), histories)
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
    texts = [to_model(torch.tensor([*one.prompt, *one.tokens[:-1]])).tolist() for one in batch]
    cache = model.new_cache(len(batch), max(map(len, texts)))
    begin = [len(one.prompt) - 1 for one in batch]
    before = [text[:start] for text, start in zip(texts, begin, strict=True)]
    for _ in feed(model, cache, before, 1, CHUNK, Signals()):
        pass
    rest = [text[start:] for text, start in zip(texts, begin, strict=True)]
    done = 0
    for pieces, out in feed(model, cache, rest, columns, columns, Signals()):
        counts = np.array([len(piece) for piece in pieces])
        rows = np.repeat(np.arange(len(batch)), counts)
        step = np.concatenate([np.arange(count) for count in counts])
        # a row's tokens stand at the right end of the piece
        column = out.logits_BNV.shape[1] - counts[rows] + step
        yield rows, done + step, out.logits_BNV[torch.from_numpy(rows), torch.from_numpy(column)]
        done += columns


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
