"""The teacher's logprobs at temperature 1: read from logits, or by a forward over known texts.

Shape letters: B rows, R laws, T time, K top-k, V vocabulary, S signals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.sampling import highest
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.errors import BackendError, InputError
from draftsmith.targets import base
from draftsmith.targets.base import Target

LOGITS_AT_ONCE = 1 << 24
"""Numbers of [B, T, V] that a forward over a text may return: a long one goes in pieces."""


@dataclass(slots=True)
class TeacherCost:
    """What was asked of the teacher, so that studies compare at equal cost."""

    forwards: int = 0
    tokens: int = 0
    """Positions computed: prompts, continuations, beams, drafts. Padding is not counted."""

    def add(self, tokens: int) -> None:
        """One forward of this many tokens."""
        self.forwards += 1
        self.tokens += tokens


def stable_top(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row, downwards, and their columns, in one order of ties."""
    values_RK, ids_RK = highest(scores_RV, k)
    return values_RK[:, :k], ids_RK[:, :k]


def log_mass(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in float32 or wider, and [R, 1] what to subtract for log-probabilities.

    Raises:
        BackendError: a row holds NaN, or no finite logit at all.
    """
    wide_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    total_R1 = wide_RV.logsumexp(-1, keepdim=True)
    if not all(map(math.isfinite, total_R1[:, 0].tolist())):
        raise BackendError(
            "The teacher's logits hold NaN or no finite value: its weights or dtype are broken "
            "(try --dtype float32)."
        )
    return wide_RV, total_R1


def read_logprobs(
    logits_RV: Tensor, tokens: Sequence[int], top_k: int | None
) -> tuple[TopK, NDArray[np.float64]]:
    """The logprobs of each row's best tokens, and those of `tokens`.

    Args:
        tokens: one per row.
        top_k: how many tokens of a row are kept; None: all.
    """
    wide_RV, total_R1 = log_mass(logits_RV)
    tokens_R1 = torch.tensor(tokens, device=wide_RV.device)[:, None]
    token_log_p_R = (wide_RV.gather(1, tokens_R1) - total_R1)[:, 0]
    if top_k is None:
        ids = np.broadcast_to(np.arange(wide_RV.shape[1], dtype=np.int32), wide_RV.shape)
        values_RK = wide_RV
    else:
        _, ids_RK = stable_top(wide_RV, top_k)
        ids_RK = ids_RK.sort(dim=-1).values
        values_RK = wide_RV.gather(1, ids_RK)
        ids = ids_RK.to(torch.int32).cpu().numpy()
    log_p_RK = (values_RK - total_R1).float().cpu().numpy()
    return TopK(ids_NK=ids, log_p_NK=log_p_RK), token_log_p_R.double().cpu().numpy()


def captured_signals(out: TargetOutput, name: str) -> Tensor:
    """The signals of a forward of the target of this name.

    Raises:
        InputError: it has none.
    """
    if out.signals_BTS is None:
        raise InputError(f"{name} has no hidden states to keep: leave `signals` empty.")
    return out.signals_BTS


@torch.inference_mode()
def score_texts(
    target: Target,
    texts: Sequence[Trajectory],
    *,
    top_k: int | None,
    signals: Signals,
    cost: TeacherCost,
) -> list[Trajectory]:
    """The texts with the teacher's logprobs, scores and signals, in one ragged batch of forwards.

    fed         p0 p1 | p2 y0 y1 (#)        up to the bar without logits, once for equal prompts
    logprobs            l0 l1 l2            the last token is fed for its signals alone

    Raises:
        InputError: the target has no such signals.
    """
    captures = signals != Signals()
    prompts = list(dict.fromkeys(text.prompt for text in texts))
    owner = [prompts.index(text.prompt) for text in texts]
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    cache = target.new_cache(len(prompts), longest)
    captured: list[list[Tensor]] = [[] for _ in prompts]

    def read(
        rows: Sequence[Sequence[int]], keep: int, piece: int
    ) -> Iterator[tuple[list[list[int]], Tensor]]:
        """Feed rows, and keep the signals of what was fed (short rows stand on the right)."""
        for pieces, out in feed(target, cache, rows, keep, piece, signals):
            cost.add(sum(map(len, pieces)))
            if captures:
                signals_BTS = captured_signals(out, target.name)
                for b, fed in enumerate(pieces):
                    if fed:
                        captured[b].append(signals_BTS[b, -len(fed) :].float().cpu())
            yield pieces, out.logits_BNV

    for _ in read([prompt[:-1] for prompt in prompts], 1, base.CHUNK):
        pass
    if owner != list(range(len(prompts))):
        cache.take(owner)
    captured = [list(captured[i]) for i in owner]
    found: list[list[tuple[TopK, NDArray[np.float64]]]] = [[] for _ in texts]
    rest = [(t.prompt[-1], *(t.tokens if captures else t.tokens[:-1])) for t in texts]
    piece = max(1, LOGITS_AT_ONCE // (len(texts) * target.vocab_size))
    done = 0
    for pieces, logits_BNV in read(rest, piece, min(piece, base.CHUNK)):
        for b, fed in enumerate(pieces):
            tokens = texts[b].tokens[done : done + len(fed)]
            if tokens:  # the row's own logits stand on the right; behind the last token: none
                at = logits_BNV.shape[1] - len(fed)
                logits_NV = logits_BNV[b, at : at + len(tokens)]
                found[b].append(read_logprobs(logits_NV, tokens, top_k))
        done += max(map(len, pieces))
    scored = []
    for text, parts, states in zip(texts, found, captured, strict=True):
        tops, token_log_p = zip(*parts, strict=True)
        scored.append(
            replace(
                text,
                top=TopK.cat(tops),
                score=float(np.concatenate(token_log_p).sum()),
                features=torch.cat(states).numpy() if captures else None,
            )
        )
    return scored


def feed(
    target: Target,
    cache: KVCache,
    rows: Sequence[Sequence[int]],
    keep: int,
    piece: int,
    signals: Signals,
) -> Iterator[tuple[list[list[int]], TargetOutput]]:
    """Feed and commit rows of unequal lengths, `piece` tokens of each at a time."""
    for start in range(0, max(map(len, rows)), piece):
        pieces = [list(row[start : start + piece]) for row in rows]
        tokens_BT, block = lay_out(cache, pieces)
        out = target.forward(
            torch.from_numpy(tokens_BT), block, min(keep, tokens_BT.shape[1]), signals
        )
        cache.commit(np.array([len(fed) for fed in pieces]))
        yield pieces, out
