"""Tree attention over our cache, registered once through transformers' AttentionInterface.

Masks travel as a keyword (the step's `Block`), so no model's own mask code runs: Mistral, Mixtral
and Phi-3 would otherwise take a 4-D mask and forget their window, Gemma 2 under sdpa would lose its
soft-cap, and eager with boolean masks would be silently wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.core.cache import Block
from draftsmith.errors import BackendError, UnsupportedModel

NAME = "draftsmith"
"""The attention implementation's name inside transformers."""

_AROUND = threading.local()
_FEW = 16
"""Tokens up to which heads that share keys are stacked (a longer prompt gains nothing)."""

# What models pass along that does not change the mathematics here.
_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "use_cache",
        "cache_position",
        "return_dict",
        "head_mask",
        "logits_to_keep",
        "num_items_in_batch",
        "token_type_ids",
        "past_key_values",
        "mm_token_type_ids",
        "deterministic",
    }
)


def attend_reference(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    mask_B1TS: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k^T scale) + mask) v, written out; [B, H, T, D]. The readable twin."""
    groups = query_BHTD.shape[1] // key_BHSD.shape[1]
    key = key_BHSD.repeat_interleave(groups, 1)
    value = value_BHSD.repeat_interleave(groups, 1)
    wide = torch.promote_types(query_BHTD.dtype, torch.float32)
    scores = (query_BHTD @ key.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask_B1TS
    if sinks_H is not None:  # a learned logit that takes mass and gives no value
        sink = sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)
        weights = torch.cat([scores, sink], -1).softmax(-1, dtype=wide)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=wide)
    return weights.to(query_BHTD.dtype) @ value


def attend_fused(
    query_BHTD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, mask_B1TS: Tensor, *, scale: float
) -> Tensor:
    """The same by torch's fused kernel (no soft-cap, no sinks).

    Few tokens and grouped heads: the heads that share keys become rows of one query, which the
    kernel takes 2 to 6 times faster than `enable_gqa` (it reads the keys once per group):

        heads 0 1 | 2 3      t0 t1 of head 0, t0 t1 of head 1      -> 4 rows on shared keys 0
        share keys 0 | 1     t0 t1 of head 2, t0 t1 of head 3      -> 4 rows on shared keys 1
    """
    rows, heads, tokens, width = query_BHTD.shape
    shared = key_BHSD.shape[1]
    groups = heads // shared
    grouped = groups > 1
    if grouped and tokens <= _FEW:
        query = query_BHTD.reshape(rows, shared, groups * tokens, width)
        mask = mask_B1TS if tokens == 1 else mask_B1TS.repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(query, key_BHSD, value_BHSD, mask, scale=scale)
        return out.reshape(rows, heads, tokens, -1)
    if grouped and query_BHTD.device.type != "cpu":  # with a mask only the slow kernel knows groups
        key_BHSD = key_BHSD.repeat_interleave(groups, 1)
        value_BHSD = value_BHSD.repeat_interleave(groups, 1)
        grouped = False
    query, single = query_BHTD, tokens == 1 and query_BHTD.dtype == torch.bfloat16
    if single and query.device.type == "cpu":  # one bfloat16 row takes 2 to 3 times as long as two
        query = torch.cat((query, query), 2)
    out = F.scaled_dot_product_attention(
        query, key_BHSD, value_BHSD, mask_B1TS, scale=scale, enable_gqa=grouped
    )
    return out[:, :, :tokens]


def attend_by_branches(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query_1HTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    block: Block,
    window: int | None,
) -> Tensor:
    """All queries over the keys of one branch after the other, each by a call of one shape; every
    token keeps what its own branch gave."""
    out: Tensor | None = None
    for branch in block.branches:
        mask = branch.mask(window, block.view, query_1HTD)
        given = attend(query_1HTD, branch.of(key_BHSD), branch.of(value_BHSD), mask)
        if out is None:
            out = given
        else:
            out[:, :, branch.tokens] = given[:, :, branch.tokens]
    assert out is not None
    return out


def draftsmith_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    draftsmith_block: Block | None = None,
    draftsmith_windows: Sequence[int | None] = (),
    **rest: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call; [B, T, H, D] back.

    The window is the one that was found at loading (`draftsmith_windows`, per layer), not the
    keyword: some models mask with a window and pass none, or pass one and mask without.

    Raises:
        UnsupportedModel: the model passes something to attention that would change the result.
    """
    block, windows, layer = draftsmith_block, draftsmith_windows, module.layer_idx
    if block is None:
        block, windows = around(module)
    refuse_unknown(module, rest)
    assert isinstance(layer, int)
    keys, values = block.cache.extend(block, layer, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if block.eager or softcap is not None or s_aux is not None:
        attend = partial(attend_reference, scale=scale, softcap=softcap, sinks_H=s_aux)
    else:
        attend = partial(attend_fused, scale=scale)
    if block.branches:
        out = attend_by_branches(attend, query, keys, values, block, windows[layer])
        return out.transpose(1, 2).contiguous(), None
    mask = block.mask(windows[layer], query.dtype)
    if mask.shape[2] != query.shape[2]:  # Gemma 4: layers that share keys run the last tokens only
        mask = mask[:, :, -query.shape[2] :]
    out = attend(query, keys, values, mask)
    return out.transpose(1, 2).contiguous(), None


def refuse_unknown(module: nn.Module, given: dict[str, Any]) -> None:
    """Refuse a model that passes more to attention than draftsmith understands.

    Raises:
        UnsupportedModel: naming the attention class and what it passes.
    """
    for name in given.keys() - _HARMLESS:
        if given[name] is not None and given[name] is not False:
            raise UnsupportedModel(
                f"{type(module).__name__} passes {name!r} to its attention, which draftsmith does "
                "not know: its output would be wrong, so this architecture is refused."
            )


@contextmanager
def ambient(block: object, windows: Sequence[int | None] = ()) -> Iterator[None]:
    """Lay the block beside the forward, for models that do not pass keywords on to attention."""
    _AROUND.block, _AROUND.windows = block, windows
    try:
        yield
    finally:
        del _AROUND.block, _AROUND.windows


def around(module: nn.Module) -> tuple[Any, Sequence[int | None]]:
    """What `ambient` laid there.

    Raises:
        BackendError: nothing lies there: someone runs the bare model of a target.
    """
    if not hasattr(_AROUND, "block"):
        raise BackendError(
            f"{type(module).__name__} was called outside draftsmith's decoding; to run the model "
            "by itself, use `with target.native() as model:`."
        )
    return _AROUND.block, _AROUND.windows


def register() -> None:
    """Make the function known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, draftsmith_attention)
