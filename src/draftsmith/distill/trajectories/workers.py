"""Collecting in shards: by one process after the other, or by many workers of a Ray cluster.

    requests      0 1 2 3 | 4 5 6 7 | 8 9          `split`: consecutive prompts, numbered
    shard            0         1       2
    sink           there    missing  missing       1 and 2 are computed, in any order, by anyone

A shard is the unit of everything: a worker computes it and writes it once, whole or not at all, so
what a killed run left is done by the next one and nothing is done twice. What is there already is
checked before anything is computed; a damaged shard is named and not replaced. Trajectories depend
on their prompt and the settings only: workers, order and interruptions leave no trace in them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftsmith.distill.trajectories.store import Skipped
from draftsmith.distill.trajectories.types import (
    Backend,
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.errors import BackendError, DraftsmithError, InputError

MakeBackend = Callable[[], Backend]
"""Loads what collects. For Ray it must survive pickling: a function of a module, or a `partial`."""


class ShardSink(Protocol):
    """Where shards go: a `TrajectoryStore`. Ray pickles it; all machines must see its folder."""

    def has(self, number: int) -> bool:
        """Whether the shard was written to its end; what became of it since, `check` says."""

    def check(self, number: int) -> None:
        """A BackendError that names the shard unless it is as it was written."""

    def write(
        self,
        number: int,
        trajectories: Sequence[Trajectory],
        skipped: Sequence[Skipped],
        cut: Mapping[str, int],
    ) -> object:
        """Add a shard, whole or not at all; an InputError if it is there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """What belongs into a shard."""

    number: int
    requests: tuple[CollectRequest, ...]
    skipped: tuple[Skipped, ...] = ()
    """Prompts of this shard that cannot be used."""
    cut: Mapping[str, int] = field(default_factory=dict)
    """References of the others of which only the beginning is wanted, per reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDone:
    """One shard of this run was written."""

    number: int
    trajectories: int
    tokens: int
    """Tokens of the continuations."""
    done: int
    """Shards that are there now, those of earlier runs included."""
    total: int


@dataclass(kw_only=True, slots=True)
class Collected:
    """What a run has done so far."""

    shards: int
    """There already, or written."""
    total: int
    """Shards that there are at the end."""
    written: int = 0
    trajectories: int = 0
    """In the written ones."""
    tokens: int = 0

    def add(self, number: int, trajectories: int, tokens: int, on_shard: OnShard | None) -> None:
        """One more shard was written."""
        self.shards += 1
        self.written += 1
        self.trajectories += trajectories
        self.tokens += tokens
        if on_shard is not None:
            done = ShardDone(
                number=number,
                trajectories=trajectories,
                tokens=tokens,
                done=self.shards,
                total=self.total,
            )
            on_shard(done)


OnShard = Callable[[ShardDone], None]
OnCheck = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPool:
    """The workers of a run on Ray."""

    workers: int = 2
    """Actors; each loads the backend once."""
    cpus: float = 1.0
    """That an actor reserves."""
    gpus: float = 0.0
    retries: int = 2
    """How often a shard is tried again after its worker died (memory ran out, a machine went)."""


def split(
    requests: Sequence[CollectRequest],
    shard_size: int,
    *,
    why_not: Callable[[CollectRequest], str | None] = lambda request: None,
    why_cut: Callable[[CollectRequest], Sequence[str]] = lambda request: (),
) -> list[ShardPlan]:
    """Number the prompts' shards: the same requests and size give the same shards.

    Args:
        why_not: says why nothing can be collected for a prompt; None: it can.
        why_cut: says of every reference of a prompt that will be cut why.

    Raises:
        InputError: two prompts have one id, or the size is below 1.
    """
    if shard_size < 1:
        raise InputError(f"A shard needs room for at least 1 prompt, got {shard_size}.")
    seen: set[str] = set()
    for request in requests:
        if request.prompt_id in seen:
            raise InputError(
                f"Two prompts have the id {request.prompt_id!r}: they would draw the same noise."
            )
        seen.add(request.prompt_id)
    plans = []
    for number, start in enumerate(range(0, len(requests), shard_size)):
        usable, skipped = [], []
        for request in requests[start : start + shard_size]:
            reason = why_not(request)
            if reason is None:
                usable.append(request)
            else:
                skipped.append(Skipped(prompt_id=request.prompt_id, reason=reason))
        cut = Counter(reason for request in usable for reason in why_cut(request))
        plans.append(
            ShardPlan(number=number, requests=tuple(usable), skipped=tuple(skipped), cut=dict(cut))
        )
    return plans


class Worker:
    """Computes shards, one after the other; what a process or an actor is there for."""

    def __init__(self, make: MakeBackend, settings: CollectSettings, sink: ShardSink) -> None:
        self._make, self._settings, self._sink = make, settings, sink
        self._backend: Backend | None = None

    def run(self, plan: ShardPlan) -> tuple[int, int]:
        """Write the shard if it is missing; trajectories and tokens that were written.

        Raises what backend and sink raise; a backend that worked before is loaded anew first.
        """
        if self._sink.has(plan.number):  # by a worker that died before it could say so
            return 0, 0
        made = self._collect(plan.requests) if plan.requests else []
        try:
            self._sink.write(plan.number, made, plan.skipped, plan.cut)
        except DraftsmithError:  # whatever it was
            if not self._sink.has(plan.number):
                raise
            return 0, 0  # another worker was first: a machine that was taken for dead
        return len(made), sum(len(one.tokens) for one in made)

    def _collect(self, requests: Sequence[CollectRequest]) -> list[Trajectory]:
        with contextlib.suppress(BackendError):
            if self._backend is not None:
                return self._backend.collect(requests, self._settings)
        # none yet, or an engine that died: it does not come back to life by itself
        self._backend = None
        gc.collect()
        self._backend = self._make()
        return self._backend.collect(requests, self._settings)


def collect_local(
    plans: Sequence[ShardPlan],
    make: MakeBackend,
    settings: CollectSettings,
    sink: ShardSink,
    *,
    on_shard: OnShard | None = None,
    on_check: OnCheck | None = None,
) -> Collected:
    """Compute and write what is missing, in this process. Nothing is loaded if nothing is.

    `on_check` is told how many of the shards of earlier runs have been checked, and of how many.

    Raises:
        InputError: prompts or settings that the backend cannot use, or a full store.
        BackendError: a shard is damaged, or the backend or the disk failed; finished shards are
            kept.
    """
    missing, made = _missing(plans, sink, on_check)
    worker = Worker(make, settings, sink)
    for plan in missing:
        made.add(plan.number, *worker.run(plan), on_shard)
    return made


def collect_ray(
    plans: Sequence[ShardPlan],
    make: MakeBackend,
    settings: CollectSettings,
    sink: ShardSink,
    *,
    pool: RayPool,
    on_shard: OnShard | None = None,
    on_check: OnCheck | None = None,
) -> Collected:
    """Compute and write what is missing, by a pool of Ray actors; errors as `collect_local`.

    Uses the Ray that is running, or the cluster of RAY_ADDRESS, or starts one on this machine and
    stops it at the end.
    """
    missing, made = _missing(plans, sink, on_check)
    if pool.workers < 1:
        raise InputError(f"A pool needs at least 1 worker, got {pool.workers}.")
    if not missing:
        return made
    with _ray(pool) as ray:
        attempts = ray.remote(_Attempts).options(num_cpus=0).remote()
        rows = [{"plan": pickle.dumps(plan)} for plan in missing]
        done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Actor,
            fn_constructor_args=(make, settings, sink, attempts, pool.retries),
            batch_size=1,
            # one shard at a time: what ends an actor takes no other shard with it
            compute=ray.data.ActorPoolStrategy(
                size=min(pool.workers, len(rows)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
        )
        for row in _rows(done):
            if row["error"]:
                raise pickle.loads(row["error"])
            made.add(int(row["number"]), int(row["trajectories"]), int(row["tokens"]), on_shard)
    return made


class _Attempts:
    """Counts who began which shard. Ray Data itself starts actors again without end."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()

    def begin(self, number: int) -> int:
        """Which attempt this is, from 1."""
        self._count[number] += 1
        return self._count[number]


class _Actor:
    """A worker as Ray Data wants it: batches of one row."""

    def __init__(
        self,
        make: MakeBackend,
        settings: CollectSettings,
        sink: ShardSink,
        attempts: Any,
        retries: int,
    ) -> None:
        self._worker = Worker(make, settings, sink)
        self._attempts, self._retries = attempts, retries

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        plan: ShardPlan = pickle.loads(batch["plan"][0])
        trajectories = tokens = 0
        failure = b""
        try:
            self._begin(plan)
            trajectories, tokens = self._worker.run(plan)
        except DraftsmithError as error:  # as it is, not in Ray's wrappings
            failure = pickle.dumps(error)
        return {
            "number": [plan.number],
            "trajectories": [trajectories],
            "tokens": [tokens],
            "error": [failure],
        }

    def _begin(self, plan: ShardPlan) -> None:
        ray = importlib.import_module("ray")
        attempt = ray.get(self._attempts.begin.remote(plan.number))
        if attempt > self._retries + 1:
            ids = [request.prompt_id for request in plan.requests]
            raise BackendError(
                f"Shard {plan.number} (prompts {', '.join(ids[:1] + ids[1:][-1:])}) was given up: "
                f"{attempt - 1} workers died of it, of want of memory mostly. Finished shards are "
                "kept: run the same command again to go on, with more memory for each worker."
            )


def _missing(
    plans: Sequence[ShardPlan], sink: ShardSink, on_check: OnCheck | None
) -> tuple[list[ShardPlan], Collected]:
    """The shards that are not there yet, when all others have been checked."""
    there = [plan.number for plan in plans if sink.has(plan.number)]
    _check(there, sink, on_check)
    known = set(there)
    missing = [plan for plan in plans if plan.number not in known]
    return missing, Collected(shards=len(plans) - len(missing), total=len(plans))


def _check(numbers: Sequence[int], sink: ShardSink, on_check: OnCheck | None) -> None:
    """All of them, so that one BackendError names every damaged shard."""
    damaged: dict[int, BackendError] = {}
    for done, number in enumerate(numbers, 1):
        try:
            sink.check(number)
        except BackendError as error:
            damaged[number] = error
        if on_check is not None:
            on_check(done, len(numbers))
    if damaged:
        first, *others = damaged
        more = f" (also of shards {', '.join(map(str, others))})" if others else ""
        raise BackendError(f"{damaged[first]}{more}") from damaged[first]


# --------------------------------------------------------------------------- Ray


@contextlib.contextmanager
def _ray(pool: RayPool) -> Iterator[Any]:
    """Ray with `ray.data`, connected, and without progress bars of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about the user is sent away
    try:
        ray, data = importlib.import_module("ray"), importlib.import_module("ray.data")
    except ImportError as error:
        raise BackendError(
            "Collecting with --ray needs the package ray with its data part: "
            "pip install 'ray[data]'; or leave --ray out."
        ) from error
    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    have = ray.cluster_resources()
    short = [
        f"{name}: {need:g} needed, {have.get(name, 0):g} there"
        for name, need in (("CPU", pool.cpus), ("GPU", pool.gpus))
        if need > have.get(name, 0)
    ]
    context = data.DataContext.get_current()
    bars, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        if short:
            raise InputError(f"No worker finds a place in this Ray cluster ({'; '.join(short)}).")
        yield ray
    finally:
        context.enable_progress_bars = bars
        if ours:
            ray.shutdown()


def _rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows as they come in; a BackendError when Ray itself fails."""
    try:
        yield from dataset.iter_rows()
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[-1]
        raise BackendError(
            f"Ray failed ({type(error).__name__}: {said}). Finished shards are kept: run the same "
            "command again to go on."
        ) from error
