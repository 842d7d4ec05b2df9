"""The comparison with other engines: what its records and tables say beside the speeds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]


def loaded(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_row_says_how_much_of_its_texts_lies_in_loops() -> None:
    row = SimpleNamespace(engine="draftsmith", mode="plain", drafter="none", weights="Q4_1")
    texts = [[7] * 10, list(range(10))]
    worker = SimpleNamespace(row=row, seconds=[[1.0], [1.0]], texts=texts)
    (record,) = loaded("peers_compare", "peers/compare.py").summarise([worker], 10)
    assert record["loop_share"] == 0.5


def test_the_tables_of_engines_say_the_share_of_loops() -> None:
    readme = loaded("benchmarks_readme", "readme.py")
    record = json.loads((readme.RESULTS / "peers.json").read_text(encoding="utf-8"))
    shares = [one["loop_share"] for one in record["rows"] if "loop_share" in one]
    first = next(readme.peers())
    assert f"lie {min(shares):.0%} of the tokens" in first
    for page in ("README.md", "docs/measured.md"):
        assert first in (ROOT / page).read_text(encoding="utf-8")
