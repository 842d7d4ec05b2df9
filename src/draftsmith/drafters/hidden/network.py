"""Networks of EAGLE and its descendants, which read pairs (see `hidden/drafter.py`).

    token, feature  ->  fusion  ->  decoder layer  ->  state to predict from, state to go on with

How token and feature are fused is the drafter's own; most have the rest in common. Module names are
those of the released checkpoints, so that state dicts need no renaming.

How queries meet keys is handed in (`Attend`): decoding reads a cache, training rolls chains out.

Shape letters: B rows, T places, H hidden, I intermediate, A attention heads, D width of a head.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    rotate_half,
)

from draftsmith.drafters.base import TargetView
from draftsmith.drafters.columns import Columns

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B, A, T, D], key and value [B, Akv, T, D]) -> [B, A, T, D]."""
AttendIn = Callable[[int], Attend]
"""The attention of a layer, by its number."""


def draft_config(target: Any) -> LlamaConfig:
    """One decoder layer of the target's measures (`target`: its transformers configuration)."""
    heads = target.num_attention_heads
    known: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
    }
    config = LlamaConfig(**known)
    rope = dict(getattr(target, "rope_parameters", None) or {})
    if "full_attention" in rope:  # one per kind of layer; a drafter has no window
        rope = dict(rope["full_attention"])
    if "rope_theta" in rope:
        config.rope_parameters = {"rope_type": "default", **rope}
    # Qwen2 has these biases and no key that says so
    config.attention_bias = bool(
        getattr(target, "attention_bias", target.model_type in ("qwen2", "qwen2_moe"))
    )
    return config


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the input may be wider than the output."""

    def __init__(self, config: LlamaConfig, width: int | None = None) -> None:
        super().__init__()
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        assert shared is not None and config.head_dim is not None
        self.head_dim = config.head_dim
        wide, bias = width or config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(wide, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(wide, shared * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(wide, shared * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x_BTH: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[B, T, H] after attention, the residual not added."""
        q, k, v = self._by_head(x_BTH, self.q_proj, self.k_proj, self.v_proj)
        q, k = apply_rotary_pos_emb(q, k, *cos_sin)
        mixed = attend(q, k, v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def keys_and_values(
        self, x_BTH: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """[B, Akv, T, D] each, of places that ask nothing themselves."""
        k, v = self._by_head(x_BTH, self.k_proj, self.v_proj)
        cos, sin = (one.unsqueeze(1) for one in cos_sin)
        return k * cos + rotate_half(k) * sin, v

    def _by_head(self, x_BTH: Tensor, *projections: nn.Linear) -> list[Tensor]:
        return [
            project(x_BTH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in projections
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionParts:
    """Modules of a fusion by what they do (`Fusion` of engine.cpp), for the compiled engine."""

    fc: nn.Linear
    norm: nn.Module | None = None
    both: nn.Module | None = None
    beside: nn.Module | None = None
    unknown: Tensor | None = None
    """[H] the embedding of a token that is not known."""
    gate: nn.Linear | None = None
    up: nn.Linear | None = None
    down: nn.Linear | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilable:
    """A network by what the compiled engine computes."""

    layers: Sequence[nn.Module]
    """Each with `self_attn`, `mlp` and `post_attention_layernorm`."""
    fusion: FusionParts
    halves: int = 1
    """See `DraftLayer`; of the last layer."""
    norm: nn.Module | None = None
    """Before the head."""
    head: nn.Linear | None = None
    """None: the target's, over the draft vocabulary."""


class ConcatLinear(nn.Linear):
    """W [a ; b ; ...] + b: a linear layer that reads its inputs side by side."""

    def parts(self) -> FusionParts:
        return FusionParts(fc=self)

    def forward(self, *parts: Tensor) -> Tensor:
        return super().forward(torch.cat(parts, dim=-1))


class Rotary(nn.Module):
    """cos and sin for positions, [B, T, D] each, in the drafter's number format."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # outside the module tree: frequencies stay float32 whatever the weights become
        self._rotary = [LlamaRotaryEmbedding(config)]

    @property
    def module(self) -> LlamaRotaryEmbedding:
        return self._rotary[0]

    def forward(self, positions_BT: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self._rotary[0].to(like.device)
        cos, sin = rotary(like, positions_BT)
        return cos, sin


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), to any width."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """The decoder layer of EAGLE and its descendants: no norm before attention.

    `halves` 2: the feed-forward part writes a state to predict from and one to go on with, each on
    a copy of the residual (FSPAD, GRIFFIN).
    """

    def __init__(self, config: LlamaConfig, halves: int = 1) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size, halves * hidden)
        self.halves = halves

    def forward(
        self, x_BTH: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(state that predicts, state that goes on) [B, T, H] each; the same for halves 1."""
        x_BTH = x_BTH + self.self_attn(x_BTH, cos_sin, attend)
        added = self.mlp(self.post_attention_layernorm(x_BTH))
        if self.halves == 1:
            out = x_BTH + added
            return out, out
        predict, regress = added.chunk(2, dim=-1)
        return x_BTH + predict, x_BTH + regress


class PlainLayer(nn.Module):
    """A decoder layer with a norm before each part."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size, hidden)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attend)
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class Network(nn.Module, abc.ABC):
    """A network that predicts from states of its own. `config`: its measures."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config)

    @property
    def target_ids(self) -> Tensor | None:
        """[Vd]: the target's id of each draft id, upwards; None: it knows all tokens."""
        return None

    def compilable(self) -> Compilable | None:
        """Its parts; None: the engine does not know such a network."""
        return None

    @abc.abstractmethod
    def own_logits(self, predict: Tensor, target: TargetView) -> Tensor:
        """[.., Vd] over the draft vocabulary."""

    def logits(self, predict: Tensor, target: TargetView) -> Tensor:
        """[.., V] over the target's vocabulary."""
        own = self.own_logits(predict, target)
        return Columns(target.vocab_size, self.target_ids).widened(own)


class BorrowedHead(Network):
    """A network that predicts by the target's head, or the rows of it that it knows."""

    d2t: Tensor | None
    """[Vd] int64, as EAGLE-3's: a draft id's distance to the target's id; None: it knows all."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        size = getattr(config, "draft_vocab_size", None) or config.vocab_size
        known = torch.zeros(size, dtype=torch.long) if size < config.vocab_size else None
        self.register_buffer("d2t", known)
        # the target's head over the draft vocabulary, and what it was made of
        self._narrow: tuple[Any, Callable[[Tensor], Tensor]] | None = None

    @property
    def target_ids(self) -> Tensor | None:
        return None if self.d2t is None else target_ids(self.d2t)

    def own_logits(self, predict: Tensor, target: TargetView) -> Tensor:
        ids_D = self.target_ids
        if ids_D is None:
            return target.head(predict)
        assert self.d2t is not None
        made_of = (target, version_of(self.d2t), version_of(target.head_weight()), predict.device)
        if self._narrow is None or self._narrow[0] != made_of:
            with torch.inference_mode(False):  # training may use it, too
                self._narrow = (made_of, target.head_over(ids_D))
        return self._narrow[1](predict)


class PairNetwork(Network):
    """What a descendant of EAGLE computes for a pair."""

    @abc.abstractmethod
    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(states to predict from, states to go on with), [B, T, H] each."""


class FusionNetwork(BorrowedHead, PairNetwork):
    """A fusion and one layer; the attributes are named as in the released checkpoints."""

    def __init__(self, config: LlamaConfig, fusion: nn.Module, *, halves: int = 1) -> None:
        """`fusion(embedded, feature)` gives what the layer reads; `halves`: see `DraftLayer`."""
        super().__init__(config)
        self.fc: Any = fusion
        self.layers = nn.ModuleList([DraftLayer(config, halves)])

    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        mixed = self.fc(embedded_BTH, feature_BTS)
        out: tuple[Tensor, Tensor] = self.layers[0](mixed, self.rotary(positions_BT, mixed), attend)
        return out

    def compilable(self) -> Compilable | None:
        if not hasattr(self.fc, "parts"):
            return None
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return Compilable(layers=(layer,), fusion=self.fc.parts(), halves=layer.halves)


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Tells a tensor from what it was before a change."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def target_ids(d2t: Tensor) -> Tensor:
    """[Vd]: the target's id of each draft id, from the distances between them."""
    return d2t.long() + torch.arange(len(d2t), device=d2t.device)
