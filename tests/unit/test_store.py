"""The store of trajectories: what comes back, who may read it, how large it becomes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from draftsmith import provenance
from draftsmith.core.types import Signals
from draftsmith.distill.trajectories import shards
from draftsmith.distill.trajectories.shards import error_bound, read_sealed, write_sealed
from draftsmith.distill.trajectories.store import (
    MANIFEST,
    Skipped,
    StoreHeader,
    TrajectoryStore,
)
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.errors import BackendError, InputError

LLAMA = 128_256


def header(**changes: Any) -> StoreHeader:
    values: dict[str, Any] = {
        "target": "toy",
        "revision": "abc",
        "tokenizer_sha256": "1" * 64,
        "vocab_size": 100,
        "top_k": 5,
        "settings": {"forcing": "beam", "beams": 4, "temperatures": [1.0, 0.5], "seed": 0},
        "prompts_sha256": "2" * 64,
    }
    return StoreHeader(**(values | changes))


def make_laws(rng: np.random.Generator, N: int, K: int, V: int) -> TopK:
    ids = [np.sort(rng.choice(V, K, replace=False)) for _ in range(N)]
    p_NK = rng.dirichlet(np.full(K, 0.2), N) * rng.uniform(0.5, 1, (N, 1)) + 1e-12
    log_p_NK = np.log(p_NK / np.maximum(p_NK.sum(axis=1, keepdims=True), 1))
    return TopK(
        ids_NK=np.reshape(ids, (N, K)).astype(np.int32), log_p_NK=log_p_NK.astype(np.float32)
    )


def make(count: int, *, seed: int = 0, V: int = 100, K: int = 5) -> list[Trajectory]:
    """Trajectories of all kinds: with and without laws, hidden signals, text around them."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        prompt = tuple(rng.integers(0, V, rng.integers(0, 9)).tolist())
        tokens = tuple(rng.integers(0, V, number % 7).tolist())  # the first one is empty
        places = len(prompt) + len(tokens)
        # multiples of 1/8 below 32: exact in both half types
        features = rng.integers(-100, 100, (places, 6)).astype(np.float32) / 8
        out.append(
            Trajectory(
                prompt_id=f"p{number // 2} \u00e9\u2028",
                forcing=("greedy", "sample", "beam", "gold")[number % 4],
                index=number % 2,
                temperature=0.7 if number % 4 == 1 else None,
                prompt=prompt,
                tokens=tokens,
                score=float(rng.standard_normal()),
                top=None if number % 5 == 2 else make_laws(rng, len(tokens), K, V),
                features=None if number % 3 else features,
                language="de" if number % 2 else None,
                tag="news" if number % 3 else None,
            )
        )
    return out


def equal(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and np.array_equal(left, right)


def check_same(found: list[Trajectory], expected: list[Trajectory]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        bare = {"top": None, "features": None}
        assert replace(one, **bare) == replace(other, **bare)
        assert equal(one.features, other.features)
        assert (one.top is None) == (other.top is None)
        if one.top is not None and other.top is not None:
            assert equal(one.top.ids_NK, other.top.ids_NK)
            off_NK = np.abs(one.top.log_p_NK.astype(np.float64) - other.top.log_p_NK)
            assert (off_NK <= error_bound(other.top.log_p_NK) + 1e-6).all()


# --------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("feature_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_trajectories_come_back(tmp_path: Path, count: int, feature_type: str) -> None:
    store = TrajectoryStore.create(tmp_path / "s", header(feature_type=feature_type))
    store.write(0, make(count))
    check_same(store.read(0), make(count))
    check_same(TrajectoryStore.open(tmp_path / "s").read(0), make(count))


def test_all_trajectories_come_in_the_order_of_shards(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    expected = [make(4, seed=seed) for seed in range(3)]
    for number in (7, 0, 100_000):
        store.write(number, expected[(7, 0, 100_000).index(number)])
    assert store.shards() == [0, 7, 100_000]
    assert [store.has(number) for number in (0, 1, 7, 100_000)] == [True, False, True, True]
    check_same(list(store.trajectories()), [*expected[1], *expected[0], *expected[2]])


def test_whole_laws_come_back(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header(top_k=None))
    store.write(0, make(8, K=100))
    check_same(store.read(0), make(8, K=100))


def test_files_are_those_that_the_page_names(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    store.write(3, make(4))
    bare = [replace(trajectory, features=None) for trajectory in make(4)]
    store.write(4, bare)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "shard-00003.features.safetensors",
        "shard-00003.json",
        "shard-00003.parquet",
        "shard-00004.json",
        "shard-00004.parquet",
    ]


def test_an_empty_store(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    assert store.shards() == [] and list(store.trajectories()) == []
    summary = store.summary()
    assert summary.trajectories == 0 and summary.bytes_per_token is None
    (tmp_path / "shard-00001.json").mkdir()
    assert not store.has(1) and store.shards() == []


def test_the_summary_counts_everything(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    trajectories = make(9) + make(5, seed=1)
    store.write(0, trajectories[:9], [Skipped(prompt_id="a", reason="too long")])
    skipped = [Skipped(prompt_id="b", reason="too long"), Skipped(prompt_id="c", reason="empty")]
    store.write(1, trajectories[9:], skipped)
    summary = store.summary()
    tokens = sum(len(trajectory.tokens) for trajectory in trajectories)
    assert (summary.shards, summary.trajectories, summary.tokens) == (2, 14, tokens)
    assert summary.prompt_tokens == sum(len(trajectory.prompt) for trajectory in trajectories)
    assert summary.skipped == {"too long": 2, "empty": 1}
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert summary.bytes == sum(sizes.values())
    features = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    assert 0 < features == summary.feature_bytes
    assert summary.bytes_per_token == (summary.bytes - features) / tokens
    assert store.shard(1).skipped == tuple(skipped)


def test_references_that_were_cut_are_counted_by_reason(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    store.write(0, make(2), cut={"too long": 2})
    store.write(1, make(2), cut={"too long": 1, "no room": 1})
    store.write(2, make(2))
    assert store.summary().cut == {"too long": 3, "no room": 1}
    path = tmp_path / "shard-00002.json"
    content = read_sealed(path, "")
    del content["cut"]  # as it was written before they were counted
    write_sealed(path, content)
    assert store.summary().cut == {"too long": 3, "no room": 1}
    check_same(store.read(2), make(2))


# --------------------------------------------------------------------------- the size


def make_long(ids: str, count: int = 24, places: int = 96) -> list[Trajectory]:
    """Laws of 50 out of 128,256: ids like those of text (Zipf), or the hardest to compress."""
    rng = np.random.default_rng(0)
    ranks = np.arange(LLAMA, dtype=np.float32) + 3.0
    out = []
    for number in range(count):
        laws = make_laws(rng, places, 50, LLAMA)
        if ids == "zipf":
            noisy = rng.standard_exponential((places, LLAMA), np.float32) ** 1.3 * ranks
            rows = np.sort(np.argpartition(noisy, 50, axis=1)[:, :50], axis=1)
            laws = TopK(ids_NK=rows.astype(np.int32), log_p_NK=laws.log_p_NK)
        prompt = tuple(rng.integers(0, LLAMA, places // 2).tolist())
        tokens = tuple(rng.integers(0, LLAMA, places).tolist())
        out.append(
            Trajectory(
                prompt_id=f"prompt-{number}",
                forcing="sample",
                temperature=1.0,
                prompt=prompt,
                tokens=tokens,
                score=-1.5,
                top=laws,
            )
        )
    return out


# 182.75 for the laws, uncompressed: below that for text only when their parts are compressed
@pytest.mark.parametrize(
    ("ids", "most"), [pytest.param("zipf", 180, marks=pytest.mark.full), ("random", 200)]
)
def test_top_50_laws_of_a_large_vocabulary_take_at_most_200_bytes_per_token(
    tmp_path: Path, ids: str, most: int
) -> None:
    store = TrajectoryStore.create(tmp_path, header(vocab_size=LLAMA, top_k=50))
    trajectories = make_long(ids)
    store.write(0, trajectories)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())  # all that is on the disk
    tokens = sum(len(trajectory.tokens) for trajectory in trajectories)
    assert size / tokens <= most
    assert store.summary().bytes_per_token == size / tokens
    check_same(store.read(0), trajectories)


# --------------------------------------------------------------------------- whose it is


def test_creating_again_goes_on(tmp_path: Path) -> None:
    TrajectoryStore.create(tmp_path, header()).write(0, make(3))
    before = (tmp_path / MANIFEST).read_bytes()
    store = TrajectoryStore.create(tmp_path, header())
    assert store.has(0) and not store.has(1)
    store.write(1, make(2))
    assert (tmp_path / MANIFEST).read_bytes() == before
    assert TrajectoryStore.open(tmp_path).summary().trajectories == 5


def test_a_header_comes_back_whole(tmp_path: Path) -> None:
    settings = {"b": [1, 2.5, None, "x"], "a": {"deep": True}, "n": float("inf")}
    signals = Signals(last_hidden=True, layers=(1, 2))
    mine = header(settings=settings, signals=signals, revision=None, top_k=None)
    TrajectoryStore.create(tmp_path, mine)
    assert TrajectoryStore.open(tmp_path).header == replace(mine, settings=settings | {"n": None})
    TrajectoryStore.create(tmp_path, mine)  # what JSON cannot say is no difference


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "other"}, "target is 'toy' there and 'other' here"),
        ({"revision": None}, "revision is 'abc' there and None here"),
        ({"tokenizer_sha256": "3" * 64}, "tokenizer_sha256 is '111.* there and '333"),
        ({"vocab_size": 101}, "vocab_size is 100 there and 101 here"),
        ({"top_k": None}, "top_k is 5 there and None here"),
        ({"signals": Signals(layers=(3,))}, r"signals\.layers is \[\] there and \[3\] here"),
        ({"feature_type": "float16"}, "feature_type is 'bfloat16' there and 'float16' here"),
        ({"settings": {"forcing": "beam", "beams": 8}}, "settings.beams is 4 there and 8 here"),
        ({"settings": {}}, "settings.seed is 0 there and None here"),
        ({"prompts_sha256": "4" * 64}, "prompts_sha256 is '222"),
    ],
)
def test_another_header_is_refused_and_the_difference_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    TrajectoryStore.create(tmp_path, header()).write(0, make(2))
    with pytest.raises(InputError, match=message):
        TrajectoryStore.create(tmp_path, header(**changes))
    check_same(TrajectoryStore.open(tmp_path).read(0), make(2))


def test_only_what_differs_is_named(tmp_path: Path) -> None:
    TrajectoryStore.create(tmp_path, header())
    with pytest.raises(InputError) as caught:
        TrajectoryStore.create(tmp_path, header(target="other"))
    assert "vocab_size" not in str(caught.value) and "settings" not in str(caught.value)


def test_a_store_of_other_tokens_is_refused(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    store.check_teacher("toy", None, ["1" * 64], 100)
    store.check_teacher("toy", None, ["9" * 64, "1" * 64], 100)
    said = "collected from 'toy', and this target 'new' has another "
    with pytest.raises(InputError, match=said + "tokenizer"):
        store.check_teacher("new", None, ["9" * 64], 100)
    with pytest.raises(InputError, match=said + r"vocabulary size \(100 there, 99 here\)"):
        store.check_teacher("new", None, ["1" * 64], 99)


def test_folders_are_compared_by_name_as_a_store_keeps_it(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header(target=".../toy"))
    store.check_teacher("/elsewhere/toy", None, ["1" * 64], 100)
    said = r"from '\.\.\./toy', and this target '/elsewhere/new' has another name"
    with pytest.raises(InputError, match=said):
        store.check_teacher("/elsewhere/new", None, ["1" * 64], 100)


DIGEST, COMMIT = "d" * 64, "c" * 40


@pytest.mark.parametrize(
    ("there", "name", "here", "refused"),
    [
        (COMMIT, "toy", COMMIT, None),
        (COMMIT, "copy", COMMIT, None),
        (COMMIT, "toy", "e" * 40, f"another commit .*--revision {COMMIT}"),  # main has moved
        (COMMIT, "new", "e" * 40, r"another commit \('c{40}' there, 'e{40}' here\)"),
        (DIGEST, "elsewhere", DIGEST, None),
        (DIGEST, "toy", "e" * 64, "another digest of its weights"),
        # a folder may be a copy of the hub model
        (COMMIT, "elsewhere", DIGEST, None),
        (DIGEST, "new", COMMIT, None),
        # nothing but names to go by
        (None, "toy", None, None),
        ("main", "toy", "v2", None),
        (None, "new", None, r"another name \('toy' there, 'new' here\)"),
        (None, "new", COMMIT, "another name"),
        (COMMIT, "new", "main", "another name"),
    ],
)
def test_a_store_of_other_weights_is_refused(
    tmp_path: Path, there: str | None, name: str, here: str | None, refused: str | None
) -> None:
    store = TrajectoryStore.create(tmp_path, header(revision=there))
    if refused is None:
        store.check_teacher(name, here, ["1" * 64], 100)
        return
    with pytest.raises(InputError, match=rf"'toy'.*target.*'{name}'.*{refused}"):
        store.check_teacher(name, here, ["1" * 64], 100)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"no manifest\.json"):
            TrajectoryStore.open(folder)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="file"):
        TrajectoryStore.create(file, header())
    for changes in ({"vocab_size": 0}, {"top_k": 0}):
        with pytest.raises(InputError, match="at least 1"):
            TrajectoryStore.create(tmp_path / "new", header(**changes))


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    TrajectoryStore.create(tmp_path, header())
    content = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(content | {"format": 2}))
    with pytest.raises(BackendError, match=r"format 2.*reads 1"):
        TrajectoryStore.open(tmp_path)


# --------------------------------------------------------------------------- refusals


def one(**changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "prompt_id": "p",
        "forcing": "greedy",
        "prompt": (1, 2),
        "tokens": (3,),
        "score": -1.0,
    }
    return Trajectory(**(values | changes))


LAWS = make_laws(np.random.default_rng(0), 3, 6, 100)


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (one(tokens=(100,)), "ids from 1 to 100, the vocabulary has 100 tokens"),
        (one(prompt=(-1,)), "ids from -1 to 3"),
        (one(top=make_laws(np.random.default_rng(0), 2, 5, 100)), r"1 tokens and laws of shape"),
        (one(tokens=(1, 2, 3), top=LAWS), r"laws of shape \(3, 6\).* of at most 5 ids"),
        (one(features=np.zeros((2, 4), np.float32)), r"shape \(2, 4\); expected a row for each"),
        (one(features=np.zeros(3, np.float32)), r"shape \(3,\)"),
        (one(features=np.full((3, 4), 1e39)), "not finite in bfloat16"),
        (one(features=np.full((3, 4), np.nan)), "not finite"),
        (one(top=TopK(ids_NK=np.array([[1]]), log_p_NK=np.array([[3.0]]))), "not logits"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    tmp_path: Path, trajectory: Trajectory, message: str
) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    with pytest.raises(InputError, match=message):
        store.write(0, [one(), trajectory])
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_hidden_signals_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    large = one(features=np.full((3, 4), 1e5, np.float32))
    TrajectoryStore.create(tmp_path / "b", header()).write(0, [large])
    store = TrajectoryStore.create(tmp_path / "f", header(feature_type="float16"))
    with pytest.raises(InputError, match="not finite in float16"):
        store.write(0, [large])


def test_a_shard_is_written_once(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    store.write(0, make(3))
    with pytest.raises(InputError, match=r"shard 0\b.*exists"):
        store.write(0, make(2))
    check_same(store.read(0), make(3))
    with pytest.raises(InputError, match="numbered from 0"):
        store.write(-1, [])


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    for number in (0, -1):
        assert not store.has(number)
        with pytest.raises(InputError, match=f"no shard {number}"):
            store.read(number)


def test_rows_are_parsed_as_they_were_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read once; what cannot be read or parsed names the shard."""
    store = TrajectoryStore.create(tmp_path, header())
    store.write(0, make(3))
    path = tmp_path / "shard-00000.parquet"
    good = path.read_bytes()
    reads = iter([good, good[:-1]])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: next(reads))
        check_same(store.read(0), make(3))
        with pytest.raises(BackendError, match=r"shard 0\b.*damaged"):
            store.read(0)
    with monkeypatch.context() as patch:
        patch.setattr(shards.pq, "ParquetFile", partial(fail, pa.ArrowInvalid("odd rows")))
        with pytest.raises(BackendError, match=r"shard-00000\.parquet: odd rows"):
            store.read(0)
    path.unlink()
    with pytest.raises(BackendError, match=r"cannot read .*shard-00000\.parquet"):
        store.read(0)


def fail(error: Exception, *_: object) -> None:
    raise error


# --------------------------------------------------------------------------- the budget


def test_the_budget_is_kept_and_what_was_written_survives(tmp_path: Path) -> None:
    skipped = [Skipped(prompt_id=f"p{i}", reason='too "long" \u00e9') for i in range(50)]
    budget = 60_000
    store = TrajectoryStore.create(tmp_path, header(), max_bytes=budget)
    for number in range(1000):
        try:
            store.write(number, make(20, seed=number), skipped)
        except InputError as error:
            assert f"larger than {budget:,} bytes" in str(error)
            break
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget
    else:
        raise AssertionError("the budget did not hold")
    assert number >= 2 and store.shards() == list(range(number))
    for written in range(number):
        check_same(store.read(written), make(20, seed=written))
    larger = TrajectoryStore.create(tmp_path, header(), max_bytes=2 * budget)
    larger.write(number, make(20, seed=number), skipped)
    assert larger.has(number)


def test_a_shard_that_would_fill_the_disk_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore.create(tmp_path, header())
    store.write(0, make(20))
    before = sorted(path.name for path in tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(provenance.shutil, "disk_usage", lambda path: usage._replace(free=2_000))
        said = (
            r"shard 1 of [\d,]+ bytes would fill the disk of the store .*\(2,000 bytes are free\)"
        )
        with pytest.raises(BackendError, match=said + ".*run the same command again"):
            store.write(1, make(20, seed=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    store.write(1, make(20, seed=1))
    check_same(store.read(1), make(20, seed=1))
