"""How `models/mini-ende` was made: an English -> German target and its draft.

    python -m draftsmith.recipes.mini_ende PAIRS.tsv[.xz] [FOLDER]

PAIRS holds lines `corpus <TAB> English <TAB> German`; only the corpora that may be used freely
with attribution are read. An interrupted run continues when the command is repeated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from draftsmith.option_groups import ArchitectureOptions, ScheduleOptions, TextOptions
from draftsmith.options import PretrainOptions
from draftsmith.provenance import write_text_atomic
from draftsmith.recipes._pairs import Pair, examples, read_pairs
from draftsmith.recipes.mini_code import train_missing
from draftsmith.recipes.pretrain import PretrainResult

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


def target(folder: Path, data: TextOptions) -> PretrainOptions:
    """9.5 M parameters: 10 layers of 256."""
    return PretrainOptions(
        data=data,
        model=ArchitectureOptions(size="8m", kv_heads=2, vocab_size=8192, context=1024),
        training=ScheduleOptions(
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


def draft(folder: Path, data: TextOptions) -> PretrainOptions:
    """1.4 M parameters: two layers of 128, with the target's tokenizer."""
    return PretrainOptions(
        data=data,
        model=ArchitectureOptions(
            tokenizer=str(folder / "target"),
            layers=2,
            heads=2,
            kv_heads=1,
            hidden=128,
            intermediate=352,
            context=1024,
        ),
        training=ScheduleOptions(
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
    data = TextOptions(text=(str(train),), eval_text=(str(held_out),))
    return train_missing((target(folder, data), draft(folder, data)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {__spec__.name} PAIRS.tsv[.xz] [FOLDER]")
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "models/mini-ende"))
