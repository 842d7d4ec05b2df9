"""The model that `pretrain` trains: a target's family at a smaller size, or a Llama of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.errors import BackendError, InputError
from draftsmith.option_groups import ArchitectureOptions
from draftsmith.recipes._sizes import PRESETS


def student_config(
    options: ArchitectureOptions, *, vocab_size: int, end_id: int, pad_id: int, context: int
) -> PretrainedConfig:
    """The configuration of the new model. Raises InputError when dimensions do not fit together."""
    preset = PRESETS[options.size]
    layers = options.layers or preset.layers
    heads = options.heads or preset.heads
    hidden = options.hidden or preset.hidden
    intermediate = options.intermediate or preset.intermediate
    kv_heads = options.kv_heads or heads
    if hidden % heads or (hidden // heads) % 2:
        raise InputError(f"--hidden {hidden} must be an even multiple of --heads {heads}")
    if heads % kv_heads:
        raise InputError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    if options.tokenizer is None:
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=options.context or context,
            tie_word_embeddings=True,
            bos_token_id=end_id,
            eos_token_id=end_id,
            pad_token_id=pad_id,
        )
    config = copy.deepcopy(load_config(options.tokenizer))
    wanted: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "ffn_dim": intermediate,  # OPT
        "word_embed_proj_dim": hidden,  # OPT
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_window_layers": layers,
        "eos_token_id": end_id,
        "bos_token_id": end_id,
        "pad_token_id": pad_id,
    }
    if options.context:
        wanted["max_position_embeddings"] = options.context
    known = set(config.to_dict()) | set(config.attribute_map)
    for name, value in wanted.items():
        if name in known:
            setattr(config, name, value)
    kinds = config.to_dict().get("layer_types")
    if kinds:
        config.layer_types = [kinds[index * len(kinds) // layers] for index in range(layers)]
    return config


def load_config(source: str) -> PretrainedConfig:
    """The configuration of a decoder-only model; BackendError when there is none."""
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise BackendError(f"cannot load the configuration of {source}: {error}") from error


def build_student(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A new model in float32; its weights are a function of configuration and seed."""
    padding = config.pad_token_id
    # An embedding with a padding row never learns that row as an input; ours may be the end token.
    config.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, KeyError, RuntimeError) as error:
            raise BackendError(f"cannot build this model: {error}") from error
    config.pad_token_id = model.config.pad_token_id = padding
    return model
