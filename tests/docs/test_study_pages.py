"""Figures in the pages about studies are those of their records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from draftsmith.bench.languages import find

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/distillation-studies.md"
SETTINGS = {
    "undistilled": ("undistilled", 0),
    "KLD": ("kl", 400),
    "TVD": ("tvd", 400),
    "TVD++ (`exact`)": ("tvdpp", 400),
    "TVD++ (`uniform`)": ("tvdpp-uniform", 400),
    "KLD and a quarter as many answers to prose": ("kl-with-prose", 400),
}
TEXTS = {
    "gold": "gold",
    "greedy": "greedy",
    "one draw": "draws-1",
    "4 draws": "draws-4",
    "16 draws": "draws-16",
    **{f"{width} beams": f"beams-{width}" for width in (2, 4, 8, 16)},
}
OBJECTIVES = {
    "forward KL": "kl",
    "reverse KL": "rkl",
    "JSD": "jsd",
    "Hellinger": "hellinger",
    "TVD": "tvd",
    "TVD++": "tvdpp",
    "LK": "lk",
    "labels (SFT)": "sft",
}

KINDS = {
    "undistilled": ("undistilled",),
    "sft": ("draws-4", "sft"),
    "one": ("draws-1", "lk-whole"),
    "several": ("draws-4", "lk-whole"),
}
BEST_OF_LANGUAGES = {
    "German": ("TVD, greedy", "greedy-tvd-480"),
    "Chinese": ("JSD, 4 draws", "draws-4-jsd-480"),
    "Japanese": ("reverse KL, 4 draws", "draws-4-rkl-480"),
}
TREES = ("tree 4,2,2,1, T = 0", "tree 4,2,2,1, T = 1")


def test_the_table_of_direct_alignment_is_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/alignment.json").read_text(encoding="utf-8"))
    tau = {
        (bar["task"], bar["setting"], bar["steps"]): bar["tau"]
        for bar in record["bars"]
        if bar["gamma"] == 5
    }
    tasks, rows = table("tokens per step of chains of five")
    assert list(rows) == list(SETTINGS)
    for name, cells in rows.items():
        assert cells == [f"{tau[task, *SETTINGS[name]]:.2f}" for task in tasks]


def test_what_is_said_of_direct_alignment_is_in_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/alignment.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8").split("## Direct Alignment")[1].split("\n## ")[0]
    found = re.findall(r"(\d\.\d+)[,( ]+(\d\.\d+) to (\d\.\d+)\)", page)
    assert len(found) == len(re.findall(r"\d\.\d+ to \d\.\d+\)", page)) > 0
    for said in found:
        places = len(said[0]) - 2
        known = {
            tuple(f"{one[part]:.{places}f}" for part in ("ratio", "low", "high"))
            for one in record["differences"]
        }
        assert said in known


def test_what_the_commands_cost_is_in_their_records() -> None:
    def record(name: str) -> dict[str, Any]:
        path = ROOT / f"benchmarks/results/distillation_{name}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    page = (ROOT / "docs/distill.md").read_text(encoding="utf-8").split("## What it costs")[1]
    page = page.split("\n## ")[0]
    rows = record("storage")["rows"]
    for top_k in (10, 50, 200):
        low, high = sorted(row["bytes_per_token"] for row in rows if row["top_k"] == top_k)
        assert f"{low:.0f} to {high:.0f}" in page and f" {top_k}" in page
    fifty = [row for row in rows if row["top_k"] == 50]
    mean, largest = (max(row[f"log_p_error_{name}"] for row in fifty) for name in ("mean", "max"))
    assert f"{mean:.4f} nats on average, at most {largest:.4f}" in page
    small, large = (
        [one["speedup"] for one in record("collecting")["figures"] if one["model"] == model]
        for model in ("mini-code", "110 M bfloat16")
    )
    assert f"{small[0]:.1f} times as fast per token greedily with mini-code, {small[1]:.1f}" in page
    assert f"{large[0]:.1f} and {large[1]:.1f} with 110 M" in page
    stored, beside, _ = (one["times_online"] for one in record("modes")["figures"])
    assert f"{stored:.1f} times the tokens per second from a store" in page
    assert f"{beside:.1f} with the target beside it" in page
    figures = record("memory")["figures"]
    for name, unit, digits in (("chunked_mib", 1, 0), ("dense_mib", 1024, 1)):
        least, most = (of(one[name] for one in figures) / unit for of in (min, max))
        assert f"{least:.{digits}f} to {most:.{digits}f}" in page
    shares = [100 * one["share"] for one in figures]
    assert f"{min(shares):.0f} to {max(shares):.0f} %" in page


def test_the_tables_of_distillbeam_are_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    tau = {row["name"]: row["mean_tau"] for row in record["runs"]}
    texts, rows = table("tokens per step, mean of four")
    assert texts == list(TEXTS) and list(rows) == list(OBJECTIVES)
    for name, cells in rows.items():
        runs = [f"{TEXTS[text]}-{OBJECTIVES[name]}-{record['steps']}-s0" for text in texts]
        assert cells == [f"{tau[run]:.3f}" if run in tau else "" for run in runs]
    page = PAGE.read_text(encoding="utf-8").split("## DistillBeam")[1].split("\n### ")[0]
    said = intervals(page)
    assert said and said <= {written(one) for one in record["claims"]}


def test_the_table_of_the_best_is_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    _, rows = table("of each kind the best")
    assert len(rows) == len(KINDS) == len(record["best"])
    for (name, cells), kind in zip(rows.items(), KINDS, strict=True):
        some = record["best"][kind]
        assert len(some) == (1 if kind == "undistilled" else 3)
        assert all(word in some[0]["name"] for word in KINDS[kind]), name
        trees = [f"{mean(one['tau'][tree] for one in some):.2f}" for tree in TREES]
        alpha = f"{mean(one['alpha']['1'] for one in some):.3f}"
        chrf = f"{mean(one['chrf'] for one in some):.1f}"
        assert cells == [f"{mean(one['mean_tau'] for one in some):.3f}", *trees, alpha, chrf]
    page = PAGE.read_text(encoding="utf-8").split("### The best of")[1].split("\n### ")[0]
    found = record["differences"] + record["tree_differences"]
    assert intervals(page) == {written(one) for one in found}
    assert all(one["better"] == "several" and one["low"] > 1 for one in found)


def test_speeds_are_those_of_the_clock() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8").split("By the clock")[1].split("This pair")[0]
    cold = [row for row in record["speed"]["rows"] if row["temperature"] == 0]
    names = [row["draft"] for row in cold]
    assert names == 2 * ["undistilled"] + 2 * [record["best"]["several"][0]["name"]]
    assert [row["gamma"] for row in cold] == [1, 8, 1, 8]
    said = re.findall(r"(\d\.\d\d) \((\d\.\d\d) to (\d\.\d\d)\)", page)
    measured = ((row["speedup"], *row["interval"]) for row in cold)
    assert said == [tuple(f"{value:.2f}" for value in three) for three in measured]
    one, eight, first, second = (f"{row['predicted']:.2f}" for row in cold)
    assert f"foretells {one} and {eight}, {first} and {second}" in page
    assert f"{record['speed']['prompts']} prompts" in page


def test_the_table_of_starts_is_its_record() -> None:
    path = ROOT / "benchmarks/results/distillbeam_starts.json"
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    columns, rows = table("pre-training, tokens per step")
    assert columns == ["undistilled", "labels", "LK"] and len(rows) == len(starts)
    for (name, cells), start in zip(rows.items(), starts, strict=True):
        assert name.replace(",", "").startswith(start["pretraining"].replace("steps", " steps"))
        after = {one["objective"]: one["mean_tau"] for one in start["after"]}
        tau = [start["before"]["mean_tau"], after["sft"], after["lk"]]
        assert cells == [f"{value:.3f}" for value in tau]
    said = intervals(PAGE.read_text(encoding="utf-8").split("### By what")[1].split("\n## ")[0])
    assert said == {written(gain) for start in starts for gain in start["gains"]}


def test_the_table_of_languages_is_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/languages.json").read_text(encoding="utf-8"))
    _, rows = table("to")
    assert list(rows) == list(record["best"]) == list(BEST_OF_LANGUAGES)
    for name, cells in rows.items():
        known, best = find(name), record["best"][name]
        seeds, quality = record["seeds"][name], record["target"][name]
        (before,) = (row for row in record["languages"][name] if row["name"] == "undistilled")
        assert known is not None and len(seeds) == 3
        words, better = BEST_OF_LANGUAGES[name]
        assert better == best["better"]
        assert cells == [
            ", ".join((known.script, known.morphology, known.region, known.family)),
            f"{before['mean_tau']:.3f}",
            words,
            f"{mean(one['mean_tau'] for one in seeds):.3f}",
            written(best),
            f"{quality['chrf']:.1f}, {quality['bleu']:.1f}",
        ]
    page = PAGE.read_text(encoding="utf-8").split("\n## Languages")[1]
    claims = [one for some in record["claims"].values() for one in some]
    assert intervals(page) == {written(one) for one in [*record["best"].values(), *claims]}


def test_what_is_said_of_temperatures_and_languages_is_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/languages.json").read_text(encoding="utf-8"))
    bullet = (
        PAGE.read_text(encoding="utf-8").split("* **The gains are of greedy")[1].split("\n*")[0]
    )

    def said(values: Iterable[float]) -> str:
        german, chinese, japanese = (f"{value:.2f}" for value in values)
        return f"{german}, {chinese} and {japanese}"

    for temperature in (0, 1):
        way = f"chain 8, T = {temperature}"
        gains, best = {}, []
        for name, runs in record["languages"].items():
            (before,) = (run["tau"][way] for run in runs if run["objective"] == "none")
            gains[name] = [run["tau"][way] / before for run in runs if run["objective"] != "none"]
            best.append(mean(run["tau"][way] for run in record["seeds"][name]) / before)
        assert said(map(mean, gains.values())) in bullet and said(best) in bullet
        more = [sum(gain > 1 for gain in some) for some in gains.values()]
        assert more == ([21, 21, 21] if temperature == 0 else [0, 6, 7])
    assert "all 21 settings" in bullet and "none, 6 and 7 of the 21" in bullet
    study = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    runs = {run["name"]: run["tau"] for run in study["runs"]}
    before = runs["undistilled"]
    names = {run["name"] for run in record["languages"]["German"]} - {"undistilled"}
    assert len(names) == 21
    assert all(runs[name][way] > before[way] for name in names for way in before)


def test_what_is_said_of_tails_and_readings_is_their_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    said = intervals((ROOT / "docs/distill.md").read_text(encoding="utf-8"))
    assert said == {written(one) for one in record["tails"]}


def intervals(page: str) -> set[str]:
    """Every `ratio (low to high)`; also in a list, where commas part them."""
    found = re.findall(r"(\d\.\d{3})[^()\d]*\(?(\d\.\d{3} to \d\.\d{3})\)", page)
    return {f"{ratio} ({interval})" for ratio, interval in found}


def written(claim: Mapping[str, Any]) -> str:
    return f"{claim['ratio']:.3f} ({claim['low']:.3f} to {claim['high']:.3f})"


def table(corner: str) -> tuple[list[str], dict[str, list[str]]]:
    """The names of the columns, and the cells of each line by its name."""
    page = PAGE.read_text(encoding="utf-8")
    lines = page.split(f"| {corner} |")[1].split("\n\n")[0].splitlines()
    names, _, *rest = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return names, {row[0]: row[1:] for row in rest}
