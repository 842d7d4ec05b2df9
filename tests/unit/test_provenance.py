"""Signed results and writing that a kill or a full disk cannot halve."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from draftsmith import cli, provenance
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import (
    append_jsonl,
    atomic_path,
    fresh_beside,
    output_folder,
    portable_text,
    refuse_others,
    start_run,
    write_json_atomic,
    write_text_atomic,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_run_json_holds_what_recreates_the_run(tmp_path: Path) -> None:
    words = ["--target", "T", "--suite", "s.jsonl", "--temperature", "0", "--drafter-option", "k=v"]
    options = cli.parse("bench", words)
    path = start_run("bench", options, seed=7).write(tmp_path, results={"tau": math.nan, "n": 2})
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["seed"] == 7
    assert record["results"] == {"tau": None, "n": 2}
    assert record["versions"]["torch"]
    assert record["machine"]["cpus"] >= 1
    assert record["started"] <= record["ended"]
    again = record["command"].split()
    assert again[:2] == ["draftsmith", "bench"]
    assert cli.parse("bench", again[2:]) == options


def test_a_run_takes_the_place_of_its_own_verb_alone(tmp_path: Path) -> None:
    run = start_run("tune", {}, out=tmp_path / "none")
    refuse_others(tmp_path, "tune", ["records.jsonl"])
    (tmp_path / "records.jsonl").write_text("whose?\n")
    start_run("tune", {}, out=tmp_path)  # which writes no such file
    with pytest.raises(InputError, match=r"'records\.jsonl'"):
        refuse_others(tmp_path, "tune", ["records.jsonl"])
    for step in (run.begin, run.write):
        step(tmp_path)
        refuse_others(tmp_path, "tune", ["records.jsonl"])
        with pytest.raises(InputError, match="the results of `draftsmith tune`"):
            start_run("bench", {}, out=tmp_path)
    assert names(tmp_path) == ["records.jsonl", "run.json"]


def test_records_name_no_host_and_no_folder_outside_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--target", str(tmp_path / "models" / "t"), "--prompt", "/** a comment */ int x;"]
    words += ["--drafter", "independent:/somewhere/else/draft"]
    text = json.dumps(start_run("generate", cli.parse("generate", words), seed=0).record())
    assert str(tmp_path) not in text
    assert "/somewhere" not in text
    assert os.uname().nodename not in text
    assert "models/t" in text
    assert "independent:.../draft" in text
    assert "/** a comment */ int x;" in text


def test_home_is_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert portable_text("/home/someone/m,/home/someone") == "~/m,~"
    assert portable_text("a/b and /c") == "a/b and /c"


def test_no_part_of_a_joined_drafter_names_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for joined, portable in (
        ("suffix+hass:/home/someone/m", "suffix+hass:~/m"),
        ("suffix+hass:/data/a+independent:/data/b", "suffix+hass:.../a+independent:.../b"),
        ("independent:/data/a+b", "independent:.../a+b"),
        ("1+http://host/x", "1+http://host/x"),
    ):
        assert portable_text(joined) == portable


def test_git_revision_is_our_own_checkout_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "venv" / "draftsmith"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert provenance.git_revision() is None, "took the repository around a virtual environment"


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.txt"
    write_text_atomic(path, "one")
    write_text_atomic(path, "zwei\n")
    assert path.read_bytes() == b"zwei\n"
    write_json_atomic(path, {"a": (1, Path("p")), "b": math.inf})
    assert json.loads(path.read_text()) == {"a": [1, "p"], "b": None}
    assert names(path.parent) == ["x.txt"]


def test_a_folder_replaces_a_folder_whole(tmp_path: Path) -> None:
    out = tmp_path / "model"
    for text in ("old", "new"):
        with atomic_path(out) as part:
            part.mkdir()
            (part / text).write_text(text)
    assert names(tmp_path) == ["model"]
    assert names(out) == ["new"]


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def write_and_fail() -> None:
        with atomic_path(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_one_sentence_that_names_the_file(tmp_path: Path, wrapped: bool) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")

    def fill_the_disk() -> None:
        with atomic_path(path) as part:
            part.write_text("half")
            if wrapped:  # what safetensors and torch make of it
                raise RuntimeError("I/O error: No space left on device (os error 28)")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BackendError, match=r"model\.safetensors.*space") as caught:
        fill_the_disk()
    assert caught.value.exit_code == 3
    assert path.read_text() == "old"
    assert names(tmp_path) == ["model.safetensors"]


def test_an_error_of_another_kind_passes_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "x"):
        1 / 0  # noqa: B018


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_text_atomic(tmp_path / "file" / "x", "text")


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=r"pipe: "):
        write_text_atomic(pipe, "x")
    assert pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]


def test_nothing_is_written_into_the_folder_of_devices() -> None:
    """Root could: /dev/stdout is a link to whatever the shell has put there."""
    name = f"draftsmith-{os.getpid()}"
    with pytest.raises(InputError, match=f"{name}: .*device"):
        write_text_atomic(Path("/dev") / name, "x")
    assert not (Path("/dev") / name).exists()


def test_records_are_appended_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    append_jsonl(path, {"n": 1}, {"n": math.nan})
    append_jsonl(path, {"n": "ü\n"})
    assert path.read_text(encoding="utf-8") == '{"n": 1}\n{"n": null}\n{"n": "ü\\n"}\n'


@pytest.mark.parametrize("whole", ["", '{"n": 1}\n', '{"n": 1}\n' * 20_000])
def test_half_a_line_that_a_kill_left_is_cut_off(tmp_path: Path, whole: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(whole + '{"n": 2, "te')
    append_jsonl(path, {"n": 3})
    assert path.read_text() == whole + '{"n": 3}\n'


WITH_LITTLE_SPACE = """
import resource, signal, sys
from contextlib import ExitStack
from pathlib import Path
from draftsmith.errors import BackendError
from draftsmith.provenance import append_jsonl, write_text_atomic

folder = Path(sys.argv[1])
append_jsonl(folder / "records.jsonl", {"n": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for write in (
    lambda: write_text_atomic(folder / "big.txt", "x" * 10_000),
    lambda: append_jsonl(folder / "records.jsonl", {"n": 2}, {"text": "x" * 10_000}),
):
    try:
        write()
    except BackendError as error:
        print(error)
    else:
        sys.exit("the limit did not hold")
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no file size limit here")
def test_writes_that_really_run_out_of_space_leave_nothing_half_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_SPACE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no space is left") == 2
    assert names(tmp_path) == ["records.jsonl"]
    assert (tmp_path / "records.jsonl").read_text() == '{"n": 1}\n'


# --------------------------------------------------------------------------- one run at a time


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "out"
    with output_folder(out):
        for _ in range(2):
            with pytest.raises(InputError, match=str(out)), output_folder(out):
                pytest.fail("a second run was let in")
        with output_folder(out / "part"), output_folder(tmp_path / "other"):
            pass
    with output_folder(out):
        (out / "file").write_text("")
    assert names(out) == ["file"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that takes no files")
def test_a_folder_that_takes_no_files_is_not_called_busy() -> None:
    with pytest.raises(InputError, match="cannot write /proc/"), output_folder(Path("/proc")):
        pytest.fail("a run was let in")


def test_the_lock_of_a_file_that_is_gone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run opens the file just before the first removes it; a third makes a new one."""
    out, first, third, flock = tmp_path / "out", ExitStack(), ExitStack(), fcntl.flock
    first.enter_context(output_folder(out))

    def late(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.close()
        third.enter_context(output_folder(out))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with third:
        with pytest.raises(InputError, match=str(out)), output_folder(out):
            pytest.fail("two runs hold the folder")
        assert fcntl.flock is flock


def test_a_run_that_writes_nothing_leaves_only_the_folders_that_were_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), output_folder(tmp_path / "a" / "b"):
        1 / 0  # noqa: B018
    assert names(tmp_path) == []
    with output_folder(tmp_path):
        pass
    assert tmp_path.is_dir()


@pytest.mark.parametrize("name", ["file", "file/x", "n" * 300])
def test_a_place_that_can_be_no_output_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=name), output_folder(tmp_path / name):
        pytest.fail("it was let in")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_killed_writers_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    kept = [".hidden.tmp", ".tmp-model-mine", "model.12345678.tmp", "work"]
    for name in kept:
        (tmp_path / name).mkdir()
    for left in (fresh_beside(tmp_path / "model"), tmp_path / ".tmp-model-4711"):
        (left / "deep").mkdir(parents=True)
    fresh_beside(tmp_path / "run.json").write_text("{")
    with output_folder(tmp_path):
        assert names(tmp_path) == sorted([".lock", *kept])


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_said(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", unknown)
    caplog.set_level(logging.INFO, "draftsmith")
    left = fresh_beside(tmp_path / "model")
    left.mkdir()
    with output_folder(tmp_path):
        assert str(tmp_path) in caplog.text and "no locks" in caplog.text
        assert left.is_dir(), "it may be another run's"
