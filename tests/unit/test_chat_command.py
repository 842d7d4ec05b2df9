"""`draftsmith chat`: through pipes, in a terminal, interrupted, with lines that cannot be asked."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.net.running import Ended, run
from tests.tiny_models import CHAT, NO_SYSTEM, save_chat_pair, save_pair

from draftsmith import cli
from draftsmith.commands.generate import Stream
from draftsmith.targets.hf import HFTarget

FIELDS = ["user", "text", "token_ids", "finish_reason", "tokens_per_step", "acceptance_rate"]
FIELDS += ["tokens_per_second", "prompt_tokens", "cached_tokens", "dropped_turns"]
CUT = ("interrupted", 3)
ENDLESS = ["--logit-bias", "0:-100"]
"""The target never ends a text."""
SHORT = ["--max-new-tokens", "8", *ENDLESS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model and a draft of it, with a long context."""
    folder = tmp_path_factory.mktemp("models")
    save_chat_pair(folder, context=200_000)
    return folder


def chat(folder: Path, *words: str, stdin: str) -> Ended:
    return run(["chat", "--target", str(folder / "target"), *SHORT, *words], stdin=stdin)


def test_each_line_of_a_pipe_is_a_turn_and_stdout_has_the_answers_alone(models: Path) -> None:
    ended = chat(models, stdin="the cat\n\n  \nand the dog?\r\n/stats\n")
    assert ended.code == 0
    turns = chat(models, "--json", stdin="the cat\n\n  \nand the dog?\r\n").json["turns"]
    assert [list(turn) for turn in turns] == [FIELDS, FIELDS]
    assert [turn["user"] for turn in turns] == ["the cat", "and the dog?"]
    assert ended.out == "".join(f"{turn['text']}\n" for turn in turns)
    assert "\x1b" not in ended.out + ended.err
    assert "the last answer: 8 tokens in" in ended.err and "all 2 answers: 16 tokens" in ended.err
    assert "tokens/s" in ended.err and "per step (tau)" in ended.err


def test_the_answers_are_those_of_generate_and_the_second_follows_the_first(
    models: Path, tmp_path: Path
) -> None:
    turns = chat(models, "--json", "--system", "be brief", stdin="the cat\nthe dog\n").json["turns"]
    said = [{"role": "system", "content": "be brief"}]
    for turn in turns:
        said.append({"role": "user", "content": turn["user"]})
        path = tmp_path / "chat.jsonl"
        path.write_text(json.dumps({"messages": said}) + "\n")
        words = ["--target", str(models / "target"), "--prompts", str(path), "--json", *SHORT]
        (made,) = run(["generate", *words]).json["results"]
        assert made["token_ids"] == turn["token_ids"]
        said.append({"role": "assistant", "content": turn["text"]})
    assert turns[0]["cached_tokens"] == 0 < turns[1]["cached_tokens"] < turns[1]["prompt_tokens"]


def test_the_text_does_not_depend_on_the_drafter(models: Path) -> None:
    asked = "the cat\nthe dog\n"
    plain = chat(models, "--drafter", "none", stdin=asked)
    for drafter in ("prompt_lookup", f"independent:{models / 'draft'}"):
        assert chat(models, "--drafter", drafter, stdin=asked).out == plain.out
    assert "drafted tokens were accepted" not in plain.err


def test_a_cascade_says_whose_drafts_were_accepted(models: Path) -> None:
    drafter = f"suffix+independent:{models / 'target'}"
    ended = chat(models, "--drafter", drafter, "--json", stdin="the cat\n/stats\n")
    (turn,) = ended.json["turns"]
    assert list(turn) == [*FIELDS, "accepted_by_source"]
    suffix, model = turn["accepted_by_source"].values()
    assert suffix + model > 0
    (said,) = [line for line in ended.err.splitlines() if line.startswith("the last answer")]
    assert f"suffix {suffix}, independent {model}" in said


def test_commands(models: Path) -> None:
    ended = chat(models, stdin="the cat\n/undo\n/system be brief\nthe cat\n/reset\nthe cat\n")
    assert ended.code == 0
    plain, brief, again = ended.out.splitlines()
    assert brief == again != plain
    assert "taken back: the cat" in ended.err and "the chat begins anew" in ended.err
    assert "the system text is changed" in ended.err
    taken = chat(models, "--system", "be brief", stdin="/system\nthe cat\n/quit\nthe dog\n")
    assert taken.out == f"{plain}\n", "/system takes the system text away, /quit ends"
    helped = chat(models, stdin="/help\n")
    assert helped.code == 0 and helped.out == ""
    for word in ("/stats", "/undo", "/reset", "/system", "/help", "/quit"):
        assert f"\n{word}" in f"\n{helped.err}"


def test_paths_and_lines_that_begin_with_a_blank_are_no_commands(models: Path) -> None:
    found = chat(models, "--json", stdin="/etc/hosts is a file\n /undo\n/ 2\n").json["turns"]
    assert [turn["user"] for turn in found] == ["/etc/hosts is a file", "/undo", "/ 2"]


def test_no_input_is_no_chat(models: Path) -> None:
    for nothing in ("", "\n \n"):
        ended = chat(models, stdin=nothing)
        assert (ended.code, ended.out) == (0, "")
    assert chat(models, "--json", stdin="").json == {"turns": []}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("the cat\n\n/undo\n/undo\n", "line 4: there is no turn to take back"),
        ("/stats\n", "line 1: there is no answer yet"),
        ("/stat\n", "line 1: there is no command /stat; did you mean '/stats'"),
        ("the cat\0\n", "line 1: the turn holds a NUL"),
        ("/system \0\n", "line 1: the system text holds a NUL"),
    ],
)
def test_a_line_that_cannot_be_asked_ends_a_pipe(asked: str, said: str, models: Path) -> None:
    ended = chat(models, stdin=f"{asked}the dog\n")
    assert ended.code == 2 and said in ended.sentence
    assert "the dog" not in ended.out


def test_bytes_that_are_not_utf_8_are_refused_by_their_line(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"the cat\ncaf\xe9\n"), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", "--target", str(models / "target"), *SHORT])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out.count("\n") == 1
    assert "line 2: the turn is not UTF-8" in err


def test_stdin_that_is_closed_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", "--target", str(models / "target")])
    assert end.value.code == 2 and "stdin is closed" in capsys.readouterr().err


def test_a_chat_that_outgrows_the_context_forgets_its_oldest_turns(tmp_path: Path) -> None:
    save_chat_pair(tmp_path, context=64)
    ended = chat(tmp_path, "--json", stdin="the cat sat on the mat\n" * 6)
    turns = ended.json["turns"]
    assert len(turns) == 6 and sum(turn["dropped_turns"] for turn in turns) > 0
    assert "turns are forgotten: the context of" in ended.err
    # the turn that does not fit even alone is refused, and the answer before it is out
    ended = chat(tmp_path, stdin=f"the cat\n{'x ' * 100}\n")
    assert ended.code == 2 and "line 2: this turn has" in ended.sentence
    assert "context of 64" in ended.sentence and ended.out.count("\n") == 1


def test_a_cut_answer_is_said(models: Path, tmp_path: Path) -> None:
    assert "--max-new-tokens" in chat(models, stdin="the cat\n").err
    save_chat_pair(tmp_path, context=32)
    words = ["chat", "--target", str(tmp_path / "target"), *ENDLESS]
    ended = run(words, stdin="the cat\n")
    assert ended.code == 0 and "the context is full" in ended.err


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    save_pair(tmp_path)
    ended = chat(tmp_path, stdin="the cat\n")
    assert ended.code == 2
    assert "has no chat template" in ended.sentence and "`generate`" in ended.sentence


def test_a_template_that_refuses_a_system_role(tmp_path: Path) -> None:
    save_chat_pair(tmp_path, template=NO_SYSTEM + CHAT)
    ended = chat(tmp_path, "--system", "be brief", stdin="the cat\n")
    assert ended.code == 2 and "no system role" in ended.sentence and ended.out == ""
    ended = chat(tmp_path, stdin="the cat\n/system be brief\n")
    assert ended.code == 2 and "line 2:" in ended.sentence and "no system role" in ended.sentence
    assert ended.out.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--system", " "], "--system must not be empty"),
        (["--drafter", " "], "--drafter must not be empty"),
        (["--drafter", "prediction"], "--drafter prediction"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_options_that_cannot_be_used(words: list[str], said: str, models: Path) -> None:
    ended = chat(models, *words, stdin="the cat\n")
    assert ended.code == 2 and said in ended.sentence


def test_a_lossy_rule_is_said(models: Path) -> None:
    words = ["--drafter", f"independent:{models / 'draft'}", "--temperature", "1"]
    ended = chat(models, *words, "--acceptance", "typical", "--json", stdin="the cat\n")
    assert ended.json["lossy"] in ended.err


def test_a_second_interrupt_does_not_wait_for_the_step(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, before, calls = HFTarget.forward, signal.getsignal(signal.SIGINT), 0

    def interrupted(*words: Any) -> Any:
        nonlocal calls
        calls += signal.getsignal(signal.SIGINT) is not before  # loading has forwards, too
        if calls in (1, 5):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return forward(*words)

    monkeypatch.setattr(HFTarget, "forward", interrupted)
    words = ["--json", "--drafter", "none"]
    ended = chat(models, *words, stdin="the cat\nthe log\nthe dog\n/undo\n/undo\n")
    assert signal.getsignal(signal.SIGINT) is before
    # nothing was said to the first turn, which is forgotten; the second has what it got
    log, dog = ended.json["turns"]
    assert (log["user"], log["finish_reason"], len(log["token_ids"])) == ("the log", *CUT)
    assert (dog["user"], dog["finish_reason"], len(dog["token_ids"])) == ("the dog", "length", 8)
    assert ended.err.count("(interrupted)") == 2
    assert "taken back: the dog\ntaken back: the log\n" in ended.err


class Keyboard(io.StringIO):
    """What `sys.stdin` is in a terminal."""

    def isatty(self) -> bool:
        return True


def test_in_a_terminal_nothing_that_is_typed_ends_the_chat_but_its_end(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: list[str | type[BaseException]] = ["/undo", "caf\udce9", KeyboardInterrupt]
    typed += ["/system \0", "the cat", KeyboardInterrupt, "the dog", EOFError]

    def read(prompt: str) -> str:
        assert prompt == "", "stdout is no terminal here"
        line = typed.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def late(stream: Stream) -> None:
        finish(stream)
        raise KeyboardInterrupt  # of somebody who meant to stop the answer

    finish = Stream.finish
    monkeypatch.setattr(Stream, "finish", late)
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", "--target", str(models / "target"), *SHORT])
    out, err = capsys.readouterr()
    monkeypatch.setattr(Stream, "finish", finish)
    assert end.value.code == 0 and not typed
    assert out == chat(models, stdin="the cat\nthe dog\n").out
    for said in ("/help lists", "no turn to take back", "not UTF-8", "the system text holds a NUL"):
        assert said in err


# --------------------------------------------------------------------------- as a process


@contextmanager
def process(folder: Path, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A chat whose answers have no end."""
    words = ["chat", "--target", str(folder / "target"), *ENDLESS, "--max-new-tokens", "100000"]
    words += ["--drafter", f"independent:{folder / 'draft'}"]
    command = [sys.executable, "-m", "draftsmith", *words]
    environment = {**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, env=environment, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()


def read_until(file: int, wanted: bytes, seconds: float = 120) -> bytes:
    """What comes up to and including `wanted`."""
    found, give_up = b"", time.monotonic() + seconds
    while wanted not in found:
        assert time.monotonic() < give_up, f"{wanted!r} has not come: {found[-200:]!r}"
        if select.select([file], [], [], 1)[0]:
            more = os.read(file, 1)
            assert more, f"it ended: {found[-200:]!r}"
            found += more
    return found


def drain(file: int) -> None:
    while select.select([file], [], [], 0)[0]:
        os.read(file, 1 << 16)


def test_an_interrupt_ends_the_answer_and_keeps_the_conversation(models: Path) -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with process(models, **pipes) as child:
        assert child.stdin and child.stdout and child.stderr
        stdin, stdout, stderr = (
            pipe.fileno() for pipe in (child.stdin, child.stdout, child.stderr)
        )
        for text in (b"the cat\n", b"the dog\n"):
            os.write(stdin, text)
            assert os.read(stdout, 1), "a token has been printed"
            child.send_signal(signal.SIGINT)
            read_until(stderr, b"(interrupted)\n")
            drain(stdout)  # all of this answer: it is written before that is said
        os.write(stdin, b"/undo\n/undo\n/quit\n")
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0 and out == b""
    assert b"taken back: the dog\ntaken back: the cat\n" in err
    assert b"in all: " in err and b"Traceback" not in err


@pytest.mark.full
def test_an_interrupt_while_a_pipe_is_silent_ends_with_130(models: Path) -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with process(models, **pipes) as child:
        assert child.stdin and child.stderr
        os.write(child.stdin.fileno(), b"/help\n")
        read_until(child.stderr.fileno(), b"Ctrl-C stops an answer.\n")
        child.send_signal(signal.SIGINT)
        child.wait(timeout=120)  # stdin is still open
        assert child.returncode == 130


def test_a_terminal_has_a_prompt_colours_and_sentences_in_place_of_an_end(models: Path) -> None:
    ours, theirs = pty.openpty()
    with process(models, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        seen = read_until(ours, b"> ")
        assert b"/help lists the commands" in seen
        os.write(ours, b"/nothing\n")
        assert b"there is no command /nothing" in read_until(ours, b"> ")
        os.write(ours, b"the cat\n")
        read_until(ours, b"\x1b[32m")  # an accepted draft
        child.send_signal(signal.SIGINT)
        read_until(ours, b"(interrupted)")
        read_until(ours, b"> ")
        os.write(ours, b"/undo\n")
        assert b"taken back: the cat" in read_until(ours, b"> ")
        os.write(ours, b"\x04")
        assert b"in all: " in read_until(ours, b" tokens/s")
        assert child.wait(timeout=60) == 0
    os.close(ours)
