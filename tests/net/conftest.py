"""The files of the commit before the rebuild, in a folder that tests may write to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `artefacts/`. Tests leave what is there as it is, and write beside it."""
    folder = tmp_path_factory.mktemp("old") / "artefacts"
    shutil.copytree(Path(__file__).parent / "artefacts", folder)
    shutil.copy(folder / "target/model.safetensors", folder / "speaker")
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step costs that are measured here are kept for one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
