"""Bad input to `generate`, `bench` and `quickstart`: one sentence, the right exit code, nothing
half-written; and an interruption that leaves what was measured."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.forks import Forks
from tests.measurements import a_record
from tests.tiny_models import save_pair

from draftsmith import cli
from draftsmith.commands import quickstart_demo as quickstart
from draftsmith.commands import quickstart_real
from draftsmith.errors import InputError
from draftsmith.provenance import BEGUN, append_jsonl


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder, context=128)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: (exit code, stdout, stderr)."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        code = end.value.code
        assert isinstance(code, int)
        return code, out, err

    return run


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def brief_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs is measured fewer times; nothing here looks at the figures."""
    monkeypatch.setattr("draftsmith.bench.run.COST_WINDOW", 2)
    monkeypatch.setattr("draftsmith.bench.run._COST_ROUNDS", 2)


def refused(found: tuple[int, str, str], code: int, *parts: str) -> None:
    """One line on stderr that begins with the program's name, and nothing on stdout."""
    got, out, err = found
    assert got == code, err
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("draftsmith: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in last


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (["--target", "{tmp}/nowhere", "--prompt", "x"], 3, ["nowhere", "does not exist"]),
        (["--target", "{tmp}", "--prompt", "x"], 3, ["has no config.json"]),
        (["--prompt", ""], 2, ["--prompt must not be empty"]),
        (["--prompt", " \n "], 2, ["prompt 1 is empty"]),
        (["--prompt", "zq " * 100], 2, ["prompt 1 has", "context of 128"]),
        (["--prompt", "x", "--drafter", "prompt_lokup"], 2, ["did you mean 'prompt_lookup'"]),
        (["--prompt", "x", "--drafter", "independent"], 2, ["needs a model"]),
        (["--prompt", "x", "--drafter", "independent:{tmp}/no"], 3, ["does not exist"]),
        (["--prompt", "x", "--drafter", "prompt_lookup:x"], 2, ["nothing behind a colon"]),
        (
            ["--prompt", "x", "--drafter", "prompt_lookup", "--drafter-option", "lenght=3"],
            2,
            ["did you mean 'length'"],
        ),
        (["--prompt", "x", "--draft-proposal", "greedy"], 2, ["--draft-proposal"]),
        (
            ["--prompt", "x", "--draft-tree", "4x3:8", "--draft-proposal", "sampled"],
            2,
            ["--draft-tree 4x3:8 grows", "--draft-proposal sampled does nothing: leave it out"],
        ),
        (
            ["--prompt", "x", "--drafter", "prompt_lookup", "--draft-length", "128"],
            2,
            ["does not fit into the context", "128 positions"],
        ),
        (["--prompt", "x", "--temperature", "-0.1"], 2, ["--temperature"]),
        (["--prompt", "x", "--temperature", "nan"], 2, ["--temperature"]),
        (["--prompt", "x", "--top-p", "0"], 2, ["--top-p"]),
        (["--prompt", "x", "--top-p", "1.1"], 2, ["--top-p"]),
        (["--prompt", "x", "--device", "tpu9"], 2, ["tpu9"]),
        (["--prompt", "x", "--stream", "--batch-size", "2"], 2, ["--stream"]),
        (["--prompt", "x", "--logit-bias", "100000:1", "--temperature", "1"], 2, ["100000"]),
        (["--prompts", "{tmp}/none.jsonl"], 2, ["none.jsonl does not exist"]),
        (["--prompts", "{tmp}/bad.jsonl"], 2, ["bad.jsonl, line 2: not JSON"]),
        (["--prompts", "{tmp}/empty.jsonl"], 2, ["no prompts"]),
        (["--prompts", "{tmp}/cut.jsonl.gz"], 2, ["cut.jsonl.gz"]),
        (["--json", "--prompt", "zq " * 100], 2, ["prompt 1 has", "context of 128"]),
        (["--json", "--prompts", "{tmp}/bad.jsonl"], 2, ["bad.jsonl, line 2: not JSON"]),
    ],
)
def test_generate_refuses_in_one_sentence(
    words: list[str],
    code: int,
    parts: list[str],
    models: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": "bro\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00half")
    words = [word.format(tmp=tmp_path) for word in words]
    if "--target" not in words:
        words = ["--target", str(models / "target"), *words]
    refused(command("generate", *words), code, *parts)


def test_logits_that_are_nan_end_with_code_3(
    models: Path, tmp_path: Path, command: Command
) -> None:
    broken = copy_of(models / "target", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    refused(command("generate", "--target", broken, "--prompt", "x"), 3, "NaN")


def test_a_tokenizer_of_another_model_is_named(
    models: Path, tmp_path: Path, command: Command
) -> None:
    odd = copy_of(models / "target", tmp_path / "odd")
    text = json.loads((odd / "tokenizer.json").read_text())
    text["added_tokens"].append({**text["added_tokens"][0], "id": 900, "content": "zzz"})
    text["model"]["vocab"]["zzz"] = 900
    (odd / "tokenizer.json").write_text(json.dumps(text))
    found = command("generate", "--target", odd, "--prompt", "a zzz b")
    refused(found, 2, "outside the target's vocabulary", "do not belong together")


def test_damaged_weights_end_with_code_3(models: Path, tmp_path: Path, command: Command) -> None:
    cut = copy_of(models / "target", tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(command("generate", "--target", cut, "--prompt", "x"), 3, "Cannot load the model")


def copy_of(source: Path, goal: Path) -> Path:
    goal.mkdir()
    for path in source.iterdir():
        (goal / path.name).write_bytes(path.read_bytes())
    return goal


# ---------------------------------------------------------------------------- bench


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    lines = [
        {"id": "one", "text": "the cat sat on the mat, the cat", "tag": "cats"},
        {"id": "two", "text": "def add(left, right):", "tag": "code"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench_words(models: Path, suite: Path, out: Path) -> list[str | Path]:
    words: list[str | Path] = ["bench", "--target", models / "target", "--suite", suite]
    words += ["--drafter", f"none,prompt_lookup,independent:{models / 'draft'}", "--out", out]
    return [*words, "--max-new-tokens", "12", "--repeats", "2", "--temperature", "0,0.8"]


def test_bench_writes_everything_and_prints_one_object(
    models: Path, suite: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    code, printed, err = command(*bench_words(models, suite, out), "--json")
    assert code == 0, err
    files = {path.name for path in out.iterdir()}
    assert files == {"records.jsonl", "summary.json", "report.html", "run.json", "figures"}
    found = json.loads(printed)
    assert found == json.loads((out / "summary.json").read_text())
    names = [(entry["name"].split(":")[0], entry["temperature"]) for entry in found["drafters"]]
    assert names == [(n, t) for n in ("none", "prompt_lookup", "independent") for t in (0.0, 0.8)]
    assert len((out / "records.jsonl").read_text().splitlines()) == 2 * 4 * 2 * 2
    expected = [entry["expected"] for entry in found["drafters"]]
    assert expected[:4] == [None] * 4  # of draft models alone
    assert all(0 < one["alpha"] < 1 < one["tau_predicted"] for one in expected[4:])
    assert "Expected acceptance of draft models" in (out / "report.html").read_text()
    for path in out.glob("*.*"):  # no folder outside the current one is named anywhere
        assert str(tmp_path) not in path.read_text()
        assert str(models) not in path.read_text()
    assert str(out) in err
    run = json.loads((out / "run.json").read_text())
    assert run["verb"] == "bench"
    assert run["results"] == {"records": 32, "step_seconds": {}}


@pytest.mark.full
def test_what_was_measured_stays_where_the_expectation_behind_it_fails(
    models: Path, suite: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room for more texts")

    monkeypatch.setattr("draftsmith.bench.expected.expectations", fails)
    out = tmp_path / "out"
    code, printed, err = command(
        *bench_words(models, suite, out), "--repeats", "1", "--no-hf-baseline"
    )
    assert code == 3 and "no room for more texts" in err
    assert "prompt_lookup" in printed  # the table
    assert {"summary.json", "report.html", "run.json"} < {path.name for path in out.iterdir()}
    assert json.loads((out / "run.json").read_text())["results"]["records"] == 12


def test_bench_leaves_an_earlier_measurement_alone(
    models: Path, suite: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "records.jsonl").write_text("earlier\n")
    found = command(*bench_words(models, suite, out))
    refused(found, 2, f"--out {out}", "records.jsonl")
    assert (out / "records.jsonl").read_text() == "earlier\n"


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (["records.jsonl"], "records.jsonl"),
        (["observations.csv"], "observations.csv"),
        (["counts.csv"], "counts.csv"),
        (["run.json"], "`draftsmith distill`"),
        (["records.jsonl", BEGUN], "`draftsmith quickstart`"),
    ],
)
def test_bench_leaves_what_it_did_not_write_alone(
    files: list[str], part: str, models: Path, suite: Path, tmp_path: Path, command: Command
) -> None:
    """A quickstart's records look like its own, and observations.csv may be written by hand."""
    text = {"run.json": '{"verb": "distill"}', BEGUN: '{"verb": "quickstart"}'}
    (tmp_path / "out").mkdir()
    append_jsonl(tmp_path / "line", a_record())
    for name in files:
        line = (tmp_path / "line").read_text()
        (tmp_path / "out" / name).write_text(text.get(name, line))
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    found = command(*bench_words(models, suite, tmp_path / "out"))
    refused(found, 2, f"--out {tmp_path / 'out'}", part)
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--suite", "nosuch"], 2, "there is no prompt file"),
        (["--drafter", "none,lookahed"], 2, "did you mean 'lookahead'"),
        (["--drafter", "transformers"], 2, "it is measured anyway"),
        (["--target", "./nowhere"], 3, "does not exist"),
        (["--temperature", "0,-1"], 2, "--temperature"),
    ],
)
def test_bench_refuses_before_it_writes(
    words: list[str],
    code: int,
    part: str,
    models: Path,
    suite: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    out = tmp_path / "out"
    refused(command(*bench_words(models, suite, out), *words), code, part)
    assert not out.exists()


@pytest.mark.full
def test_bench_asks_later_turns_behind_plain_answers(
    models: Path, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": ["the cat", "the dog"]}) + "\n")
    words = bench_words(models, path, tmp_path / "out")
    code, _, err = command(*words, "--temperature", "0", "--repeats", "1", "--no-hf-baseline")
    assert code == 0, err
    lines = (tmp_path / "out/records.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [(r["prompt"], r["turn"]) for r in records if r["drafter"] == "none"] == [
        ("1", 0),
        ("1", 1),
    ]
    tails = [r["prompt_tail"] for r in records if r["turn"] == 1]
    assert len(set(tails)) == 1
    assert tails[0].startswith("the cat\n\n")
    assert tails[0].endswith("\n\nthe dog")


@pytest.mark.parametrize(
    "words",
    [
        "tune --target nowhere --drafter prompt_lookup --suite nowhere",
        "live replay nowhere --target nowhere",
        "collect --target nowhere --prompts nowhere",
        "plan law --observations nowhere",
        "plan table 5",
        "plan ladder --target-params 7B --target-tokens 2T --tokens 20B",
    ],
)
def test_what_another_verb_made_is_not_overwritten(
    words: str, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "run.json").write_text('{"verb": "bench"}')
    refused(
        command(*words.split(), "--out", tmp_path), 2, f"--out {tmp_path}", "`draftsmith bench`"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def killed_bench(forks: Forks, words: list[str | Path], out: Path) -> bytes:
    """The records that a bench had written when it was killed."""
    with forks.command(*words, "--repeats", "100000") as process:
        give_up = time.monotonic() + 300
        while not (out / "records.jsonl").exists() and process.poll() is None:
            assert time.monotonic() < give_up, "no record was written"
            time.sleep(0.01)
        assert process.kill() == -signal.SIGKILL, process.errors()
    return (out / "records.jsonl").read_bytes()


@pytest.mark.full
def test_a_bench_that_was_killed_is_unfinished_and_replaced(
    models: Path, suite: Path, tmp_path: Path, command: Command, forks: Forks
) -> None:
    out = tmp_path / "out"
    words = [*bench_words(models, suite, out), "--temperature", "0", "--no-hf-baseline"]
    first = killed_bench(forks, words, out)
    assert first
    (out / "records.jsonl").write_bytes(first + first[: len(first) // 2])  # and in mid-line
    code, _, err = command(*words, "--target", tmp_path)
    assert code == 3 and "unfinished" in err
    assert (out / "records.jsonl").exists(), "nothing has come to take its place"
    (out / "summary.json").write_text('{"run": "of another"}')
    code, _, err = command(*words)
    assert code == 0 and "unfinished" in err and str(out) in err
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 3 * 2
    about = [json.loads((out / name).read_text()) for name in ("run.json", "summary.json")]
    assert {line["run"] for line in lines} == {about[0]["id"]} == {about[1]["run"]}
    finished = {path: path.read_bytes() for path in out.rglob("*.*")}
    refused(command(*words), 2, f"--out {out}", "bench")
    assert finished == {path: path.read_bytes() for path in out.rglob("*.*")}


def test_an_interruption_keeps_whole_records_and_ends_with_130(
    models: Path, suite: Path, tmp_path: Path, forks: Forks
) -> None:
    out = tmp_path / "out"
    words = [*bench_words(models, suite, out), "--repeats", "100000"]
    with forks.command(*words) as process:
        give_up = time.monotonic() + 300
        while not (out / "records.jsonl").exists() and process.poll() is None:
            assert time.monotonic() < give_up, "no record was written"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "measurements; they are in" in err
    assert "Traceback" not in err
    lines = (out / "records.jsonl").read_text().splitlines()
    assert lines
    assert len(lines) % 4 == 0  # whole rounds
    assert all(json.loads(line)["prompt"] in ("one", "two") for line in lines)
    assert not (out / "run.json").exists()
    assert not list(out.glob(".*.tmp"))


# ---------------------------------------------------------------------------- quickstart


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_pair(folder, context=2048)
    return folder


@pytest.mark.full
def test_quickstart_runs_from_prompts_to_next_steps(
    small: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in vars(quickstart):
        if name.endswith("_SECONDS"):
            monkeypatch.setattr(quickstart, name, 0.1)
    out = tmp_path / "out"
    words = ["quickstart", "--models", small, "--out", out, "--limit", "2"]
    words += ["--max-new-tokens", "8"]
    code, printed, err = command(*words)
    assert code == 0, err
    files = {path.name for path in out.iterdir()}
    measured = {"records.jsonl", "summary.json", "report.html", "run.json", "figures"}
    assert files == measured | {"distilled"}
    files = {path.name for path in (out / "distilled").iterdir()}
    assert files == {"prompts.jsonl", "store", "draft", "records.jsonl"}
    last = printed.strip().splitlines()
    assert last[-1].strip().startswith("draftsmith bench --target Qwen/")
    for part in ("prompt_lookup: ", "lookahead: ", "independent:draft: ", "At temperature 0"):
        assert any(line.startswith(part) for line in last)
    found = json.loads((out / "summary.json").read_text())
    names = [entry["name"].split(":")[0] for entry in found["drafters"]][::2]
    assert names == ["none", "prompt_lookup", "lookahead", "independent"]
    told = found["distillation"]
    assert told["sentence"] in printed
    assert told["sentence"] in (out / "report.html").read_text()
    assert [entry["temperature"] for entry in told["temperatures"]] == [0.0, 0.8]
    for entry in told["temperatures"]:
        for side in ("before", "after"):
            assert set(entry[side]) == {
                *("alpha", "tokens_per_step", "decode_tokens_per_step", "loop_share"),
                *("speedup", "speedup_ci95"),
            }
            assert 0 < entry[side]["alpha"] <= 1
    assert told["temperatures"][0]["identical_to_autoregressive"] is True
    assert told["tokens_collected"] > 0
    assert told["steps"] > 0
    model = "model.safetensors"
    shipped, learnt = (small / "draft" / model, out / "distilled/draft" / model)
    assert shipped.read_bytes() != learnt.read_bytes()
    # a second run takes the place of the first, and another verb's results are safe
    code, printed, err = command(*words, "--limit", "1", "--temperature", "0", "--json")
    assert code == 0, err
    assert json.loads(printed) == json.loads((out / "summary.json").read_text())
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert records and {record["temperature"] for record in records} == {0.0}
    assert len({record["prompt"] for record in records}) == 1
    run = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**run, "verb": "bench"}))
    refused(command(*words), 2, f"--out {out}", "`draftsmith bench`")


PARTS = {"show": None, "compare": None, "collect": {}, "distil": {}, "measure_gain": ({}, None)}
"""The parts of a quickstart, and something that each could return."""


@pytest.mark.parametrize("part", [*PARTS, "finish"])
def test_an_interrupted_quickstart_leaves_no_report(
    part: str, small: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "distilled").mkdir(parents=True)
    old = ["run.json", "records.jsonl", "report.html", "summary.json", "distilled/prompts.jsonl"]
    for name in old:
        (out / name).write_text('{"verb": "quickstart"}\n')
    (out / "mine.txt").write_text("a file of the user's")
    (out / "run.json").rename(out / BEGUN)  # it did not come to its end

    def interrupted(*arguments: object) -> Any:
        raise KeyboardInterrupt

    for name, result in PARTS.items():
        monkeypatch.setattr(quickstart.SmallModels, name, lambda *_, result=result: result)
    monkeypatch.setattr(quickstart.SmallModels, part, interrupted)
    words = ["quickstart", "--models", small, "--out", out, "--limit", "1"]
    assert command(*words)[0] == 130
    assert sorted(path.name for path in out.iterdir()) == [BEGUN, "mine.txt"]
    (out / "smollm2").mkdir()  # what an earlier version had made of the real model
    assert command(*words)[0] == 130, "the next one takes its place"
    assert not (out / "smollm2").exists()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("distilled/model.safetensors", "'distilled'"),
        ("figures/one.svg", "'figures'"),
        ("records.jsonl", "'records.jsonl'"),
        ("run.json", "`draftsmith tune`"),
        (BEGUN, "`draftsmith tune`"),
    ],
)
def test_quickstart_leaves_a_folder_alone_that_it_did_not_make(
    name: str, part: str, small: Path, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"verb": "tune"}\n')
    words = ["quickstart", "--models", small, "--out", tmp_path / "out"]
    refused(command(*words), 2, f"--out {tmp_path / 'out'}", part)
    assert path.exists()


@pytest.mark.parametrize("broken", ["target", "draft", "prompts"])
def test_quickstart_keeps_old_results_until_everything_is_loaded(
    small: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    shutil.copytree(small, tmp_path / "small")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("run.json", "records.jsonl"):
        (out / name).write_text('{"verb": "quickstart"}\n')
    words = ["quickstart", "--models", tmp_path / "small", "--out", out]
    if broken == "prompts":

        def none(count: int) -> Any:
            raise InputError("This Python comes without its sources.")

        monkeypatch.setattr(quickstart, "held_out_prompts", none)
    else:
        (tmp_path / "small" / broken / "model.safetensors").write_bytes(b"damaged")
    assert command(*words)[0] in (2, 3)
    assert sorted(path.name for path in out.iterdir()) == ["records.jsonl", "run.json"]


def test_quickstart_without_models_says_where_they_should_be(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a quickstart of this repository may be writing its own folder
    refused(command("quickstart", "--models", tmp_path), 3, "no folders target and draft")
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(quickstart_real, "gguf_file", lambda name: None)
    refused(command("quickstart"), 3, "models/mini-code", "--models")
