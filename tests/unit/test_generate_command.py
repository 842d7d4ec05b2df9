"""`draftsmith generate`: the JSON that is promised, texts that appear as they are decoded."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.tiny_models import save_chat_pair, save_pair, tiny_model, tiny_tokenizer

from draftsmith import cli
from draftsmith.commands.generate import Stream
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Detokenizer, Piece, generate, pieces
from draftsmith.core.types import RowStats
from draftsmith.drafters.none import NoDrafter
from draftsmith.plan.length_policy import AdaptiveLength
from draftsmith.targets.hf import HFTarget

FIELDS = ["prompt", "text", "token_ids", "finish_reason", "tokens_per_step", "acceptance_rate"]
SOURCES = ["suffix", "independent"]
PROMPTS = ("def add(left, right):\n", "the cat sat", "return left")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder)
    return folder


Command = Callable[..., Any]


@pytest.fixture
def run_json(models: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `generate --json` in this process; the results."""

    def run(*words: str) -> Any:
        with pytest.raises(SystemExit) as end:
            cli.main(["generate", "--target", str(models / "target"), "--json", *words])
        out, err = capsys.readouterr()
        assert end.value.code == 0, err
        assert out.count("\n") == 1
        payload = json.loads(out)
        assert list(payload) == ["results"]
        return payload["results"]

    return run


def prompt_words(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--prompt", text)]


def test_json_has_the_promised_fields_in_prompt_order(run_json: Command) -> None:
    found = run_json(*prompt_words(*PROMPTS), "--max-new-tokens", "9")
    assert [list(result) for result in found] == [FIELDS] * 3
    assert [result["prompt"] for result in found] == list(PROMPTS)
    tokenizer = tiny_tokenizer()
    for result in found:
        assert len(result["token_ids"]) == 9
        assert result["text"] == tokenizer.decode(result["token_ids"], skip_special_tokens=True)
        assert result["finish_reason"] == "length"
        assert result["tokens_per_step"] == 1.0
        assert result["acceptance_rate"] is None  # nothing was drafted


@pytest.mark.parametrize(
    "drafting",
    [
        ["--drafter", "prompt_lookup"],
        ["--drafter", "lookahead"],
        ["--drafter", "independent:{draft}"],
        ["--drafter", "independent:{draft}", "--draft-length", "3"],
        ["--drafter", "independent:{draft}", "--draft-length", "adaptive"],
        ["--drafter", "independent:{draft}", "--draft-tree", "3,2,1", "--rule", "match"],
        ["--drafter", "independent:{draft}", "--draft-tree", "2,2", "--draft-proposal", "greedy"],
        ["--drafter", "independent:{draft}", "--batch-size", "2"],
    ],
)
@pytest.mark.every(3)
def test_greedy_text_does_not_depend_on_the_drafter(
    drafting: list[str], run_json: Command, models: Path
) -> None:
    common = [*prompt_words(*PROMPTS), "--max-new-tokens", "20", "--dtype", "float64"]
    plain = run_json(*common)
    words = [word.format(draft=models / "draft") for word in drafting]
    drafted = run_json(*common, *words)
    assert [r["token_ids"] for r in drafted] == [r["token_ids"] for r in plain]
    if "independent" in words[1]:
        assert all(r["acceptance_rate"] is not None for r in drafted)


def test_a_cascade_says_of_each_token_whose_draft_it_was(
    run_json: Command, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cascade = ["--drafter", f"suffix+independent:{models / 'draft'}"]
    words = [*prompt_words(*PROMPTS), "--max-new-tokens", "20", *cascade]
    found = run_json(*words)
    total: Counter[str] = Counter()
    for result in found:
        assert list(result) == [*FIELDS, "accepted_by_source", "sources"]
        assert len(result["sources"]) == len(result["token_ids"])
        own = Counter(name for name in result["sources"] if name is not None)
        assert result["accepted_by_source"] == {name: own[name] for name in SOURCES}
        total += own
    assert total["independent"] > 0
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", "--target", str(models / "target"), *words])
    assert end.value.code == 0
    *_, last = capsys.readouterr().err.splitlines()
    assert last.endswith(", ".join(f"{name} {total[name]}" for name in SOURCES))


def test_a_seed_fixes_the_text_and_another_one_changes_it(run_json: Command) -> None:
    words = [*prompt_words(PROMPTS[0]), "--max-new-tokens", "12", "--temperature", "1"]
    first = run_json(*words, "--seed", "4")
    assert run_json(*words, "--seed", "4") == first
    assert run_json(*words, "--seed", "5") != first
    one = run_json(*words, "--top-k", "1")
    assert one[0]["token_ids"] == run_json(*words[:-1], "0")[0]["token_ids"]


def test_rows_do_not_depend_on_the_batch_size(run_json: Command) -> None:
    words = [*prompt_words(*PROMPTS), "--max-new-tokens", "10", "--temperature", "0.9"]
    words += ["--dtype", "float64", "--drafter", "prompt_lookup"]
    assert run_json(*words, "--batch-size", "3") == run_json(*words)


def test_prompt_files_and_chats(run_json: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"text": "the dog"}, {"messages": [{"role": "user", "content": "the log"}]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = run_json("--prompts", str(path), "--max-new-tokens", "4")
    assert [result["prompt"] for result in found] == ["the dog", "the log"]
    assert len(run_json("--prompts", str(path), "--limit", "1", "--max-new-tokens", "4")) == 1


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """The target with a chat template."""
    save_chat_pair(tmp_path)
    return tmp_path / "target"


def test_a_prompt_of_the_command_line_is_asked_through_the_template_unless_it_is_raw(
    chat_model: Path, run_json: Command, tmp_path: Path
) -> None:
    words = ["--target", str(chat_model), "--max-new-tokens", "6"]
    (asked,) = run_json(*words, "--prompt", "the cat")
    assert asked["prompt"] == "<user> the cat\n<assistant>"
    (raw,) = run_json(*words, "--prompt", "the cat", "--raw")
    (plain,) = run_json("--max-new-tokens", "6", "--prompt", "the cat")
    assert raw == plain != asked
    # a file says itself what its prompts are
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "the cat"}\n{"question": "the cat"}\n')
    assert run_json(*words, "--prompts", str(path)) == [raw, asked]


def test_headings_name_what_was_asked_and_plain_prompts_of_a_file_are_noted(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--target", str(chat_model), "--max-new-tokens", "2"]
    path = tmp_path / "prompts.txt"
    path.write_text("the cat\nthe dog\n")
    for given in (prompt_words("the cat", "the dog"), ["--prompts", str(path)]):
        with pytest.raises(SystemExit) as end:
            cli.main([*words, *given])
        out, err = capsys.readouterr()
        assert end.value.code == 0
        assert "--- 1/2  the cat\n" in out and "--- 2/2  the dog\n" in out
        assert ("2 of 2 prompts are plain text" in err) == ("--prompts" in given)


def test_raw_with_a_file_is_refused(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", "--target", str(chat_model), "--raw", "--prompts", "x.txt"])
    assert end.value.code == 2
    assert "--raw does nothing without --prompt" in capsys.readouterr().err


def test_a_stop_string_ends_the_text_before_it(run_json: Command) -> None:
    plain = run_json(*prompt_words(PROMPTS[0]), "--max-new-tokens", "40")[0]
    stop = plain["text"][10:13]
    cut = run_json(*prompt_words(PROMPTS[0]), "--max-new-tokens", "40", "--stop", stop)[0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == plain["text"][: plain["text"].index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_alone_goes_to_stdout(
    stream: bool, run_json: Command, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*prompt_words(PROMPTS[1]), "--max-new-tokens", "15"]
    text = run_json(*words)[0]["text"]
    with pytest.raises(SystemExit):
        cli.main(["generate", "--target", str(models / "target"), *words, *["--stream"] * stream])
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert "15 tokens in 15 steps, 1.00 per step" in err


def test_several_texts_say_whose_they_are(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", str(models / "target"), *prompt_words("the cat", "x" * 100)]
    with pytest.raises(SystemExit):
        cli.main(["generate", *words, "--max-new-tokens", "3"])
    out, _ = capsys.readouterr()
    assert "--- 1/2  the cat\n" in out
    assert f"--- 2/2  {'x' * 71}\N{HORIZONTAL ELLIPSIS}\n" in out


def test_chats_that_are_blanks_to_their_template_are_numbered(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ '   ' }}")
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"question": "who"}\n' * 2)
    words = ["--target", str(tmp_path / "target"), "--prompts", str(chats)]
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", *words, "--max-new-tokens", "3"])
    assert end.value.code == 0
    assert "--- 2/2" in capsys.readouterr().out


# ---------------------------------------------------------------------------- tokens to text

TEXTS = (
    "def f(x):\n    return x",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} \N{GRINNING FACE}\N{GRINNING FACE} end",
    "  leading and trailing  ",
    "\N{GRINNING FACE}",
)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_decoded_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.add(token) for token in ids]
    assert "".join(parts) + detokenizer.finish() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_half_character_is_held_back_and_given_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a\N{GRINNING FACE}")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.add(token) for token in ids) == "a"
    assert "\N{REPLACEMENT CHARACTER}" in detokenizer.finish()


def test_pieces_join_runs_of_one_origin() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("the cat zq")
    drafted = [number < 2 for number in range(len(ids))]
    found = pieces(tokenizer, ids, drafted)
    assert found[0] == Piece(text=tokenizer.decode(ids[:2]), drafted=True)
    assert "".join(piece.text for piece in found) == "the cat zq"
    assert [piece.drafted for piece in found] == [True, False]
    assert pieces(tokenizer, (), ()) == ()


def streamed(text: str, accepted: int, *stops: str, colour: bool = False) -> str:
    tokenizer, file = tiny_tokenizer(), io.StringIO()
    console = Console(
        file=file, force_terminal=colour, color_system="standard" if colour else None, width=40
    )
    stream = Stream(tokenizer, console, stops)
    ids = tokenizer.encode(text)
    stream.add(ids[:3], accepted)
    stream.add(ids[3:], 0)
    stream.finish()
    return file.getvalue()


def test_accepted_tokens_are_coloured_in_a_terminal_only() -> None:
    green = streamed("the cat zq", 2, colour=True)
    assert "\x1b[32m" in green
    assert green.count("\x1b[32m") <= 2
    assert "\x1b[" not in streamed("the cat zq", 2)


def test_a_stream_hides_stop_strings_and_what_may_become_one() -> None:
    assert streamed("the cat END more", 0, "END") == "the cat \n"
    # only a beginning of the stop string: it comes out at the end
    assert streamed("the cat EN", 0, "END") == "the cat EN\n"
    assert streamed("aEaENb", 0, "END", "b]") == "aEaENb\n"


def test_long_lines_of_a_stream_are_not_broken() -> None:
    text = "word " * 40
    assert streamed(text, 0) == text + "\n"


def test_a_terminal_gets_no_control_characters_of_a_model() -> None:
    assert "\x1b]0;title" not in streamed("a\x1b]0;title\x07b", 0, colour=True)
    assert streamed("a\x1b]0;title\x07b\tc", 0) == "a\x1b]0;title\x07b\tc\n"


def test_a_stream_says_what_generation_says() -> None:
    target = HFTarget(tiny_model(), tiny_tokenizer(), end_ids=frozenset({0}))
    file = io.StringIO()
    stream = Stream(target.tokenizer, Console(file=file))
    (made,) = generate(
        target,
        NoDrafter(),
        [target.tokenizer.encode(PROMPTS[0])],
        DecodeOptions(max_new_tokens=40),
        on_step=lambda step, rows: stream.add(step.emitted[0], step.accepted[0]),
    )
    stream.finish()
    assert file.getvalue() == f"{made.text}\n"


# ---------------------------------------------------------------------------- adaptive length


def test_adaptive_length_grows_by_two_and_shrinks_by_one() -> None:
    policy = AdaptiveLength(first=5, longest=9)

    def after(offered: int, accepted: int) -> int:
        return policy.length(RowStats(steps=1, last_offered=offered, last_accepted=accepted))

    assert policy.length(RowStats()) == 5
    assert after(5, 5) == 7
    assert after(5, 4) == 4
    assert after(1, 0) == 1
    assert after(8, 8) == policy.max_length == 9
    assert after(0, 0) == 5  # there was nothing to draft: that says nothing about acceptance


def test_json_says_that_a_fixed_width_is_exact(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "generate",
        "a b",
        "--target",
        str(models / "target"),
        "--max-new-tokens",
        "3",
        "--json",
    ]
    for dtype in ("float16", "float32"):
        with pytest.raises(SystemExit) as end:
            cli.main([*words, "--no-compile", "--fixed-width", "4", "--dtype", dtype])
        assert end.value.code == 0
        payload = json.loads(capsys.readouterr().out)
        assert payload["exact"] and payload["engine"] == "transformers, fixed width 4"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fixed-width", "0"], "must be 1 to 4096 tokens, got 0"),
        (["--fixed-width", "4097"], "must be 1 to 4096 tokens, got 4097"),
        (["--fixed-width", "8", "--attn-implementation", "eager"], "leave out --attn-impl"),
    ],
)
def test_a_fixed_width_that_cannot_be_is_refused(
    models: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", "a b", "--target", str(models / "target"), *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
