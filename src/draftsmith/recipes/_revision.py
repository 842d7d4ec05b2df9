"""Which weights a target has: what a store of its laws says, and a training from it asks."""

from __future__ import annotations

from pathlib import Path

from draftsmith.distill.checkpoint import sha256
from draftsmith.provenance import digest


def revision_of(target: str, revision: str | None = None) -> str | None:
    """Of a folder a digest of its weights; of a hub model the revision that is asked for."""
    weights = sorted(Path(target).glob("*.safetensors"))
    return digest([sha256(path) for path in weights]) if weights else revision
