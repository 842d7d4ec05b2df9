"""What a distillation learns from trajectory stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.distill.packing import fits
from draftsmith.distill.sources import TrajectoryBlocks
from draftsmith.distill.store import TrajectoryStore
from draftsmith.distill.stored_laws import LawFile
from draftsmith.distill.trajectory import Trajectory
from draftsmith.errors import InputError
from draftsmith.options import DistillOptions
from draftsmith.provenance import portable_text
from draftsmith.recipes import _features, _tokens
from draftsmith.recipes._lessons import (
    Lesson,
    batch_blocks,
    held_out,
    held_out_batches,
    multi_of,
    source_of,
    text_blocks,
)
from draftsmith.recipes._revision import revision_of
from draftsmith.recipes._stored_texts import read_shards, say_unfinished
from draftsmith.recipes._training import say, text_config
from draftsmith.targets.hf import HFTarget
from draftsmith.types import Signals


def stored_lesson(
    options: DistillOptions,
    tokenizer: Any,
    vocab_size: int,
    teacher: HFTarget | None,
    signals: Signals,
) -> Lesson:
    """Trajectories of stores; with a teacher in memory, its whole laws in place of theirs.

    Args:
        vocab_size: the target's.
        signals: what the drafter reads of the target: the teacher says it, or else the stores hold
            just this.

    Raises:
        InputError: a store is of another target, holds other hidden states, or nothing to learn.
        BackendError: a shard is damaged, and --on-bad-shard skip is not given.
    """
    if len({folder.resolve() for folder in options.store}) < len(options.store):
        raise InputError("--store names one store twice")
    stores = [TrajectoryStore.open(folder) for folder in options.store]
    # as a store of this folder has it, and as one of the hub model of which it is a copy
    tokenizers = _tokens.sha256(tokenizer, Path(options.target)), _tokens.content_sha256(tokenizer)
    revision = revision_of(options.target)
    for store in stores:
        store.check_teacher(options.target, revision, tokenizers, vocab_size)
        say_unfinished(store)
    laws, width = None, 0
    if teacher is None:
        _features.check_stores(stores, signals, with_text=bool(options.text))
        laws = LawFile(options.out / "work", vocab_size)
        width = _features.width(signals, text_config(options.target))
    found = [read_shards(store, laws, width, options.fitting.on_bad_shard) for store in stores]
    every = [document for one in found for document in one.documents]
    bad = sum(len(one.bad) for one in found)
    if not every:
        left = f" ({bad} damaged shards were left out)" if bad else ""
        raise InputError(f"no trajectory in {', '.join(map(str, options.store))}{left}")
    length = options.training.block_length
    known = begun = [one for one in every if len(one.trajectory.prompt) < length] or every
    if options.fitting.long_texts == "drop":
        known = [one for one in known if fits(one.trajectory, length)]
        if not known:
            raise InputError(
                f"every text is longer than --block-length {length}, and --long-texts drop leaves "
                "these out: give a larger one"
            )
    chosen = held_out([one.trajectory.prompt_id for one in known], options.hold_out)
    kept = [one for one in known if one.trajectory.prompt_id not in chosen]
    held = [one for one in known if one.trajectory.prompt_id in chosen]
    if not kept:
        raise InputError("--hold-out leaves no prompt to learn from")
    documents = multi_of(options, options.beams).apply(kept, laws)
    learnt = [item.trajectory for item in documents]
    blocks = TrajectoryBlocks(
        documents,
        end_id=tokenizer.eos_token_id,
        length=length,
        batch_blocks=batch_blocks(options) - text_blocks(options),
        seed=options.seed,
        keep_laws=teacher is None,
        one_per_block=options.fitting.one_per_block,
    )
    cut = sum(not fits(one, length) for one in (*learnt, *(one.trajectory for one in held)))
    for done, count, what in (
        ("left out", len(every) - len(begun), "texts: the prompt alone fills"),
        ("left out", len(begun) - len(known), "texts: longer than"),
        ("cut", cut, "answers: longer than what the prompt leaves of"),
    ):
        if count:
            say(f"{done} {count} {what} --block-length {length}")
    summaries = [one.store.summary(one.good) for one in found]
    kept_ids = {store.header.top_k for store in stores}
    top_k = None if kept_ids <= {None, vocab_size} else min(k for k in kept_ids if k is not None)
    return Lesson(
        source=source_of(options, tokenizer, blocks, teacher, signals),
        held_out=held_out_batches(options, tokenizer, held, teacher, signals),
        steps_per_epoch=blocks.steps_per_epoch,
        longest=_longest(learnt, length),
        furthest=length if options.text else _longest([d.trajectory for d in known], length),
        counts_V=_counts(learnt, vocab_size),
        highest=max(max(*one.trajectory.prompt, *one.trajectory.tokens) for one in known),
        facts={
            "data": [one.checksum() for one in found],
            "stores": [portable_text(str(folder)) for folder in options.store],
            "forcing": "+".join(sorted({t.forcing for t in learnt})),
            "beams": _most_per_prompt(learnt),
            "top_k": None if teacher is not None else top_k,
            "bad_shards": bad,
            "trajectories": len(learnt),
            "too_long": len(every) - len(known),
            "cut": cut,
            "prompts": len({t.prompt_id for t in learnt}),
            "held_out_prompts": len(chosen),
            "answer_tokens": sum(len(t.tokens) for t in learnt),
            "store_bytes": sum(summary.bytes for summary in summaries),
            "store_bytes_per_token": [summary.bytes_per_token for summary in summaries],
        },
    )


def _longest(trajectories: Iterable[Trajectory], length: int) -> int:
    """Tokens of the longest, as far as a block of this length goes."""
    return min(max(len(t.prompt) + len(t.tokens) for t in trajectories), length)


def _counts(trajectories: Iterable[Trajectory], vocab_size: int) -> Tensor:
    counts = np.zeros(vocab_size, np.int64)
    for trajectory in trajectories:
        counts += np.bincount(trajectory.tokens, minlength=vocab_size)
    return torch.from_numpy(counts)


def _most_per_prompt(trajectories: Iterable[Trajectory]) -> int:
    return max(Counter(t.prompt_id for t in trajectories).values())
