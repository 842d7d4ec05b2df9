"""Figures in the pages about studies are those of their records."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "undistilled": ("undistilled", 0),
    "KLD": ("kl", 400),
    "TVD": ("tvd", 400),
    "TVD++ (`exact`)": ("tvdpp", 400),
    "TVD++ (`uniform`)": ("tvdpp-uniform", 400),
    "KLD and a quarter as many answers to prose": ("kl-with-prose", 400),
}


def test_the_table_of_direct_alignment_is_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/alignment.json").read_text(encoding="utf-8"))
    tau = {
        (bar["task"], bar["setting"], bar["steps"]): bar["tau"]
        for bar in record["bars"]
        if bar["gamma"] == 5
    }
    page = (ROOT / "docs/distillation-studies.md").read_text(encoding="utf-8")
    lines = page.split("| tokens per step of chains of five |")[1].split("\n\n")[0].splitlines()
    tasks = [cell.strip() for cell in lines[0].strip("| ").split("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == list(SETTINGS)
    for name, *cells in rows:
        assert cells == [f"{tau[task, *SETTINGS[name]]:.2f}" for task in tasks]
