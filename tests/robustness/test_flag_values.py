"""Numbers at the edges of what flags take, while each verb really runs: exit code 0, or 2 and the
flag's name. What is refused before anything is loaded is in tests/unit/test_flag_values.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.net.running import Ended, run
from tests.net.test_verbs import RUNS, VERBS
from tests.unit.test_flag_values import kinds_of

from draftsmith.cli import options_of
from draftsmith.config import MOST, Flag, flags_of

ARTEFACTS = Path(__file__).parents[1] / "net/artefacts"
COUNTS = ("0", str(MOST))
SIZES = ("0", "1e30", "1e-30", "inf")
LONG = {("plan fit", "--bootstrap")}
"""Work that was asked for and takes its time."""
SLOW = {"quickstart", "doctor", "bench", "bench --perplexity", "distill", "distill --online"}
"""Each run takes seconds; `generate`, `tune` and `pretrain` have most of their flags."""
SOLVED = {("plan ladder", "--vocab-size")}
"""The answer is that there is no such draft."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the files that commands need."""
    folder = tmp_path_factory.mktemp("place") / "work"
    shutil.copytree(ARTEFACTS, folder)
    shutil.copy(folder / "target/model.safetensors", folder / "speaker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


def verb_of(name: str) -> str:
    return max((verb for verb in VERBS if f"{name} ".startswith(f"{verb} ")), key=len)


def edges(flag: Flag) -> tuple[str, ...]:
    kinds = kinds_of(flag)
    return (COUNTS if int in kinds else ()) + (SIZES if float in kinds else ())


def with_value(name: str, flag: Flag, value: str, place: Path, out: Path) -> Ended:
    """Run the command of this name with another value of the flag."""
    shutil.rmtree(out, ignore_errors=True)
    if "OUT/" in RUNS[name]:
        out.mkdir()
    words = RUNS[name].replace("OUT", str(out)).split()
    if flag.name in words:
        at = words.index(flag.name)
        del words[at : at + 2]
    words.append(f"{flag.name}={value}")
    return run([*words, "--json"], folder=place, stdin="the cat\nthe cat sat\n\n")


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in RUNS if n not in SLOW])
def test_a_number_at_the_edge_works_or_is_refused(name: str, place: Path, tmp_path: Path) -> None:
    verb = verb_of(name)
    for flag in flags_of(options_of(verb)).values():
        if flag.name == "--betas" or (verb, flag.name) in LONG:
            continue
        for value in edges(flag):
            ended = with_value(name, flag, value, place, tmp_path / "out")
            case = f"{name} {flag.name}={value}: {ended.err[-300:]}"
            assert "unexpected" not in ended.sentence and "Traceback" not in ended.err, case
            assert ended.code in (0, 2), case
            named = flag.name in ended.sentence or (verb, flag.name) in SOLVED
            assert ended.code == 0 or named, case
