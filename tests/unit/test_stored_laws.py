"""Laws on disk while they are learnt from: the same in any order, in the memory of one batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_packing import END, plain, trajectory
from tests.unit.test_store import check_same, header, make, make_laws

from draftsmith.distill.batches import Weighted, assemble, pack
from draftsmith.distill.sources import Multi
from draftsmith.distill.trajectories import readers, shards, store
from draftsmith.distill.trajectories.readers import LawFile
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.errors import BackendError


def test_laws_come_back_in_any_order_and_after_more_were_added(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    laws = [make_laws(rng, N, 5, 100) for N in (3, 0, 40, 1)]
    encoded = [shards.encode(top, 100) for top in laws]
    file = LawFile(tmp_path, 100)
    kept = []
    for one in encoded:
        kept.append(file.add(one))
        kept[0].read()  # moves the place in the file
    for number in (2, 0, 3, 1, 2):
        found, wanted = kept[number].read(), shards.decode(encoded[number])
        np.testing.assert_array_equal(found.ids_NK, wanted.ids_NK)
        np.testing.assert_array_equal(found.log_p_NK, wanted.log_p_NK)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, whatever ends the process


def test_a_store_gives_its_laws_as_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = TrajectoryStore.create(tmp_path, header())
    there.write(0, make(30))
    whole = there.read(0)

    def fail(path: Path) -> Any:
        raise AssertionError("hidden signals are large, and nobody learns from them")

    monkeypatch.setattr(store, "load_file", fail)
    found = there.undecoded(0)
    assert all(bare.top is None and bare.features is None for bare, _ in found)
    again = [
        replace(bare, top=None if laws is None else shards.decode(laws), features=one.features)
        for (bare, laws), one in zip(found, whole, strict=True)
    ]
    check_same(again, whole)


@pytest.mark.parametrize("ending", ["parquet", "features.safetensors"])
def test_a_damaged_file_is_named_although_laws_stay_as_they_are(
    tmp_path: Path, ending: str
) -> None:
    there = TrajectoryStore.create(tmp_path, header())
    there.write(0, make(30))
    path = tmp_path / f"shard-00000.{ending}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(BackendError, match=rf"shard 0 .* is damaged: {path.name}"):
        there.undecoded(0)


def test_a_batch_of_kept_laws_is_that_of_laws_in_memory(tmp_path: Path) -> None:
    texts = [trajectory((n % 7, 1), (n % 5, 2, END), name=str(n)) for n in range(12)]
    file = LawFile(tmp_path, 10)
    kept, decoded = [], []
    for text in texts:
        assert text.top is not None
        laws = file.encode(text.top)
        kept.append(Weighted(trajectory=replace(text, top=None), laws=laws))
        decoded.append(replace(text, top=laws.read()))
    one = assemble(pack(kept, 14), 14, END)
    other = assemble(pack(plain(*decoded), 14), 14, END)
    assert one.laws is not None and other.laws is not None
    assert torch.equal(one.laws.ids_NK, other.laws.ids_NK)
    assert torch.equal(one.laws.log_p_NK, other.laws.log_p_NK)
    assert torch.equal(one.law_row_BT, other.law_row_BT)
    bare = [document.without_laws() for document in kept]
    assert assemble(pack(bare, 14), 14, END).laws is None


def test_mixtures_can_be_kept_on_disk(tmp_path: Path) -> None:
    """Beams of different lengths, so that later places mix fewer laws and are narrower."""
    group = [
        trajectory((1,), tokens, index=i, score=-i)
        for i, tokens in enumerate([(2, END), (3, 4, END), (5, 2, 1, END)])
    ]
    multi = Multi(aggregate="mixture", weights="score")
    for inside, outside in zip(
        multi.apply(plain(*group)), multi.apply(plain(*group), LawFile(tmp_path, 10)), strict=True
    ):
        assert outside.trajectory.top is None
        assert outside.weight == inside.weight
        top, kept = inside.top(), outside.top()
        assert top is not None and kept is not None
        dense, found = (np.zeros((len(top), 10)) for _ in range(2))
        for laws, p_NV in ((top, dense), (kept, found)):
            rows = np.arange(len(laws))[:, None]
            np.add.at(p_NV, (rows, laws.ids_NK), np.exp(laws.log_p_NK))
        np.testing.assert_allclose(found, dense, rtol=1e-3)


def test_a_disk_without_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"cannot keep the laws of the stores in .*nowhere"):
        LawFile(tmp_path / "nowhere", 10)
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setattr(
        readers.tempfile,
        "TemporaryFile",
        lambda dir: open("/dev/full", "r+b"),  # noqa: SIM115
    )
    top = make_laws(np.random.default_rng(0), 3, 5, 10)
    with pytest.raises(BackendError, match="No space left on device; give --out on a disk"):
        LawFile(tmp_path, 10).encode(top)
