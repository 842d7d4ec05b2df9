"""Every file and module of ours that a docstring, a comment or a page names exists.

A path may leave out its first folders (`drafters/none.py`), a dotted name the package
(`core.verify.Rule`). History is exempt: it names what stood where.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith
from draftsmith import plugins

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/draftsmith"
HISTORY = {"LOG.md", "CHANGELOG.md", "2026-11-lab-log.md"}
FOLDERS = ("src", "tests", "docs", "benchmarks")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
TEXTS = [
    path
    for path in (*ROOT.glob("*.md"), *FILES)
    if path.suffix in {".py", ".md"} and path.name not in HISTORY
]
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
GROUPS = {value for value in vars(plugins).values() if str(value).startswith("draftsmith.")}
FOREIGN = {
    "lade/decoding.py",  # of the released implementation of lookahead decoding
    "eagle/train/main.py",  # of the released trainings that the recipes follow
    "eagle/train/main_fspad.py",
    "eagle/traineagle3/main.py",
    "train/main_griffin_1.py",
    "train/main_griffin_2.py",
    "train/main_hass.py",
    "my_package/bigram.py",  # of the reader
    "a/x.py",
    "a-b.py",  # in folders that a test makes
}

COMMENT = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)
SCRIPT = re.compile(r"(?<![\w.*/{-])[\w-]+(?:/[\w-]+)*\.py\b")
FOLDER = re.compile(rf"(?<![\w.*/{{-])(?:{'|'.join(FOLDERS)}|models)/[\w./-]*\w(?![\w*{{-])")
TOPS = "|".join({name.split(".")[0] for name in MODULES} - {"config"})  # `config.x`: any object's
DOTTED = re.compile(rf"\bdraftsmith\.[\w.]*\w|`(?:{TOPS})\.[\w.]*\w(?=`|\()")


def prose(path: Path) -> str:
    """A page's text, or the comments and docstrings of a script."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else "\n".join(COMMENT.findall(text))


@functools.cache
def endings() -> set[str]:
    """Every path of a file, whole or without its first folders."""
    parts = [path.relative_to(ROOT).parts for path in FILES]
    return {"/".join(one[start:]) for one in parts for start in range(len(one))}


def lost_paths(text: str) -> Iterator[str]:
    for found in (*SCRIPT.findall(text), *FOLDER.findall(text)):
        is_example = re.search(r"[A-Z]{2}", found) or found in FOREIGN  # `drafters/KIND.py`
        if not is_example and found not in endings() and not (ROOT / found).is_dir():
            yield found


@functools.cache
def names_in(module: str) -> set[str]:
    """The classes, functions and variables that a module's text defines at its top level."""
    found: set[str] = set()
    for one in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(one.name)
        elif isinstance(one, (ast.Assign, ast.AnnAssign)):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            found |= {name.id for name in targets if isinstance(name, ast.Name)}
    return found


def is_there(dotted: str) -> bool:
    """A module, or a name that a module defines; what follows a class is not looked up."""
    module, rest = dotted, []
    while module and module not in MODULES:
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    if not module:  # `draftsmith.Law`
        return rest[0] in {*draftsmith.__all__, "__all__", "__version__"}
    return not rest or rest[0] in names_in(module)


def lost_names(text: str) -> Iterator[str]:
    for found in set(DOTTED.findall(text)) - GROUPS:
        bare = found.strip("`").removeprefix("draftsmith.")
        is_file = bare.endswith((".py", ".json"))  # `cli.py` of the paths, `config.json`
        if not is_file and not is_there(bare):
            yield found.strip("`")


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_what_texts_name_exists(folder: str) -> None:
    here = [path for path in TEXTS if path.relative_to(ROOT).parts[0] == folder] or [
        path for path in TEXTS if path.parent == ROOT
    ]
    lost = [
        f"{path.relative_to(ROOT)} names {name}"
        for path in here
        for name in sorted({*lost_paths(prose(path)), *lost_names(prose(path))})
    ]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("see `drafters/none.py` and src/draftsmith/cli.py, tests/unit/test_cli.py", []),
        ("see `drafters/gone.py`", ["drafters/gone.py"]),
        ("in benchmarks/results/gone.md", ["benchmarks/results/gone.md"]),
        ("a file drafters/KIND.py, *_test.py, models/mini-*", []),
        ("`core.verify.Rule` and draftsmith.core.law.Law.draw, draftsmith.drafters", []),
        ("`core.verify.Gone`", ["core.verify.Gone"]),
        ("draftsmith.core.gone", ["draftsmith.core.gone"]),
        ("`config.json` and `bench.run.run_bench`", ["bench.run.run_bench"]),
    ],
)
def test_lost_names_are_found(text: str, lost: list[str]) -> None:
    assert [*lost_paths(text), *lost_names(text)] == lost
