"""The arms of a measurement: ways to decode the same prompts, each timed in the same manner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.bench.records import PhaseSeconds
from draftsmith.core.cache import Block, KVCache
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm, DraftCounts
from draftsmith.core.rows import until_end
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import Recorder, no_garbage_collection
from draftsmith.core.types import DecodeStep, Signals, TargetOutput
from draftsmith.targets.base import Target
from draftsmith.targets.hf import HFTarget

SPLIT = ("draft", "target", "verify")
"""What the decoding loop gives its recorder; the rest of a run's seconds is `other`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRun:
    """The result of decoding one group of prompts once; one entry per row of the group."""

    tokens: tuple[tuple[int, ...], ...]
    drafted: tuple[tuple[bool, ...], ...]
    decode_tokens: tuple[int, ...]
    finish: tuple[str, ...]
    seconds: float
    prefill_seconds: float
    counts: tuple[DraftCounts, ...] | None = None
    """None for an engine that does not tell."""
    decode_steps: tuple[int, ...] | None = None
    phases: PhaseSeconds | None = None
    widths: tuple[int, ...] = ()
    """Tokens per row that each step of the decoding phase fed."""

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds


class WidthMeter:
    """A target that records how many tokens per row each forward is fed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.widths: list[int] = []
        self.name, self.tokenizer = target.name, target.tokenizer
        self.vocab_size, self.end_ids = target.vocab_size, target.end_ids
        self.max_length = target.max_length
        self.device, self.dtype = target.device, target.dtype

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return self._target.new_cache(num_rows, capacity)

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        self.widths.append(tokens_BT.shape[1])
        return self._target.forward(tokens_BT, block, keep, signals)


def now(device: torch.device) -> float:
    """Wait for the device, then return the seconds of a steady clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_recorder(device: torch.device) -> Recorder:
    """Choose a recorder. That of a GPU waits for it at both ends: seconds fall where the work was
    ordered."""
    return Recorder(partial(now, device)) if device.type == "cuda" else Recorder()


def time_decode(
    target: Target,
    arm: Arm,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    request_ids: Sequence[int],
    predictions: Sequence[Sequence[int]] = (),
) -> TimedRun:
    """Decode the prompts with the arm's drafter; prefill and decoding timed apart."""
    meter = WidthMeter(target)
    recorder = make_recorder(target.device)
    steps: list[DecodeStep] = []
    prefill_split: dict[str, float] = {}
    prefill_end, prefill_forwards = 0.0, 0
    with no_garbage_collection():
        start = now(target.device)
        for step in decode(
            meter,
            arm.drafter,
            prompts,
            arm.adapt(options),
            request_ids=request_ids,
            predictions=predictions,
            recorder=recorder,
        ):
            if not steps:
                prefill_end, prefill_split = now(target.device), recorder.snapshot()
                prefill_forwards = len(meter.widths)  # a long prompt takes several
            steps.append(step)
        end = now(target.device)
    split = {name: recorder.seconds.get(name, 0.0) - prefill_split.get(name, 0.0) for name in SPLIT}
    rows = range(len(prompts))
    counts = [DraftCounts() for _ in rows]
    for step in steps:
        for b in rows:
            counts[b].add_step(step, b)
    return TimedRun(
        tokens=tuple(tuple(t for step in steps for t in step.emitted[b]) for b in rows),
        drafted=tuple(
            tuple(n < step.accepted[b] for step in steps for n in range(len(step.emitted[b])))
            for b in rows
        ),
        decode_tokens=tuple(sum(len(step.emitted[b]) for step in steps[1:]) for b in rows),
        finish=tuple(
            next((f for step in steps if (f := step.finish[b]) is not None), "length") for b in rows
        ),
        seconds=end - start,
        prefill_seconds=prefill_end - start,
        counts=tuple(counts),
        decode_steps=tuple(sum(step.active[b] for step in steps[1:]) for b in rows),
        phases=PhaseSeconds(
            draft=split["draft"],
            target=split["target"],
            verify=split["verify"],
            other=max(end - prefill_end - sum(split.values()), 0.0),
        ),
        widths=tuple(meter.widths[prefill_forwards:]),
    )


def supports(sampler: Sampler) -> bool:
    """Check whether transformers can draw from this law: it has no presence or frequency
    penalty."""
    return not (sampler.presence_penalty or sampler.frequency_penalty or sampler.logit_bias)


class _Clock:
    """A streamer that records when the first new tokens came (`put` gets the prompt first)."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self._device, self._rows, self._calls = device, rows, 0
        self.first_time = 0.0
        self.first_tokens = 1
        """Per row: with drafts the prompt's step may give several."""

    def put(self, value: Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_time = now(self._device)
            self.first_tokens = value.numel() // self._rows

    def end(self) -> None:
        pass


def time_generate(
    target: HFTarget,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    *,
    prompt_lookup: int = 0,
    ignore_end: bool = False,
) -> TimedRun:
    """Continue the prompts by `model.generate`; prefill and decoding timed apart.

    Args:
        prompt_lookup: length of transformers' own prompt-lookup drafts; 0: none.
        ignore_end: generate past end tokens.
    """
    ids_BT, mask_BT = _left_padded(prompts, target.device)
    config = _config(target, sampler, max_new_tokens, prompts, prompt_lookup, ignore_end)
    clock = _Clock(target.device, len(prompts))
    devices = [target.device] if target.device.type == "cuda" else []
    seeded = torch.random.fork_rng(devices=devices)
    with seeded, target.native() as model, torch.inference_mode():
        torch.manual_seed(seed)
        with no_garbage_collection():
            start = now(target.device)
            out = model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                generation_config=config,
                streamer=clock,
            )
            end = now(target.device)
    rows = [[int(t) for t in row[ids_BT.shape[1] :]] for row in out]
    tokens = [until_end(row, frozenset() if ignore_end else target.end_ids) for row in rows]
    ended = [bool(row) and not ignore_end and row[-1] in target.end_ids for row in tokens]
    full = config.max_new_tokens == max_new_tokens
    return TimedRun(
        tokens=tuple(map(tuple, tokens)),
        drafted=tuple((False,) * len(row) for row in tokens),
        decode_tokens=tuple(max(len(row) - clock.first_tokens, 0) for row in tokens),
        finish=tuple("stop" if done else "length" if full else "context" for done in ended),
        seconds=end - start,
        prefill_seconds=clock.first_time - start if clock.first_time else 0.0,
    )


def _config(
    target: HFTarget,
    sampler: Sampler,
    max_new_tokens: int,
    prompts: Sequence[Sequence[int]],
    prompt_lookup: int,
    ignore_end: bool,
) -> Any:
    """Set every option, since transformers fills gaps from the model's own defaults."""
    from transformers import GenerationConfig

    room = max_new_tokens
    if target.max_length is not None:
        room = min(room, target.max_length - max(len(prompt) for prompt in prompts))
    warping: dict[str, float] = {}
    if sampler.temperature > 0:  # greedy, these would only be warned about
        warping = {"temperature": sampler.temperature, "top_k": sampler.top_k}
        warping |= {"top_p": sampler.top_p, "min_p": sampler.min_p}
    return GenerationConfig(
        max_new_tokens=room,
        do_sample=sampler.temperature > 0,
        **warping,
        repetition_penalty=sampler.repetition_penalty,
        eos_token_id=None if ignore_end else sorted(target.end_ids) or None,
        pad_token_id=min(target.end_ids, default=0),
        prompt_lookup_num_tokens=prompt_lookup or None,
    )


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, prompt in enumerate(prompts):
        ids[b, width - len(prompt) :] = torch.tensor(prompt)
        mask[b, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
