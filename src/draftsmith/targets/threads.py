"""How many threads a CPU has for a model's forwards, as `tune` measured it on this machine.

    tune          times forwards with 1, 2, ... threads and writes ~/.cache/draftsmith/threads/...
    open_target   reads the file of this machine, software and model; none: as many as torch takes

The compiled engine takes as many threads as torch has. OMP_NUM_THREADS in the environment is the
caller's choice: then nothing is measured, and nothing is read. The number changes no output of the
engine: each sum is one thread's.

Between two forwards of the engine, torch's operations take one thread (`beside_engine`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.errors import DraftsmithError
from draftsmith.provenance import (
    cache_folder,
    digest,
    jsonable,
    machine_summary,
    portable_text,
    read_json,
    usable_cpus,
    versions,
    write_json_atomic,
)

_log = logging.getLogger(__name__)

CHOSEN = "OMP_NUM_THREADS"


def structure(model: nn.Module) -> str:
    """Return a digest of names, shapes and formats of the parameters; values cost nothing."""
    return digest([[n, list(p.shape), str(p.dtype)] for n, p in model.named_parameters()])


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadFile:
    """The file that keeps the number of threads of one machine, software and model.

    One that cannot be read, or belongs to something else, is ignored; a folder that cannot be
    written keeps nothing. Both are logged, neither stops a run.
    """

    path: Path
    key: dict[str, Any]

    @classmethod
    def of(cls, name: str, model: nn.Module, engine: str | None) -> ThreadFile:
        """`engine`: what runs its forwards, as `HFTarget.engine`."""
        machine = machine_summary()
        for changing in ("memory_gib", "torch_threads"):
            del machine[changing]
        key = jsonable(
            {
                "machine": machine,
                "versions": versions(),
                "target": name,
                "weights": structure(model),
                "engine": engine,
            }
        )
        return cls(path=cache_folder("threads") / f"{digest(key)[:24]}.json", key=key)

    @property
    def place(self) -> str:
        """The path, as messages name it."""
        return portable_text(str(self.path))

    def load(self) -> int | None:
        """The number that is kept and possible here; None: there is none."""
        try:
            if not self.path.exists():
                return None
            content = read_json(self.path)
            if content["key"] == self.key and 1 <= int(content["threads"]) <= usable_cpus():
                return int(content["threads"])
        except (DraftsmithError, OSError, KeyError, TypeError, ValueError):
            pass
        _log.info("%s is damaged or of something else: it is ignored", self.place)
        return None

    def store(self, threads: int) -> bool:
        """Keep the number; False: that failed."""
        try:
            write_json_atomic(self.path, {"key": self.key, "threads": threads})
        except (DraftsmithError, OSError) as error:
            _log.info("the number of threads is not kept: %s", error)
            return False
        return True


def is_chosen() -> bool:
    """Whether the caller's environment says how many threads there are."""
    return bool(os.environ.get(CHOSEN))


def take_kept_threads(name: str, model: nn.Module, engine: str | None) -> None:
    """Let torch and the engine have as many threads as `tune` found best for this model, which is
    on a CPU of this machine."""
    if is_chosen():
        return
    file = ThreadFile.of(name, model, engine)
    threads = file.load()
    if threads is not None and threads != torch.get_num_threads():
        _log.info("%d threads, which tune found best here (%s)", threads, file.place)
        torch.set_num_threads(threads)


# --------------------------------------------------------------------------- beside the engine


class _Own(threading.local):
    """A thread's own: how many torch has outside of `beside_engine`; None: this is outside."""

    outside: int | None = None


_own = _Own()


def engine_threads() -> int:
    """How many threads the compiled engine takes: as many as torch has."""
    return max(_own.outside or torch.get_num_threads(), 1)


def beside_engine(runs: bool) -> contextlib.AbstractContextManager[None]:
    """Where the engine `runs` forwards, let torch's operations have one thread. Threads that share
    an operation go on turning for milliseconds, on the very processors that the engine's need next:
    a block of `parallel` took 5.0 ms in place of 1.9.

    The number is set for this thread alone. `torch.set_num_threads` would have other threads that
    begin meanwhile take it over. MKL, which multiplies float32 matrices, has a number of its own
    once that was called: it keeps that one.
    """
    return _OneThread() if runs else contextlib.nullcontext()


class _OneThread:
    """Entered several times in every step: a generator would take longer."""

    __slots__ = ("_count", "_use")

    def __enter__(self) -> None:
        self._count, self._use = torch.get_num_threads(), _set_own_threads()
        if self._use is not None and self._count > 1:
            _own.outside = self._count
            self._use(1)

    def __exit__(self, *failed: object) -> None:
        if self._use is not None and self._count > 1:
            self._use(self._count)
            _own.outside = None


@functools.cache
def _set_own_threads() -> Callable[[int], object] | None:
    """What sets the calling thread's number in the OpenMP that torch uses; None: it has none."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(torch._C.__file__).omp_set_num_threads
    except (OSError, AttributeError):
        return None
    return found
