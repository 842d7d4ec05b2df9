"""Shards are computed once, whatever happens to who computes them."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.sharding_cases import (
    PLANS,
    SETTINGS,
    VOCAB,
    Folder,
    Once,
    Teacher,
    Trouble,
    assert_same,
    collected,
    failing,
    folder,
    lines,
    one_process,
    requests,
)

from draftsmith.distill.trajectories.store import Skipped, StoreHeader, TrajectoryStore
from draftsmith.distill.trajectories.types import Backend, Trajectory
from draftsmith.distill.trajectories.workers import (
    Worker,
    collect_ray,
    split,
)
from draftsmith.errors import BackendError, InputError


@pytest.fixture
def undisturbed(tmp_path: Path) -> Folder:
    return one_process(tmp_path / "undisturbed")


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
    before = lines(undisturbed.path / "notes")
    again = partial(Teacher, undisturbed.path / "notes")
    assert collected(PLANS, again, undisturbed) == []
    assert lines(undisturbed.path / "notes") == before == ["loaded", *["collected"] * 4]
    assert undisturbed.writes() == dict.fromkeys(range(4), 1)


def test_an_interrupted_run_is_finished_by_the_next(undisturbed: Folder, tmp_path: Path) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    stop = partial(Trouble, notes, "p7", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        collected(PLANS, stop, sink)
    assert sink.writes() == {0: 1, 1: 1}
    assert collected(PLANS, partial(Teacher, notes), sink) == [(2, 6, 30), (3, 4, 20)]
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


def test_shards_of_earlier_runs_are_checked_before_anything_is_computed(
    undisturbed: Folder, tmp_path: Path
) -> None:
    notes, seen = tmp_path / "n", list[tuple[int, int]]()
    undisturbed.file(0).unlink()
    again = partial(collected, PLANS, partial(Teacher, notes), undisturbed)
    whole = [undisturbed.file(number).read_bytes() for number in (1, 2)]
    for number in (1, 2):
        undisturbed.file(number).write_bytes(b"")
    with pytest.raises(BackendError, match=r"shard 1.*\(also of shards 2\)"):
        again(on_check=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert lines(notes) == [] and not undisturbed.has(0)
    for number, content in zip((1, 2), whole, strict=True):
        undisturbed.file(number).write_bytes(content)
    assert len(again()) == 1


def test_an_engine_that_dies_is_loaded_anew(undisturbed: Folder, tmp_path: Path) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    once = failing(BackendError("engine died"), Once(tmp_path / "once"))
    collected(PLANS, partial(Trouble, notes, "p7", once), sink)
    assert lines(notes).count("loaded") == 2
    assert_same(sink, undisturbed)


def test_what_fails_again_is_said(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    for error in (BackendError("engine died"), InputError("bad settings")):
        notes = tmp_path / type(error).__name__
        make: Callable[[], Backend] = partial(Trouble, notes, "p4", failing(error))
        with pytest.raises(type(error), match=str(error)):
            collected(split(requests(11), 3), make, sink)
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
            self,
            number: int,
            trajectories: Sequence[Trajectory],
            skipped: Sequence[Skipped],
            cut: Mapping[str, int],
        ) -> None:
            raise error

    (tmp_path / "sink").mkdir()
    sink = Full(tmp_path / "sink")
    with pytest.raises(type(error), match=str(error)):
        collected(PLANS, partial(Teacher, tmp_path / "n"), sink)
    assert lines(tmp_path / "n") == ["loaded", "collected"]


def test_a_worker_that_gets_a_finished_shard_computes_nothing(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    worker = Worker(partial(Teacher, tmp_path / "n"), SETTINGS, sink)
    assert worker.run(PLANS[0]) == (0, 6, 30)
    assert worker.run(PLANS[0]) == (0, 0, 0)
    assert lines(tmp_path / "n") == ["loaded", "collected"] and sink.writes() == {0: 1}


def test_a_shard_that_another_worker_wrote_meanwhile_is_left_alone(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    other = partial(collected, PLANS, partial(Teacher, tmp_path / "o"), sink)
    late = partial(Trouble, tmp_path / "n", "p0", lambda: other() and None)
    report = collected(PLANS, late, sink)
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert report == [(number, 0, 0) for number in range(4)]


@pytest.mark.parametrize("error", [BackendError("disk full"), InputError("exists already")])
def test_a_write_that_fails_behind_another_worker_is_done(error: Exception, tmp_path: Path) -> None:
    class Overtaken(Folder):
        def write(self, *shard: Any) -> None:
            super().write(*shard)  # the other one
            raise error

    (tmp_path / "sink").mkdir()
    sink = Overtaken(tmp_path / "sink")
    report = collected(PLANS, partial(Teacher, tmp_path / "n"), sink)
    assert report == [(number, 0, 0) for number in range(4)]


def test_a_shard_of_bad_prompts_is_written_without_asking_anybody(tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    plans = split(requests(2), 1, why_not=lambda request: "too long")
    collected(plans, partial(Teacher, tmp_path / "n"), sink)
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
    collected(PLANS, partial(Teacher, tmp_path / "n"), store)
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
        list(collect_ray(PLANS, partial(Teacher, tmp_path / "n"), SETTINGS, sink))
