"""Hidden signals stay in their shards: read as far as a block goes, in any process, and checked."""

from __future__ import annotations

import multiprocessing
import pickle
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
from draftsmith.distill.trajectories.readers import FeatureFile, StoredFeatures
from draftsmith.distill.trajectories.shards import write_sealed
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.errors import BackendError


def a_store(folder: Path, feature_type: str = "bfloat16") -> TrajectoryStore:
    """30 trajectories, every third with hidden signals of width 6."""
    store = TrajectoryStore.create(folder, header(feature_type=feature_type))
    store.write(3, make(30))
    return store


def every(store: TrajectoryStore) -> list[tuple[StoredFeatures, Tensor]]:
    """Where the signals of each trajectory are, and what they are."""
    file = store.features(3)
    found = [(row, one.features) for row, one in enumerate(store.read(3))]
    return [
        (file.of(row, len(features)), torch.from_numpy(features))
        for row, features in found
        if features is not None
    ]


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
    assert len(known) == 10
    for number in (7, 2, 9, 2, 0):
        stored, whole_TS = known[number]
        for places in (len(whole_TS), len(whole_TS) // 2, 0):
            found_TS = stored.read(places)
            assert found_TS.dtype == torch.float32
            assert torch.equal(found_TS, whole_TS[:places])
        assert stored.width == 6


def test_what_is_read_can_be_changed_and_the_store_stays(tmp_path: Path) -> None:
    stored, whole_TS = every(a_store(tmp_path))[2]
    stored.read(len(whole_TS)).fill_(7)
    assert torch.equal(stored.read(len(whole_TS)), whole_TS)


def test_a_shard_is_opened_once_and_not_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    real = readers.safe_open

    def counted(path: Path, framework: str) -> object:
        opened.append(path)
        return real(path, framework=framework)

    monkeypatch.setattr(readers, "safe_open", counted)
    store = a_store(tmp_path)
    file = store.features(3)
    assert opened == []
    for row in (0, 3, 6):
        file.of(row, len(store.read(3)[row].prompt) + len(store.read(3)[row].tokens)).read(1)
    assert len(opened) == 1


def _answer(stored: StoredFeatures, places: int, pipe: Connection) -> None:
    pipe.send(stored.read(places).tolist())


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes_read_what_this_one_has_read_before(tmp_path: Path, way: str) -> None:
    known = every(a_store(tmp_path))
    for stored, whole_TS in known:
        stored.read(len(whole_TS))  # the file is open here
    context = multiprocessing.get_context(way)
    for stored, whole_TS in (known[8], known[1]):
        here, there = context.Pipe()
        process = context.Process(target=_answer, args=(stored, len(whole_TS), there))
        process.start()
        assert here.poll(120)
        assert torch.equal(torch.tensor(here.recv()), whole_TS)
        process.join()
        assert torch.equal(stored.read(len(whole_TS)), whole_TS)


def test_they_can_be_pickled_after_they_were_read(tmp_path: Path) -> None:
    stored, whole_TS = every(a_store(tmp_path))[4]
    stored.read(1)
    again = pickle.loads(pickle.dumps(stored))
    assert torch.equal(again.read(len(whole_TS)), whole_TS)


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
    file = store.features(3)
    with pytest.raises(BackendError, match=said):
        file.of(9, len(known["9"])).read(len(known["9"]))
    assert torch.equal(file.of(12, len(known["12"])).read(1), known["12"][:1])  # others are good


def test_what_does_not_fit_its_text_or_is_not_there_is_named(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    file = store.features(3)
    places = len(every(store)[1][1])
    with pytest.raises(BackendError, match=r"trajectory 3: .* its text has 99 tokens"):
        file.of(3, 99)
    with pytest.raises(
        BackendError, match=r"shard 3 .*, trajectory 4: .*cannot be read .*tensor 4"
    ):
        file.of(4, 1)
    file.of(3, places)
    (path,) = tmp_path.glob("*.safetensors")
    path.unlink()
    with pytest.raises(BackendError, match=r"trajectory 3: .*cannot be read \(No such file"):
        FeatureFile(path, 3, "remedy").of(3, places)
