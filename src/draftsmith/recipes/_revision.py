"""Which weights a target has: what a store of its laws says, and a training from it asks."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import cached_file, extract_commit_hash

from draftsmith.distill.checkpoint import sha256
from draftsmith.provenance import digest
from draftsmith.targets.hf import loading


def revision_of(target: str, revision: str | None = None) -> str | None:
    """Of a folder a digest of its weights; of a hub model the commit that `revision` is today.

    Where the commit cannot be told, `revision` itself. Raises BackendError: there is no such model.
    """
    weights = sorted(Path(target).glob("*.safetensors"))
    if weights:
        return digest([sha256(path) for path in weights])
    with loading(f"the configuration of {target!r}"):
        # its place in the cache names the commit; configurations no longer do
        config = cached_file(target, "config.json", revision=revision or "main")
    commit: str | None = extract_commit_hash(config, None)
    return commit or revision
