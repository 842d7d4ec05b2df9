"""Figures in the pages about studies are those of their records."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import figures
import readme
from draftsmith.data.languages import find
from draftsmith.drafters.registry import drafter_class
from draftsmith.plan import tables
from griffin_table import stages
from griffin_table import table as griffin_table
from smollm2 import auto as smollm2_auto

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/distillation-studies.md"
COMPARED, TOYS = ROOT / "docs/drafters-compared.md", ROOT / "docs/drafters-compared-toys.md"
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
    "1 sample": "draws-1",
    "4 samples": "draws-4",
    "16 samples": "draws-16",
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
    "Chinese": ("JSD, 4 samples", "draws-4-jsd-480"),
    "Japanese": ("reverse KL, 4 samples", "draws-4-rkl-480"),
}
TREES = ("tree 4,2,2,1, T = 0", "tree 4,2,2,1, T = 1")
TREE = "tree of widths 4, 2, 2, 1"
BEATEN = {
    "the undistilled draft": "undistilled",
    "the best labels": "sft",
    "the best on one text per prompt": "one",
}
GAINS = {
    "LK over undistilled": ("lk", "before"),
    "labels over undistilled": ("sft", "before"),
    "LK over labels": ("lk", "sft"),
}
ALIGNMENT = {
    "KLD over undistilled": ("kl-400", "undistilled"),
    "TVD++ over KLD": ("tvdpp-400", "kl-400"),
    "TVD over KLD": ("tvd-400", "kl-400"),
    "TVD++ (`uniform`) over KLD": ("tvdpp-uniform-400", "kl-400"),
    "KLD with answers to prose over KLD": ("kl-with-prose-400", "kl-400"),
    "KLD from random weights over KLD": ("kl-random-400", "kl-400"),
    "KLD without pre-training text over KLD": ("kl-unmixed-400", "kl-400"),
}
OURS = "FSPAD + Hellinger on samples"
MODELS = ("mini-code", "mini-ende")
OVER = {"own trees, T = 0": "own trees, T = 0", "all shapes": "all shapes, T = 0 and 1"}
QUALITY = {"chrf": "chrF", "bleu": "BLEU"}
STEPS = {"long": "1,920", "very long": "3,840"}
EQUAL_COST = {
    "1 sample": "draws-1",
    "2 beams": "beams-2",
    "4 samples": "draws-4",
    "4 beams": "beams-4",
    "8 beams": "beams-8",
    "`--beams auto`": "beams-auto",
}
CLAIMS = [
    ("teacher at temperature 1 over 0.7", "teacher at temperature 1 over 0.7"),
    ("teacher at temperature 1 over 2", "teacher at temperature 1 over 2"),
    ("full logprobs over top-50, renormalised", "whole laws as good as top-50, within 0.5 %"),
    ("sampled texts over gold", "drawn texts over gold"),
    ("sampled texts over greedy", "drawn texts over greedy"),
    ("logprobs over labels, sampled texts", "laws over labels, drawn texts"),
    ("2 beams over one", "2 beams over one"),
    ("4 beams over one", "4 beams over one"),
    ("8 beams over one", "8 beams over one"),
    ("16 beams over one", "16 beams over one"),
    (
        "reverse KL over other divergences, 8 beams",
        "reverse KL with 8 beams over other divergences with 8",
    ),
    (
        "full logprobs over top-50 with the rest as one cell",
        "(ours) whole laws over top-50 with the rest as one cell",
    ),
    ("4 samples over one", "(ours) 4 draws over one"),
    ("16 samples over one", "(ours) 16 draws over one"),
    ("4 samples over 4 beams", "(ours) 4 draws over 4 beams"),
    ("16 samples over 16 beams", "(ours) 16 draws over 16 beams"),
    (
        "mixture of the beams' logprobs (eq. 7) over separate ones (algorithm 2)",
        "(ours) mixture of laws over each beam its own laws, alike",
    ),
    (
        "beams weighted by score over equal weights",
        "(ours) weights by score over each beam its own laws, alike",
    ),
    (
        "12,000 prompts, 1 sample, over 3,000 prompts, 1 sample (LK)",
        "(ours) 4 times the prompts over none more, LK, long",
    ),
    (
        "12,000 prompts, 1 sample, over 3,000 prompts, 4 samples (LK)",
        "(ours) 4 times the prompts over 4 draws of each, LK, long",
    ),
    (
        "12,000 prompts, 1 sample, over 3,000 prompts, 4 beams (LK)",
        "(ours) 4 times the prompts over 4 beams of each, LK, long",
    ),
    (
        "3,000 prompts: 4 samples over 1 (LK)",
        "(ours) 4 draws of each prompt over one draw, LK, long",
    ),
    (
        "3,000 prompts: 4 beams over 1 sample (LK)",
        "(ours) 4 beams of each prompt over one draw, LK, long",
    ),
    (
        "12,000 prompts: 4 samples over 1 (LK)",
        "(ours) 4 draws of each prompt over one draw, LK, very long",
    ),
    (
        "12,000 prompts: 4 samples over 1 (LK, full logprobs)",
        "(ours) 4 draws of each prompt over one, LK, whole laws, very long",
    ),
    (
        "12,000 prompts: 4 samples over 1 (labels)",
        "(ours) 4 draws of each prompt over one draw, labels, very long",
    ),
    ("LK over labels, 1 sample", "(ours) LK over labels, one draw, very long"),
    ("LK over labels, 4 samples", "(ours) LK over labels, 4 draws, very long"),
    (
        "LK, 1 sample, over labels, 4 samples",
        "(ours) LK of one draw over labels of 4, very long",
    ),
    (
        "full logprobs over top-50 with the rest as one cell (LK, 4 samples)",
        "(ours) LK, whole laws over top-50 with the rest as one cell, very long",
    ),
]
DISTILLBEAM = dict(CLAIMS)


@pytest.mark.parametrize("page", ["distillation-studies", "drafters-compared-toys", "live", "tune"])
def test_every_heading_above_results_says_that_models_are_toys(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    headings = [
        part.splitlines()[0]
        for part in re.split("\n(?=#+ )", "\n" + text)[1:]
        if "| seeds |" in part
    ]
    assert headings and all("toy" in heading for heading in headings), headings


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


def test_the_claims_about_direct_alignment_are_in_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/alignment.json").read_text(encoding="utf-8"))
    section = PAGE.read_text(encoding="utf-8").split("## Direct Alignment")[1].split("\n## ")[0]
    (rows,) = claims(section)
    assert [row["claim"] for row in rows] == list(ALIGNMENT)
    known = {(one["task"], one["better"], one["worse"]): one for one in record["differences"]}
    used = record["exam_prompts_used"]
    assert used["library"] == used["library, open-ended"] and used["tests"] == used["prose"]
    for row in rows:
        better, worse = ALIGNMENT[row["claim"]]
        for task in record["tasks"]:
            one = known[task, better, worse]
            assert row[task] == written(one)
            assert row["seeds"] == seeds_of(one)
        assert row["n"] == f"{used['library']}; tests, prose: {used['tests']}"


def test_the_prompts_and_loops_of_direct_alignment_are_in_its_record() -> None:
    """Fewer prompts than were asked for, and how much of the greedy texts repeats itself."""
    record = json.loads((ROOT / "benchmarks/results/alignment.json").read_text(encoding="utf-8"))
    page = " ".join(PAGE.read_text(encoding="utf-8").split("## DistillBeam")[0].split())
    used, asked = record["exam_prompts_used"], record["exam_prompts"]
    assert f"{used['library']} of library code (greedy; {asked} were asked for" in page
    assert f"the same {used['library, open-ended']} open-ended" in page
    assert f"{used['tests']} of its tests, and {used['prose']} of English prose" in page
    for task, shares in record["loop_share"].items():
        (share,) = shares.values()
        assert re.search(rf"\b{100 * share:.0f} % (of the target's tokens )?for {task}\b", page)


def saved(better: Iterable[float], worse: Iterable[float]) -> str:
    alpha, before = mean(better), mean(worse)
    return f"{100 * (alpha - before) / (1 - before):.1f} %"


def test_the_rejections_saved_by_direct_alignment_are_in_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/alignment.json").read_text(encoding="utf-8"))
    tasks, rows = table("rejections saved")
    assert tasks == list(record["tasks"]) and list(rows) == list(ALIGNMENT)

    def alphas(task: str, setting: str) -> list[float]:
        rows = [r for r in record["tasks"][task] if (r.get("label") or r["name"]) == setting]
        return [alpha for row in rows for alpha in row["alpha"].values()]

    for name, cells in rows.items():
        better, worse = ALIGNMENT[name]
        assert cells == [saved(alphas(task, better), alphas(task, worse)) for task in tasks]


def test_what_is_said_of_lengths_and_mixes_is_in_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/alignment.json").read_text(encoding="utf-8"))
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    tau: dict[tuple[str, str, int], float] = {}
    for bar in record["bars"]:  # the sum over both lengths of chains
        key = (bar["task"], bar["setting"], bar["steps"])
        tau[key] = tau.get(key, 0.0) + bar["tau"]
    *code, prose = record["tasks"]

    def over_tvd(suffix: str) -> list[str]:
        return [
            f"{tau[task, 'tvdpp' + suffix, 400] / tau[task, 'tvd' + suffix, 400]:.3f}"
            for task in (*code, prose)
        ]

    assert "({}, {}, {} and, on prose, {}; ".format(*over_tvd("")) in page
    assert "without it {}, {}, {} and {}, one seed)".format(*over_tvd("-unmixed")) in page

    for tasks, place in ((code, "on code are"), ([prose], "on prose")):
        some = [
            tau[task, f"{loss}-unmixed", 400] / tau[task, loss, 400]
            for task in tasks
            for loss in ("kl", "tvd", "tvdpp")
        ]
        assert f"{place} {min(some):.2f} to {max(some):.2f} times" in page

    def shares(tasks: Iterable[str], steps: int) -> str:
        some = [
            tau[task, loss, steps] / tau[task, loss, 400]
            for task in tasks
            for loss in ("kl", "tvd", "tvdpp")
        ]
        return f"{min(some):.2f} to {max(some):.2f}"

    assert f"a quarter of the steps reaches {shares(code, 100)} of" in page
    assert f"half of them {shares(code, 200)} (" in page
    assert f"On prose, half of the steps reaches {shares([prose], 200)} (" in page


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


def test_the_loops_in_the_texts_of_distillbeam_are_in_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    shares = ", ".join(f"{100 * v:.0f} % at T = {t}" for t, v in record["loop_share"].items())
    said = shares.replace(" %", " % of the target's tokens", 1)
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"| repetition loops | none: {said} |" in page
    path = ROOT / "benchmarks/results/distillbeam_starts.json"
    share = json.loads(path.read_text(encoding="utf-8"))["loop_share"]["0"]
    assert f"{100 * share:.1f} % of the target's greedy tokens lie in loops" in page


def test_the_claims_about_distillbeam_are_in_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    section = PAGE.read_text(encoding="utf-8").split("## DistillBeam")[1].split("\n### The best")[0]
    known = {one["says"]: one for one in record["claims"]}
    rows = [row for some in claims(section) for row in some]
    assert [row["claim"] for row in rows] == list(DISTILLBEAM)
    for row in rows:
        one = known[DISTILLBEAM[row["claim"]]]
        assert row["here"] == written(one)
        assert row["rejections saved, T = 1"] == saved_by(one)
        assert (row["n"], row["seeds"]) == (str(record["exam_prompts"]), "1")
        length = one["says"].split(", ")[-1]
        if length in STEPS:
            assert row["steps"] == STEPS[length]
        else:
            assert row["divergences above 1"] == f"{one['higher']} of {one['of']}"


def test_the_table_of_equal_cost_is_in_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    runs = {one["label"]: one for one in record["runs"] if one.get("label")}
    known = {one["says"]: one for one in record["claims"]}
    _, rows = table("texts")
    assert list(rows) == list(EQUAL_COST)
    for name, (prompts, tau, worse, share) in rows.items():
        run = runs[f"kl, {EQUAL_COST[name]}, equal cost"]
        assert (prompts, tau) == (f"{run['limit']:,}", f"{run['mean_tau']:.3f}")
        says = f"(ours) auto over {EQUAL_COST[name]}, equal cost"
        assert worse == (written(known[says]) if says in known else "")
        assert share == (saved_by(known[says]) if says in known else "")


def test_the_table_of_learning_rates_is_in_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    tau = {
        (row["learning_rate"], row["objective"]): row["mean_tau"]
        for row in record["runs"]
        if row["name"].startswith(("draws-1-sft-", "draws-1-kl-", "draws-1-tvd-"))
        and row["name"].endswith("480-s0")
        and row["tail"] == "bucket"
    }
    _, rows = table("learning rate")
    assert len(rows) == 4
    for name, cells in rows.items():
        rate = float(name.split()[0])
        assert cells == [f"{tau[rate, loss]:.3f}" for loss in ("sft", "kl", "tvd")]


def test_what_is_said_of_long_trainings_is_in_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    tau = {row["name"]: f"{row['mean_tau']:.3f}" for row in record["runs"]}
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    beams, one = (tau[f"{texts}-lk-1920-s0"] for texts in ("beams-4", "draws-1"))
    before = tau["undistilled"]
    assert f"four beams ({beams} tokens per step) and one sample ({one}) are no better" in page
    assert f"the undistilled draft ({before})" in page and f"| {before} tokens per step," in page
    single, four = (
        [tau[f"draws-{texts}@12000-{loss}-3840-s0"] for loss in ("lk", "lk-whole", "sft")]
        for texts in (1, 4)
    )
    assert (
        f"LK reaches {single[0]} on one sample, {four[0]} on four, {four[1]} with full logprobs on "
        f"four and {single[1]} with full logprobs on one; labels reach {single[2]} and {four[2]}."
    ) in page


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
        before = [one["alpha"]["1"] for one in record["best"]["undistilled"]]
        share = "" if kind == "undistilled" else saved((o["alpha"]["1"] for o in some), before)
        assert cells == [f"{mean(one['mean_tau'] for one in some):.3f}", *trees, alpha, share, chrf]
    section = PAGE.read_text(encoding="utf-8").split("### The best of")[1].split("\n### ")[0]
    (found,) = claims(section)
    corner = "claim: LK, full logprobs, 4 samples, over"
    assert [row[corner] for row in found] == list(BEATEN)
    for row in found:
        for column, ways in (("chains", "differences"), (TREE, "tree_differences")):
            (one,) = (one for one in record[ways] if one["worse"] == BEATEN[row[corner]])
            assert one["better"] == "several" and one["low"] > 1
            assert row[column] == written(one)
            assert row["seeds"] == seeds_of(one)
        assert row["n"] == str(record["final_prompts"])


def test_speeds_are_those_of_the_clock() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    cold = [row for row in record["speed"]["rows"] if row["temperature"] == 0]
    best = record["best"]["several"][0]["name"]
    page = PAGE.read_text(encoding="utf-8").split("| draft | chain length |")[1]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    for (draft, gamma, speed, predicted), row in zip(lines[2:6], cold, strict=True):
        assert row["draft"] == (best if "LK" in draft else draft)
        low, high = row["interval"]
        assert (gamma, predicted) == (str(row["gamma"]), f"{row['predicted']:.2f}")
        assert speed == f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})"
    assert len(cold) == 4 and lines[6] == [""]
    assert f"({record['speed']['prompts']} prompts, " in PAGE.read_text(encoding="utf-8")


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
    _, ratios = table("ratio")
    assert list(ratios) == list(GAINS)
    for name, (*cells, prompts, seeds) in ratios.items():
        found = [
            written(gain)
            for start in starts
            for gain in start["gains"]
            if (gain["better"], gain["worse"]) == GAINS[name]
        ]
        assert cells == found
        assert (prompts, seeds) == ("192", "1")
    _, shares = table("rejections saved, T = 1")
    assert list(shares) == list(GAINS)
    for name, cells in shares.items():
        found = []
        for start in starts:
            alpha = {one["objective"]: one["alpha"]["1"] for one in start["after"]}
            alpha["before"] = start["before"]["alpha"]["1"]
            better, worse = GAINS[name]
            found.append(saved([alpha[better]], [alpha[worse]]))
        assert cells == found


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
    (found,) = claims(PAGE.read_text(encoding="utf-8").split("\n## Languages")[1])
    assert len(found) == 3
    for row in found:
        for name in BEST_OF_LANGUAGES:
            says = row["claim"].replace("samples", "draws").removesuffix(" texts")
            (one,) = (one for one in record["claims"][name] if one["says"] == says)
            assert row[name] == written(one)
        assert (row["n"], row["seeds"]) == (str(record["exam_prompts"]), "1")
    languages, rows = table("rejections saved between texts")
    assert languages == list(BEST_OF_LANGUAGES) and len(rows) == 6
    for words, cells in rows.items():
        claim, temperature = words.split(", T = ")
        better, worse = (
            text.replace(" samples", "").replace(" beams", "").removesuffix(" texts")
            for text in claim.split(" over ")
        )
        kinds = {"4": "draws-4", "8": "beams-8", "greedy": "greedy"}
        for name, cell in zip(languages, cells, strict=True):
            after, before = (
                [
                    run["alpha"][temperature]
                    for run in record["languages"][name]
                    if run["name"].startswith(f"{kinds[kind]}-")
                ]
                for kind in (better, worse)
            )
            assert len(after) == len(before) == 7 and cell == saved(after, before)


def test_what_is_said_of_temperatures_and_languages_is_its_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/languages.json").read_text(encoding="utf-8"))
    languages, rows = table("gain over undistilled")
    assert languages == list(record["languages"]) and len(rows) == 8
    for temperature in (0, 1):
        way = f"chain 8, T = {temperature}"
        for column, (name, runs) in enumerate(record["languages"].items()):
            (before,) = (run["tau"][way] for run in runs if run["objective"] == "none")
            gains = [run["tau"][way] / before for run in runs if run["objective"] != "none"]
            best = mean(run["tau"][way] for run in record["seeds"][name]) / before
            alphas = [run["alpha"][str(temperature)] for run in record["seeds"][name]]
            (plain,) = (r["alpha"][str(temperature)] for r in runs if r["objective"] == "none")
            for words, value in (
                ("mean gain of all settings", f"{mean(gains):.2f}"),
                ("settings that gain", f"{sum(gain > 1 for gain in gains)} of {len(gains)}"),
                ("gain of the best setting", f"{best:.2f}"),
                ("rejections saved by it", saved(alphas, [plain])),
            ):
                assert rows[f"{words}, T = {temperature}"][column] == value
    study = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    runs = {run["name"]: run["tau"] for run in study["runs"]}
    before = runs["undistilled"]
    names = {run["name"] for run in record["languages"]["German"]} - {"undistilled"}
    assert len(names) == 21
    assert all(runs[name][way] > before[way] for name in names for way in before)


def test_the_claims_about_truncation_and_estimators_are_in_their_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/distillbeam.json").read_text(encoding="utf-8"))
    (rows,) = claims((ROOT / "docs/distill.md").read_text(encoding="utf-8"))
    known = {(one["better"], one["worse"]): one for one in record["tails"]}
    assert len(rows) == len(known)
    for row in rows:
        objective, better, worse = re.findall(r"`(\w+)`", row["claim"])
        one = known[f"{objective}, {better}", f"{objective}, {worse}"]
        assert row["here"] == written(one)
        assert row["rejections saved, T = 1"] == saved_by(one)
        assert (row["n"], row["seeds"]) == (str(record["exam_prompts"]), seeds_of(one))


def drafters(model: str) -> dict[str, Any]:
    path = ROOT / f"benchmarks/results/drafters-{model}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_loops_in_the_texts_of_the_drafters_study_are_in_its_records() -> None:
    page = " ".join(TOYS.read_text(encoding="utf-8").split())
    code, ende = (drafters(model)["loop_share"] for model in ("mini-code", "mini-ende"))
    assert f"At T = 0, {100 * code['0']:.0f} % of mini-code's tokens lie in" in page
    assert f"(at T = 1, {100 * code['1']:.0f} %; of mini-ende's 0 % at both)" in page
    assert set(ende.values()) == {0.0}
    tables = (ROOT / "benchmarks/results/drafters-mini-code.md").read_text(encoding="utf-8")
    assert f"{100 * code['0']:.0f} % at T = 0" in tables


def test_what_lies_outside_of_loops_is_in_a_record() -> None:
    record = drafters("mini-code-seeds-1")
    rows = {row["label"]: row for row in record["methods"]["rows"]}
    assert {row["seeds"] for row in rows.values()} == {1}
    _, lines = table("tokens per step at T = 0, all / outside of loops", TOYS)
    assert set(lines) == set(rows) - {"plain", "SpS, EAGLE-2's tree"}
    for name, cells in lines.items():
        tau, decoded = rows[name]["tau"], rows[name]["decoded"]
        assert cells == [
            f"{tau[shape]['0'][0]:.2f} / {decoded[shape]['0']['tau_outside_loops']:.2f}"
            for shape in ("own", "chain")
        ]
    page = " ".join(TOYS.read_text(encoding="utf-8").split())
    assert f"where {100 * record['loop_share']['0']:.0f} % of the target's tokens lie in" in page


def compared(record: Mapping[str, Any], part: str, claim: str, over: str) -> Mapping[str, Any]:
    """The entry of a record that a claim `better over worse` of the page is about."""
    names = claim.replace(OURS, record["combination"]["row"]["label"]).split(" over ")
    better, worse = (re.sub("(?<!,) in stages", ", in stages", name) for name in names)
    (found,) = (
        one
        for one in record[part]["differences"]
        if (one["better"], one["worse"], one["over"]) == (better, worse, over)
    )
    return dict(found)


def test_the_table_of_drafters_is_its_record() -> None:
    record = drafters("mini-code")
    rows = {row["label"]: row for row in record["methods"]["rows"]}
    rows[OURS] = record["combination"]["row"]
    _, lines = table("drafter", TOYS)
    assert len(lines) == 6
    for name, (own, drawn, accuracy, seconds) in lines.items():
        tau = rows[name]["tau"]
        for cell, (value, low, high) in ((own, tau["own"]["0"]), (drawn, tau["drawn"]["1"])):
            assert cell == f"{value:.2f} ({low:.2f} to {high:.2f})"
        first = rows[name]["held_out"]["accuracy"][0]
        assert accuracy == ("" if name == OURS else f"{first:.2f}")
        assert seconds == f"{rows[name]['cpu_seconds']:.0f}"


def test_the_table_of_the_real_model_is_its_record() -> None:
    path = ROOT / "benchmarks/results/smollm2-drafters.json"
    record = json.loads(path.read_text(encoding="utf-8"))

    def both(row: Mapping[str, Any]) -> float:
        return float(row["tokens_per_step"] + row["tokens_per_step_t1"])

    kinds = {row["kind"] for row in record["rows"]}
    best = [max((row for row in record["rows"] if row["kind"] == kind), key=both) for kind in kinds]
    _, lines = table("network", COMPARED)
    assert list(lines) == [row["kind"].upper() for row in sorted(best, key=both, reverse=True)]
    for row in best:
        right = [f"{row['accuracies'][depth]:.2f}" for depth in (0, 1, 2, 4)]
        steps = [f"{row[name]:.2f}" for name in ("tokens_per_step", "tokens_per_step_t1")]
        shown = [str(row["forwards"]), f"{row['learning_rate']:g}", *right, *steps]
        assert lines[row["kind"].upper()] == shown
    page = " ".join(COMPARED.read_text(encoding="utf-8").split())
    data, training = record["data"], record["training"]
    assert f"{data['answer_tokens'] / 1e6:.2f} million tokens to {data['trajectories']:,}" in page
    assert f"those of {training['held_out_prompts']} held-out prompts" in page


def test_the_table_of_the_second_run_is_its_record() -> None:
    path = ROOT / "benchmarks/results/smollm2-drafters-2.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    _, lines = table("of the second run", COMPARED)
    rows = sorted(
        record["rows"], key=lambda row: -(row["tokens_per_step"] + row["tokens_per_step_t1"])
    )
    assert len(lines) == len(rows) == 5
    for row, cells in zip(rows, lines.values(), strict=True):
        assert f"{row['trained_tokens'] / 1e6:.1f} M" in cells[0]
        right = [f"{row['accuracies'][depth]:.2f}" for depth in (0, 1, 2, 4)]
        steps = [f"{row[name]:.2f}" for name in ("tokens_per_step", "tokens_per_step_t1")]
        assert cells[1:] == [*right, *steps]
    (ours,) = (row for row in rows if row["kind"] == "unrolled")
    (hass,) = (row for row in rows if row["kind"] == "hass")
    page = " ".join(COMPARED.read_text(encoding="utf-8").split())
    more = [ours[name] / hass[name] - 1 for name in ("tokens_per_step", "tokens_per_step_t1")]
    assert f"gives {more[0]:.0%} (T = 0) and {more[1]:.0%} (T = 1)".replace("%", " %") in page
    data = record["data"]
    assert f"{data['answer_tokens'] / 1e6:.2f} million tokens ({data['trajectories']:,}" in page
    assert f"own {record['training']['held_out_prompts']} held-out prompts" in page


@pytest.mark.parametrize(
    ("kind", "file", "count"), [("hass", "", 42), ("unrolled", "-unrolled-zen4", 36)]
)
def test_the_card_of_the_real_models_layer_is_its_record(kind: str, file: str, count: int) -> None:
    path = ROOT / f"benchmarks/results/smollm2-speeds{file}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    card = ROOT / "models/smollm2" / kind / "README.md"
    named = {
        "`suffix`": "suffix",
        "this layer": kind,
        "this layer, draws": f"{kind} proposal=sampled",
        "`suffix`, then this layer": f"suffix+{kind}",
    }
    lines = [line.split(" | ") for line in card.read_text(encoding="utf-8").splitlines()]
    seen, weights, heat = 0, "", 0.0
    for cells in (line for line in lines if len(line) > 5 and line[1] in named):
        head = cells[0].strip("| ")
        if head:
            weights, heat = head.partition(",")[0], float(head.partition(", ")[2][:1])
        given = {
            row["suite"]: row
            for row in rows
            if (row["weights"], row["drafter"], row["temperature"])
            == ({"Q4_1": "auto", "bfloat16": "bf16"}[weights], named[cells[1]], heat)
        }
        for suite, cell in zip(("HumanEval", "GSM8K", "MT-bench"), cells[2:5], strict=True):
            row = given[suite]
            low, high = row["speedup_ci95"]
            tau, outside = (
                row[f"decode_tokens_per_step{where}"] for where in ("", "_outside_loops")
            )
            wanted = f"{row['speedup']:.2f} ({low:.2f} to {high:.2f}), {tau:.2f} / {outside:.2f}"
            assert cell == wanted, (weights, heat, cells[1], suite)
            seen += 1
        speeds = ["speedup", "speedup_outside_loops"][: 1 + (kind == "unrolled")]
        means = [f"{mean(row[one] for row in given.values()):.2f}" for one in speeds]
        assert cells[5].strip("| ") == " / ".join(means)
    assert seen == len(rows) == count


def test_the_claims_about_drafters_are_in_their_records() -> None:
    across, trained = claims(TOYS.read_text(encoding="utf-8"))
    assert (len(across), len(trained)) == (9, 6)
    for row in across:
        claim, over = row["claim"].split(", ", 1)
        part = "combination" if OURS in claim else "methods"
        for model in MODELS:
            record = drafters(model)
            one = compared(record, part, claim, OVER[over])
            assert row[model] == written(one) and row["seeds"] == seeds_of(one)
            assert row["n"] == str(record["amounts"]["final_prompts"])
    record = drafters("mini-code")
    for row in trained:
        part = "longer" if ": " in row["claim"] else "stages"
        claim = row["claim"].removeprefix("4 times the steps: ")
        one = compared(record, part, claim, OVER["all shapes"])
        assert row["here"] == written(one) and row["seeds"] == seeds_of(one)
    assert record["longer"]["steps"] == 4 * record["amounts"]["steps"]
    seconds = {row["label"]: f"{row['cpu_seconds']:.0f}" for row in record["longer"]["rows"]}
    page = " ".join(TOYS.read_text(encoding="utf-8").split())
    assert (
        f"EAGLE-2 needs {seconds['EAGLE-2']} CPU seconds for it, GRIFFIN {seconds['GRIFFIN']}"
        in page
    )
    own = [row["tau"]["own"]["0"][0] for row in record["longer"]["rows"]]
    assert f"all four have {min(own):.2f} to {max(own):.2f} tokens per step" in page
    drawn = {row["label"]: f"{row['tau']['drawn']['1'][0]:.2f}" for row in record["longer"]["rows"]}
    assert (
        "({} and {}; HASS {}, GRIFFIN {})".format(
            *(drawn[name] for name in ("FSPAD", "EAGLE-2", "HASS", "GRIFFIN"))
        )
        in page
    )


def test_the_table_of_forwards_is_its_record() -> None:
    """The top-10 term is what HASS with one forward has and EAGLE-2 has not."""
    record = drafters("mini-code")
    rows = {row["label"]: row for row in record["methods"]["rows"]}
    rows |= {row["label"]: row for row in record["ablations"]["rows"]}
    _, lines = table("trained", TOYS)
    assert len(lines) == 7
    for name, (term, first, fifth, own, seconds, prompts, seeds) in lines.items():
        row = rows[name]
        assert term == ("yes" if drafter_class(row["kind"]).loss_weights.top else "no")
        right = row["held_out"]["accuracy"]
        assert [first, fifth] == [f"{right[0]:.2f}", f"{right[4]:.2f}"]
        assert own == f"{row['tau']['own']['0'][0]:.2f}"
        assert seconds == f"{row['cpu_seconds']:.0f}"
        assert prompts == str(record["amounts"]["final_prompts"])
        assert seeds == str(row["seeds"])


def test_the_table_of_ablations_is_its_record() -> None:
    record = drafters("mini-code")["ablations"]["rows"]
    variants = [row for row in record if row["label"] != row["base"]]
    _, lines = table("variant", TOYS)
    assert len(lines) == len(variants)
    for (name, cells), row in zip(lines.items(), variants, strict=True):
        one = row["against"]
        assert name.removeprefix("GRIFFIN, ") == row["label"].removeprefix("GRIFFIN, ")
        clear = one["low"] > 1 or one["high"] < 1
        assert cells == [written(one), "yes" if clear else "no", "32", str(len(row["by_seed"]))]


def test_the_table_of_texts_and_objectives_is_its_record() -> None:
    grid = drafters("mini-code")["combination"]["grid"]
    _, lines = table("network, by texts", TOYS)
    assert list(lines) == ["FSPAD", "GRIFFIN"] and len(grid) == 30
    for network, (objectives, *cells) in lines.items():
        found = []
        for texts in ("greedy", "draws-4", "beams-4"):
            some = [
                tau[0]
                for name, tau in grid.items()
                if name.startswith(f"{network} ") and name.endswith(f", {texts}")
            ]
            assert len(some) == int(objectives)
            found.append(f"{min(some):.2f} to {max(some):.2f}")
        assert cells == found


def test_speeds_of_drafters_are_those_of_the_clock() -> None:
    record = drafters("mini-code")["timed"]["drafters"]

    def speeds(shape: str, names: Iterable[str]) -> str:
        some = [record[name][shape]["0"]["speedup"] for name in names]
        return f"{min(some):.1f} to {max(some):.1f}x"

    page = " ".join(TOYS.read_text(encoding="utf-8").split())
    four = ("EAGLE-2", "FSPAD", "HASS", "GRIFFIN")
    assert f"({speeds('chain', four)} for EAGLE, FSPAD, HASS and GRIFFIN;" in page
    assert f"their trees {speeds('own', four)})" in page
    assert (
        f"EAGLE-1's tree of 25 nodes reaches {record['EAGLE-1']['own']['0']['speedup']:.1f}x"
        in page
    )
    assert f"prompt lookup {record['PLD']['own']['0']['speedup']:.1f}x" in page
    (ours,) = (name for name in record if name.startswith("ours"))
    learnt = [
        name for name in record if name not in ("PLD", "Lookahead", ours) and "SpS" not in name
    ]
    lost = [100 * (1 - record[name]["chain"]["1"]["speedup"]) for name in learnt]
    gained = record[ours]["chain"]["1"]["speedup"]
    assert f"({gained:.2f}x; all others over hidden states lose " in page
    assert f"lose {round(min(lost), -1):.0f} to {round(max(lost), -1):.0f} %)" in page
    ende = drafters("mini-ende")["timed"]["drafters"]
    some = [two[shape]["0"]["speedup"] for two in ende.values() for shape in ("own", "chain")]
    assert "On mini-ende no drafter gains" in page and max(some) <= 1


def test_the_table_of_the_planner_is_its_record() -> None:
    path = ROOT / "benchmarks/results/planner_validation.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    page = ROOT / "docs/plan.md"
    _, lines = table("draft", page)
    assert len(lines) == len(record["drafts"])

    def milliseconds(latency: Mapping[str, Any]) -> str:
        return "{:.2f} ± {:.2f}".format(*(1000 * one for one in latency["tpot"]))

    for (name, cells), draft in zip(lines.items(), record["drafts"], strict=True):
        assert name == f"{draft['params'] / 1e6:.2f} M"
        perplexity, alpha, *predicted, tokens, tpot = cells
        assert perplexity == f"{draft['ppl']:.0f}"
        assert alpha == f"{draft['alpha']:.2f} ({draft['alpha_by_the_others']:.2f})"
        for model, best, there in (
            ("by_parameters", *predicted[:2]),
            ("by_costs", *predicted[2:]),
        ):
            length, speedup = draft[model]["length"], draft[model]["speedup"]
            assert best == f"{length}: {speedup:.2f}"
            measured = draft["measured"][str(length)]
            low, high = measured["speedup_ci95"]
            assert there == f"{measured['speedup']:.2f} ({low:.2f} to {high:.2f})"
        there = draft["measured"][str(draft["by_costs"]["length"])]
        outside = there["tokens_per_step_outside_loops"]
        assert tokens == f"{there['tokens_per_step']:.2f} / {outside:.2f}"
        assert tpot == milliseconds(there["latency"])
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert f"which takes {milliseconds(record['target']['latency'])} ms per token" in text
    costs = [draft["cost_measured"] for draft in record["drafts"]]
    sizes = [draft["cost_by_parameters"] for draft in record["drafts"]]
    by_size, by_clock = (f"{min(some):.2f} to {max(some):.2f}" for some in (sizes, costs))
    assert f"({by_size}) | assumed | {by_clock} for" in text
    more = [
        100 * (one["predicted_by_the_steps_taken"] / one["speedup"] - 1)
        for draft in record["drafts"]
        for one in draft["measured"].values()
    ]
    assert f"costs promise {min(more):.0f} to {max(more):.0f} % more" in text
    best = (record["optimum"][by]["params"] / 1e6 for by in ("parameters", "costs"))
    assert "N\\* is {:.2f} M by N / M and {:.2f} M by measured costs".format(*best) in text
    drafts = {draft["name"]: draft for draft in record["drafts"]}
    (share,) = {
        one["loop_share"] for draft in drafts.values() for one in draft["measured"].values()
    }
    assert f"lie {share:.0%}".replace("%", " %") + " of the target's tokens" in text
    best = record["best_of_the_five"]
    assert best["by_parameters"] == best["by_costs"] == best["by_the_clock"] == "h128"
    assert best["tied_by_the_clock"] == ["h192"]
    rows = {row["claim"]: row["here"] for row in claims(page.read_text(encoding="utf-8"))[-1]}

    def measured(length: int) -> str:
        one = drafts["h128"]["measured"][str(length)]
        return "{:.2f}x ({:.2f} to {:.2f})".format(one["speedup"], *one["speedup_ci95"])

    by_size, by_costs = (drafts["h128"][by] for by in ("by_parameters", "by_costs"))
    row = rows["N / M chooses the fastest of the five"]
    assert f"0.89 M with {by_size['length']} tokens and promises {by_size['speedup']:.2f}x" in row
    assert measured(by_size["length"]) in row
    row = rows["measured costs choose the fastest of the five"]
    assert f"0.89 M with {by_costs['length']} tokens, {measured(by_costs['length'])}" in row
    ratios = dict(best["faster_than"])
    tied = ratios.pop("h192")
    assert "{:.2f} times as fast as 1.57 M ({:.2f} to {:.2f})".format(
        tied["ratio"], *tied["ci95"]
    ) in (row)
    others = [one["ratio"] for one in ratios.values()]
    assert f"{min(others):.2f} to {max(others):.2f} times as fast as the others" in row
    smallest = drafts["h32"]["by_parameters"]
    row = rows["N / M names the best length"]
    assert f"{smallest['length']} tokens it promises {smallest['speedup']:.2f}x" in row
    assert drafts["h32"]["measured"][str(smallest["length"])]["speedup"] < 1 / 5
    compiled = sorted(draft["cost_measured"] for draft in drafts.values())[:-1]
    assert f"{compiled[0]:.2f} to {compiled[-1]:.2f} without the one in PyTorch" in text


def test_the_residuals_of_the_papers_tables_are_those_on_the_page() -> None:
    pytest.importorskip("statsmodels")
    page = ROOT / "docs/plan.md"
    _, lines = table("table", page)
    counted = {number: counts(number) for number in (3, 4, 8, 9)}
    optima = tables.paper_table(5).rows
    counted |= {
        f"5, {shown}": (
            len(optima),
            sum(tables.agrees(str(row[f"{name} printed"]), float(row[name])) for row in optima),
        )
        for shown, name in (("N\\*", "n_opt"), ("𝒯", "throughput"))
    }
    found = {name: (int(cells[0]), int(cells[1])) for name, cells in lines.items()}
    assert found == {str(name): numbers for name, numbers in counted.items()}
    worst = max(abs(float(row["relative residual"])) for row in optima)
    assert lines["5, N\\*"][2].startswith(f"{worst:.1e}".replace("e-0", "e-"))
    worst = max(abs(float(row["residual"])) for row in tables.paper_table(4).rows)
    assert lines["4"][2].startswith(f"{worst:.1e}".replace("e-0", "e-"))


def counts(number: int) -> tuple[int, int]:
    """Printed values of a table, and those that are ours to the last digit, by its note."""
    (said,) = (note for note in tables.paper_table(number).notes if "to the last digit" in note)
    exact, compared = re.findall(r"[0-9]+", said)[:2]
    return int(compared), int(exact)


def live(name: str) -> dict[str, Any]:
    path = ROOT / f"benchmarks/results/live_{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_claims_about_live_translation_are_in_their_records() -> None:
    (rows,) = claims((ROOT / "docs/live.md").read_text(encoding="utf-8"))
    assert len(rows) == 6
    for column, name in (("shipped", "flores"), ("trained on prefixes", "beginnings")):
        record = live(name)
        known = {
            (one["method"], one["bias"], one["mask_k"]): one
            for one in record["rows"]
            if one["mask"] == "display"
        }
        before, half = known["ar", None, 0], known["ssbd", 0.5, 0]
        biased, hidden = known["ssbd", 0.2, 0], known["ssbd", 0.2, 5]

        def quality(after: Mapping[str, Any], before: Mapping[str, Any] = before) -> str:
            pairs = ((shown, before[name], after[name]) for name, shown in QUALITY.items())
            return ", ".join(f"{shown} {old:.1f} to {new:.1f}" for shown, old, new in pairs)

        assert [row[column] for row in rows] == [
            f"{biased['speedup']:.2f}",
            quality(biased),
            f"{100 * (biased['ne'] / before['ne'] - 1):.0f} %",
            f"{100 * (hidden['ne'] / before['ne'] - 1):.0f} %",
            f"NE {half['ne']:.2f}",
            quality(half),
        ]
    assert {row["n"] for row in rows} == {f"{live('flores')['sentences']}; 100"}
    assert live("beginnings")["sentences"] == 100


def test_the_shipped_models_table_of_live_translation_is_its_record() -> None:
    record = live("flores")

    def shown(one: Mapping[str, Any], name: str, digits: int) -> str:
        value, low, high = (f"{one[name + end]:.{digits}f}" for end in ("", "_low", "_high"))
        return f"{value} ({low} to {high})"

    _, lines = table("the shipped model", ROOT / "docs/live.md")
    assert len(lines) == 10
    for name, cells in lines.items():
        rows = record["rewriting" if name.startswith("rewrites") else "rows"]
        hidden = re.search(r"(\d) hidden", name)
        bias = re.search(r"bias ([\d.]+)", name)
        (one,) = (
            row
            for row in rows
            if row["mask_k"] == (int(hidden[1]) if hidden else 0)
            and row["mask"] == ("draft" if "not drafted" in name else "display")
            and row["bias"] == (float(bias[1]) if bias else None)
        )
        assert cells == [
            shown(one, "speedup", 2),
            shown(one, "ne", 2),
            f"{one['ne_words']:.2f}",
            f"{one['ne_tokens']:.2f}",
            shown(one, "chrf", 1),
            shown(one, "bleu", 1),
        ]
    drafted, left = (
        next(
            row
            for row in record["rows"]
            if (row["bias"], row["mask_k"], row["mask"]) == (0.5, 5, mask)
        )
        for mask in ("display", "draft")
    )
    page = " ".join((ROOT / "docs/live.md").read_text(encoding="utf-8").split())
    for name, digits, words in (("speedup", 2, "cost speed,"), ("chrf", 1, "save quality, chrF")):
        assert f"{words} {shown(left, name, digits)} in place of" in page
        assert f"in place of {shown(drafted, name, digits)}" in page


def test_the_tables_of_live_translation_are_their_records() -> None:
    page = ROOT / "docs/live.md"
    _, lines = table("after the divergence", page)
    behind = [live(name)["behind"].values() for name in ("flores", "beginnings")]
    assert list(lines.values()) == [
        [f"{one['speedup']:.2f}" for one in two] for two in zip(*behind, strict=True)
    ]
    record = live("prefixes")["rows"]
    _, lines = table("", page)
    models = {"as shipped": "shipped", "whole pairs": "whole", "with prefixes": "beginnings"}
    assert len(lines) == 6
    for name, cells in lines.items():
        text, model = name.split(", ")
        known = {
            (one["method"], one["bias"], one["mask_k"]): one
            for one in record
            if (one["text"], one["model"]) == (text, models[model])
        }
        before, biased, hidden = known["ar", None, 0], known["ssbd", 0.2, 0], known["ssbd", 0.2, 5]
        assert cells == [
            f"{100 * biased['ad']:.0f}%",
            *(f"{one['ne']:.2f}" for one in (before, biased, hidden)),
            f"{biased['chrf']:.1f} ({before['chrf']:.1f})",
        ]


def test_the_table_of_the_length_policy_is_its_record() -> None:
    def written_loss(one: Mapping[str, Any]) -> str:
        loss, low, high = (100 * one[name] for name in ("loss", "loss_low", "loss_high"))
        return f"{loss:+.1f} % ({low:+.1f} to {high:+.1f})"

    records = [
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        for name in ("controller", "controller-griffin")
    ]
    kinds = {"prompt_lookup": 0, "lookahead": 0, "independent": 0, "useless": 0, "griffin": 1}
    page = ROOT / "docs/tune.md"
    _, lines = table("drafter", page)
    for (name, cells), (kind, at) in zip(lines.items(), kinds.items(), strict=True):
        assert kind in name
        some = [one for one in records[at]["verdicts"] if one["drafter"] == kind]
        (mixed,) = (one for one in some if one["prompts"] == "mixed")
        sets = [one for one in some if one is not mixed]
        worst = max(sets, key=lambda one: float(one["loss"]))
        said = [written_loss(worst), worst["prompts"], written_loss(mixed)]
        assert cells == [*said, str(records[at]["prompts"]), "1"] and len(sets) == 7
    cold = [
        -100 * one["loss"] for one in records[1]["verdicts"] if one["prompts"].endswith("T = 0")
    ]
    assert len(cold) == 3
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert f"gains {min(cold):.0f} to {max(cold):.0f} % over its best length" in text


def test_no_constant_of_the_length_policy_matters_much() -> None:
    path = ROOT / "benchmarks/results/controller_constants.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    as_it_is = mean(record.pop("as it is")["texts"].values())
    others = [
        one["texts"]["mean"] for one in record.values() if isinstance(one, dict) and "texts" in one
    ]
    assert len(others) > 30 and max(abs(other - as_it_is) for other in others) <= 0.006


def claims(section: str) -> list[list[dict[str, str]]]:
    """The tables of claims in a section: lines as cells by the names of their columns."""
    found = []
    for part in re.split(r"\n(?=\| claim)", section)[1:]:
        names, _, *rest = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in part.split("\n\n")[0].splitlines()
        )
        found.append([dict(zip(names, cells, strict=True)) for cells in rest])
    return found


def seeds_of(one: Mapping[str, Any]) -> str:
    """Trainings of the side that has fewer; the undistilled draft is not trained."""
    better, worse = one["seeds"]
    return str(better if one["worse"] == "undistilled" else min(better, worse))


def saved_by(claim: Mapping[str, Any]) -> str:
    return f"{100 * claim['rejections_saved']['1']:.1f} %"


def written(claim: Mapping[str, Any]) -> str:
    return f"{claim['ratio']:.3f} ({claim['low']:.3f} to {claim['high']:.3f})"


def table(corner: str, page: Path = PAGE) -> tuple[list[str], dict[str, list[str]]]:
    """The names of the columns, and the cells of each line by its name."""
    text = page.read_text(encoding="utf-8")
    lines = text.split(f"\n| {corner} |" if corner else "\n| |")[1].split("\n\n")[0].splitlines()
    names, _, *rest = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return names, {row[0]: row[1:] for row in rest}


def test_no_text_of_the_record_differs() -> None:
    path = ROOT / "benchmarks/results/smollm2-equality.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {(row["prompts"], row["rows_at_once"]) for row in rows} == {(200, 8)}
    assert {row["texts_that_differ"] for row in rows} == {0}
    assert all(row["engine"].startswith("compiled") for row in rows)
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["weights"], set()).add(row["drafter"])
    trees, chains = {"eagle", "fspad", "griffin"}, {"medusa", "eagle3", "parallel", "recycling"}
    own = {"prompt_lookup", "suffix", "lookahead", "draft-model", "hass", "suffix+hass"}
    assert found["w8a8"] == {*own, *trees, *chains}
    assert {row["drafter"] for row in rows if row["draft"] == "chain of 4"} == chains
    assert found["auto"] == {"suffix", "hass", "suffix+hass"}
    assert {row["tokens"] for row in rows if row["weights"] == "w8a8"} == {21_925}
    page = ROOT / "docs/losslessness.md"
    _, lines = table("weights", page)
    assert set(lines) == {f"`{name}`" for name in found}
    assert "21,925 in all with `w8a8`" in page.read_text(encoding="utf-8")


def test_the_price_of_a_fixed_width_is_in_its_record() -> None:
    path = ROOT / "benchmarks/results/smollm2-fixed-width.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["drafter"]: row for row in record["rows"]}
    text = " ".join((ROOT / "docs/losslessness.md").read_text(encoding="utf-8").split())

    def price(drafter: str, seconds: str, sign: str = "") -> str:
        found = rows[drafter][seconds]
        more, low, high = (round(100 * (one - 1)) for one in (found["ratio"], *found["ci95"]))
        return f"{more} %{sign} ({low} to {high})"

    mean = round(record["prompt_tokens"] / record["prompts"])
    assert f"{record['prompts']} prompts of {mean} tokens" in text
    assert f"behind the prompt {price('hass', 'seconds_behind_prompts', ' more time')}" in text
    assert f"of the whole text {price('hass', 'seconds')}" in text
    said = price("plain", "seconds_behind_prompts", " more behind the prompt")
    assert f"Plain decoding, which feeds one token, takes {said}" in text
    assert record["texts_that_differ"] == {"free": 0, "fixed": 0}


BLOCK = json.loads((ROOT / "benchmarks/results/block-rule.json").read_text(encoding="utf-8"))
PAIRS_OF_BLOCK = {"mini-code", "mini-ende", "smollm2-unrolled", "smollm2-hass"}


def test_block_accepts_no_less_than_rejection_in_any_row_of_its_record() -> None:
    rows = BLOCK["rows"]
    found = {(row["pair"], row["temperature"], row["length"]) for row in rows}
    assert found == set(itertools.product(PAIRS_OF_BLOCK, (0.6, 1.0, 1.3), (2, 3, 5, 8)))
    assert len(found) == len(rows)
    for row in rows:
        assert row["block"] > row["rejection"], row
        assert 1 < row["accepted_ci95"][0] <= row["accepted"] <= row["accepted_ci95"][1], row
        assert row["accepted"] == pytest.approx(row["block"] / row["rejection"], abs=2e-4)
        more = (1 + row["block"]) / (1 + row["rejection"])
        assert row["tokens_per_step"] == pytest.approx(more, abs=2e-4)


def test_the_gain_of_block_is_in_its_record() -> None:
    text = " ".join((ROOT / "docs/losslessness.md").read_text(encoding="utf-8").split())

    def more(pairs: str, length: int, what: str = "accepted") -> str:
        each = [
            100 * (row[what] - 1)
            for row in BLOCK["rows"]
            if row["pair"].startswith(pairs) and row["length"] == length
            if row["temperature"] <= 1
        ]
        low, high = round(min(each)), round(max(each))
        return f"{low} to {high}" if low < high else f"{low}"

    three, five, eight = (more("mini-code", length) for length in (3, 5, 8))
    assert f"{three} % more drafted tokens of chains of three, {five} % of five and" in text
    assert f" and {eight} % of eight (temperature 0.6 and 1;" in text
    two, three, five, eight = (more("smollm2", length) for length in (2, 3, 5, 8))
    assert f"{two} % of two, {three} % of three, {five} % of five and {eight} % of eight" in text
    two, three, five, eight = (
        more("smollm2", length, "tokens_per_step") for length in (2, 3, 5, 8)
    )
    assert f"which is {two}, {three}, {five} and {eight} % more tokens per step" in text
    prompts = {row["pair"]: row["prompts"] for row in BLOCK["rows"]}
    assert f"{prompts['mini-code']} prompts" in text
    assert f"({prompts['smollm2-hass']} prompts)" in text


def test_the_table_of_draft_costs_is_its_record() -> None:
    path = ROOT / "benchmarks/results/smollm2-draft-costs.json"
    found: dict[str, list[str]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if row["weights"] == "w8a8":
            continue
        name = row["draft"] + (", draws at T = 1" if row["temperature"] else "")
        cells = [f"{row['milliseconds']:.1f}"]
        if row["engine"] == "compiled":
            cells.append(f"{row['of_a_token']:.2f}")
        found.setdefault(name, []).extend(cells)
    _, lines = table("draft", ROOT / "docs/engine.md")
    assert lines == found


def said(page: str) -> str:
    """The words of a page, whatever its lines are."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def result(name: str) -> dict[str, Any]:
    path = ROOT / f"benchmarks/results/{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_what_is_said_of_wide_forwards_is_in_the_record() -> None:
    costs = result("engine")["costs"]
    others = ("transformers, bf16", "transformers, float32", "llama.cpp, Q4_1")
    own = [costs[name] for name in costs if name not in others]
    assert len(own) == 5

    def times(line: Mapping[str, float], width: int) -> str:
        return f"{line[str(width)] / line['1']:.2f}"

    def spread(width: int) -> str:
        every = sorted(times(line, width) for line in own)
        return f"{every[0]} to {every[-1]} times one"

    text = said("docs/choose-a-drafter.md")
    assert f"eight tokens cost {spread(8)} in draftsmith's engine" in text
    half, single = (times(costs[name], 8) for name in others[:2])
    assert f"code {half} times in bfloat16 and {single} times in float32" in text
    assert f"twelve tokens cost {spread(12)}" in said("docs/drafters/recycling.md")


def test_what_is_said_of_drafts_in_one_forward_is_in_the_records() -> None:
    """A block of `parallel` and Medusa's heads beside a chain of HASS: what they cost, and what
    they bring."""
    shares = {
        (row["draft"], row["weights"]): f"{row['of_a_token']:.2f}"
        for row in result("smollm2-draft-costs")["rows"]
        if row["engine"] == "compiled" and not row["temperature"]
    }
    block, chain, heads = (
        [shares[draft, weights] for weights in ("auto", "bf16")]
        for draft in ("parallel, chain of 7", "hass, chain of 5", "medusa, chain of 4")
    )
    assert f"they cost {block[0]} of a token where a chain of five costs {chain[0]}" in said(
        "docs/choose-a-drafter.md"
    )
    page = said("docs/drafters/parallel.md")
    assert (
        f"costs {block[0]} of a forward of one token in Q4_1 and {block[1]} in bfloat16, a chain "
        f"of five by [HASS](hass.md) {chain[0]} and {chain[1]}"
    ) in page
    assert (
        f"costs {heads[0]} of a forward of one token in Q4_1 and {heads[1]} in bfloat16, a chain "
        f"of five by HASS {chain[0]} and {chain[1]}"
    ) in said("docs/drafters/medusa.md")
    rows = result("griffin-table")["rows"]
    (cold, warm), (hass_cold, hass_warm) = (
        [
            f"{row['mean']:.2f}"
            for heat in (0, 1)
            for row in rows
            if (row["method"], row["temperature"]) == (method, heat)
        ]
        for method in ("parallel", "HASS")
    )
    assert (
        f"it has {cold} tokens per step at T = 0 and {warm} at T = 1, HASS with as many trained "
        f"tokens (of another store) {hass_cold} and {hass_warm}"
    ) in page
    learnt = {row["trained_tokens"] for row in rows if row["method"] in ("parallel", "HASS")}
    assert len(learnt) == 1
    means = equal_means()
    for heat in (0, 1):
        layers = ("unrolled (ours)", "FSPAD", "HASS", "GRIFFIN", "EAGLE-2")
        assert all(means[name, heat] > means["Medusa", heat] for name in layers)


def equal_means() -> dict[tuple[str, int], float]:
    """Tokens per step by method and temperature, of what learnt from equal data."""
    return {
        (row["method"], int(row["temperature"])): row["mean"]
        for row in result("griffin-equal")["rows"]
    }


def test_cards_of_drafters_say_what_equal_data_showed() -> None:
    means = equal_means()

    def more(better: str, worse: str) -> str:
        gains = [means[better, heat] / means[worse, heat] - 1 for heat in (0, 1)]
        assert min(gains) > 0
        return "{} at T = 0 and {}".format(*(f"{100 * gain:.1f} %" for gain in gains))

    ours = griffin_table.OURS
    griffin, fspad = said("docs/drafters/griffin.md"), said("docs/drafters/fspad.md")
    assert f"HASS, the next one, {more('HASS', 'GRIFFIN')} at T = 1" in griffin
    assert f"`unrolled` {more(ours, 'GRIFFIN').replace(' at T = 0', '')} (" in griffin
    cold, warm = more("FSPAD", "HASS").split(" at T = 0 and ")
    assert f"{cold} more tokens per step than [HASS](hass.md) at T = 0 and {warm} more" in fspad
    toys = [
        (ROOT / f"benchmarks/results/drafters-{model}.md").read_text(encoding="utf-8")
        for model in MODELS
    ]
    code, translation = (
        float(re.findall(r"\| GRIFFIN / HASS \| all shapes[^|]*\| ([\d.]+) ", text)[0]) - 1
        for text in toys
    )
    assert abs(code) < 0.02
    assert f"level with HASS on code, and {100 * translation:.0f} % ahead on translation" in griffin
    assert f"ahead of it, by {more(ours, 'FSPAD').replace(' at T = 0', '')} (" in fspad
    refused = {
        (row["method"], row["temperature"], at): mean(
            suite["refused"][at] for suite in row["suites"].values()
        )
        for row in result("griffin-equal")["rows"]
        for at in (0, 4)
        if row["method"] in ("FSPAD", "HASS", "GRIFFIN", ours)
    }
    for heat, other in itertools.product((0, 1), ("HASS", "GRIFFIN", ours)):
        assert refused["FSPAD", heat, 0] < refused[other, heat, 0]
        assert refused["FSPAD", heat, 4] > refused[other, heat, 4]


def test_two_turns_of_a_chat_count_where_pages_count_prompts() -> None:
    """Records count turns: MT-bench has two."""
    for name, prompts in (
        ("smollm2-speeds", 8),
        ("smollm2-speeds-unrolled-zen4", 8),
        ("smollm2-speeds-unrolled-zen4-40", 40),
        ("smollm2-speeds-unrolled-avx2", 8),
        ("smollm2-speeds-unrolled-avx2-24", 24),
        ("smollm2-speeds-unrolled-avx512", 8),
        ("smollm2-speeds-unrolled-avx512-40", 40),
    ):
        counts = {(row["suite"], row["prompts"]) for row in result(name)["rows"]}
        assert counts == {("HumanEval", prompts), ("GSM8K", prompts), ("MT-bench", 2 * prompts)}
    said_of_eight = "ight prompts of each suite, of MT-bench both turns"
    for page in ("README.md", "models/smollm2/hass/README.md", "models/smollm2/unrolled/README.md"):
        assert said_of_eight in said(page)
    assert "(eight to 40 prompts a suite, of MT-bench both turns" in said(
        "docs/drafters-compared.md"
    )
    drawn: dict[str, list[float]] = {"bf16": [], "auto": []}
    for name in ("avx2", "avx2-24", "avx512", "avx512-40", "zen4", "zen4-40"):
        rows = [
            row
            for row in result(f"smollm2-speeds-unrolled-{name}")["rows"]
            if (row["drafter"], row["temperature"]) == ("unrolled", 1.0)
        ]
        for weights in sorted({row["weights"] for row in rows}):
            some = [row["speedup"] for row in rows if row["weights"] == weights]
            drawn[weights].append(round(mean(some), 2))
    assert (
        f"with draws, 1.29 to {max(drawn['bf16']):.2f} of plain decoding in bfloat16 and "
        f"{min(drawn['auto']):.2f} to {max(drawn['auto']):.2f} in Q4_1"
    ) in said("docs/drafters-compared.md")
    for machine, sentence in (
        (
            "avx512",
            "`suffix` has {} times plain decoding, `unrolled` {} and both together {}; outside of "
            "loops {}, {} and {}.",
        ),
        (
            "zen4",
            "On an AMD EPYC with AVX-512 (Zen 4) they have {}, {} and {}; outside of loops {}, {} "
            "and {}.",
        ),
    ):
        cold = [
            [
                row
                for row in result(f"smollm2-speeds-unrolled-{machine}")["rows"]
                if key == (row["weights"], row["temperature"], row["drafter"])
            ]
            for key in (("auto", 0.0, name) for name in ("suffix", "unrolled", "suffix+unrolled"))
        ]
        assert [len(rows) for rows in cold] == [3] * 3
        speeds = [
            f"{mean(row[name] for row in rows):.2f}"
            for name in ("speedup", "speedup_outside_loops")
            for rows in cold
        ]
        assert sentence.format(*speeds) in said("README.md")
    loops = [
        row["loop_share"]
        for row in result("peers")["rows"]
        if row["engine"] == "openvino" and row["weights"].startswith("Q4_1")
    ]
    assert f"of which {100 * min(loops):.0f} to {100 * max(loops):.0f} % lie in" in said(
        "README.md"
    )


def test_the_card_says_how_fast_the_layer_is_outside_of_loops_on_a_processor_without_tiles() -> (
    None
):
    found: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {}
    for row in result("smollm2-speeds-unrolled-avx512")["rows"]:
        key = {"auto": "Q4_1", "bf16": "bfloat16"}[row["weights"]], row["temperature"]
        found.setdefault(key, {}).setdefault(row["drafter"], []).append(row)
    text = (ROOT / "models/smollm2/unrolled/README.md").read_text(encoding="utf-8")
    assert len(found) == 4
    for (weights, temperature), drafters in found.items():
        cells = [
            f"{mean(r['speedup'] for r in rows):.2f} / "
            f"{mean(r['speedup_outside_loops'] for r in rows):.2f}"
            for rows in (drafters[name] for name in ("suffix", "unrolled", "suffix+unrolled"))
        ]
        assert f"| {weights} | {temperature:g} | {' | '.join(cells)} |" in text
    longer = {
        1: ("unrolled draw_length=3", "There this layer has {} in bfloat16"),
        0: ("suffix+unrolled unrolled.length=8 unrolled.confidence=0.3", "behind `suffix` ({})."),
    }
    for temperature, (name, sentence) in longer.items():
        rows = found["bfloat16", temperature][name]
        both = [mean(row[key] for row in rows) for key in ("speedup", "speedup_outside_loops")]
        assert sentence.format(" / ".join(f"{one:.2f}" for one in both)) in text
    for machine in ("avx512", "zen4"):
        more = result(f"smollm2-speeds-unrolled-{machine}-40")["rows"]
        assert {(row["drafter"], row["temperature"]) for row in more} == {("unrolled", 1.0)}
        brief, four_bits = (
            f"{mean(row['speedup'] for row in more if row['weights'] == weights):.2f}"
            for weights in ("bf16", "auto")
        )
        said_of_forty = f"at temperature 1 {brief} in bfloat16 and {four_bits} in Q4_1"
        assert said_of_forty in said("models/smollm2/unrolled/README.md")


def test_the_page_says_how_fast_drafters_learn_on_the_real_model() -> None:
    found = result("smollm2-training-speed")
    speed = {row["kind"]: f"{row['tokens_per_second']:,.0f}" for row in found["learning"]}
    page = said("docs/drafters-compared.md")
    learn = [speed[kind] for kind in ("fspad", "hass", "griffin", "unrolled")]
    assert f"they learn {', '.join(learn[:3])} and {learn[3]} (" in page
    assert f"writes {found['collecting']['tokens_per_second']:,.0f} tokens a second" in page


def test_the_page_has_what_auto_loses_to_the_best_fixed_length() -> None:
    rows = result("smollm2-auto")["rows"]
    page = (ROOT / "docs/tune.md").read_text(encoding="utf-8")
    found = page.partition("<!-- auto:begin -->\n")[2].partition("<!-- auto:end -->")[0]
    assert found.splitlines() == smollm2_auto.table(rows).splitlines()
    text = said("docs/tune.md")
    alone = [row["auto_over_best"] for row in rows if row["rows"] == 1]
    assert len(alone) == 6 and min(alone) >= 0.95, "the page says so"
    assert (
        f"One text at a time, `auto` has {min(alone):.2f} to {max(alone):.2f} of the best fixed "
        "length."
    ) in text
    four = [row for row in rows if (row["weights"], row["rows"]) == ("auto", 4)]
    plain, best = ([row[of] for row in four] for of in ("auto", "auto_over_best"))
    assert len(four) == 6 and min(best) >= 0.95, "the page says so"
    assert sum(one < 0.98 for one in plain) == 5 and "five sets of six are below" in text
    assert f"`auto` has {min(plain):.2f} to {max(plain):.2f} of plain decoding" in text
    brief = [row["auto_over_best"] for row in rows if row["weights"] == "bf16"]
    assert f"`auto` has {min(brief):.2f} to {max(brief):.2f} of the best." in text
    groups = {
        (row["weights"], row["rows"], row["temperature"]): row["rows"] * row["groups"]
        for row in rows
    }
    assert groups == {
        **{("auto", 1, 0.0): 12, ("auto", 1, 1.0): 48},
        **{
            (weights, 4, heat): count
            for weights, count in (("auto", 48), ("bf16", 24))
            for heat in (0.0, 1.0)
        },
    }


def test_the_missed_bar_of_the_length_policy_is_its_record() -> None:
    found: dict[str, list[float]] = {}
    for row in result("griffin-table")["rows"]:
        if row["speed"] and row["method"] != "EAGLE-1":  # one drafter in two trees: one speed
            assert row["drafts"] == "--draft-length auto"
            name = row["method"].removesuffix("-2")
            found.setdefault(name, []).append(mean(one["speedup"] for one in row["speed"].values()))
    page = ROOT / "docs/tune.md"
    _, lines = table("drafts of `auto`", page)
    assert lines == {name: [f"{one:.2f}" for one in both] for name, both in found.items()}
    learnt = ("FSPAD", "HASS", "EAGLE", "GRIFFIN", "SpS", "Medusa")
    losses = [100 * (1 - found[name][1]) for name in learnt]
    assert f"what learns loses {min(losses):.0f} to {max(losses):.0f} %" in said("docs/tune.md")
    assert min(min(both) for both in found.values()) < 0.98, "the bar is met: say so"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("griffin", readme.griffin()),
        ("shipped", readme.griffin("griffin-shipped.json")),
        ("equal", readme.griffin("griffin-equal.json")),
        ("again", readme.griffin("griffin-equal-2.json")),
        ("order", readme.griffin_order()),
        ("order-again", readme.griffin_order("griffin-order-2.json")),
        ("stages", readme.griffin_stages()),
    ],
)
def test_tables_of_griffins_paper_are_their_records(name: str, lines: Iterable[str]) -> None:
    text = COMPARED.read_text(encoding="utf-8")
    found = text.partition(f"<!-- {name}:begin -->\n")[2].partition(f"<!-- {name}:end -->")[0]
    assert found.splitlines() == list(lines) != []


def test_the_figure_of_griffins_paper_shows_the_record() -> None:
    rows = result("griffin-equal-2")["rows"]
    exact = [row for row in rows if row["method"] != "Medusa (typical)"]
    panels = figures.methods(rows).axes
    shown = {0.0: panels[0], 1.0: panels[1]}
    order = sorted((row for row in exact if not row["temperature"]), key=lambda row: -row["mean"])
    labels = [text.get_text() for text in panels[0].get_yticklabels()]
    assert labels == [row["method"] for row in reversed(order)]
    for heat, axis in shown.items():
        assert axis.get_title() == f"T = {heat:g}" and axis.get_xlabel() == "tokens per step"
        found = {row["method"]: row["mean"] for row in exact if row["temperature"] == heat}
        marks = [line for line in axis.lines if line.get_label() == "mean"]
        drawn = {labels[int(line.get_ydata()[0])]: line.get_xdata()[0] for line in marks}
        assert drawn == pytest.approx(found, abs=1e-4)
    assert (ROOT / "docs/drafters-compared/methods.png").exists()


def test_the_tokens_of_the_shipped_layers_are_those_of_their_trainings() -> None:
    """`unrolled` began as HASS: what both have learnt adds up, in record, block and card."""
    models = ROOT / "models/smollm2"
    hass, ours = (
        json.loads((models / name / "run.json").read_text(encoding="utf-8"))["results"]
        for name in ("hass", "unrolled")
    )
    assert ours["tokens_before"] == hass["tokens"]
    for row in result("griffin-shipped")["rows"]:
        if row["method"] in ("HASS", griffin_table.OURS):
            folder = f"{row['drafter']}:{models / row['drafter']}"
            assert row["trained_tokens"] == griffin_table.trained_tokens(folder)
    said_of = {
        name: f"{one / 1e6:.1f}"
        for name, one in (
            ("first", hass["tokens"]),
            ("then", ours["tokens"]),
            ("all", hass["tokens"] + ours["tokens"]),
        )
    }
    card = said("models/smollm2/unrolled/README.md")
    assert f"behind its {said_of['first']} million tokens, and learnt {said_of['then']}" in card
    assert f"| this layer | {said_of['all']} M |" in card
    page = said("docs/drafters-compared.md")
    assert f"{said_of['first']} million tokens, by {said_of['then']} million" in page


def test_what_is_said_of_ours_and_griffin_is_in_the_record() -> None:
    ours, path = griffin_table.OURS, ROOT / "benchmarks/results/griffin-equal.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    over = {row["temperature"]: row["ours_over_it"] for row in rows if row["method"] == "GRIFFIN"}
    (cold, (low, high)), (warm, (lowest, highest)) = (
        (over[heat]["ratio"] - 1, [end - 1 for end in over[heat]["ci95"]]) for heat in (0, 1)
    )
    text = " ".join(COMPARED.read_text(encoding="utf-8").split())
    assert (
        f"`unrolled` has {cold:.1%} more tokens per step than GRIFFIN at T = 0 "
        f"({low:.1%} to {high:.1%}) and {warm:.1%} more at T = 1 ({lowest:.1%} to {highest:.1%})"
    ).replace("%", " %") in text
    said = "`unrolled`, FSPAD, HASS, GRIFFIN, EAGLE-2, Medusa"
    for heat in (0, 1):
        ranked = sorted(
            (row for row in rows if row["temperature"] == heat and row["trained_tokens"]),
            key=lambda row: -row["mean"],
        )
        assert ", ".join(row["method"] for row in ranked) == said.replace("`unrolled`", ours)
        assert all(row["over_next"]["ci95"][0] > 1 for row in ranked), "other prompts could turn it"
    assert f"in this order at both temperatures: {said}" in text
    drifting, steady = ("FSPAD", "EAGLE-2"), ("HASS", "GRIFFIN", ours)
    refused = {
        row["method"]: [
            mean(suite["refused"][at] for suite in row["suites"].values()) for at in (0, 4)
        ]
        for row in rows
        if row["temperature"] == 0 and row["method"] in drifting + steady
    }
    for one, other in itertools.product(drifting, steady):
        assert refused[one][0] < refused[other][0] and refused[one][1] > refused[other][1]
    assert all(refused[name][1] <= refused[name][0] + 0.005 for name in steady)
    assert f"EAGLE-2 then in {refused['EAGLE-2'][1]:.0%} of the steps".replace("%", " %") in text


def ours_by_seed(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Ours over a method, by seed."""
    return [one["ours_over_it"] for one in (row, *row["further_seeds"])]


def test_what_the_page_says_in_short_is_in_its_records() -> None:
    text = said("docs/drafters-compared.md")
    tables = [result(name)["rows"] for name in ("griffin-equal", "griffin-equal-2")]
    first, second = ({(row["method"], row["temperature"]): row for row in rows} for rows in tables)
    over = [
        [100 * (rows[name, heat]["ours_over_it"]["ratio"] - 1) for rows in (first, second)]
        for name, heat in (("GRIFFIN", 0.0), ("GRIFFIN", 1.0), ("FSPAD", 0.0), ("FSPAD", 1.0))
    ]
    cold, warm, *fspad = over
    assert f"{cold[0]:.1f} and {cold[1]:.1f} % more than GRIFFIN at T = 0" in text
    assert {f"{one:.1f}" for one in warm} == {"6.7"} and "GRIFFIN at T = 0, 6.7 % at T = 1" in text
    least, most = min(map(min, fspad)), max(map(max, fspad))
    assert f"{least:.0f} to {most:.0f} % more than FSPAD" in text
    published = ["FSPAD", "HASS", "GRIFFIN", "EAGLE-2"]
    for rows in (first, second):
        means = [rows[name, 0.0]["mean"] for name in published]
        assert means == sorted(means, reverse=True)
    hass = sorted(f"{rows['HASS', 0.0]['mean']:.1f}" for rows in (first, second))
    (shipped,) = (
        f"{row['mean']:.1f}"
        for row in result("griffin-shipped")["rows"]
        if (row["method"], row["temperature"]) == ("HASS", 0.0)
    )
    assert (
        f"HASS has {hass[0]} to {hass[1]} tokens per step after 2.1 million tokens and {shipped} "
        "after 12.8"
    ) in text
    copied = [second[name, 0.0]["mean"] for name in ("Lookahead", "Medusa", "EAGLE-1")]
    assert "({:.2f}, {:.2f} and {:.2f};".format(*copied) in text
    drawn = {name: row["mean"] for (name, heat), row in second.items() if heat}
    learnt = [row["mean"] for (_, heat), row in second.items() if heat and row["trained_tokens"]]
    assert drawn["Lookahead"] < min(learnt)
    chains = {
        row["stage"]: f"{row['after']['tokens_per_step']:.2f}"
        for row in result("griffin-stages")["rows"]
    }
    assert f"({chains['griffin-three']} and {chains['hass-two']} tokens per step in chains)" in text
    assert f"is ahead of both ({chains['fspad-control']};" in text


def test_what_is_said_of_speeds_in_drafts_that_tune_chose_is_in_the_record() -> None:
    text = said("docs/drafters-compared.md")
    rows = [row for row in result("griffin-equal-2")["rows"] if row["speed"]]
    speed = {
        (row["method"].partition(" ")[0], row["temperature"]): (
            f"{mean(one['speedup'] for one in row['speed'].values()):.2f}"
        )
        for row in rows
    }
    decided = {
        (row["method"].partition(" ")[0], row["temperature"])
        for row in rows
        if "--draft-length auto" in row["drafts"]
    }
    assert decided == {("GRIFFIN", 0.0), ("GRIFFIN", 1.0), ("unrolled", 1.0)} and len(speed) == 8
    assert (
        f"FSPAD has {speed['FSPAD', 0.0]} of plain decoding at T = 0, `unrolled` "
        f"{speed['unrolled', 0.0]} and HASS {speed['HASS', 0.0]}. At T = 1 hardly anything pays: "
        f"FSPAD has {speed['FSPAD', 1.0]}, HASS {speed['HASS', 1.0]},"
    ) in text
    assert speed["GRIFFIN", 0.0] == speed["GRIFFIN", 1.0]
    assert (
        f"says {speed['GRIFFIN', 0.0]} (GRIFFIN, both temperatures) and {speed['unrolled', 1.0]} "
        "(`unrolled`, T = 1)"
    ) in text


def test_what_is_said_of_another_store_and_seed_is_in_the_records() -> None:
    found = {(row["method"], row["temperature"]): row for row in result("griffin-equal-2")["rows"]}
    first = {(row["method"], row["temperature"]): row for row in result("griffin-equal")["rows"]}
    text, ours = said("docs/drafters-compared.md"), griffin_table.OURS

    def more(name: str, heat: int) -> str:
        return f"{found[name, heat]['ours_over_it']['ratio'] - 1:.1%}".replace("%", " %")

    def ends(name: str, heat: int) -> str:
        over = [f"{end - 1:.1%}" for end in found[name, heat]["ours_over_it"]["ci95"]]
        return f"({' to '.join(over)})".replace("%", " %")

    assert (
        f"`unrolled` has {more('GRIFFIN', 0)} more tokens per step than GRIFFIN at T = 0 "
        f"{ends('GRIFFIN', 0)} and {more('GRIFFIN', 1)} more at T = 1 {ends('GRIFFIN', 1)}, "
        f"{more('FSPAD', 0)} and {more('FSPAD', 1)} more than FSPAD."
    ) in text
    order = [ours, "FSPAD", "EAGLE-3", "HASS", "GRIFFIN", "EAGLE-2", "Lookahead", "Medusa"]
    assert [found[name, 0]["over_next"]["method"] for name in order[:-1]] == order[1:]
    assert all(found[name, 0]["over_next"]["ci95"][0] > 1 for name in order)
    for name, level, heat in (
        *(("EAGLE-3", "HASS", 1), ("HASS", "EAGLE-1", 1), ("EAGLE-1", "EAGLE-2", 1)),
        ("EAGLE-2", "GRIFFIN", 1),
        *(("EAGLE-1", "PLD", 0), ("PLD", "recycling", 0)),
    ):
        below = found[name, heat]["over_next"]
        assert below["method"] == level and below["ci95"][0] < 1 < below["ci95"][1], "level"
    tau = {key: f"{row['mean']:.2f}" for key, row in found.items()}
    assert f"EAGLE-1 has {tau['EAGLE-1', 0]}, EAGLE-2 {tau['EAGLE-2', 0]}." in text
    out = {
        name: f"{mean(suite['tau_outside_loops'] for suite in row['suites'].values()):.2f}"
        for (name, heat), row in found.items()
        if heat == 0
    }
    assert (
        f"outside of them Lookahead has {out['Lookahead']} and Medusa {out['Medusa']}, PLD "
        f"{out['PLD']} and EAGLE-1 {out['EAGLE-1']}."
    ) in text
    assert f"has {tau['Lookahead', 0]} at T = 0, more than Medusa ({tau['Medusa', 0]})" in text
    assert f"at a rate of 5e-4, has {tau['SpS', 0]} and {tau['SpS', 1]}" in text
    copying = ("Lookahead", "PLD", "recycling")
    assert all(found[name, 1]["mean"] < found["SpS", 1]["mean"] for name in copying)
    learning = [name for name in order if name != "Lookahead"]
    fewer = [
        100 * (1 - found[name, heat]["mean"] / first[name, heat]["mean"])
        for name, heat in itertools.product(learning, (0, 1))
        if (name, heat) in first
    ]
    assert f"What learnt has {min(fewer):.0f} to {max(fewer):.0f} % fewer tokens" in text
    learnt = {row["trained_tokens"] for row in found.values() if row["trained_tokens"]}
    (tokens,) = learnt
    stored = text.partition("from another store, with another seed: ")[2].partition(" million")[0]
    assert f"was read {tokens / 1e6 / float(stored):.1f} times" in text
    seeds = {heat: ours_by_seed(found["FSPAD", heat]) for heat in (0, 1)}
    first, second = (
        ", ".join(f"{100 * (one['ratio'] - 1):.1f}" for one in seeds[heat][:2])
        + f" and {100 * (seeds[heat][2]['ratio'] - 1):.1f}"
        for heat in (0, 1)
    )
    assert f"with each: by {first} % at T = 0 and {second} % at T = 1." in text
    ends = [[one["ci95"][0] > 1 for one in seeds[heat]] for heat in (0, 1)]
    assert ends == [[True, False, True]] * 2, "with the second one the intervals just reach 0"
    changes = [
        abs(one["mean"] / found[name, heat]["mean"] - 1)
        for name, heat in itertools.product((ours, "FSPAD"), (0, 1))
        for one in found[name, heat]["further_seeds"]
    ]
    assert f"change their means by {100 * max(changes):.1f} % at most" in text
    typical = found["Medusa (typical)", 1]
    assert not typical.keys() & {"over_next", "ours_over_it"}, "other texts: not compared"


def test_what_is_said_of_continuations_behind_fewer_tokens_is_in_the_record() -> None:
    rows = result("griffin-order-2")["rows"]
    text = said("docs/drafters-compared.md").partition("## The same behind 2.1 million tokens")[2]
    after = {
        (row["shows"], row["kind"], row["forwards"], row["top_weight"]): row["after"]
        for row in rows
    }
    tau = {key: one["tokens_per_step"] for key, one in after.items()}
    assert all(row["after"]["tokens_per_step"] > row["before"]["tokens_per_step"] for row in rows)
    grid: dict[tuple[str, int], list[float]] = {}
    for (shows, kind, forwards, _), one in tau.items():
        if shows == "top-10":
            grid.setdefault((kind, forwards), []).append(one)
    assert [len(weights) for weights in grid.values()] == [3] * 5
    widest = max(max(weights) - min(weights) for weights in grid.values())
    assert f"no network differs by more than {widest:.3f} tokens per step" in text
    three = {
        "eagle": ("protocol", "hass", 3, 0.0),
        "fspad": ("chain", "unrolled", 3, 0.0),
    }
    gains = {}
    for kind, key in three.items():
        one = ("top-10", kind, 1, 0.0)
        gains[kind] = f"{100 * (tau[key] / tau[one] - 1):.1f} %"
        ahead = [
            a - b for a, b in zip(after[key]["accuracies"], after[one]["accuracies"], strict=True)
        ]
        assert ahead[0] < 0.005 < min(ahead[1:]), "all of it behind the first draft"
    assert (
        f"EAGLE's gains {gains['eagle']} over one that goes on as it was, FSPAD's with three in "
        f"one graph (as `unrolled` learns) {gains['fspad']}"
    ) in text
    one, several, hass = (
        tau["top-10", *key] for key in (("griffin", 1, 0.0), ("griffin", 3, 0.0), ("hass", 3, 0.0))
    )
    assert several < one < several + 0.02
    assert (
        f"({one:.3f} and {several:.3f}). HASS's has {100 * (hass / one - 1):.1f} % more than the "
        "better of the two."
    ) in text
    assert f"{100 * (tau[three['fspad']] / hass - 1):.1f} % ahead of HASS's with three" in text
    scaled = tau["scale", "hass", 3, 0.0]
    assert abs(scaled - hass) < 0.005, "scale is not the cause"
    assert f"{hass:.3f} and, with twice the noise" in text
    assert f"distance, {scaled:.3f}." in text


def test_what_is_said_of_stages_and_controls_is_in_the_record() -> None:
    found = {row["stage"]: row for row in result("griffin-stages")["rows"]}
    text = said("docs/drafters-compared.md")

    def after(name: str, digits: int = 2) -> str:
        return f"{found[name]['after']['tokens_per_step']:.{digits}f}"

    assert (
        f"one forward has {after('griffin-control')} tokens per step behind it, in GRIFFIN's "
        f"stages {after('griffin-three')}; FSPAD with one forward has {after('fspad-control')}. "
        f"HASS's stages have {after('hass-two')}, as EAGLE has that goes on with one forward "
        f"({after('eagle-control')})"
    ) in text
    pairs = [("griffin-three", "griffin-control"), ("hass-two", "eagle-control")]
    right = [[found[name]["after"]["accuracies"] for name in pair] for pair in pairs]
    assert all(staged[0] < one[0] and staged[4] > one[4] for staged, one in right)
    griffin, hass = (" and ".join(f"{one[4]:.3f}" for one in line) for line in right)
    assert f"(GRIFFIN {griffin}, HASS {hass})" in text
    spent = sum(found[name]["time"] for name in ("griffin-one", "griffin-two", "griffin-three"))
    whole = found["griffin-whole"]
    begun = stages.FIRST * stages.COSTS["griffin", 3]
    assert (
        f"ends at {after('griffin-three')} behind {spent:,.0f} units of time, the other one is at "
        f"{whole['before']['tokens_per_step']:.2f} behind {begun:,.0f} and at "
        f"{after('griffin-whole')} behind {begun + whole['time']:,.0f}"
    ) in text
    assert f"takes {after('hass-one', 3)} to {after('hass-two', 3)}" in text
    whole, begun = found["hass-whole"], stages.FIRST * stages.COSTS["hass", 3]
    spent = 330 + stages.FIRST * stages.COSTS["eagle", 1]
    assert (
        f"ends at {after('hass-two')} behind {spent:,.0f} units; the other one is at "
        f"{whole['before']['tokens_per_step']:.2f} behind {begun:,.0f} and at "
        f"{after('hass-whole')} behind {begun + whole['time']:,.0f}"
    ) in text


def test_what_is_said_of_repeated_requests_and_edits_is_in_the_record() -> None:
    path = ROOT / "benchmarks/results/smollm2-suffix.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    repeat, edits = found["repeat"], found["edits"]
    page = ROOT / "docs/drafters/suffix.md"
    _, lines = table("ten requests", page)
    assert lines == {
        name: [f"{repeat['tokens_per_second'][key]:.0f}", f"{repeat['tokens_per_step'][key]:.2f}"]
        for name, key in (("plain decoding", "plain"), ("first run", "first"), ("again", "second"))
    }
    _, lines = table("three rounds of edits", page)
    assert lines == {name: [f"{mean:.2f}"] for name, mean in edits["tokens_per_step"].items()}
    assert f"{edits['tokens']:,} tokens" in page.read_text(encoding="utf-8")
    assert f"{len(edits['files'])} files" in page.read_text(encoding="utf-8")


def test_what_lies_outside_of_loops_in_three_languages_is_in_a_record() -> None:
    path = ROOT / "benchmarks/results/languages-some.json"
    record = json.loads(path.read_text(encoding="utf-8"))["languages"]
    shares, way = [one["loop_share"] for one in record.values()], "chain 8, T = 0"
    languages, lines = table("tokens per step at T = 0, all / outside of loops", PAGE)
    assert languages == list(record)
    assert lines.pop("target's tokens in loops") == [f"{100 * one['0']:.0f} %" for one in shares]
    drawn = [row["decoded"]["chain 8, T = 1"] for one in record.values() for row in one["drafts"]]
    assert max(one["loop_share"] for one in drawn) <= 0.02
    runs = {
        "undistilled": "undistilled",
        "TVD, greedy": "greedy-tvd-480-s0",
        "JSD, 4 samples": "draws-4-jsd-480-s0",
        "reverse KL, 4 samples": "draws-4-rkl-480-s0",
    }
    assert list(lines) == list(runs)
    for words, cells in lines.items():
        rows = [
            row for one in record.values() for row in one["drafts"] if row["name"] == runs[words]
        ]
        assert cells == [
            f"{row['tau'][way]:.2f} / {row['decoded'][way]['tau_outside_loops']:.2f}"
            for row in rows
        ]
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    german, chinese, japanese = (f"{100 * one['0']:.0f} %" for one in shares)
    assert (
        f"at T = 0, {german} of the target's tokens for German, {chinese} for Chinese, {japanese} "
        "for Japanese" in page
    )
