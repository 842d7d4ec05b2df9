"""The number of threads: measured by `tune` with a clock that tests set, kept, and read by runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import save_pair

from draftsmith.bench import costs, threads
from draftsmith.bench.threads import ThreadCosts, candidates, choose, time_threads, tune_threads
from draftsmith.targets import threads as kept
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_model


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HFTarget]:
    """A model on a machine of four processors, whose caller has not chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(kept.CHOSEN, raising=False)
    monkeypatch.setattr(kept, "usable_cpus", lambda: 4)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 4)
    monkeypatch.setattr(threads, "load_of_others", lambda: None)
    save_pair(tmp_path)
    before = torch.get_num_threads()
    yield open_model(ModelConfig(target=str(tmp_path / "target")))
    torch.set_num_threads(before)


class Clock:
    """Seconds that pass with forwards: of `work / threads`, and `meeting` for each thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, work: float, meeting: float) -> None:
        self.time, self.work, self.meeting = 0.0, work, meeting
        monkeypatch.setattr(costs, "now", lambda device: self.time)
        forward = HFTarget.forward

        def slow(target: HFTarget, *given: Any) -> object:
            count = torch.get_num_threads()
            self.time += self.work / count + self.meeting * count
            return forward(target, *given)

        monkeypatch.setattr(HFTarget, "forward", slow)


@pytest.mark.parametrize(
    ("work", "meeting", "best"),
    [(1.0, 0.0, 4), (1.0, 1.0, 1), (1.0, 0.25, 2)],  # cores pay, meeting costs, in between
)
def test_the_fastest_number_is_used_and_kept_for_the_next_run(
    work: float, meeting: float, best: int, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, work=work, meeting=meeting)
    found = tune_threads(target, range(2, 12))
    assert found is not None and found.best == best and torch.get_num_threads() == best
    assert list(found.seconds) == [1, 2, 3, 4]
    for count, by_width in found.seconds.items():
        assert by_width == dict.fromkeys(
            threads.WIDTHS, pytest.approx(work / count + meeting * count)
        )
    assert found.kept is not None and f"in {found.kept}" in found.sentence()
    torch.set_num_threads(3)
    open_model(ModelConfig(target=target.model.name_or_path))
    assert torch.get_num_threads() == best


def test_numbers_within_the_noise_leave_processors_to_others() -> None:
    def by_width(seconds: float) -> dict[int, float]:
        return {1: seconds, 16: 2 * seconds}

    assert choose({1: by_width(9.0), 2: by_width(5.0), 3: by_width(4.95)}) == 2
    assert choose({1: by_width(9.0), 2: by_width(5.0), 3: by_width(4.0)}) == 3


def test_a_width_does_not_count_more_because_it_takes_longer() -> None:
    assert choose({1: {1: 1.0, 16: 12.0}, 2: {1: 2.0, 16: 10.0}}) == 1


def test_each_round_begins_with_another_number_and_the_first_forward_is_not_counted() -> None:
    used: list[int] = []
    calls: list[tuple[int, int]] = []

    def forward(width: int) -> float:
        calls.append((used[-1], width))
        first = len(calls) == 1 or calls[-2][0] != used[-1]
        return 100.0 if first else 1.0

    found = time_threads((1, 2, 4), forward, used.append, widths=(1, 4), rounds=3)
    assert used == [1, 2, 4, 2, 4, 1, 4, 1, 2]
    assert found == {count: {1: 1.0, 4: 1.0} for count in (1, 2, 4)}


def test_many_processors_are_tried_by_doubling() -> None:
    assert candidates(2) == (1, 2)
    assert candidates(8) == tuple(range(1, 9))
    assert candidates(48) == (1, 2, 4, 8, 16, 32, 48)


def test_what_the_caller_has_chosen_stays(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = target.model.name_or_path
    assert kept.ThreadFile.of(target.name, target.model, target.engine).store(2)
    monkeypatch.setenv(kept.CHOSEN, "3")
    torch.set_num_threads(3)
    assert tune_threads(target, range(2, 12)) is None
    open_model(ModelConfig(target=name))
    assert torch.get_num_threads() == 3
    monkeypatch.delenv(kept.CHOSEN)
    open_model(ModelConfig(target=name))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("fault", ["damaged", "foreign", "too many", "no number"])
def test_a_file_that_cannot_count_here_is_ignored_and_named(
    fault: str, target: HFTarget, caplog: pytest.LogCaptureFixture
) -> None:
    file = kept.ThreadFile.of(target.name, target.model, target.engine)
    assert file.store(2)
    content = json.loads(file.path.read_text())
    changed = {
        "foreign": content | {"key": {}},
        "too many": content | {"threads": 64},
        "no number": content | {"threads": None},
    }
    text = json.dumps(changed[fault]) if fault in changed else "{"
    file.path.write_text(text)
    with caplog.at_level(logging.INFO, logger=kept.__name__):
        assert file.load() is None
    assert file.path.name in caplog.text and "ignored" in caplog.text


def test_a_folder_of_somebody_else_stops_nothing(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = kept.ThreadFile.of(target.name, target.model, target.engine)
    assert file.store(2)

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    with caplog.at_level(logging.INFO, logger=kept.__name__):
        assert file.load() is None
    assert file.path.name in caplog.text


def test_another_model_or_engine_has_a_file_of_its_own(target: HFTarget) -> None:
    files = {
        kept.ThreadFile.of(name, target.model, engine).path
        for name in ("a", "b")
        for engine in (None, "compiled")
    }
    assert len(files) == 4


def test_an_unwritable_cache_is_told_with_what_to_do(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    Clock(monkeypatch, work=1.0, meeting=1.0)
    found = tune_threads(target, range(2, 12))
    assert found is not None and found.kept is None
    assert "OMP_NUM_THREADS=1" in found.sentence()


def test_what_is_best_beside_other_programs_is_not_kept(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, work=1.0, meeting=1.0)
    monkeypatch.setattr(threads, "load_of_others", lambda: "other programs use this machine")
    found = tune_threads(target, range(2, 12))
    assert found is not None and found.kept is None and torch.get_num_threads() == 1
    assert "not kept, because other programs use this machine" in found.sentence()
    assert not kept.ThreadFile.of(target.name, target.model, target.engine).path.exists()


def test_one_processor_leaves_nothing_to_choose(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: 1)
    assert tune_threads(target, range(2, 12)) is None


def test_the_sentence_names_all_that_was_tried() -> None:
    seconds = {1: {1: 0.013, 16: 0.05}, 2: {1: 0.007, 16: 0.03}}
    found = ThreadCosts(best=2, seconds=seconds, kept="~/threads/x.json")
    assert found.sentence() == (
        "2 threads are the fastest (a token with 1: 13.0 ms, 2: 7.0 ms); kept for this model in "
        "~/threads/x.json"
    )
