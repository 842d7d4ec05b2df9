"""Batches that a thread assembles in advance are those of the source, errors too."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.small_trainer import CONFIG, make_source, make_trainer, weights

from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill.batches import AHEAD, BatchSource, Prefetched, TextRows
from draftsmith.distill.trainer import Trainer
from draftsmith.errors import BackendError


class Noted:
    """Packed blocks; notes who asked for which batch, and fails at one step."""

    def __init__(self, bad_step: int | None = None) -> None:
        self.source, self.bad_step = make_source(), bad_step
        self.asked: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        self.asked.append((step, part))
        self.threads.add(threading.current_thread().name)
        if step == self.bad_step:
            raise BackendError(f"the shard of step {step} is damaged")
        return self.source.batch(step, part, parts)


def assembling() -> int:
    """How many threads assemble batches, once nothing refers to a source any more."""
    gc.collect()
    return sum(thread.name == "batches" for thread in threading.enumerate())


def same(one: TrajectoryBatch, other: TrajectoryBatch) -> bool:
    return torch.equal(one.tokens_BT, other.tokens_BT)


@pytest.mark.parametrize("mine", [[0], [0, 1, 2, 3], [1, 3]])
def test_batches_come_in_the_order_of_the_source(mine: list[int]) -> None:
    """Over several epochs, for one process and for one of two; begun in the middle, too."""
    parts = 1 if mine == [0] else 4
    for first in (0, 5):
        plain, noted = make_source(), Noted()
        ahead = Prefetched(noted)
        for step in range(first, first + 9):
            for part in mine:
                assert same(ahead.batch(step, part, parts), plain.batch(step, part, parts))
        ahead.close()
        wanted = [(step, part) for step in range(first, first + 50) for part in mine]
        assert noted.asked == wanted[: len(noted.asked)], "each once, and no other"
        assert len(noted.asked) <= (9 + AHEAD + 2) * len(mine)
        assert "batches" in noted.threads


def test_any_other_request_is_answered_as_well() -> None:
    """A step again, a step back, a step far ahead, other parts."""
    plain, ahead = make_source(), Prefetched(Noted())
    steps = [0, 1, 2, 2, 3, 4, 1, 2, 3, 40, 41, 42]
    for step in steps:
        assert same(ahead.batch(step, 0, 1), plain.batch(step, 0, 1))
    for part in (0, 1, 0, 1):
        assert same(ahead.batch(43, part, 2), plain.batch(43, part, 2))
    for step in (44, 45):
        assert same(ahead.batch(step, 1, 2), plain.batch(step, 1, 2))
    ahead.close()
    assert not assembling()


def test_an_error_is_raised_at_its_batch_and_again_when_that_is_asked_again() -> None:
    noted = Noted(bad_step=4)
    plain, ahead = make_source(), Prefetched(noted)
    for step in range(4):
        if step == 2:  # the thread has failed by now
            deadline = time.monotonic() + 30
            while (4, 0) not in noted.asked and time.monotonic() < deadline:
                time.sleep(0.01)
            assert (4, 0) in noted.asked
        assert same(ahead.batch(step, 0, 1), plain.batch(step, 0, 1))
    for _ in range(2):
        with pytest.raises(BackendError, match=r"step 4\b"):
            ahead.batch(4, 0, 1)
        assert not assembling()
    noted.bad_step = None
    for step in range(4, 8):
        assert same(ahead.batch(step, 0, 1), plain.batch(step, 0, 1))


def test_the_thread_ends_with_its_source() -> None:
    ahead = Prefetched(Noted())
    for step in range(3):
        ahead.batch(step, 0, 1)
    assert assembling() == 1
    ahead.close()
    assert assembling() == 0
    ahead.batch(3, 0, 1)
    ahead.batch(4, 0, 1)
    assert assembling() == 1
    del ahead
    assert assembling() == 0


def test_a_source_that_its_own_thread_frees_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Garbage is collected in whatever thread happens to run."""
    failures: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", failures.append)
    held: list[Prefetched] = []
    freed = threading.Event()

    class Freeing(Noted):
        def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
            if step == 3:
                held.clear()
                gc.collect()
                freed.set()
            return super().batch(step, part, parts)

    held.append(Prefetched(Freeing()))
    held[0].batch(0, 0, 1)
    held[0].batch(1, 0, 1)
    assert freed.wait(30)
    deadline = time.monotonic() + 30
    while assembling() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not assembling() and not failures


@pytest.mark.parametrize("with_text", [False, True])
def test_training_ends_the_thread_of_its_source(tmp_path: Path, with_text: bool) -> None:
    source: BatchSource = Prefetched(make_source())
    if with_text:
        source = TextRows(first=source, text=make_source())
    trainer = make_trainer(tmp_path, source=source)
    assert trainer.train().steps == CONFIG.steps
    assert not assembling()
    assert trainer.source is source


def test_training_in_advance_is_training(tmp_path: Path) -> None:
    """Interrupted at a step that is damaged, and continued: the same weights."""
    wanted = make_trainer(tmp_path / "plain")
    wanted.train()

    def ahead(bad_step: int | None) -> Trainer:
        return make_trainer(tmp_path / "ahead", source=Prefetched(Noted(bad_step)))

    with pytest.raises(BackendError, match=r"step 7\b"):
        ahead(7).train()
    assert not assembling()
    found = ahead(None)
    assert found.train().steps == CONFIG.steps
    expected = weights(wanted)
    assert all(torch.equal(value, expected[name]) for name, value in weights(found).items())
    assert not assembling()
