"""How `models/mini-ende` was made: an English -> German target and its draft.

    python benchmarks/mini_ende.py PAIRS.tsv[.xz] [FOLDER]

PAIRS holds lines `corpus <TAB> English <TAB> German`; only the corpora that may be used freely
with attribution are read. An interrupted run continues when the command is repeated.

Sentence pairs -> translation examples: `prompt` and `completion` for `draftsmith pretrain`.

Short pairs are joined, so that a model also learns to translate several sentences at once:

    pairs      (Hi., Hallo.)  (Run!, Lauf!)  (Wow!, Toll!)
    examples   Translate to German: Hi. Run!  ->  Hallo. Lauf!
               Translate to German: Wow!      ->  Toll!
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.data.prompts import MINI, filled
from draftsmith.data.text import TextConfig, read_text
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.distill.pretraining import PretrainResult
from draftsmith.errors import InputError
from draftsmith.provenance import write_text_atomic
from mini_code import train_missing

CORPORA = ("tatoeba", "gnome")
"""CC BY 2.0 (Tatoeba) and CC BY 3.0 (GNOME documentation)."""
HELD_OUT = 0.005
PASSES = 4
MOST_JOINED = 5


def write_examples(pairs_file: Path, folder: Path) -> tuple[Path, Path]:
    """(training, held-out) examples as JSONL; written once."""
    paths = (folder / "train.jsonl", folder / "held_out.jsonl")
    if all(path.exists() for path in paths):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    pairs = read_pairs(pairs_file, CORPORA)
    held = [pair for pair in pairs if pair.key < HELD_OUT]
    kept = [pair for pair in pairs if pair.key >= HELD_OUT]
    for path, chosen, passes in zip(paths, (kept, held), (PASSES, 1), strict=True):
        _write(path, chosen, passes)
    return paths


def _write(path: Path, pairs: list[Pair], passes: int) -> None:
    made = examples(pairs, "German", passes=passes, most=MOST_JOINED, seed=0)
    lines = (json.dumps(example, ensure_ascii=False) for example in made)
    write_text_atomic(path, "\n".join(lines) + "\n")


def target(folder: Path, data: TextConfig) -> PretrainOptions:
    """9.5 M parameters: 10 layers of 256."""
    return PretrainOptions(
        data=data,
        model=ArchitectureConfig(size="8m", kv_heads=2, vocab_size=8192, context=1024),
        training=ScheduleConfig(
            duration="6000steps",
            block_length=256,
            batch_tokens=2048,
            learning_rate=2e-3,
            min_learning_rate=1e-5,
            warmup=200,
            schedule="stable",
            decay_share=0.5,
        ),
        out=folder / "target",
        save_every=100,
        eval_every=500,
    )


def draft(folder: Path, data: TextConfig) -> PretrainOptions:
    """1.4 M parameters: two layers of 128, with the target's tokenizer."""
    return PretrainOptions(
        data=data,
        model=ArchitectureConfig(
            tokenizer=str(folder / "target"),
            layers=2,
            heads=2,
            kv_heads=1,
            hidden=128,
            intermediate=352,
            context=1024,
        ),
        training=ScheduleConfig(
            duration="3000steps",
            block_length=256,
            batch_tokens=2048,
            learning_rate=4e-3,
            min_learning_rate=2e-5,
            warmup=100,
            schedule="stable",
            decay_share=0.5,
        ),
        out=folder / "draft",
        save_every=250,
    )


def main(pairs_file: Path, folder: Path) -> list[PretrainResult]:
    """Train both; what is finished already is left alone, what was interrupted continues."""
    train, held_out = write_examples(pairs_file, folder / "examples")
    data = TextConfig(text=(str(train),), eval_text=(str(held_out),))
    return train_missing((target(folder, data), draft(folder, data)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {__spec__.name} PAIRS.tsv[.xz] [FOLDER]")
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "models/mini-ende"))


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
