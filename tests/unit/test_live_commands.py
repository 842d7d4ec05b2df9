"""`draftsmith live` from the command line: a stream is made, replayed, translated and scored."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.command_cases import ran
from tests.live_cases import WORDS
from tests.tiny_models import save_pair

from draftsmith.commands.live.replay import subtitles
from draftsmith.data.jsonl import read_records
from draftsmith.live.records import Hypothesis, UpdateRecord
from draftsmith.live.translator import LiveEngine

SETTINGS = ["--compare", "ar,ssbd", "--bias", "0,0.5", "--mask-k", "0,2", "--dtype", "float64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("live")
    save_pair(made)
    config = made / "target" / "generation_config.json"
    values = json.loads(config.read_text())
    values["eos_token_id"] = list(range(0, 300, 5))  # so that its texts end
    config.write_text(json.dumps(values))
    texts = [" ".join(WORDS[start : start + 7]) for start in range(6)]
    (made / "source.txt").write_text("\n".join(texts) + "\n")
    (made / "reference.txt").write_text("\n".join(text.upper() for text in texts) + "\n")
    return made


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return ran(capsys, "live", *words, code=code)


@pytest.fixture
def stream(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = folder / "stream.jsonl"
    own = ["--references", str(folder / "reference.txt"), "--lag", "2", "--out", str(out)]
    made = run(capsys, "make-stream", str(folder / "source.txt"), "--json", *own)
    assert (made["segments"], made["updates"]) == (6, 24)
    return out


def test_a_stream_has_growing_prefixes_and_references(stream: Path) -> None:
    heard = list(read_records(stream, Hypothesis))
    first = [one for one in heard if one.seg == 0]
    assert [len(one.text.split()) for one in first] == [2, 4, 6, 7]
    assert [one.final for one in first] == [False, False, False, True]
    assert first[-1].reference == first[-1].text.upper()


def test_a_replay_compares_settings_and_keeps_everything(
    folder: Path, tmp_path: Path, stream: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sacrebleu")
    own = ["--target", str(folder / "target"), "--out", str(tmp_path), "--json"]
    rows = run(capsys, "replay", str(stream), *own, *SETTINGS)["rows"]
    assert [(row["method"], row["bias"], row["mask_k"]) for row in rows] == [
        ("ar", None, 0), ("ar", None, 2), ("ssbd", 0.0, 0), ("ssbd", 0.0, 2),
        ("ssbd", 0.5, 0), ("ssbd", 0.5, 2),
    ]  # fmt: skip
    plain, plain_hidden, exact, exact_hidden, full, _ = rows
    assert exact["identical_to_ar"] and not full["identical_to_ar"]
    assert (exact["ne"], exact["chrf"]) == (plain["ne"], plain["chrf"])
    assert exact_hidden["ne"] == plain_hidden["ne"] < plain["ne"]
    assert (exact["ad"], exact["ao"]) == (exact_hidden["ad"], exact_hidden["ao"])
    assert full["ad"] == 1.0 and full["ne"] == 0.0 and plain["ad"] is None
    assert plain["speedup"] == 1.0 and full["speedup"] > 0 and plain["bleu"] is not None
    for row in rows:
        for name in ("ne", "chrf", "bleu", "speedup"):
            assert row[f"{name}_low"] <= row[f"{name}_high"]
        assert row["ne_low"] <= row["ne"] <= row["ne_high"]
    assert plain["ne_words"] > 0 and plain["ne_tokens"] > 0
    # a word that grows is rewritten
    assert full["ne_tokens"] == 0.0 < full["ne_words"] < plain["ne_words"]
    assert (plain["speedup_low"], plain["speedup_high"]) == (1.0, 1.0)  # against itself
    written = csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text()))
    assert [float(one["ne"]) for one in written] == [row["ne"] for row in rows]
    tables = (tmp_path / "tables.md").read_text()
    assert tables.count("## ") == 3 and "SSBD, bias 0.5" in tables
    assert "NE counts: erasure:" in tables
    for name in ("flicker_quality.png", "speedup_bias.svg", "run.json"):
        assert (tmp_path / name).stat().st_size > 0
    own_folder = tmp_path / "ssbd-bias0.5-display2"
    texts = ["--texts", str(tmp_path / "texts"), "--stream", str(stream), "--json"]
    found = run(capsys, "score", str(own_folder / "records.jsonl"), *texts)
    assert found["quality"]["chrf"]["value"] == full["chrf"]
    assert len((tmp_path / "texts" / "translation.txt").read_text().splitlines()) == 6
    records = list(read_records(own_folder / "records.jsonl", UpdateRecord))
    assert len(records) == 24 and all(one.full.startswith(one.shown) for one in records)
    log = [json.loads(line) for line in (own_folder / "instances.log").read_text().splitlines()]
    assert [one["prediction"] for one in log] == [one.full for one in records if one.final]
    assert (own_folder / "subtitles.vtt").read_text().startswith("WEBVTT\n")


def test_without_references_there_is_no_quality_and_a_trimmed_draft_is_shorter(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = tmp_path / "stream.jsonl"
    run(capsys, "make-stream", str(folder / "source.txt"), "--json", "--out", str(stream))
    own = ["--target", str(folder / "target"), "--out", str(tmp_path / "out"), "--json"]
    words = ["--mask", "draft", "--mask-k", "0,2", "--compare", "ssbd", "--bias", "0.1"]
    whole, trimmed = run(capsys, "replay", str(stream), *own, *words)["rows"]
    assert whole["chrf"] is None and whole["speedup"] is None and whole["identical_to_ar"] is None
    drafted = [
        sum(one.drafted for one in read_records(path, UpdateRecord))
        for path in (
            tmp_path / "out" / name / "records.jsonl"
            for name in ("ssbd-bias0.1", "ssbd-bias0.1-draft2")
        )
    ]
    assert drafted[1] < drafted[0] and trimmed["mask"] == "draft"


def test_a_replay_leaves_no_records_of_an_earlier_one(
    folder: Path, tmp_path: Path, stream: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables are of the last one; other files of the folder stay."""
    own = ["--target", str(folder / "target"), "--out", str(tmp_path / "out"), "--json"]
    own += ["--compare", "ssbd", "--limit", "1"]
    run(capsys, "replay", str(stream), *own, "--bias", "0.1,0.2")
    for mine in ("ssbd-bias0.1/notes.txt", "records.jsonl"):
        (tmp_path / "out" / mine).write_text("mine")
    run(capsys, "replay", str(stream), *own, "--bias", "0.3")
    left = sorted(path.relative_to(tmp_path / "out") for path in tmp_path.glob("out/*/*"))
    kept = ["instances.log", "records.jsonl", "subtitles.srt", "subtitles.vtt"]
    assert list(map(str, left)) == [
        "ssbd-bias0.1/notes.txt",
        *(f"ssbd-bias0.3/{name}" for name in kept),
    ]
    assert (tmp_path / "out" / "records.jsonl").read_text() == "mine"


def test_where_words_changed_the_draft_can_be_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = tmp_path / "stream.jsonl"
    source = str(folder / "source.txt")
    run(capsys, "make-stream", source, "--rewrites", "1", "--json", "--out", str(stream))
    drafted = []
    for number, words in enumerate(([], ["--min-common", "1"])):
        own = ["--target", str(folder / "target"), "--out", str(tmp_path / str(number)), "--json"]
        run(capsys, "replay", str(stream), *own, "--compare", "ssbd", *words)
        (path,) = (tmp_path / str(number)).glob("*/records.jsonl")
        drafted.append(sum(one.drafted for one in read_records(path, UpdateRecord)))
    assert 0 < drafted[1] < drafted[0]


def test_translate_follows_stdin_and_score_reads_what_it_kept(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = "the cat\nthe cat sat\nthe cat sat\n\nthe dog\nthe dog saw the log\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    kept = tmp_path / "kept.jsonl"
    own = ["--target", str(folder / "target"), "--dtype", "float64", "--out", str(kept), "--json"]
    said = run(capsys, "translate", *own)
    assert [one["source"] for one in said["segments"]] == ["the cat sat", "the dog saw the log"]
    assert said["updates"] == 6  # one of each hypothesis that changed something, and two finals
    found = run(capsys, "score", str(kept), "--json", "--out", str(tmp_path / "instances.log"))
    assert found["steadiness"]["updates"] == 6 and found["quality"] is None
    assert found["steadiness"]["accepted_of_drafted"] == said["accepted_of_drafted"]
    assert len((tmp_path / "instances.log").read_text().splitlines()) == 2
    assert "need references" in run(capsys, "score", str(kept), "--comet", code=2)


@pytest.mark.parametrize(
    "words",
    [
        ["--mask-k", "2", "--unit", "char"],
        ["--mask-k", "1", "--unit", "word", "--no-shrink"],
        ["--agree", "2"],
        ["--mask-k", "4", "--whole-words"],
    ],
)
def test_screens_hide_and_change_no_output(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    def records(*more: str) -> list[dict[str, Any]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nthe cat sat\nthe cat sat on\n\n"))
        kept = tmp_path / "kept.jsonl"
        own = ["--target", str(folder / "target"), "--dtype", "float64", "--out", str(kept)]
        run(capsys, "translate", *own, "--json", *more)
        return [json.loads(line) for line in kept.read_text().splitlines()]

    whole, hidden = records(), records(*words)
    assert [one["full"] for one in whole] == [one["full"] for one in hidden]
    assert [one["drafted"] for one in whole] == [one["drafted"] for one in hidden]
    before = hidden[:-1]
    assert all(one["full"].startswith(one["shown"]) for one in before)
    assert any(one["full"] != one["shown"] for one in before)
    assert hidden[-1]["final"] and hidden[-1]["shown"] == hidden[-1]["full"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["replay", "S", "--bias", "0.2,1.5"], "--bias"),
        (["replay", "S", "--bias", "nan"], "--bias"),
        (["replay", "S", "--mask-k", "-1"], "--mask-k"),
        (["replay", "S", "--compare", "ar,fast"], "--compare"),
        (["replay", "S", "--compare", "ar", "--bias", "0.3"], "--bias"),
        (["replay", "S", "--compare", "ar", "--resync", "4"], "--resync"),
        (["replay", "S", "--template", "Translate!"], "--template"),
        (["replay", "missing.jsonl"], "missing.jsonl"),
        (["replay", "S", "--final-bias", "2"], "--final-bias"),
        (["replay", "S", "--min-common", "nan"], "--min-common"),
        (["translate", "--bias", "-0.1"], "--bias"),
        (["translate", "--agree", "1"], "--agree"),
        (["translate", "--agree", "2", "--mask-k", "3"], "--agree"),
        (["translate", "--unit", "word"], "--unit"),
        (["make-stream", "S", "--lag", "0"], "--lag"),
        (["make-stream", "S", "--rewrites", "1.5"], "--rewrites must lie between 0 and 1"),
        (["make-stream", "S", "--rewrites", "nan"], "--rewrites must lie between 0 and 1"),
        (["make-stream", "S", "--seed", "-1"], "--seed"),
        (["make-stream", "S", "--unit", "chars"], "--unit must be one of word, char"),
        (["make-examples", "S", "--prefixes", "1"], "--prefixes must lie in [0, 1)"),
        (["make-examples", "S", "--prefixes", "nan"], "--prefixes must lie in [0, 1)"),
        (["make-examples", "S", "--seed", "-1"], "--seed"),
        (
            ["make-examples", "S", "--source-unit", "words"],
            "--source-unit must be one of word, char",
        ),
        (["score", "missing.jsonl"], "missing.jsonl"),
        (["sing"], "sing"),
        ([], "live translate"),
    ],
)
def test_bad_words_are_refused_by_the_name_of_the_flag(
    folder: Path, stream: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    words = [str(stream) if word == "S" else word for word in words]
    if words and words[0] in ("replay", "translate"):
        words += ["--target", str(folder / "target")]
    assert named in run(capsys, *words, code=2)


def test_streams_that_cannot_be_replayed_are_named_by_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = {"seg": 0, "rev": 0, "text": "the cat"}
    cases = {
        "broken": (["{"], "line 1"),
        "unknown": ([json.dumps(line | {"txt": "x"})], "txt"),
        "negative": ([json.dumps(line | {"seg": -1})], "seg"),
        "again": ([json.dumps(line | {"seg": seg}) for seg in (0, 1, 0)], "segment 0"),
        "behind": ([json.dumps(line | {"rev": rev, "final": True}) for rev in (0, 1)], "segment 0"),
        "twice": ([json.dumps(line), json.dumps(line)], "revision 0"),
        "empty": (["", " "], "empty.jsonl"),
        "long": (
            [json.dumps(line), json.dumps(line | {"rev": 1, "text": "the cat " * 600})],
            "segment 0 revision 1",
        ),
        "nul": (
            [json.dumps(line | {"text": "the \0 cat"})],
            "segment 0 revision 0",
        ),
        "never": (['{"seg": 0, "rev": 0, "text": "a", "time": NaN}'], "line 1"),
        "before": ([json.dumps(line | {"time": -3})], "line 1"),
    }
    for name, (lines, place) in cases.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines))
        own = ["--target", str(folder / "target"), "--out", str(tmp_path / "out")]
        with monkeypatch.context() as patch:
            patch.setattr(LiveEngine, "steps", None)  # nothing is decoded before all can be
            assert place in run(capsys, "replay", str(path), *own, code=2), name


def test_a_file_in_place_of_the_folder_is_refused(
    folder: Path, tmp_path: Path, stream: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is loaded, by the name of the flag; the file stays."""
    out = tmp_path / "report.txt"
    out.write_text("kept")
    words = ["--target", str(tmp_path / "nowhere"), "--out", str(out)]
    assert "--out" in run(capsys, "replay", str(stream), *words, code=2)
    assert out.read_text() == "kept"


def test_examples_are_pairs_and_beginnings_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("tatoeba\tthe cat sat here\tdie Katze sass hier\nit went\tes ging\n")
    out = tmp_path / "examples.jsonl"
    made = run(capsys, "make-examples", str(pairs), "--json", "--out", str(out))
    assert (made["pairs"], made["examples"]) == (2, 4)
    first, beginning, *_ = (json.loads(line) for line in out.read_text().splitlines())
    assert first["prompt"] == "Translate to German: the cat sat here\n"
    assert first["completion"] == "die Katze sass hier"
    assert "the cat sat here".startswith(beginning["prompt"].split(": ")[1].strip())
    assert first["completion"].startswith(beginning["completion"])
    words = ["--json", "--form", "prompts", "--prefixes", "0", "--out", str(out)]
    run(capsys, "make-examples", str(pairs), *words)
    assert [sorted(json.loads(line)) for line in out.read_text().splitlines()] == [
        ["id", "prompt", "reference"]
    ] * 2
    pairs.write_text("one column\n")
    assert "line 1" in run(capsys, "make-examples", str(pairs), "--out", str(out), code=2)


def test_lines_of_other_systems_are_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(verb: str, content: bytes, *more: str, code: int = 0) -> str:
        source, out = tmp_path / "source", tmp_path / "out.jsonl"
        out.write_text("")
        source.write_bytes(content)
        said = run(capsys, verb, str(source), "--json", "--out", str(out), *more, code=code)
        return out.read_text() if code == 0 else said

    marked, plain = b"\xef\xbb\xbf%s\r\n%s\r\n\r\n", b"%s\n%s\n"
    for verb, lines in (
        ("make-stream", (b"the cat", b"a dog")),
        ("make-examples", (b"a\tb", b"c\td")),
    ):
        assert written(verb, marked % lines) == written(verb, plain % lines)
        assert "source, line 1 holds a NUL" in written(verb, b"a\0\tb\0\n", code=2)
        assert "source holds no line of text" in written(verb, b"\n\n", code=2)
    (tmp_path / "references").write_bytes(marked % (b"die Katze", b"ein Hund"))
    heard = written(
        "make-stream", plain % (b"a", b"b"), "--references", str(tmp_path / "references")
    )
    references = [json.loads(line)["reference"] for line in heard.splitlines()]
    assert references == ["die Katze", "ein Hund"]


def test_subtitles() -> None:
    lines = [(0.0, 1.25, "Hallo\nWelt"), (3661.5, 3662.0, "a --> b")]
    assert subtitles(lines, kind="srt") == (
        "1\n00:00:00,000 --> 00:00:01,250\nHallo Welt\n\n2\n01:01:01,500 --> 01:01:02,000\na -> b\n"
    )
    assert "a &lt; b &amp; c" in subtitles([(0.0, 1.0, "a < b & c")], kind="vtt")
    assert subtitles(lines, kind="vtt").startswith("WEBVTT\n\n1\n00:00:00.000 --> 00:00:01.250\n")
