"""The rules of the architecture, read from the sources: floors, private modules, plots, printing.

Every import counts, also those inside functions and under TYPE_CHECKING: a lazy import hides the
cost of a dependency, not the dependency. `OWED` lists what still breaks a rule. A test fails when
an entry is no longer needed, so the list only shrinks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith

PACKAGE = Path(draftsmith.__file__).parent

# From the bottom up. A name stands for a module, or for a package with all that is in it; the
# longest name that fits counts. Modules of one package may import one another.
FLOORS = [
    ["errors", "intervals"],
    ["plugins"],
    ["config"],
    ["provenance"],
    ["plots"],
    ["data"],
    ["core"],
    ["targets"],
    ["drafters"],
    ["core.decode"],
    ["core.generation"],
    ["core.conversation"],
    ["plan"],
    ["distill"],
    ["bench"],
    ["live"],
    ["serve", "export"],
    ["commands"],
    ["cli"],
    ["__init__", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names}
# module -> floors above it that it still imports
OWED: dict[str, set[str]] = {}
# modules outside of `commands` and `cli` that still print
PRINTING: set[str] = set()
# modules outside of `data` that read JSONL: a resumed run cuts its own metrics.jsonl
OWN_JSONL = {"distill.callbacks"}
# modules that parse JSON without `provenance.parse_json`, which knows what JSON can hide: their own
# lines, which one may cut; frames, which are refused in words of the protocol; a cache, which is
# measured again
OWN_JSON = {"provenance", "distill.callbacks", "serve.protocol", "bench.costs"}
# What every `--help` loads: nothing here may load torch when it is imported.
LIGHT = [
    "__init__",
    "__main__",
    "cli",
    "errors",
    "plugins",
    "config",
    "provenance",
    "bench.config",
    "core.config",
    "data.text",
    "distill.config",
    "drafters.config",
    "live.config",
    "targets.config",
]
# of `commands`, what a verb imports when it runs
BODIES = {"commands.quickstart_demo", "commands.quickstart_real"}
HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "numpy",
    "scipy",
    "matplotlib",
    "pandas",
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
LIGHT += [name for name in MODULES if name.startswith("commands.") and name not in BODIES]


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


def floor_of(name: str) -> str:
    """The longest name of `FLOORS` that `name` is or lies in; empty: none."""
    parts = (name or "__init__").split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((one for one in names if one in RANK), "")


def violations(name: str, path: Path) -> list[tuple[str, str]]:
    """(floor, sentence) of every import of this module that points up or sideways."""
    mine = floor_of(name)
    wrong = []
    for line, imported in imports(path, name):
        theirs = floor_of(imported)
        if theirs == mine:
            continue
        place = f"{path.relative_to(PACKAGE.parent)}:{line}"
        if not theirs:
            wrong.append(("", f"{place}: {imported!r} is on no floor"))
        elif RANK[theirs] >= RANK[mine]:
            wrong.append((theirs, f"{place}: {mine} may not import {theirs}"))
    return wrong


def test_every_module_is_on_a_floor() -> None:
    homeless = sorted(name for name in MODULES if not floor_of(name))
    assert not homeless, f"add to FLOORS (and to the architecture page): {homeless}"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_imports_point_down_only(name: str) -> None:
    found = violations(name, MODULES[name])
    owed = OWED.get(name, set())
    assert [sentence for floor, sentence in found if floor not in owed] == []
    assert {floor for floor, _ in found} >= owed, "OWED lists what is paid: remove it"


def private_imports(name: str, path: Path) -> list[str]:
    """Modules that begin with an underscore, of packages that `name` does not lie in."""
    package = f"{name}." if path.name == "__init__.py" else f"{name.rpartition('.')[0]}."
    found = []
    for line, imported in imports(path, name):
        head, underscore, _ = f".{imported}".partition("._")
        owner = head.removeprefix(".")
        if not underscore or f".{imported}.".startswith("..__"):
            continue
        private = imported[len(owner) :].removeprefix(".").split(".")[0]
        module = f"{owner}.{private}".removeprefix(".")
        if module in MODULES and not package.startswith(f"{owner}." if owner else ""):
            found.append(f"{path.name}:{line}: {module}")
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_private_modules_stay_inside_their_package(name: str) -> None:
    if name in OWED or name == "cli":  # cli finds the verbs: the entry to `commands`
        return
    assert private_imports(name, MODULES[name]) == []


OUTSIDE = [
    path
    for folder in ("tests", "benchmarks", "docs", "examples")
    for path in sorted((PACKAGE.parents[1] / folder).rglob("*.py"))
]


def private_of(imported: str) -> bool:
    """Whether an import names a private module of the package, or something in one."""
    private = [name for name in MODULES if "._" in name]
    return any(imported == name or imported.startswith(f"{name}.") for name in private)


def test_tests_benchmarks_and_docs_import_no_private_module() -> None:
    assert len(OUTSIDE) > 100, "the sources of the tests are not beside the package"
    assert private_of("commands._options") and not private_of("commands.bench")
    found = [
        f"{path}:{line}: {imported}"
        for path in OUTSIDE
        for line, imported in imports(path, "outside")
        if private_of(imported)
    ]
    assert found == []


def test_only_files_of_plots_import_matplotlib() -> None:
    found = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("matplotlib"))
        or (isinstance(node, ast.Import) and node.names[0].name.startswith("matplotlib"))
    }
    assert found and not [name for name in found if name.rpartition(".")[2] != "plots"]


def reads_jsonl(source: str) -> bool:
    """Whether a module parses JSON in a loop over lines: `json.loads` of what a loop runs over."""
    for loop in ast.walk(ast.parse(source)):
        if isinstance(loop, ast.For):
            loops: list[ast.For | ast.comprehension] = [loop]
        elif isinstance(loop, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            loops = list(loop.generators)
        else:
            continue
        names = {
            node.id for one in loops for node in ast.walk(one.target) if isinstance(node, ast.Name)
        }
        for call in ast.walk(loop):
            used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
            parses = isinstance(call, ast.Call) and ast.unparse(call.func) == "json.loads"
            if parses and names & used:
                return True
    return False


def test_only_data_opens_jsonl() -> None:
    assert reads_jsonl("rows = [json.loads(line) for line in path.read_text().splitlines()]")
    assert reads_jsonl("for n, line in enumerate(file):\n    values = json.loads(line.strip())")
    assert not reads_jsonl("for path in paths:\n    values = json.loads(text)")
    found = {name for name, path in MODULES.items() if reads_jsonl(path.read_text("utf-8"))}
    assert {name for name in found if not name.startswith("data.")} == OWN_JSONL


def test_json_is_parsed_in_one_place() -> None:
    parsing = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load")
    }
    assert parsing == OWN_JSON


def test_only_commands_print() -> None:
    printing = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in ("print", "Console")
    }
    outside = {name for name in printing if name.split(".")[0] not in ("commands", "cli")}
    assert outside == PRINTING


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
            "drafters may not import core.d",
        ),
        ("drafters.x", "def f():\n    import draftsmith.distill.trainer", "import distill"),
        ("core.decode", "from draftsmith.drafters.base import Drafter", ""),
        ("core.verify", "from draftsmith.drafters.base import Drafter", "import drafters"),
        ("core.verify", "from draftsmith.core import decode", "core may not import core.decode"),
        ("targets.hf", "from ..drafters.base import Drafter", "targets may not import drafters"),
        ("bench.x", "from . import run", ""),
        ("bench.x", "from .. import cli", "bench may not import cli"),
        ("core.types", "from draftsmith.nowhere import x", "'nowhere' is on no floor"),
        ("errors", "import draftsmith", "errors may not import __init__"),
        ("distill.x", "from draftsmith.core.decode import decode", ""),
        ("config", "from draftsmith.errors import InputError", ""),
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
    assert len({sentence for _, sentence in found}) == bool(wrong)
    assert not wrong or wrong in found[0][1]


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("bench.x", "from draftsmith.commands._tables import show", 1),
        ("bench.x", "from draftsmith.commands import _tables", 1),
        ("commands.bench", "from draftsmith.commands._tables import show", 0),
        ("commands.plan.fit", "from draftsmith.commands._tables import show", 0),
        ("commands.tune", "from draftsmith.commands.live._x import warn", 1),
        ("commands.live.serve", "from draftsmith.commands.live._x import warn", 0),
        ("bench.x", "from draftsmith.bench.run import measure", 0),
    ],
)
def test_the_check_sees_private_modules(
    name: str, source: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.py"
    path.write_text(source)
    monkeypatch.setitem(MODULES, "commands.live._x", path)
    assert bool(private_imports(name, path)) == bool(count)


def test_descriptions_have_a_verb_or_a_noun_in_front() -> None:
    """None begins with "Of", in the package, the tests and the benchmarks."""
    root = Path(__file__).resolve().parents[2]
    found = [
        f"{path.relative_to(root)}:{number}"
        for folder in ("src", "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.lstrip().startswith('"' * 3 + "Of ")
    ]
    assert not found
