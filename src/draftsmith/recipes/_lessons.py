"""From options of `distill` to what is learnt from: batches, held-out batches, and their facts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.bench.suites import load_prompts
from draftsmith.distill.blocks import BatchSource, PackedBlocks
from draftsmith.distill.collect import TransformersBackend
from draftsmith.distill.evaluation import EvaluationSource
from draftsmith.distill.multi import Multi
from draftsmith.distill.packing import Weighted, fits
from draftsmith.distill.sources import (
    HeldOutBlocks,
    HeldOutInLoop,
    InLoop,
    Online,
    TextRows,
    TrajectoryBlocks,
)
from draftsmith.distill.store import TrajectoryStore
from draftsmith.distill.stored_laws import LawFile
from draftsmith.distill.trajectory import CollectRequest, CollectSettings, Trajectory
from draftsmith.errors import InputError
from draftsmith.options import DistillOptions
from draftsmith.provenance import digest, portable_text
from draftsmith.recipes import _features, _text, _tokens
from draftsmith.recipes._revision import revision_of
from draftsmith.recipes._training import say, text_config
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


def from_store(
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
        InputError: a store is of another target, or holds other hidden states.
    """
    if len({folder.resolve() for folder in options.store}) < len(options.store):
        raise InputError("--store names one store twice")
    stores = [TrajectoryStore.open(folder) for folder in options.store]
    # as a store of this folder has it, and as one of the hub model of which it is a copy
    tokenizers = _tokens.sha256(tokenizer, Path(options.target)), _tokens.content_sha256(tokenizer)
    name, revision = portable_text(options.target), revision_of(options.target)
    for store in stores:
        store.check_teacher(name, revision, tokenizers, vocab_size)
    laws, width = None, 0
    if teacher is None:
        _features.check_stores(stores, signals, with_text=bool(options.text))
        laws = LawFile(options.out / "work", vocab_size)
        width = _features.width(signals, text_config(options.target))
    every = list(_documents(stores, laws, width))
    if not every:
        raise InputError(f"no trajectory in {', '.join(map(str, options.store))}")
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
    documents = _multi(options, options.beams).apply(kept, laws)
    learnt = [item.trajectory for item in documents]
    blocks = TrajectoryBlocks(
        documents,
        end_id=tokenizer.eos_token_id,
        length=length,
        batch_blocks=_batch_blocks(options) - _text_blocks(options),
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
    summaries = [store.summary() for store in stores]
    kept_ids = {store.header.top_k for store in stores}
    top_k = None if kept_ids <= {None, vocab_size} else min(k for k in kept_ids if k is not None)
    return Lesson(
        source=_source(options, tokenizer, blocks, teacher, signals),
        held_out=_held_out(options, tokenizer, held, teacher, signals),
        steps_per_epoch=blocks.steps_per_epoch,
        longest=_longest(learnt, length),
        furthest=length if options.text else _longest([d.trajectory for d in known], length),
        counts_V=_counts(learnt, vocab_size),
        facts={
            "data": [_shards(store) for store in stores],
            "stores": [portable_text(str(folder)) for folder in options.store],
            "forcing": "+".join(sorted({t.forcing for t in learnt})),
            "beams": _most_per_prompt(learnt),
            "top_k": None if teacher is not None else top_k,
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


def _documents(
    stores: Iterable[TrajectoryStore], laws: LawFile | None, width: int
) -> Iterator[Weighted]:
    """All texts that are not empty, one shard in memory at a time, with their laws in `laws`.

    `width`: of their hidden states, which stay where they are; 0: none are wanted.
    """
    for store in stores:
        for number in store.shards():
            file = store.features(number)
            for row, (trajectory, encoded) in enumerate(store.undecoded(number)):
                if not trajectory.tokens:
                    continue
                # ids are names within one prompt file; two stores may use one for two prompts
                named = replace(trajectory, prompt_id=prompt_key(trajectory.prompt))
                kept = None if laws is None or encoded is None else laws.add(encoded)
                places = len(named.prompt) + len(named.tokens)
                features = file.of(row, places) if width else None
                if features is not None and features.width != width:
                    raise InputError(
                        f"the store {store.folder} holds hidden states of width {features.width}, "
                        f"this target's are {width} wide: give the target it was collected from"
                    )
                if features is not None:
                    features.read(places)  # NaN is named now, not in the middle of a training
                yield Weighted(trajectory=named, laws=kept, features=features)


def online(
    options: DistillOptions,
    tokenizer: Any,
    teacher: HFTarget,
    signals: Signals,
    student: TransformersBackend | None,
    refresh: Callable[[], None] | None,
) -> Lesson:
    """Prompts that the teacher (partly the student) continues step by step.

    `signals`: what the drafter reads of the teacher.
    """
    assert options.prompts is not None
    prompts = load_prompts(options.prompts, keep_empty=True)
    encoded = [prompt.token_ids(tokenizer) if prompt.text != "" else () for prompt in prompts]
    length, most = options.training.block_length, options.max_new_tokens
    reasons = [_why_not(ids, teacher.max_length, length) for ids in encoded]
    skipped = Counter(reason for reason in reasons if reason is not None)
    for reason, count in skipped.items():
        say(f"left out {count} prompts: {reason}")
    # named by what they are, so that a prompt that comes twice is not learnt and held out
    fitting = {prompt_key(x): x for x, why in zip(encoded, reasons, strict=True) if why is None}
    requests = [CollectRequest(prompt_id=key, prompt=ids) for key, ids in fitting.items()]
    chosen = held_out(fitting, options.hold_out)
    kept = [r for r in requests if r.prompt_id not in chosen]
    held = [r for r in requests if r.prompt_id in chosen]
    if not requests:
        raise InputError(
            f"no prompt of {options.prompts} can be continued and learnt from: {', '.join(skipped)}"
        )
    if not kept:
        raise InputError("--hold-out leaves no prompt to learn from")
    tight = sum(len(request.prompt) + most > length for request in requests)
    if tight:
        say(
            f"{tight} prompts leave less than --max-new-tokens {most} of --block-length {length}: "
            "a longer answer is learnt up to there"
        )
    settings = CollectSettings(
        forcing="sample" if options.beams is None else "beam",
        beams=options.beams or 1,
        max_new_tokens=most,
        top_k=1,  # whole laws come from the forward over the packed block
    )
    backend = TransformersBackend(teacher)
    drawn = Online(
        kept,
        teacher=backend,
        settings=settings,
        multi=_multi(options, None),
        end_id=tokenizer.eos_token_id,
        length=length,
        prompts_per_step=options.prompts_per_step,
        seed=options.seed,
        student=student,
        refresh=refresh,
        on_policy=options.on_policy,
    )
    samples = replace(settings, forcing="sample", seed=options.seed)
    answers = backend.collect(held, samples) if held else []
    return Lesson(
        source=_source(options, tokenizer, drawn, teacher, signals),
        held_out=_held_out(
            options,
            tokenizer,
            [Weighted(trajectory=answer) for answer in answers],
            teacher,
            signals,
        ),
        steps_per_epoch=len(kept) / options.prompts_per_step,
        longest=length,  # as far as is known before they are drawn
        furthest=length if options.text else min(length, max(map(len, fitting.values())) + most),
        facts={
            "data": [digest([[r.prompt_id, r.prompt] for r in kept])],
            "forcing": settings.forcing,
            "beams": options.beams or 1,
            "on_policy": options.on_policy,
            "top_k": None,
            "prompts": len(kept),
            "skipped": dict(skipped),
            "tight": tight,
            "held_out_prompts": len(held),
        },
    )


def _why_not(prompt: Sequence[int], context: int | None, length: int) -> str | None:
    """Why nothing is learnt behind a prompt; None: something is."""
    if not prompt:
        return "empty prompt"
    if context is not None and len(prompt) >= context:
        return f"longer than the context of {context} tokens"
    return f"the prompt alone fills --block-length {length}" if len(prompt) >= length else None


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


def with_text(options: DistillOptions, tokenizer: Any, source: BatchSource) -> BatchSource:
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
        batch_tokens=_text_blocks(options) * length,
        seed=options.seed,
        attend_across=False,
    )
    return TextRows(first=source, text=text)


def _source(
    options: DistillOptions,
    tokenizer: Any,
    source: BatchSource,
    teacher: HFTarget | None,
    signals: Signals,
) -> BatchSource:
    """With a teacher in memory and --text, if they are there. For a drafter that reads hidden
    states the teacher says those of the text too, and with them its laws."""
    if teacher is None:
        return with_text(options, tokenizer, source)
    if signals == Signals():
        return with_text(options, tokenizer, InLoop(source=source, teacher=teacher))
    both = with_text(options, tokenizer, source)
    return InLoop(source=both, teacher=teacher, signals=signals)


def _held_out(
    options: DistillOptions,
    tokenizer: Any,
    answers: Sequence[Weighted],
    teacher: HFTarget | None,
    signals: Signals,
) -> EvaluationSource | None:
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


def _multi(options: DistillOptions, most: int | None) -> Multi:
    return Multi(
        aggregate=options.aggregate,
        weights=options.beam_weights,
        score_temperature=options.score_temperature,
        most=most,
    )


def _batch_blocks(options: DistillOptions) -> int:
    training = options.training
    blocks, rest = divmod(training.batch_tokens, training.block_length)
    if rest or not blocks:
        raise InputError(
            f"--batch-tokens {training.batch_tokens} must be a multiple of --block-length "
            f"{training.block_length}"
        )
    return blocks


def _text_blocks(options: DistillOptions) -> int:
    """How many blocks of a batch are --text.

    Raises:
        InputError: none, or all of them.
    """
    if not options.text:
        return 0
    share, blocks = options.text_share, _batch_blocks(options)
    text = round(blocks * share)
    if not 0 < text < blocks:
        raise InputError(
            f"--text-share {share:g} of {blocks} blocks per batch leaves less than one block for "
            f"the {'answers' if text else 'text'}: give more --batch-tokens, a smaller "
            "--block-length or another share"
        )
    return text


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


def _shards(store: TrajectoryStore) -> str:
    """A digest of everything in a store, by the checksums that its shards name."""
    files = [file for number in store.shards() for file in store.shard(number).files]
    return digest([[file.name, file.sha256] for file in files])
