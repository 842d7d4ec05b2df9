"""Stored texts while they are learnt from: read in any order, and checked when first read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tests.unit.test_packing import END, plain, trajectory
from tests.unit.test_store import header, make

from draftsmith.core.types import TopLogprobs
from draftsmith.distill.batches import TrainingExample, assemble, pack
from draftsmith.distill.datasets import Multi
from draftsmith.distill.trajectories import readers, shards
from draftsmith.distill.trajectories.readers import ByteCache, StoredText
from draftsmith.distill.trajectories.shards import ShardIndex, prompt_key, write_sealed
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.errors import BackendError, InputError


def texts_of(there: TrajectoryStore, cache: ByteCache | None = None) -> list[StoredText]:
    return there.reader(0, cache or ByteCache(), 0).texts()


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_rows_come_back_in_any_order(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From several row groups, with and without room in the cache."""
    monkeypatch.setattr(shards, "GROUP_BYTES", 2000)
    there = TrajectoryStore.create(tmp_path, header())
    there.write(0, make(30))
    assert pq.read_metadata(tmp_path / "shard-00000.parquet").num_row_groups > 2
    wanted = [one for one in there.read(0) if one.tokens]
    found = texts_of(there, ByteCache(limit))
    assert len(found) == len(wanted)
    for place in (7, 2, 9, 2, 24, 0):
        one, other = found[place], wanted[place]
        assert (tuple(one.prompt), tuple(one.tokens)) == (other.prompt, other.tokens)
        assert (one.prompt_length, one.answer_length) == (len(other.prompt), len(other.tokens))
        assert one.highest == max((*other.prompt, *other.tokens))
        assert one.prompt_id == prompt_key(other.prompt)
        for name in ("forcing", "index", "temperature", "score"):
            assert getattr(one, name) == getattr(other, name)
        assert (one.top is None) == (other.top is None)
        if one.top is not None and other.top is not None:
            np.testing.assert_array_equal(one.top.ids_NK, other.top.ids_NK)
            np.testing.assert_array_equal(one.top.log_p_NK, other.top.log_p_NK)


def test_a_shard_without_an_index_has_the_index_of_its_rows(tmp_path: Path) -> None:
    """As shards that were written before there was one."""
    there = TrajectoryStore.create(tmp_path, header())
    facts = there.write(0, make(30))
    wanted = ShardIndex.from_words(facts.files[0].rows)
    assert shards.read_index(tmp_path / "shard-00000.parquet") == wanted
    files = tuple(replace(file, pieces="", rows={}) for file in facts.files)
    write_sealed(tmp_path / "shard-00000.json", replace(facts, files=files))
    for text, known in zip(texts_of(there), [x for x in there.read(0) if x.tokens], strict=True):
        assert tuple(text.tokens) == known.tokens
        assert (text.top is None) == (known.top is None)


def test_the_cache_keeps_what_was_used_last_and_no_more_than_its_limit() -> None:
    cache = ByteCache(10)
    made: list[str] = []

    def get(key: str) -> str:
        def make() -> tuple[str, int]:
            made.append(key)
            return key.upper(), 4

        return cache.get(key, make)

    assert [get(key) for key in "abacabb"] == list("ABACABB")
    assert made == ["a", "b", "c", "b"]


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("place", ["first row", "footer", "last row"])
def test_damage_is_met_when_what_it_hit_is_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: bool, place: str
) -> None:
    """Without checksums of pieces the first read of any row checks all."""
    monkeypatch.setattr(shards, "GROUP_BYTES", 2000)
    monkeypatch.setattr(readers, "PIECE", 256)
    there = TrajectoryStore.create(tmp_path, header())
    facts = there.write(0, make(30))
    if not pieces:
        files = tuple(replace(file, pieces="") for file in facts.files)
        write_sealed(tmp_path / "shard-00000.json", replace(facts, files=files))
    path = tmp_path / "shard-00000.parquet"
    content = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(pq.read_metadata(path).num_row_groups - 1)
    at = {
        "first row": 8,
        "footer": len(content) - 100,
        "last row": group.column(group.num_columns - 1).data_page_offset + 20,
    }[place]
    content[at] ^= 1
    path.write_bytes(bytes(content))
    texts = texts_of(there)
    first, last = texts[0], texts[-1]
    bad = {"first row": [first], "footer": [first, last], "last row": [last]}[place]
    for text in (first, last):
        if text in bad or not pieces:
            with pytest.raises(BackendError, match=r"shard 0 .* is damaged: shard-00000.parquet"):
                _ = text.tokens
        else:
            assert len(text.tokens) == text.answer_length


@pytest.mark.parametrize("ending", ["parquet", "features.safetensors"])
def test_a_damaged_file_is_named(tmp_path: Path, ending: str) -> None:
    there = TrajectoryStore.create(tmp_path, header())
    there.write(0, make(30))
    path = tmp_path / f"shard-00000.{ending}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(BackendError, match=rf"shard 0.*damaged.*{path.name}"):
        there.reader(0, ByteCache(), 0).check()


def test_a_batch_of_stored_texts_is_that_of_texts_in_memory(tmp_path: Path) -> None:
    there = TrajectoryStore.create(tmp_path, header())
    there.write(0, [replace(one, features=None) for one in make(40) if one.top is not None])
    kept = [TrainingExample(trajectory=text) for text in texts_of(there)]
    decoded = plain(*(one for one in there.read(0) if one.tokens))
    one, other = (assemble(pack(texts, 20), 20, END) for texts in (kept, decoded))
    assert isinstance(one.laws, TopLogprobs) and isinstance(other.laws, TopLogprobs)
    assert torch.equal(one.laws.ids_NK, other.laws.ids_NK)
    assert torch.equal(one.laws.log_p_NK, other.laws.log_p_NK)
    for name in ("tokens_BT", "loss_mask_BT", "documents_BT", "law_row_BT", "weights_BT"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    bare = [document.without_logprobs() for document in kept]
    assert assemble(pack(bare, 20), 20, END).laws is None


def test_mixtures_of_stored_texts_are_computed_when_asked(tmp_path: Path) -> None:
    """Beams of different lengths, so that later places mix fewer laws and are narrower."""
    group = [
        trajectory((1,), tokens, index=i, score=-i)
        for i, tokens in enumerate([(2, END), (3, 4, END), (5, 2, 1, END)])
    ]
    there = TrajectoryStore.create(tmp_path, header(vocab_size=10, top_k=10))
    there.write(0, group)
    multi = Multi(aggregate="mixture", weights="score")
    stored = [TrainingExample(trajectory=text) for text in texts_of(there)]
    in_memory = multi.apply(plain(*there.read(0)))
    for inside, outside in zip(in_memory, multi.apply(stored, ByteCache()), strict=True):
        assert outside.weight == inside.weight
        top, kept = inside.top(), outside.top()
        assert top is not None and kept is not None
        dense, found = (np.zeros((len(top), 10)) for _ in range(2))
        for laws, p_NV in ((top, dense), (kept, found)):
            rows = np.arange(len(laws))[:, None]
            np.add.at(p_NV, (rows, laws.ids_NK), np.exp(laws.log_p_NK))
        np.testing.assert_allclose(found, dense, rtol=1e-3)
    bare = [document.without_logprobs() for document in stored]
    with pytest.raises(InputError, match="--aggregate mixture"):
        multi.apply(bare, ByteCache())


def test_a_batch_decodes_an_old_row_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old shards are one row group each, larger than the cache; texts of a batch lie in both."""
    old = TrajectoryStore.open(Path(__file__).parents[1] / "net/artefacts/stores/samples")
    assert not old.shard(0).files[0].rows
    decoded: list[tuple[int, int]] = []
    real = readers.ShardReader._decoded

    def counted(self: readers.ShardReader, group: int) -> Any:
        decoded.append((self.number, group))
        return real(self, group)

    monkeypatch.setattr(readers.ShardReader, "_decoded", counted)
    cache = ByteCache(0)
    shards_of_it = [old.reader(number, cache, 0).texts() for number in old.shards()]
    mixed = [text for pair in zip(*shards_of_it, strict=False) for text in pair]
    stored = [TrainingExample(trajectory=text) for text in mixed]
    found = assemble(pack(stored, 40), 40, END)
    assert sorted(decoded) == [(0, 0), (1, 0)] and len(stored) > 20
    kept = [[one for one in old.read(number) if one.tokens] for number in old.shards()]
    loaded = plain(*[text for pair in zip(*kept, strict=False) for text in pair])
    wanted = assemble(pack(loaded, 40), 40, END)
    assert isinstance(found.laws, TopLogprobs) and isinstance(wanted.laws, TopLogprobs)
    assert torch.equal(found.laws.log_p_NK, wanted.laws.log_p_NK)
    for name in ("tokens_BT", "loss_mask_BT", "law_row_BT"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_damage_behind_the_checksums_names_its_shard(tmp_path: Path) -> None:
    """Rows that were checked, and are read again from a file that has been written since."""
    there = TrajectoryStore.create(tmp_path, header())
    there.write(0, make(30))
    (tmp_path / "other").mkdir()
    other = TrajectoryStore.create(tmp_path / "other", header())
    other.write(0, list(reversed(make(30))))
    cache = ByteCache(0)
    texts = texts_of(there, cache)
    assert len(texts[0].tokens) == texts[0].answer_length
    path = tmp_path / "shard-00000.parquet"
    path.write_bytes((tmp_path / "other" / path.name).read_bytes())
    cache.get("another", lambda: (None, 1))  # the row group has no room beside it
    with pytest.raises(BackendError, match=r"shard-00000.parquet.*remove shard-00000"):
        _ = [tuple(text.tokens) for text in texts]
