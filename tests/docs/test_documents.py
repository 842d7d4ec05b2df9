"""What the documents show is run, and what they link to is there."""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from tests.command_cases import a_command, a_store, family_folder, network_words

from draftsmith import plugins
from draftsmith.cli import parse, split_verb
from draftsmith.config import as_dict
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.sampling import Sampler
from draftsmith.drafters.config import drafter_parts, kinds
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import make_drafter
from draftsmith.targets.toy import TabularTarget, tiny_target

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "LOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = (
    "add-a-drafter",
    "choose-a-drafter",
    "collect-at-scale",
    "concepts",
    "distill",
    "distillation-studies",
    "drafters-compared",
    "drafters-compared-toys",
    "feature-drafters",
    "live",
    "losslessness",
    "measured",
    "measures",
    "plan",
    "pretrain",
    "recipes",
    "troubleshooting",
    "tune",
)


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def tutorial(name: str, count: int) -> types.ModuleType:
    """The first drafters of the tutorial, as a module."""
    sources = blocks(ROOT / "docs" / "add-a-drafter.md")[:count]
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile("\n\n".join(sources), "add-a-drafter.md", "exec"), module.__dict__)
    return module


def test_the_drafter_of_the_tutorial_is_complete_and_lossless() -> None:
    drafter = tutorial("bigram", 1).DRAFTER()
    accepted = 0
    for target in (TabularTarget(8), tiny_target(64)):
        drafter.bind(target)
        for temperature in (0.0, 0.8):
            options = DecodeOptions(sampler=Sampler(temperature=temperature), max_new_tokens=40)
            prompts = [[1, 2, 1, 2, 1], [3], [4, 4, 4]]
            drafted = generate(target, drafter, prompts, options, batch_size=3)
            plain = generate(target, NoDrafter(), prompts, options)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            accepted += sum(one.metrics.accepted for one in drafted)
    assert accepted > 0


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, types.ModuleType], None]:
    """Makes a module's drafter known by a name, as an installed package would."""

    def name(kind: str, module: types.ModuleType) -> None:
        point = EntryPoint(name=kind, value=f"{module.__name__}:DRAFTER", group=plugins.DRAFTERS)
        monkeypatch.setattr(plugins, "offered", lambda group: (point,))

    return name


def test_the_drafter_that_learns_is_trained_and_loaded_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    named: Callable[[str, types.ModuleType], None],
) -> None:
    named("learned_bigram", tutorial("learned_bigram", 2))
    command = a_command(family_folder(tmp_path, "llama"), capsys)
    store = a_store(tmp_path, command, "store")
    out, text = tmp_path / "made", ["--prompt", "def add", "--max-new-tokens", "40"]
    words = [*network_words(40), "--learning-rate", "0.02", "--store", str(store)]
    command("distill", "--drafter", "learned_bigram", "--out", str(out), *words)
    made = json.loads((out / "run.json").read_text())["results"]
    assert made["held_out"]["accuracy_1"] > made["held_out_before"]["accuracy_1"]
    plain = command("generate", *text)["results"][0]
    for name in (str(out), f"learned_bigram:{out}"):
        drafted = command("generate", *text, "--drafter", name)["results"][0]
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["acceptance_rate"] > 0


def test_a_drafter_that_could_not_be_loaded_again_is_not_trained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    named: Callable[[str, types.ModuleType], None],
) -> None:
    module = tutorial("forgetful", 1)
    module.DRAFTER.trains = True
    named("forgetful", module)
    command = a_command(family_folder(tmp_path, "llama"), capsys)
    store = a_store(tmp_path, command, "store")
    words = ["--store", str(store), "--out", str(tmp_path / "made"), *network_words(2)]
    said = command("distill", "--drafter", "forgetful", *words, code=2)
    assert "its Config has no field `source`" in said and not (tmp_path / "made").exists()


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (source,) = blocks(ROOT / "README.md")
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    assert names["output"].text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def commands(page: Path) -> list[str]:
    """The lines of a page's code that call draftsmith, without what a shell does with them."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^    (?:\.venv/bin/)?draftsmith (.*)$", text, re.MULTILINE)
    return [re.split(r" [|>] |  #", line)[0] for line in found]


COMMANDS = [(page.name, line) for page in PAGES for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[": ".join(one)[:60] for one in COMMANDS])
def test_the_commands_of_documents_are_valid(page: str, line: str) -> None:
    verb, words = split_verb(shlex.split(line))
    options: Any = parse(verb, words)
    options.validate()
    kind, _ = drafter_parts(getattr(options, "drafter", "none"))
    given = getattr(options, "drafter_option", ())
    if kind in kinds():
        config = as_dict(make_drafter(kind, given).config)
        assert all(one.partition("=")[0] in config for one in given)


@pytest.mark.parametrize("name", GUIDES)
def test_guides_open_with_a_command(name: str) -> None:
    opening = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert re.search(r"^    (?:draftsmith|python) ", opening, re.MULTILINE)
    assert "After reading this page you" in " ".join(opening.split())


@pytest.mark.parametrize("page", [*(ROOT / "docs").rglob("*.md")], ids=lambda page: page.name)
def test_every_page_has_a_command_or_an_example(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.search(
        r"^(?: {4})?(?:.*\| )?(?:draftsmith|python|make) |^```python", text, re.MULTILINE
    )
    assert found or "history" in page.parts or page.name == "index.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_documents_name_exist(page: Path) -> None:
    from draftsmith.cli import verbs
    from draftsmith.config import flags_of

    known = {flag for options in verbs().values() for flag in flags_of(options)}
    known |= {"--help", "--version", "--no-hf-baseline", "--nproc-per-node"}  # the last: torchrun
    text = page.read_text(encoding="utf-8")
    unknown = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if flag not in known}
    assert not unknown, f"{page.name} names flags that no command has: {sorted(unknown)}"
