"""What a distillation learns from continuations that are drawn while it goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from draftsmith.bench.suites import load_prompts
from draftsmith.distill.collect import TransformersBackend
from draftsmith.distill.packing import Weighted
from draftsmith.distill.sources import Online
from draftsmith.distill.store_records import Skipped
from draftsmith.distill.trajectory import CollectRequest, CollectSettings
from draftsmith.errors import InputError
from draftsmith.options import DistillOptions
from draftsmith.provenance import digest
from draftsmith.recipes._bad_prompts import refuse, why_not
from draftsmith.recipes._lessons import (
    Lesson,
    held_out,
    held_out_batches,
    multi_of,
    prompt_key,
    source_of,
)
from draftsmith.recipes._training import say
from draftsmith.targets._base import Target
from draftsmith.targets.hf import HFTarget
from draftsmith.types import Signals


def online_lesson(
    options: DistillOptions,
    tokenizer: Any,
    teacher: HFTarget,
    signals: Signals,
    draws: Target,
    student: TransformersBackend | None,
    refresh: Callable[[], None] | None,
) -> Lesson:
    """Prompts that the teacher (partly the student) continues step by step.

    Args:
        signals: what the drafter reads of the teacher.
        draws: a target that draws as the teacher, of tokens that the student has, too.
        student: draws the on-policy share, of tokens that the teacher has, too.
        refresh: brings that one's weights up to date.
    """
    assert options.prompts is not None
    prompts = load_prompts(options.prompts, keep_empty=True)
    encoded = [prompt.token_ids(tokenizer) if prompt.text != "" else () for prompt in prompts]
    length, most = options.training.block_length, options.max_new_tokens
    reasons = [_why_not(ids, draws, length) for ids in encoded]
    bad = [
        Skipped(prompt_id=prompt.id, reason=why)
        for prompt, why in zip(prompts, reasons, strict=True)
        if why is not None
    ]
    refuse(options.bad_prompts, bad)
    skipped = Counter(one.reason for one in bad)
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
    backend = TransformersBackend(draws)
    drawn = Online(
        kept,
        teacher=backend,
        settings=settings,
        multi=multi_of(options, None),
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
        source=source_of(options, tokenizer, drawn, teacher, signals),
        held_out=held_out_batches(
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


def _why_not(prompt: Sequence[int], draws: Target, length: int) -> str | None:
    """Why nothing is learnt behind a prompt; None: something is."""
    bad = why_not(prompt, context=draws.max_length, vocab_size=draws.vocab_size)
    if bad is None and len(prompt) >= length:
        return f"the prompt alone fills --block-length {length}"
    return bad
