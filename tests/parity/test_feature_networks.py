"""Networks of feature-level drafters against their formulas, restated here in NumPy: loaded from
folders in the released layouts, drafting behind a text and through a tree.

The restatement knows no cache, no mask and no batch. A path of a draft is a longer text: its pairs
are appended, with the states that came out for the token before, and all is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.features import keep

from draftsmith.core.types import TrajectoryBatch
from draftsmith.drafters.hidden.drafter import FeatureDrafter, PairReader, layer_spec, new_state
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.registry import make_drafter
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

VOCAB, H, INNER, HEADS, SHARED, WIDTH = 64, 32, 40, 4, 2, 6
"""Tokens, hidden, intermediate, query heads, key heads, their width (not H / HEADS)."""
NARROW = 20
"""Tokens that EAGLE-3 drafts."""
EPS, THETA = 1e-5, 5000.0
Array = np.ndarray
Weights = Mapping[str, Array]


# --------------------------------------------------------------------------- the formulas


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def turned(x_D: Array, position: int) -> Array:
    """Component i and i + D/2 of a head are one complex number, turned by position * theta_i."""
    half = len(x_D) // 2
    angle = position * THETA ** (-np.arange(half) * 2.0 / len(x_D))
    z = (x_D[:half] + 1j * x_D[half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag])


def attention(w: Weights, prefix: str, x_TX: Array) -> Array:
    """Causal, each place by itself."""
    q_TX, k_TX, v_TX = (
        x_TX @ w[f"{prefix}.{name}_proj.weight"].T + w.get(f"{prefix}.{name}_proj.bias", 0.0)
        for name in "qkv"
    )
    out = []
    for t in range(len(x_TX)):
        heads = []
        for head in range(HEADS):
            own = slice(head * WIDTH, (head + 1) * WIDTH)
            group = head // (HEADS // SHARED)
            of = slice(group * WIDTH, (group + 1) * WIDTH)
            q = turned(q_TX[t, own], t)
            scores = np.array([q @ turned(k_TX[s, of], s) for s in range(t + 1)]) / WIDTH**0.5
            share = np.exp(scores - scores.max())
            heads.append(share @ v_TX[: t + 1, of] / share.sum())
        out.append(np.concatenate(heads))
    return np.array(out) @ w[f"{prefix}.o_proj.weight"].T


def gated(w: Weights, prefix: str, x: Array) -> Array:
    inner = silu(x @ w[f"{prefix}.gate_proj.weight"].T) * (x @ w[f"{prefix}.up_proj.weight"].T)
    return inner @ w[f"{prefix}.down_proj.weight"].T


def concatenated(w: Weights, prefix: str, e: Array, f: Array) -> Array:
    return np.concatenate([e, f], -1) @ w[f"{prefix}.weight"].T + w[f"{prefix}.bias"]


def layer(w: Weights, x: Array) -> tuple[Array, Array]:
    """Attention reads x without a norm. Returns the states to predict from and to go on with."""
    r = x + attention(w, "layers.0.self_attn", x)
    added = gated(w, "layers.0.mlp", rms(r, w["layers.0.post_attention_layernorm.weight"]))
    halves = np.split(added, added.shape[-1] // H, axis=-1)
    return r + halves[0], r + halves[-1]


def eagle(w: Weights, e: Array, f: Array) -> tuple[Array, Array]:
    return layer(w, concatenated(w, "fc", e, f))


def fspad(w: Weights, e: Array, f: Array) -> tuple[Array, Array]:
    h = concatenated(w, "fc.fc", e, f)
    up = rms(h, w["fc.post_attention_layernorm.weight"]) @ w["fc.mlp.up_proj.weight"].T
    chosen = silu(e @ w["fc.mlp.gate_proj.weight"].T) * up
    return layer(w, h + chosen @ w["fc.mlp.down_proj.weight"].T)


def griffin(w: Weights, e: Array, f: Array) -> tuple[Array, Array]:
    h = concatenated(w, "fc.fc", e, f)
    z = rms(h, w["fc.post_attention_layernorm.weight"])
    norm = w["fc.mlp.input_layernorm.weight"]
    u = np.concatenate([rms(z, norm), rms(e, norm)], -1)
    inner = silu(u @ w["fc.mlp.up_proj.weight"].T)
    return layer(w, h + inner @ w["fc.mlp.down_proj.weight"].T)


def eagle3(w: Weights, e: Array, f: Array) -> tuple[Array, Array]:
    a, b = rms(e, w["midlayer.input_layernorm.weight"]), rms(f, w["midlayer.hidden_norm.weight"])
    r = f + attention(w, "midlayer.self_attn", np.concatenate([a, b], -1))
    norm = w["midlayer.post_attention_layernorm.weight"]
    g = r + gated(w, "midlayer.mlp", rms(r, norm))
    return g, g


# --------------------------------------------------------------------------- released layouts

LAYER = {
    "layers.0.self_attn.q_proj.weight": (HEADS * WIDTH, H),
    "layers.0.self_attn.k_proj.weight": (SHARED * WIDTH, H),
    "layers.0.self_attn.v_proj.weight": (SHARED * WIDTH, H),
    "layers.0.self_attn.o_proj.weight": (H, HEADS * WIDTH),
    "layers.0.post_attention_layernorm.weight": (H,),
    "layers.0.mlp.gate_proj.weight": (INNER, H),
    "layers.0.mlp.up_proj.weight": (INNER, H),
}
BIASES = {
    "layers.0.self_attn.q_proj.bias": (HEADS * WIDTH,),
    "layers.0.self_attn.k_proj.bias": (SHARED * WIDTH,),
    "layers.0.self_attn.v_proj.bias": (SHARED * WIDTH,),
}
ONE_OUTPUT = LAYER | {"layers.0.mlp.down_proj.weight": (H, INNER)}
TWO_OUTPUTS = LAYER | {"layers.0.mlp.down_proj.weight": (2 * H, INNER)}


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: its formula and the tensors of its folder."""

    name: str
    formula: Callable[[Weights, Array, Array], tuple[Array, Array]]
    tensors: Mapping[str, tuple[int, ...]]

    @property
    def states(self) -> int:
        """How many of the target's states it reads at a place."""
        return 3 if self.formula is eagle3 else 1


FUSED = {
    "fc.fc.weight": (H, 2 * H),
    "fc.fc.bias": (H,),
    "fc.post_attention_layernorm.weight": (H,),
    "fc.mlp.down_proj.weight": (H, INNER),
}
EAGLE = {"fc.weight": (H, 2 * H), "fc.bias": (H,)} | ONE_OUTPUT
FSPAD = {
    **FUSED,
    "fc.mlp.gate_proj.weight": (INNER, H),
    "fc.mlp.up_proj.weight": (INNER, H),
    **TWO_OUTPUTS,
}
GRIFFIN = {
    **FUSED,
    "fc.mlp.input_layernorm.weight": (H,),
    "fc.mlp.up_proj.weight": (INNER, 2 * H),
    **TWO_OUTPUTS,
}
EAGLE3 = {
    "fc.weight": (H, 3 * H),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (HEADS * WIDTH, 2 * H),
    "midlayer.self_attn.k_proj.weight": (SHARED * WIDTH, 2 * H),
    "midlayer.self_attn.v_proj.weight": (SHARED * WIDTH, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, HEADS * WIDTH),
    "midlayer.mlp.gate_proj.weight": (INNER, H),
    "midlayer.mlp.up_proj.weight": (INNER, H),
    "midlayer.mlp.down_proj.weight": (H, INNER),
    "norm.weight": (H,),
    "lm_head.weight": (NARROW, H),
}
KINDS = {
    "eagle": Kind("eagle", eagle, EAGLE),
    "hass": Kind("hass", eagle, EAGLE),
    "fspad": Kind("fspad", fspad, FSPAD),
    "unrolled": Kind("unrolled", fspad, FSPAD),
    "griffin": Kind("griffin", griffin, GRIFFIN),
    "griffin with biases, as for Qwen2": Kind("griffin", griffin, GRIFFIN | BIASES),
    "eagle3": Kind("eagle3", eagle3, EAGLE3),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB, hidden=H, layers=8)


def kept_ids() -> Array:
    return np.sort(np.random.default_rng(3).choice(VOCAB, NARROW, replace=False))


def released(kind: Kind, folder: Path) -> Weights:
    """A folder with weights that no part of the network can do without."""
    rng = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for name, shape in kind.tensors.items():
        around = 1.0 if "norm" in name else 0.0
        made[name] = around + rng.normal(size=shape) * (1.0 if len(shape) == 1 else 0.3)
    written = {name: torch.from_numpy(one) for name, one in made.items()}
    config: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED,
        "head_dim": WIDTH,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
    }
    if "layers.0.self_attn.q_proj.bias" in made:
        config["qkv_bias"] = True
    if kind.formula is eagle3:
        config["draft_vocab_size"] = NARROW
        written["d2t"] = torch.from_numpy(kept_ids() - np.arange(NARROW))
        written["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        written["t2d"][torch.from_numpy(kept_ids())] = True
    save_file(written, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return made


# --------------------------------------------------------------------------- side by side


@dataclass(frozen=True)
class Restated:
    """A drafter behind a text, by its formula."""

    kind: Kind
    weights: Weights
    embedding_VH: Array
    head_VH: Array

    def logits(self, tokens_T: Array, features_TS: Array, path: tuple[int, ...]) -> Array:
        """[V] behind the text x_0 .. x_T, of which the target read all but x_T, and a path."""
        tokens, features = list(tokens_T[1:]), features_TS
        if self.kind.formula is eagle3:
            features = features @ self.weights["fc.weight"].T
        for token in (*path, None):
            predict, regress = self.kind.formula(self.weights, self.embedding_VH[tokens], features)
            if token is not None:
                tokens.append(token)
                features = np.concatenate([features, regress[-1:]])
        if self.kind.formula is not eagle3:
            return predict[-1] @ self.head_VH.T
        wide = np.full(VOCAB, -np.inf)
        own = rms(predict[-1], self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T
        wide[kept_ids()] = own
        return wide


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_network_computes_its_formula(kind: Kind, target: HFTarget, tmp_path: Path) -> None:
    """Behind a text, for two siblings, and behind one of them."""
    weights = released(kind, tmp_path)
    with target.native() as model:
        restated = Restated(
            kind=kind,
            weights=weights,
            embedding_VH=model.get_input_embeddings().weight.detach().numpy(),
            head_VH=model.get_output_embeddings().weight.detach().numpy(),
        )
    drafter = make_drafter(f"{kind.name}:{tmp_path}")
    assert isinstance(drafter, FeatureDrafter)
    drafter.bind(target)
    assert drafter.network is not None

    rng = np.random.default_rng(1)
    tokens = rng.integers(VOCAB, size=8)
    features = rng.normal(size=(7, kind.states * H))
    state = new_state(
        [tokens.tolist()], target, layer_spec(drafter.layer, target), features.shape[1], 32
    )
    keep(state.features, [torch.from_numpy(features)])
    reader = PairReader(drafter.network, target, state)
    first, second, third = 5, 40, 11
    siblings = torch.tensor([[first, second]]), torch.eye(2, dtype=torch.bool)[None]
    below = torch.tensor([[third]]), torch.tensor([[[False, True, True]]])
    with torch.inference_mode():
        found = {(): reader.root()[0]}
        level = reader.level(*siblings, torch.zeros(1, 2, dtype=torch.long))
        found[(first,)], found[(second,)] = level[0]
        found[(second, third)] = reader.level(*below, torch.ones(1, 1, dtype=torch.long))[0, 0]
    for path, logits in found.items():
        wanted = restated.logits(tokens, features, path)
        logits = reader.columns.widened(logits)
        # transformers turns by float32 angles
        scale = np.abs(wanted[np.isfinite(wanted)]).max()
        np.testing.assert_allclose(logits.numpy(), wanted, rtol=0.0, atol=1e-6 * scale)


def test_medusa_computes_its_formula(target: HFTarget, tmp_path: Path) -> None:
    """Head k: two blocks x + silu(W x + b), each with weights of its own, and a linear layer."""
    rng = np.random.default_rng(0)
    made = {}
    for k in range(3):
        for block in range(2):
            made[f"{k}.{block}.linear.weight"] = rng.normal(size=(H, H)) * 0.3
            made[f"{k}.{block}.linear.bias"] = rng.normal(size=H)
        made[f"{k}.2.weight"] = rng.normal(size=(VOCAB, H))
    written = {name: torch.from_numpy(one) for name, one in made.items()}
    save_file(written, tmp_path / "medusa_lm_head.safetensors")
    drafter = make_drafter(f"medusa:{tmp_path}")
    assert isinstance(drafter, Medusa)
    drafter.bind(target)
    assert drafter.network is not None and drafter.num_steps == 3

    features = rng.normal(size=(1, 5, H))
    batch = TrajectoryBatch(
        tokens_BT=torch.zeros(1, 5, dtype=torch.long),
        loss_mask_BT=torch.ones(1, 5, dtype=torch.bool),
        features_BTS=torch.from_numpy(features),
    )
    carry = None
    for k in range(3):
        prediction, carry = drafter.forward(batch, carry)
        assert prediction.head is not None
        logits = prediction.head(prediction.hidden_BTH)
        x = features
        for block in range(2):
            weight, bias = (made[f"{k}.{block}.linear.{part}"] for part in ("weight", "bias"))
            x = x + silu(x @ weight.T + bias)
        wanted = x @ made[f"{k}.2.weight"].T
        np.testing.assert_allclose(logits.detach().numpy(), wanted, rtol=1e-9, atol=1e-9)
        assert prediction.ahead == 2 + k
