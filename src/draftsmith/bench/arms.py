"""The arms of a measurement: ways to decode the same prompts, each timed in the same manner."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.bench.records import PhaseSeconds
from draftsmith.core.cache import Block, KVCache
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm, DraftCounts
from draftsmith.core.transfer import Recorder, no_garbage_collection
from draftsmith.core.types import DecodeStep, Signals, TargetOutput
from draftsmith.targets.base import Target

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


class _DeviceRecorder(Recorder):
    """Waits for the device at both ends, so that seconds fall where the work was ordered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:  # type: ignore[override]
        start = now(self._device)
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + now(self._device) - start


def make_recorder(device: torch.device) -> Recorder:
    """Choose a recorder: on a CPU nothing is asynchronous, and the plain one is cheaper."""
    return _DeviceRecorder(device) if device.type == "cuda" else Recorder()


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
