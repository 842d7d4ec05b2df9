"""Networks of feature-level drafters on disk.

    FOLDER/config.json           measures of the network, as transformers writes a Llama's
    FOLDER/model.safetensors     its weights, named as in the released checkpoints
        or medusa_lm_head.safetensors
    FOLDER/drafter.json          ours: kind, options and target (released folders have none)

Released folders load too: pytorch_model.bin and medusa_lm_head.pt (weights only, no code), names
with the prefix `model.` or `medusa_head.`, and a copy of the target's embedding, which must be the
target's. Every tensor is used or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.drafters._base import TargetView
from draftsmith.drafters._measures import written_config
from draftsmith.errors import BackendError
from draftsmith.provenance import atomic_path, write_json_atomic
from draftsmith.targets.hf import loading

WEIGHTS, MEDUSA = "model.safetensors", "medusa_lm_head.safetensors"
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
MANIFEST = "drafter.json"
EMBEDDING = "embed_tokens.weight"
D2T, T2D = "d2t", "t2d"
COMPARED_ROWS = 4096
"""Of a copy of the embedding."""
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
) -> None:
    """Write a drafter's folder; `options`: the drafter's `Config`; `target`: see `_kinship.py`;
    `weights`: the file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: one.detach().cpu().contiguous() for name, one in network.state_dict().items()}
    if D2T in tensors:  # as in the released checkpoints
        tensors[T2D] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors[T2D][target_ids(tensors[D2T])] = True
    with atomic_path(folder / weights) as part:
        save_file(tensors, part)
    write_json_atomic(folder / "config.json", written_config(config))
    known = {name: value for name, value in asdict(options).items() if name != "source"}
    write_json_atomic(folder / MANIFEST, {"kind": kind, "options": known, "target": target})


def load_network(network: nn.Module, folder: Path, target: TargetView) -> None:
    """Fill the network with the folder's weights.

    Raises:
        BackendError: no weights, or tensors that are missing, unknown, of another shape or not
            finite; maps between vocabularies that cannot be; or an embedding that is not the
            target's: the drafter was made for another target.
    """
    found = read_tensors(folder)
    embedding = found.pop(EMBEDDING, None)
    if embedding is not None:
        _check_embedding(embedding, target, folder)
    subset = found.pop(T2D, None)
    wanted = network.state_dict()
    if D2T in wanted and len(wanted[D2T]) == target.vocab_size:
        found.setdefault(D2T, torch.zeros_like(wanted[D2T]))  # equal ids: no map is needed
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        parts = [("lacks", missing), ("holds, and its kind has no,", unknown)]
        said = "; ".join(f"{word} {_some(names)}" for word, names in parts if names)
        raise BackendError(f"The drafter in {folder} {said}: it is of another kind, or incomplete.")
    for name, one in sorted(found.items()):
        if one.shape != wanted[name].shape:
            raise BackendError(
                f"The drafter in {folder} does not fit its config.json: {name} is "
                f"{list(one.shape)}, but should be {list(wanted[name].shape)}."
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
    network.load_state_dict(found)


def target_ids(d2t: Tensor) -> Tensor:
    """[Vd]: the target's id of each draft id, from the distances between them."""
    return d2t.long() + torch.arange(len(d2t), device=d2t.device)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, named as here.

    Raises:
        BackendError: none of the known files is there, or it cannot be read.
    """
    with loading(f"the drafter's weights in {folder}"):
        for name in (MEDUSA, WEIGHTS):
            if (folder / name).is_file():
                return _plain(load_file(folder / name))
        for name in PICKLED:
            if (folder / name).is_file():
                return _plain(torch.load(folder / name, map_location="cpu", weights_only=True))
    names = ", ".join((WEIGHTS, MEDUSA, *PICKLED))
    raise BackendError(f"The drafter's folder {folder} holds no weights ({names}).")


def _plain(loaded: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    bare = {
        str(name).removeprefix("model.").removeprefix("medusa_head."): one
        for name, one in loaded.items()
    }
    return {RENAMED.get(name, name): one for name, one in bare.items()}


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
    """`d2t`: a draft id's distance to the target's; `t2d`: whether the drafter knows a token."""
    ids = target_ids(d2t.cpu())
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not inside or not bool((ids[1:] > ids[:-1]).all()):
        raise BackendError(
            f"The drafter in {folder} has a map of its vocabulary (d2t) that gives no ascending "
            f"token ids below {vocab_size}: it was made for another target, or is damaged."
        )
    if t2d is None:
        return
    same = len(t2d) == vocab_size and t2d.bool().sum() == len(ids) and t2d.bool().cpu()[ids].all()
    if not bool(same):
        raise BackendError(
            f"The drafter in {folder} has maps between vocabularies that contradict each other "
            "(d2t and t2d): train or convert it again."
        )
