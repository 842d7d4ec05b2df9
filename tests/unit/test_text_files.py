"""Which files a folder of text means, and that no others are looked for."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data import text
from draftsmith.errors import InputError
from draftsmith.plan.observations import read_trained
from draftsmith.provenance import read_json

TREE = (
    "abc.py",
    "json/decoder.py",
    "json/notes.txt",
    "json/tests/test_decoder.py",
    "json/site-packages/own.py",
    "site-packages/pip/main.py",
    "site-packages/pip/deep/er.py",
    "config-3.11/makesetup.py",
    ".hidden/secret.py",
    "json/.cache/old.py",
    "json/.dot.py",
)
EXCLUDE = ("site-packages/*", "config-*", "*/tests/*", "*.txt")
WANTED = ["abc.py", "json/decoder.py", "json/site-packages/own.py"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


@pytest.fixture
def entered(library: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose content was listed, relative to the library."""
    seen: list[str] = []

    def watch(name: str) -> None:
        listing = getattr(os, name)

        def listed(path: Any = ".") -> Any:
            seen.append(Path(path).relative_to(library).as_posix())
            return listing(path)

        monkeypatch.setattr(os, name, listed)

    watch("scandir")
    watch("listdir")
    return seen


def names(library: Path, *, exclude: tuple[str, ...] = ()) -> list[str]:
    return [file.name for file in text.find_files([str(library)], ["*.py", "*.txt"], exclude)]


def test_folders_that_are_left_out_whole_are_not_entered(library: Path, entered: list[str]) -> None:
    assert names(library, exclude=EXCLUDE) == WANTED
    assert sorted(entered) == [".", "json", "json/site-packages"]


def test_a_folder_with_one_wanted_file_is_entered(library: Path, entered: list[str]) -> None:
    """A pattern that names some files of a folder, or a folder elsewhere, leaves the rest."""
    some = names(library, exclude=("site-packages/*/main.py", "tests/*", "json"))
    assert some == [
        "abc.py",
        "config-3.11/makesetup.py",
        "json/decoder.py",
        "json/notes.txt",
        "json/site-packages/own.py",
        "json/tests/test_decoder.py",
        "site-packages/pip/deep/er.py",
    ]
    assert {"site-packages/pip", "json/tests"} <= set(entered)


def test_a_file_with_two_names_has_the_first_in_the_order_of_paths(tmp_path: Path) -> None:
    """`a` stands before `a-b.py`, as folders do, although `a/x.py` as text stands behind it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("x = 1\n")
    (tmp_path / "a-b.py").symlink_to(tmp_path / "a" / "x.py")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "linked").symlink_to(tmp_path / "a", target_is_directory=True)
    assert names(tmp_path) == ["a/x.py"]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device here")
def test_a_device_without_end_is_no_file() -> None:
    with pytest.raises(InputError, match="/dev/zero is a device and no file"):
        text.read_text(Path("/dev/zero"))


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no such device here")
@pytest.mark.parametrize("read", [text.read_text, read_json, read_trained])
def test_no_reader_takes_a_device(read: Callable[[Path], object]) -> None:
    """This one has an end, but the next one would fill the memory before anything could be said."""
    with pytest.raises(InputError, match="/dev/null is a device and no file"):
        read(Path("/dev/null"))


def test_a_line_that_no_memory_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small compressed file may hold gigabytes without an end of a line."""
    monkeypatch.setattr(text, "MOST_LINE", 100)
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b"a" * 99 + b"\n" + b"b" * 100 + b"\n" + b"c" * 10**6))
    lines = text.read_lines(path)
    assert next(lines)[1] == "a" * 99
    with pytest.raises(InputError, match="line 2 has more than 100 bytes: split it"):
        next(lines)


def test_no_more_of_a_line_is_read_than_a_line_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "MOST_LINE", 100)
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b"a" * 10**7))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="line 1 has more than 100 bytes"):
            next(text.read_lines(path))
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_a_text_that_no_memory_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "MOST_TEXT", 100)
    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 100))
    assert text.read_text(path) == "a" * 100
    path.write_bytes(gzip.compress(b"a" * 10**6))
    with pytest.raises(InputError, match="is a text of more than 100 bytes: split it"):
        text.read_text(path)
