"""The architecture page is true: its diagram against the imports, its walk against a real run."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import gen_diagram
import pytest
from tests.unit.test_architecture import MODULES, OWED, imports

import draftsmith
from draftsmith import cli

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(draftsmith.__file__).parent
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
DIAGRAM = gen_diagram.in_page(PAGE)
FACADE = ("__init__", "__main__")
"""The public names; they may come from anywhere."""


def box(module: str) -> str:
    """The box of a module: the one with the longest name that the module's begins with."""
    parts = {part: name for name in DIAGRAM.places for part in name.split("+")}
    found = [part for part in parts if f"{module}.".startswith(f"{part}.")]
    assert found, f"the diagram has no box for {module}"
    return parts[max(found, key=len)]


def edges() -> dict[tuple[str, str], str]:
    """Imports between boxes, each with a place where it stands; not those that are still owed."""
    found = {}
    for name, path in MODULES.items():
        if name in FACADE:
            continue
        for line, imported in imports(path, name):
            while imported and imported not in MODULES:  # a name in a module
                imported = imported.rpartition(".")[0]
            owed = box(imported) in OWED.get(name, ()) if imported else True
            if not owed and box(imported) != box(name):
                place = f"{path.relative_to(PACKAGE)}:{line} imports {imported}"
                found[box(name), box(imported)] = place
    return found


def test_every_arrow_is_an_import() -> None:
    assert not set(DIAGRAM.arrows) - edges().keys()


def test_every_import_follows_the_arrows() -> None:
    wrong = {pair: place for pair, place in edges().items() if pair not in DIAGRAM.reachable()}
    assert not wrong, "\n".join(f"{a} -> {b}: {place}" for (a, b), place in wrong.items())


def test_the_packages_of_the_table_are_those_of_the_diagram() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \| `(.+?)` \|$", PAGE.split("## From")[0], re.M)
    named = {one.strip("/").removesuffix(".py").replace("/", ".") for row, _ in rows
             for one in re.findall(r"`(.+?)`", row)}  # fmt: skip
    boxes = {part for name in DIAGRAM.places for part in name.split("+")}
    assert named == boxes
    assert all((PACKAGE / begin).is_file() for _, begin in rows)


def walk() -> list[tuple[str, str]]:
    """(file, function) of the page's walk, in order."""
    rows = re.findall(r"^\| `(\S+\.py)` \| (`.+?`) \| .+ \|$", PAGE.split("## From")[1], re.M)
    return [(path, name) for path, names in rows for name in re.findall(r"`(.+?)`", names)]


def test_the_walk_is_the_stack_of_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    path, function = walk()[-1]
    module = importlib.import_module(f"draftsmith.{path.removesuffix('.py').replace('/', '.')}")
    true = getattr(module, function)
    stacks: list[list[tuple[str, str]]] = []

    def noted(*words: Any) -> Any:
        frames = [one.frame.f_code for one in inspect.stack(context=0)[1:]]
        here = [code for code in frames if Path(code.co_filename).is_relative_to(PACKAGE)]
        names = [(str(Path(c.co_filename).relative_to(PACKAGE)), c.co_qualname) for c in here]
        stacks.append([*names[::-1], (path, function)])
        return true(*words)

    monkeypatch.setattr(module, function, noted)
    monkeypatch.chdir(ROOT)
    words = "generate --target models/mini-code/target --drafter prompt_lookup --no-compile"
    with pytest.raises(SystemExit) as end:
        cli.main(
            [
                *words.split(),
                "--temperature",
                "0.8",
                "--prompt",
                "def main(",
                "--max-new-tokens",
                "2",
            ]
        )
    assert end.value.code == 0
    assert stacks and all(stack == walk() for stack in stacks)
    assert len(dict(walk())) <= 8


def test_the_line_that_draws_is_where_the_page_says() -> None:
    (line,) = re.findall(r"^`(column_R.+)`$", PAGE, re.M)
    path, function = walk()[-1]
    body = (PACKAGE / path).read_text(encoding="utf-8").split(f"def {function}(")[1]
    assert line in body.split("\n\n\n")[0]
