"""How `models/mini-code` was made: a target and its draft, from the standard library's sources.

    python benchmarks/mini_code.py [FOLDER]       (about an hour on two cores)

The text is on every machine that runs Python; another version of Python gives other models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from draftsmith.commands.pretrain import PretrainOptions, run
from draftsmith.data.suites import LIBRARY_EXCLUDE, LIBRARY_HELD_OUT, LIBRARY_INCLUDE
from draftsmith.data.text import STANDARD_LIBRARY, TextConfig
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.distill.pretraining import PretrainResult


def text() -> TextConfig:
    """The .py files of the running Python, without installed packages and character tables."""
    return TextConfig(
        text=(STANDARD_LIBRARY,),
        include=LIBRARY_INCLUDE,
        exclude=LIBRARY_EXCLUDE,
        hold_out=LIBRARY_HELD_OUT,
    )


def target(folder: Path) -> PretrainOptions:
    """8.4 M parameters: 10 layers of 256."""
    return PretrainOptions(
        data=text(),
        model=ArchitectureConfig(size="8m", kv_heads=2, vocab_size=4096),
        training=ScheduleConfig(
            duration="1900steps",
            block_length=512,
            long_block_length=2048,
            long_share=0.12,
            batch_tokens=2048,
            learning_rate=2e-3,
            min_learning_rate=1e-5,
            warmup=60,
            schedule="stable",
            decay_share=0.5,
        ),
        out=folder / "target",
        save_every=100,
        eval_every=750,
    )


def draft(folder: Path) -> PretrainOptions:
    """0.7 M parameters: one layer of 128, with the target's tokenizer."""
    return PretrainOptions(
        data=text(),
        model=ArchitectureConfig(
            tokenizer=str(folder / "target"),
            layers=1,
            heads=2,
            kv_heads=1,
            hidden=128,
            intermediate=352,
        ),
        training=ScheduleConfig(
            duration="1500steps",
            block_length=512,
            long_block_length=2048,
            long_share=0.1,
            batch_tokens=2048,
            learning_rate=4e-3,
            min_learning_rate=2e-5,
            warmup=60,
            schedule="stable",
            decay_share=0.5,
        ),
        out=folder / "draft",
        save_every=250,
    )


def main(folder: Path) -> list[PretrainResult]:
    """Train both; what is finished already is left alone, what was interrupted continues."""
    return train_missing((target(folder), draft(folder)))


def train_missing(wanted: Iterable[PretrainOptions]) -> list[PretrainResult]:
    """Train, one after the other, what is not finished yet."""
    results = []
    for options in wanted:
        if not (options.out / "run.json").exists():
            options.validate()
            results.append(run(options))
    return results


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/mini-code"))
