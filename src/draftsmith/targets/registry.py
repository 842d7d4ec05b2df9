"""Targets by name: a transformers model, or `KIND:SOURCE` of an installed package."""

from __future__ import annotations

from draftsmith.errors import InputError
from draftsmith.plugins import TARGETS, load_plugin, plugin_names, wrong_plugin
from draftsmith.targets.base import BindableTarget
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import load_target


def is_installed_kind(name: str) -> bool:
    """Whether `name` is `KIND:SOURCE` with a kind that an installed package offers."""
    kind, colon, _ = name.partition(":")
    return bool(colon) and kind in plugin_names(TARGETS)


def open_target(model: ModelConfig) -> BindableTarget:
    """Load a target: a folder or hub id (see `load_target`), or `KIND:SOURCE`.

    Raises:
        InputError: an option that only transformers models have, for another kind of target.
        BackendError: the model, or the package that offers the kind, cannot be loaded.
        UnsupportedModel: the architecture cannot be decoded exactly.
    """
    name = model.target
    if not is_installed_kind(name):
        return load_target(
            name,
            dtype=model.dtype,
            device=model.device,
            attn_implementation=model.attn_implementation,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    plain = ModelConfig(target=name, dtype=model.dtype, device=model.device)
    if model != plain:
        raise InputError(
            f"Target {name!r} is no transformers model: leave out attn_implementation, revision "
            "and trust_remote_code."
        )
    kind, _, source = name.partition(":")
    load = load_plugin(TARGETS, kind, ())
    if not callable(load):
        raise wrong_plugin(TARGETS, kind, "a function `load(source, *, dtype, device)`")
    target: BindableTarget = load(source, dtype=model.dtype, device=model.device)
    if not all(hasattr(target, part) for part in ("vocab_size", "new_cache", "forward")):
        raise wrong_plugin(TARGETS, kind, "a function that returns a target")
    return target
