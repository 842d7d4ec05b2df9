"""How the trainer moves weights: settings, learning rate, noise by step, signals, accelerators."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils.environment import get_int_from_env
from torch import nn

from draftsmith.errors import BackendError, InputError


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
    clip_value: float = math.inf
    """Largest number in it, of those that its norm leaves."""
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
    """Stop after this many steps in a row with a non-finite loss or gradient, or with none."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping what they computed."""
    parallel: Literal["data", "sharded"] = "data"
    """With several processes: each holds all weights, or each a part of them (FSDP2)."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.accumulation < 1 or self.save_every < 1 or self.keep < 1:
            raise InputError("steps, accumulation, save-every and keep must be at least 1")
        if not 0 <= self.min_learning_rate <= self.learning_rate < math.inf:
            raise InputError("learning rates must satisfy 0 <= min-learning-rate <= learning-rate")
        if not (0 < self.decay_share <= 1 and self.warmup_steps >= 0):
            raise InputError("decay-share lies in (0, 1], warmup is at least 0")
        if not (self.clip_norm > 0 and self.clip_value > 0):
            raise InputError("clip-norm and clip-value are positive (inf: no limit)")

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


def check_plan(
    theirs: dict[str, int | None], own: dict[str, int | None], step: int, path: Path
) -> None:
    """InputError when another number of steps would change what the steps done so far were."""
    if theirs["steps"] == own["steps"]:
        return
    for key, place, before in (
        ("decay_from", "decay", "while the learning rate is constant"),
        ("second_from", "long blocks", "before the long blocks begin"),
    ):
        starts = [start for start in (theirs.get(key), own[key]) if start is not None]
        if starts and step > min(starts):
            raise InputError(
                f"{path} is in the {place} of a run of {theirs['steps']} or of {own['steps']} "
                f"steps; the number of steps can only change {before}"
            )


@contextmanager
def keyed_noise(seed: int, step: int, process: int) -> Iterator[None]:
    """Global random state keyed by (seed, step, process); the caller's state comes back after."""
    key = hashlib.sha256(f"{seed}:{step}:{process}".encode()).digest()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)
        yield


SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What ends training after the step in which it comes."""


class Interruption:
    """The signal that asked for the end, if one did. A second one is obeyed at once."""

    signal: int | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Note SIGNALS in here; nothing is noted in a thread, where handlers cannot be set."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number
            signal.signal(number, before[number])

        self.signal = None
        before: dict[int, Any] = {}
        for number in SIGNALS:
            before[int(number)] = signal.signal(number, note)
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


def adamw(drafter: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """The optimiser: weight decay on matrices only."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


@runtime_checkable
class Recomputing(Protocol):
    """A model that can compute its layers again instead of keeping what they computed: those of
    transformers, and any drafter that has this method."""

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None: ...


def recompute_layers(drafter: nn.Module) -> None:
    """Turn on gradient checkpointing in the outermost models that offer it; InputError if none."""

    def offering(module: nn.Module) -> Iterator[Recomputing]:
        if isinstance(module, Recomputing):
            yield module
            return
        for child in module.children():
            yield from offering(child)

    found = list(offering(drafter))
    if not found:
        raise InputError(
            f"{type(drafter).__name__} has no layers that can be computed again in the backward "
            "pass; leave gradient checkpointing off"
        )
    for model in found:
        with warnings.catch_warnings():  # transformers 5.23 has a second name for it
            warnings.simplefilter("ignore", FutureWarning)
            # The re-entrant kind wants inputs that have gradients.
            model.gradient_checkpointing_enable({"use_reentrant": False})


def make_accelerator(
    precision: str,
    log_with: Sequence[str] = (),
    folder: Path | None = None,
) -> Accelerator:
    """Make an Accelerator for this precision, also when the process had one with another before."""
    mixed = "bf16" if precision == "bfloat16" else "no"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()
    processes = _join()
    accelerator = Accelerator(
        mixed_precision=mixed,
        log_with=list(log_with) or None,
        project_dir=folder,
    )
    if accelerator.num_processes < processes:
        raise BackendError(
            f"{processes} processes were started, and accelerate joins {accelerator.num_processes} "
            f"of them on {accelerator.device}: each would train everything; start one"
        )
    return accelerator


def started() -> int:
    """How many processes a launcher started, found as accelerate does."""
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
    return int(get_int_from_env(names, 1))


def _join() -> int:
    """How many processes a launcher started; where they have no device, they are joined here.

    accelerate joins those only where `ACCELERATE_USE_CPU` says so: processes of torchrun would each
    train everything, into the same folder.
    """
    processes = started()
    if processes > 1 and not torch.accelerator.is_available():
        missing = [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]
        if "WORLD_SIZE" in os.environ and missing:
            raise BackendError(
                f"WORLD_SIZE is {processes}, but there is no {' and no '.join(missing)}: start "
                "the processes with torchrun, or unset WORLD_SIZE to train with one"
            )
        PartialState(cpu=True)
    return processes
