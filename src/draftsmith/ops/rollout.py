"""Attention of a drafter that is trained on its own outputs, all chains of a text at once.

In step j the query at t is the (j+1)-th draft below position t. It sees what the text really held
up to t (keys of step 0), and the earlier drafts of its own chain (keys of steps 1 .. j at the same
place t):

    text   k0[0] k0[1] .. k0[t]     drafts   k1[t] k2[t] .. kj[t]        one softmax over all

(HASS, arXiv 2408.15766; training-time test of EAGLE-3, arXiv 2503.01840.) The drafts are n single
columns per query, so memory is O(T n): no T x T matrix is written, and none is kept for backward.

Shape letters: B rows, H heads, T time, D width of a head, J earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attend_rollout_reference(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    allowed_BTT: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The readable twin: all scores written out. `allowed_BTT`: which text columns are seen."""
    scores = (query_BHTD @ key_BHTD.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~allowed_BTT[:, None], -torch.inf)
    own = [(query_BHTD * key).sum(-1, keepdim=True) * scale for key in own_keys]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1)
    out = weights[..., : key_BHTD.shape[2]] @ value_BHTD
    for j, value in enumerate(own_values):
        out = out + weights[..., key_BHTD.shape[2] + j, None] * value
    return out


def attend_rollout(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    allowed_BTT: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """The same by torch's fused kernel. `allowed_BTT` None: causal, which is cheaper than a mask.

    Keys and values have as many heads as the query.
    """
    own = [*own_keys, *own_values]
    out: Tensor = _Rollout.apply(query_BHTD, key_BHTD, value_BHTD, allowed_BTT, scale, *own)
    return out


class _Rollout(torch.autograd.Function):
    """Two softmaxes are one when both know the other's sum:

        o = w o_text + sum_j p_j v_j,   w = exp(lse_text - lse),  p_j = exp(s_j - lse)

    Backward, the fused kernel is given the output and the log-sum-exp of the whole: then its
    exp(s - lse) and its row sums are those of the one softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed_BTT: Tensor | None,
        scale: float,
        *own: Tensor,
    ) -> Tensor:
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        mask = None
        if allowed_BTT is not None:
            mask = torch.zeros(allowed_BTT.shape, dtype=query.dtype, device=query.device)
            mask = mask.masked_fill_(~allowed_BTT, -torch.inf)[:, None]
        text, lse_text = _forward(query, key, value, mask, scale)
        wide = lse_text.dtype
        scores = [(query.to(wide) * one.to(wide)).sum(-1) * scale for one in keys]
        lse = torch.stack([lse_text, *scores]).logsumexp(0)
        out = text.to(wide) * (lse_text - lse).exp()[..., None]
        for score, one in zip(scores, values, strict=True):
            out = out + (score - lse).exp()[..., None] * one.to(wide)
        out = out.to(query.dtype)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, mask, out, lse, *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask, out, lse, *own = ctx.saved_tensors
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        scale, wide = ctx.scale, lse.dtype
        grad = grad.contiguous()
        dq, dk, dv = _backward(grad, query, key, value, out, lse, mask, scale)
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
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp [B, H, T]) of the text columns."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, 0.0, mask is None, scale=scale
    )
    return out, lse[..., : query.shape[2]]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        return dq, dk, dv
    nothing = torch.zeros((), dtype=torch.int64, device=query.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        query,
        key,
        value,
        mask,
        out,
        lse,
        nothing,
        nothing,
        0.0,
        [True, True, True, False],
        mask is None,
        scale=scale,
    )
    return dq, dk, dv
