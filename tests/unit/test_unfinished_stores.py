"""Stores whose collection has not ended: `distill` says so, and learns from what is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.command_cases import Command, a_command, distill_words, work_folder

from draftsmith import cli
from draftsmith.distill.datasets import warn_unfinished
from draftsmith.distill.trajectories.store import Shard, TrajectoryStore

Said = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("work"))


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


def collect_words(folder: Path, out: Path) -> list[str]:
    fixed = "--limit 12 --shard-size 4 --samples 2 --max-new-tokens 6"
    return ["--prompts", str(folder / "many.txt"), "--out", str(out), *fixed.split()]


@pytest.fixture
def store(folder: Path, tmp_path: Path, command: Command) -> Path:
    """Three shards, and run.json."""
    whole = folder / "store"
    if not whole.exists():
        command("collect", *collect_words(folder, whole))
    return Path(shutil.copytree(whole, tmp_path / "store"))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """What is said of a store."""

    def say(folder: Path) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", logger="draftsmith"):
            warn_unfinished(TrajectoryStore.open(folder))
        return list(caplog.messages)

    return say


def remove(store: Path, number: int) -> None:
    for path in store.glob(f"shard-{number:05d}.*"):
        path.unlink()


def test_distill_warns_of_an_interrupted_collection_until_it_has_ended(
    folder: Path,
    tmp_path: Path,
    command: Command,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "store"
    write = TrajectoryStore.write

    def interrupted(self: TrajectoryStore, number: int, *rest: object) -> Shard:
        if number == 2:
            raise KeyboardInterrupt
        return write(self, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(TrajectoryStore, "write", interrupted)
        command("collect", *collect_words(folder, out), code=130)
    assert TrajectoryStore.open(out).shards() == [0, 1] and not (out / "run.json").exists()
    words = distill_words(folder, tmp_path / "made", "--store", str(out), "--duration", "2steps")
    with pytest.raises(SystemExit) as end:
        cli.main(["distill", "--target", str(folder / "target"), *words])
    assert end.value.code == 0
    (warning,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning")]
    assert f"{out} has no run.json" in warning and "the collection has not ended" in warning
    assert "the 2 shards that are there are used" in warning
    assert "the same `collect` command again does what is missing" in warning
    command("collect", *collect_words(folder, out))
    assert said(out) == []


def test_a_store_that_ended_with_more_shards_lacks_some(store: Path, said: Said) -> None:
    """As `collect` leaves it that is interrupted while it makes removed shards again."""
    assert said(store) == []
    remove(store, 1)
    (warning,) = said(store)
    assert "lacks 1 of the 3 shards that its collection ended with" in warning


NO_RECORDS = (
    *(None, "", "[]", "{}", '{"results": {"shards": null}}', '{"results": {"shards": Infinity}}'),
    *('{"results": {"shards": true}}', '{"results": {"shards": "3"}}'),
)


@pytest.mark.parametrize("content", NO_RECORDS)
def test_a_run_json_that_is_not_of_collect_does_not_count(
    store: Path, said: Said, content: str | None
) -> None:
    (store / "run.json").unlink()
    if content is not None:
        (store / "run.json").write_text(content)
    (warning,) = said(store)
    assert "has no run.json of `collect`" in warning and "or that file was not copied" in warning


def test_nothing_is_said_of_a_store_that_was_filled_from_python(
    tmp_path: Path, store: Path, said: Said
) -> None:
    there = TrajectoryStore.open(store)
    own = replace(there.header, settings={"seed": 0})
    TrajectoryStore.create(tmp_path / "own", own).write(0, there.read(0))
    assert said(tmp_path / "own") == []
