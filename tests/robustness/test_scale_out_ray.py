"""Shards over Ray: what actors write is what one process writes, also when they die."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tests.sharding_cases as cases
from tests.sharding_cases import (
    PLANS,
    SETTINGS,
    FatalFolder,
    Folder,
    Once,
    Teacher,
    Trouble,
    assert_same,
    collected,
    die,
    dying,
    failing,
    folder,
    lines,
    note,
    one_process,
    requests,
)

from draftsmith.distill.trajectories.types import Backend
from draftsmith.distill.trajectories.workers import (
    ShardDone,
    ShardPlan,
    collect_ray,
    missing_shards,
    split,
)
from draftsmith.errors import BackendError, InputError

pytestmark = pytest.mark.full


@pytest.fixture
def undisturbed(tmp_path: Path) -> Folder:
    return one_process(tmp_path / "undisturbed")


def by_value(package: Any) -> None:
    """Actors cannot import the tests."""
    for module in (cases, sys.modules[__name__]):
        package.cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A Ray of two workers that is there before anything is collected."""
    package = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.data", reason="ray is there without its data part")
    by_value(package)
    package.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    yield
    package.shutdown()


def over_ray(
    sink: Folder,
    make: Callable[[], Backend],
    *,
    plans: Sequence[ShardPlan] = PLANS,
) -> list[ShardDone]:
    return list(collect_ray(missing_shards(plans, sink), make, SETTINGS, sink, workers=2))


def test_two_actors_write_what_one_process_writes(
    ray: None, undisturbed: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    plans = split(requests(30), 3)
    seen = over_ray(sink, partial(Teacher, notes), plans=plans)
    assert sorted(seen) == [(number, 6, 30) for number in range(10)]
    assert sink.writes() == dict.fromkeys(range(10), 1)
    # each actor loads once, and none of it happens in this process
    assert 1 <= lines(notes).count("loaded") <= 2 and lines(notes).count("collected") == 10
    assert str(os.getpid()) not in {line.split()[1] for line in lines(sink.path / "writes")}
    whole = folder(tmp_path / "whole")
    collected(plans, partial(Teacher, notes), whole)
    assert [sink.read(i) for i in range(10)] == [whole.read(i) for i in range(10)]
    # again: nothing to do, nobody starts
    before = lines(notes)
    assert over_ray(sink, partial(Teacher, notes), plans=plans) == []
    assert lines(notes) == before and sink.writes() == dict.fromkeys(range(10), 1)
    assert capfd.readouterr().out == ""  # it belongs to --json


def test_only_missing_shards_are_computed(ray: None, undisturbed: Folder, tmp_path: Path) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    collected(PLANS[1:3], partial(Teacher, tmp_path / "local"), sink)
    assert len(over_ray(sink, partial(Teacher, notes))) == 2
    assert lines(notes).count("collected") == 2
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


def test_the_shard_of_a_killed_actor_is_done_again(
    ray: None, undisturbed: Folder, tmp_path: Path
) -> None:
    sink, notes = folder(tmp_path / "sink"), tmp_path / "n"
    once = Once(tmp_path / "killed")
    assert len(over_ray(sink, partial(Trouble, notes, "p7", dying(once)))) == 4
    assert once.path.exists() and lines(notes).count("loaded") >= 2
    assert sink.writes() == dict.fromkeys(range(4), 1)
    assert_same(sink, undisturbed)


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


@pytest.mark.parametrize("error", [InputError("no such layer"), BackendError("disk full")])
def test_errors_of_workers_arrive_as_they_are(error: Exception, ray: None, tmp_path: Path) -> None:
    sink = folder(tmp_path / "sink")
    with pytest.raises(type(error), match=rf"^{error}$"):
        over_ray(sink, partial(Trouble, tmp_path / "n", "p1", failing(error)))


def test_a_pool_that_fits_nowhere_is_refused_at_once(ray: None, tmp_path: Path) -> None:
    sink, make = folder(tmp_path / "sink"), partial(Teacher, tmp_path / "n")
    with pytest.raises(InputError, match="GPU: 1 needed, 0 there"):
        list(collect_ray(PLANS, make, SETTINGS, sink, gpus=1))
    with pytest.raises(InputError, match="at least 1 worker"):
        list(collect_ray(PLANS, make, SETTINGS, sink, workers=0))


def test_a_ray_of_our_own_is_stopped_at_the_end(undisturbed: Folder, tmp_path: Path) -> None:
    package = pytest.importorskip("ray", reason="ray is not installed")
    package.shutdown()  # that of the other tests
    by_value(package)
    sink = folder(tmp_path / "sink")
    over_ray(sink, partial(Teacher, tmp_path / "n"))
    assert not package.is_initialized()
    assert_same(sink, undisturbed)
