"""The plots of a plan, and figures.md, which shows them with their captions.

All speed-ups are drawn with draft lengths of 0 or more: they never fall below 1.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from draftsmith.core.speedup import Floats, tokens_per_step
from draftsmith.plan import tables
from draftsmith.plan.acceptance import AcceptanceEstimate
from draftsmith.plan.fit import FORMS, AffineFit, FormFit, affine_law, per_target
from draftsmith.plan.ladder import Estimate, Rung, RungComparison
from draftsmith.plan.observations import Observation, TrainedModel, columns
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


Curves = Mapping[str, tuple[SizingProblem, Sizing]]
"""Targets of one panel, by their labels, and the best drafts for them."""


@plot(name="plane", title="Acceptance rate by perplexities")
def plane(observations: Sequence[Observation], fit: AffineFit) -> Figure:
    """The fitted plane, the measured pairs, and how far they are from it."""
    law = AcceptanceLaw(fit.A, fit.B, fit.C)
    draft, target, alpha = columns(observations, "draft_ppl", "target_ppl", "alpha")
    figure, axis = panel(7.6, 5.6, projection="3d")
    x, y = np.meshgrid(*(np.linspace(ppl.min(), ppl.max(), 12) for ppl in (draft, target)))
    axis.plot_surface(x, y, law.alpha(x, y), alpha=0.35, color="C0", linewidth=0)
    for place in zip(draft, target, alpha, law.alpha(draft, target), strict=True):
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
    across, down = min(len(fits), 4), -(-len(fits) // 4)
    figure, axes = _panels(len(fits), 2.4 * across + 0.8, 2.0 * down + 0.8, across=across)
    for axis, (target, forms) in zip(axes, fits.items(), strict=True):
        own = [one for one in observations if one.target == target]
        draft, alpha, moe = np.nan_to_num(columns(own, "draft_ppl", "alpha", "moe"))
        dots = {"linestyle": "none", "marker": "o", "markersize": 3.5, "color": ink()}
        axis.errorbar(draft, alpha, yerr=moe, label="measured", **dots)
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
    panels: Mapping[str, Curves],
    available: Mapping[str, Sequence[float]],
    *,
    throughput: bool = False,
) -> Figure:
    """Draw the speed-up (or throughput) by draft size, a panel per title; stars at N*, crosses at
    the sizes that are available there. From dark to light targets grow."""
    figure, axes = _panels(len(panels), max(6.4, 3.6 * len(panels)), 4.2, sharey=True)
    sizes_of = {
        label: setting.target_params
        for curves in panels.values()
        for label, (setting, _) in curves.items()
    }
    labels = sorted(sizes_of, key=sizes_of.__getitem__)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for label in sorted(curves, key=labels.index):
            (setting, sizing), place = curves[label], labels.index(label)
            M, colour = setting.target_params, _shade(place, len(labels))
            unit = 1 / (2 * M) if throughput else 1.0
            sizes = np.geomspace(_LEAST_SHARE * M, _MOST_SHARE * M, 400)
            # dashes, since targets of one size lie on each other
            style = {"color": colour, "linestyle": ("-", "--")[place % 2]}
            axis.plot(sizes, unit * setting.speedup(sizes), label=label, **style)
            if sizing.best is not None:
                star = unit * sizing.best.speedup
                axis.plot(sizing.best.params, star, "*", color=colour, markersize=9)
            if sizing.ci95 is not None:
                axis.axvspan(*sizing.ci95, color=colour, alpha=0.15, linewidth=0)
            had = np.array([size for size in available.get(title, ()) if size < M])
            axis.plot(had, unit * setting.speedup(had), "x", color=ink())
        if not throughput:
            axis.axhline(1.0, **reference())
        axis.set(xscale="log", title=title, xlabel="draft parameters N")
    if throughput:
        axes[0].set(yscale="log", ylabel="throughput (eq. 9)")
    else:
        axes[0].set_ylabel("predicted speed-up")
    legend_below(figure, columns=5)
    return figure


@plot(
    name="latency",
    title="Latency by distance from N*",
    caption=f"{tables.VALIDATED}, one prompt at a time on one GPU; whiskers are 95 % intervals.",
)
def latencies(points: Sequence[LatencyPoint]) -> Figure:
    names = {"ttft": "time to first token", "ttot": "total time", "tpot": "time per token"}
    figure, axes = _panels(len(names), 9.6, 3.6)
    style = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1}
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for family in dict.fromkeys(point.family for point in points):
            own = [point for point in points if point.family == family]
            values, margins = zip(*(point.seconds[name] for point in own), strict=True)
            (distance,) = columns(own, "distance")
            axis.errorbar(distance, values, yerr=margins, label=f"{family} drafts", **style)
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
    M, D = ("M", optima.target_params), ("D", optima.draft_tokens)
    Dt = ("D'", optima.target_tokens)
    # by column: what is on the axis, what has a colour, and what stays mid-range
    shown = {
        "target parameters": (M, D, Dt),
        "draft tokens": (D, M, Dt),
        "target tokens": (Dt, M, D),
    }
    sizes = {"N*": optima.draft_params, "N* / M": optima.draft_params / optima.target_params}
    for column, (label, ((name, x), (other_name, other), (_, fixed))) in enumerate(shown.items()):
        values, kept = np.unique(other), np.unique(fixed)
        for row, (size_name, size) in enumerate(sizes.items()):
            axis = axes[row][column]
            for place, value in enumerate(values):
                own = (fixed == kept[len(kept) // 2]) & (other == value)
                colour = _shade(place, len(values))
                axis.plot(x[own], size[own], marker=".", color=colour, linewidth=1)
            axis.set(xscale="linear" if name == "M" else "log", ylabel=size_name)
            axis.grid(color="C7", alpha=_FAINT, linewidth=0.6)
        ends = f"{values[0]:.2g} (dark) to {values[-1]:.2g}"
        axes[0][column].set_title(f"{other_name}: {ends}", fontsize=9, fontweight="normal")
        axes[1][column].set_xlabel(f"{label} {name}")
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
    params, tokens, measured = columns(models, "params", "tokens", "loss")
    predicted = law.loss(params, tokens)
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
    figure, (by_length, by_depth) = _panels(2, 8.4, 3.8)
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


def _panels(
    count: int, width: float, height: float, *, across: int | None = None, **shared: Any
) -> tuple[Figure, list[Any]]:
    """Return a figure with so many panels, by default all in one row."""
    across = min(count, across or count)
    figure = blank(width, height)
    axes = list(figure.subplots(-(-count // across), across, squeeze=False, **shared).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


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
    title = problem.budget.text
    curves = {f"M = {problem.target_params:.3g}": (problem, sizing)}
    return draft_sizes({title: curves}, {title: available})


def pooled(found: Sweep, law: AcceptanceLaw, loss: LossLaw) -> list[PlotImage | None]:
    """Draw the optima of a sweep, and the rules that were fitted to them."""
    return [sweep_panels.draw(found.optima), size_laws.draw(found, _band(found, law, loss))]


# --------------------------------------------------------------------------- the paper's tables


def of_table(number: int) -> list[PlotImage | None]:
    """Draw the plots that belong to a table of the paper."""
    if number == 3:
        return [plane.draw(tables.pairs(), affine_law(tables.pairs()))]
    if number == 5:
        return [paper_optima.draw(), paper_throughputs.draw()]
    if number == 6:
        return [latencies.draw(tables.latencies())]
    if number >= 7:
        return _pooled()
    pairs = tables.pairs() if number == 4 else tables.pairs(number, own_perplexities=True)
    return [acceptance_curves.draw(pairs, per_target(pairs)[0])]


@plot(name="speedup_by_size", title="Predicted speed-up by draft size")
def paper_optima() -> Figure:
    """The 13 targets of Table 5, dark to light by size. Stars are N*; crosses are drafts that can
    be had. LLaMa3-70B and LLaMa3.1-70B have one curve."""
    return draft_sizes(*_paper_panels())


@plot(name="throughput_by_size", title="Predicted throughput by draft size (Figure 2)")
def paper_throughputs() -> Figure:
    """The same curves in the paper's unit, tokens per unit of memory-bound time; a curve is level
    where no draft pays."""
    return draft_sizes(*_paper_panels(), throughput=True)


def _paper_panels() -> tuple[dict[str, Curves], dict[str, list[float]]]:
    """Return the targets of Table 5 by family of drafts, and the sizes that those have."""
    available: dict[str, list[float]] = defaultdict(list)
    for point in tables.latencies():
        available[f"{point.family} drafts"].append(point.params)
    panels: dict[str, dict[str, tuple[SizingProblem, Sizing]]] = defaultdict(dict)
    for row in tables.optima():
        panels[f"{row.family} drafts"][row.target] = (row.setting, best_draft(row.setting))
    return dict(panels), available


@functools.cache
def _pooled() -> list[PlotImage | None]:
    """Draw the plots of Tables 7 to 9, which are the same."""
    return pooled(sweep("paper"), _paper_law(), LossLaw())


def _paper_law() -> AcceptanceLaw:
    return AcceptanceLaw(cov=affine_law(tables.pairs()).cov)


def _band(found: Sweep, law: AcceptanceLaw, loss: LossLaw) -> Floats | None:
    """Return M, N* and the ends of its interval where it has one."""
    if law.cov is None:
        return None
    ends = found.optima.target_params
    rows = []
    for M in np.geomspace(ends.min() / 10, ends.max() * 10, _BAND_POINTS).tolist():
        budget = TokenBudget(amount=_BAND_TOKENS)
        sizes = {"target_params": M, "target_tokens": _BAND_TOKENS, "budget": budget}
        sizing = best_draft(SizingProblem(law=law, loss=loss, **sizes))
        if sizing.best is not None and sizing.ci95 is not None:
            rows.append((M, sizing.best.params, *sizing.ci95))
    return np.array(rows).T if rows else None


@plot(name="predicted_measured", title="Predicted and measured")
def predicted_measured(predictions: Sequence[Rung], rows: Sequence[RungComparison]) -> Figure:
    """Bands are the 95 % intervals of the predictions, for drafts as they are pre-trained; whiskers
    are those of the measurements."""
    figure, axes = _panels(len(_LABELS), 9.6, 3.6)
    ordered = sorted(predictions, key=lambda one: one.params)
    (sizes,) = columns(ordered, "params")
    for axis, (quantity, label) in zip(axes, _LABELS.items(), strict=True):
        values, below, above = _reaches(getattr(one, quantity) for one in ordered)
        axis.plot(sizes, values, marker=".", label="predicted")
        axis.fill_between(sizes, values - below, values + above, color="C0", alpha=0.2, linewidth=0)
        for place, (kind, marker) in enumerate(_MARKERS.items(), start=1):
            own = [row for row in rows if (row.quantity, row.kind) == (quantity, kind)]
            (params,), (found, *reach) = (
                columns(own, "params"),
                _reaches(row.measured for row in own),
            )
            style = {"linestyle": "none", "marker": marker, "color": f"C{place}", "capsize": 3}
            axis.errorbar(params, found, yerr=reach, label=f"measured, {kind}", **style)
        axis.set(xscale="log", xlabel="draft parameters N", ylabel=label)
    figure.axes[-1].axhline(1.0, **reference())
    legend_below(figure, figure.axes[:1], columns=3)
    return figure


def _reaches(estimates: Iterable[Estimate]) -> Floats:
    """Return values and the distances of the ends of their intervals; 0 where these are not
    known."""
    ends = [(one.value, one.low, one.high) for one in estimates]
    value, low, high = np.array(ends, np.float64).reshape(-1, 3).T
    return np.nan_to_num(np.maximum([value, value - low, high - value], [[-np.inf], [0.0], [0.0]]))
