"""The config.json of a network over hidden states: read, and refused by name where it asks for
something that the network here does not compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

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


def read_config(folder: Path) -> LlamaConfig:
    """The measures of the network in a folder.

    Raises:
        BackendError: there is no config.json that can be read, or it asks for other arithmetic.
    """
    with loading(f"the drafter's config.json in {folder}"):
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "qkv_bias" in values:  # as GRIFFIN's configurations for Qwen2 have it
            values.setdefault("attention_bias", values["qkv_bias"])
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
