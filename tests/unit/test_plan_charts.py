"""The drawings of a plan: legends that can be read, and one colour for one thing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from draftsmith.plan import plots, tables
from draftsmith.plan.acceptance import estimate
from draftsmith.plan.fit import FORMS, per_target
from draftsmith.plan.observations import LengthCount, TrainedModel
from draftsmith.plan.optimum import LossLaw, best_draft

PAIRS = tables.pairs()
TARGETS = list(dict.fromkeys(one.target for one in PAIRS))


def labels(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def colours(figure: Figure) -> dict[str, set[str]]:
    """By label, over all panels and the legend."""
    found: dict[str, set[str]] = {}
    for axis in figure.axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label != "measured":
                found.setdefault(label, set()).add(to_hex(line.get_color()))
    (legend,) = figure.legends
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        if text.get_text() in found and handle is not None:
            found[text.get_text()].add(to_hex(handle.get_color()))
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 13])
def test_the_legend_of_the_curves_lies_within_the_figure(count: int) -> None:
    own = [one for one in PAIRS if one.target in TARGETS[:count]]
    figure = plots.acceptance_curves(own, per_target(own)[0])
    assert figure is not None and len(labels(figure)) == 4
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    inside, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= inside.x0 and inside.x1 <= whole.x1
    assert whole.y0 <= inside.y0 and inside.y1 <= whole.y1


@pytest.mark.parametrize("gone", list(FORMS))
def test_a_form_that_is_missing_in_a_panel_keeps_its_colour_and_its_name(gone: str) -> None:
    fits = {target: dict(forms) for target, forms in per_target(PAIRS)[0].items()}
    fits[TARGETS[0]][gone] = None
    figure = plots.acceptance_curves(PAIRS, fits)
    assert figure is not None and set(labels(figure)) == {"measured", *FORMS}
    found = colours(figure)
    assert all(len(colour) == 1 for colour in found.values())
    assert len(set.union(*found.values())) == len(FORMS)


def test_a_target_has_one_colour_in_all_panels() -> None:
    setting = tables.optima()[0].setting
    other = replace(setting, target_params=7e10)
    curves = {label: (one, best_draft(one)) for label, one in (("a", setting), ("b", other))}
    figure = plots.draft_sizes({"one": {"b": curves["b"]}, "both": curves}, {})
    assert sorted(labels(figure)) == ["a", "b"]
    assert all(len(colour) == 1 for colour in colours(figure).values())


@pytest.mark.parametrize("throughput", [False, True])
def test_figure_2_holds_13_targets_and_their_optima(throughput: bool) -> None:
    figure = (plots.paper_throughputs if throughput else plots.paper_optima)()
    assert len(figure.axes) == 3 and len(labels(figure)) == 13 == len(set(TARGETS))
    rows = {(f"{row.family} drafts", row.target): row for row in tables.optima()}
    assert set(labels(figure)) == {target for _, target in rows}
    best: dict[str, list[float]] = {}
    for axis in figure.axes:
        handles, names = axis.get_legend_handles_labels()
        assert sorted(names) == sorted(TARGETS)
        looks = {(to_hex(line.get_color()), line.get_linestyle()) for line in handles}
        assert len(looks) == 13
        stars = [line for line in axis.lines if line.get_marker() == "*"]
        marks = [line for line in axis.lines if line.get_marker() == "x"]
        assert len(stars) == len(marks) == 13
        by_size = []
        for curve, name, star, mark in zip(handles, names, stars, marks, strict=True):
            row = rows[axis.get_title(), name]
            M, plain = row.setting.target_params, 1.0
            if throughput:
                plain = 1 / (2 * M)
            (N,), (top,) = (np.asarray(values) for values in star.get_data())
            assert pytest.approx(float(row.n_opt), rel=1e-7) == N
            assert top * (1 if throughput else 1 / (2 * M)) == pytest.approx(
                float(row.throughput), rel=6e-4
            )
            x, y = (np.asarray(values) for values in curve.get_data())
            # up to the star and down from it, level where no draft pays
            assert y.max() <= top and y.min() >= plain * (1 - 1e-12)
            assert np.all(np.diff(y[x < N]) >= 0) and np.all(np.diff(y[x > N]) <= 0)
            assert y[-1] == pytest.approx(plain)
            sizes = np.asarray(mark.get_xdata())
            assert len(sizes) >= 3 and sizes.max() < M
            by_size.append((M, N))
            best.setdefault(name, []).append(float(N))
        assert [N for _, N in sorted(by_size)] == sorted(N for _, N in by_size)
    # better trained drafts may be smaller: OPT, Qwen1.5, Qwen2.5
    assert all(first > second > third for first, second, third in best.values())


@pytest.mark.parametrize("name", [r"$\frac{a}$", "$HOME/$USER", "a$b"])
def test_names_with_dollar_signs_are_no_formulas(name: str) -> None:
    own = [replace(one, target=name) for one in PAIRS if one.target == "OPT-13B"]
    drawn = plots.acceptance_curves.draw(own, per_target(own)[0])
    assert drawn is not None and name in drawn.file_svg
    setting = tables.optima()[0].setting
    sizes = plots.optimum.draw(setting, best_draft(setting), ())
    assert sizes is not None
    shown = re.sub("<!--.*?-->", "", sizes.file_svg, flags=re.DOTALL)
    assert "mathdefault" not in shown  # powers of ten are still set as such


def test_measured_losses_are_set_against_predicted_ones() -> None:
    law = LossLaw()
    runs = [
        TrainedModel(params=N, tokens=1e10, loss=1.1 * float(law.loss(N, 1e10)))
        for N in (1e7, 1e8, 1e9)
    ]
    diagonal, points = plots.losses(runs, law).axes[0].lines
    assert np.array_equal(diagonal.get_xdata(), diagonal.get_ydata())
    predicted, measured = (np.asarray(values) for values in points.get_data())
    assert measured == pytest.approx([one.loss for one in runs])
    assert measured == pytest.approx(1.1 * predicted)


def test_acceptance_is_drawn_by_length_and_by_depth() -> None:
    counts = [
        LengthCount(gamma=gamma, accepted=n, count=2 ** (10 - n - (n < gamma)))
        for gamma in (1, 4)
        for n in range(gamma + 1)
    ]
    found = estimate(counts)
    by_length, by_depth = plots.acceptance(found).axes
    measured, *fits = by_length.lines
    assert list(np.asarray(measured.get_ydata())) == list(found.tokens_per_step.values())
    for fit in fits:
        x, y = (np.asarray(values) for values in fit.get_data())
        assert y == pytest.approx(2 * (1 - 0.5 ** (x + 1)))
    assert list(np.asarray(by_depth.lines[0].get_ydata())) == list(found.by_depth)


def test_captions_are_written_beside_the_figures(tmp_path: Path) -> None:
    runs = [TrainedModel(params=N, tokens=N, loss=3.0) for N in (1e7, 1e8)]
    images = [plots.losses.draw(runs, LossLaw()), plots.acceptance_curves.draw(PAIRS, {})]
    plots.save(images, tmp_path)
    text = (tmp_path / "figures.md").read_text()
    assert "](losses.png)" in text and "A point per run" in text
    assert "curves" not in text  # there was nothing to draw
    assert (tmp_path / "losses.png").exists() and not (tmp_path / "curves.png").exists()
