"""Checks of a model that is to be a target: its configuration, a one-token probe, a self-check.

A model that draftsmith would decode wrongly must be refused, never decoded. Nets, each for what the
one before cannot see:

    refuse_by_counts   before anything is built: more layers than can be
    refuse_by_config   before weights are read: recurrent state, encoder-decoders, layer kinds,
                       rotary scalings that look at the whole batch, a context of no tokens,
                       constants that are no finite numbers
    refuse_by_files    before memory is asked for: sizes and number formats that the headers of the
                       files contradict
    refuse_by_report   after loading: weights that are missing, left over or of another shape
    probe              one token: does attention reach us, once per layer, with nothing unknown; and
                       the model's own mask rule, evaluated far beyond its window
    self_check         a ragged pair of short rows with a branching tree against the
                       model's own eager attention: positions, scales, caps, anything else
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files, has_file

from draftsmith.core.attention import ambient, around, attend_reference, refuse_unknown
from draftsmith.core.cache import lay_out
from draftsmith.core.types import Signals
from draftsmith.errors import BackendError, UnsupportedModel

if TYPE_CHECKING:
    from draftsmith.targets.hf import HFTarget


PROBE = "draftsmith-probe"
"""The attention implementation's name, inside transformers, while a model is probed."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_RECURRENT = frozenset(
    {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}
)
# These rescale all rotations when the longest row of the batch passes a threshold.
_NEIGHBOURLY_ROPE = frozenset({"dynamic", "longrope"})
# Right on short texts whatever we do, so no check of a few tokens would notice.
_COUNTS_BY_ITSELF = frozenset({"llama4_text"})
_FARTHEST = 1 << 20

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' mask function: (row, head, query position, key position) -> may see."""


# --------------------------------------------------------------------------- by the files

_COUNTS = re.compile(r"num_hidden_layers|num_layers|n_layers?|\w*experts")
"""Keys of a config.json that name how many modules of a kind are made, one after the other."""
LISTED = re.compile(rf"{_COUNTS.pattern}|num_labels")
"""Those, and keys that name how long a list transformers makes of names."""
MOST_LISTED = 1 << 16
"""No model has more layers, experts or labels: a list of them would be long enough to be felt."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Masks and frequencies that older transformers saved and newer ones compute.
_COMPUTED = re.compile(
    r"(attn|attention)\.(bias|masked_bias|causal_mask)$|inv_freq$|(cos|sin)_cached$|position_ids$"
)

_SCALES = re.compile(
    r"(weight|input)_(global_)?scale(_inv|_2)?$|weight_packed$|\.(qweight|scales)$"
)
"""What vLLM's compressed-tensors, FP8 and GPTQ put beside or in place of weights."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    """By safetensors' name: F32, BF16, I64, ..."""
    shape: tuple[int, ...]


def stored_tensors(name: str, revision: str, plain: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a model folder or hub id, from the headers of its safetensors files; `plain`:
    what stands in config.json.

    Raises:
        BackendError: there are no such files, or config.json names others.
    """
    find = partial(
        cached_file, name, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    files = [whole] if (whole := find(SAFE_WEIGHTS_NAME)) else []
    if not files and (index := find(SAFE_WEIGHTS_INDEX_NAME)):
        files, _ = get_checkpoint_shard_files(name, index, revision=revision)
    # transformers would read the file that this key names, also a pickled one
    if not files:
        for pickled in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            if has_file(name, pickled, revision=revision):
                raise BackendError(
                    f"The model {name!r} has its weights in {pickled} only, a pickle, which can "
                    "run any code when it is read: load it in transformers if you trust it, and "
                    "write it as safetensors with save_pretrained."
                )
    if not files or plain.get("transformers_weights") not in (None, SAFE_WEIGHTS_NAME):
        raise BackendError(
            f"The model {name!r} has no weights that are read here: they must be in safetensors, "
            f"{SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME} with its parts; load others in "
            "transformers and write them with save_pretrained."
        )
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (no dictionary)
                one = tensors.get_slice(key)
                found[key] = StoredTensor(str(one.get_dtype()), tuple(one.get_shape()))
    return found


def refuse_by_counts(
    plain: Mapping[str, Any],
    most: int,
    name: str,
    reason: str,
    counts: re.Pattern[str] = _COUNTS,
) -> None:
    """Refuse more than `most` of what the keys `counts` name; `plain`: what stands in config.json.

    Raises:
        BackendError: with the key and the reason.
    """
    for part in (plain, *(value for value in plain.values() if isinstance(value, dict))):
        for key, value in part.items():
            if counts.fullmatch(key) and isinstance(value, int) and value > most:
                raise BackendError(
                    f"The model {name!r} does not fit its configuration: config.json asks for "
                    f"{key} {value}, and {reason}."
                )


def refuse_by_files(
    skeleton: Any, plain: Mapping[str, Any], stored: Mapping[str, StoredTensor], name: str
) -> None:
    """Refuse a configuration whose model needs far more memory than its files hold, and weights
    that are no floating-point numbers. Models with a `quantization_config` aside, for which
    transformers knows the method: it ignores others, and decodes what the numbers happen to be.

    Args:
        skeleton: the model, without memory (on the meta device).
        stored: see `stored_tensors`.

    Raises:
        BackendError: naming both sizes, the weight, or the quantization.
    """
    if quantization := plain.get("quantization_config"):
        from transformers.quantizers.auto import AutoHfQuantizer

        if not AutoHfQuantizer.supports_quant_method(quantization):
            raise BackendError(
                f"The model {name!r} is quantized by {quantization['quant_method']!r} according to "
                "its config.json, which transformers does not know: give a model that is not "
                "quantized, or is by another method."
            )
        return
    wanted = sum(one.numel() for one in skeleton.parameters())
    held = sum(prod(one.shape) for one in stored.values())
    if wanted > 2 * held:  # a few missing ones are named after loading
        raise BackendError(
            f"The model {name!r} does not fit its configuration: config.json asks for {wanted:,} "
            f"parameters, and its safetensors files hold {held:,} numbers."
        )
    real = {key: one.is_floating_point() for key, one in skeleton.state_dict().items()}
    scales = [key for key in stored if _SCALES.search(key) and key not in real]
    if scales:
        kinds = sorted({one.dtype for one in stored.values()})
        raise BackendError(
            f"The model {name!r} is compressed: its files hold {', '.join(kinds)} with "
            f"{len(scales)} scales ({_some(scales)}), and its config.json has no "
            "quantization_config that says how to expand them; give the model that it was made "
            "from, or the config.json that belongs to these files."
        )
    for key in left_over(skeleton, stored):
        kind = stored[key].dtype
        if kind not in _FLOATS and real.get(key, True):
            raise BackendError(
                f"The model {name!r} holds {key} as {kind}, where floating-point numbers of 16 to "
                "64 bits belong: convert its weights."
            )


def refuse_by_report(model: Any, report: Mapping[str, Any], name: str, *, layers: bool) -> None:
    """transformers fills what is missing with noise, drops what is left over, and goes on; we do
    not. `report`: its own, of a load; `layers`: whether the decoder layers were asked for.

    Raises:
        BackendError: naming the weights.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise BackendError(
            f"The model {name!r} is incomplete: {len(missing)} weights are missing from its "
            f"files ({_some(missing)})."
        )
    for weight, found, wanted in sorted(report["mismatched_keys"])[:1]:
        raise BackendError(
            f"The model {name!r} does not fit its configuration: {weight} is {list(found)} in its "
            f"files, but config.json asks for {list(wanted)}."
        )
    unused = sorted(left_over(model, report["unexpected_keys"])) if layers else []
    if unused:
        raise BackendError(
            f"The model {name!r} does not fit its configuration: {len(unused)} weights in its "
            f"files have no place in the {type(model).__name__} that config.json asks for "
            f"({_some(unused)})."
        )


def left_over(model: Any, names: Iterable[str]) -> list[str]:
    """Those of these names that its class does not ignore and that older versions of transformers
    did not save beside the weights."""
    patterns = "|".join(f"(?:{one})" for one in model._keys_to_ignore_on_load_unexpected or ())
    ignored = re.compile(patterns or r"(?!)")
    return [name for name in names if not (_COMPUTED.search(name) or ignored.search(name))]


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


# --------------------------------------------------------------------------- by configuration


def context_of(config: Any, name: str) -> int | None:
    """The length of the context by a text decoder's configuration; None: it has no limit.

    Raises:
        BackendError: it is no number of tokens.
    """
    value = getattr(config, "max_position_embeddings", None)
    if value is None or (type(value) is int and value >= 1):
        return value
    raise BackendError(
        f"{name} has a configuration that cannot be: max_position_embeddings, the length of the "
        f"context, is {value!r}, and should be a whole number of 1 or more."
    )


def refuse_by_numbers(config: Any, name: str) -> None:
    """Refuse constants that would make every logit the same, or no number.

    Raises:
        BackendError: a constant is infinite or no number, a norm's is below 0, or a rotary base or
            factor is not above it.
    """
    rope = getattr(config, "rope_parameters", None)
    ropes = [rope, *rope.values()] if isinstance(rope, Mapping) else []  # one, or by kind of layer
    numbers = [
        item for one in (vars(config), *ropes) if isinstance(one, Mapping) for item in one.items()
    ]
    for key, value in numbers:
        base = key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor")
        if not isinstance(value, (int, float) if base else float):
            continue
        norm = key.endswith(("eps", "epsilon"))
        if not -math.inf < value < math.inf or (norm and value < 0) or (base and value <= 0):
            wanted = "a finite number" + (" of 0 or more" if norm else " above 0" if base else "")
            raise BackendError(
                f"{name} has a configuration that cannot be: {key} is {value}, and should be "
                f"{wanted}."
            )


def refuse_by_config(config: Any, name: str) -> None:
    """Refuse what the configuration alone shows to be undecodable.

    Raises:
        UnsupportedModel: with the architecture and the reason.
        BackendError: see `context_of` and `refuse_by_numbers`.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder; draftsmith needs a decoder-only model."
        )
    text = config.get_text_config(decoder=True)
    context_of(text, name)
    refuse_by_numbers(text, name)
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds & _RECURRENT:
        raise _recurrent(name)
    if kinds:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(sorted(kinds))}, which cannot take a draft tree."
        )
    if text.model_type in _COUNTS_BY_ITSELF:
        raise UnsupportedModel(
            f"{name} scales its queries by positions that it counts by itself, which are wrong for "
            "the nodes of a draft tree."
        )
    for rope in sorted(_rope_types(text) & _NEIGHBOURLY_ROPE):
        raise UnsupportedModel(
            f"{name} uses {rope!r} rotary scaling, which makes a row depend on its neighbours' "
            "lengths; convert the checkpoint to a fixed scaling (yarn, linear, llama3)."
        )


def refuse_by_class(model: Any, name: str) -> None:
    """Refuse what the model's class shows: a recurrent state, or no say over positions.

    Raises:
        UnsupportedModel: with the architecture and the reason.
    """
    if getattr(model, "_is_stateful", False):
        raise _recurrent(name)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{name} takes no position_ids: it counts positions by itself, and the nodes of a "
            "draft tree would all stand at the wrong ones."
        )


def _recurrent(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} keeps a recurrent state that cannot roll back after a rejected draft."
    )


def refuse_by_tokenizer(model: Any, tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer whose vocabulary goes beyond the rows of the model's embedding and head.

        ids      0 . . . . . . . . n         vocabulary of the tokenizer
        rows     0 . . . . . . . . n . .     padding behind it is usual
        added                      n a b     so are tokens that were added and never learnt (the
                                             image token of Gemma 3): prompts that hold one are
                                             refused

    Raises:
        BackendError: with the largest id and the number of rows.
    """
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:  # none, or one that does not list its tokens
        return
    rows = min(
        len(each.weight) for each in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    last = max((i for token, i in get_vocab().items() if token not in added), default=0)
    if last >= rows:
        raise BackendError(
            f"{name} has the tokenizer of another model: its tokens go up to {last}, and the model "
            f"has {rows} of them. Put the model's own tokenizer beside its weights."
        )


def _rope_types(config: Any) -> set[str]:
    """All rotary scaling kinds a config names (one, or one per layer type)."""
    named = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    outer = [one for one in named if isinstance(one, dict)]
    groups = [*outer, *(group for one in outer for group in one.values())]
    kinds = (one.get("rope_type") or one.get("type") for one in groups if isinstance(one, dict))
    return {str(kind) for kind in kinds}


# --------------------------------------------------------------------------- the probe


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """What one layer's attention was seen to do."""

    stores: tuple[int, int, int]
    """Heads, width of keys, width of values, per token."""
    window: int | None
    """How many positions a token sees, itself included; None: all before it."""
    module: nn.Module


@dataclass(slots=True)
class Probe:
    """Travels through one forward of one token in place of a block and notes what arrives."""

    span: int
    """How far out mask rules are evaluated."""
    name: str
    layer_types: list[str] | None
    config_window: int | None
    layers: dict[int, LayerFacts] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    """Window by mask rule (identity), evaluated once each."""
    ambient: bool = False
    """Keywords do not reach attention: the block must lie beside the forward."""
    eager_only: bool = False
    """Soft-caps or sinks, which transformers' own sdpa refuses or, in older versions, forgets."""

    def note(
        self,
        module: nn.Module,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keyword: int | None,
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModel(
                f"{self.name} has an attention layer without a number "
                f"({type(module).__name__}), so its keys cannot be cached."
            )
        if layer in self.layers:
            raise UnsupportedModel(
                f"{self.name} attends more than once in layer {layer}, and one cache per layer "
                "cannot hold that."
            )
        stores = (key.shape[1], key.shape[3], value.shape[3])
        window = self._window(layer, mask, keyword)
        self.layers[layer] = LayerFacts(stores=stores, window=window, module=module)

    def _window(self, layer: int, mask: Tensor | None, keyword: int | None) -> int | None:
        """The model's own mask decides; then the keyword; then the configuration."""
        rule: MaskRule | None = getattr(mask, "draftsmith_rule", None)
        if rule is not None:
            if id(rule) not in self.windows:
                assert mask is not None
                self.windows[id(rule)] = window_of(rule, self.span, self.name, mask.device)
            return self.windows[id(rule)]
        if keyword is None and self.layer_types is not None:
            return self.config_window if self.layer_types[layer] == "sliding_attention" else None
        return keyword


def window_of(rule: MaskRule, span: int, name: str, device: torch.device) -> int | None:
    """The window of a causal mask rule, None when it sees all; evaluated at two far positions.

        key position     0 . . . . . . . q . . .
        full             1 1 1 1 1 1 1 1 1 0 0 0      None
        sliding, w = 3   0 0 0 0 0 0 1 1 1 0 0 0      3
        chunked, prefix, bidirectional                refused

    Raises:
        UnsupportedModel: the rule is neither full nor sliding.
    """
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(span + 8, device=device)
    found: set[int | None] = set()
    for query in (span, span // 2 + 3):
        try:
            seen = rule(zero, zero, zero + query, keys).expand(keys.shape)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(
                f"{name} masks attention by more than positions, which a draft tree cannot follow."
            ) from error
        count = int(seen.sum())
        if bool(seen[query + 1 :].any()):
            raise UnsupportedModel(
                f"{name} lets a token attend to later ones (bidirectional attention); draftsmith "
                "needs a causal model."
            )
        if count == 0 or not bool(seen[query + 1 - count : query + 1].all()):
            found.update((None, 0))  # holes in what it sees
        else:
            found.add(None if count == query + 1 else count)
    if len(found) > 1:
        raise UnsupportedModel(
            f"{name} uses an attention pattern (chunked, sparse or with a prefix) that is neither "
            "full nor a sliding window, which cannot take a draft tree."
        )
    return found.pop()


def probe(model: Any, config: Any, name: str, device: torch.device) -> Probe:
    """Run one token through the model and learn what each layer stores and how far it sees.

    Raises:
        UnsupportedModel: attention does not reach draftsmith's function as it must.
    """
    _register_probe()
    plain = config.to_dict()
    window = plain.get("sliding_window")
    seen = Probe(
        span=_span(plain),
        name=name,
        layer_types=plain.get("layer_types"),
        config_window=window if isinstance(window, int) else None,
    )
    one = torch.ones((1, 1), dtype=torch.long, device=device)
    model.config._attn_implementation = PROBE
    config._attn_implementation = PROBE
    try:
        with torch.inference_mode(), ambient(seen):
            model(
                input_ids=one * harmless_ids(plain, 1)[0],
                position_ids=one - 1,
                attention_mask=one,  # keeps mask builders from looking for packed sequences
                use_cache=False,
                draftsmith_block=seen,
            )
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        if isinstance(error, BackendError):
            raise
        first = str(error).strip().split("\n")[0]
        raise UnsupportedModel(
            f"{name} cannot run with draftsmith's attention ({type(error).__name__}: {first})."
        ) from error
    missing = [layer for layer in range(config.num_hidden_layers) if layer not in seen.layers]
    if len(missing) == config.num_hidden_layers:
        raise UnsupportedModel(
            f"{name} computes attention by itself instead of calling the one that is configured "
            "(transformers' AttentionInterface), so it cannot take a draft tree."
        )
    if missing:
        raise UnsupportedModel(
            f"{name} keeps its own state in layers {missing[:4]} (not attention keys and "
            "values), which cannot roll back after a rejected draft."
        )
    if len(seen.layers) > config.num_hidden_layers:
        raise UnsupportedModel(
            f"{name} runs {len(seen.layers)} attention layers, but its configuration names "
            f"{config.num_hidden_layers}."
        )
    seen.layers = dict(sorted(seen.layers.items()))
    return seen


def around_attention(model: nn.Module, attentions: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The numbered modules that hold these: `model.layers.3` for `model.layers.3.self_attn`."""
    names = {module: name.split(".") for name, module in model.named_modules()}
    found: dict[str, None] = {}
    for attention in attentions:
        parts = names[attention]
        number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        found[".".join(parts[: number + 1])] = None
    return tuple(model.get_submodule(name) for name in found)


def _span(plain: dict[str, Any]) -> int:
    """Far enough to see any window or chunk the configuration names, twice."""
    longest = 256
    for key, value in plain.items():
        if isinstance(value, int) and not isinstance(value, bool):
            if "window" in key or "chunk" in key:
                longest = max(longest, 2 * value)
            elif key == "max_position_embeddings":
                longest = max(longest, value)
    return min(longest, _FARTHEST) + 16


def _probe_attention(
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
    draftsmith_block: Probe | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of a single token to itself, noting what came."""
    seen = draftsmith_block
    if seen is None:
        seen = around(module)[0]
        seen.ambient = True
    refuse_unknown(module, rest)
    seen.note(module, key, value, attention_mask, sliding_window)
    seen.eager_only |= softcap is not None or s_aux is not None
    itself = torch.zeros((1, 1, 1, 1), dtype=query.dtype, device=query.device)
    out = attend_reference(query, key, value, itself, scale=scaling or 1.0, sinks_H=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _probe_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, **options: Any
) -> Tensor:
    """An open mask that carries the rule the model would have built it from."""
    mask = torch.zeros((batch_size, 1, q_length, kv_length), device=options.get("device"))
    mask.draftsmith_rule = options.get("mask_function")  # type: ignore[attr-defined]
    return mask


def _register_probe() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _probe_attention)
    AttentionMaskInterface.register(PROBE, _probe_mask)


def harmless_ids(plain: dict[str, Any], count: int) -> list[int]:
    """Ordinary token ids, spread over the vocabulary; none that the configuration names."""
    special: set[int] = set()
    for key, value in plain.items():
        if key.endswith(("token_id", "token_ids", "token_index")):
            special.update(value if isinstance(value, list) else [value])
    size = int(plain.get("vocab_size") or 2)
    spread = ((7 + 48271 * i) % size for i in range(4 * count + 16 * len(special)))
    ordinary = [token for token in spread if token not in special]
    return ([*ordinary, *[0] * count])[:count]


# Largest disagreement with the model's own eager attention, in standard deviations of the logits.
# Eager attention takes its softmax in float32 even in float64; half precision adds up per layer
# (measured on 24 layers: float32 3e-6, float16 7e-3, bfloat16 6e-2).
_QUANTISED = 0.7
"""The same for weights of 4 and 8 bits against those that they were made of: another model, but no
other architecture (unrelated logits are off by 1.4)."""
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}

#     row 0   c c | p p p     tree   p(last) -+- 0 --- 1    compared in row 0
#     row 1   c c c | p p                     `- 2 --- 3    compared in row 1
_KNOWN, _COMMITTED, _PARENTS, _BRANCHES = 5, (2, 3), (-1, 0, -1, 2), ([0, 1], [2, 3])


def self_check(target: HFTarget, name: str) -> None:
    """Compare our cached tree attention with the model's own eager attention on a few tokens.

    Raises:
        UnsupportedModel: they disagree by more than the dtype explains.
        BackendError: the logits are not finite.
    """
    tolerance = _QUANTISED if target.quantised else _TOLERANCE.get(target.dtype, 0.2)
    ids = np.array(harmless_ids(target.config.to_dict(), 2 * (_KNOWN + len(_PARENTS))))
    known, tree = ids.reshape(2, -1)[:, :_KNOWN], ids.reshape(2, -1)[:, _KNOWN:]
    cache = target.new_cache(2, 2 * _KNOWN)
    started = [known[b, :n].tolist() for b, n in enumerate(_COMMITTED)]
    tokens, block = lay_out(cache, started)
    target.forward(torch.from_numpy(tokens), block, 1, Signals())
    cache.commit(np.array(_COMMITTED))
    pending = [known[b, n:].tolist() for b, n in enumerate(_COMMITTED)]
    tokens, block = lay_out(cache, pending, tree, np.array([_PARENTS, _PARENTS]))
    ours = target.forward(torch.from_numpy(tokens), block, 5, Signals()).logits_BNV
    texts = np.stack([[*known[b], *tree[b, nodes]] for b, nodes in enumerate(_BRANCHES)])
    with target.native("eager"), torch.inference_mode():
        theirs = target.model(
            input_ids=torch.from_numpy(texts).to(target.device), use_cache=False
        ).logits[:, _KNOWN - 1 :]
    ours = torch.stack([ours[b, [0, *(n + 1 for n in ns)]] for b, ns in enumerate(_BRANCHES)])
    error = _disagreement(ours, theirs)
    if bool(error.isnan().any()):
        raise BackendError(
            f"{name} gives NaN on a few ordinary tokens: its weights are broken, or "
            f"{str(target.dtype).removeprefix('torch.')} is too narrow for it."
        )
    # In half precision one token may take another expert at a near-tie: then most must agree.
    rough = target.quantised or target.dtype.itemsize < 4
    worst = float(error.median() if rough else error.max())
    if worst > tolerance:
        raise UnsupportedModel(
            f"{name} gives other logits with draftsmith's attention than with its own (off by "
            f"{worst:.2g} standard deviations, {tolerance:g} allowed): decoding would not be "
            "exact, so it is refused (check=False skips this comparison)."
        )


def _disagreement(ours_RNV: Tensor, theirs_RNV: Tensor) -> Tensor:
    """[R, N]: root mean square difference, in standard deviations of the reference logits."""
    ours, theirs = ours_RNV.double(), theirs_RNV.double()
    same = (ours == theirs) & theirs.isinf()  # forbidden tokens, in both
    gap = torch.where(same, 0.0, ours - theirs)
    spread = torch.where(theirs.isinf(), torch.nan, theirs)
    spread = (spread - spread.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
    broken = ours.isnan().any(-1) | theirs.isnan().any(-1)
    error = gap.square().mean(-1).sqrt() / spread.clamp(min=1e-12)
    return torch.where(broken, torch.nan, error)
