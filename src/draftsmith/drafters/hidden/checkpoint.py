"""Folders of drafters over hidden states: written, read, and refused where they do not fit.

    FOLDER/config.json           measures of the network, as transformers writes a Llama's
    FOLDER/model.safetensors     its weights, named as in the released checkpoints
        or medusa_lm_head.safetensors
    FOLDER/drafter.json          ours: kind, options, target and, from `distill`, trained_length
                                 (released folders have none)

Released folders load too: names with the prefix `model.` or `medusa_head.`, a copy of the target's
embedding, which must be the target's, and, where the option `pickled` asks for it, tensors out of a
pytorch_model.bin or medusa_lm_head.pt (no code in them is run). Every tensor is used or refused by
name, before a network of the sizes in config.json is made.

`drafter.json` records which target a trained drafter belongs to, as "target": {"hidden_size",
"vocab_size", "layers", "vocabulary_sha256"}. The target of a released folder is checked by the
shapes of the weights alone. A config.json that asks for something that the network here does not
compute is refused by name.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.core.types import Signals
from draftsmith.drafters.base import READING, TargetView, options_marked
from draftsmith.drafters.config import drafter_manifest
from draftsmith.drafters.hidden.network import target_ids
from draftsmith.drafters.vocabulary import vocabulary_sha256
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import atomic_path, read_json, write_json_atomic
from draftsmith.targets.hf import loading

WEIGHTS, MEDUSA = "model.safetensors", "medusa_lm_head.safetensors"
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
MANIFEST = "drafter.json"
EMBEDDING = "embed_tokens.weight"
D2T, T2D = "d2t", "t2d"
COMPARED_ROWS = 4096
"""Rows of a stored copy of the embedding that are compared with the target's."""
RENAMED = {"draft_id_to_target_id": D2T}
"""Names that serving engines give to tensors."""


def save_network(
    network: nn.Module,
    config: LlamaConfig,
    folder: Path,
    *,
    kind: str,
    options: Any,
    target: Mapping[str, Any],
    weights: str = WEIGHTS,
    trained_length: int | None = None,
) -> None:
    """Write a drafter's folder; `options`: the drafter's `Config`; `target`: see `target_facts`;
    `weights`: the file's name; `trained_length`: see `Drafter`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: one.detach().cpu().contiguous() for name, one in network.state_dict().items()}
    if D2T in tensors:  # as in the released checkpoints
        tensors[T2D] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors[T2D][target_ids(tensors[D2T])] = True
    with atomic_path(folder / weights) as part:
        save_file(tensors, part)
    write_json_atomic(folder / "config.json", written_config(config))
    own = {"source", *options_marked(options, READING)}  # of the folder that was read
    known = {name: value for name, value in asdict(options).items() if name not in own}
    manifest: dict[str, Any] = {"kind": kind, "options": known, "target": target}
    if trained_length is not None:
        manifest["trained_length"] = trained_length
    write_json_atomic(folder / MANIFEST, manifest)


def load_network(network: nn.Module, folder: Path, target: TargetView) -> None:
    """Fill the network with the folder's weights.

    Raises:
        BackendError: see `read_tensors` and `check_tensors`.
    """
    found = read_tensors(folder, pickled=False)
    network.load_state_dict(check_tensors(found, network, folder, target))


def check_tensors(
    found: Mapping[str, Tensor], outline: nn.Module, folder: Path, target: TargetView
) -> dict[str, Tensor]:
    """The folder's tensors as a state of the network.

    Args:
        found: see `read_tensors`.
        outline: the network, or one without memory (on the meta device).

    Raises:
        BackendError: tensors that are missing, unknown, of another shape or not finite; maps
            between vocabularies that cannot be; or an embedding that is not the target's: the
            drafter was made for another target.
    """
    found = dict(found)
    embedding = found.pop(EMBEDDING, None)
    if embedding is not None:
        _check_embedding(embedding, target, folder)
    subset = found.pop(T2D, None)
    wanted = outline.state_dict()
    if D2T in wanted and len(wanted[D2T]) == target.vocab_size:  # equal ids: no map is needed
        found.setdefault(D2T, torch.zeros(target.vocab_size, dtype=torch.long))
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        parts = [("lacks", missing), ("holds, and its kind has no,", unknown)]
        difference = "; ".join(f"{word} {_some(names)}" for word, names in parts if names)
        raise BackendError(
            f"The drafter in {folder} {difference}: it is of another kind, or incomplete; name its "
            "kind (KIND:FOLDER), or train or convert it again."
        )
    for name, one in sorted(found.items()):
        if one.shape != wanted[name].shape:
            raise BackendError(
                f"The drafter in {folder} does not fit its config.json: {name} is "
                f"{list(one.shape)}, but should be {list(wanted[name].shape)}; put back the file "
                "that was changed, or train or convert the drafter again."
            )
        real = wanted[name].is_floating_point()
        if one.is_floating_point() != real or one.itemsize == 1:
            raise BackendError(
                f"The drafter in {folder} holds {name} as {str(one.dtype).removeprefix('torch.')}, "
                f"where {'floating-point' if real else 'whole'} numbers of 16 to 64 bits belong"
                f"{': quantised weights are not supported, convert it' if real else ''}."
            )
        if one.is_floating_point() and not bool(one.isfinite().all()):
            raise BackendError(
                f"The drafter in {folder} has weights that are not finite, in {name}: its training "
                "failed, or the file was damaged."
            )
    if D2T in found:
        _check_vocabulary(found[D2T], subset, target.vocab_size, folder)
    return found


def read_tensors(folder: Path, *, pickled: bool) -> dict[str, Tensor]:
    """All tensors of a folder, named as here.

    Args:
        pickled: read also a file that can hold more than tensors.

    Raises:
        BackendError: none of the known files is there, or it cannot be read.
    """
    files = [folder / name for name in (MEDUSA, WEIGHTS, *PICKLED)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        names = ", ".join(each.name for each in files)
        raise BackendError(f"The drafter's folder {folder} holds no weights ({names}).")
    if file.name in PICKLED and not pickled:
        raise BackendError(
            f"The drafter's weights in {file} are pickled, which is not read by default: give the "
            "drafter option pickled=true (tensors alone are read, and no code is run), or write "
            f"them as {WEIGHTS} with safetensors.torch.save_file."
        )
    with loading(f"the drafter's weights in {file}"):
        if file.name not in PICKLED:
            loaded = load_file(file)
        else:
            try:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, EOFError, OSError, RuntimeError) as error:
                raise BackendError(
                    f"The drafter's weights in {file} cannot be read: it is damaged, or holds more "
                    "than tensors, and code in a pickle is never run."
                ) from error
        tensors = isinstance(loaded, dict) and all(isinstance(t, Tensor) for t in loaded.values())
        if not tensors:
            raise BackendError(f"The drafter's weights in {file} hold something else than tensors.")
        named = {_name(str(name)): one for name, one in loaded.items()}
    if len(named) < len(loaded):
        raise BackendError(f"The drafter's weights in {file} hold a tensor under two names.")
    return named


def _name(stored: str) -> str:
    bare = stored.removeprefix("model.").removeprefix("medusa_head.")
    return RENAMED.get(bare, bare)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_embedding(embedding: Tensor, target: TargetView, folder: Path) -> None:
    """It must be the target's: looked at in rows from all over the vocabulary."""
    size = target.vocab_size
    ids = torch.arange(0, size, max(1, size // COMPARED_ROWS), device=target.device)
    with torch.no_grad():
        theirs = target.embed(ids).float().cpu()
    same = embedding.dim() == 2 and embedding.shape[1] == theirs.shape[1] and len(embedding) >= size
    if not same or not torch.allclose(embedding[ids.cpu()].float(), theirs, rtol=0.02, atol=1e-3):
        raise BackendError(
            f"The drafter in {folder} was made for another target: its copy of the embedding is "
            "not this target's."
        )


def _check_vocabulary(d2t: Tensor, t2d: Tensor | None, vocab_size: int, folder: Path) -> None:
    """`d2t`: a draft id's distance to the target's; `t2d`: whether the drafter has a token."""
    ids = target_ids(d2t.cpu())
    outside = (ids < 0) | (ids >= vocab_size)
    falls = torch.zeros_like(outside)
    falls[1:] = ids[1:] <= ids[:-1]
    if bool((outside | falls).any()):
        at = int((outside | falls).int().argmax())
        fault = f"which has ids below {vocab_size}"
        if not outside[at]:
            before = int(ids[at - 1])
            again = before == ids[at]
            fault = "as to the one before it" if again else f"behind {before}: they must ascend"
        raise BackendError(
            f"The drafter in {folder} has a map of its vocabulary (d2t) that gives its token {at} "
            f"the id {int(ids[at])} of the target, {fault}; give the target that it was made for, "
            "or train or convert it again."
        )
    if t2d is None:
        return
    same = len(t2d) == vocab_size and t2d.bool().sum() == len(ids) and t2d.bool().cpu()[ids].all()
    if not bool(same):
        raise BackendError(
            f"The drafter in {folder} has maps between vocabularies that contradict each other "
            "(d2t and t2d): train or convert it again."
        )


_WORDS = {
    "hidden_size": "a hidden size of {}",
    "vocab_size": "a vocabulary of {} tokens",
    "layers": "states read from the layers {}",
    "vocabulary_sha256": "the tokenizer {!s:.12}",
}


def target_facts(target: TargetView, signals: Signals) -> dict[str, Any]:
    """What a drafter must agree on with its target, as JSON."""
    return {
        "hidden_size": None if target.config is None else int(target.config.hidden_size),
        "vocab_size": target.vocab_size,
        "layers": list(signals.layers),
        "vocabulary_sha256": vocabulary_sha256(target.tokenizer),
    }


def manifest_of(folder: Path) -> dict[str, Any]:
    """See `drafter_manifest`; empty for a released folder.

    Raises:
        InputError: it cannot be read.
    """
    return drafter_manifest(folder) if (folder / MANIFEST).is_file() else {}


def check_target(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse the drafter of another target, before anything is read.

    Raises:
        BackendError: naming what differs.
    """
    known = manifest_of(folder).get("target", {})
    if difference := _difference(known, facts):
        raise BackendError(
            f"The drafter in {folder} was made for another target: {difference}. Give the target "
            "that it was trained for."
        )


def check_bound(drafter: nn.Module, bound: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to bind a drafter once more to a target of other measures or with other tokens.

    Raises:
        InputError: naming what differs.
    """
    if difference := _difference(bound, facts):
        raise InputError(
            f"This {type(drafter).__name__} is bound to another target: {difference}. Load or make "
            "another drafter for this target."
        )


def _difference(known: dict[str, Any], facts: dict[str, Any]) -> str | None:
    for name, phrase in _WORDS.items():
        one, other = known.get(name), facts[name]
        if one is not None and other is not None and one != other:
            return f"one with {phrase.format(one)}, and this one has {phrase.format(other)}"
    return None


COMPUTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "norm_before_residual": (False, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
}
"""Keys of a configuration that change the arithmetic; the last four are EAGLE-3's."""
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


def read_config(folder: Path, own: Mapping[str, object] | None = None) -> LlamaConfig:
    """The measures of the network in a folder. `own`: further keys, and what the network computes:
    these, which a released folder need not name, are taken from here.

    Raises:
        BackendError: there is no config.json that can be read, or it asks for other arithmetic.
    """
    with loading(f"the drafter's config.json in {folder}"):
        try:
            values = read_json(folder / "config.json", "configuration")
        except InputError as error:
            raise BackendError(str(error)) from None
        if "qkv_bias" in values:  # released code reads this key alone
            values["attention_bias"] = values["qkv_bias"]
        if "rope_theta" in (values.get("rope_parameters") or {}):  # transformers prefers the others
            values = {name: one for name, one in values.items() if name not in RELEASED_ROPE}
        own = own or {}
        computed = {**COMPUTED, **{key: (one, None) for key, one in own.items()}}
        for key, known in computed.items():
            if values.get(key, known[0]) not in known:
                raise BackendError(
                    f"The drafter in {folder} was made for other arithmetic: {key} is "
                    f"{values[key]!r} in its config.json, and only {known[0]!r} is computed here."
                )
        return LlamaConfig(**{**values, **own})


def check_config(config: LlamaConfig, target: TargetView, folder: Path) -> None:
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
    """The fused layers by a configuration (0-based); None: it does not name them.

    Inside `eagle_config` a number is that of the layer whose output is meant (SpecForge, SGLang);
    beside it, as vLLM reads it, that of the layer *in front of which* the state is taken.

    Raises:
        BackendError: the target, of `count` layers, has no such ones.
    """
    nested = getattr(config, "eagle_config", None) or {}
    if not isinstance(nested, dict):
        raise BackendError(
            f"The drafter in {folder} cannot be loaded: eagle_config is {nested!r} in its "
            "config.json, which should be an object."
        )
    inside = nested.get(LAYERS)
    numbers, first = (inside, 0) if inside else (getattr(config, LAYERS, None), 1)
    if not numbers:
        return None
    good = (
        isinstance(numbers, list) and len(numbers) == 3 and all(isinstance(n, int) for n in numbers)
    )
    if not good or not all(first <= one < first + count for one in numbers):
        raise BackendError(
            f"The drafter in {folder} was made for another target: {LAYERS} is {numbers!r} in its "
            f"config.json, which should be three numbers from {first} to {first + count - 1}."
        )
    return tuple(one - first for one in numbers)
