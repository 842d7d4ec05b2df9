"""The plots of a plan, and figures.md, which shows them with their captions.

All speed-ups are drawn with draft lengths of 0 or more: they never fall below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from draftsmith.core.speedup import Floats, tokens_per_step
from draftsmith.plan import tables
from draftsmith.plan.acceptance import AcceptanceEstimate
from draftsmith.plan.fit import FORMS, AffineFit, FormFit, affine_law, per_target
from draftsmith.plan.ladder import QUANTITIES, RungComparison, RungPrediction
from draftsmith.plan.observations import Observation, TrainedModel
from draftsmith.plan.optimum import (
    AcceptanceLaw,
    LossLaw,
    Sizing,
    SizingProblem,
    TokenBudget,
    best_draft,
)
from draftsmith.plan.sweep import Optima, Sweep, sweep
from draftsmith.plan.tables import LatencyPoint
from draftsmith.plots import PlotImage, blank, ink, legend_below, panel, plot, reference
from draftsmith.provenance import write_text_atomic

_FAINT = 0.25
_LEAST_SHARE, _MOST_SHARE = 3e-5, 0.95
"""The range of N / M in curves against the draft size."""
_BAND_POINTS = 13
_BAND_TOKENS = 1e13
_LABELS = {"alpha": "acceptance rate", "tau": "tokens per step", "speedup": "speed-up"}
_MARKERS = {"pretrained": "o", "distilled": "^"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The speed-up of one target against the size of its draft."""

    label: str
    setting: SizingProblem
    sizing: Sizing


@plot(name="plane", title="Acceptance rate by perplexities")
def plane(observations: Sequence[Observation], fit: AffineFit) -> Figure:
    """The fitted plane, the measured pairs, and how far they are from it."""
    law = AcceptanceLaw(A=fit.A, B=fit.B, C=fit.C)
    draft = np.array([one.draft_ppl for one in observations])
    target = np.array([one.target_ppl for one in observations])
    alpha = np.array([one.alpha for one in observations])
    figure, axis = panel(7.6, 5.6, projection="3d")
    x, y = np.meshgrid(
        np.linspace(draft.min(), draft.max(), 12), np.linspace(target.min(), target.max(), 12)
    )
    axis.plot_surface(x, y, law.alpha(x, y), alpha=0.35, color="C0", linewidth=0)
    fitted = law.alpha(draft, target)
    for place in zip(draft, target, alpha, fitted, strict=True):
        axis.plot(place[:1] * 2, place[1:2] * 2, place[2:], color="C7", linewidth=0.7)
    axis.scatter(draft, target, alpha, color="C1", s=14, depthshade=False)
    axis.set(xlabel="draft perplexity", ylabel="target perplexity", zlabel="acceptance rate")
    axis.view_init(elev=22, azim=-120)
    return figure


@plot(name="curves", title="Acceptance rate by draft perplexity")
def acceptance_curves(
    observations: Sequence[Observation], fits: Mapping[str, Mapping[str, FormFit | None]]
) -> Figure | None:
    """Measured pairs with 95 % margins, and three curves fitted per target."""
    if not fits:
        return None
    figure, axes = _grid_of_panels(len(fits))
    for axis, (target, forms) in zip(axes, fits.items(), strict=True):
        own = [one for one in observations if one.target == target]
        draft = np.array([one.draft_ppl for one in own])
        axis.errorbar(
            draft,
            [one.alpha for one in own],
            yerr=[one.moe or 0.0 for one in own],
            linestyle="none",
            marker="o",
            markersize=3.5,
            color=ink(),
            label="measured",
        )
        x = np.linspace(draft.min(), draft.max(), 100)
        for place, (form, style) in enumerate(zip(FORMS, ("-", "--", ":"), strict=True)):
            fit = forms[form]
            if fit is not None:
                values = FORMS[form](x, *fit.params)
                axis.plot(x, values, style, color=f"C{place}", linewidth=1.2, label=form)
        axis.set_title(target)
    figure.supxlabel("draft perplexity")
    figure.supylabel("acceptance rate")
    # above: the common label of the x axes is below
    legend_below(figure, columns=4 if len(fits) > 2 else 2, place="outside upper center")
    return figure


def draft_sizes(
    panels: Mapping[str, Sequence[Curve]], available: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw the speed-up by draft size, a panel per title; stars at N*, crosses at the sizes that
    are available there."""
    figure = blank(max(6.4, 3.6 * len(panels)), 4.2)
    axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for curve in curves:
            M, colour = curve.setting.target_params, f"C{labels.index(curve.label) % 10}"
            sizes = np.geomspace(_LEAST_SHARE * M, _MOST_SHARE * M, 400)
            axis.plot(sizes, curve.setting.speedup(sizes), color=colour, label=curve.label)
            best = curve.sizing.best
            if best is not None:
                axis.plot(best.params, best.speedup, "*", color=colour, markersize=13)
            if curve.sizing.ci95 is not None:
                axis.axvspan(*curve.sizing.ci95, color=colour, alpha=0.15, linewidth=0)
            had = [size for size in available.get(title, ()) if size < M]
            axis.plot(had, curve.setting.speedup(had) if had else [], "x", color=ink())
        axis.axhline(1.0, **reference())
        axis.set(xscale="log", title=title, xlabel="draft parameters N")
    axes[0].set_ylabel("predicted speed-up")
    legend_below(figure)
    return figure


@plot(
    name="latency",
    title="Latency by distance from N*",
    caption=f"{tables.VALIDATED}, one prompt at a time on one GPU; whiskers are 95 % intervals.",
)
def latencies(points: Sequence[LatencyPoint]) -> Figure:
    names = {"ttft": "time to first token", "ttot": "total time", "tpot": "time per token"}
    figure = blank(9.6, 3.6)
    axes = list(figure.subplots(1, len(names)))
    families = list(dict.fromkeys(point.family for point in points))
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for family in families:
            own = [point for point in points if point.family == family]
            values, margins = zip(*(point.seconds[name] for point in own), strict=True)
            axis.errorbar(
                [point.distance for point in own],
                values,
                yerr=margins,
                marker="o",
                markersize=4,
                capsize=3,
                linewidth=1,
                label=f"{family} drafts",
            )
        axis.axvline(0.0, **reference())
        axis.set(xlabel="|N - N*| / M", ylabel=f"{label} (s)")
        axis.set_ylim(bottom=0)
    legend_below(figure)
    return figure


@plot(name="optima", title="The best draft size")
def sweep_panels(optima: Optima) -> Figure:
    """N* and N* / M against the target's size, the draft's data and the target's data."""
    figure = blank(9.6, 5.6)
    axes = figure.subplots(2, 3, sharex="col")
    # what is not on the axis of a panel stays mid-range
    columns = {
        "M": ("target parameters M", optima.target_params, optima.draft_tokens, "D"),
        "D": ("draft tokens D", optima.draft_tokens, optima.target_params, "M"),
        "D'": ("target tokens D'", optima.target_tokens, optima.target_params, "M"),
    }
    fixed = {"M": optima.target_tokens, "D": optima.target_tokens, "D'": optima.draft_tokens}
    sizes = {"N*": optima.draft_params, "N* / M": optima.draft_params / optima.target_params}
    for column, (name, (label, x, other, other_name)) in enumerate(columns.items()):
        kept = fixed[name] == _middle(fixed[name])
        values = np.unique(other)
        for row, (size_name, size) in enumerate(sizes.items()):
            axis = axes[row][column]
            for place, value in enumerate(values):
                own = kept & (other == value)
                colour = _shade(place, len(values))
                axis.plot(x[own], size[own], marker=".", color=colour, linewidth=1)
            axis.set(xscale="linear" if name == "M" else "log", ylabel=size_name)
            axis.grid(color="C7", alpha=_FAINT, linewidth=0.6)
        ends = f"{values[0]:.2g} (dark) to {values[-1]:.2g}"
        axes[0][column].set_title(f"{other_name}: {ends}", fontsize=9, fontweight="normal")
        axes[1][column].set_xlabel(label)
    return figure


@plot(name="size_laws", title="Rules for the best draft size")
def size_laws(found: Sweep, band: Floats | None) -> Figure:
    """Both axes are logarithmic: a power law is straight, and N* follows one."""
    M = found.optima.target_params
    x = np.geomspace(M.min() / 10, M.max() * 10, 200)
    rule, power = found.table9.estimates, found.power_law
    figure, axis = panel(6.4, 4.4)
    axis.plot(M, found.optima.draft_params, ".", color=ink(), markersize=3, label="optima")
    axis.plot(x, rule["mu"] * x + rule["M0"], "--", label="line (eq. 11)")
    axis.plot(x, power.factor * x**power.exponent, label=f"power law, M^{power.exponent:.3f}")
    if band is not None:
        targets, solved, low, high = band  # M, N* and the ends of its interval
        axis.plot(targets, solved, ":", color="C2", label="solved N*")
        style: dict[str, Any] = {"color": "C2", "alpha": _FAINT, "linewidth": 0}
        axis.fill_between(targets, low, high, label="95 % from the errors of A, B, C", **style)
    axis.set(xscale="log", yscale="log")
    axis.set(xlabel="target parameters M", ylabel="best draft size N*")
    legend_below(figure, columns=3)
    return figure


@plot(name="losses", title="Measured and predicted loss")
def losses(models: Sequence[TrainedModel], law: LossLaw) -> Figure:
    """A point per run; on the dashed diagonal the fitted law is right."""
    measured = np.array([one.loss for one in models])
    predicted = law.loss([one.params for one in models], [one.tokens for one in models])
    ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
    figure, axis = panel(4.8, 4.4)
    axis.plot(ends, ends, **reference())
    axis.plot(predicted, measured, "o", markersize=4)
    axis.set(xlabel="predicted loss (nats)", ylabel="measured loss (nats)")
    return figure


@plot(name="acceptance", title="Acceptance by draft length and by depth")
def acceptance(found: AcceptanceEstimate) -> Figure:
    """Left: tokens per step, measured and as one rate gives them. Right: how often a drafted token
    was accepted, given that all before it were; the line is the maximum likelihood estimate with
    its 95 % interval."""
    figure = blank(8.4, 3.8)
    by_length, by_depth = figure.subplots(1, 2)
    lengths = np.array(list(found.tokens_per_step))
    tokens = list(found.tokens_per_step.values())
    by_length.plot(lengths, tokens, "o", color=ink(), label="measured")
    x = np.linspace(0, lengths.max(), 100)
    rates = {"least squares": found.least_squares, "maximum likelihood": found.mle}
    for style, (name, rate) in zip(("-", "--"), rates.items(), strict=True):
        by_length.plot(x, tokens_per_step(rate.alpha, x), style, label=name)
    by_length.set(xlabel="draft length (tokens)", ylabel="tokens per step")
    tried = {depth: rate for depth, rate in enumerate(found.by_depth, start=1) if rate is not None}
    by_depth.plot(list(tried), list(tried.values()), "o", color=ink())
    by_depth.axhline(found.mle.alpha, color="C1", linestyle="--")
    if found.mle.ci95 is not None:
        by_depth.axhspan(*found.mle.ci95, color="C1", alpha=_FAINT, linewidth=0)
    by_depth.set(xlabel="depth", ylabel="accepted, given all before", ylim=(-0.03, 1.03))
    for axis in (by_length, by_depth):
        axis.xaxis.get_major_locator().set_params(integer=True)
    legend_below(figure)
    return figure


# --------------------------------------------------------------------------- inside


def _grid_of_panels(count: int, columns: int = 4) -> tuple[Figure, list[Any]]:
    across = min(count, columns)
    down = -(-count // across)
    figure = blank(2.4 * across + 0.8, 2.0 * down + 0.8)
    axes = [axis for row in figure.subplots(down, across, squeeze=False) for axis in row]
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


def _middle(values: Floats) -> float:
    distinct = np.unique(values)
    return float(distinct[len(distinct) // 2])


def _shade(place: int, count: int) -> Any:
    """Pick a colour from dark to light, without the lightest, which paper swallows."""
    return matplotlib.colormaps["viridis"](0.85 * place / max(1, count - 1))


def save(images: Iterable[PlotImage | None], folder: Path) -> None:
    """Write every plot as SVG and PNG, and their captions as figures.md."""
    pages = []
    for image in images:
        if image is not None:
            image.save(folder)
            shown = f"![{image.title}]({image.name}.png)"
            pages.append(f"# {image.title}\n\n{shown}\n\n{image.caption}\n")
    if pages:
        write_text_atomic(folder / "figures.md", "\n".join(pages))


@plot(name="speedup_by_size", title="Predicted speed-up by draft size")
def optimum(problem: SizingProblem, sizing: Sizing, available: tuple[float, ...]) -> Figure:
    """The star is N*; the band is its 95 % interval from the errors of A, B and C."""
    curve = Curve(label=f"M = {problem.target_params:.3g}", setting=problem, sizing=sizing)
    title = problem.budget.text
    return draft_sizes({title: [curve]}, {title: available})


def pooled(found: Sweep, law: AcceptanceLaw, loss: LossLaw) -> list[PlotImage | None]:
    """Draw the optima of a sweep, and the rules that were fitted to them."""
    return [sweep_panels.draw(found.optima), size_laws.draw(found, _band(found, law, loss))]


# --------------------------------------------------------------------------- the paper's tables


def of_table(number: int) -> list[PlotImage | None]:
    """Draw the plots that belong to a table of the paper."""
    return _OF_TABLES[number]()


def _curves(table: int | None) -> list[PlotImage | None]:
    pairs = tables.pairs(table, own_perplexities=table is not None)
    return [acceptance_curves.draw(pairs, per_target(pairs)[0])]


@plot(name="speedup_by_size", title="Predicted speed-up by draft size")
def paper_optima() -> Figure:
    """Stars are N* with the 95 % interval from the errors of A, B and C; crosses are drafts that
    can be had."""
    law = _paper_law()
    available: dict[str, list[float]] = {}
    for point in tables.latencies():
        available.setdefault(f"{point.family} drafts", []).append(point.params)
    panels: dict[str, list[Curve]] = {}
    for row in tables.optima():
        problem = replace(row.setting, law=law)
        curve = Curve(label=row.target, setting=problem, sizing=best_draft(problem))
        panels.setdefault(f"{row.family} drafts", []).append(curve)
    return draft_sizes(panels, available)


def _paper_law() -> AcceptanceLaw:
    return AcceptanceLaw(cov=affine_law(tables.pairs()).cov)


def _pooled() -> list[PlotImage | None]:
    return pooled(sweep("paper"), _paper_law(), LossLaw())


_OF_TABLES: dict[int, Callable[[], list[PlotImage | None]]] = {
    1: partial(_curves, 1),
    2: partial(_curves, 2),
    3: lambda: [plane.draw(tables.pairs(), affine_law(tables.pairs()))],
    4: partial(_curves, None),
    5: lambda: [paper_optima.draw()],
    6: lambda: [latencies.draw(tables.latencies())],
    7: _pooled,
    8: _pooled,
    9: _pooled,
}


def _band(found: Sweep, law: AcceptanceLaw, loss: LossLaw) -> Floats | None:
    if law.cov is None:
        return None
    ends = found.optima.target_params
    targets = np.geomspace(ends.min() / 10, ends.max() * 10, _BAND_POINTS)
    rows = []
    for target_params in targets:
        setting = SizingProblem(
            target_params=float(target_params),
            target_tokens=_BAND_TOKENS,
            budget=TokenBudget(amount=_BAND_TOKENS),
            law=law,
            loss=loss,
        )
        sizing = best_draft(setting)
        if sizing.best is not None and sizing.ci95 is not None:
            rows.append((target_params, sizing.best.params, *sizing.ci95))
    if not rows:
        return None
    return np.array(rows).T


@plot(name="predicted_measured", title="Predicted and measured")
def predicted_measured(
    predictions: Sequence[RungPrediction], rows: Sequence[RungComparison]
) -> Figure:
    """Bands are the 95 % intervals of the predictions, for drafts as they are pre-trained; whiskers
    are those of the measurements."""
    figure = blank(9.6, 3.6)
    ordered = sorted(predictions, key=lambda one: one.params)
    sizes = [one.params for one in ordered]
    for axis, quantity in zip(figure.subplots(1, len(QUANTITIES)), QUANTITIES, strict=True):
        estimates = [one.estimates[quantity] for one in ordered]
        values = np.array([one.value for one in estimates])
        below, above = np.array([one.reach for one in estimates]).T
        axis.plot(sizes, values, marker=".", label="predicted")
        axis.fill_between(sizes, values - below, values + above, color="C0", alpha=0.2, linewidth=0)
        for place, (kind, marker) in enumerate(_MARKERS.items(), start=1):
            own = [row for row in rows if (row.quantity, row.kind) == (quantity, kind)]
            axis.errorbar(
                [row.params for row in own],
                [row.measured.value for row in own],
                yerr=np.array([row.measured.reach for row in own]).reshape(-1, 2).T,
                linestyle="none",
                marker=marker,
                color=f"C{place}",
                capsize=3,
                label=f"measured, {kind}",
            )
        axis.set(xscale="log", xlabel="draft parameters N", ylabel=_LABELS[quantity])
    figure.axes[-1].axhline(1.0, **reference())
    legend_below(figure, figure.axes[:1], columns=3)
    return figure
