"""How the trainer moves weights: settings, learning rate, noise by step, the accelerator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from draftsmith.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How weights are moved. Which weights, data and loss are the trainer's other arguments."""

    steps: int
    """Optimiser steps in all."""
    accumulation: int = 1
    """Forward-backward passes per optimiser step (and process)."""
    learning_rate: float = 1e-4
    """Highest learning rate."""
    min_learning_rate: float = 1e-6
    """Learning rate at the end."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    schedule: Literal["linear", "cosine", "stable"] = "linear"
    """What follows the warm-up: linear or cosine decay, or constant and then linear decay."""
    decay_share: float = 0.3
    """With `stable`: the share of all steps in which the rate decays."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW."""
    weight_decay: float = 0.1
    """AdamW; matrices only (norms and biases are not decayed)."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient."""
    precision: Literal["bfloat16", "float32"] = "float32"
    """Precision of the forward pass; master weights stay as they are given."""
    seed: int = 0
    """Keys the noise of every step."""
    save_every: int = 500
    """Steps between checkpoints; the end and an interruption always save one."""
    keep: int = 2
    """Checkpoints kept."""
    evaluate_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    max_skipped: int = 20
    """Stop after this many steps in a row with a non-finite loss or gradient."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.accumulation < 1 or self.save_every < 1 or self.keep < 1:
            raise InputError("steps, accumulation, save-every and keep must be at least 1")
        if not 0 <= self.min_learning_rate <= self.learning_rate < math.inf:
            raise InputError("learning rates must satisfy 0 <= min-learning-rate <= learning-rate")
        if not (0 < self.decay_share <= 1 and self.clip_norm > 0 and self.warmup_steps >= 0):
            raise InputError("decay-share lies in (0, 1], clip-norm is positive, warmup at least 0")

    @property
    def decay_from(self) -> int:
        """First step at which the rate is below its highest value again."""
        stable = self.steps - max(1, round(self.steps * self.decay_share))
        return max(self.warmup_steps, stable) if self.schedule == "stable" else self.warmup_steps

    def rate(self, step: int) -> float:
        """Learning rate of step `step` (0-based)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if step < self.decay_from:
            return self.learning_rate
        done = (step - self.decay_from) / max(1, self.steps - self.decay_from)
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * left


@contextmanager
def keyed_noise(seed: int, step: int, process: int) -> Iterator[None]:
    """Global random state keyed by (seed, step, process); the caller's state comes back after."""
    key = hashlib.sha256(f"{seed}:{step}:{process}".encode()).digest()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)
        yield


def make_accelerator(
    precision: str, log_with: Sequence[str] = (), folder: Path | None = None
) -> Accelerator:
    """An Accelerator for this precision, also when the process had one with another before."""
    mixed = "bf16" if precision == "bfloat16" else "no"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=mixed, log_with=list(log_with) or None, project_dir=folder)
