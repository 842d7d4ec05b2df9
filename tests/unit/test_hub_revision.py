"""Stores of hub models, from a cache that is made here: nothing is asked of the network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.command_cases import distill_words, ran, work_folder

from draftsmith.distill.trajectories.store import TrajectoryStore, revision_of
from draftsmith.errors import BackendError

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("work"))


@pytest.fixture
def hub(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two models of one tokenizer and size: some/large and some/small."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    publish(cache, work, "large", FIRST)
    publish(cache, work, "small", SECOND)
    return cache


def publish(cache: Path, work: Path, name: str, commit: str) -> None:
    """`main` of this model becomes `commit`; what it was before stays there."""
    model = cache / f"models--some--{name}"
    shutil.copytree(work / "target", model / "snapshots" / commit)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)


def collect(work: Path, out: Path, *words: str) -> list[str]:
    fixed = ["--prompts", str(work / "prompts.jsonl"), "--max-new-tokens", "6"]
    return ["collect", "--json", *fixed, "--out", str(out), *words]


def test_the_revision_of_a_hub_model_is_its_commit(hub: Path, work: Path) -> None:
    assert revision_of("some/large") == revision_of("some/large", FIRST) == FIRST
    assert revision_of("some/small", "main") == SECOND
    publish(hub, work, "large", "c" * 40)
    assert revision_of("some/large") == "c" * 40
    assert revision_of("some/large", FIRST) == FIRST


def test_the_revision_of_a_folder_is_a_digest_of_its_weights(hub: Path, work: Path) -> None:
    copy = hub / "models--some--large" / "snapshots" / FIRST
    found = revision_of(str(copy))
    assert found == revision_of(str(work / "target")) and found is not None and len(found) == 64


def test_a_model_that_is_nowhere_is_named(hub: Path) -> None:
    with pytest.raises(BackendError, match=r"configuration.*'some/none'"):
        revision_of("some/none")


def test_a_store_is_not_continued_once_main_has_moved(
    hub: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = collect(work, tmp_path / "store", "--target", "some/large")
    assert ran(capsys, *words)["written"] == 1
    header = TrajectoryStore.open(tmp_path / "store").header
    assert (header.target, header.revision) == ("some/large", FIRST)
    publish(hub, work, "large", SECOND)
    said = ran(capsys, *words, code=2)
    assert f"revision is '{FIRST}' there and '{SECOND}' here" in said
    assert ran(capsys, *words, "--revision", FIRST)["written"] == 0  # what it was made with


def test_a_store_of_another_hub_model_is_refused(
    hub: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    ran(capsys, *collect(work, store, "--target", "some/large"))
    words = distill_words(work, out, "--json", "--store", str(store), "--target")
    said = ran(capsys, "distill", *words, "some/small", code=2)
    assert "collected from 'some/large', and this target 'some/small' has another commit" in said
    assert f"hf download some/large --revision {FIRST}" in said
    folder = hub / "models--some--large" / "snapshots" / FIRST  # what that downloads
    ran(capsys, "distill", *words, str(folder))
