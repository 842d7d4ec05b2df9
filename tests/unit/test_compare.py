"""Many runs side by side: pooling, ranking, reading, gains, figures that have something to show."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats

from draftsmith.bench import compare_charts as charts
from draftsmith.bench.compare import (
    compare_folders,
    csv_table,
    render,
    sentences,
    summary,
    terminal_table,
    write_comparison,
)
from draftsmith.bench.compare_axes import controlled
from draftsmith.bench.compare_figures import RunFigures, Scope
from draftsmith.bench.compare_plots import pictures
from draftsmith.bench.compare_pool import compare, pool
from draftsmith.bench.compare_runs import read_runs
from draftsmith.bench.languages import GROUPS, LANGUAGES, find
from draftsmith.bench.pictures import Picture
from draftsmith.bench.records import BASELINE, RunRecord, append
from draftsmith.errors import InputError
from draftsmith.provenance import write_json_atomic

OBJECTIVES = ("kl", "rkl", "jsd", "tvd")
GREEDY_LANGUAGES = ("French", "Korean", "Tamil", "Hindi")


def a_run(label: str, **options: Any) -> RunFigures:
    usual: dict[str, Any] = {
        "objective": "kl",
        "forcing": "beam",
        "beams": 4,
        "teacher_temperature": 1.0,
        "truncation": "top-50",
        "seed": 0,
        "tau": 3.0,
    }
    return RunFigures(label=label, **{**usual, **options})


def only_scope(runs: list[RunFigures], **options: Any) -> Scope:
    (scope,) = compare(runs, **options).scopes
    return scope


def a_study() -> list[RunFigures]:
    """Every factor varied on its own, two seeds, parts by language, an undistilled draft."""
    runs = []
    for seed in (0, 1):
        for i, objective in enumerate(OBJECTIVES):
            plan = [("beam", b, 1.0, "top-50", 0.1 * math.log2(b)) for b in (1, 2, 8)]
            plan += [("beam", 1, t, "top-50", -0.2) for t in (0.7, 2.0)]
            plan += [(f, 1, 1.0, "top-50", -0.1) for f in ("gold", "greedy", "sample")]
            plan += [("beam", 1, 1.0, "full", 0.01)]
            for forcing, beams, temperature, truncation, gain in plan:
                tau = 3.0 + 0.05 * i + gain + 0.01 * seed
                whole = RunFigures(
                    label=f"{objective}-{forcing}-{beams}-{temperature}-{truncation}-{seed}",
                    objective=objective,
                    forcing=forcing,
                    beams=beams,
                    teacher_temperature=temperature,
                    truncation=truncation,
                    seed=seed,
                    tau=tau,
                    alpha=tau / 6,
                    tau_predicted=tau - 0.2,
                    speedup=tau / 2,
                    quality=40.0 + i,
                    quality_metric="chrF",
                    storage_tokens=1000 * beams,
                    storage_bytes=300_000 * beams if truncation != "full" else 256_000_000,
                )
                runs.append(whole)
                runs += [
                    replace(whole, language=name, tau=tau * (1 + 0.1 * n))
                    for n, name in enumerate(GREEDY_LANGUAGES)
                ]
    base = RunFigures(label="base", objective="none", tau=2.5, alpha=0.4, quality=35.0)
    base = replace(base, quality_metric="chrF")
    runs.append(base)
    runs += [
        replace(base, language=name, tau=2.5 * (1 + 0.05 * n))
        for n, name in enumerate(GREEDY_LANGUAGES)
    ]
    return runs


# --------------------------------------------------------------------------- pooling


def test_the_interval_is_students_and_covers_as_often_as_it_says() -> None:
    """2,000 intervals from three seeds: 95 % cover; 93.5 to 96.5 % is three deviations."""
    rng = np.random.default_rng(0)
    hits = 0
    for values in rng.normal(3.0, 0.2, size=(2000, 3)):
        pooled = pool(values.tolist())
        assert pooled.half is not None
        hits += abs(pooled.mean - 3.0) <= pooled.half
    assert 0.935 < hits / 2000 < 0.965
    found = pool([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem([1.0, 2.0, 4.0]))
    assert found.half == pytest.approx((high - low) / 2)
    assert pool([2.0]).half is None


def test_seeds_of_one_setting_are_pooled_and_settings_are_not() -> None:
    scope = only_scope(
        [a_run("a", seed=0, tau=3.0), a_run("b", seed=1, tau=4.0), a_run("c", beams=8, tau=3.2)]
    )
    assert [(e.rank, e.seeds, e.value("tau")) for e in scope.entries] == [(1, 2, 3.5), (2, 1, 3.2)]
    assert [e.name for e in scope.entries] == ["forward KL, 4 beams", "forward KL, 8 beams"]


def test_two_runs_of_one_seed_are_not_two_seeds() -> None:
    comparison = compare([a_run("a", tau=3.0), a_run("b", tau=4.0), a_run("c", seed=1, tau=3.5)])
    (scope,) = comparison.scopes
    assert [(e.seeds, e.name) for e in scope.entries] == [
        (1, "forward KL (b)"),
        (1, "forward KL (c)"),
        (1, "forward KL (a)"),
    ]
    assert comparison.notes == ("a, b, c: same setting and seed, so they are not pooled.",)


def test_the_same_run_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'a' is there twice"):
        compare([a_run("a"), a_run("a")])
    compare([a_run("a"), a_run("a", seed=1), a_run("a", language="French")])


def test_runs_that_were_measured_otherwise_are_not_ranked_together() -> None:
    runs = [
        a_run("a", decoding_temperature=0.0, target="t", tau=3.0),
        a_run("a", decoding_temperature=1.0, target="t", tau=2.0),
        a_run("a", decoding_temperature=1.0, target="u", tau=1.5),
        a_run("b", decoding_temperature=1.0, target="t", tau=2.5, objective="rkl"),
    ]
    comparison = compare(runs)
    assert [scope.title for scope in comparison.scopes] == [
        "t, decoding temperature 0",
        "t, decoding temperature 1",
        "u, decoding temperature 1",
    ]
    assert [len(scope.entries) for scope in comparison.scopes] == [1, 2, 1]
    assert comparison.main is comparison.scopes[1]
    assert all(scope.entries[0].rank == 1 for scope in comparison.scopes)


def test_measured_tokens_per_step_rank_before_predicted_and_those_before_acceptance() -> None:
    runs = [
        a_run("a", objective="kl", tau=3.0, tau_predicted=9.0, alpha=0.9),
        a_run("b", objective="rkl", tau=4.0, tau_predicted=1.0, alpha=0.1),
        a_run("c", objective="jsd", tau=None, tau_predicted=5.0, alpha=0.95),
    ]
    order = {
        "tau": ["reverse KL", "forward KL", "JSD"],
        "tau_predicted": ["forward KL", "JSD", "reverse KL"],
        "alpha": ["JSD", "forward KL", "reverse KL"],
    }
    for measure, names in order.items():
        scope = only_scope(runs)
        assert scope.ranked_by == measure
        assert [entry.name for entry in scope.entries] == names
        runs = [
            replace(run, tau=None, tau_predicted=None)
            if measure == "tau_predicted"
            else replace(run, tau=None)
            for run in runs
        ]
    assert only_scope([a_run("a"), a_run("b", objective="rkl", tau=None)]).entries[1].rank is None


def test_without_a_figure_over_all_the_mean_of_the_languages_stands_in() -> None:
    parts = [a_run("a", language=name, tau=tau) for name, tau in (("fr", 2.0), ("Korean", 5.0))]
    entry = only_scope(parts).entries[0]
    assert entry.value("tau") == 3.5
    assert {name: p.mean for name, p in entry.by_language.items()} == {"French": 2.0, "Korean": 5.0}
    # a mean over fewer languages is no mean over all, and a whole run needs no stand-in
    halved = [replace(parts[0], alpha=0.5), parts[1]]
    assert only_scope(halved).entries[0].alpha is None
    assert only_scope([*parts, a_run("a", tau=3.0)]).entries[0].value("tau") == 3.0


def test_names_say_what_differs_and_nothing_else() -> None:
    scope = only_scope(
        [
            a_run("a", forcing="sample", beams=1),
            a_run("b", forcing="beam", beams=1),
            a_run("c", forcing="beam", beams=8),
            a_run("d", teacher_temperature=0.7),
            a_run("e", objective="own", truncation="full"),
            RunFigures(label="f", tau=1.0),
        ]
    )
    assert sorted(e.name for e in scope.entries) == [
        "f",
        "forward KL, 1 beam",
        "forward KL, 4 beams, T=0.7",
        "forward KL, 8 beams",
        "forward KL, sample",
        "own, 4 beams, full",
    ]


def test_every_setting_of_a_study_has_its_own_name() -> None:
    names = Counter(entry.name for entry in only_scope(a_study()).entries)
    assert names.most_common(1)[0][1] == 1
    # where a factor is unknown for some, silence cannot mean the usual value
    runs = [a_run("a"), a_run("b", teacher_temperature=None), a_run("c", teacher_temperature=2.0)]
    assert len({entry.name for entry in only_scope(runs).entries}) == 3


# --------------------------------------------------------------------------- gains


def test_gains_are_against_the_undistilled_draft_per_language() -> None:
    scope = only_scope(a_study())
    assert scope.base is not None and scope.base.name == "no distillation"
    assert scope.top is not None and scope.top.name == "TVD, 8 beams"
    gains = {gain.name: gain for gain in scope.language_gains()}
    assert set(gains) == set(GREEDY_LANGUAGES)
    tau = 3.0 + 0.15 + 0.3 + 0.005
    assert gains["Korean"].base == pytest.approx(2.625)
    assert gains["Korean"].best_value == pytest.approx(1.1 * tau)
    assert gains["Korean"].best_gain == pytest.approx(1.1 * tau / 2.625 - 1)
    assert gains["Korean"].top_gain == gains["Korean"].best_gain
    order = [gain.best_gain for gain in scope.language_gains()]
    assert order == sorted(order, reverse=True)


def test_the_best_of_a_language_need_not_be_the_best_of_all() -> None:
    runs = [a_run("base", objective="none", language=n, tau=2.0) for n in ("French", "Korean")]
    runs += [a_run("a", objective="kl", language=n, tau=t) for n, t in (("fr", 4.0), ("ko", 2.2))]
    runs += [a_run("b", objective="rkl", language=n, tau=t) for n, t in (("fr", 2.4), ("ko", 3.0))]
    korean = next(gain for gain in only_scope(runs).language_gains() if gain.name == "Korean")
    assert korean.best.name == "reverse KL"
    assert (korean.best_gain, korean.top_gain) == (pytest.approx(0.5), pytest.approx(0.1))


def test_a_base_can_be_named() -> None:
    runs = [a_run("plain", objective=None, tau=2.0), a_run("b", tau=3.0)]
    assert only_scope(runs).base is None
    scope = only_scope(runs, base="plain")
    assert scope.base is not None and scope.base.value("tau") == 2.0
    with pytest.raises(InputError, match="'plane'; did you mean 'plain'"):
        compare(runs, base="plane")


def test_an_undistilled_draft_that_ranks_first_is_no_winner_and_two_of_them_are_no_base() -> None:
    better = a_run("base", objective="none", tau=5.0)
    scope = only_scope([a_run("a"), better])
    assert scope.entries[0] is scope.base
    assert scope.top is scope.entries[1]
    assert only_scope([a_run("a"), better, replace(better, label="other")]).base is None


def test_the_first_is_praised_with_its_gain_and_doubted_within_the_noise() -> None:
    runs = [a_run(f"k{s}", seed=s, tau=3.0 + 0.1 * s) for s in range(3)]
    runs += [a_run(f"r{s}", objective="rkl", seed=s, tau=3.05 + 0.1 * s) for s in range(3)]
    runs += [a_run("base", objective="none", tau=2.1)]
    first, doubt = sentences(compare(runs))
    assert first == (
        "reverse KL ranks first of 3: 3.15 tokens per step, +50.0 % against the undistilled "
        "draft's 2.10."
    )
    assert "lead over forward KL lies within the intervals" in doubt
    far = [replace(r, tau=r.tau + 2) if r.objective == "rkl" and r.tau else r for r in runs]
    assert len(sentences(compare(far))) == 1


# --------------------------------------------------------------------------- figures


def test_lines_join_settings_that_differ_in_one_factor_alone() -> None:
    scope = only_scope(a_study())
    for factor, levels in (
        ("beams", {1, 2, 8}),
        ("teacher_temperature", {0.7, 1.0, 2.0}),
        ("truncation", {"top-50", "full"}),
    ):
        lines = controlled(scope, factor)
        assert [line.name for line in lines] == ["TVD", "JSD", "reverse KL", "forward KL"]
        for line in lines:
            assert set(line.entries) == levels
            others = {replace(e.setting, **{factor: None}) for e in line.entries.values()}  # type: ignore[arg-type]
            assert len(others) == 1
    forcing = controlled(scope, "forcing", ignoring=("beams",))
    assert set(forcing[0].entries) == {"gold", "greedy", "sample", "beam"}
    assert forcing[0].entries["beam"].setting.beams == 8


@pytest.fixture(scope="module")
def drawn() -> tuple[Picture, ...]:
    """The figures of the study; drawing takes a second or two."""
    pictures_, missing = pictures(compare(a_study()).main)
    assert missing == ()
    return pictures_


def test_a_line_is_not_named_by_the_factor_that_it_shows() -> None:
    runs = [a_run(f"k{b}", beams=b, tau=3.0 + b) for b in (1, 8)]
    runs += [a_run(f"r{b}", objective="rkl", beams=b, tau=3.0 - b / 9) for b in (1, 8)]
    lines = controlled(only_scope(runs), "beams")
    assert [line.name for line in lines] == ["forward KL", "reverse KL"]


def test_a_study_has_all_figures(drawn: tuple[Picture, ...]) -> None:
    assert [picture.name for picture in drawn] == [
        "objectives",
        "forcing",
        "beams",
        "alpha_tau",
        "temperature",
        "truncation",
        "storage",
        "quality",
        "languages",
        "gain_by_language",
        "gain_by_group",
    ]


def test_one_run_has_no_figure_but_reasons(drawn: tuple[Picture, ...]) -> None:
    none, reasons = pictures(compare([a_run("a")]).main)
    assert none == ()
    assert [one.title for one in reasons] == [picture.title for picture in drawn]
    assert all(one.reason for one in reasons)


DROPS: dict[str, tuple[Callable[[Scope], object], Callable[[RunFigures], RunFigures | None]]] = {
    "objectives": (
        charts.radar_objectives,
        lambda run: run if run.objective in ("kl", "rkl", "none") else None,
    ),
    "forcing": (charts.forcing, lambda run: run if run.forcing in ("beam", None) else None),
    "beams": (charts.beams, lambda run: replace(run, beams=None)),
    "bubbles": (charts.bubbles, lambda run: replace(run, alpha=None)),
    "temperature": (charts.temperature, lambda run: replace(run, teacher_temperature=None)),
    "truncation": (charts.truncation, lambda run: replace(run, truncation=None)),
    "storage": (charts.storage, lambda run: replace(run, storage_bytes=None)),
    "quality": (charts.quality, lambda run: replace(run, quality=None)),
    "languages": (
        charts.radar_languages,
        lambda run: run if run.language in (None, "French", "Korean") else None,
    ),
    "gains": (charts.gains, lambda run: run if run.objective != "none" else None),
    "groups": (
        charts.gain_groups,
        lambda run: replace(run, language=f"X{run.language}") if run.language else run,
    ),
}


@pytest.mark.parametrize("name", DROPS)
def test_a_figure_without_data_gives_its_reason(name: str) -> None:
    draw, drop = DROPS[name]
    assert isinstance(draw(only_scope(a_study())), Figure)
    runs = [changed for run in a_study() if (changed := drop(run)) is not None]
    assert isinstance(draw(compare(runs).main), str)


def test_qualities_of_two_metrics_share_no_axis() -> None:
    runs = [a_run("a", quality=1.0, quality_metric="COMET")]
    runs += [a_run("b", objective="rkl", quality=50.0, quality_metric="chrF")]
    assert "COMET, chrF" in str(charts.quality(only_scope(runs)))


def test_drawing_twice_gives_the_same_files() -> None:
    scope = only_scope([a_run("a"), a_run("b", beams=8), a_run("c", objective="none", tau=2.0)])
    first, second = pictures(scope)[0], pictures(scope)[0]
    assert [p.name for p in first] == ["beams"]
    assert first[0].file_svg == second[0].file_svg


def test_figures_hold_the_figures(drawn: tuple[Picture, ...]) -> None:
    texts = {picture.name: re.findall(r">([^<>]+)</text>", picture.file_svg) for picture in drawn}
    assert {"1", "2", "8"} <= set(texts["beams"])
    assert "3.46" in texts["forcing"]  # TVD, 8 beams: 3.455
    assert {"French", "Korean", "Tamil", "Hindi"} <= set(texts["languages"])
    assert any("256,000 bytes per token" in text for text in texts["storage"])
    assert {"Hangul", "agglutinative", "South Asia", "Dravidian"} <= set(texts["gain_by_group"])


# --------------------------------------------------------------------------- files


class Collector(HTMLParser):
    """Tags and the places where a page points to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "data") and v]


def test_the_page_needs_nothing_but_itself_and_holds_the_ranking(
    drawn: tuple[Picture, ...],
) -> None:
    evil = RunFigures(label="<script>alert(1)</script>", tau=9.0)
    page = render(compare([*a_study(), evil]), drawn, ())
    collected = Collector()
    collected.feed(page)
    assert "http:" not in page and "https:" not in page and "@import" not in page
    assert all(link.startswith("#") for link in collected.links)
    assert not collected.tags & {"script", "link", "iframe", "img", "object"}
    assert "&lt;script&gt;alert(1)" in page
    assert "#010203" not in page and "currentColor" in page
    assert page.index("TVD, 8 beams") < page.index("JSD, 8 beams")
    assert "3.46 \N{PLUS-MINUS SIGN}0.06" in page


def test_what_is_left_out_stands_on_the_page(tmp_path: Path) -> None:
    write_comparison([a_run("a"), a_run("b", beams=8)], tmp_path)
    files = {"comparison.html", "comparison.csv", "comparison.json", "figures"}
    assert {path.name for path in tmp_path.iterdir()} == files
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "Storage: no run says how much its trajectories took." in page
    assert {p.stem for p in (tmp_path / "figures").iterdir()} == {"beams"}
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert {one["title"] for one in found["figures_left_out"]} >= {"Storage", "Objectives"}


def test_csv_and_json_hold_every_setting_with_full_digits() -> None:
    comparison = compare(a_study())
    lines = list(csv.DictReader(io.StringIO(csv_table(comparison))))
    (scope,) = json.loads(json.dumps(summary(comparison, ()), allow_nan=False))["scopes"]
    (ranked,) = comparison.scopes
    assert len(lines) == len(scope["settings"]) == len(ranked.entries)
    for line, setting, entry in zip(lines, scope["settings"], ranked.entries, strict=True):
        assert float(line["tau"]) == setting["tau"]["mean"] == entry.value("tau")
        assert line["name"] == setting["name"] == entry.name
        assert line["rank"] == str(entry.rank)
    base = next(line for line in lines if line["objective"] == "none")
    assert base["tau_ci95_half"] == "" and base["beams"] == "" and base["speedup"] == ""


def test_the_terminal_table_shows_what_is_known_in_80_columns() -> None:
    runs = [replace(run, quality=None, alpha=None) for run in a_study()]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(compare(runs)))
    text = console.export_text()
    assert re.search(r"^ *1 +TVD, 8 beams +3\.46 ±0\.06 ", text, re.MULTILINE)
    assert "qual" not in text and "accep" not in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80


# --------------------------------------------------------------------------- reading


def distilled(folder: Path, **results: Any) -> Path:
    write_json_atomic(
        folder / "run.json",
        {"verb": "distill", "seed": 7, "results": {"objective": "rkl"} | results},
    )
    return folder


def a_record(drafter: str, prompt: int, language: str, *, temperature: float = 0.0) -> RunRecord:
    plain = drafter == BASELINE
    return RunRecord(
        prompt=f"p{prompt}",
        language=language,
        drafter=drafter,
        temperature=temperature,
        repeat=0,
        seed=0,
        place=0,
        group=prompt,
        prompt_tokens=7,
        tokens=40,
        decode_tokens=39,
        steps=40 if plain else 20 - 4 * (language == "ko"),
        decode_steps=39 if plain else 19,
        accepted=0 if plain else 20,
        offered=0 if plain else 50,
        proposed=0 if plain else 50,
        finish_reason="length",
        seconds=2.5,
        prefill_seconds=0.5,
        decode_seconds=2.0 if plain else 1.0,
        digest="ab" * 8,
    )


def benched(folder: Path, *drafters: str, temperature: float = 0.0) -> Path:
    lines = [
        a_record(drafter, prompt, language, temperature=temperature)
        for drafter in (BASELINE, *drafters)
        for prompt, language in enumerate(("fr", "ko"))
    ]
    append(folder / "records.jsonl", lines)
    write_json_atomic(folder / "summary.json", {"target": "models/t"})
    return folder


def test_a_distil_run_is_read_from_its_results(tmp_path: Path) -> None:
    folder = distilled(
        tmp_path / "a",
        forcing="beam",
        beams=8,
        teacher_temperature=1,
        top_k=50,
        alpha=0.7,
        tau_predicted=3.1,
        answer_tokens=10,
        store_bytes=3000,
        quality=51.5,
        quality_metric="chrF",
        by_language={"ko": {"alpha": 0.6, "tokens": 9}},
        training_loss=[[1, 2.0]],
    )
    whole, korean = read_runs([folder])
    assert whole == RunFigures(
        label="a",
        objective="rkl",
        forcing="beam",
        beams=8,
        teacher_temperature=1.0,
        truncation="top-50",
        seed=7,
        alpha=0.7,
        tau_predicted=3.1,
        quality=51.5,
        quality_metric="chrF",
        storage_tokens=10,
        storage_bytes=3000,
    )
    assert (korean.language, korean.alpha, korean.tau_predicted) == ("ko", 0.6, None)
    (full,) = read_runs([distilled(tmp_path / "b", top_k=None)])
    (silent,) = read_runs([distilled(tmp_path / "c")])
    assert (full.truncation, silent.truncation) == ("full", None)


def test_the_acceptance_before_training_is_the_undistilled_draft(tmp_path: Path) -> None:
    same = [
        distilled(tmp_path / n, alpha=0.7, alpha_before=0.51, seed=i) for i, n in enumerate("ab")
    ]
    *_, before = read_runs(same)
    assert (before.objective, before.alpha, before.label) == ("none", 0.51, "before distillation")
    other = distilled(tmp_path / "c", alpha=0.7, alpha_before=0.4)
    assert [run.objective for run in read_runs([*same, other])] == ["rkl"] * 3
    named = distilled(tmp_path / "d", objective="none", alpha=0.51, alpha_before=0.51)
    assert len(read_runs([*same, named])) == 3


def test_a_bench_is_read_from_its_records_by_language(tmp_path: Path) -> None:
    runs = read_runs([benched(tmp_path / "bench", "prompt_lookup", "independent:models/x/draft")])
    assert {run.label for run in runs} == {"prompt_lookup", "independent:draft"}
    by = {(run.label, run.language): run for run in runs}
    assert by["prompt_lookup", None].tau == pytest.approx(80 / 36)
    assert by["prompt_lookup", "fr"].tau == 2.0
    assert by["prompt_lookup", "ko"].tau == 2.5
    assert by["prompt_lookup", None].alpha_decoded == 0.4
    assert by["prompt_lookup", "ko"].speedup == pytest.approx(2.0)
    assert {run.target for run in runs} == {"models/t"}
    assert len(runs) == 6


def test_a_bench_without_records_is_read_from_its_summary(tmp_path: Path) -> None:
    entries = [
        {"name": BASELINE, "temperature": 0.0, "tokens_per_step": 1.0},
        {"name": "prompt_lookup", "temperature": 0.0, "tokens_per_step": 2.2, "speedup": None},
    ]
    write_json_atomic(tmp_path / "summary.json", {"target": "t", "drafters": entries, "x": 1})
    (run,) = read_runs([tmp_path])
    assert (run.label, run.tau, run.speedup) == ("prompt_lookup", 2.2, None)


def test_a_measured_drafter_takes_over_the_setting_of_its_distil_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results: dict[str, Any] = {"forcing": "beam", "beams": 8, "alpha": 0.7, "tau_predicted": 3.0}
    a = distilled(Path("runs/a"), **results, decoding_temperature=0.0)
    b = distilled(Path("runs/b"), **results, decoding_temperature=1.0)
    c = distilled(Path("runs/c"), **results)
    bench = benched(Path("bench"), "independent:runs/a", "independent:runs/b", "prompt_lookup")
    runs = read_runs([a, b, c, bench])
    whole = {run.label: run for run in runs if run.language is None}
    assert set(whole) == {"a", "b", "c", "prompt_lookup"}
    assert (whole["a"].objective, whole["a"].beams, whole["a"].seed) == ("rkl", 8, 7)
    assert whole["a"].tau == pytest.approx(80 / 36)
    assert (whole["a"].alpha, whole["a"].tau_predicted) == (0.7, 3.0)
    assert whole["b"].alpha is None  # expected at another temperature than decoded
    assert (whole["c"].tau, whole["c"].alpha) == (None, 0.7)
    assert whole["prompt_lookup"].objective is None
    korean = next(run for run in runs if run.label == "a" and run.language == "ko")
    assert (korean.objective, korean.tau, korean.alpha) == ("rkl", 2.5, None)


def test_a_drafter_of_a_like_name_elsewhere_is_not_taken_for_the_distilled_one(
    tmp_path: Path,
) -> None:
    a = distilled(tmp_path / "runs" / "draft", alpha=0.7)
    bench = benched(tmp_path / "bench", "independent:models/base/draft", "independent:.../draft")
    whole = {run.label: run for run in read_runs([a, bench]) if run.language is None}
    assert whole["independent:base/draft"].objective is None
    # outside of the bench's folder only the name is kept
    assert (whole["draft"].objective, whole["draft"].tau) == ("rkl", pytest.approx(80 / 36))


def test_labels_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    folders = [distilled(tmp_path / name, alpha=0.5) for name in ("x/final", "y/final", "z")]
    assert [run.label for run in read_runs(folders)] == ["x/final", "y/final", "z"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"alpha": "high"}, "alpha in .*run.json: expected float or none, got 'high'"),
        ({"beams": 8.5}, "beams in .*run.json"),
        ({"top_k": "50"}, "top_k in .*run.json"),
        ({"seed": True}, "seed in .*run.json"),
        ({"alpha": 70.0}, "alpha must be between 0 and 1"),
        ({"by_language": {"ko": {"alpha": "x"}}}, "alpha in .*run.json, by_language, ko"),
        ({"by_language": {"ko": 3}}, "expected an object in .*by_language, ko"),
        ({"by_language": 3}, "by_language in .*run.json"),
        ({"objective": None}, "no figures to compare"),
    ],
)
def test_wrong_values_are_refused_with_the_file(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read_runs([distilled(tmp_path / "odd", **wrong)])
    assert "odd" in str(caught.value)


def test_folders_that_hold_no_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is no folder"):
        read_runs([tmp_path / "nothing"])
    with pytest.raises(InputError, match="holds no run"):
        read_runs([tmp_path])
    (tmp_path / "run.json").write_text('{"results": ', encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json is not JSON"):
        read_runs([tmp_path])
    (tmp_path / "run.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json holds no JSON object"):
        read_runs([tmp_path])
    (tmp_path / "run.json").write_text('{"verb": "distill"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json has no results"):
        read_runs([tmp_path])
    with pytest.raises(InputError, match="no runs to compare"):
        compare([])


def test_folders_become_a_comparison(tmp_path: Path) -> None:
    folders = [
        distilled(
            tmp_path / f"{objective}{seed}", objective=objective, seed=seed, alpha=alpha + seed / 50
        )
        for objective, alpha in (("kl", 0.6), ("rkl", 0.7))
        for seed in (0, 1)
    ]
    comparison = compare_folders(folders, tmp_path / "out")
    (scope,) = comparison.scopes
    assert scope.ranked_by == "alpha"
    assert [(entry.name, entry.seeds) for entry in scope.entries] == [
        ("reverse KL", 2),
        ("forward KL", 2),
    ]
    assert (tmp_path / "out" / "comparison.html").is_file()


# --------------------------------------------------------------------------- languages


def test_the_languages_of_the_study_are_there_once_with_all_groups() -> None:
    assert len(LANGUAGES) == 20
    for field in ("name", "code", "flores"):
        assert len({getattr(one, field) for one in LANGUAGES}) == 20
    for one in LANGUAGES:
        assert re.fullmatch(r"[a-z]{2}", one.code)
        assert re.fullmatch(r"[a-z]{3}_[A-Z][a-z]{3}", one.flores)
        assert all(getattr(one, group) and "_" not in getattr(one, group) for group in GROUPS)
    dravidian = {one.name for one in LANGUAGES if one.family == "Dravidian"}
    assert dravidian == {"Tamil", "Telugu", "Kannada", "Malayalam"}
    latin = {one.name for one in LANGUAGES if one.script == "Latin"}
    assert latin == {"French", "Spanish", "German", "Portuguese", "Italian", "Turkish"}
    # FLORES names say the script themselves
    scripts = {"Latn": "Latin", "Deva": "Devanagari", "Hang": "Hangul", "Arab": "Arabic"}
    for one in LANGUAGES:
        assert scripts.get(one.flores[4:], one.script) == one.script


@pytest.mark.parametrize("name", ["Korean", "korean", "ko", "kor", "kor_Hang", "ko-KR", " KO "])
def test_a_language_is_found_by_name_and_code(name: str) -> None:
    found = find(name)
    assert found is not None and found.name == "Korean"
    assert find("English") is None
    assert find("k") is None
