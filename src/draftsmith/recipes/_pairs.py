"""Sentence pairs -> translation examples: `prompt` and `completion` for `draftsmith pretrain`.

Short pairs are joined, so that a model also learns to translate several sentences at once:

    pairs      (Hi., Hallo.)  (Run!, Lauf!)  (Wow!, Toll!)
    examples   Translate to German: Hi. Run!  ->  Hallo. Lauf!
               Translate to German: Wow!      ->  Toll!
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftsmith.errors import InputError
from draftsmith.prompt_text import MINI, filled
from draftsmith.recipes._text import read_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A sentence and its translation."""

    source: str
    target: str

    @property
    def key(self) -> float:
        """A number in [0, 1) that depends on the source alone, so that all translations of a
        sentence fall on the same side of a split."""
        return int.from_bytes(hashlib.sha256(self.source.encode()).digest()[:8], "big") / 2**64


def read_pairs(path: Path, corpora: Collection[str]) -> list[Pair]:
    """The pairs of a file `corpus <TAB> source <TAB> target` that come from these corpora.

    Raises:
        InputError: a line without three columns, or no pair from these corpora.
    """
    out = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line:
            continue
        columns = line.split("\t")
        if len(columns) != 3:
            raise InputError(
                f"{path}, line {number}: expected corpus, source and target separated by tabs, "
                f"got {len(columns)} columns"
            )
        corpus, source, target = (column.strip() for column in columns)
        if corpus in corpora and source and target:
            out.append(Pair(source=source, target=target))
    if not out:
        raise InputError(f"{path}: no pair from {', '.join(sorted(corpora))}")
    return out


def examples(
    pairs: Sequence[Pair], language: str, *, passes: int, most: int, seed: int
) -> Iterator[dict[str, str]]:
    """Every pair once per pass, in groups of 1 to `most` drawn anew for each pass."""
    for number in range(passes):
        rng = np.random.Generator(np.random.PCG64([seed, number]))
        order = rng.permutation(len(pairs))
        at = 0
        while at < len(order):
            size = int(rng.integers(1, most + 1))
            group = [pairs[i] for i in order[at : at + size]]
            at += size
            yield {
                "prompt": prompt(language, " ".join(pair.source for pair in group)),
                "completion": " ".join(pair.target for pair in group),
            }


def prompt(language: str, sentence: str) -> str:
    """What the model is given to translate a sentence."""
    return filled(MINI, language=language, source=sentence)
