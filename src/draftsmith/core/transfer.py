"""Transfers between host and device, and what times them.

Work is given to a device and runs there while the host goes on. Uploading small arrays does not
stop that; looking at a result does, so what a step wants to know comes down in one piece.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Upload without waiting for the device. (The driver has copied `values` when this returns.)"""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if tensor.device == device:
        return tensor
    # towards the host the same request would return before the numbers are there
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def to_host(*values: Tensor) -> list[np.ndarray]:
    """All of them in one transfer, the only place where the host waits. Integers and booleans come
    as int64, other numbers as float64."""
    words = torch.cat([_words(value).reshape(-1) for value in values]).cpu()
    parts = torch.split(words, [value.numel() for value in values])
    return [
        (part.view(torch.float64) if value.is_floating_point() else part)
        .numpy()
        .reshape(value.shape)
        for part, value in zip(parts, values, strict=True)
    ]


def _words(value: Tensor) -> Tensor:
    """As int64; the bits of other numbers."""
    if value.is_floating_point():
        return value.double().contiguous().view(torch.int64)
    return value.long()


class Timed:
    """A piece of work that a `Recorder` times."""

    __slots__ = ("_clock", "_name", "_seconds", "_start")

    def __init__(self, clock: Callable[[], float], seconds: dict[str, float], name: str) -> None:
        self._clock, self._seconds, self._name, self._start = clock, seconds, name, 0.0

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *failed: object) -> None:
        spent = self._clock() - self._start
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent


class Recorder:
    """Adds up wall-clock seconds by name: `with recorder.time("draft"): ...`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    def time(self, name: str) -> Timed:
        return Timed(self._clock, self.seconds, name)

    def snapshot(self) -> dict[str, float]:
        return dict(self.seconds)


_frozen = False
"""Inside `loaded_frozen`: the interpreter's own count walks all frozen objects."""


@contextlib.contextmanager
def loaded_frozen() -> Iterator[None]:
    """Collect garbage once; collections inside leave out what is loaded by now, half a million
    objects of libraries. Afterwards all is collected as before."""
    global _frozen
    outer, _frozen = _frozen, True
    gc.collect()
    own = not outer and gc.get_freeze_count() == 0
    if own:
        gc.freeze()
    try:
        yield
    finally:
        _frozen = outer
        if own:
            gc.unfreeze()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage once, then not again inside: its pauses would fall on whatever is timed, and
    it would walk a million new objects time and again."""
    was_enabled = gc.isenabled()
    with loaded_frozen():
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
