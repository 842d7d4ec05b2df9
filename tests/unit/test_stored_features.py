"""Hidden signals stay in their shards: read as far as a block goes, in any process, and checked."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.unit.test_store import header, make
from torch import Tensor

from draftsmith.distill.checkpoint import sha256
from draftsmith.distill.trajectories import readers
from draftsmith.distill.trajectories.readers import ByteCache, StoredText
from draftsmith.distill.trajectories.shards import write_sealed
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.errors import BackendError

BARE = 14
"""The row without hidden signals. It has no answer either, so that no text asks for them."""


def a_store(folder: Path, feature_type: str = "bfloat16") -> TrajectoryStore:
    """30 trajectories with hidden signals of width 6; row BARE lacks them."""
    store = TrajectoryStore.create(folder, header(feature_type=feature_type))
    rng = np.random.default_rng(1)
    kept = []
    for one in make(30):
        places = one.prompt_length + one.answer_length
        # multiples of 1/8 below 32: exact in both half types
        states = rng.integers(-100, 100, (places, 6)).astype(np.float32) / 8
        kept.append(replace(one, features=None if len(kept) == BARE else states))
    store.write(3, kept)
    return store


def every(store: TrajectoryStore) -> list[tuple[StoredText, Tensor]]:
    """Each text that has an answer, and what its signals are."""
    texts = store.reader(3, ByteCache(), 6).texts()
    known = [one.features for one in store.read(3)]
    return [(text, torch.from_numpy(known[text.row])) for text in texts]


def rewrite(store: TrajectoryStore, features: dict[str, Tensor], number: int = 3) -> None:
    """Other signals in a shard, which its checksum confirms."""
    facts = store.shard(number)
    path = store.folder / f"shard-{number:05d}.features.safetensors"
    save_file(features, path)
    new = {"sha256": sha256(path), "pieces": readers.pieces_of(path), "bytes": path.stat().st_size}
    files = [replace(file, **new) if file.name == path.name else file for file in facts.files]
    write_sealed(store.folder / f"shard-{number:05d}.json", replace(facts, files=tuple(files)))


@pytest.mark.parametrize("feature_type", ["bfloat16", "float16"])
def test_beginnings_of_any_rows_come_in_any_order(tmp_path: Path, feature_type: str) -> None:
    known = every(a_store(tmp_path, feature_type))
    assert len(known) == 25
    for number in (7, 2, 9, 2, 0):
        stored, whole_TS = known[number]
        for places in (len(whole_TS), len(whole_TS) // 2, 0):
            found_TS = stored.states(places)
            assert found_TS.dtype == torch.float32
            assert torch.equal(found_TS, whole_TS[:places])
        assert whole_TS.shape[1] == 6


def test_what_is_read_can_be_changed_and_the_store_stays(tmp_path: Path) -> None:
    stored, whole_TS = every(a_store(tmp_path))[2]
    stored.states(len(whole_TS)).fill_(7)
    assert torch.equal(stored.states(len(whole_TS)), whole_TS)


def test_a_shard_is_opened_once_and_not_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    real = readers.safe_open

    def counted(path: Path, framework: str) -> object:
        opened.append(path)
        return real(path, framework=framework)

    monkeypatch.setattr(readers, "safe_open", counted)
    texts = [text for text, _ in every(a_store(tmp_path))]
    assert opened == []
    for text in texts[:3]:
        text.states(1)
    assert len(opened) == 1


def _answer(stored: StoredText, places: int, pipe: Connection) -> None:
    pipe.send(stored.states(places).tolist())


def test_other_processes_read_what_this_one_has_read_before(tmp_path: Path) -> None:
    known = every(a_store(tmp_path))
    for stored, whole_TS in known:
        stored.states(len(whole_TS))  # the file is open here
    context = multiprocessing.get_context("fork")
    for stored, whole_TS in (known[8], known[1]):
        here, there = context.Pipe()
        process = context.Process(target=_answer, args=(stored, len(whole_TS), there))
        process.start()
        assert here.poll(120)
        assert torch.equal(torch.tensor(here.recv()), whole_TS)
        process.join()
        assert torch.equal(stored.states(len(whole_TS)), whole_TS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named_by_shard_and_row(
    tmp_path: Path, value: float
) -> None:
    store = a_store(tmp_path)
    known = {
        str(row): torch.from_numpy(one.features)
        for row, one in enumerate(store.read(3))
        if one.features is not None
    }
    known["9"][-1, 2] = value
    rewrite(store, known)
    said = rf"shard 3 of {tmp_path}, trajectory 9: its hidden states hold NaN or infinite values; "
    with pytest.raises(BackendError, match=said + "remove shard-00003.* and collect again"):
        store.read(3)
    texts = {text.row: text for text in store.reader(3, ByteCache(), 6).texts()}
    with pytest.raises(BackendError, match=said):
        texts[9].states(len(known["9"]))
    assert torch.equal(texts[12].states(1), known["12"][:1])  # others are good


def test_what_does_not_fit_its_text_or_is_not_there_is_named(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    reader = store.reader(3, ByteCache(), 6)
    assert reader.features is not None
    stored, whole_TS = every(store)[1]
    with pytest.raises(BackendError, match=rf"trajectory {stored.row}\b.*99 tokens"):
        reader.features.check_shapes({stored.row: 99}, 6)
    with pytest.raises(BackendError, match=r"6 wide.*target 7\b"):
        reader.features.check_shapes({stored.row: len(whole_TS)}, 7)
    lacking = store.read(3)[BARE]
    assert lacking.features is None
    with pytest.raises(BackendError, match=rf"shard 3\b.*trajectory {BARE}\b.*none of"):
        reader.features.check_shapes({BARE: lacking.prompt_length}, 6)
    reader.features.check_shapes({stored.row: len(whole_TS)}, 6)
    (path,) = tmp_path.glob("*.safetensors")
    path.unlink()
    with pytest.raises(BackendError, match=rf"{path}.*No such file"):
        stored.states(1)
    with pytest.raises(BackendError, match=rf"{path}.*No such file"):
        reader.features.check_shapes({stored.row: len(whole_TS)}, 6)
