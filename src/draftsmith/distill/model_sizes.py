"""How many parameters a model has, from its config.json alone; the presets of `pretrain`, and
shapes between and above them.

Weights are counted as transformers' modules have them, tied ones once. What is read of a
configuration has the names of Llama's; families differ from it in what `Family` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.config import MOST
from draftsmith.distill.config import ArchitectureConfig, Size
from draftsmith.errors import InputError
from draftsmith.provenance import read_json

Config = Mapping[str, Any]


DIMENSIONS = ("layers", "heads", "hidden", "intermediate")
_TRAINED_BYTES = 16
"""A parameter in training has a weight, a gradient and AdamW's two moments, all in float32."""
_INNER_STEP = 8
"""Widths of feed-forward layers are multiples of it."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape of a model."""

    layers: int
    heads: int
    hidden: int
    intermediate: int

    @property
    def name(self) -> str:
        """For a shape that has no other: layers x width."""
        return f"{self.layers}x{self.hidden}"


PRESETS: dict[Size, Preset] = {
    "tiny": Preset(2, 2, 64, 176),
    "1m": Preset(2, 3, 192, 512),
    "8m": Preset(10, 4, 256, 704),
    "30m": Preset(10, 8, 512, 1408),
    "50m": Preset(4, 8, 1024, 2816),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Where a decoder has other weights than Llama's."""

    matrices: int = 3
    """Matrices of a feed-forward layer: gate, up and down; without a gate two."""
    intermediate: str = "intermediate_size"
    """What the configuration calls the width of the feed-forward layers."""
    norms: int = 2
    """Per layer."""
    norm_vectors: int = 1
    """Per norm: 2 with a bias."""
    head_norms: bool = False
    """Queries and keys have a norm over the width of a head."""
    biased: tuple[str, ...] = ()
    """Linear layers that always have a bias: qkv, out, mlp."""
    positions: int | None = None
    """Learnt ones: so many more than the context is long."""
    tied: bool = False
    """Input and output embedding are one, unless the configuration says otherwise."""
    head_dim: int | None = None
    """None: hidden size / heads."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "phi3": Family(),
    "qwen2": Family(biased=("qkv",)),
    "qwen3": Family(head_norms=True, head_dim=128),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(norms=4, tied=True, head_dim=256),
    "opt": Family(
        matrices=2,
        intermediate="ffn_dim",
        norm_vectors=2,
        biased=("qkv", "out", "mlp"),
        positions=2,
        tied=True,
    ),
}


def read_config(folder: Path) -> dict[str, Any]:
    """What stands in the config.json of a model folder.

    Raises:
        InputError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    values = read_json(path, "configuration")
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no configuration of a model")
    return values


def count_parameters(config: Config, where: str) -> int:
    """All weights of the language model.

    Raises:
        InputError: a family that is not known here, or a dimension that is missing (`where` names
            the file).
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise InputError(
            f"{where}: how many parameters a model of type {kind!r} has is not known here (known: "
            f"{', '.join(FAMILIES)}); give --target-params"
        )
    hidden, vocab = dimension(config, "hidden_size", where), dimension(config, "vocab_size", where)
    layers = dimension(config, "num_hidden_layers", where)
    heads = dimension(config, "num_attention_heads", where)
    sizes = {"num_key_value_heads": heads, "head_dim": family.head_dim or hidden // heads}
    # null, as transformers writes it, is not given
    given = {name: value for name in sizes if (value := config.get(name)) is not None}
    kv_heads, head_dim = (dimension({**sizes, **given}, name, where) for name in sizes)
    inner = dimension(config, family.intermediate, where)

    narrow = hidden
    if config.get("word_embed_proj_dim") is not None:
        narrow = dimension(config, "word_embed_proj_dim", where)
    total = vocab * narrow * (1 if config.get("tie_word_embeddings", family.tied) else 2)
    if narrow != hidden:  # OPT-350M embeds into fewer dimensions
        total += 2 * narrow * hidden
    if family.positions is not None:
        context = dimension(config, "max_position_embeddings", where)
        total += (context + family.positions) * hidden
    norm = family.norm_vectors * hidden
    if config.get("do_layer_norm_before", True):  # the one behind the last layer
        total += norm
    queries, keys = heads * head_dim, kv_heads * head_dim
    layer = family.norms * norm + 2 * hidden * (queries + keys) + family.matrices * hidden * inner
    bias = config.get("attention_bias", False)
    if bias or "qkv" in family.biased:
        layer += queries + 2 * keys
    if bias or "out" in family.biased:
        layer += hidden
    if config.get("mlp_bias", False) or "mlp" in family.biased:
        layer += (family.matrices - 1) * inner + hidden
    if family.head_norms:
        layer += 2 * head_dim
    return total + layers * layer


def shape_for(config: Config, params: float) -> Preset:
    """The shape whose model in the target's family comes nearest to so many parameters: the
    nearest preset, deeper and wider or shallower and narrower in its own proportions."""

    def missed(shape: Preset) -> float:
        return abs(math.log(count_parameters(resized(config, shape), shape.name) / params))

    preset = min(PRESETS.values(), key=missed)

    def scaled(heads: int, more_layers: int = 0) -> Preset:
        hidden = heads * (preset.hidden // preset.heads)
        factor = hidden / preset.hidden
        inner = _INNER_STEP * round(preset.intermediate * factor / _INNER_STEP)
        layers = round(preset.layers * factor) + more_layers
        return Preset(max(1, layers), heads, hidden, max(_INNER_STEP, inner))

    def counted(heads: int) -> int:
        return count_parameters(resized(config, scaled(heads)), "a draft")

    low, high = 1, 2
    while counted(high) < params:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counted(middle) < params else (low, middle)
    near = [scaled(heads, more) for heads in (low, high) for more in range(-2, 3)]
    return min(near, key=missed)


def shape_of(options: ArchitectureConfig) -> Preset:
    """The preset of --size with the dimensions that were given in its place.

    Raises:
        InputError: dimensions that do not fit together.
    """
    given = {name: getattr(options, name) for name in DIMENSIONS if getattr(options, name)}
    shape = replace(PRESETS[options.size], **given)
    heads, hidden, kv_heads = shape.heads, shape.hidden, options.kv_heads or shape.heads
    if hidden % heads or (hidden // heads) % 2:
        raise InputError(f"--hidden {hidden} must be an even multiple of --heads {heads}")
    if heads % kv_heads:
        raise InputError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    return shape


def check_memory(options: ArchitectureConfig, memory: int | None, processes: int = 1) -> None:
    """Raise InputError for a model whose training needs more memory than there is, before any of it
    is asked for: counted as of Llama's family, which others come close to.

    Args:
        memory: bytes, of the device of one process; None: nobody knows.
        processes: over how many weights and optimiser are divided.
    """
    shape = shape_of(options)
    words = options.vocab_subset or (1 if options.tokenizer else options.vocab_size)
    config = {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": words}
    config |= dimensions(shape, options.kv_heads)
    params = count_parameters(config, "the new model")
    size = params * _TRAINED_BYTES // processes
    if memory is not None and size > memory:
        flags = [f"--{name} {getattr(shape, name)}" for name in DIMENSIONS]
        if options.vocab_subset or options.tokenizer is None:
            flags += [f"--vocab-{'subset' if options.vocab_subset else 'size'} {words}"]
        raise InputError(
            f"a model of {', '.join(flags)} has {params:,} parameters: "
            f"weights, gradients and optimiser take {size:,} bytes, and there are {memory:,}"
        )


def resized(config: Config, preset: Preset) -> dict[str, Any]:
    """The configuration that `pretrain --tokenizer TARGET` makes of a target's with these
    dimensions, as far as it counts."""
    return {**config, **dimensions(preset)}


def dimensions(shape: Preset, kv_heads: int | None = None) -> dict[str, int]:
    """A shape by the names that configurations of all families have; OPT has two of its own."""
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "ffn_dim": shape.intermediate,
        "word_embed_proj_dim": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": kv_heads or shape.heads,
        "head_dim": shape.hidden // shape.heads,
    }


def dimension(config: Config, name: str, where: str) -> int:
    """Return a dimension. Raises InputError where it is missing or none; `where` names the file."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        shown = value if not isinstance(value, int) or abs(value) <= MOST else "a larger one"
        raise InputError(f"{where}: {name!r} must be a number from 1 to {MOST}, got {shown!r}")
    return value
