"""The configuration of a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.config import Configuration, require

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Attention = Literal["sdpa", "eager"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Configuration):
    """The target: the model whose output law is preserved."""

    target: str
    """Folder or hub id of a decoder-only transformers model."""
    dtype: Dtype = "auto"
    """Number format of weights and arithmetic; auto takes the checkpoint's own."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    attn_implementation: Attention = "sdpa"
    """The attention kernel."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = False
    """Run Python code that a hub model brings along: only if you have read that code."""

    def validate(self) -> None:
        require(bool(self.target.strip()), "--target must name a folder or a hub id, got ''")
