"""Training on one's own outputs: the chains below all positions of a text, one step at a time.

In step j, place t stands for the (j+1)-th draft below position t:

    step      reads                                gives
    0         f_t, x_{t+1}                         g1_t like f_{t+1}, and the law of x_{t+2}
    1         g1_t, x_{t+2} at position t + 1      g2_t like f_{t+2}, and the law of x_{t+3}
    j         gj_t, x_{t+1+j} at position t + j    ..., and the law of x_{t+2+j}

Tokens are those of the text, unless a drafter replaces them (`fed_BT`). HASS (arXiv 2408.15766)
writes the same in natural coordinates (place t + j). Its attention, and that of EAGLE-3's
training-time test (arXiv 2503.01840), sees what the text really held up to t (keys of step 0), and
the earlier drafts of its own chain (keys of steps 1 .. j at the same place t):

    text   k0[0] k0[1] .. k0[t]     drafts   k1[t] k2[t] .. kj[t]        one softmax over all

Shape letters: B rows, H heads, T time, D width of a head, J earlier steps; in chunks R places of T
look at the first S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.base import TargetView
from draftsmith.drafters.hidden.network import PairNetwork
from draftsmith.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Where the chains of all places stand before step `step`."""

    step: int
    feature_BTH: Tensor
    """What the network goes on with."""
    keys_and_values: tuple[Tensor, ...] = ()
    """One entry per step so far; step 0 is the text's."""
    survived_BT: Tensor | None = None
    """Chains that a drafter still follows (GRIFFIN); None: all."""
    fed_BT: Tensor | None = None
    """Tokens that the next step reads; None: the text's."""
    official: bool = False
    """Attention leaks as in the released code (`attend_rollout_official`)."""


def begin(batch: TrajectoryBatch, noise: float) -> Rollout:
    """The text's own features, with the published noise: uniform, of width noise * 512 / length of
    the text. The batch's, which are imitated, stay as they are.

    Raises:
        InputError: the batch has no features.
    """
    if batch.features_BTS is None:
        raise InputError(
            "these trajectories hold no hidden states: collect them with --features last, or let "
            "the target compute them with --laws teacher"
        )
    feature_BTS = batch.features_BTS
    if noise:
        wide = torch.promote_types(feature_BTS.dtype, torch.float32)
        shift = torch.rand_like(feature_BTS, dtype=wide) - 0.5
        width_BT1 = noise * 512 / text_lengths(batch)[..., None]
        feature_BTS = (feature_BTS + shift * width_BT1).to(feature_BTS.dtype)
    return Rollout(step=0, feature_BTH=feature_BTS)


def advance(
    network: PairNetwork,
    target: TargetView,
    batch: TrajectoryBatch,
    now: Rollout,
    *,
    keep: bool = True,
) -> tuple[DraftPrediction, Rollout]:
    """One step of all chains; what comes back in the roll-out still has its gradient.

    `keep` False: what the network computes on its way is computed again in the backward pass, so
    that only one step's is in memory at a time.
    """
    own, documents_BT = now.step, batch.documents_BT
    fed_BT = batch.tokens_ahead(1 + own) if now.fed_BT is None else now.fed_BT
    positions_BT = batch.positions_BT
    attention = attend_rollout
    if now.official:
        dots_BT = (text_lengths(batch) - 1 - positions_BT - own).clamp(min=0)
        attention = partial(attend_rollout_official, dots_BT=dots_BT)

    def step(feature_BTH: Tensor, *earlier: Tensor) -> tuple[Tensor, ...]:
        made: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            made.extend((k, v))
            groups = q.shape[1] // k.shape[1]
            wide = [one.repeat_interleave(groups, 1) for one in (*earlier, k, v)]
            keys, values = wide[::2], wide[1::2]
            scale = q.shape[-1] ** -0.5
            return attention(q, keys[0], values[0], keys[1:], values[1:], documents_BT, scale=scale)

        with torch.no_grad():
            embedded_BTH = target.embed(fed_BT)
        return *network(embedded_BTH, feature_BTH, positions_BT + own, attend), *made

    inputs = (now.feature_BTH, *now.keys_and_values)
    if keep:
        predict, regress, *made = step(*inputs)
    else:
        predict, regress, *made = checkpoint(
            step, *inputs, use_reentrant=False, preserve_rng_state=False
        )
    prediction = DraftPrediction(
        hidden_BTH=predict,
        mask_BT=torch.ones_like(fed_BT, dtype=torch.bool),
        ahead=2 + own,
        feature_BTH=regress,
    )
    after = replace(
        now,
        step=own + 1,
        feature_BTH=regress,
        keys_and_values=(*now.keys_and_values, *made),
    )
    return prediction, after


def text_lengths(batch: TrajectoryBatch) -> Tensor:
    """[B, T]: tokens of the text that each place is in, up to the last one that counts (behind it
    stands the separator of a block); all places of a document where none counts."""
    documents_BT, count_BT = batch.documents_BT, batch.positions_BT + 1
    if documents_BT is None:
        documents_BT = torch.zeros_like(batch.tokens_BT)
    none = torch.zeros_like(documents_BT)
    places, ends = (
        none.scatter_reduce(1, documents_BT, one, "amax")
        for one in (count_BT, count_BT * batch.loss_mask_BT.bool())
    )
    return torch.where(ends > 0, ends, places).gather(1, documents_BT)


FUSED = ("cpu",)
"""Devices whose fused kernel is used, which takes the log-sum-exp of the whole as it stands."""
CHUNK = 256
"""Rows of scores that are written at a time elsewhere."""


def attend_rollout(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    documents_BT: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """One softmax over the text's columns and the place's own drafts, with no matrix of all scores:
    the drafts are J single columns per query, so memory is O(T J), also for backward. On a CPU
    torch's fused kernel reads the text, elsewhere some rows of scores at a time are written.

    `documents_BT`: number of the text that a place is in, out of which it does not look; None: one
    text per row. A text's places stand side by side. Keys and values have as many heads as the
    query.
    """
    own = [*own_keys, *own_values]
    out: Tensor = _Rollout.apply(query_BHTD, key_BHTD, value_BHTD, documents_BT, scale, *own)
    return out


class _Rollout(torch.autograd.Function):
    """Two softmaxes are one when both know the other's sum:

        o = w o_text + sum_j p_j v_j,   w = exp(lse_text - lse),  p_j = exp(s_j - lse)

    Backward, the kernel of the text is given the output and the log-sum-exp of the whole: then its
    exp(s - lse) and its row sums are those of the one softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents_BT: Tensor | None,
        scale: float,
        *own: Tensor,
    ) -> Tensor:
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        text, lse_text = _forward(query, key, value, documents_BT, scale)
        wide = lse_text.dtype
        scores = [(query.to(wide) * one.to(wide)).sum(-1) * scale for one in keys]
        lse = torch.stack([lse_text, *scores]).logsumexp(0)
        out = text.to(wide) * (lse_text - lse).exp()[..., None]
        for score, one in zip(scores, values, strict=True):
            out = out + (score - lse).exp()[..., None] * one.to(wide)
        out = out.to(query.dtype)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, documents_BT, out, lse, *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, documents_BT, out, lse, *own = ctx.saved_tensors
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        scale, wide = ctx.scale, lse.dtype
        grad = grad.contiguous()
        dq, dk, dv = _backward(grad, query, key, value, out, lse, documents_BT, scale)
        dq = dq.to(wide)
        share = (grad.to(wide) * out.to(wide)).sum(-1)
        own_dk, own_dv = [], []
        for one, other in zip(keys, values, strict=True):
            weight = ((query.to(wide) * one.to(wide)).sum(-1) * scale - lse).exp()
            slope = weight * ((grad.to(wide) * other.to(wide)).sum(-1) - share) * scale
            dq = dq + slope[..., None] * one.to(wide)
            own_dk.append((slope[..., None] * query.to(wide)).to(query.dtype))
            own_dv.append((weight[..., None] * grad.to(wide)).to(query.dtype))
        return (dq.to(query.dtype), dk, dv, None, None, *own_dk, *own_dv)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, documents_BT: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp [B, H, T]) of the text columns."""
    out = torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
    if query.device.type in FUSED:
        for part in _texts(documents_BT):
            out[part], lse[part] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[part], key[part], value[part], 0.0, True, scale=scale
            )
        return out, lse
    key, value = key.to(wide), value.to(wide)
    with torch.autocast(query.device.type, enabled=False):  # it would round the scores again
        for rows, seen in _chunks(query.shape[2]):
            scores = _scores(query[:, :, rows].to(wide), key[:, :, seen], documents_BT, rows, scale)
            lse[:, :, rows] = scores.logsumexp(-1)
            out[:, :, rows] = (scores.softmax(-1) @ value[:, :, seen]).to(out.dtype)
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    documents_BT: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type in FUSED:
        dq, dk, dv = (torch.empty_like(one) for one in (query, key, value))
        for part in _texts(documents_BT):
            dq[part], dk[part], dv[part] = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(one[part] for one in (grad, query, key, value, out, lse)),
                    0.0,
                    True,
                    scale=scale,
                )
            )
        return dq, dk, dv
    grad, out, q, k, v = (one.to(lse.dtype) for one in (grad, out, query, key, value))
    share = (grad * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    with torch.autocast(query.device.type, enabled=False):
        for rows, seen in _chunks(query.shape[2]):
            some = (slice(None), slice(None), rows)
            scores = _scores(q[some], k[:, :, seen], documents_BT, rows, scale)
            weights = (scores - lse[some][..., None]).exp()
            slopes = weights * (grad[some] @ v[:, :, seen].mT - share[some]) * scale
            dq[some] = slopes @ k[:, :, seen]
            dk[:, :, seen] += slopes.mT @ q[some]
            dv[:, :, seen] += weights.mT @ grad[some]
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _chunks(length: int) -> Iterator[tuple[slice, slice]]:
    """Some places, and the places that one of them may look at."""
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        yield slice(start, end), slice(end)


def _scores(
    query_BHRD: Tensor,
    key_BHSD: Tensor,
    documents_BT: Tensor | None,
    rows: slice,
    scale: float,
) -> Tensor:
    """[B, H, R, S]: of some places; minus infinity where they do not look."""
    count, seen = query_BHRD.shape[2], key_BHSD.shape[2]
    looks = torch.ones(1, count, seen, dtype=torch.bool, device=query_BHRD.device)
    looks = looks.tril(seen - count)
    if documents_BT is not None:
        looks = looks & (documents_BT[:, rows, None] == documents_BT[:, None, :seen])
    scores = (query_BHRD @ key_BHSD.mT) * scale
    return scores.masked_fill_(~looks[:, None], -torch.inf)


def _texts(documents_BT: Tensor | None) -> list[tuple[slice, slice, slice]]:
    """Rows, heads and places of each text: on a CPU the kernel runs text by text, in which all look
    back, and so needs no mask and computes nothing that one would hide."""
    everything = slice(None)
    if documents_BT is None:
        return [(everything, everything, everything)]
    parts = []
    for row, documents_T in enumerate(documents_BT):
        _, sizes = documents_T.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            parts.append((slice(row, row + 1), everything, slice(start, end)))
    return parts


def attend_rollout_official(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    documents_BT: Tensor | None,
    dots_BT: Tensor,
    *,
    scale: float,
) -> Tensor:
    """As `attend_rollout`, leaking as in the released training code of HASS and GRIFFIN: for parity
    with what that code learns. It writes T x T scores out.

    `dots_BT`: columns of logit 0 that take weight and give no value. Forward n = j + 1 of the
    released code reads feature sets 0 (the target's) .. j (drafts of drafts) in natural
    coordinates, query pair t and key pair s. Scores are multiplied by 0/1 masks that choose the
    set, and summed; the softmax runs over all T columns, and its weights are multiplied by the
    masks again. A column that is in no mask has logit 0 instead of -inf: it takes the weight exp(0)
    and gives no value, so the weights that count sum to less than 1. Forward 3 of a text of five
    pairs:

        natural    s 0 1 2 3 4     place of step 2
        t = 0        2 . . . .     none: this chain would begin before the text
            1        1 2 . . .     none
            2        0 1 2 . .     0   text at 0,       its drafts of steps 1, 2; leaks to 2
            3        0 0 1 2 .     1   text at 0, 1,    its drafts of steps 1, 2; leaks to 1
            4        0 0 0 1 2     2   text at 0, 1, 2, its drafts of steps 1, 2; no leak
        5, 6: not in the text      3, 4   these never count

    A digit is the set whose key is seen there, a dot a column that is in no mask. Natural pair t is
    our place t - j of step j: set i at s is the draft of step i of the chain from s - i, and every
    chain that a row reads is its own. So our row is that of `attend_rollout` and one column more
    that stands for all dots, with the logarithm of their number as its logit and no value; place t
    of step j has T - (t + j + 1) dots. Rows without a place are read by no other row. (The released
    code learns from them, too, if the first pairs of a text count, which in a chat are the
    template's.)

    T is the text's own length, as if every text stood alone in its batch. The released code pads
    texts to the longest of a batch, where padding leaks like the rest.
    """
    scores = _scores(query_BHTD, key_BHTD, documents_BT, slice(None), scale)
    wide = torch.promote_types(scores.dtype, torch.float32)
    own = [(query_BHTD * key).sum(-1, keepdim=True) * scale for key in own_keys]
    leak = dots_BT.to(wide).log()[:, None, :, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([torch.cat([scores, *own], -1).to(wide), leak], -1).softmax(-1)
    text, *drafts = weights.to(query_BHTD.dtype).split([scores.shape[-1], *[1] * len(own), 1], -1)
    out = text @ value_BHTD
    for weight, value in zip(drafts, own_values, strict=False):  # the last weight is the leak
        out = out + weight * value
    return out
