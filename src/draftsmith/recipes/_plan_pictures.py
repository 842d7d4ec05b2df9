"""The figures of a plan as files, and figures.md, which shows them with their captions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from draftsmith.bench.pictures import Plot, draw
from draftsmith.plan import charts, paper
from draftsmith.plan.acceptance import AcceptanceEstimate
from draftsmith.plan.budget import TokenBudget
from draftsmith.plan.charts import Band, Curve, Panel
from draftsmith.plan.fit import AffineFit, FormFit, affine_law, per_target
from draftsmith.plan.loss import LossLaw
from draftsmith.plan.observations import Observation, TrainedModel
from draftsmith.plan.pooled import Sweep, sweep
from draftsmith.plan.setting import AcceptanceLaw, Setting
from draftsmith.plan.sizing import Sizing, best_draft
from draftsmith.provenance import write_text_atomic

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


def plane(observations: Sequence[Observation], fit: AffineFit) -> Drawing:
    plot = Plot(
        name="plane",
        title="Acceptance rate by perplexities",
        caption="The fitted plane, the measured pairs, and how far they are from it.",
    )
    law = AcceptanceLaw(A=fit.A, B=fit.B, C=fit.C)
    return plot, partial(charts.plane, observations, law)


def curves(
    observations: Sequence[Observation], fits: dict[str, dict[str, FormFit | None]]
) -> Drawing:
    plot = Plot(
        name="curves",
        title="Acceptance rate by draft perplexity",
        caption="Measured pairs with 95 % margins, and three curves fitted per target.",
    )
    return plot, partial(charts.acceptance_curves, observations, fits)


def optimum(setting: Setting, sizing: Sizing, available: tuple[float, ...]) -> Drawing:
    plot = Plot(
        name="speedup_by_size",
        title="Predicted speed-up by draft size",
        caption="The star is N*; the band is its 95 % interval from the errors of A, B and C.",
    )
    curve = Curve(label=f"M = {setting.target_params:.3g}", setting=setting, sizing=sizing)
    panel = Panel(title=setting.budget.text, curves=(curve,), available=available)
    return plot, partial(charts.draft_sizes, (panel,))


def losses(models: Sequence[TrainedModel], law: LossLaw) -> Drawing:
    plot = Plot(
        name="losses",
        title="Measured and predicted loss",
        caption="A point per run; on the dashed diagonal the fitted law is right.",
    )
    return plot, partial(charts.losses, models, law)


def acceptance(found: AcceptanceEstimate) -> Drawing:
    plot = Plot(
        name="acceptance",
        title="Acceptance by draft length and by depth",
        caption="Left: tokens per step, measured and as one rate gives them. Right: how often a "
        "drafted token was accepted, given that all before it were; the line is the maximum "
        "likelihood estimate with its 95 % interval.",
    )
    return plot, partial(charts.acceptance, found)


def pooled(found: Sweep, law: AcceptanceLaw, loss: LossLaw) -> list[Drawing]:
    return [sweep_panels(found), size_laws(found, _band(found, law, loss))]


def sweep_panels(found: Sweep) -> Drawing:
    plot = Plot(
        name="optima",
        title="The best draft size",
        caption="N* and N* / M against the target's size, the draft's data and the target's data.",
    )
    return plot, partial(charts.sweep_panels, found.optima)


def size_laws(found: Sweep, band: Band | None) -> Drawing:
    plot = Plot(
        name="size_laws",
        title="Rules for the best draft size",
        caption="Both axes are logarithmic: a power law is straight, and N* follows one.",
    )
    return plot, partial(charts.size_laws, found, band)


def of_table(number: int) -> list[Drawing]:
    """What belongs to a table of the paper."""
    return _OF_TABLES[number]()


# --------------------------------------------------------------------------- the paper's tables


def _measured(number: int) -> list[Drawing]:
    pairs = paper.pairs(number, own_perplexities=True)
    return [curves(pairs, per_target(pairs)[0])]


def _affine() -> list[Drawing]:
    pairs = paper.pairs()
    return [plane(pairs, affine_law(pairs))]


def _all_curves() -> list[Drawing]:
    pairs = paper.pairs()
    return [curves(pairs, per_target(pairs)[0])]


def _optima() -> list[Drawing]:
    law = AcceptanceLaw(cov=affine_law(paper.pairs()).cov)
    available = charts.available_sizes(paper.latencies())
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
    return [(plot, partial(charts.draft_sizes, made))]


def _latencies() -> list[Drawing]:
    plot = Plot(
        name="latency",
        title="Latency by distance from N*",
        caption=f"{paper.VALIDATED}, one prompt at a time on one GPU; whiskers are 95 % intervals.",
    )
    return [(plot, partial(charts.latencies, paper.latencies()))]


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
        setting = Setting(
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
