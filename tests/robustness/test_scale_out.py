"""Shards are computed once, whatever happens to who computes them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from draftsmith.distill.scale_out import (
    RayPool,
    ShardDone,
    ShardPlan,
    Worker,
    collect_local,
    collect_ray,
    split,
)
from draftsmith.distill.store import Skipped, StoreHeader, TrajectoryStore
from draftsmith.distill.trajectory import (
    Backend,
    CollectRequest,
    CollectSettings,
    TopK,
    Trajectory,
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

    def write(
        self, number: int, trajectories: Sequence[Trajectory], skipped: Sequence[Skipped]
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
        self, number: int, trajectories: Sequence[Trajectory], skipped: Sequence[Skipped]
    ) -> None:
        super().write(number, trajectories, skipped)
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


@pytest.fixture
def undisturbed(tmp_path: Path) -> Folder:
    """What one process makes of 11 prompts in shards of 3."""
    sink = folder(tmp_path / "undisturbed")
    collect_local(PLANS, partial(Teacher, tmp_path / "notes"), SETTINGS, sink)
    return sink


PLANS = split(requests(11), 3, why_not=lambda request: "odd" if request.prompt_id == "p4" else None)


def assert_same(sink: Folder, other: Folder) -> None:
    assert [sink.read(plan.number) for plan in PLANS] == [other.read(p.number) for p in PLANS]


# --------------------------------------------------------------------------- shards


def test_every_prompt_is_in_one_shard_or_skipped_with_a_reason() -> None:
    assert [plan.number for plan in PLANS] == [0, 1, 2, 3]
    used = [request.prompt_id for plan in PLANS for request in plan.requests]
    assert used == [f"p{i}" for i in range(11) if i != 4]
    assert PLANS[1].skipped == (Skipped(prompt_id="p4", reason="odd"),)
    # a skipped prompt keeps its place: shards do not shift when the check changes
    assert [plan.requests for plan in split(requests(11), 3)][2:] == [
        plan.requests for plan in PLANS
    ][2:]
    assert split([], 3) == []


def test_prompts_with_one_id_are_refused() -> None:
    with pytest.raises(InputError, match="'p1'"):
        split([*requests(3), requests(2)[1]], 2)
    with pytest.raises(InputError, match="at least 1"):
        split(requests(3), 0)


def test_shards_hold_what_the_backend_says_of_their_prompts(
    undisturbed: Folder, tmp_path: Path
) -> None:
    together = Teacher(tmp_path / "other").collect(requests(11), SETTINGS)
    for plan in PLANS:
        made, skipped = pickle.loads(undisturbed.file(plan.number).read_bytes())
        ids = {request.prompt_id for request in plan.requests}
        wanted = [one for one in together if one.prompt_id in ids]
        assert [replace(one, top=None) for one in made] == [
            replace(one, top=None) for one in wanted
        ]
        assert tuple(skipped) == plan.skipped


# --------------------------------------------------------------------------- one process


def test_a_second_run_does_nothing_and_loads_nothing(undisturbed: Folder, tmp_path: Path) -> None:
    before = lines(tmp_path / "notes")
    report = collect_local(PLANS, partial(Teacher, tmp_path / "notes"), SETTINGS, undisturbed)
    assert lines(tmp_path / "notes") == before == ["loaded", *["collected"] * 4]
    assert (report.shards, report.written, report.trajectories, report.tokens) == (4, 0, 0, 0)
    assert undisturbed.writes() == dict.fromkeys(range(4), 1)


def test_an_interrupted_run_is_finished_by_the_next(undisturbed: Folder, tmp_path: Path) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    seen: list[ShardDone] = []
    stop = partial(Trouble, notes, "p7", failing(KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        collect_local(PLANS, stop, SETTINGS, sink, on_shard=seen.append)
    assert sink.writes() == {0: 1, 1: 1}
    report = collect_local(PLANS, partial(Teacher, notes), SETTINGS, sink, on_shard=seen.append)
    assert [(one.number, one.done, one.total) for one in seen] == [
        (0, 1, 4),
        (1, 2, 4),
        (2, 3, 4),
        (3, 4, 4),
    ]
    assert (report.shards, report.written) == (4, 2)
    assert (report.trajectories, report.tokens) == (2 * 5, 2 * 5 * 5)
    assert sum(one.trajectories for one in seen) == 2 * 10
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


def test_an_engine_that_dies_is_loaded_anew(undisturbed: Folder, tmp_path: Path) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    once = failing(BackendError("engine died"), Once(tmp_path / "once"))
    collect_local(PLANS, partial(Trouble, notes, "p7", once), SETTINGS, sink)
    assert lines(notes).count("loaded") == 2
    assert_same(sink, undisturbed)


def test_what_fails_again_is_said(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    for error in (BackendError("engine died"), InputError("bad settings")):
        notes = tmp_path / type(error).__name__
        make: Callable[[], Backend] = partial(Trouble, notes, "p4", failing(error))
        with pytest.raises(type(error), match=str(error)):
            collect_local(split(requests(11), 3), make, SETTINGS, sink)
        # bad input does not become better by loading again
        assert lines(notes).count("loaded") == (2 if isinstance(error, BackendError) else 1)
        assert sink.writes() == {0: 1}
        for file in sink.path.iterdir():
            file.unlink()


@pytest.mark.parametrize("error", [BackendError("disk full"), InputError("store full")])
def test_a_sink_that_fails_is_not_taken_for_a_broken_engine(
    error: Exception, tmp_path: Path
) -> None:
    class Full(Folder):
        def write(
            self, number: int, trajectories: Sequence[Trajectory], skipped: Sequence[Skipped]
        ) -> None:
            raise error

    (tmp_path / "sink").mkdir()
    sink = Full(tmp_path / "sink")
    with pytest.raises(type(error), match=str(error)):
        collect_local(PLANS, partial(Teacher, tmp_path / "n"), SETTINGS, sink)
    assert lines(tmp_path / "n") == ["loaded", "collected"]


def test_a_worker_that_gets_a_finished_shard_computes_nothing(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    worker = Worker(partial(Teacher, tmp_path / "n"), SETTINGS, sink)
    assert worker.run(PLANS[0]) == (6, 30)
    assert worker.run(PLANS[0]) == (0, 0)
    assert lines(tmp_path / "n") == ["loaded", "collected"] and sink.writes() == {0: 1}


def test_a_shard_that_another_worker_wrote_meanwhile_is_left_alone(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    other = partial(collect_local, PLANS, partial(Teacher, tmp_path / "o"), SETTINGS, sink)
    late = partial(Trouble, tmp_path / "n", "p0", lambda: other() and None)
    report = collect_local(PLANS, late, SETTINGS, sink)
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert report.shards == 4 and report.trajectories == 0


def test_a_shard_of_bad_prompts_is_written_without_asking_anybody(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    plans = split(requests(2), 1, why_not=lambda request: "too long")
    collect_local(plans, partial(Teacher, tmp_path / "n"), SETTINGS, sink)
    assert sink.writes() == {0: 1, 1: 1} and lines(tmp_path / "n") == []


def test_a_trajectory_store_is_a_sink(tmp_path: Path) -> None:
    header = StoreHeader(
        target="tabular",
        tokenizer_sha256="none",
        vocab_size=VOCAB,
        top_k=3,
        settings={},
        prompts_sha256="none",
    )
    store = TrajectoryStore.create(tmp_path / "store", header)
    collect_local(PLANS, partial(Teacher, tmp_path / "n"), SETTINGS, store)
    made = [(one.prompt_id, one.tokens) for one in store.trajectories()]
    asked = [request for plan in PLANS for request in plan.requests]
    wanted = Teacher(tmp_path / "n").collect(asked, SETTINGS)
    assert made == [(one.prompt_id, one.tokens) for one in wanted]
    assert store.summary().skipped == {"odd": 1}
    assert isinstance(pickle.loads(pickle.dumps(store)), TrajectoryStore)  # as Ray does


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sink = folder(tmp_path / "sink")
    with pytest.raises(BackendError, match=r"pip install 'ray\[data\]'"):
        collect_ray(PLANS, partial(Teacher, tmp_path / "n"), SETTINGS, sink, pool=RayPool())


# --------------------------------------------------------------------------- Ray


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A Ray of two workers that is there before anything is collected."""
    package = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.data", reason="ray is there without its data part")
    package.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    package.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    yield
    package.shutdown()


def over_ray(
    sink: Folder,
    make: Callable[[], Backend],
    *,
    plans: Sequence[ShardPlan] = PLANS,
    on_shard: Callable[[ShardDone], None] | None = None,
) -> int:
    pool = RayPool(workers=2, retries=2)
    return collect_ray(plans, make, SETTINGS, sink, pool=pool, on_shard=on_shard).written


@pytest.mark.full
def test_two_actors_write_what_one_process_writes(
    ray: None, undisturbed: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    seen: list[ShardDone] = []
    plans = split(requests(30), 3)
    assert over_ray(sink, partial(Teacher, notes), plans=plans, on_shard=seen.append) == 10
    assert sink.writes() == dict.fromkeys(range(10), 1)
    assert {one.number for one in seen} == set(range(10))
    assert [(one.done, one.total) for one in seen] == [(i + 1, 10) for i in range(10)]
    # each actor loads once, and none of it happens in this process
    assert 1 <= lines(notes).count("loaded") <= 2 and lines(notes).count("collected") == 10
    assert str(os.getpid()) not in {line.split()[1] for line in lines(sink.path / "writes")}
    whole = folder(tmp_path / "whole")
    collect_local(plans, partial(Teacher, notes), SETTINGS, whole)
    assert [sink.read(i) for i in range(10)] == [whole.read(i) for i in range(10)]
    # again: nothing to do, nobody starts
    before = lines(notes)
    assert over_ray(sink, partial(Teacher, notes), plans=plans) == 0
    assert lines(notes) == before and sink.writes() == dict.fromkeys(range(10), 1)
    assert capfd.readouterr().out == ""  # it belongs to --json


@pytest.mark.full
def test_only_missing_shards_are_computed(ray: None, undisturbed: Folder, tmp_path: Path) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    collect_local(PLANS[1:3], partial(Teacher, tmp_path / "local"), SETTINGS, sink)
    assert over_ray(sink, partial(Teacher, notes)) == 2
    assert lines(notes).count("collected") == 2
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


@pytest.mark.full
def test_the_shard_of_a_killed_actor_is_done_again(
    ray: None, undisturbed: Folder, tmp_path: Path
) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    once = Once(tmp_path / "killed")
    assert over_ray(sink, partial(Trouble, notes, "p7", dying(once))) == 4
    assert once.path.exists() and lines(notes).count("loaded") >= 2
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


@pytest.mark.full
def test_a_shard_is_not_written_twice_when_its_actor_dies_behind_the_write(
    ray: None, undisturbed: Folder, tmp_path: Path
) -> None:
    (tmp_path / "sink").mkdir()
    once = Once(tmp_path / "killed")
    sink = FatalFolder(tmp_path / "sink", 2, once)
    over_ray(sink, partial(Teacher, tmp_path / "n"))
    assert once.path.exists()
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


@pytest.mark.full
def test_a_shard_that_kills_every_worker_ends_the_run_and_costs_no_other(
    ray: None, undisturbed: Folder, tmp_path: Path
) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    deadly = partial(Trouble, notes, "p1", lambda: note(tmp_path / "deaths", "x") or die())
    with pytest.raises(
        BackendError,
        match=r"Shard 0 \(prompts p0, p2\) .*: 3 workers died",
    ):
        over_ray(sink, deadly)
    assert len(lines(tmp_path / "deaths")) == 1 + 2  # and two retries
    assert 0 not in sink.writes()
    over_ray(sink, partial(Teacher, notes))  # mended
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("error", [InputError("no such layer"), BackendError("disk full")])
def test_errors_of_workers_arrive_as_they_are(error: Exception, ray: None, tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    with pytest.raises(type(error), match=rf"^{error}$"):
        over_ray(sink, partial(Trouble, tmp_path / "n", "p1", failing(error)))


@pytest.mark.full
def test_a_pool_that_fits_nowhere_is_refused_at_once(ray: None, tmp_path: Path) -> None:
    sink, make = folder(tmp_path / "sink"), partial(Teacher, tmp_path / "n")
    with pytest.raises(InputError, match="GPU: 1 needed, 0 there"):
        collect_ray(PLANS, make, SETTINGS, sink, pool=RayPool(gpus=1))
    with pytest.raises(InputError, match="at least 1 worker"):
        collect_ray(PLANS, make, SETTINGS, sink, pool=RayPool(workers=0))


@pytest.mark.full
def test_a_ray_of_our_own_is_stopped_at_the_end(undisturbed: Folder, tmp_path: Path) -> None:
    package = pytest.importorskip("ray", reason="ray is not installed")
    package.shutdown()  # that of the other tests
    package.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    sink = folder(tmp_path / "sink")
    over_ray(sink, partial(Teacher, tmp_path / "n"))
    assert not package.is_initialized()
    assert_same(sink, undisturbed)
