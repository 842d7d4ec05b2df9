"""The drawings of a plan: one function per figure. Ink is whatever text colour the caller has set.

All speed-ups are drawn with draft lengths of 0 or more: they never fall below 1.

The figures of a plan as files, and figures.md, which shows them with their captions.

The figure of `plan check`: predicted and measured, by draft size.
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
from draftsmith.plan import paper
from draftsmith.plan.acceptance import AcceptanceEstimate
from draftsmith.plan.fit import FORMS, AffineFit, FormFit, affine_law, per_target
from draftsmith.plan.ladder import QUANTITIES, RungComparison, RungPrediction
from draftsmith.plan.loss import LossLaw
from draftsmith.plan.observations import Observation, TrainedModel
from draftsmith.plan.optimum import AcceptanceLaw, SizingProblem, TokenBudget
from draftsmith.plan.paper import LatencyPoint
from draftsmith.plan.sizing import Sizing, best_draft
from draftsmith.plan.sweep import Optima, Sweep, sweep
from draftsmith.plots import Plot, draw
from draftsmith.provenance import write_text_atomic

_DASHED = (0, (4, 3))
_FAINT = 0.25
_LEAST_SHARE, _MOST_SHARE = 3e-5, 0.95
"""Of N / M, in curves against the draft size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The speed-up of one target against the size of its draft."""

    label: str
    setting: SizingProblem
    sizing: Sizing


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Curves that belong together, and draft sizes that one can have."""

    title: str
    curves: tuple[Curve, ...]
    available: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """N* against M with its interval, at one amount of data."""

    target_params: Floats
    draft_params: Floats
    low: Floats
    high: Floats


def plane(observations: Sequence[Observation], law: AcceptanceLaw) -> Figure:
    """The affine law as a surface, with the measured pairs and their distances from it."""
    draft = np.array([one.draft_ppl for one in observations])
    target = np.array([one.target_ppl for one in observations])
    alpha = np.array([one.alpha for one in observations])
    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    axis: Any = figure.subplots(subplot_kw={"projection": "3d"})
    x, y = np.meshgrid(
        np.linspace(draft.min(), draft.max(), 12), np.linspace(target.min(), target.max(), 12)
    )
    axis.plot_surface(x, y, law.alpha(x, y), alpha=0.35, color="C0", linewidth=0)
    fitted = law.alpha(draft, target)
    for place in zip(draft, target, alpha, fitted, strict=True):
        axis.plot(place[:1] * 2, place[1:2] * 2, place[2:], color="C7", linewidth=0.7)
    axis.scatter(draft, target, alpha, color="C1", s=14, depthshade=False)
    axis.set_xlabel("draft perplexity")
    axis.set_ylabel("target perplexity")
    axis.set_zlabel("acceptance rate")
    axis.view_init(elev=22, azim=-120)
    return figure


def acceptance_curves(
    observations: Sequence[Observation], fits: Mapping[str, Mapping[str, FormFit | None]]
) -> Figure | None:
    """Acceptance against draft perplexity with the fitted forms, a panel per target."""
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
            color=_ink(),
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
    _legend(figure, columns=4 if len(fits) > 2 else 2, place="outside upper center")
    return figure


def draft_sizes(panels: Sequence[Panel]) -> Figure:
    """Speed-up against the draft size; stars at N*, black marks at sizes that one can have."""
    figure = Figure(figsize=(max(6.4, 3.6 * len(panels)), 4.2), layout="constrained")
    axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    for axis, panel in zip(axes, panels, strict=True):
        for curve in panel.curves:
            M, colour = curve.setting.target_params, f"C{labels.index(curve.label) % 10}"
            sizes = np.geomspace(_LEAST_SHARE * M, _MOST_SHARE * M, 400)
            axis.plot(sizes, curve.setting.speedup(sizes), color=colour, label=curve.label)
            best = curve.sizing.best
            if best is not None:
                axis.plot(best.params, best.speedup, "*", color=colour, markersize=13)
            if curve.sizing.ci95 is not None:
                axis.axvspan(*curve.sizing.ci95, color=colour, alpha=0.15, linewidth=0)
            had = [size for size in panel.available if size < M]
            axis.plot(had, curve.setting.speedup(had) if had else [], "x", color=_ink())
        axis.axhline(1.0, color=_ink(), linewidth=0.9, linestyle=_DASHED)
        axis.set_xscale("log")
        axis.set_title(panel.title)
        axis.set_xlabel("draft parameters N")
    axes[0].set_ylabel("predicted speed-up")
    _legend(figure)
    return figure


def latencies(points: Sequence[LatencyPoint]) -> Figure:
    """Measured latency against the distance from N*, a colour per draft family."""
    names = {"ttft": "time to first token", "ttot": "total time", "tpot": "time per token"}
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
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
        axis.axvline(0.0, color=_ink(), linewidth=0.9, linestyle=_DASHED)
        axis.set_xlabel("|N - N*| / M")
        axis.set_ylabel(f"{label} (s)")
        axis.set_ylim(bottom=0)
    _legend(figure)
    return figure


def sweep_panels(optima: Optima) -> Figure:
    """N* and N* / M against M, D and D'; what is not on the axis is in the middle of its range."""
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharex="col")
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
            axis.set_xscale("linear" if name == "M" else "log")
            axis.set_ylabel(size_name)
            axis.grid(color="C7", alpha=_FAINT, linewidth=0.6)
        ends = f"{values[0]:.2g} (dark) to {values[-1]:.2g}"
        axes[0][column].set_title(f"{other_name}: {ends}", fontsize=9, fontweight="normal")
        axes[1][column].set_xlabel(label)
    return figure


def size_laws(found: Sweep, band: Band | None) -> Figure:
    """N* against M on logarithmic axes: the optima, the line of eq. 11, the power law, the band."""
    M = found.optima.target_params
    x = np.geomspace(M.min() / 10, M.max() * 10, 200)
    rule, power = found.table9.estimates, found.power_law
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axis = figure.subplots()
    axis.plot(M, found.optima.draft_params, ".", color=_ink(), markersize=3, label="optima")
    axis.plot(x, rule["mu"] * x + rule["M0"], "--", label="line (eq. 11)")
    axis.plot(x, power.factor * x**power.exponent, label=f"power law, M^{power.exponent:.3f}")
    if band is not None:
        axis.plot(band.target_params, band.draft_params, ":", color="C2", label="solved N*")
        axis.fill_between(
            band.target_params, band.low, band.high, color="C2", alpha=_FAINT, linewidth=0,
            label="95 % from the errors of A, B, C",
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("target parameters M")
    axis.set_ylabel("best draft size N*")
    _legend(figure, columns=3)
    return figure


def losses(models: Sequence[TrainedModel], law: LossLaw) -> Figure:
    """Measured against predicted loss: on the diagonal the law is right."""
    measured = np.array([one.loss for one in models])
    predicted = law.loss([one.params for one in models], [one.tokens for one in models])
    ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
    figure = Figure(figsize=(4.8, 4.4), layout="constrained")
    axis = figure.subplots()
    axis.plot(ends, ends, color=_ink(), linewidth=0.9, linestyle=_DASHED)
    axis.plot(predicted, measured, "o", markersize=4)
    axis.set_xlabel("predicted loss (nats)")
    axis.set_ylabel("measured loss (nats)")
    return figure


def acceptance(found: AcceptanceEstimate) -> Figure:
    """Tokens per step by draft length with both estimates, and acceptance by depth."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    by_length, by_depth = figure.subplots(1, 2)
    lengths = np.array(list(found.tokens_per_step))
    tokens = list(found.tokens_per_step.values())
    by_length.plot(lengths, tokens, "o", color=_ink(), label="measured")
    x = np.linspace(0, lengths.max(), 100)
    rates = {"least squares": found.least_squares, "maximum likelihood": found.mle}
    for style, (name, rate) in zip(("-", "--"), rates.items(), strict=True):
        by_length.plot(x, tokens_per_step(rate.alpha, x), style, label=name)
    by_length.set_xlabel("draft length (tokens)")
    by_length.set_ylabel("tokens per step")
    tried = {depth: rate for depth, rate in enumerate(found.by_depth, start=1) if rate is not None}
    by_depth.plot(list(tried), list(tried.values()), "o", color=_ink())
    by_depth.axhline(found.mle.alpha, color="C1", linestyle="--")
    if found.mle.ci95 is not None:
        by_depth.axhspan(*found.mle.ci95, color="C1", alpha=_FAINT, linewidth=0)
    by_depth.set_xlabel("depth")
    by_depth.set_ylabel("accepted, given all before")
    by_depth.set_ylim(-0.03, 1.03)
    for axis in (by_length, by_depth):
        axis.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure)
    return figure


def available_sizes(points: Sequence[LatencyPoint]) -> dict[str, tuple[float, ...]]:
    """Draft sizes by family."""
    found: dict[str, tuple[float, ...]] = {}
    for point in points:
        found[point.family] = (*found.get(point.family, ()), point.params)
    return found


# --------------------------------------------------------------------------- inside


def _grid_of_panels(count: int, columns: int = 4) -> tuple[Figure, list[Any]]:
    across = min(count, columns)
    down = -(-count // across)
    figure = Figure(figsize=(2.4 * across + 0.8, 2.0 * down + 0.8), layout="constrained")
    axes = [axis for row in figure.subplots(down, across, squeeze=False) for axis in row]
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


def _middle(values: Floats) -> float:
    distinct = np.unique(values)
    return float(distinct[len(distinct) // 2])


def _shade(place: int, count: int) -> Any:
    """From dark to light, without the lightest, which paper swallows."""
    return matplotlib.colormaps["viridis"](0.85 * place / max(1, count - 1))


def _ink() -> str:
    return str(matplotlib.rcParams["text.color"])


def _legend(figure: Figure, columns: int = 4, place: str = "outside lower center") -> None:
    """One for all panels, whichever of them have what it names."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc=place, ncols=columns)


Drawing = tuple[Plot, Callable[[], Figure | None]]
_BAND_POINTS = 13
_BAND_TOKENS = 1e13


def save(drawings: Iterable[Drawing], folder: Path) -> None:
    """Write each for which there is something to draw as SVG and PNG."""
    pages = []
    for plot, figure in drawings:
        picture = draw(plot, figure)
        if picture is not None:
            picture.save(folder)
            shown = f"![{picture.title}]({picture.name}.png)"
            pages.append(f"# {picture.title}\n\n{shown}\n\n{picture.caption}\n")
    if pages:
        write_text_atomic(folder / "figures.md", "\n".join(pages))


def plane_drawing(observations: Sequence[Observation], fit: AffineFit) -> Drawing:
    plot = Plot(
        name="plane",
        title="Acceptance rate by perplexities",
        caption="The fitted plane, the measured pairs, and how far they are from it.",
    )
    law = AcceptanceLaw(A=fit.A, B=fit.B, C=fit.C)
    return plot, partial(plane, observations, law)


def curves(
    observations: Sequence[Observation], fits: dict[str, dict[str, FormFit | None]]
) -> Drawing:
    plot = Plot(
        name="curves",
        title="Acceptance rate by draft perplexity",
        caption="Measured pairs with 95 % margins, and three curves fitted per target.",
    )
    return plot, partial(acceptance_curves, observations, fits)


def optimum(setting: SizingProblem, sizing: Sizing, available: tuple[float, ...]) -> Drawing:
    plot = Plot(
        name="speedup_by_size",
        title="Predicted speed-up by draft size",
        caption="The star is N*; the band is its 95 % interval from the errors of A, B and C.",
    )
    curve = Curve(label=f"M = {setting.target_params:.3g}", setting=setting, sizing=sizing)
    panel = Panel(title=setting.budget.text, curves=(curve,), available=available)
    return plot, partial(draft_sizes, (panel,))


def losses_drawing(models: Sequence[TrainedModel], law: LossLaw) -> Drawing:
    plot = Plot(
        name="losses",
        title="Measured and predicted loss",
        caption="A point per run; on the dashed diagonal the fitted law is right.",
    )
    return plot, partial(losses, models, law)


def acceptance_drawing(found: AcceptanceEstimate) -> Drawing:
    plot = Plot(
        name="acceptance",
        title="Acceptance by draft length and by depth",
        caption="Left: tokens per step, measured and as one rate gives them. Right: how often a "
        "drafted token was accepted, given that all before it were; the line is the maximum "
        "likelihood estimate with its 95 % interval.",
    )
    return plot, partial(acceptance, found)


def pooled(found: Sweep, law: AcceptanceLaw, loss: LossLaw) -> list[Drawing]:
    return [sweep_panels_drawing(found), size_laws_drawing(found, _band(found, law, loss))]


def sweep_panels_drawing(found: Sweep) -> Drawing:
    plot = Plot(
        name="optima",
        title="The best draft size",
        caption="N* and N* / M against the target's size, the draft's data and the target's data.",
    )
    return plot, partial(sweep_panels, found.optima)


def size_laws_drawing(found: Sweep, band: Band | None) -> Drawing:
    plot = Plot(
        name="size_laws",
        title="Rules for the best draft size",
        caption="Both axes are logarithmic: a power law is straight, and N* follows one.",
    )
    return plot, partial(size_laws, found, band)


def of_table(number: int) -> list[Drawing]:
    """What belongs to a table of the paper."""
    return _OF_TABLES[number]()


# --------------------------------------------------------------------------- the paper's tables


def _measured(number: int) -> list[Drawing]:
    pairs = paper.pairs(number, own_perplexities=True)
    return [curves(pairs, per_target(pairs)[0])]


def _affine() -> list[Drawing]:
    pairs = paper.pairs()
    return [plane_drawing(pairs, affine_law(pairs))]


def _all_curves() -> list[Drawing]:
    pairs = paper.pairs()
    return [curves(pairs, per_target(pairs)[0])]


def _optima() -> list[Drawing]:
    law = AcceptanceLaw(cov=affine_law(paper.pairs()).cov)
    available = available_sizes(paper.latencies())
    panels: dict[str, list[Curve]] = {}
    for row in paper.optima():
        setting = replace(row.setting, law=law)
        curve = Curve(label=row.target, setting=setting, sizing=best_draft(setting))
        panels.setdefault(row.family, []).append(curve)
    plot = Plot(
        name="speedup_by_size",
        title="Predicted speed-up by draft size",
        caption="Stars are N* with the 95 % interval from the errors of A, B and C; crosses are "
        "drafts that can be had.",
    )
    made = [
        Panel(title=f"{family} drafts", curves=tuple(some), available=available[family])
        for family, some in panels.items()
    ]
    return [(plot, partial(draft_sizes, made))]


def _latencies() -> list[Drawing]:
    plot = Plot(
        name="latency",
        title="Latency by distance from N*",
        caption=f"{paper.VALIDATED}, one prompt at a time on one GPU; whiskers are 95 % intervals.",
    )
    return [(plot, partial(latencies, paper.latencies()))]


def _pooled() -> list[Drawing]:
    law = AcceptanceLaw(cov=affine_law(paper.pairs()).cov)
    return pooled(sweep("paper"), law, LossLaw())


def _band(found: Sweep, law: AcceptanceLaw, loss: LossLaw) -> Band | None:
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
    M, N, low, high = np.array(rows).T
    return Band(target_params=M, draft_params=N, low=low, high=high)


_OF_TABLES: dict[int, Callable[[], list[Drawing]]] = {
    1: partial(_measured, 1),
    2: partial(_measured, 2),
    3: _affine,
    4: _all_curves,
    5: _optima,
    6: _latencies,
    7: _pooled,
    8: _pooled,
    9: _pooled,
}


_LABELS = {"alpha": "acceptance rate", "tau": "tokens per step", "speedup": "speed-up"}
_MARKERS = {"pretrained": "o", "distilled": "^"}


def predicted_measured(
    predictions: Sequence[RungPrediction], rows: Sequence[RungComparison]
) -> Drawing:
    plot = Plot(
        name="predicted_measured",
        title="Predicted and measured",
        caption="Bands are the 95 % intervals of the predictions, for drafts as they are "
        "pre-trained; whiskers are those of the measurements.",
    )
    return plot, partial(_panels, predictions, rows)


def _panels(predictions: Sequence[RungPrediction], rows: Sequence[RungComparison]) -> Figure:
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    for axis, quantity in zip(figure.subplots(1, len(QUANTITIES)), QUANTITIES, strict=True):
        _predicted(axis, predictions, quantity)
        _measured_points(axis, [row for row in rows if row.quantity == quantity])
        axis.set_xscale("log")
        axis.set_xlabel("draft parameters N")
        axis.set_ylabel(_LABELS[quantity])
    ink = str(matplotlib.rcParams["text.color"])
    figure.axes[-1].axhline(1.0, color=ink, linewidth=0.9, linestyle=_DASHED)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _predicted(axis: Any, predictions: Sequence[RungPrediction], quantity: str) -> None:
    ordered = sorted(predictions, key=lambda one: one.params)
    sizes = [one.params for one in ordered]
    estimates = [one.estimates[quantity] for one in ordered]
    values = np.array([one.value for one in estimates])
    below, above = np.array([one.reach for one in estimates]).T
    axis.plot(sizes, values, marker=".", label="predicted")
    axis.fill_between(sizes, values - below, values + above, color="C0", alpha=0.2, linewidth=0)


def _measured_points(axis: Any, rows: Sequence[RungComparison]) -> None:
    for place, (kind, marker) in enumerate(_MARKERS.items(), start=1):
        own = [row for row in rows if row.kind == kind]
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
