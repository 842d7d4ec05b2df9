"""What training writes: checkpoints that survive a kill at any moment, and the finished model.

    checkpoints/step-00000200/      weights.safetensors  optimizer.pt  state.json  manifest.json
    checkpoints/.step-...           being written; ignored, removed by the next save

A checkpoint is written to a temporary folder, every file and the folder are synced, then one
rename makes it visible. The manifest holds the sha256 of every other file and is checked at load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.drafters.vocabulary import SUBSET_FILE, VocabularySubset
from draftsmith.errors import BackendError, DraftsmithError
from draftsmith.provenance import (
    Run,
    atomic_path,
    free_bytes,
    fresh_beside,
    is_write_failure,
    read_json,
    system_error,
)

LOADING = """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")
"""
"""How a README says that a model is loaded."""

MANIFEST = "manifest.json"
FORMAT = 1
_PREFIX = "step-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """All that a resumed run needs; noise and sample order are functions of the step."""

    step: int
    """Optimiser steps done."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    """Its state, by number of the parameter; empty where weights alone are kept."""
    state: dict[str, Any]
    """JSON: counters, loss history, and what the run was started with."""


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write one checkpoint atomically, keep it and the last ones before, `keep` in all.

    Raises BackendError (disk, rights); then the earlier checkpoints are untouched.
    """
    final, room = folder / f"{_PREFIX}{checkpoint.step:08d}", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*"):  # by killed saves
            shutil.rmtree(left, ignore_errors=True)
        with atomic_path(final) as part:
            try:
                _write(part, checkpoint)
            except Exception:
                room = _room(folder)  # as long as what was written of it is there
                raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DraftsmithError) else error
        if not isinstance(cause, Exception) or not (
            is_write_failure(cause) or isinstance(cause, RuntimeError)  # torch raises these
        ):
            raise
        reason = (str(cause).splitlines() or ["unknown error"])[0]
        raise BackendError(
            f"could not write the checkpoint {final}: {reason}{room}; earlier checkpoints are "
            "untouched, make room and run the same command again to continue"
        ) from cause
    others = [path for path in complete(folder) if path != final]
    for old in others[: max(0, len(others) - (keep - 1))]:
        remove(old)
    return final


def _write(part: Path, checkpoint: Checkpoint) -> None:
    part.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in checkpoint.weights.items()}
    save_file(weights, part / "weights.safetensors")
    torch.save(checkpoint.optimizer, part / "optimizer.pt")
    state = {"step": checkpoint.step, **checkpoint.state}
    (part / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    digests = {path.name: sha256(path) for path in sorted(part.iterdir())}
    manifest = json.dumps({"format": FORMAT, "sha256": digests}, indent=1)
    (part / MANIFEST).write_text(manifest, encoding="utf-8")


def _room(folder: Path) -> str:
    with contextlib.suppress(OSError):  # a disk that does not say
        return f" ({free_bytes(folder):,} bytes are free on its disk)"
    return ""


def complete(folder: Path) -> list[Path]:
    """Visible checkpoints, oldest first. Half-written ones are never visible."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(_PREFIX) and (path / MANIFEST).is_file()
    )


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return max(complete(folder), default=None)


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises BackendError that names the damaged file."""
    state = read_state(path)
    weights = _read(path / "weights.safetensors", load_file)
    optimizer = _read(
        path / "optimizer.pt",
        lambda file: torch.load(file, map_location="cpu", weights_only=True),
    )
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise BackendError(f"{path / 'weights.safetensors'} holds non-finite values in {name}")
    step = state.pop("step")
    return Checkpoint(step=step, weights=weights, optimizer=optimizer, state=state)


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, `step` included, once all its files are verified."""
    verify(path)
    state: dict[str, Any] = _read(path / "state.json", read_json)
    return state


def verify(path: Path) -> None:
    """Every file that the manifest lists exists and has its sha256; else BackendError."""
    manifest = _read(path / MANIFEST, read_json)
    good = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    digests = manifest.get("sha256") if good else None
    if not isinstance(digests, dict):
        raise BackendError(
            f"{path / MANIFEST} is not a checkpoint manifest of format {FORMAT}: it is damaged, or "
            "of another version; remove this checkpoint folder to continue from the one before"
        )
    for name, digest in digests.items():
        if not (path / name).is_file():
            raise BackendError(f"{path / name} is missing; remove this checkpoint folder")
        if sha256(path / name) != digest:
            raise BackendError(
                f"{path / name} is damaged (its sha256 is not the manifest's); "
                "remove this checkpoint folder to continue from the one before"
            )


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(path)
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        raise BackendError(f"cannot read {path}: {error}") from error
    except pickle.UnpicklingError as error:
        raise BackendError(
            f"{path} holds more than tensors and plain data; it is refused"
        ) from error


def remove(path: Path) -> None:
    """Delete a checkpoint: hidden by a rename first, so that no half of it is ever visible."""
    hidden = path.with_name(f".old-{path.name}-{os.getpid()}")
    with contextlib.suppress(OSError):  # what cannot be removed is no reason to fail a save
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


# --------------------------------------------------------------------------- finished models


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    subset: VocabularySubset | None,
    dtype: str,
) -> None:
    """Save a model and its tokenizer, the target's, in the format of transformers, and beside them
    which of the target's tokens it has where these are a subset."""
    model = model.to(getattr(torch, dtype))
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(
        **{name: getattr(model.config, name) for name in names}
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if subset is not None:
        subset.save(folder, tokenizer)


def model_ending(subset: VocabularySubset | None) -> str:
    """The end of the README of a model: what its tokens are, and how it is loaded."""
    if subset is None:
        return LOADING
    tokens = (
        f"\nIts vocabulary is {len(subset.d2t)} tokens of the target's; `{SUBSET_FILE}` holds "
        "their ids in the target's vocabulary (`d2t`). The tokenizer files are the target's.\n"
    )
    return tokens + LOADING


@contextlib.contextmanager
def finished_folder(
    out: Path, record: Run, results: Mapping[str, object], readme: str
) -> Iterator[Path]:
    """A folder for the files of a finished model, which then come to `out` as whole files, one by
    one, with README.md and, last, run.json. Raises BackendError for what the disk refuses."""
    temporary = fresh_beside(out / "model")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        yield temporary
        (temporary / "README.md").write_text(readme, encoding="utf-8")
        usual = (temporary / "README.md").stat().st_mode
        for path in sorted(temporary.iterdir()):
            path.chmod(usual)  # safetensors gives its files to the owner alone
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, out / path.name)
        record.write(out, results=results)
    except Exception as error:
        # run.json comes with a sentence of its own, which does not know of the checkpoint
        cause = error.__cause__ if isinstance(error, DraftsmithError) else error
        if not (isinstance(cause, Exception) and is_write_failure(cause)):
            raise
        found = system_error(cause)
        raise BackendError(
            f"could not write the model to {out}: {found.strerror or found}; nothing was "
            "half-written and the training checkpoint is kept: make room and run the same command "
            "again"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
