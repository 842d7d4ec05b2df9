"""Figures that have something to show, and the files of a comparison."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from tests.pages import Collector
from tests.small_study import a_run, a_study, only_scope, the_comparison

from draftsmith.bench.compare import plots as charts
from draftsmith.bench.compare.model import RunMetrics, RunSetting, Scope, compare
from draftsmith.bench.compare.page import (
    csv_table,
    render,
    summary,
    terminal_table,
    write_comparison,
)
from draftsmith.bench.compare.plots import controlled, draw_plots
from draftsmith.plots import PlotImage

# --------------------------------------------------------------------------- figures


def test_lines_join_settings_that_differ_in_one_factor_alone() -> None:
    scope = the_comparison().main
    for factor, levels in (
        ("beams", {1, 2, 8}),
        ("teacher_temperature", {0.7, 1.0, 2.0}),
        ("truncation", {"top-50", "full"}),
    ):
        lines = controlled(scope, factor, ignoring=("store", "laws"))
        assert [line.name for line in lines] == ["TVD", "JSD", "reverse KL", "forward KL"]
        for line in lines:
            assert set(line.entries) == levels
            assert len({_less(e.setting, factor) for e in line.entries.values()}) == 1
    forcing = controlled(scope, "forcing", ignoring=("beams", "store"))
    assert set(forcing[0].entries) == {"gold", "greedy", "sample", "beam"}
    assert forcing[0].entries["beam"].setting.beams == 8


def _less(setting: RunSetting, factor: str) -> RunSetting:
    """Without this factor, and without the options that follow from one."""
    kept = tuple(one for one in setting.options if one[0] not in ("store", "laws"))
    return replace(setting, **{factor: None}, options=kept)


def test_a_side_experiment_takes_no_bar_from_a_figure() -> None:
    """Another tail on drawn texts is another setting, not a second run of the same."""
    comparison = the_comparison()
    assert comparison.notes == ()
    lines = controlled(comparison.main, "forcing", ignoring=("beams", "store"))
    assert len(lines) == 4
    for line in lines:
        assert set(line.entries) == {"gold", "greedy", "sample", "beam"}
        assert dict(line.entries["sample"].setting.options)["objective.tail"] == "bucket"


def _many_lines() -> list[RunMetrics]:
    """Nine objectives, the first with two more tails that are better than all others."""
    runs = []
    for place in range(9):
        for beams in (1, 2, 4):
            tails = ("bucket", "floor", "renormalise") if place == 0 and beams < 4 else ("bucket",)
            runs += [
                a_run(
                    f"{place}-{beams}-{tail}",
                    objective=f"o{place}",
                    beams=beams,
                    options=(("tail", tail),),
                    tau=3.0 - 0.1 * place + (tail != "bucket"),
                )
                for tail in tails
            ]
    return runs


def test_side_lines_crowd_out_no_objective_and_what_is_not_drawn_is_counted() -> None:
    scope = only_scope(_many_lines())
    lines = controlled(scope, "beams")
    firsts = ["o0, tail bucket", *(f"o{place}" for place in range(1, 9))]
    assert [line.name for line in lines[:9]] == firsts
    assert {line.name for line in lines[9:]} == {"o0, tail floor", "o0, tail renormalise"}
    figure = charts.beams(scope)
    assert isinstance(figure, Figure)
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(said) == sorted([*firsts[:8], "not drawn: 3 more"])


def test_one_store_has_one_bar_whatever_was_learnt_from_it() -> None:
    stored = {"storage_bytes": 3000, "storage_tokens": 10}
    runs = [
        a_run(tail, options=(("store", "s (1)"), ("tail", tail)), **stored)
        for tail in ("bucket", "floor")
    ]
    figure = charts.storage(only_scope(runs))
    assert isinstance(figure, Figure)
    assert len(figure.axes[0].patches) == 1


@pytest.fixture(scope="module")
def drawn() -> tuple[PlotImage, ...]:
    """The figures of the study; drawing takes a second or two."""
    images, missing = draw_plots(the_comparison().main)
    assert missing == ()
    return images


def test_a_line_is_not_named_by_the_factor_that_it_shows() -> None:
    runs = [a_run(f"k{b}", beams=b, tau=3.0 + b) for b in (1, 8)]
    runs += [a_run(f"r{b}", objective="rkl", beams=b, tau=3.0 - b / 9) for b in (1, 8)]
    lines = controlled(only_scope(runs), "beams")
    assert [line.name for line in lines] == ["forward KL", "reverse KL"]


def test_a_study_has_all_figures(drawn: tuple[PlotImage, ...]) -> None:
    assert [picture.name for picture in drawn] == [
        "objectives",
        "forcing",
        "beams",
        "alpha_tau",
        "speedup",
        "temperature",
        "truncation",
        "storage",
        "quality",
        "languages",
        "gain_by_language",
        "gain_by_group",
    ]


def test_one_run_has_no_figure_but_reasons(drawn: tuple[PlotImage, ...]) -> None:
    none, reasons = draw_plots(compare([a_run("a")]).main)
    assert none == ()
    assert [one.title for one in reasons] == [picture.title for picture in drawn]
    assert all(one.reason for one in reasons)


DROPS: dict[str, tuple[Callable[[Scope], object], Callable[[RunMetrics], RunMetrics | None]]] = {
    "objectives": (
        charts.radar_objectives,
        lambda run: run if run.objective in ("kl", "rkl", "none") else None,
    ),
    "forcing": (charts.forcing, lambda run: run if run.forcing in ("beam", None) else None),
    "beams": (charts.beams, lambda run: replace(run, beams=None)),
    "bubbles": (charts.bubbles, lambda run: replace(run, alpha=None)),
    "speedups": (
        charts.speedups,
        lambda run: replace(run, speedup=None, speedup_predicted=None),
    ),
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
@pytest.mark.every(4)
def test_a_figure_without_data_gives_its_reason(name: str) -> None:
    draw, drop = DROPS[name]
    assert isinstance(draw(the_comparison().main), Figure)
    runs = [changed for run in a_study() if (changed := drop(run)) is not None]
    assert isinstance(draw(compare(runs).main), str)


def test_every_timed_drafter_has_a_bar_the_fastest_first() -> None:
    """Networks with one objective have bars, too, and so have drafters without training."""
    runs = [
        a_run("h", drafter="hass", tau=4.0, speedup=1.6),
        a_run("g", drafter="griffin", tau=4.2, speedup=1.5),
        a_run("g2", drafter="griffin", tau=4.3, speedup=1.4, options=(("tail", "floor"),)),
        a_run("p", objective=None, tau=2.0, speedup=1.9),
        a_run("l", objective=None, tau=2.5, speedup=1.2),
    ]
    figure = charts.speedups(only_scope(runs))
    assert isinstance(figure, Figure)
    widths = [round(bar.get_width(), 2) for bar in figure.axes[0].patches]
    assert widths == [1.2, 1.5, 1.6, 1.9]  # from the lowest bar up


def test_speed_ups_are_foretold_where_nothing_was_timed() -> None:
    runs = [
        a_run("a", speedup=None, speedup_predicted=1.2),
        a_run("b", objective="rkl", speedup=None, speedup_predicted=0.5),
    ]
    figure = charts.speedups(only_scope(runs))
    assert isinstance(figure, Figure)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [0.5, 1.2]
    assert "predicted" in figure.axes[0].get_xlabel()


def test_a_search_of_unknown_width_gives_several_trajectories() -> None:
    """Draws and `--beams auto` are none of the settings with one trajectory per prompt."""
    runs = [
        a_run(f"{name}-{forcing}", objective=name, forcing=forcing, beams=beams, tau=tau)
        for name in ("kl", "rkl", "jsd")
        for forcing, beams, tau in (("greedy", 1, 2.0), ("beam", None, 3.0), ("sample", 4, 2.5))
    ]
    figure = charts.radar_objectives(only_scope(runs))
    assert isinstance(figure, Figure)
    lines = {line.get_label(): set(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert lines["one trajectory per prompt"] == {2.0}
    assert lines["several trajectories per prompt"] == {3.0}


def test_qualities_of_two_metrics_share_no_axis() -> None:
    runs = [a_run("a", quality=1.0, quality_metric="COMET")]
    runs += [a_run("b", objective="rkl", quality=50.0, quality_metric="chrF")]
    assert "COMET, chrF" in str(charts.quality(only_scope(runs)))


def test_drawing_twice_gives_the_same_files() -> None:
    scope = only_scope([a_run("a"), a_run("b", beams=8), a_run("c", objective="none", tau=2.0)])
    first, second = draw_plots(scope)[0], draw_plots(scope)[0]
    assert [p.name for p in first] == ["beams"]
    assert first[0].file_svg == second[0].file_svg


def test_figures_hold_the_figures(drawn: tuple[PlotImage, ...]) -> None:
    texts = {picture.name: re.findall(r">([^<>]+)</text>", picture.file_svg) for picture in drawn}
    assert {"1", "2", "8"} <= set(texts["beams"])
    assert "3.46" in texts["forcing"]  # TVD, 8 beams: 3.455
    assert {"1.73", "predicted from acceptance"} <= set(texts["speedup"])  # half of it
    assert {"French", "Korean", "Tamil", "Hindi"} <= set(texts["languages"])
    assert any("256,000 bytes per token" in text for text in texts["storage"])
    assert {"Hangul", "agglutinative", "South Asia", "Dravidian"} <= set(texts["gain_by_group"])


# --------------------------------------------------------------------------- files


def test_the_page_needs_nothing_but_itself_and_holds_the_ranking(
    drawn: tuple[PlotImage, ...],
) -> None:
    evil = RunMetrics(label="<script>alert(1)</script>", tau=9.0)
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
    comparison = the_comparison()
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
