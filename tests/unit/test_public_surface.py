"""The names that users import: few, sorted, importable, and free until they are used."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import draftsmith


def test_the_public_names_are_few_and_sorted() -> None:
    assert draftsmith.__all__ == sorted(draftsmith.__all__)
    assert len(draftsmith.__all__) == len(set(draftsmith.__all__)) <= 25


@pytest.mark.parametrize("name", draftsmith.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    home = importlib.import_module(draftsmith._HOMES[name])
    assert getattr(draftsmith, name) is getattr(home, name)
    assert name in dir(draftsmith)


def test_no_public_name_is_the_name_of_a_module() -> None:
    """Importing a module binds it to its name in the package, over any function there."""
    modules = {module.name for module in pkgutil.iter_modules(draftsmith.__path__)}
    assert not modules & set(draftsmith.__all__)


def test_type_checkers_see_the_same_names_in_the_same_places() -> None:
    tree = ast.parse(Path(draftsmith.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == draftsmith._HOMES
    assert sorted(seen) == draftsmith.__all__


def test_an_unknown_name_is_an_attribute_error_and_the_version_is_known() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        draftsmith.nothing  # noqa: B018
    assert draftsmith.__version__ == version("draftsmith")


@pytest.mark.parametrize(
    "action",
    ["pass", "dir(draftsmith)", "draftsmith.DraftsmithError", "draftsmith.__version__"],
)
def test_importing_the_package_loads_nothing_heavy(action: str) -> None:
    code = (
        f"import sys, draftsmith\n{action}\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tyro'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
