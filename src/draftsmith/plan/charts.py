"""The drawings of a plan: one function per figure. Ink is whatever text colour the caller has set.

All speed-ups are drawn with draft lengths of 0 or more: they never fall below 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from draftsmith.plan.acceptance import AcceptanceEstimate
from draftsmith.plan.fit import FORMS, FormFit
from draftsmith.plan.loss import LossLaw
from draftsmith.plan.observations import Observation, TrainedModel
from draftsmith.plan.paper import LatencyPoint
from draftsmith.plan.pooled import Optima, Sweep
from draftsmith.plan.setting import AcceptanceLaw, Setting
from draftsmith.plan.sizing import Sizing
from draftsmith.speedup import Floats, tokens_per_step

_DASHED = (0, (4, 3))
_FAINT = 0.25
_LEAST_SHARE, _MOST_SHARE = 3e-5, 0.95
"""Of N / M, in curves against the draft size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The speed-up of one target against the size of its draft."""

    label: str
    setting: Setting
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
