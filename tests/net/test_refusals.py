"""What each verb refuses: the exit code, and the flag or thing that the sentence names.

The parts that guard the output law (lossy rules, biases, drafters, stores and runs of something
else) and the user's machine and files (code of a model, pickles, folders that hold results) are
complete as far as a command line can reach them. What a Python caller alone can ask for, such as a
lossy rule without `allow_lossy`, is in `tests/contract`.

`refusals.txt`: exit code | what the sentence must say, a pattern | the command. Capitals stand for
the words below; NEW for a folder that is not there, and is not there afterwards.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tests.net.other_models import add_others
from tests.net.running import Ended, run
from tests.net.write_artefacts import FLOAT32, MIDWAY

WORDS = {
    "GEN": "generate --target target --prompt cat --max-new-tokens 3",
    "DISTIL": "distill --target target --block-length 32 --batch-tokens 64 --out NEW",
    "COLLECT": "collect --prompts prompts.jsonl --max-new-tokens 8 --shard-size 6 --samples 2 "
    "--temperatures 0,1 --out stores/samples",
    "SMALL": "--size tiny --layers 1 --heads 2 --hidden 16 --intermediate 24",
    "MIDWAY": f"{MIDWAY} {FLOAT32}",
    "PREMIDWAY": f"{MIDWAY} {FLOAT32}".replace("--hold-out 0.2 ", ""),
}

LINES = Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def place(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old files, and beside them what is not as it should be."""
    folder = tmp_path_factory.mktemp("place") / "work"
    shutil.copytree(old, folder)
    add_others(folder)
    return folder


def words_of(line: str, new: Path) -> list[str]:
    for name, words in WORDS.items():
        line = re.sub(rf"\b{name}\b", words, line)
    return [str(new) if word == "NEW" else word for word in line.split()]


CASES = [
    tuple(part.strip() for part in line.split(" | "))
    for line in LINES.splitlines()
    if line.strip() and not line.startswith("#")
]


def refused(ended: Ended, code: int) -> str:
    """One sentence on stderr, and nothing on stdout."""
    assert ended.code == code, f"{' '.join(ended.words)}\n{ended.out}\n{ended.err}"
    assert "Traceback" not in ended.err
    assert ended.err.strip(), "nothing was said"
    return ended.err.strip()[ended.err.strip().rindex("draftsmith: ") :]


@pytest.mark.parametrize(("code", "said", "line"), CASES, ids=[case[2] for case in CASES])
def test_it_is_refused(code: str, said: str, line: str, place: Path, tmp_path: Path) -> None:
    ended = run(words_of(line, tmp_path / "new"), folder=place)
    sentence = refused(ended, int(code))
    assert re.search(said, sentence), sentence
    assert "unexpected" not in sentence
    # a store is opened before its target is tried: that leaves its manifest, and no text
    left = {path.name for path in tmp_path.glob("new/**/*")} | {
        path.name for path in tmp_path.iterdir()
    }
    assert not left or (line.startswith("collect") and left == {"new", "manifest.json"})
    assert not list(place.rglob("it-was-run")), "code that came with a model was run"


def test_code_that_comes_with_a_model_is_run_with_leave(place: Path, tmp_path: Path) -> None:
    """So the case above would notice it."""
    shutil.copytree(place / "code", tmp_path / "code")
    (tmp_path / "code/own.py").write_text(
        (place / "code/own.py").read_text().replace(str(place), str(tmp_path))
    )
    run("generate --target code --prompt x", folder=tmp_path)
    assert not (tmp_path / "code/it-was-run").exists()
    run("generate --target code --prompt x --trust-remote-code", folder=tmp_path)
    assert (tmp_path / "code/it-was-run").exists()


def test_a_damaged_shard_is_left_out_only_where_that_is_said(place: Path, tmp_path: Path) -> None:
    words = "distill --target target --drafter draft --store cut-store --duration 1steps"
    own = f"--block-length 32 --batch-tokens 64 --on-bad-shard skip --out {tmp_path / 'out'}"
    assert run(f"{words} {own}", folder=place).code == 0


def test_a_store_that_would_be_too_large_stays_small(place: Path, tmp_path: Path) -> None:
    words = "collect --target target --prompts prompts.jsonl --max-new-tokens 4 --shard-size 6"
    ended = run(f"{words} --max-bytes 1KB --out {tmp_path / 'store'}", folder=place)
    refused(ended, 2)
    assert not list((tmp_path / "store").glob("*.parquet"))


# --------------------------------------------------------------------------- what is lossy, is said


def test_a_lossy_rule_is_named_wherever_it_was_used(place: Path, tmp_path: Path) -> None:
    lossy = "--drafter draft --acceptance typical"
    words = f"generate --target target --prompt cat --max-new-tokens 3 {lossy}"
    ended = run(f"{words} --json", folder=place)
    assert ended.json["lossy"]
    assert ended.json["lossy"] in ended.err
    exact = run(f"{words} --json --acceptance exact", folder=place)
    assert not exact.json.get("lossy")
    out = tmp_path / "bench"
    fixed = "bench --target target --suite suite.txt --limit 1 --max-new-tokens 4 --repeats 1"
    more = f"--temperature 1 --no-hf-baseline --out {out} --json"
    found = run(f"{fixed} {lossy} {more}", folder=place).json
    assert [entry["lossy_rule"] for entry in found["drafters"]][-1] == "typical"
    assert found["losslessness"]["lossy_rules"] == ["typical"]
    # such a run is not ranked beside exact ones, whether by its records or by its summary
    for file in ("summary.json", "records.jsonl"):
        sentence = refused(run(f"report {out} --out {tmp_path / 'report'}", folder=place), 2)
        assert str(out) in sentence
        (out / file).unlink()


@pytest.mark.parametrize("bias", ["0.5", "1"])
def test_a_bias_that_only_appends_is_warned_of(bias: str, place: Path) -> None:
    warned = run(f"live translate --target speaker --bias {bias}", folder=place, stdin="cat\n")
    quiet = run("live translate --target speaker --bias 0.4", folder=place, stdin="cat\n")
    assert warned.code == quiet.code == 0
    assert "bias" in warned.err and "bias" not in quiet.err
