"""Imports point down only: the layer table of the design, enforced.

Every import counts, also those inside functions and under TYPE_CHECKING: a lazy import hides the
cost of a dependency, not the dependency. Modules on one line do not know each other, except where
`BESIDE` says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith

PACKAGE = Path(draftsmith.__file__).parent

# From the bottom up. A name stands for a module or for a folder with all that is in it.
LAYERS = [
    ["errors"],
    ["config"],
    ["provenance"],
    ["plots"],
    ["data"],
    ["core"],
    ["targets"],
    ["drafters"],
    ["plan"],
    ["live", "bench", "distill"],
    ["serve", "export"],
    ["commands"],
    ["cli"],
    ["__init__", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
BESIDE = {
    ("sampler", "law"),
    ("flags", "config"),
    ("option_groups", "config"),
    ("option_groups", "flags"),
    ("options", "config"),
    ("options", "flags"),
    ("drafting_options", "option_groups"),
    ("live_options", "config"),
    ("live_options", "flags"),
    ("live_options", "option_groups"),
    ("plan_options", "config"),
    ("plan_options", "flags"),
    ("plan_options", "option_groups"),
    ("tune_options", "config"),
    ("tune_options", "drafting_options"),
    ("tune_options", "option_groups"),
    ("options", "drafting_options"),
    ("options", "option_groups"),
    ("provenance", "config"),
    ("provenance", "flags"),
    ("ops", "cache"),
    ("cache", "trees"),
}
# What every `--help` loads: nothing here may load torch when it is imported.
LIGHT = [
    "__init__",
    "__main__",
    "cli",
    "errors",
    "config",
    "flags",
    "option_groups",
    "drafting_options",
    "options",
    "live_options",
    "plan_options",
    "tune_options",
    "units",
    "provenance",
    "tree_text",
    "drafter_names",
    "bias",
    "prompt_text",
]
HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "numpy",
    "scipy",
    "matplotlib",
    "pyarrow",
    "safetensors",
    "statsmodels",
}


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file; a folder's `__init__` has the folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name below the package) of every import of one of our own modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [absolute(node, name, path)]
            if found[0].count(".") == 0 or found[0].removeprefix("draftsmith.") in MODULES:
                # `from draftsmith import law` and `from draftsmith.bench import suites` name
                # modules; `from draftsmith.core.law import Law` does not.
                found = [f"{found[0]}.{alias.name}" for alias in node.names]
        else:
            continue
        for dotted in found:
            if dotted == "draftsmith" or dotted.startswith("draftsmith."):
                yield node.lineno, dotted.removeprefix("draftsmith").removeprefix(".")


def absolute(node: ast.ImportFrom, name: str, path: Path) -> str:
    """The module of a `from` import with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    here = ["draftsmith", *name.split(".")]
    up = node.level - (1 if path.name == "__init__.py" else 0)
    base = here[: len(here) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


def violations(name: str, path: Path) -> list[str]:
    mine = name.split(".")[0]
    wrong = []
    for line, imported in imports(path, name):
        theirs = imported.split(".")[0] or "__init__"
        if theirs == mine:
            continue
        place = f"{path.relative_to(PACKAGE.parent)}:{line}"
        if theirs not in RANK:
            wrong.append(f"{place}: {theirs!r} is in no layer")
        elif RANK[theirs] >= RANK[mine] and (mine, theirs) not in BESIDE:
            wrong.append(f"{place}: {mine} may not import {theirs}")
    return wrong


def test_every_module_has_a_layer() -> None:
    homeless = sorted({name.split(".")[0] for name in MODULES} - RANK.keys())
    assert not homeless, f"add to the layer table (and to docs): {homeless}"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_imports_point_down_only(name: str) -> None:
    if name.split(".")[0] in RANK:
        assert violations(name, MODULES[name]) == []


def test_the_package_itself_imports_nothing_of_its_own_when_it_is_imported() -> None:
    tree = ast.parse(MODULES["__init__"].read_text(encoding="utf-8"))
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith("draftsmith")]


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_nothing_heavy(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in tree.body:  # inside functions they may
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module or ""]
        for dotted in found:
            assert dotted.split(".")[0] not in HEAVY, f"{name}, line {node.lineno}: {dotted}"


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        (
            "drafters.x",
            "from draftsmith.core.decode import decode",
            "drafters may not import decode",
        ),
        ("drafters.x", "def f():\n    import draftsmith.distill.trainer", "import distill"),
        ("law", "from draftsmith import types", "law may not import types"),
        ("verify", "from draftsmith.drafters.base import Drafter", "import drafters"),
        ("targets.hf", "from ..verify import verify", "targets may not import verify"),
        ("bench.x", "from . import suites", ""),
        ("bench.x", "from .. import cli", "bench may not import cli"),
        ("types", "from draftsmith.nowhere import x", "'nowhere' is in no layer"),
        ("errors", "import draftsmith", "errors may not import __init__"),
        ("distill.x", "from draftsmith.core.decode import decode", ""),
        ("options", "from draftsmith.config import parse_list", ""),
    ],
)
def test_the_check_sees_each_kind_of_import(
    name: str, source: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "draftsmith" / "x.py"
    path.parent.mkdir()
    path.write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", path.parent)
    found = violations(name, path)
    assert len(found) == bool(wrong)
    assert not wrong or wrong in found[0]
