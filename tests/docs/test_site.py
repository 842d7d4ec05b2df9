"""The site's pages: their commands run or at least parse, and no page is missing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith
from draftsmith import cli
from draftsmith.drafters.config import kinds

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
GOALS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def fences(page: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """(language, text) of each code block of a page, in order: `bash` and `python` run from the
    repository's root, `sh` stands for models and files of the reader."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return ((language, text) for language, text in blocks if language in languages)


def commands(page: Path) -> list[list[str]]:
    """The words of each command of a page; those of a pipe are several."""
    lines = [line for _, text in fences(page, "bash", "sh") for line in text.splitlines()]
    return [shlex.split(one) for line in lines for one in re.split(r" [|>] ", line) if one.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one(page: Path) -> None:
    for first, *words in commands(page):
        if first == "draftsmith":
            verb, rest = cli.split_verb(words)
            cli.parse(verb, rest).validate()
        elif first == "make":
            assert words[0] in GOALS, f"{page.name}: make has no goal {words[0]}"


@pytest.mark.parametrize("verb", cli.verbs())
def test_every_verb_has_a_page_with_its_options_and_a_command(verb: str) -> None:
    page = DOCS / "commands" / f"{verb.replace(' ', '-')}.md"
    assert f"<!-- options: {verb} -->" in page.read_text(encoding="utf-8")
    called = [cli.split_verb(words)[0] for first, *words in commands(page) if first == "draftsmith"]
    assert verb in called
    assert f"]({page.name})" in (DOCS / "commands" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", kinds())
def test_every_drafter_has_a_page_with_its_options_and_a_command(kind: str) -> None:
    page = DOCS / "drafters" / f"{kind}.md"
    text = page.read_text(encoding="utf-8")
    assert f"<!-- config: {kind} -->" in text and "**Reads**" in text and "**Proposals**" in text
    assert any(kind in " ".join(words) for words in commands(page))
    assert f"]({page.name})" in (DOCS / "drafters" / "index.md").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    missing = set(draftsmith.__all__) - set(re.findall(r"^::: draftsmith\.(\w+)$", pages, re.M))
    assert not missing - {"DraftsmithError"}  # with all others in the module `errors`


def run(page: Path) -> int:
    """Runs a page's blocks in order, from this folder; returns how many commands ran."""
    count = 0
    for language, text in fences(page, "bash", "python"):
        if language == "python":
            exec(compile(text, page.name, "exec"), {})
            continue
        for line in text.splitlines():
            first, *words = shlex.split(line)
            if first in ("make", "source"):
                continue
            count += 1
            if first == "draftsmith":  # in this process: torch is loaded once
                with pytest.raises(SystemExit) as end:
                    cli.main(words)
                assert end.value.code == 0, line
            else:
                path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
                subprocess.run(["bash", "-c", line], check=True, env={**os.environ, "PATH": path})
    return count


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the root of a clone in which nothing has run yet."""
    for name in ("models", "src", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
def test_the_tutorial_runs_and_distillation_pays(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(DOCS / "tutorial.md") == 4
    said = " ".join(capsys.readouterr().err.split())
    before, after = re.findall(r"acceptance on .*? (0\.\d+) -> (0\.\d+)", said)[-1]
    assert float(after) > float(before)
    assert (workplace / "runs/tutorial/bench/report.html").exists()


@pytest.mark.full
def test_the_first_sixty_seconds_run(workplace: Path) -> None:
    assert run(DOCS / "index.md") == 2


REFERENCE = [p for p in sorted((DOCS / "api").glob("*.md")) if list(fences(p, "python"))]


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_the_examples_of_the_reference_run(page: Path, workplace: Path) -> None:
    assert run(page) == 0  # commands


@pytest.mark.full
def test_the_commands_of_the_readme_run(workplace: Path) -> None:
    assert run(ROOT / "README.md") == 5


# What a page needs that another one makes comes first.
CHAINS = [
    ["collect", "distill", "bench", "report", "pretrain", "tune"],
    ["live-make-stream", "live-replay", "live-score", "live-translate", "live-make-examples"],
    ["generate", "doctor"],
    [f"plan-{one}" for one in ("optimum", "law", "fit", "alpha", "sweep", "table", "ladder")],
]


@pytest.mark.full
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain[0])
def test_the_commands_of_the_verbs_pages_run(chain: list[str], workplace: Path) -> None:
    (prompts,) = (text for _, text in fences(DOCS / "tutorial.md", "python"))
    exec(compile(prompts, "tutorial.md", "exec"), {})
    for name in chain:
        assert run(DOCS / "commands" / f"{name}.md") >= 1


def test_every_page_whose_commands_can_run_is_run() -> None:
    runnable = {p.stem for p in (DOCS / "commands").glob("*.md") if list(fences(p, "bash"))}
    assert runnable == {name for chain in CHAINS for name in chain}


DRAFTERS = [page for page in sorted((DOCS / "drafters").glob("*.md")) if list(fences(page, "bash"))]


@pytest.mark.parametrize("page", DRAFTERS, ids=lambda page: page.stem)
def test_the_commands_of_the_drafters_pages_run(page: Path, workplace: Path) -> None:
    (workplace / "runs").mkdir()
    assert run(page) >= 1
