"""What programs rely on, verb by verb: flags, JSON keys, names and keys of files.

`contracts.json` holds what there was before the package was rebuilt. A name that goes fails here. A
new one has to be added to the file, which `DRAFTSMITH_EXTEND=1 pytest tests/net/test_verbs.py` does
(nothing is ever taken out by that).
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.net.running import Ended, run
from tests.net.write_artefacts import FLOAT32

CONTRACTS = Path(__file__).parent / "contracts.json"
KNOWN: dict[str, Any] = json.loads(CONTRACTS.read_text(encoding="utf-8"))
EXTEND = os.environ.get("DRAFTSMITH_EXTEND", "") not in ("", "0")

VERBS = [
    "quickstart",
    "chat",
    "generate",
    "bench",
    "doctor",
    "pretrain",
    "collect",
    "distill",
    "report",
    "tune",
    *(f"live {verb}" for verb in "translate make-stream make-examples replay score serve".split()),
    *(f"plan {verb}" for verb in "law optimum sweep alpha fit table ladder check".split()),
]
SHORT = f"{FLOAT32} --duration 2steps --block-length 32 --batch-tokens 64 --warmup 1"
SMALL = "--size tiny --layers 1 --heads 2 --hidden 16 --intermediate 24"
SIZES = "--target-params 12853473280 --target-tokens 180B --draft-tokens 1.8e11"
RUNS = {
    "generate": "generate --target target --prompt cat --max-new-tokens 3 --drafter draft",
    "generate with a cascade": "generate --target target --prompt cat --max-new-tokens 3 "
    "--drafter suffix+prompt_lookup",
    "bench": "bench --target target --suite suite.txt --limit 2 --max-new-tokens 6 --repeats 1 "
    "--drafter none,prompt_lookup,draft --temperature 0 --out OUT",
    "bench --perplexity": "bench --target target --suite suite.txt --limit 2 --max-new-tokens 8 "
    "--drafter draft --draft-length 1..2 --temperature 0 --perplexity text.txt --out OUT",
    "doctor": "doctor",
    "pretrain": f"pretrain --text text.txt --eval-text suite.txt {SMALL} {SHORT} --out OUT "
    "--vocab-subset 280 --tokenizer target",
    "collect": "collect --target target --prompts prompts.jsonl --limit 3 --max-new-tokens 4 "
    "--beams 2 --top-k 4 --features last --out OUT",
    "distill": "distill --target target --drafter drafters/pretrained --store stores/samples "
    f"{SHORT} --hold-out 0.2 --out OUT",
    "distill --online": "distill --target target --drafter medusa --online --prompts prompts.jsonl "
    f"{SHORT} --max-new-tokens 8 --prompts-per-step 4 --hold-out 0.2 --out OUT",
    "distill draft_vocab": "distill --target target --drafter eagle3 --store stores/eagle3 "
    f"--drafter-option draft_vocab=120 {SHORT} --hold-out 0.2 --out OUT",
    "distill a subset": "distill --target target --drafter drafters/subset --store stores/samples "
    f"{SHORT} --hold-out 0.2 --out OUT",
    "report": "report benches/speed drafters/independent drafters/tvd-1 drafters/tvd-2 --out OUT",
    "tune": "tune --target target --suite suite.txt --drafter prompt_lookup --limit 1 --longest 1 "
    "--max-new-tokens 4 --batch-sizes 1,2 --dtype float64 --out OUT",
    "live make-stream": "live make-stream source.txt --references reference.txt --lag 3 "
    "--out OUT/stream.jsonl",
    "live make-examples": "live make-examples pairs.tsv --out OUT/examples.jsonl",
    "live make-examples --form prompts": "live make-examples pairs.tsv --form prompts "
    "--out OUT/examples.jsonl",
    "live replay": "live replay live/stream.jsonl --target speaker --limit 1 --compare ar,ssbd "
    "--bias 0.5 --out OUT",
    "live translate": "live translate --target speaker --out OUT/kept.jsonl",
    "live score": "live score live/replay/de/ssbd-bias0/records.jsonl --stream live/stream.jsonl "
    "--out OUT/instances.log",
    "live score FOLDER": "live score live/replay",
    "plan law": "plan law observations.csv --fixed-effects --predict 20,10 --out OUT",
    "plan optimum": f"plan optimum {SIZES} --law plans/law.json --draft-params 1B --out OUT",
    "plan sweep": "plan sweep --grid printed",
    "plan alpha": "plan alpha benches/perplexity --out OUT",
    "plan fit": "plan fit runs.csv --bootstrap 20 --out OUT",
    "plan table": "plan table 4 --out OUT",
    "plan ladder": "plan ladder --target-params 13B --target-tokens 1T --tokens 2B --out OUT",
    "plan check": "plan check plans/ladder/ladder.json --records benches/draft "
    "benches/perplexity --out OUT",
    "quickstart": "quickstart --models . --limit 1 --max-new-tokens 4 --temperature 0 --out OUT",
}
OPAQUE = {"options", "versions", "machine"}
"""Parts of run.json that say how a thing was made; no command reads them by name but its own."""


def paths(value: Any, name: str = "") -> Iterator[str]:
    """`a.b[].c` for every value, however often a list has it."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            whole = f"{name}.{key}" if name else key
            yield from [whole] if key in OPAQUE else paths(inner, whole)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for inner in value:
            yield from paths(inner, f"{name}[]")
    else:
        yield name


def settled(found: list[str]) -> list[str]:
    """Sorted, each once; without `a` where there is `a.b`: it is null or empty in another place."""
    known = sorted(set(found))
    inner = {path[:at] for path in known for at, sign in enumerate(path) if sign in ".["}
    return [path for path in known if path not in inner]


def written(folder: Path) -> dict[str, list[str]]:
    """Every file below the folder, with the keys or columns that it has."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            found[name] = keys_of(path)
    return found


def keys_of(path: Path) -> list[str]:
    theirs = path.name.endswith(("config.json", "tokenizer.json"))  # transformers' own
    if path.suffix == ".json" and not theirs:
        return settled(list(paths(json.loads(path.read_text(encoding="utf-8")))))
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        return settled([name for line in lines for name in paths(json.loads(line))])
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return next(csv.reader(file))
    return []


def keep(part: str, name: str, found: Any, wanted: Any) -> Any:
    """What is wanted; with DRAFTSMITH_EXTEND, after what was found new is put into the file."""
    if not EXTEND:
        assert wanted is not None, f"{part} of {name} are not in {CONTRACTS.name}: extend it"
        return wanted
    known = json.loads(CONTRACTS.read_text(encoding="utf-8"))
    mine = known.setdefault(part, {}).setdefault(name, {} if isinstance(found, dict) else [])
    if isinstance(found, dict):
        for key, value in found.items():
            old = mine.get(key)
            mine[key] = sorted({*old, *value}) if isinstance(old, list) else (old or value)
    else:
        mine += [one for one in found if one not in mine]
    text = json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False)
    CONTRACTS.write_text(text + "\n", encoding="utf-8")
    return mine


def assert_kept(what: str, found: list[str], wanted: list[str]) -> None:
    gone = [name for name in wanted if name not in found]
    new = [name for name in found if name not in wanted]
    lines = [f"  - {name}" for name in gone] + [f"  + {name}" for name in new]
    hint = "nothing may go" if gone else f"add what is new to {CONTRACTS.name}"
    assert not lines, "\n".join([f"{what} ({hint}):", *lines])


# --------------------------------------------------------------------------- flags


def flags_of(text: str) -> dict[str, str]:
    """Every flag of a help text with its default, blanks left out."""
    found = {}
    parts = re.split(r"^[ │|]*(?:-\w, )?(--[a-z][a-z0-9-]*)(?= |$)", text, flags=re.MULTILINE)
    for name, rest in zip(parts[1::2], parts[2::2], strict=True):
        plain = "".join(rest.replace("│", " ").split())
        default = re.search(r"\(default:(.*?)\)|\((required)\)", plain)
        found[name] = "" if default is None else default[1] or default[2] or ""
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_flags_are_there_with_their_defaults(verb: str) -> None:
    ended = run(f"{verb} --help")
    assert ended.code == 0
    found = flags_of(ended.out)
    found.pop("--help", None)
    wanted = keep("flags", verb, found, KNOWN.get("flags", {}).get(verb))
    # one that has another name now still works; what stands behind --help is only looked up
    hidden = [name for name in wanted if name not in found]
    gone = [name for name in hidden if run(f"{verb} --help {name}").code != 0]
    assert not gone, f"{verb} has lost {', '.join(gone)}"
    assert_kept(f"flags of {verb}", list(found), [name for name in wanted if name not in hidden])
    changed = {name: (wanted[name], found[name]) for name in found if found[name] != wanted[name]}
    assert not changed, f"defaults of {verb}, before and now: {changed}"


def test_a_flag_that_is_not_there_is_told_from_one_that_is() -> None:
    assert run("generate --help --prompt").code == 0
    assert run("generate --help --promptly").code == 2


def test_all_verbs_are_listed() -> None:
    listed = run("--help")
    assert listed.code == 0
    for verb in VERBS:
        assert re.search(rf"^ *{verb} ", listed.out, re.MULTILINE), verb
    for group in ("live", "plan"):
        assert run(f"{group} --help").code == 0
        assert run(group).code == 2
    assert run("--version").code == 0
    assert run("").code == 2


# --------------------------------------------------------------------------- JSON and files


def command(name: str, old: Path, out: Path, **more: Any) -> Ended:
    out.mkdir()
    if "OUT/" not in RUNS[name]:
        out.rmdir()
    return run([*RUNS[name].replace("OUT", str(out)).split(), "--json"], folder=old, **more)


def check(name: str, ended: Ended, out: Path) -> None:
    found = settled(list(paths(ended.json)))
    assert_kept(
        f"JSON of {name}", found, keep("json", name, found, KNOWN.get("json", {}).get(name))
    )
    files = written(out) if out.exists() else {}
    wanted = keep("files", name, files, KNOWN.get("files", {}).get(name))
    assert_kept(f"files of {name}", list(files), list(wanted))
    for file, keys in files.items():
        assert_kept(f"{file} of {name}", keys, wanted[file])


@pytest.mark.parametrize("name", [name for name in RUNS if name != "quickstart"])
def test_a_command_prints_and_writes_what_it_did(name: str, old: Path, tmp_path: Path) -> None:
    heard = "the cat\nthe cat sat\n\nthe dog\n" if name == "live translate" else ""
    ended = command(name, old, tmp_path / "out", stdin=heard)
    check(name, ended, tmp_path / "out")


@pytest.mark.full
def test_the_quickstart_prints_and_writes_what_it_did(old: Path, tmp_path: Path) -> None:
    """Its clock runs fast: it fills some minutes with what the machine can do in them."""
    for model, source in {"target": "pretrained", "draft": "independent"}.items():
        shutil.copytree(old / "drafters" / source, tmp_path / model)
        config = json.loads((tmp_path / model / "config.json").read_text())
        config["max_position_embeddings"] = 2048
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    monotonic, counter = time.monotonic, time.perf_counter
    with (
        mock.patch.object(time, "monotonic", side_effect=lambda: 1000 * monotonic()),
        mock.patch.object(time, "perf_counter", side_effect=lambda: 1000 * counter()),
    ):
        ended = command("quickstart", tmp_path, tmp_path / "out")
    check("quickstart", ended, tmp_path / "out")
