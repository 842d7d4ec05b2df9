"""What --draft-tree means.

4,2,2,1       children per node at each depth
10x6:59       10 beams, 6 deep, of all that they say the 59 most probable (EAGLE-2)
tree.json     any nodes: a JSON list of paths, [[0], [1], [0, 0], ...], each node by the ranks of
              its ancestors and its own (EAGLE-1, Medusa)

How far verification leans towards a draft: the values that a bias may have, and their risks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.config import OptionGroup, parse_list, require
from draftsmith.errors import InputError

_DYNAMIC = re.compile(r"(\d+)x(\d+):(\d+)")
FORMS = "4,2,2,1 (children at each depth), 10x6:59 (beams x depth : nodes) or a JSON file of paths"


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeText:
    """A tree as it was asked for; fields as in `types.TreeShape`, which needs torch."""

    widths: tuple[int, ...] = ()
    paths: tuple[tuple[int, ...], ...] = ()
    keep: int | None = None


def parse_tree(text: str) -> TreeText:
    """Read --draft-tree.

    Raises:
        InputError: naming what is wrong and what the forms are.
    """
    if text.endswith(".json"):
        return TreeText(paths=_read_paths(Path(text)))
    dynamic = _DYNAMIC.fullmatch(text.strip())
    try:
        if dynamic:
            beams, depth, keep = map(int, dynamic.groups())
            out = TreeText(widths=(beams,) * depth, keep=keep)
        else:
            out = TreeText(widths=tuple(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--draft-tree must be {FORMS}; got {text!r}") from None
    if not out.widths or min(*out.widths, 1 if out.keep is None else out.keep) < 1:
        raise InputError(f"--draft-tree: every number must be at least 1, got {text!r}")
    return out


def _read_paths(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--draft-tree {path} cannot be read: {error}") from error
    good = isinstance(found, list) and all(
        isinstance(one, list) and one and all(type(rank) is int and rank >= 0 for rank in one)
        for one in found
    )
    if not good or not found:
        raise InputError(
            f"--draft-tree {path} must hold a list of paths, such as [[0], [1], [0, 0]]"
        )
    paths = tuple(sorted({tuple(one) for one in found}, key=lambda one: (len(one), one)))
    try:
        check_paths(paths)
    except ValueError as error:
        raise InputError(f"--draft-tree {path}: {error}") from None
    return paths


def check_paths(paths: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError unless every node's parent and elder siblings come before it."""
    known: set[tuple[int, ...]] = {()}
    length = 1
    for path in paths:
        *above, rank = path or (-1,)
        complete = tuple(above) in known and (rank == 0 or (*above, rank - 1) in known)
        if rank < 0 or len(path) < length or path in known or not complete:
            raise ValueError(f"the node {path} comes without its ancestors or elder siblings")
        known.add(path)
        length = len(path)


def check_bias(value: float, name: str = "bias") -> None:
    """Raise `InputError` unless this can be a bias; NaN cannot."""
    if not 0 <= value <= 1:
        meant = "0: exact, from 0.5 on every draft stays"
        raise InputError(f"{name} must lie between 0 and 1, got {value} ({meant})")


def bias_warning(*biases: float | None) -> str | None:
    """What to know before such a bias is used; None: nothing."""
    if any(bias is not None and bias >= 0.5 for bias in biases):
        return "from a bias of 0.5 on text is only appended: early mistakes stay, quality collapses"
    return None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """What turns logits into the law that is drawn from, beside the temperature."""

    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one."""
    repetition_penalty: float = 1.0
    """Divide (multiply, if negative) the logits of tokens that occurred; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every generated token."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it was generated."""
    logit_bias: str = ""
    """Added to logits: TOKEN_ID:BIAS pairs, such as 17:-5,42:1.5."""
    seed: int = 0
    """Seed of all draws; the same seed gives the same text."""

    def biases(self) -> dict[int, float]:
        """`logit_bias`, parsed."""
        biases: dict[int, float] = {}
        for pair in (
            parse_list(self.logit_bias, str, name="--logit-bias") if self.logit_bias else ()
        ):
            token, _, bias = pair.partition(":")
            try:
                biases[int(token)] = float(bias)
            except ValueError:
                hint = "expected TOKEN_ID:BIAS pairs such as 17:-5,42:1.5"
                raise InputError(f"--logit-bias: {hint}, got {pair!r}") from None
        return biases

    def validate(self) -> None:
        require(self.top_k >= 0, f"--top-k must be 0 (off) or more, got {self.top_k}")
        require(0 < self.top_p <= 1, f"--top-p must be above 0 and at most 1, got {self.top_p}")
        require(0 <= self.min_p <= 1, f"--min-p must lie between 0 and 1, got {self.min_p}")
        penalty = self.repetition_penalty
        good = math.isfinite(penalty) and penalty > 0
        require(good, f"--repetition-penalty must be above 0, got {penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            flag = f"--{name.replace('_', '-')}"
            require(math.isfinite(value), f"{flag} must be a finite number, got {value}")
        for token, bias in self.biases().items():
            require(token >= 0, f"--logit-bias: a token id is 0 or more, got {token}")
            # -inf forbids a token; +inf and NaN have no law.
            good = math.isfinite(bias) or bias == -math.inf
            require(good, f"--logit-bias: the bias of token {token} cannot be {bias}")
        good = 0 <= self.seed < 2**63
        require(good, f"--seed must be a whole number of 0 or more, got {self.seed}")


def check_temperature(value: float) -> None:
    """Raise `InputError` unless `value` is a usable temperature."""
    good = math.isfinite(value) and value >= 0
    require(good, f"--temperature must be 0 (greedy) or a positive number, got {value}")
