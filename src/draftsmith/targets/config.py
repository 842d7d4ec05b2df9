"""The configuration of a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from draftsmith.config import Configuration, is_whole, require, short

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Attention = Literal["sdpa", "eager"]
Weights = Literal["auto", "bf16", "w8a8", "int8", "int4"]
MOST_WIDE = 4096
"""Tokens of a forward of fixed width; a draft has no more nodes either."""


def check_weights(weights: str) -> None:
    """InputError for a format of weights that there is not."""
    known = ", ".join(get_args(Weights))
    require(weights in get_args(Weights), f"weights must be one of {known}, got {weights!r}")


def check_fixed_width(width: int | None, attn_implementation: str) -> None:
    """InputError for what is no number of tokens of a forward, or beside an attention that sums in
    another order over a longer cache."""
    require(
        width is None or (is_whole(width) and 1 <= width <= MOST_WIDE),
        f"--fixed-width must be 1 to {MOST_WIDE} tokens, got {short(width)}",
    )
    require(
        width is None or attn_implementation != "eager",
        "--fixed-width: eager attention sums in another order over a longer cache, so leave "
        "out --attn-implementation eager",
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Configuration):
    """The target: the model whose output law is preserved."""

    target: str
    """A decoder-only model: folder or hub id of transformers, FILE.gguf, or a package with one."""
    dtype: Dtype = "auto"
    """Number format of weights and arithmetic; auto takes the checkpoint's own."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    attn_implementation: Attention = "sdpa"
    """The attention kernel."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    weights: Weights = "auto"
    """Format that the compiled engine computes in. auto: the checkpoint's own, GGUF's blocks among
    them. int8 and int4 have a scale for each 32 weights, w8a8 for about 128: another model."""
    compile: bool = True
    """Run models of the Llama family on a CPU in C++, which is built at first use; others, and
    machines without a C++ compiler, run transformers' code."""
    fixed_width: int | None = None
    """Run every forward of transformers' code by exactly this many tokens (16, say), so that drafts
    change no greedy token in half precision either; the compiled engine needs no such thing."""
    trust_remote_code: bool = False
    """Run Python code that a hub model brings along: only if you have read that code."""

    def validate(self) -> None:
        require(bool(self.target.strip()), "--target must name a folder or a hub id, got ''")
        require(
            self.compile or self.weights == "auto",
            f"--weights {self.weights}: only the compiled engine computes in it, so leave out "
            "--no-compile",
        )
        check_fixed_width(self.fixed_width, self.attn_implementation)
