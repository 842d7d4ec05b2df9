"""From options of `distill` to what is learnt from: what all kinds of lesson have in common.

`_stored_lesson.py` learns from trajectory stores, `_online_lesson.py` from texts drawn meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.distill.blocks import BatchSource, PackedBlocks
from draftsmith.distill.evaluation import EvaluationSource
from draftsmith.distill.multi import Multi
from draftsmith.distill.packing import Weighted
from draftsmith.distill.sources import HeldOutBlocks, HeldOutInLoop, InLoop, TextRows
from draftsmith.errors import InputError
from draftsmith.options import DistillOptions
from draftsmith.recipes import _text, _tokens
from draftsmith.recipes._training import check_parts
from draftsmith.targets.hf import HFTarget
from draftsmith.types import Signals

EVALUATION_BLOCKS = 8
"""Blocks of a held-out batch."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a distillation learns from."""

    source: BatchSource
    held_out: EvaluationSource | None
    steps_per_epoch: float
    longest: int
    """Tokens of the longest text that is learnt from, as far as a block goes."""
    furthest: int
    """The same of all texts that are read, held-out ones and plain ones too: at most so many."""
    facts: dict[str, Any]
    """What run.json says about the data; `data` in it decides whether a run may be resumed."""
    teacher: str | None = None
    """Digest of the weights of a target in memory."""
    counts_V: Tensor | None = None
    """How often the answers hold each token; None: they are still to be drawn."""
    highest: int | None = None
    """Token of all texts that are read, plain ones excepted; None: they are still to be drawn."""


def prompt_key(tokens: Sequence[int]) -> str:
    """Names a prompt by its tokens."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()


def held_out(keys: Iterable[str], share: float) -> set[str]:
    """The prompts to hold out: by their key alone, so that the choice never depends on the others;
    but one at least, of two or more."""
    known = sorted(set(keys))
    chosen = {key for key in known if int(key[:16], 16) < share * 2**64}
    return chosen or set(known[:1] if share and len(known) > 1 else [])


def text_digest(options: DistillOptions) -> str | None:
    """Of the content of --text; None without any."""
    return _text.digest(_text.find_files(options.text)) if options.text else None


def _with_text(options: DistillOptions, tokenizer: Any, source: BatchSource) -> BatchSource:
    """Pre-training text below the rows of `source`, when --text names some."""
    if not options.text:
        return source
    files = _text.find_files(options.text)
    documents, _ = _tokens.encode(tokenizer, _text.documents(files))
    length = options.training.block_length
    text = PackedBlocks(
        documents,
        end_id=tokenizer.eos_token_id,
        length=length,
        batch_tokens=text_blocks(options) * length,
        seed=options.seed,
        attend_across=False,
    )
    return TextRows(first=source, text=text)


def source_of(
    options: DistillOptions,
    tokenizer: Any,
    source: BatchSource,
    teacher: HFTarget | None,
    signals: Signals,
) -> BatchSource:
    """With a teacher in memory and --text, if they are there. For a drafter that reads hidden
    states the teacher says those of the text too, and with them its laws."""
    if teacher is None:
        return _with_text(options, tokenizer, source)
    if signals == Signals():
        return _with_text(options, tokenizer, InLoop(source=source, teacher=teacher))
    both = _with_text(options, tokenizer, source)
    return InLoop(source=both, teacher=teacher, signals=signals)


def held_out_batches(
    options: DistillOptions,
    tokenizer: Any,
    answers: Sequence[Weighted],
    teacher: HFTarget | None,
    signals: Signals,
) -> EvaluationSource | None:
    """Of these answers, every one once; with a teacher in memory, its laws. None: no answers."""
    if not answers:
        return None
    blocks = HeldOutBlocks(
        answers,
        end_id=tokenizer.eos_token_id,
        length=options.training.block_length,
        batch_blocks=EVALUATION_BLOCKS,
    )
    if teacher is None:
        return blocks
    return HeldOutInLoop(source=blocks, teacher=teacher, signals=signals)


def multi_of(options: DistillOptions, most: int | None) -> Multi:
    """How trajectories of one prompt count; only the best `most` of them."""
    return Multi(
        aggregate=options.aggregate,
        weights=options.beam_weights,
        score_temperature=options.score_temperature,
        most=most,
    )


def batch_blocks(options: DistillOptions) -> int:
    """How many blocks a batch has.

    Raises:
        InputError: they do not fill it.
    """
    training = options.training
    blocks, rest = divmod(training.batch_tokens, training.block_length)
    if rest or not blocks:
        raise InputError(
            f"--batch-tokens {training.batch_tokens} must be a multiple of --block-length "
            f"{training.block_length}"
        )
    return blocks


def check_batch(options: DistillOptions) -> None:
    """InputError for a batch that cannot be put together or divided; nothing is loaded for this."""
    training, text = options.training, text_blocks(options)
    if options.online:
        prompts = options.prompts_per_step
        check_parts(training, prompts, "prompts (--prompts-per-step)")  # any part may have no text
        return
    share = f", less --text-share {options.text_share:g}" if text else ""
    blocks = f"--batch-tokens {training.batch_tokens} / --block-length {training.block_length}"
    check_parts(training, batch_blocks(options) - text, f"blocks ({blocks}{share})")


def text_blocks(options: DistillOptions) -> int:
    """How many blocks of a batch are --text.

    Raises:
        InputError: none, or all of them.
    """
    if not options.text:
        return 0
    share, blocks = options.text_share, batch_blocks(options)
    text = round(blocks * share)
    if not 0 < text < blocks:
        raise InputError(
            f"--text-share {share:g} of {blocks} blocks per batch leaves less than one block for "
            f"the {'answers' if text else 'text'}: give more --batch-tokens, a smaller "
            "--block-length or another share"
        )
    return text
