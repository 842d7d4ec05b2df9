"""Collecting in shards: by one process, or by many workers of a Ray cluster.

    requests      0 1 2 3 | 4 5 6 7 | 8 9          `split`: consecutive prompts, numbered
    shard            0         1       2
    store          there    missing  missing       1 and 2 are computed, in any order, by anyone

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
from typing import Any, NamedTuple

from draftsmith.distill.trajectories.store import Skipped, TrajectoryStore
from draftsmith.distill.trajectories.types import (
    Backend,
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.errors import BackendError, DraftsmithError, InputError

MakeBackend = Callable[[], Backend]
"""Loads what collects. For Ray it must survive pickling: a function of a module, or a `partial`."""
RETRIES = 2
"""How often a shard is tried again after its Ray actor died (memory ran out, a machine went)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """What belongs into a shard."""

    number: int
    requests: tuple[CollectRequest, ...]
    skipped: tuple[Skipped, ...] = ()
    """Prompts of this shard that cannot be used."""
    cut: Mapping[str, int] = field(default_factory=dict)
    """References of the others of which only the beginning is wanted, per reason."""


class ShardDone(NamedTuple):
    """A shard of this run was computed; zeros where another run wrote it first."""

    number: int
    trajectories: int
    tokens: int
    """Tokens of the continuations."""


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


def missing_shards(
    plans: Sequence[ShardPlan],
    store: TrajectoryStore,
    on_check: Callable[[int, int], None] = lambda done, total: None,
) -> list[ShardPlan]:
    """The shards that are not there yet, when all others have been checked.

    `on_check` is told how many shards have been checked, and of how many. Raises a BackendError
    that names every damaged shard.
    """
    there = [plan.number for plan in plans if store.has(plan.number)]
    damaged: dict[int, BackendError] = {}
    for done, number in enumerate(there, 1):
        try:
            store.check(number)
        except BackendError as error:
            damaged[number] = error
        on_check(done, len(there))
    if damaged:
        first, *others = damaged
        more = f" (also of shards {', '.join(map(str, others))})" if others else ""
        raise BackendError(f"{damaged[first]}{more}") from damaged[first]
    return [plan for plan in plans if plan.number not in set(there)]


class Worker:
    """Computes shards, one after the other; what a process or an actor is there for."""

    def __init__(
        self, make: MakeBackend, settings: CollectSettings, store: TrajectoryStore
    ) -> None:
        self._make, self._settings, self._store = make, settings, store
        self._backend: Backend | None = None

    def run(self, plan: ShardPlan) -> ShardDone:
        """Write the shard if it is missing.

        Raises what backend and store raise; a backend that worked before is loaded anew first.
        """
        nothing = ShardDone(plan.number, 0, 0)
        if self._store.has(plan.number):  # by a worker that died before it could say so
            return nothing
        made = self._collect(plan.requests) if plan.requests else []
        try:
            self._store.write(plan.number, made, plan.skipped, plan.cut)
        except DraftsmithError:  # whatever it was
            if not self._store.has(plan.number):
                raise
            return nothing  # another worker was first: a machine that was taken for dead
        return ShardDone(plan.number, len(made), sum(len(one.tokens) for one in made))

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
    store: TrajectoryStore,
) -> Iterator[ShardDone]:
    """Yield these shards, each when it is computed and written, in this process. Nothing is done
    until the first is asked for, and nothing is loaded if there are none.

    Raises:
        InputError: prompts or settings that the backend cannot use, or a full store.
        BackendError: the backend or the disk failed; finished shards are kept.
    """
    return map(Worker(make, settings, store).run, plans)


def collect_ray(
    plans: Sequence[ShardPlan],
    make: MakeBackend,
    settings: CollectSettings,
    store: TrajectoryStore,
    *,
    workers: int = 2,
    gpus: float = 0.0,
) -> Iterator[ShardDone]:
    """As `collect_local`, by a pool of Ray actors, each of which loads the backend once.

    Uses the Ray that is running, or the cluster of RAY_ADDRESS, or starts one on this machine and
    stops it at the end.

    Args:
        store: is pickled; all machines must see its folder.
        workers: number of actors.
        gpus: that an actor reserves, beside one CPU.
    """
    if workers < 1:
        raise InputError(f"A pool needs at least 1 worker, got {workers}.")
    if not plans:
        return
    with _ray(gpus) as ray:
        attempts = ray.remote(_Attempts).options(num_cpus=0).remote()
        rows = [{"plan": pickle.dumps(plan)} for plan in plans]
        done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Actor,
            fn_constructor_args=(make, settings, store, attempts),
            batch_size=1,
            # one shard at a time: what ends an actor takes no other shard with it
            compute=ray.data.ActorPoolStrategy(
                size=min(workers, len(rows)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=1,
            num_gpus=gpus,
        )
        for row in _rows(done):
            result = pickle.loads(row["result"])
            if isinstance(result, DraftsmithError):
                raise result
            yield result


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
        self, make: MakeBackend, settings: CollectSettings, store: TrajectoryStore, attempts: Any
    ) -> None:
        self._worker, self._attempts = Worker(make, settings, store), attempts

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        plan: ShardPlan = pickle.loads(batch["plan"][0])
        result: ShardDone | DraftsmithError
        try:
            self._begin(plan)
            result = self._worker.run(plan)
        except DraftsmithError as error:  # as it is, not in Ray's wrappings
            result = error
        return {"result": [pickle.dumps(result)]}

    def _begin(self, plan: ShardPlan) -> None:
        ray = importlib.import_module("ray")
        attempt = ray.get(self._attempts.begin.remote(plan.number))
        if attempt > RETRIES + 1:
            ids = [request.prompt_id for request in plan.requests]
            raise BackendError(
                f"Shard {plan.number} (prompts {', '.join(ids[:1] + ids[1:][-1:])}) was given up: "
                f"{attempt - 1} workers died of it, of want of memory mostly. Finished shards are "
                "kept: run the same command again to go on, with more memory for each worker."
            )


@contextlib.contextmanager
def _ray(gpus: float) -> Iterator[Any]:
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
        for name, need in (("CPU", 1.0), ("GPU", gpus))
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
