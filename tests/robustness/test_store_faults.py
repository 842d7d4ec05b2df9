"""A store of trajectories that is damaged, killed while it is written, or on a full disk."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.forks import Forks

from draftsmith.config import from_dict
from draftsmith.distill.trajectories import store as stores
from draftsmith.distill.trajectories.store import (
    MANIFEST,
    Skipped,
    StoreHeader,
    TrajectoryStore,
)
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.errors import BackendError, InputError

FACTS = {"target": "toy", "tokenizer_sha256": "1" * 64, "vocab_size": 100, "top_k": 4}
# Not by its name: what reads headers is then made once, before processes are forked.
HEADER = from_dict(StoreHeader, {**FACTS, "settings": {"seed": 0}, "prompts_sha256": "2" * 64})
SKIPPED = [Skipped(prompt_id="long", reason="longer than 256 tokens")]
KINDS = ("parquet", "features.safetensors", "json")


def make(number: int, count: int = 3) -> list[Trajectory]:
    """The trajectories of shard `number`: laws and hidden signals that tell which one it is."""
    out = []
    for index in range(count):
        tokens = tuple((number + index + place) % 100 for place in range(5))
        ids_NK = np.arange(20).reshape(5, 4) + number % 80
        laws = TopK(
            ids_NK=ids_NK.astype(np.int32),
            log_p_NK=np.full((5, 4), -2.0 - number % 50 - index, np.float32),
        )
        features = np.full((7, 3), number % 100 + index, np.float32)
        out.append(
            Trajectory(
                prompt_id=str(number),
                forcing="beam",
                index=index,
                prompt=(1, 2),
                tokens=tokens,
                score=float(number),
                top=laws,
                features=features,
            )
        )
    return out


def is_shard(found: list[Trajectory], number: int) -> bool:
    """Whether these are exactly the trajectories of shard `number`."""
    expected = make(number)
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected, strict=True):
        assert one.top is not None and other.top is not None
        assert one.features is not None and other.features is not None
        plain = ("prompt_id", "forcing", "index", "prompt", "tokens", "score")
        same = (
            all(getattr(one, name) == getattr(other, name) for name in plain)
            and np.array_equal(one.top.ids_NK, other.top.ids_NK)
            and np.allclose(one.top.log_p_NK, other.top.log_p_NK, atol=2e-3)
            and np.array_equal(one.features, other.features)
        )
        if not same:
            return False
    return True


def make_store(folder: Path, shards: int = 3) -> TrajectoryStore:
    store = TrajectoryStore.create(folder, HEADER)
    for number in range(shards):
        store.write(number, make(number), SKIPPED)
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --------------------------------------------------------------------------- damage

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-3],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "grown": lambda content: content + b"\0",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [*DAMAGE, "missing"])
def test_a_damaged_shard_is_named_and_the_others_stay_readable(
    tmp_path: Path, kind: str, damage: str
) -> None:
    store = make_store(tmp_path)
    file = tmp_path / f"shard-00001.{kind}"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
    gone = (kind, damage) == ("json", "missing")  # then it is no shard any more
    with pytest.raises(InputError if gone else BackendError) as caught:
        store.read(1)
    if not gone:
        assert "remove shard-00001.* and collect again" in str(caught.value)
        with pytest.raises(BackendError, match="shard-00001"):
            list(store.trajectories())
    assert is_shard(store.read(0), 0) and is_shard(store.read(2), 2)
    for path in tmp_path.glob("shard-00001.*"):  # as the message says
        path.unlink()
    again = TrajectoryStore.create(tmp_path, HEADER)
    assert not again.has(1)
    again.write(1, make(1))
    assert is_shard(again.read(1), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_bit_of_a_shard_is_noticed(tmp_path: Path, kind: str) -> None:
    store = make_store(tmp_path, shards=2)
    file = tmp_path / f"shard-00001.{kind}"
    content = file.read_bytes()
    facts = store.shard(1)
    rng = random.Random(0)
    bits = rng.sample(range(8 * len(content)), 1000)
    noticed = 0
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            found = store.read(1)
        except BackendError as error:
            assert "shard-00001" in str(error)
            noticed += 1
        else:  # white space between the words of JSON says nothing
            assert kind == "json" and is_shard(found, 1) and store.shard(1) == facts
    assert noticed > 0.8 * len(bits)
    assert is_shard(store.read(0), 0)


def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    make_store(tmp_path, shards=1)
    file = tmp_path / MANIFEST
    content = file.read_bytes()
    noticed = 0
    bits = random.Random(0).sample(range(8 * len(content)), 1500)
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            store = TrajectoryStore.open(tmp_path)
        except BackendError as error:
            assert MANIFEST in str(error)
            noticed += 1
        else:
            assert store.header == HEADER and is_shard(store.read(0), 0)
    assert noticed > 0.75 * len(bits)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    make_store(tmp_path, shards=1)
    (tmp_path / MANIFEST).write_bytes(content)
    for enter in (TrajectoryStore.open, lambda path: TrajectoryStore.create(path, HEADER)):
        with pytest.raises(BackendError, match=r"manifest\.json"):
            enter(tmp_path)
    assert len(names(tmp_path)) == 4  # nothing was written over


def test_shards_without_a_manifest_are_not_taken_over(tmp_path: Path) -> None:
    make_store(tmp_path, shards=1)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(BackendError, match=r"shards but no manifest\.json"):
        TrajectoryStore.create(tmp_path, HEADER)


def test_a_shard_of_another_store_is_noticed(tmp_path: Path) -> None:
    mine = make_store(tmp_path / "mine", shards=2)
    other_header = replace(HEADER, target="other")
    other = TrajectoryStore.create(tmp_path / "other", other_header)
    other.write(5, make(5))
    for path in (tmp_path / "other").glob("shard-*"):
        shutil.copy(path, tmp_path / "mine")
    for path in (tmp_path / "mine").glob("shard-00000.*"):  # and one in a wrong place
        shutil.copy(path, path.with_name(path.name.replace("00000", "00009")))
    for number in (5, 9):
        with pytest.raises(BackendError, match=rf"shard {number}.*belongs"):
            mine.read(number)
    assert is_shard(mine.read(1), 1)


# --------------------------------------------------------------------------- full disks


def count_writes(patch: pytest.MonkeyPatch, fail_at: int, error: BaseException) -> list[str]:
    """Make the fail_at-th of everything that needs the disk raise `error`, half-way."""
    log: list[str] = []

    def wrap(module: Any, name: str) -> None:
        real = getattr(module, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            log.append(name)
            if len(log) - 1 != fail_at:
                return real(*args, **options)
            if name in ("write_bytes", "write_text"):
                real(args[0], args[1][: len(args[1]) // 2], **options)
            raise error

        patch.setattr(module, name, wrapped)

    wrap(stores, "save_file")
    for name in ("write_bytes", "write_text"):
        wrap(Path, name)
    for name in ("fsync", "replace"):
        wrap(os, name)
    return log


ERRORS: list[BaseException] = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    Exception("No space left on device (os error 28)"),  # what native code makes of it
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ERRORS, ids=["full", "quota", "wrapped", "interrupt"])
def test_a_write_that_fails_anywhere_leaves_the_store_as_it_was(
    tmp_path: Path, error: BaseException
) -> None:
    store = make_store(tmp_path / "count", shards=1)
    with pytest.MonkeyPatch.context() as patch:
        log = count_writes(patch, -1, error)
        store.write(1, make(1), SKIPPED)
    assert log.count("replace") == len(KINDS) and {"fsync", "write_bytes", "save_file"} < set(log)
    visible = len(log) - log[::-1].index("replace")  # calls until the last file has its name
    for fail_at in range(len(log)):
        store = make_store(tmp_path / str(fail_at), shards=1)
        before = names(store.folder)
        with pytest.MonkeyPatch.context() as patch:
            count_writes(patch, fail_at, error)
            with pytest.raises((BackendError, KeyboardInterrupt)) as caught:
                store.write(1, make(1), SKIPPED)
        if isinstance(caught.value, BackendError):
            text = str(caught.value)
            assert "no space is left" in text and "shard-00001" in text and "\n" not in text
        assert store.has(1) == (fail_at >= visible)
        if not store.has(1):
            assert names(store.folder) == before
            store.write(1, make(1), SKIPPED)
        assert is_shard(store.read(0), 0) and is_shard(store.read(1), 1)


def test_a_full_disk_when_a_store_is_created_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for fail_at in range(3):
        folder = tmp_path / str(fail_at)
        with pytest.MonkeyPatch.context() as patch:
            count_writes(patch, fail_at, full)
            with pytest.raises(BackendError, match=r"manifest\.json.*space"):
                TrajectoryStore.create(folder, HEADER)
        assert names(folder) == []
        make_store(folder, shards=1)


def test_a_mistake_that_is_no_failed_write_is_not_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    store = make_store(tmp_path, shards=1)
    before = names(tmp_path)
    monkeypatch.setattr(stores, "save_file", wrong)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        store.write(1, make(1))
    assert names(tmp_path) == before


# --------------------------------------------------------------------------- processes


def write_shards(folder: str, first: int, step: int, last: int, kill_at: int = 0) -> None:
    """In a process of its own, which is killed at its `kill_at`-th call that changes the disk."""
    if kill_at:
        arm(kill_at)
    write_missing(Path(folder), range(first, last, step))
    os._exit(0)


def write_missing(folder: Path, numbers: range) -> None:
    store = TrajectoryStore.create(folder, HEADER)
    for number in numbers:
        if not store.has(number):
            try:
                store.write(number, make(number), SKIPPED)
            except InputError:
                assert store.has(number)  # another process was first


def arm(kill_at: int) -> None:
    calls = 0

    def wrap(module: Any, name: str) -> None:
        real = getattr(module, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                if name.startswith("write"):
                    real(args[0], args[1][: len(args[1]) // 2], **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(module, name, wrapped)

    wrap(stores, "save_file")
    for name in ("write_bytes", "write_text"):
        wrap(Path, name)
    for name in ("fsync", "replace", "unlink"):
        wrap(os, name)


def check_whole(folder: Path, expected: int, since: int = 0) -> None:
    """Shards 0 .. expected - 1 and no others are there, those from `since` on whole, with all their
    files."""
    store = TrajectoryStore.open(folder)
    assert store.shards() == list(range(expected))
    fresh = range(since, expected)
    assert all(is_shard(store.read(number), number) for number in fresh)
    skipped = store.summary(map(store.shard, fresh)).skipped
    assert skipped == ({SKIPPED[0].reason: len(fresh)} if fresh else {})


def test_a_kill_at_any_call_leaves_whole_shards_and_a_store_that_goes_on(
    tmp_path: Path, forks: Forks
) -> None:
    for kill_at in range(1, 200):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        with forks.start(write_shards, folder, 0, 1, 2, kill_at) as child:
            killed = child.wait() == -signal.SIGKILL
        if (folder / MANIFEST).exists():
            check_whole(folder, len(TrajectoryStore.open(folder).shards()))
        write_missing(folder, range(2))
        check_whole(folder, 2)
        left = [name for name in names(folder) if name.startswith(".shard")]
        assert not left, "what a killed write left is swept when the shard is written again"
        if not killed:
            break
    assert not killed and kill_at > 24  # three files a shard: written, synced, renamed, synced


def kill_at_random(forks: Forks, folder: Path, times: int, seed: int) -> int:
    """Number of shards after `times` kills at random moments of writing."""
    rng = random.Random(seed)
    written, longest = 0, 0.15
    for _ in range(times):
        with forks.start(write_shards, folder, 0, 1, 10**6) as child:
            assert not child.ended(rng.uniform(0.001, longest)), child.errors()
            assert child.kill() == -signal.SIGKILL
        if not written:  # a busy machine writes nothing so soon
            longest = min(1.5 * longest, 10.0)
        if not (folder / MANIFEST).exists():
            continue
        found = len(TrajectoryStore.open(folder).shards())
        assert found >= written, "a shard that was visible is gone"
        check_whole(folder, found, since=written)  # all of them once, at the end
        written = found
    check_whole(folder, written)
    return written


def test_kills_at_random_moments_leave_whole_shards(tmp_path: Path, forks: Forks) -> None:
    assert kill_at_random(forks, tmp_path, times=15, seed=0) > 0


@pytest.mark.full
def test_100_kills_at_random_moments_leave_whole_shards(tmp_path: Path, forks: Forks) -> None:
    assert kill_at_random(forks, tmp_path, times=100, seed=1) > 0


@pytest.mark.parametrize(("second", "step"), [(1, 2), (0, 1)], ids=["different", "the same"])
def test_two_processes_write_shards_at_the_same_time(
    second: int, step: int, tmp_path: Path, forks: Forks
) -> None:
    shards = 40
    with (
        forks.start(write_shards, tmp_path, 0, step, shards) as one,
        forks.start(write_shards, tmp_path, second, step, shards) as other,
    ):
        assert one.wait() == 0 and other.wait() == 0
    check_whole(tmp_path, shards)
    assert len(names(tmp_path)) == 1 + len(KINDS) * shards  # no lock stays


def test_a_process_does_not_sweep_what_another_is_writing(tmp_path: Path, forks: Forks) -> None:
    store = make_store(tmp_path, shards=1)
    with forks.start(write_shards, tmp_path, 2, 1, 3, 3) as child:  # dead in the middle of shard 2
        assert child.wait() == -signal.SIGKILL
    theirs = [name for name in names(tmp_path) if "shard-00002" in name]
    assert theirs
    store.write(1, make(1), SKIPPED)
    assert set(theirs) < set(names(tmp_path))
    assert store.shards() == [0, 1]
