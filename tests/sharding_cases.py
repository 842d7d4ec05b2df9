"""A teacher, a place for shards and some trouble: what the tests of scaling out share."""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from draftsmith.distill.trajectories.store import Skipped
from draftsmith.distill.trajectories.types import (
    Backend,
    CollectRequest,
    CollectSettings,
    TopK,
    Trajectory,
)
from draftsmith.distill.trajectories.workers import (
    ShardDone,
    ShardPlan,
    collect_local,
    missing_shards,
    split,
)
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.toy import TabularTarget

VOCAB = 16
SETTINGS = CollectSettings(forcing="sample", samples=2, max_new_tokens=5, top_k=3, seed=4)


def requests(count: int) -> list[CollectRequest]:
    return [
        CollectRequest(prompt_id=f"p{i}", prompt=(i % VOCAB, 3), language="en")
        for i in range(count)
    ]


class Teacher:
    """Draws from a table with noise keyed by prompt and sample; a note of every call."""

    def __init__(self, notes: Path) -> None:
        self.target = TabularTarget(VOCAB, seed=1)
        self.notes = notes
        note(notes, "loaded")

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        note(self.notes, "collected")
        return [
            self.draw(request, settings, index)
            for request in requests
            for index in range(settings.samples)
        ]

    def draw(self, request: CollectRequest, settings: CollectSettings, index: int) -> Trajectory:
        rng = np.random.default_rng([settings.seed, index, *request.prompt_id.encode()])
        known, laws = list(request.prompt), []
        for _ in range(settings.max_new_tokens):
            laws.append(self.target.logits_after(known).log_softmax(-1).numpy())
            known.append(int(rng.choice(VOCAB, p=np.exp(laws[-1]))))
        tokens = known[len(request.prompt) :]
        law_NV = np.stack(laws)
        ids_NK = np.sort(np.argsort(-law_NV, axis=1)[:, : settings.top_k], axis=1)
        return Trajectory(
            prompt_id=request.prompt_id,
            forcing="sample",
            index=index,
            temperature=1.0,
            prompt=request.prompt,
            tokens=tuple(tokens),
            score=float(law_NV[np.arange(len(tokens)), tokens].sum()),
            top=TopK(
                ids_NK=ids_NK.astype(np.int32),
                log_p_NK=np.take_along_axis(law_NV, ids_NK, axis=1).astype(np.float32),
            ),
            language=request.language,
        )


@dataclass(frozen=True)
class Folder:
    """A sink of pickles that notes every write."""

    path: Path

    def file(self, number: int) -> Path:
        return self.path / f"{number}.pickle"

    def has(self, number: int) -> bool:
        return self.file(number).exists()

    def check(self, number: int) -> None:
        if not self.file(number).stat().st_size:
            raise BackendError(f"shard {number} is empty")

    def write(
        self,
        number: int,
        trajectories: Sequence[Trajectory],
        skipped: Sequence[Skipped],
        cut: Mapping[str, int],
    ) -> None:
        if self.has(number):
            raise InputError(f"shard {number} exists already")
        part = self.path / f"{number}.{os.getpid()}.part"
        part.write_bytes(pickle.dumps((trajectories, skipped)))
        part.rename(self.file(number))
        note(self.path / "writes", f"{number} {os.getpid()}")

    def read(self, number: int) -> bytes:
        """In a form that can be compared."""
        trajectories, skipped = pickle.loads(self.file(number).read_bytes())
        plain = [
            (replace(one, top=None), one.top.ids_NK.tolist(), one.top.log_p_NK.tolist())
            for one in trajectories
        ]
        return repr((plain, skipped)).encode()

    def writes(self) -> Counter[int]:
        return Counter(int(line.split()[0]) for line in lines(self.path / "writes"))


def note(path: Path, text: str) -> None:
    """A line is appended whole, also by several processes."""
    with path.open("a") as file:
        file.write(f"{text}\n")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Once:
    """True the first time only, over all processes."""

    path: Path

    def __call__(self) -> bool:
        try:
            self.path.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trouble(Teacher):
    """Something happens before the prompt `at` is answered."""

    def __init__(self, notes: Path, at: str, what: Callable[[], None]) -> None:
        super().__init__(notes)
        self.at, self.what = at, what

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        if self.at in {request.prompt_id for request in requests}:
            self.what()
        return super().collect(requests, settings)


@dataclass(frozen=True)
class FatalFolder(Folder):
    """Its process dies behind the write of shard `at`, before it can say so."""

    at: int
    once: Once

    def write(
        self,
        number: int,
        trajectories: Sequence[Trajectory],
        skipped: Sequence[Skipped],
        cut: Mapping[str, int],
    ) -> None:
        super().write(number, trajectories, skipped, cut)
        if number == self.at and self.once():
            die()


def folder(path: Path) -> Folder:
    path.mkdir()
    return Folder(path)


def failing(error: Exception, when: Callable[[], bool] = lambda: True) -> Callable[[], None]:
    def fail() -> None:
        if when():
            raise error

    return fail


def dying(when: Callable[[], bool]) -> Callable[[], None]:
    def fail() -> None:
        if when():
            die()

    return fail


PLANS = split(requests(11), 3, why_not=lambda request: "odd" if request.prompt_id == "p4" else None)


def assert_same(sink: Folder, other: Folder) -> None:
    assert [sink.read(plan.number) for plan in PLANS] == [other.read(p.number) for p in PLANS]


def collected(
    plans: Sequence[ShardPlan],
    make: Callable[[], Backend],
    sink: Folder,
    **how: Callable[..., None],
) -> list[ShardDone]:
    """Collect what is missing, in this process."""
    return list(collect_local(missing_shards(plans, sink, **how), make, SETTINGS, sink))


def one_process(path: Path) -> Folder:
    """What an undisturbed process makes of `PLANS`: 11 prompts in shards of 3, one of them odd."""
    sink = folder(path)
    collected(PLANS, partial(Teacher, path / "notes"), sink)
    return sink
