"""The config.json of a network over hidden states: written, read, and refused by name where it asks
for something that the network here does not compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from draftsmith.drafters._base import TargetView
from draftsmith.errors import BackendError
from draftsmith.targets.hf import loading

COMPUTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "norm_before_residual": (False, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
}
"""What a configuration may say of the arithmetic; the last four are of EAGLE-3's relatives."""
LAYERS = "eagle_aux_hidden_state_layer_ids"


RELEASED_ROPE = ("rope_theta", "rope_scaling")
"""Keys that hold for released code what `rope_parameters` holds for transformers."""
TWO_FIELDS = ("linear", "dynamic")
"""Rotary scalings that released code computes. It accepts exactly two fields for them."""


def written_config(config: LlamaConfig) -> dict[str, Any]:
    """Add the keys that released code reads to those that transformers writes. Released code takes
    a missing `rope_theta` for 10,000 and a missing `qkv_bias` for False, without a word."""
    rope = dict(config.rope_parameters or {})
    theta, kind = rope.pop("rope_theta", config.default_theta), rope.get("rope_type", "default")
    scaling: dict[str, Any] | None = None
    if kind in TWO_FIELDS:
        scaling = {"type": kind, "factor": rope["factor"]}
    elif kind != "default":
        scaling = {"type": kind, **rope}
    return {
        **config.to_dict(),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": config.attention_bias,
    }


def read_config(folder: Path) -> LlamaConfig:
    """The measures of the network in a folder.

    Raises:
        BackendError: there is no config.json that can be read, or it asks for other arithmetic.
    """
    with loading(f"the drafter's config.json in {folder}"):
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "qkv_bias" in values:  # released code reads this key alone
            values["attention_bias"] = values["qkv_bias"]
        if "rope_theta" in (values.get("rope_parameters") or {}):  # transformers prefers the others
            values = {name: one for name, one in values.items() if name not in RELEASED_ROPE}
        for key, known in COMPUTED.items():
            if values.get(key, known[0]) not in known:
                raise BackendError(
                    f"The drafter in {folder} was made for other arithmetic: {key} is "
                    f"{values[key]!r} in its config.json, and only {known[0]!r} is computed here."
                )
        return LlamaConfig(**values)


def check_measures(config: LlamaConfig, target: TargetView, folder: Path) -> None:
    """Refuse a network that reads other states than this target's.

    Raises:
        BackendError: naming what differs.
    """
    wide = getattr(config, "target_hidden_size", None) or config.hidden_size
    theirs = target.config
    for key, own, other in (
        ("hidden_size", wide, theirs.hidden_size),
        ("vocab_size", config.vocab_size, theirs.vocab_size),
    ):
        if own != other:
            raise BackendError(
                f"The drafter in {folder} was made for another target: its {key} is {own}, the "
                f"target's is {other}."
            )
    if wide != config.hidden_size:
        raise BackendError(
            f"The drafter in {folder} is narrower ({config.hidden_size}) than its target "
            f"({wide}), so it has an embedding of its own, which is not supported: drafters here "
            "borrow the target's."
        )


def fused_by(config: LlamaConfig, count: int, folder: Path) -> tuple[int, ...] | None:
    """The layers whose outputs a configuration says are fused (0-based); None: it says nothing.

    Inside `eagle_config` a number is that of the layer whose output is meant (SpecForge, SGLang);
    beside it, as vLLM reads it, that of the layer *in front of which* the state is taken.

    Raises:
        BackendError: the target, of `count` layers, has no such ones.
    """
    nested = getattr(config, "eagle_config", None) or {}
    inside = nested.get(LAYERS)
    said, first = (inside, 0) if inside else (getattr(config, LAYERS, None), 1)
    if not said:
        return None
    good = isinstance(said, list) and len(said) == 3 and all(isinstance(one, int) for one in said)
    if not good or not all(first <= one < first + count for one in said):
        raise BackendError(
            f"The drafter in {folder} was made for another target: {LAYERS} is {said!r} in its "
            f"config.json, which should be three numbers from {first} to {first + count - 1}."
        )
    return tuple(one - first for one in said)
